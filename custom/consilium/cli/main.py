"""The command `consilium`. Exit codes: 0 done, 1 the run failed or problems were found, 2 wrong usage or configuration."""

import io
import os
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from typer.exceptions import TyperException

from consilium import __version__
from consilium.cli.bench import bench
from consilium.cli.compare import compare
from consilium.cli.cost import cost
from consilium.cli.data import app as data_app
from consilium.cli.deploy import app as deploy_app
from consilium.cli.evaluate import evaluate
from consilium.cli.evidence import app as evidence_app
from consilium.cli.export_model import export_model
from consilium.cli.fit import fit
from consilium.cli.install import app as install_app
from consilium.cli.kits import app as kits_app
from consilium.cli.options import LONGEST_LINE, Panel
from consilium.cli.predict import predict
from consilium.cli.privacy import app as privacy_app
from consilium.cli.report import report
from consilium.cli.resume_hint import FULL, again, no_room
from consilium.cli.simulate import simulate
from consilium.cli.study import app as study_app
from consilium.cli.submit import app as submit_app
from consilium.core.errors import CheckpointError, ConfigError, ConsiliumError, DataError
from consilium.core.sanitize import line

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Federated fine-tuning of medical foundation models.")
COMMANDS: dict[Panel, tuple[Callable[..., None], ...]] = {
    Panel.RUN: (simulate, compare, report, cost, fit, bench),
    Panel.USE: (predict, evaluate, export_model),
}
for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.add_typer(study_app, name="study", rich_help_panel=Panel.RUN)
app.add_typer(data_app, name="data", rich_help_panel=Panel.DATA)
app.add_typer(privacy_app, name="privacy", rich_help_panel=Panel.DATA)
for some in (submit_app, deploy_app, kits_app, install_app, evidence_app):
    app.add_typer(some)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def consilium(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it and end")] = False,
) -> None:
    """Federated fine-tuning of medical foundation models."""


def main() -> None:
    """Run the command line; every expected error is one line on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no text in any encoding
    try:
        code = app(standalone_mode=False, prog_name="consilium")
    except TyperException as error:  # wrong usage; without any words the help was shown
        _fail([_usage(error)] if error.format_message() else [], error.exit_code)
    except ConfigError as error:
        _fail(str(error).split("\n"), 2)
    except ConsiliumError as error:
        _fail([str(error)], 2 if isinstance(error, DataError | CheckpointError) else 1)
    except OSError as error:  # a path that may not be used, a full or broken disk, a server that does not answer
        if error.errno is None:
            raise
        if error.errno in FULL:
            _fail([no_room(error, "." if error.filename is None else error.filename, again())], 1)
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        _fail([f"{where}{error.strerror}; check the paths given, their permissions and the disk"], 2 if where else 1)
    raise SystemExit(code if isinstance(code, int) else 0)


def _fail(problems: list[str], code: int) -> NoReturn:
    """Print problems, each in one line whatever characters the names in it have, and end."""
    console = Console(stderr=True, soft_wrap=True)
    for problem in problems:
        console.print(line(problem, "red", limit=LONGEST_LINE))
    raise SystemExit(code) from None


def _usage(error: TyperException) -> str:
    """Return what was wrong with which command."""
    context, said = getattr(error, "ctx", None), error.format_message().replace("Value error, ", "").rstrip(".")
    return f"{context.command_path}: {said}; see {context.command_path} --help" if context else said
