"""A kit for Docker, Kubernetes or Slurm by FLARE's `nvflare deploy prepare`, with the policies it had.

FLARE 2.9 prepares local/resources.json.default, and removes the resources.json that our kits have beside it: a prepared kit
would list FLARE's 88 classes instead of ours, and send its logs to the server. Its connections' settings it writes where the
kit's own come first. Here both are put right.
"""

import io
import json
import os
import shutil
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nvflare.tool.deploy.deploy_commands import prepare_deployment

from consilium.config.site import load_site
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.schema import read_yaml
from consilium.federation.run_folders import STATE
from consilium.flare.kit.kit_hardening import COMM, RESOURCES, is_pinned
from consilium.flare.kit.local_folder import kit_name, kit_role

DEFAULT = f"{RESOURCES}.default"


def prepare(kit: Path, settings: Path, output: Path) -> Path:
    """Write a copy of a site's or server's kit for the runtime that FLARE's `settings` name, into the new folder `output`.

    The kit itself stays as it is. Raises ConfigError for what is no such kit, ConsiliumError with FLARE's reason.
    """
    kit_name(kit)
    if kit_role(kit) is None or not is_pinned(kit):
        raise ConfigError(f"{kit}: is no closed kit of a site or server; run `consilium allow KIT` first")
    if output.resolve().is_relative_to(kit.resolve()):
        raise ConfigError(f"--output: {output}: lies in the kit that is copied; give a folder outside of it")
    if kit_role(kit) == "site":
        _check_state(kit)
    if output.exists():
        raise ConfigError(f"--output: {output}: exists; give a new folder")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".prepare-") as place:
        copy = Path(shutil.copytree(kit, Path(place) / kit.resolve().name, symlinks=True))
        _offer(copy)
        _flare(copy, settings, output)
    _close(output)
    return output


def _check_state(kit: Path) -> None:
    """Raise ConfigError unless kit and copy have one ledger: with two, a budget could be spent twice."""
    path = kit / "local" / "site.yaml"
    load_site(path)
    raw = read_yaml(path) or {}
    if not all(Path(place).is_absolute() for place in (raw.get("state", ""), raw.get("privacy", {}).get("ledger", "/"))):
        remedy = f"move {kit / STATE}, if it is there, to a folder of its own, and write absolute paths"
        raise ConfigError(f"{path}: state: the copy would have a ledger and a budget of its own; {remedy}")


def _offer(copy: Path) -> None:
    """Put the kit's own settings where FLARE takes them from."""
    local = copy / "local"
    os.replace(local / RESOURCES, local / DEFAULT)
    own: dict[str, Any] = json.loads((copy / COMM).read_text(encoding="utf-8"))
    if own:
        os.replace(copy / COMM, local / COMM)
    else:
        (copy / COMM).unlink()
    (copy / RESOURCES).unlink()


def _flare(copy: Path, settings: Path, output: Path) -> None:
    said = io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(said):
            prepare_deployment(SimpleNamespace(kit=str(copy), output=str(output.absolute()), config=str(settings)))
    except SystemExit:
        lines = [line for line in said.getvalue().splitlines() if line and not line.startswith(("Warning:", "Code:"))]
        raise ConsiliumError(f"{settings}: {' '.join(lines)}") from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # it checks not every value's kind
        what = f"FLARE cannot use it ({type(error).__name__}: {error})"
        raise ConsiliumError(f"{settings}: {what}; compare it with provisioning/container/slurm.yaml") from None


def _close(output: Path) -> None:
    """Put the settings back to where no others can come first, as hardening.pin_settings does it."""
    local = output / "local"
    os.replace(local / DEFAULT, local / RESOURCES)
    for name in (RESOURCES, COMM):
        (output / name).symlink_to(Path("local") / name)
        (local / name).chmod(0o600)
