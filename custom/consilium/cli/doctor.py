"""The command `consilium doctor`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from consilium.cli.options import FormatOption, emit
from consilium.flare.kit.doctor import examine


def doctor(
    kit: Annotated[Path, typer.Argument(help="the site's startup kit")] = Path(),
    job: Annotated[
        Path | None, typer.Option(help="a job.yaml: check that its training step fits into the site's memory")
    ] = None,
    format: FormatOption = "txt",
) -> None:
    """Check a site before it joins: versions, kit, policies, data, checkpoints, GPU, disk, clock, server.

    Exit code 1 if a check fails.
    """
    findings = examine(kit, job)
    emit([f.to_dict() for f in findings], (Text(f.line(), "" if f.ok else "red") for f in findings), format)
    raise typer.Exit(0 if all(f.ok for f in findings) else 1)
