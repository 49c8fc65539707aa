"""The command `consilium` and the table of its commands. Its exit codes are in core.errors.ExitCode."""

import ast
import io
import os
import sys
from collections.abc import Mapping
from functools import cached_property
from importlib import resources
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from consilium import __version__
from consilium.cli.resume_hint import FULL, disk_full_message, exit_interrupted, same_command_hint, stop_on_signals
from consilium.core.errors import ConfigError, ConsiliumError, ExitCode
from consilium.core.lazy import resolve
from consilium.core.sanitize import LONGEST_LINE, rich_line

CLI = "consilium.cli"

# lazy ------------------------------------------------------------------------------------------------------------------
# Commands whose modules are imported only when the command is called, so that the other commands and `--help` stay quick.


class LazyCommand(TyperCommand):
    """A command whose module is imported when the command is called. `target`: "module:function"."""

    def __init__(self, name: str, target: str, panel: str | None) -> None:
        super().__init__(name, rich_help_panel=panel)
        self.target = target

    @cached_property
    def own(self) -> Any:
        """The function's command, with its parameters."""
        own = typer.Typer(add_completion=False)
        own.command(self.name)(resolve(self.target))
        return typer.main.get_command(own)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Import the function, and return the context of its command."""
        return self.own.make_context(*args, **kwargs)

    def read_help(self) -> None:
        """Take the help from the function's docstring in its file, without importing it."""
        module, _, function = self.target.partition(":")
        text = resources.files(CLI).joinpath(f"{module.rpartition('.')[2]}.py").read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                self.help = ast.get_docstring(node)


class Group(NamedTuple):
    """A group of commands: its help, and each command's "module:function" by its name."""

    help: str
    commands: Mapping[str, str]


class LazyGroup(TyperGroup):
    """A group of commands; `table`: by name, under the panel of the help that lists them. By default all of the program's."""

    def __init__(self, table: Mapping[str | None, Mapping[str, str | Group]] | None = None, **attrs: Any) -> None:
        super().__init__(**attrs)
        for panel, entries in (COMMANDS if table is None else table).items():
            for name, entry in entries.items():
                if isinstance(entry, str):
                    self.add_command(LazyCommand(name, entry, panel))
                else:
                    group = LazyGroup(
                        {None: entry.commands}, name=name, help=entry.help, rich_help_panel=panel, no_args_is_help=True
                    )
                    self.add_command(group)

    def invoke(self, ctx: Any) -> Any:
        """Import and call the command. After Ctrl-C, print that it was interrupted, unless the command has done so."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            exit_interrupted("")

    def format_help(self, *args: Any) -> None:
        """Write the help. Only this reads the commands' docstrings."""
        for command in self.commands.values():
            if isinstance(command, LazyCommand):
                command.read_help()
        super().format_help(*args)


# main ------------------------------------------------------------------------------------------------------------------

RUN, USE, DATA, DEPLOYMENT, SITE = "Run and compare", "Use a model", "Data and privacy", "Deployment", "At a site"
COMMANDS: dict[str | None, dict[str, str | Group]] = {
    RUN: {
        "init": f"{CLI}.init:init",
        "simulate": f"{CLI}.simulate:simulate",
        **{name: f"{CLI}.compare:{name}" for name in ("compare", "report")},
        **{name: f"{CLI}.cost:{name}" for name in ("cost", "fit")},
        "study": Group(
            "Run grids of jobs: methods, ranks, splits, seeds.",
            {"list": f"{CLI}.study_list:study_list", **{name: f"{CLI}.study:study_{name}" for name in ("show", "run")}},
        ),
    },
    USE: {
        **{name: f"{CLI}.model_commands:{name}" for name in ("predict", "evaluate")},
        "export-model": f"{CLI}.models:export_model",
        "models": Group("Import language models: GGUF files, folders, adapters.", {"import": f"{CLI}.models:models_import"}),
    },
    DATA: {
        "data": Group(
            "Import data sets, check, split and partition data lists, generate phantoms.",
            {
                **{name: f"{CLI}.data_lists:data_{name}" for name in ("check", "split", "stats")},
                "import": f"{CLI}.data_import:data_import",
                "cache": f"{CLI}.data_lists:data_cache",
                **{name: f"{CLI}.data_import:data_{name}" for name in ("phantoms", "partition")},
            },
        ),
        "privacy": Group(
            "Plan a privacy budget, read a site's ledger, attack a model.",
            {
                **{name: f"{CLI}.model_commands:{name}" for name in ("attack", "invert")},
                "plan": f"{CLI}.privacy_plan:plan",
                **{name: f"{CLI}.site_records:{name}" for name in ("ledger", "sums", "accept")},
            },
        ),
    },
    DEPLOYMENT: {
        **{name: f"{CLI}.submit:{name}" for name in ("export", "submit", "resume")},
        **{name: f"{CLI}.jobs:{name}" for name in ("status", "abort", "download")},
        "sites": f"{CLI}.sites:sites",
        "poc": f"{CLI}.poc:poc",
        "provision": f"{CLI}.kits:provision",
        **{name: f"{CLI}.kits:{name}" for name in ("allow", "revoke", "renew", "prepare")},
    },
    SITE: {
        "approve": f"{CLI}.site_checks:approve",
        "doctor": f"{CLI}.site_checks:doctor",
        "update-kit": f"{CLI}.kits:update_kit",
        **{name: f"{CLI}.kits:{name}" for name in ("lock", "unlock", "stop")},
        "metrics": f"{CLI}.kits:metrics",
        "serve": f"{CLI}.serve:serve",
        "audit": f"{CLI}.site_records:audit",
        **{name: f"{CLI}.site_evidence:{name}" for name in ("evidence", "forget")},
    },
}


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, add_completion=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def consilium(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Federated fine-tuning of medical foundation models."""


def main() -> None:
    """Run the command line. Each expected error is one line on standard error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name may not be valid text
    if not (sys.stderr and sys.stderr.isatty()):  # there a library's progress bar would write a line at each of its steps
        os.environ.setdefault("TQDM_DISABLE", "1")  # tqdm reads it when it is imported
    try:
        with stop_on_signals():
            code = app(standalone_mode=False, prog_name="consilium")
    except TyperException as error:  # wrong usage; without a message the help was shown
        context, said = getattr(error, "ctx", None), error.format_message().replace("Value error, ", "").rstrip(".")
        told = f"{context.command_path}: {said}; see {context.command_path} --help" if context else said
        _fail([told] if said else [], error.exit_code)
    except ConsiliumError as error:
        _fail(str(error).split("\n") if isinstance(error, ConfigError) else [str(error)], error.exit_code)
    except OSError as error:  # an unusable path, a full or broken disk, or a server that does not answer
        if error.errno is None:
            raise
        if error.errno in FULL:
            _fail(
                [disk_full_message(error, "." if error.filename is None else error.filename, same_command_hint())],
                ExitCode.FAILED,
            )
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        _fail(
            [f"{where}{error.strerror}; check the paths given, their permissions and the disk"],
            ExitCode.USAGE if where else ExitCode.FAILED,
        )
    raise SystemExit(code if isinstance(code, int) else 0)


def _fail(problems: list[str], code: int) -> NoReturn:
    """Print each problem as one line, whatever characters are in its names, and exit."""
    console = Console(stderr=True, soft_wrap=True)
    for problem in problems:
        console.print(rich_line(problem, "red", limit=LONGEST_LINE))
    raise SystemExit(code) from None
