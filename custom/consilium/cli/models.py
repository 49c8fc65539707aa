"""The commands `consilium export-model` and `models import`: models for other programs, and models from them."""

from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.model_commands import BestOption, ModelArgument, SiteOption, StageOption, local_site_config
from consilium.cli.options import CheckpointsOption, show
from consilium.core.sanitize import LONGEST_LINE, shown
from consilium.use.base_model_import import import_model
from consilium.use.export import Format, check_exportable, export
from consilium.use.export_folder import check_destination
from consilium.use.model import adapter_folder, open_model

GIB = 2**30


def export_model(
    model: ModelArgument,
    format: Annotated[
        Format,
        typer.Option(
            "--format",
            help="peft: the adapter alone; merged: all weights (llama.cpp converts them); bundle: for MONAI; onnx: ONNX graphs",
        ),
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
) -> None:
    """Export a model, with its card, in a format that other programs open. Logits are compared before anything is written."""
    check_destination(output)
    check_exportable(format, adapter_folder(model, site, stage, best))
    own = local_site_config("cpu", checkpoints)
    found = open_model(model, site, stage, own, best)
    made = export(found, format, output, own, base)
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


def models_import(
    source: Annotated[Path, typer.Argument(help="a GGUF file, or a folder of the transformers library")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="new folder for the model")],
    adapter: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="a PEFT folder with a LoRA adapter, to merge into the model")
    ] = None,
    template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a chat template (Jinja) to use instead of the model's own")
    ] = None,
    licence: Annotated[
        str | None, typer.Option(metavar="NAME", help="licence of the weights, if the source names none")
    ] = None,
) -> None:
    """Check a language model and write it as a folder that jobs can name, with a record of its origin. Uses no network."""
    made = import_model(source, output, adapter, template, licence)
    gib = [size / GIB for size in (made.stored, 4 * made.parameters)]
    typer.echo(f"{shown(output, LONGEST_LINE)}: {made.parameters:,} parameters, licence {shown(made.licence, 80)}")
    typer.echo(f"memory: {gib[0]:.2f} GiB on disk, {gib[1]:.2f} GiB as float32 in a run; `consilium fit JOB` adds a step's")
    for note in made.notes:
        typer.echo(f"note: {shown(note, LONGEST_LINE)}", err=True)
    typer.echo(
        f"in job.yaml: model: {{name: causal_lm, variant: folder, checkpoint: {shown(output)}, config: {shown(output)}}}"
    )
