"""Options and output that several commands share."""

import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml
from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn
from rich.text import Text

from consilium.config.job import JobConfig, job_file, load_job, parse_override
from consilium.config.site import plugins_allowed_by_kit
from consilium.core.errors import ConfigError
from consilium.core.registry import NO_PLUGINS, Plugins
from consilium.core.sanitize import LONGEST_LINE, shown
from consilium.report.tables import Table, terminal_table

FILE_WIDTH = 140
"""Width of a table in characters, in files and pipes."""


TFLOPS = 94.0
"""Assumed throughput of a run in TFLOP/s: 30 % of an A100's peak in bf16 (312)."""
ASSUMED = "matrix products alone, without data loading, privacy noise, server and network"


def study_command(verb: str, study: Path, size: str, workspace: Path | None, *more: str) -> str:
    """Return the command line of a command, "study run" or "compare", for a study, its size and its workspace."""
    place = ["--workspace", str(workspace)] if workspace else []
    return shlex.join(["consilium", *verb.split(), str(study), *([f"--{size}"] if size else []), *place, *more])


Format = Literal["txt", "json"]
"""Format of a command's output: txt for people, json for programs."""
FormatOption = Annotated[Format, typer.Option("--format", help="txt for people, json for programs")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="set a field of job.yaml, KEY=VALUE, as in training.lr=0.001; may be repeated")
]
TflopsOption = Annotated[
    float,
    typer.Option(min=1e-6, max=1e9, help="TFLOP/s of a GPU, for GPU hours; 94 is 30 % of an A100's peak in bf16"),
]
CheckpointsOption = Annotated[
    Path | None, typer.Option(help="folder with checkpoints, which replaces ${SITE} in model.checkpoint")
]
WorkspaceOption = Annotated[Path | None, typer.Option(help="folder of the study's runs; default: runs/studies/NAME")]
KitPluginsOption = Annotated[Path | None, typer.Option(help="the site's startup kit, for jobs that use its `plugins`")]
JobArgument = Annotated[Path, typer.Argument(help="a job folder, such as jobs/quickstart, or a job.yaml")]


ELSEWHERE = "--format json has them"


def emit(
    found: Any, parts: str | Iterable[Table | RenderableType], format: Format, hidden_columns_hint: str = ELSEWHERE
) -> None:
    """Print `found` as JSON, or `parts` as `show` prints them. For JSON a generator of parts does not run."""
    if format == "json":
        print(json.dumps(found, indent=1))
    else:
        show([parts] if isinstance(parts, str) else parts, hidden_columns_hint=hidden_columns_hint)


def show(parts: Iterable[Table | RenderableType], errors: bool = False, hidden_columns_hint: str = ELSEWHERE) -> None:
    """Print tables in the width of `table_console`, and each text as one line of any length.

    `errors`: texts go to standard error. `hidden_columns_hint`: where the columns are that have no room in a table.
    """
    for part in parts:
        if isinstance(part, Table):
            console = table_console()
            console.print(terminal_table(part, console.width, hidden_columns_hint))
        else:
            text = Text(part) if isinstance(part, str) else part
            (Console(stderr=errors, soft_wrap=True) if isinstance(text, Text) else table_console()).print(text, highlight=False)


@contextmanager
def progress_bar(what: str, total: int | None, format: Format, *columns: ProgressColumn) -> Iterator[Callable[[], None]]:
    """Show a bar on standard error while the block runs, but not for JSON or pipes. Yield a function that advances the bar."""
    console = Console(stderr=True, quiet=format == "json")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def study_size(smoke: bool, small: bool) -> Literal["", "smoke", "small"]:
    """Return the size of a study that --smoke or --small choose; "" for the full size. Raises ConfigError for both."""
    if smoke and small:
        raise ConfigError("--smoke: not together with --small; give one of them")
    return "smoke" if smoke else "small" if small else ""


def pipeline_test_note(size: str) -> str:
    """Return a note that scores of a study's --smoke or --small say nothing about methods."""
    what = f"--{size} tests the pipeline, with little training: its scores say nothing about the methods"
    return f"{what}; leave --{size} out for scores that do"


def site_yaml_lines(lists: Sequence[Path]) -> Iterator[str]:
    """Yield the line of site.yaml that makes a site use its new data list. `lists`: each site's list, a file or folder."""
    if lists:
        of = "" if len(lists) == 1 else f" of site {shown(lists[0].name if lists[0].is_dir() else lists[0].parent.name)}"
        more = "" if len(lists) == 1 else "; the other sites likewise"
        yield f"site.yaml{of}: {yaml.safe_dump({'datalist': str(lists[0].resolve())}, width=LONGEST_LINE).strip()}{more}"


def table_console() -> Console:
    """Return the console for tables, as wide as the terminal or the variable COLUMNS; FILE_WIDTH in a file or a pipe."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=FILE_WIDTH)


def gpu_hours(flops: float, tflops: float) -> float:
    """Return the GPU hours of `flops` at `tflops` trillion FLOPs per second."""
    return flops / (tflops * 1e12) / 3600


def load(job: Path, overrides: list[str], plugins: Plugins = None, author: bool = True) -> tuple[JobConfig, Path]:
    """Return (configuration, its file) of a job with KEY=VALUE overrides.

    `plugins`: packages whose kinds the job may use; None for all installed ones. `author`: see load_job.
    """
    return load_job(job, dict(parse_override(one) for one in overrides), plugins=plugins, author=author), job_file(job)


def load_for_data(job: Path | None, overrides: list[str], kit: Path | None) -> JobConfig | None:
    """Return the job for which data are read, if any.

    With `kit` the job is treated as another person's, so files that it names by path are not opened.
    """
    if job is None:
        if overrides:
            raise ConfigError("--set: is of a job; give --job too")
        return None
    return load(job, overrides, plugins_allowed_by_kit(kit / "local") if kit else NO_PLUGINS, author=kit is None)[0]
