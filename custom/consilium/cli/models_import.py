"""The command `consilium models import`."""

from pathlib import Path
from typing import Annotated

import typer

from consilium.core.sanitize import LONGEST_LINE, shown
from consilium.use.model_import import import_model


def models_import(
    source: Annotated[Path, typer.Argument(help="a GGUF file, or a transformers folder")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="receives the model; must be new")],
    adapter: Annotated[Path | None, typer.Option(metavar="FOLDER", help="a PEFT folder of LoRA, merged first")] = None,
    template: Annotated[Path | None, typer.Option(metavar="FILE", help="a chat template (Jinja) in place of its own")] = None,
    licence: Annotated[str | None, typer.Option(metavar="NAME", help="of the weights, where the source names none")] = None,
) -> None:
    """Write a language model as a folder that jobs can name, checked, with a record of where it came from; no network."""
    made = import_model(source, output, adapter, template, licence)
    gib = [size / 2**30 for size in (made.stored, made.loaded)]
    typer.echo(f"{shown(output, LONGEST_LINE)}: {made.parameters:,} parameters, licence {shown(made.licence, 80)}")
    typer.echo(f"memory: {gib[0]:.2f} GiB on disk, {gib[1]:.2f} GiB as float32 in a run; `consilium fit JOB` adds a step's")
    for note in made.notes:
        typer.echo(f"note: {shown(note, LONGEST_LINE)}", err=True)
    typer.echo(
        f"in job.yaml: model: {{name: causal_lm, variant: folder, checkpoint: {shown(output)}, config: {shown(output)}}}"
    )
