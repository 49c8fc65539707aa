"""Local training at a site. It uses PyTorch and knows no server."""
