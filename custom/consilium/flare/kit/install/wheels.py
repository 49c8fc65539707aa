"""A wheelhouse: a folder from which one kind of machine installs the package without a network, each file by its hash.

uv resolves the released wheel's dependencies for the named platform; pip fetches them by uv's hashes. The lock then lists the
files of the folder and no others. SHA256SUMS lists all files, and the project's root key signs it. `openssl` and `sha256sum`
check it on a machine without this package.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.resources import files
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from nvflare.lighter.utils import sign_content

from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.storage import PUBLIC, file_hash, write_atomic
from consilium.flare.kit.install.sbom import bill

SUMS, SIGNATURE, LOCK, SBOM, INSTALL, WHEELS = (
    "SHA256SUMS",
    "SHA256SUMS.sig",
    "requirements.lock",
    "sbom.cdx.json",
    "install.sh",
    "wheels",
)
OURS = "consilium"
PLATFORMS = {"linux-x86_64": "x86_64", "linux-aarch64": "aarch64"}
"""Platforms with wheels of torch, for glibc 2.28 or newer. Only the first was tried."""
GLIBC = 28
_NAME = re.compile(r"[A-Za-z0-9][\w.]*-[\w.!+]+(-\d[\w.]*)?(-[\w.]+){3}\.whl", re.ASCII)
_ACCELERATOR = re.compile(r"cpu|cu\d{2,3}|rocm[\d.]{1,8}|xpu")
_PYTHON = re.compile(r"3\.\d{1,2}")


@dataclass(frozen=True)
class Target:
    """A kind of machine. `platform`: one of PLATFORMS; `python`: such as 3.11; `accelerator`: torch's build, "" for PyPI's."""

    platform: str
    python: str
    accelerator: str = ""

    def check(self) -> None:
        """Raise ConfigError for an unknown value."""
        if self.platform not in PLATFORMS:
            raise ConfigError(f"--platform: {self.platform!r}: unknown; give one of {', '.join(PLATFORMS)}")
        if not _PYTHON.fullmatch(self.python):
            raise ConfigError(f"--python: {self.python!r}: not a version of Python; give one such as 3.11")
        if self.accelerator and not _ACCELERATOR.fullmatch(self.accelerator):
            raise ConfigError(f"--accelerator: {self.accelerator!r}: unknown; give cpu, or one such as cu128 or rocm6.4")

    @property
    def line(self) -> str:
        """The line that install.sh compares with the machine."""
        return f"linux {PLATFORMS[self.platform]} {self.python}"


def make(wheel: Path, output: Path, target: Target, extras: Sequence[str], links: Sequence[Path], state: Path | None) -> Path:
    """Fill the new folder `output` for one target from our released `wheel`, and return its SHA256SUMS.

    `extras`: of our package; `links`: folders of wheels to search beside the index; `state`: the folder with the project's root
    key, which signs. Raises ConfigError for wrong arguments, ConsiliumError with uv's or pip's message.
    """
    target.check()
    own = _own(wheel, extras)
    key = None if state is None else root_key(state)
    if output.exists():
        raise ConfigError(f"--output: {output}: exists; give a new folder")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".wheels-") as place:
        folder = Path(place) / "house"
        (folder / WHEELS).mkdir(parents=True)
        lock = Path(place) / "resolved"
        _resolve(own, lock, target, links)
        _fetch(lock, folder / WHEELS, target, links)
        shutil.copyfile(wheel, folder / WHEELS / wheel.name)
        describe(folder, target)
        sign(folder, key)
        folder.chmod(0o755)
        os.replace(folder, output)
    return output / SUMS


def _own(wheel: Path, extras: Sequence[str]) -> str:
    """Return the requirement of our wheel with extras. Raises ConfigError."""
    try:
        found = list(distributions(path=[str(wheel)])) if wheel.is_file() and _NAME.fullmatch(wheel.name) else []
        ours = bool(found) and found[0].metadata["Name"] == OURS
    except UnicodeDecodeError:
        ours = False
    if not ours:
        raise ConfigError(f"{wheel}: is no wheel of {OURS}; give the released one, or build it: python -m build --wheel")
    known = found[0].metadata.get_all("Provides-Extra") or []
    if wrong := [extra for extra in extras if extra not in known]:
        raise ConfigError(f"--extra: {wrong[0]!r}: the wheel has no such extra; give one of {', '.join(known)}")
    name = found[0].metadata["Name"] + (f"[{','.join(extras)}]" if extras else "")
    return f"{name} @ {wheel.resolve().as_uri()}"


def _resolve(own: str, lock: Path, target: Target, links: Sequence[Path]) -> None:
    """Write the requirements of our wheel on the target, with hashes, without our wheel."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if uv is None:
        raise ConfigError("uv: is not installed; pip install 'consilium[wheels]'")
    wanted = lock.with_suffix(".in")
    wanted.write_text(own + "\n", encoding="utf-8")
    platform = f"{PLATFORMS[target.platform]}-manylinux_2_{GLIBC}"
    words = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--generate-hashes", "--python", sys.executable]
    words += ["--python-version", target.python, "--python-platform", platform, "--no-emit-package", re.split(r"[ \[]", own)[0]]
    words += ["--torch-backend", target.accelerator] if target.accelerator else []
    words += [word for link in links for word in ("-f", str(link.resolve()))]
    _run([*words, str(wanted), "--output-file", str(lock)], "what the package needs could not be resolved")


