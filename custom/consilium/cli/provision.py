"""The command `consilium provision`."""

from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.options import Format, FormatOption, emit
from consilium.core.errors import ConfigError
from consilium.flare.kit.local_folder import apply_local
from consilium.flare.kit.provision import provision as make

SitesArgument = Annotated[Path, typer.Argument(metavar="SITES_YML", help="as provisioning/sites.yml")]


def provision(
    sites: SitesArgument,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="make all startup kits in this folder")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="a participant that is new; several times for several; default: all")
    ] = None,
    local: Annotated[Path | None, typer.Option(help="only write local/ of this kit, which `nvflare package` made")] = None,
    format: FormatOption = Format.TXT,
) -> None:
    """Make startup kits with our policies in them, or put the policies into one that exists."""
    if (output is None) == (local is None):
        raise ConfigError("--output, --local: give exactly one: -o DIR makes kits, --local KIT changes one")
    if local and only:
        raise ConfigError("--only: is of kits that -o makes; leave it out")
    written = make(sites, output, only or ()) if output else apply_local(sites, local or Path())
    found = (
        {"kits": str(written), "participants": sorted(p.name for p in written.iterdir())} if output else {"local": str(written)}
    )
    text = f"{written}: policies written; restart the site to use them"
    if output:
        others = ["all other kits stay as they are; a running server takes the new ones without a restart"] if only else []
        root = f"{written.parent}/state holds the root key: keep it where no one else can read it"
        text = "\n".join([f"{written}: kits of {', '.join(found['participants'])}", *others, root])
    emit(found, text, format)
