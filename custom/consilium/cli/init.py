"""The command `consilium init`."""

import shutil
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.options import FormatOption, emit
from consilium.core.errors import ConfigError
from consilium.core.storage import clean_up_on_failure, copy_tree


def init(
    folder: Annotated[Path, typer.Argument(help="new or empty folder to write to")],
    format: FormatOption = "txt",
) -> None:
    """Write the example jobs, studies, notebooks and templates of kits into a folder, to run and to edit."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: exists and is not empty; give a new folder")
    unwanted = shutil.ignore_patterns(
        "*.md", "*.png", "__pycache__"
    )  # a clone has these files beside the examples; a wheel does not
    with clean_up_on_failure(folder):
        copy_tree(str(files("consilium") / "examples"), folder, ignore=unwanted, dirs_exist_ok=True)
    found = sorted(path.name for path in folder.iterdir())
    text = f"{folder}: {', '.join(found)}. Go there, and run for example: consilium simulate jobs/quickstart_cells"
    emit({"folder": str(folder), "holds": found}, text, format)
