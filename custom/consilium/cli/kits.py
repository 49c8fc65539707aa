"""The commands `consilium allow` and `consilium revoke`."""

from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.options import Format, FormatOption, emit
from consilium.flare.kit import revocation
from consilium.flare.kit.local_folder import update


def allow(
    folders: Annotated[list[Path], typer.Argument(metavar="KIT...", help="startup kits, or a simulator's workspace")],
) -> None:
    """Let FLARE run our classes there, and no other name of ours: their list by the kit's role, in local/resources.json.

    This also brings kits of an older version up to date. Kits that `nvflare provision` or `nvflare poc` made, which have no
    policies yet, get ours. People's kits need nothing. Restart the participants after it.
    """
    for folder in folders:
        if (folder / "startup" / "fed_admin.json").is_file():
            typer.echo(f"{folder}: a person's kit; it needs no list")
        else:
            typer.echo(f"{update(folder)}: lists the classes that jobs may name")


def revoke(
    name: Annotated[str, typer.Argument(help="a site's name, or a person's address")],
    kit: Annotated[Path, typer.Option("--kit", help="the server's startup kit, at the server")],
    format: FormatOption = Format.TXT,
) -> None:
    """Have the server refuse every certificate of this name made until now, at once and without a restart."""
    until = revocation.revoke(name, kit)
    text = (
        f"{name}: certificates made until {until} are refused from now on, and running jobs go on without it. A kit made "
        f"later is valid: `consilium renew SITES_YML -o kits --only {name}`. The server does not know all names: compare "
        "this one with sites.yml"
    )
    emit({"name": name, "until": until}, text, format)
