"""The only package that imports nvflare. Importing it raises ConfigError if the installed nvflare is not of the 2.9 series."""

from consilium.flare.patches import check_version

check_version()
