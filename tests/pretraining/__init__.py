"""How the tiny weights that the package ships were made."""
