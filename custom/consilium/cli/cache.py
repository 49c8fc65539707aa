"""The command `consilium data cache`."""

from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.options import FormatOption, emit
from consilium.data import store as cache_folder


def data_cache(
    folder: Annotated[
        Path, typer.Argument(help="the folder that `cache: {folder:}` in site.yaml names, or else the site's state folder")
    ],
    clear: Annotated[bool, typer.Option("--clear", help="delete the cache; the next job makes it again")] = False,
    format: FormatOption = "txt",
) -> None:
    """Show the number and size of the decoded samples in a site's cache on disk."""
    found = cache_folder.find_cache(folder)
    samples, size = cache_folder.cache_contents(found)
    if clear:
        cache_folder.clear_cache(found)
    text = f"{found}: {samples:,} samples, {size:,} bytes{', removed' if clear else ''}"
    emit({"folder": str(found), "samples": samples, "bytes": size, "cleared": clear}, text, format)
