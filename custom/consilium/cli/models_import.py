"""The command `consilium models import`."""

from pathlib import Path
from typing import Annotated

import typer

from consilium.core.sanitize import LONGEST_LINE, shown
from consilium.use.base_model_import import import_model

GIB = 2**30


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
    gib = [size / GIB for size in (made.stored, made.loaded)]
    typer.echo(f"{shown(output, LONGEST_LINE)}: {made.parameters:,} parameters, licence {shown(made.licence, 80)}")
    typer.echo(f"memory: {gib[0]:.2f} GiB on disk, {gib[1]:.2f} GiB as float32 in a run; `consilium fit JOB` adds a step's")
    for note in made.notes:
        typer.echo(f"note: {shown(note, LONGEST_LINE)}", err=True)
    typer.echo(
        f"in job.yaml: model: {{name: causal_lm, variant: folder, checkpoint: {shown(output)}, config: {shown(output)}}}"
    )
