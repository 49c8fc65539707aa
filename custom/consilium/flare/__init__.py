"""The only package that imports nvflare. Importing it checks nvflare's version, and raises ConfigError for another series."""

from consilium.flare.patches import check_version

check_version()
