"""The commands `consilium renew` and `consilium update-kit`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from consilium.cli.options import Format, FormatOption, emit
from consilium.core.errors import ConfigError
from consilium.flare.kit import renewal
from consilium.flare.kit.root_keys import fingerprint as root_fingerprint


def renew(
    sites: Annotated[Path, typer.Argument(metavar="SITES_YML", help="as provisioning/sites.yml")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the folder that `consilium provision -o` made kits in")],
    only: Annotated[
        list[str] | None, typer.Option("--only", help="a participant; several times for several; default: all")
    ] = None,
    root: Annotated[
        Literal["keep", "new", "only-new"],
        typer.Option(help="new: a root with another key, beside the former; only-new: the server trusts the former no longer"),
    ] = "keep",
    format: FormatOption = Format.TXT,
) -> None:
    """Make kits with new keys and certificates, and extend the root's, before the old ones end. Old kits stay valid."""
    if root == "new" and only:
        raise ConfigError("--only: not with --root new, which makes everybody's kit anew; leave it out")
    kits = renewal.renew(sites, output, only or (), root)
    fingerprint = root_fingerprint(kits.parent / "state")
    text = f"{kits}: renewed kits; each goes to its participant, who runs `consilium update-kit KIT --from NEW_KIT`"
    if root != "keep":
        text += f". The new root's fingerprint, to tell by telephone: {fingerprint}"
    renewed = sorted(only or [p.name for p in kits.iterdir()])
    emit({"kits": str(kits), "renewed": renewed, "root": fingerprint}, text, format)


def update_kit(
    kit: Annotated[Path, typer.Argument(help="the startup kit in use, stopped")],
    new: Annotated[Path, typer.Option("--from", help="the renewed kit")],
    fingerprint: Annotated[str, typer.Option(help="SHA-256 of the root's certificate, if the root has a new key")] = "",
    format: FormatOption = Format.TXT,
) -> None:
    """Put a renewed kit's startup/ in the place of the old one. local/, state and records of the kit stay as they are."""
    changed = renewal.update_kit(kit, new, fingerprint)
    text = f"{kit}: {', '.join(changed)}. Start it again; then delete {kit / renewal.OLD}, which holds the former key"
    emit({"kit": str(kit), "changed": changed}, text, format)
