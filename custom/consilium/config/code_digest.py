"""Digests of the code of a job's algorithm and of its plug-ins."""

import hashlib
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from consilium.config.job import JobConfig
from consilium.core.errors import ConfigError

OWN = "consilium"


def strategy_code_digest(config: JobConfig) -> str:
    """Return a digest of the files that define the strategy's class, and the model's, task's and adapter's if from plug-ins.

    The files of a class are its own module and those of its base classes in the same package. A change in other modules that
    these import does not change the digest.
    """
    others = [type(one) for one in (config.model, config.task, config.adapter) if _package(type(one)) != OWN]
    files = dict[str, Path]()
    for kind in (type(config.strategy), *others):
        modules = {base.__module__ for base in kind.__mro__ if _package(base) == _package(kind)}
        found = ((name, getattr(sys.modules.get(name), "__file__", None)) for name in modules)
        files |= {name: path for name, file in found if file and (path := Path(file)).is_file()}
    parts = [name.encode() + path.read_bytes() for name, path in sorted(files.items())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def plugins_of(config: JobConfig) -> dict[str, str]:
    """Return, by name of each plug-in package that the job uses, its version and the SHA-256 of its code.

    The code is all files of the packages and modules that the distribution's entry points name, imported or not. Other
    distributions that it requires are not included. Raises ConfigError if the code is not in a folder (a zip file).
    """
    found = dict[str, str]()
    for package, version in config.packages.items():
        try:
            points = [point for point in distribution(package).entry_points if point.group.startswith(f"{OWN}.")]
        except PackageNotFoundError:
            points = []
        tops = sorted({point.module.partition(".")[0] for point in points} - {OWN})
        files = list[tuple[str, Path]]()
        for top in tops:  # a package, or a single module
            module = sys.modules.get(top)
            spec = module.__spec__ if module is not None else find_spec(top)
            folders = [Path(one) for one in (spec.submodule_search_locations or ())] if spec is not None else []
            if spec is not None and not folders and spec.origin and Path(spec.origin).is_file():
                files.append((Path(spec.origin).name, Path(spec.origin)))
            for folder in folders:
                paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
                files += [(f"{top}/{path.relative_to(folder).as_posix()}", path) for path in paths]
        lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n" for name, path in files]
        if not lines and tops != []:
            raise ConfigError(
                f"package {package!r}: its code lies in no folder, so no digest of it can be made; install it unpacked"
            )
        found[package] = f"{version} {hashlib.sha256(''.join(lines).encode()).hexdigest()}"
    return found


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
