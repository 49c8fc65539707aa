"""What several commands share: --format, --set, the job argument, and what they do with them."""

import json
import math
import os
import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from consilium.config.job import JobConfig, job_file, load_job
from consilium.config.overrides import parse_override
from consilium.core.errors import ConfigError

FILE_WIDTH = 140
"""Cells of a table where there is no terminal."""
LONGEST_LINE = 4000
"""Characters of a line that is printed, at most."""


TFLOPS = 94.0
"""What a run is taken to keep up: 30 % of an A100's peak in bf16 (312)."""
ASSUMED = "matrix products alone, without data loading, privacy noise, server and network"


def study_command(verb: str, study: Path, size: str, workspace: Path | None, *more: str) -> str:
    """Return the command that does something with a study as it was asked for: `verb` is "study run" or "compare"."""
    place = ["--workspace", str(workspace)] if workspace else []
    return shlex.join(["consilium", *verb.split(), str(study), *([f"--{size}"] if size else []), *place, *more])


class Format(StrEnum):
    """How a command prints."""

    TXT = "txt"
    JSON = "json"


class PageFormat(StrEnum):
    """How a command prints that makes a page."""

    MD = "md"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="txt for people, json for programs")]
PageFormatOption = Annotated[PageFormat, typer.Option("--format", help="md for people, json for programs")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE of job.yaml, as in training.lr=0.001")]
TflopsOption = Annotated[
    float,
    typer.Option(min=1e-6, max=1e9, help="trillions of FLOPs a second, for GPU hours: 94 is 30 % of an A100's peak in bf16"),
]
CheckpointsOption = Annotated[Path | None, typer.Option(help="folder that ${SITE} in model.checkpoint stands for")]
WorkspaceOption = Annotated[Path | None, typer.Option(help="folder of the study's runs; default: runs/studies/NAME")]
KitPluginsOption = Annotated[
    Path | None, typer.Option(help="the site's startup kit, for jobs that name kinds of its `plugins`")
]
JobArgument = Annotated[Path, typer.Argument(help="a job folder, such as jobs/quickstart, or a job.yaml")]


def emit(found: Any, text: str, format: Format) -> None:
    """Print `found` as JSON, or `text`, as `format` says."""
    typer.echo(json.dumps(found, indent=1) if format is Format.JSON else text)


def table(*headings: str, left: int = 1, title: str | Text | None = None) -> Table:
    """Return a table without lines; its first `left` columns are left-justified, the others right-justified."""
    made = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for index, heading in enumerate(headings):
        made.add_column(heading, justify="left" if index < left else "right")
    return made


def page() -> Console:
    """Return where tables go: as wide as the terminal, or as COLUMNS says; FILE_WIDTH in a file or a pipe."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=FILE_WIDTH)


def gpu_hours(flops: float, tflops: float) -> float:
    """Return how long that many FLOPs take."""
    return flops / (tflops * 1e12) / 3600


def check_finite(**values: float | None) -> None:
    """Raise ConfigError for an option that is NaN or infinite; bounds alone let NaN through."""
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"--{name.replace('_', '-')}: {value}: expected a finite number")


def load(job: Path, overrides: list[str]) -> tuple[JobConfig, Path]:
    """Return (configuration, its file) with KEY=VALUE overrides applied and validated like the file itself.

    On a researcher's own machine: every installed package's kinds may be named.
    """
    chosen = dict(parse_override(one) for one in overrides)
    return load_job(job, chosen, plugins=None, author=True), job_file(job)
