"""Generated data, with shifts between sites whose strength is chosen."""
