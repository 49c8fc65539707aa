"""The command `consilium export-model`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from consilium.cli.options import CheckpointsOption, show
from consilium.cli.predict_evaluate import BestOption, ModelArgument, SiteOption, StageOption, local_site_config
from consilium.core.sanitize import LONGEST_LINE, shown
from consilium.use.export import check_exportable, export
from consilium.use.model import adapter_folder, open_model
from consilium.use.output_folder import check_destination


def export_model(
    model: ModelArgument,
    format: Annotated[
        Literal["peft", "merged", "bundle", "onnx"],
        typer.Option("--format", help="peft: the adapter alone; merged: all weights; bundle: for MONAI; onnx: ONNX graphs"),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="new folder for the export")],
    site: SiteOption = None,
    stage: StageOption = None,
    best: BestOption = False,
    checkpoints: CheckpointsOption = None,
    base: Annotated[
        str,
        typer.Option(metavar="NAME", help="name of a language model's base in the export; default: its folder on this machine"),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="replace an earlier export")] = False,
) -> None:
    """Export a model, with its card, in a format that other programs open. Logits are compared before anything is written."""
    check_destination(output, force)
    check_exportable(format, adapter_folder(model, site, stage, best))
    own = local_site_config("cpu", checkpoints)
    found = open_model(model, site, stage, own, best)
    made = export(found, format, output, own, force, base)
    size = sum(path.stat().st_size for path in made.folder.rglob("*") if path.is_file())
    equal = "" if made.difference is None else f", logits within {made.difference:.1g} of the model's"
    typer.echo(f"{shown(output, LONGEST_LINE)}: {format} of {shown(found.card.name)}, {size / 2**20:,.1f} MiB{equal}")
    page = "docs/README.md" if format == "bundle" else "README.md"
    names_folder = found.config.model.name == "causal_lm" and not base
    notes = [
        *found.card.notes,
        *["README.md names the base by its folder on this machine; --base NAME names it for others"] * names_folder,
        f"the licence stands in the first lines of {page}; check it before you hand the model on",
    ]
    show((f"note: {shown(note, LONGEST_LINE)}" for note in notes), errors=True)
