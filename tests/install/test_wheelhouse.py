"""The page's own lines pack, check and install a wheelhouse of small wheels. What was changed on its way is not installed."""

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import consilium
from consilium.flare.kit.provision import provision
from tests.pages.reading import ROOT, blocks

PAGE = "provisioning/installation.md"
PACK, INSTALL = (next(b.text for b in blocks(PAGE) if word in b.text) for word in ("uv pip compile", "--no-index"))


def write_wheel(folder: Path, name: str, version: str, *needs: str) -> Path:
    """Write a wheel of one module, with the command `consilium` that runs its main()."""
    lines = [f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {need}" for need in needs)]
    info, path = f"{name}-{version}.dist-info", folder / f"{name}-{version}-py3-none-any.whl"
    content = {
        f"{name}.py": f"def main():\n    print({version!r})\n",
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\nconsilium = {name}:main\n",
    }
    content[f"{info}/RECORD"] = "".join(f"{one},,\n" for one in [*content, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for one, text in content.items():
            archive.writestr(zipfile.ZipInfo(one), text)
    return path


def type_in(text: str, folder: Path, links: Path) -> subprocess.CompletedProcess[str]:
    """Run a block of the page in `folder`, with these places for its words, and with no index but the folder `links`."""
    kits = folder.parent / "kits/consilium"
    places = {"STATE": kits / "state", "KIT": kits / "prod_00/hospital-a", "/opt/consilium": "../environment"}
    for word, place in places.items():
        text = re.sub(rf"(?<![\w.]){word}\b", str(place), text)
    offline = {
        "PIP_NO_INDEX": "1",
        "UV_NO_INDEX": "1",
        "UV_OFFLINE": "1",
        "PIP_FIND_LINKS": str(links),
        "UV_FIND_LINKS": str(links),
    }
    environment = os.environ | offline | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)  # pip would take the metadata of a clone there for an installed package
    return subprocess.run(["bash", "-e"], input=text, cwd=folder, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a project's kits and state, and a packed wheelhouse."""
    place = tmp_path_factory.mktemp("hub")
    provision(ROOT / "provisioning/sites.yml", place / "kits")
    for name in ("links", "a house"):
        (place / name).mkdir()
    write_wheel(place / "links", "consilium_flare", consilium.__version__, "tinypart>=1.0")
    write_wheel(place / "links", "tinypart", "1.0")
    write_wheel(place / "links", "tinypart", "1.1")
    (place / "a house/requirements.txt").write_text("tinypart==1.0\n")
    done = type_in(PACK, place / "a house", place / "links")
    assert done.returncode == 0, done.stderr
    return place


def installed(hub: Path) -> bool:
    """Run the hospital's block and tell whether it made an environment."""
    done = type_in(INSTALL, hub / "a house", hub / "no index")
    assert (done.returncode == 0) == (hub / "environment").exists(), done.stderr
    return done.returncode == 0


@pytest.mark.slow  # uv, pip and a virtual environment
def test_changed_missing_and_added_wheels_are_not_installed(hub: Path) -> None:
    house = hub / "a house"
    part = house / "wheels/tinypart-1.0-py3-none-any.whl"
    kept, sums = part.read_bytes(), (house / "SHA256SUMS").read_text()
    part.write_bytes(kept + b"x")
    assert not installed(hub)
    part.unlink()
    assert not installed(hub)
    part.write_bytes(kept)
    added = write_wheel(house / "wheels", "tinypart", "1.0.post1")
    assert not installed(hub)
    line = f"{hashlib.sha256(added.read_bytes()).hexdigest()}  wheels/{added.name}"  # who may write the folder changes both
    (house / "SHA256SUMS").write_text("\n".join(sorted([*sums.splitlines(), line], key=lambda one: one.split()[1])) + "\n")
    assert not installed(hub)
    added.unlink()
    (house / "SHA256SUMS").write_text(sums)
    assert installed(hub)
    said = subprocess.run([hub / "environment/bin/consilium"], capture_output=True, text=True, check=True).stdout
    assert said == f"{consilium.__version__}\n"
    (site,) = (hub / "environment").glob("lib/*/site-packages")
    assert (site / "tinypart-1.0.dist-info").is_dir()
