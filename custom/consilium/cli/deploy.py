"""The commands of a deployment: `consilium provision`, `export`, `doctor`, `approve` and `rank`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from consilium.cli.approve import approve
from consilium.cli.options import Format, FormatOption, Panel
from consilium.cli.rank import rank
from consilium.core.errors import ConfigError

app = typer.Typer()
app.command(rich_help_panel=Panel.SITE)(approve)
app.command(rich_help_panel=Panel.SITE)(rank)
SitesArgument = Annotated[Path, typer.Argument(metavar="SITES_YML", help="as provisioning/sites.yml")]


@app.command(rich_help_panel=Panel.DEPLOYMENT)
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
    from consilium.flare.kit.local_folder import apply_local
    from consilium.flare.kit.provision import provision as make

    if (output is None) == (local is None):
        raise ConfigError("--output, --local: give exactly one: -o DIR makes kits, --local KIT changes one")
    if local and only:
        raise ConfigError("--only: is of kits that -o makes; leave it out")
    written = make(sites, output, only or ()) if output else apply_local(sites, local or Path())
    found = (
        {"kits": str(written), "participants": sorted(p.name for p in written.iterdir())} if output else {"local": str(written)}
    )
    if format is Format.JSON:
        print(json.dumps(found, indent=1))
    elif output:
        typer.echo(f"{written}: kits of {', '.join(found['participants'])}")
        if only:
            typer.echo("all other kits stay as they are; a server that runs takes the new ones without a restart")
        typer.echo(f"{written.parent}/state holds the root key: keep it where no one else can read it")
    else:
        typer.echo(f"{written}: policies written; restart the site to use them")


@app.command(rich_help_panel=Panel.DEPLOYMENT)
def export(
    job: Annotated[Path, typer.Argument(help="a job folder, such as jobs/quickstart, or a job.yaml")],
    output: Annotated[Path, typer.Option("--output", "-o", help="receives a folder of the job's name")],
    bundle: Annotated[
        bool, typer.Option("--bundle", help="with this package in app/custom, for sites that allow BYOC")
    ] = False,
    format: FormatOption = Format.TXT,
) -> None:
    """Write a job as a FLARE job folder to submit: configuration only, or with the code for sites without the package."""
    from consilium.flare.job.recipe import export as write

    folder = write(job, output, bundle)
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    if format is Format.JSON:
        print(json.dumps({"job": str(folder), "bytes": size, "bundle": bundle}, indent=1))
    else:
        what = "with the package, so sites need BYOC allowed" if bundle else "configuration only, no code"
        typer.echo(f"{folder}: {size / 1024:,.0f} KiB, {what}")


@app.command(rich_help_panel=Panel.SITE)
def doctor(
    kit: Annotated[Path, typer.Argument(help="the site's startup kit")] = Path(),
    job: Annotated[Path | None, typer.Option(help="a job.yaml: does a step of it fit into the site's memory?")] = None,
    format: FormatOption = Format.TXT,
) -> None:
    """Check a site before it joins: versions, kit, policies, data, checkpoints, GPU, disk, clock, server; 1 if not well."""
    from consilium.flare.kit.doctor import examine

    findings = examine(kit, job)
    if format is Format.JSON:
        print(json.dumps([f.to_dict() for f in findings], indent=1))
    else:
        console = Console(soft_wrap=True, highlight=False)
        for finding in findings:
            console.print(finding.line(), style=None if finding.ok else "red", markup=False)
    raise typer.Exit(0 if all(f.ok for f in findings) else 1)
