"""The command `consilium export`."""

from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.options import FormatOption, JobArgument, emit
from consilium.flare.job.recipe import export as write


def export(
    job: JobArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder in which to make a folder with the job's name")],
    bundle: Annotated[
        bool, typer.Option("--bundle", help="copy this package into app/custom, for sites that allow custom code (BYOC)")
    ] = False,
    format: FormatOption = "txt",
) -> None:
    """Write a job as a FLARE job folder to submit: configuration only, or with the package for sites that lack it."""
    folder = write(job, output, bundle)
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    what = "with the package, so sites need BYOC allowed" if bundle else "configuration only, no code"
    emit({"job": str(folder), "bytes": size, "bundle": bundle}, [f"{folder}: {size / 1024:,.0f} KiB, {what}"], format)
