"""What tells the code of a job's algorithm from other versions of it."""

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from consilium.config.job import JobConfig

OWN = "consilium"


def code_of(config: "JobConfig") -> str:
    """Return a digest of the files of the strategy's class, and of the classes of sections that other packages add.

    A class' files are its own and those of its bases in the same package, so what else these import does not show.
    """
    others = [type(one) for one in (config.model, config.task, config.adapter) if _package(type(one)) != OWN]
    files = {name: path for kind in (type(config.strategy), *others) for name, path in _files(kind).items()}
    parts = [name.encode() + path.read_bytes() for name, path in sorted(files.items())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _files(kind: type) -> dict[str, Path]:
    """Return the files of a class and of its bases in the same package, by module; of one without files none."""
    modules = {base.__module__ for base in kind.__mro__ if _package(base) == _package(kind)}
    found = {name: getattr(sys.modules.get(name), "__file__", None) for name in modules}
    return {name: path for name, file in found.items() if file and (path := Path(file)).is_file()}


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
