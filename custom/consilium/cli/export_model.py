"""The command `consilium export-model`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.options import LONGEST_LINE
from consilium.messages import Stage
from consilium.report.clean import shown


class ModelFormat(StrEnum):
    """What a model is handed on as."""

    PEFT = "peft"
    MERGED = "merged"
    BUNDLE = "bundle"
    ONNX = "onnx"


class Kind(StrEnum):
    """Which of a run's models."""

    GLOBAL = "global"
    PERSONALIZED = "personalized"


def export_model(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="a run's folder, or an adapter folder such as RUN/adapters/global")
    ],
    format: Annotated[
        ModelFormat, typer.Option("--format", help="peft: the adapter; merged: whole weights; bundle: for MONAI; onnx: graphs")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="receives it; must be new")],
    site: Annotated[str | None, typer.Option(help="whose model; without it the one that all sites share")] = None,
    stage: Annotated[Kind, typer.Option(help="which model of the run")] = Kind.GLOBAL,
    best: Annotated[bool, typer.Option("--best", help="the best by validation instead of the last")] = False,
    checkpoints: Annotated[Path | None, typer.Option(help="folder of the base's checkpoint, for ${SITE} in the job")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace an earlier export")] = False,
) -> None:
    """Hand a model on in a form that other programs open, with its card; logits are compared before anything is written."""
    from consilium.config.site import SiteConfig
    from consilium.use.export import check_destination, check_possible, export
    from consilium.use.model import adapter_folder, open_model

    check_destination(output, force)
    check_possible(format.value, adapter_folder(model, site, Stage(stage.value), best))
    own = SiteConfig(checkpoints=checkpoints, device="cpu")
    found = open_model(model, site, Stage(stage.value), own, best)
    made = export(found, format.value, output, own, force)
    size = sum(path.stat().st_size for path in made.folder.rglob("*") if path.is_file())
    equal = "" if made.difference is None else f", logits within {made.difference:.1g} of the model's"
    typer.echo(f"{shown(output, LONGEST_LINE)}: {format} of {shown(found.card.name)}, {size / 2**20:,.1f} MiB{equal}")
    for note in found.card.notes:
        typer.echo(f"note: {shown(note, LONGEST_LINE)}", err=True)
    typer.echo("note: the licence stands in the first lines of README.md; check it before you hand the model on", err=True)
