"""The commands that keep startup kits in use: `consilium allow`, `renew`, `update-kit`, `revoke` and `metrics`."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from consilium.cli.options import Format, FormatOption, Panel
from consilium.core.errors import ConfigError

app = typer.Typer()


@app.command(rich_help_panel=Panel.DEPLOYMENT)
def allow(folder: Annotated[Path, typer.Argument(help="workspace of `nvflare simulator`, or a startup kit")]) -> None:
    """Let FLARE run our classes there, and no other name of ours: their list by the kit's role, in local/resources.json.

    It is also how a kit made by an older version is brought up to date; restart the participant after it.
    """
    from consilium.flare.kit.local_folder import update

    typer.echo(f"{update(folder)}: lists the classes that jobs may name")


@app.command(rich_help_panel=Panel.DEPLOYMENT)
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
    """Make kits with new keys, certificates and a new end of the root's, before the old ones end. Old kits stay valid."""
    from consilium.flare.kit.renewal import renew as make
    from consilium.flare.kit.root_keys import fingerprint

    if root == "new" and only:
        raise ConfigError("--only: not with --root new, which makes everybody's kit anew; leave it out")
    kits = make(sites, output, only or (), root)
    told = f"{kits}: renewed kits; each goes to its participant, who runs `consilium update-kit KIT --from NEW_KIT`"
    if root != "keep":
        told += f". The new root's fingerprint, to tell by telephone: {fingerprint(kits.parent / 'state')}"
    renewed = sorted(only or [p.name for p in kits.iterdir()])
    _print({"kits": str(kits), "renewed": renewed, "root": fingerprint(kits.parent / "state")}, told, format)


@app.command(rich_help_panel=Panel.SITE)
def update_kit(
    kit: Annotated[Path, typer.Argument(help="the startup kit in use, stopped")],
    new: Annotated[Path, typer.Option("--from", help="the renewed kit")],
    fingerprint: Annotated[str, typer.Option(help="SHA-256 of the root's certificate, if the root has a new key")] = "",
    format: FormatOption = Format.TXT,
) -> None:
    """Put a renewed kit's startup/ in the place of the old one. local/, state and records of the kit stay as they are."""
    from consilium.flare.kit.renewal import OLD
    from consilium.flare.kit.renewal import update_kit as put

    changed = put(kit, new, fingerprint)
    told = f"{kit}: {', '.join(changed)}. Start it again; then delete {kit / OLD}, which holds the former key"
    _print({"kit": str(kit), "changed": changed}, told, format)


@app.command(rich_help_panel=Panel.DEPLOYMENT)
def revoke(
    name: Annotated[str, typer.Argument(help="a site's name, or a person's address")],
    kit: Annotated[Path, typer.Option("--kit", help="the server's startup kit, at the server")],
    format: FormatOption = Format.TXT,
) -> None:
    """Have the server refuse every certificate of this name made until now, at once and without a restart."""
    from consilium.flare.kit.revocation import revoke as write

    until = write(name, kit)
    told = (
        f"{name}: certificates made until {until} are refused from now on, and jobs that run go on without it. A kit made "
        f"later is valid: `consilium renew SITES_YML -o kits --only {name}`. The server cannot know whether there is such a "
        "name: compare it with sites.yml"
    )
    _print({"name": name, "until": until}, told, format)


@app.command(rich_help_panel=Panel.SITE)
def metrics(
    kit: Annotated[Path, typer.Argument(help="a site's or the server's startup kit")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="FILE.prom for node_exporter's textfile collector")
    ] = None,
) -> None:
    """Write numbers for Prometheus: rounds, sites last seen, refusals, epsilon left, disk, certificates. Opens no port."""
    from consilium.core.storage import PUBLIC, write_atomic
    from consilium.flare.admin.metrics import HELP, collect
    from consilium.report.exposition import exposition

    text = exposition(collect(kit), HELP)
    if output is None:
        typer.echo(text, nl=False)
    elif output.suffix != ".prom":
        raise ConfigError(f"--output: {output}: the collector reads files that end in .prom; name it so")
    else:
        write_atomic(output, text.encode(), PUBLIC)


def _print(found: dict[str, Any], told: str, format: Format) -> None:
    typer.echo(json.dumps(found, indent=1) if format is Format.JSON else told)
