"""The command `consilium doctor`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from consilium.cli.options import Format, FormatOption
from consilium.flare.kit.doctor import examine


def doctor(
    kit: Annotated[Path, typer.Argument(help="the site's startup kit")] = Path(),
    job: Annotated[Path | None, typer.Option(help="a job.yaml: does a step of it fit into the site's memory?")] = None,
    format: FormatOption = Format.TXT,
) -> None:
    """Check a site before it joins: versions, kit, policies, data, checkpoints, GPU, disk, clock, server; 1 if not well."""
    findings = examine(kit, job)
    if format is Format.JSON:
        print(json.dumps([f.to_dict() for f in findings], indent=1))
    else:
        console = Console(soft_wrap=True, highlight=False)
        for finding in findings:
            console.print(finding.line(), style=None if finding.ok else "red", markup=False)
    raise typer.Exit(0 if all(f.ok for f in findings) else 1)
