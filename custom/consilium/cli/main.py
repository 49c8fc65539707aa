"""The command `consilium`; its exit codes are core.errors.ExitCode."""

import io
import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.exceptions import TyperException

from consilium import __version__
from consilium.cli.lazy import Group, LazyGroup
from consilium.cli.options import LONGEST_LINE
from consilium.cli.resume_hint import FULL, again, no_room
from consilium.core.errors import ConfigError, ConsiliumError, ExitCode
from consilium.core.sanitize import line

CLI = "consilium.cli"
RUN, USE, DATA, DEPLOYMENT, SITE = "Run and compare", "Use a model", "Data and privacy", "Deployment", "At a site"
COMMANDS: dict[str | None, dict[str, str | Group]] = {
    RUN: {
        **{name: f"{CLI}.{name}:{name}" for name in ("simulate", "compare", "report", "cost", "fit", "bench")},
        "study": Group(
            "Run grids of jobs: methods, ranks, splits, seeds.",
            {name: f"{CLI}.study:study_{name}" for name in ("list", "show", "run")},
        ),
    },
    USE: {
        "predict": f"{CLI}.predict:predict",
        "evaluate": f"{CLI}.evaluate:evaluate",
        "export-model": f"{CLI}.export_model:export_model",
        "models": Group(
            "Import language models: GGUF files, folders, adapters.", {"import": f"{CLI}.models_import:models_import"}
        ),
    },
    DATA: {
        "data": Group(
            "Import published sets, look at data lists, share them out, generate phantoms.",
            {
                **{name: f"{CLI}.data_{name}:data_{name}" for name in ("check", "split", "stats", "import")},
                "cache": f"{CLI}.cache:data_cache",
                **{name: f"{CLI}.data_{name}:data_{name}" for name in ("phantoms", "partition")},
            },
        ),
        "privacy": Group(
            "Plan a privacy budget, read a site's ledger, attack a model.",
            {
                **{name: f"{CLI}.attack:{name}" for name in ("attack", "invert")},
                "plan": f"{CLI}.privacy_plan:plan",
                **{name: f"{CLI}.privacy:{name}" for name in ("ledger", "sums", "accept")},
            },
        ),
    },
    DEPLOYMENT: {
        **{name: f"{CLI}.submit:{name}" for name in ("submit", "resume")},
        **{name: f"{CLI}.jobs:{name}" for name in ("status", "abort", "download")},
        "sites": f"{CLI}.sites:sites",
        "poc": f"{CLI}.poc:poc",
        "provision": f"{CLI}.provision:provision",
        "export": f"{CLI}.export:export",
        **{name: f"{CLI}.kits:{name}" for name in ("allow", "revoke")},
        "renew": f"{CLI}.renewal:renew",
        **{name: f"{CLI}.install:{name}" for name in ("wheels", "prepare")},
    },
    SITE: {
        "approve": f"{CLI}.approve:approve",
        "rank": f"{CLI}.rank:rank",
        "doctor": f"{CLI}.doctor:doctor",
        "update-kit": f"{CLI}.renewal:update_kit",
        "metrics": f"{CLI}.metrics:metrics",
        "service": Group("A startup kit as a systemd service.", {"install": f"{CLI}.install:install"}),
        "audit": f"{CLI}.audit:audit",
        **{name: f"{CLI}.evidence:{name}" for name in ("evidence", "forget")},
    },
}


class Consilium(LazyGroup):
    """All commands."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(COMMANDS, **attrs)


app = typer.Typer(cls=Consilium, no_args_is_help=True, add_completion=False)


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
    except ConsiliumError as error:
        _fail(str(error).split("\n") if isinstance(error, ConfigError) else [str(error)], error.exit_code)
    except OSError as error:  # a path that may not be used, a full or broken disk, a server that does not answer
        if error.errno is None:
            raise
        if error.errno in FULL:
            _fail([no_room(error, "." if error.filename is None else error.filename, again())], ExitCode.FAILED)
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        _fail(
            [f"{where}{error.strerror}; check the paths given, their permissions and the disk"],
            ExitCode.USAGE if where else ExitCode.FAILED,
        )
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
