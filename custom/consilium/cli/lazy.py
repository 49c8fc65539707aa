"""Commands that are imported when they are called, so that `consilium --help` and light commands load none of the others."""

import ast
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from consilium.core.lazy import resolve


class LazyCommand(TyperCommand):
    """A command by its `target`, "module:function"; the module is imported when the command is called."""

    def __init__(self, name: str, target: str, panel: str | None) -> None:
        super().__init__(name, rich_help_panel=panel)
        self.target = target

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Return the context of the function's own command."""
        own = typer.Typer(add_completion=False)
        own.command(self.name)(resolve(self.target))
        return typer.main.get_command(own).make_context(*args, **kwargs)

    def read_help(self) -> None:
        """Take the help from the function's docstring in its file, without importing it."""
        module, _, function = self.target.partition(":")
        spec = find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                self.help = ast.get_docstring(node)


class Group(NamedTuple):
    """A group of commands: its help, and each command's "module:function" by its name."""

    help: str
    commands: Mapping[str, str]


class LazyGroup(TyperGroup):
    """Commands and groups, by the panel of the help that lists them and by name."""

    def __init__(self, table: Mapping[str | None, Mapping[str, str | Group]], **attrs: Any) -> None:
        super().__init__(**attrs)
        for panel, entries in table.items():
            for name, entry in entries.items():
                if isinstance(entry, str):
                    self.add_command(LazyCommand(name, entry, panel))
                else:
                    group = LazyGroup(
                        {None: entry.commands}, name=name, help=entry.help, rich_help_panel=panel, no_args_is_help=True
                    )
                    self.add_command(group)

    def format_help(self, *args: Any) -> None:
        """Write the help; only here the commands' docstrings are read."""
        for command in self.commands.values():
            if isinstance(command, LazyCommand):
                command.read_help()
        super().format_help(*args)
