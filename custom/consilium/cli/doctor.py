"""The command `consilium doctor`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from consilium.cli.options import FormatOption, emit
from consilium.client.finding import Finding
from consilium.core.errors import ConsiliumError
from consilium.flare.admin.session import connect
from consilium.flare.kit.doctor import examine
from consilium.flare.kit.kit_contents import participant_role


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
    if participant_role(kit) == "person" and all(f.ok for f in findings if f.check == "server"):
        findings.append(_examine_login(kit))
    emit([f.to_dict() for f in findings], (Text(f.line(), "" if f.ok else "red") for f in findings), format)
    raise typer.Exit(0 if all(f.ok for f in findings) else 1)


def _examine_login(kit: Path) -> Finding:
    """Return whether a person's kit can log in at the server."""
    try:
        with connect(kit):
            return Finding("admission", "the server lets this person in")
    except ConsiliumError as error:
        return Finding("admission", str(error).removeprefix(f"{kit}: "), "ask the hub for a renewed kit if it was revoked")
