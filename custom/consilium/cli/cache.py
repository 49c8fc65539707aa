"""The command `consilium data cache`."""

from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.options import FormatOption, emit
from consilium.data import store as cache_folder


def data_cache(
    folder: Annotated[Path, typer.Argument(help="what `cache: {folder:}` of site.yaml names, or else the site's state")],
    clear: Annotated[bool, typer.Option("--clear", help="remove all of it; a job that runs makes it again")] = False,
    format: FormatOption = "txt",
) -> None:
    """Show how many decoded samples a site keeps on its disk, and how large they are."""
    found = cache_folder.find_cache(folder)
    samples, size = cache_folder.cache_contents(found)
    if clear:
        cache_folder.clear_cache(found)
    text = f"{found}: {samples:,} samples, {size:,} bytes{', removed' if clear else ''}"
    emit({"folder": str(found), "samples": samples, "bytes": size, "cleared": clear}, text, format)
