"""The only package that imports nvflare."""
