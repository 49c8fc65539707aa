"""The command `consilium data cache`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.options import Format, FormatOption


def data_cache(
    folder: Annotated[Path, typer.Argument(help="what `cache: {folder:}` of site.yaml names, or else the site's state")],
    clear: Annotated[bool, typer.Option("--clear", help="remove all of it; a job that runs makes it again")] = False,
    format: FormatOption = Format.TXT,
) -> None:
    """Show how many decoded samples a site keeps on its disk, and how large they are."""
    from consilium.data import store as cache_folder

    found = cache_folder.find_cache(folder)
    samples, size = cache_folder.cache_contents(found)
    if clear:
        cache_folder.clear_cache(found)
    if format is Format.JSON:
        print(json.dumps({"folder": str(found), "samples": samples, "bytes": size, "cleared": clear}))
        return
    typer.echo(f"{found}: {samples:,} samples, {size:,} bytes{', removed' if clear else ''}")
