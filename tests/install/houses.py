"""Small wheelhouses: two wheels written here, of which one is called consilium and needs the other."""

import platform
import sys
import zipfile
from pathlib import Path

from consilium.flare.kit.install import wheels
from consilium.flare.kit.install.wheels import Target

HERE = Target(f"linux-{platform.machine()}", f"{sys.version_info.major}.{sys.version_info.minor}")


def write_wheel(folder: Path, name: str, version: str, *needs: str, code: str = "") -> Path:
    """Write a wheel of one module, with the command NAME that runs its main()."""
    lines = [f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nLicense-Expression: MIT"]
    lines += [f"Requires-Dist: {need}" for need in needs]
    info, path = f"{name}-{version}.dist-info", folder / f"{name}-{version}-py3-none-any.whl"
    content = {
        f"{name}.py": code or f"def main():\n    print({version!r})\n",
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    content[f"{info}/RECORD"] = "".join(f"{one},,\n" for one in [*content, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for one, text in content.items():
            archive.writestr(zipfile.ZipInfo(one), text)
    return path


def house(folder: Path, state: Path | None, target: Target = HERE) -> Path:
    """Return a whole wheelhouse, made as `make` does it after all wheels are there."""
    (folder / wheels.WHEELS).mkdir(parents=True)
    write_wheel(folder / wheels.WHEELS, "consilium", "9.9", "tinypart==1.0")
    write_wheel(folder / wheels.WHEELS, "tinypart", "1.0")
    wheels.describe(folder, target)
    wheels.sign(folder, None if state is None else wheels.root_key(state))
    return folder