def _fetch(lock: Path, folder: Path, target: Target, links: Sequence[Path]) -> None:
    """Download all files of a lock for the target, with their hashes checked by pip, and build wheels of source archives."""
    arch = PLATFORMS[target.platform]
    tags = [f"manylinux_2_{n}_{arch}" for n in range(GLIBC, 4, -1)] + [f"manylinux{year}_{arch}" for year in (2014, 2010, 1)]
    abi = "cp" + target.python.replace(".", "")
    options = ["--no-deps", "--quiet", "--disable-pip-version-check", "--dest", str(folder)]
    options += [word for link in links for word in ("-f", str(link.resolve()))]
    machine = ["--python-version", target.python, "--implementation", "cp"]
    machine += [word for one in (abi, "abi3", "none") for word in ("--abi", one)]
    machine += [word for tag in [*tags, f"linux_{arch}"] for word in ("--platform", tag)]
    pip = [sys.executable, "-m", "pip"]
    _run([*pip, "download", *options, *machine, "--require-hashes", "-r", str(lock)], "the wheels could not be fetched")
    for source in [path for path in folder.iterdir() if path.suffix != ".whl"]:
        build = [*pip, "wheel", "--no-deps", "--quiet", "--disable-pip-version-check", "--wheel-dir", str(folder), str(source)]
        _run(build, f"{source.name} could not be made a wheel")
        source.unlink()
    ends = ("-any.whl", f"_{arch}.whl")
    if foreign := [path.name for path in folder.iterdir() if not (_NAME.fullmatch(path.name) and path.name.endswith(ends))]:
        problem = f"is for another machine than {target.platform}; build it there and give its folder with --links"
        raise ConsiliumError(f"{foreign[0]}: {problem}")


def _run(words: list[str], problem: str) -> None:
    """Run a tool with the user's own settings for it. Raises ConsiliumError with the end of its messages."""
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip() and "WARNING" not in line]
        raise ConsiliumError(f"{problem}: {Path(words[0]).name}: {' '.join(lines[-6:])}")


def describe(folder: Path, target: Target) -> None:
    """Write the lock, bill of materials and install.sh of the wheels in `folder`, and the hashes of all files."""
    wheels = sorted((folder / WHEELS).iterdir())
    sums = {wheel: file_hash(wheel) for wheel in wheels}
    pins = ["{}=={}".format(*wheel.name.split("-")[:2]) + f" --hash=sha256:{sums[wheel]}" for wheel in wheels]
    write_atomic(folder / LOCK, "\n".join([*sorted(pins), ""]).encode(), PUBLIC)
    found = [(one, sums[wheel]) for wheel in wheels for one in distributions(path=[str(wheel)])]
    write_atomic(folder / SBOM, bill(found, OURS).encode(), PUBLIC)
    script = files(__package__).joinpath("templates", INSTALL).read_text(encoding="utf-8")
    write_atomic(folder / INSTALL, script.replace("@TARGET@", target.line).replace("@PYTHON@", target.python).encode(), PUBLIC)
    (folder / INSTALL).chmod(0o755)
    listed = sorted(path for path in folder.rglob("*") if path.is_file())
    text = "".join(f"{file_hash(path)}  {path.relative_to(folder).as_posix()}\n" for path in listed)
    write_atomic(folder / SUMS, text.encode(), PUBLIC)


def root_key(state: Path) -> rsa.RSAPrivateKey:
    """Return the project's root key, of `consilium provision` or `nvflare cert init`. Raises ConfigError."""
    try:
        if (kept := state / "cert.json").is_file():
            text = json.loads(kept.read_text(encoding="utf-8"))["root_pri_key"].encode()
        else:
            text = (state / "rootCA.key").read_bytes()
        key = load_pem_private_key(text, password=None)
        if not isinstance(key, rsa.RSAPrivateKey):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        remedy = "give kits/NAME/state, or the folder of `nvflare cert init`"
        raise ConfigError(f"--sign: {state}: has no root key; {remedy}") from None
    return key


def sign(folder: Path, key: rsa.RSAPrivateKey | None) -> None:
    """Sign the hashes, if there is a key, by RSA-PSS with SHA-256, as FLARE signs kits."""
    if key is not None:
        signature = sign_content((folder / SUMS).read_bytes(), key, return_str=False)
        write_atomic(folder / SIGNATURE, signature, PUBLIC)
