"""Prepare a kit for Docker, Kubernetes or Slurm with FLARE's `nvflare deploy prepare`, and keep the kit's own policies.

FLARE 2.9 prepares local/resources.json.default and removes the resources.json of our kits. The prepared kit would then allow
FLARE's 88 classes instead of ours, and send its logs to the server. FLARE also writes connection settings to a file that the
kit's own comm_config.json overrides. In the Helm chart, FLARE names containers after the kit. Kubernetes refuses such a name if
it has dots, as a server's has. This module corrects all three.
"""

import io
import os
import shutil
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import yaml
from nvflare.tool.deploy.deploy_commands import prepare_deployment

from consilium.config.site import load_site
from consilium.core.errors import ConfigError, raise_first
from consilium.core.schema import read_yaml
from consilium.core.storage import copy_tree, read_json
from consilium.federation.run_folders import STATE
from consilium.flare.kit import revocation
from consilium.flare.kit.kit_hardening import COMM, RESOURCES, shadows_job_settings
from consilium.flare.kit.kit_reader import LOCKED, RUN_FILES, kit_name, kit_role, participant_role
from consilium.flare.kit.processes import check_stopped

DEFAULT, CHART_VALUES = f"{RESOURCES}.default", Path("helm_chart", "values.yaml")
FOLDERS, FILES = ("startup", "local"), (COMM, RESOURCES, "readme.txt")
"""Everything that `consilium provision` writes into a kit, except the empty folder `transfer`, which start.sh creates."""
LOCAL = (
    *(f"{name}.json{end}" for name in ("authorization", "privacy", "log_config") for end in ("", ".default", ".sample")),
    "*resources.json",
    DEFAULT,
    COMM,
    "study_registry.json",
    "site.yaml",
    revocation.FILE,
    "custom",
)
"""Patterns of the settings in local/, in FLARE's names and ours: policies, relays, revocations, and the site's own code."""


def prepare(kit: Path, settings: Path, output: Path) -> Path:
    """Write a copy of a site's or a server's kit, prepared for a runtime, into the new folder `output`, and return the folder.

    `settings`: FLARE's file that describes the runtime. Raises ConfigError for an unsuitable kit, for an existing folder,
    and with FLARE's reason if FLARE cannot prepare the kit.
    """
    kit_name(kit)
    problems: dict[str, object] = {
        f"{kit}: neither a site's nor the server's startup kit; give one's folder": (
            participant_role(kit) not in ("site", "server")
        ),
        f"{kit}: a job could bring its own connection settings; run `consilium allow {kit}` first": (
            not shadows_job_settings(kit)
        ),
        f"{kit}: its keys are locked, and a container cannot ask; run `consilium unlock {kit} --for-good`": (
            (kit / LOCKED).is_file()
        ),
        f"--output: {output}: lies in the kit that is copied; give a folder outside of it": (
            output.resolve().is_relative_to(kit.resolve())
        ),
        f"--output: {output}: exists; give a new folder": output.exists(),
    }
    raise_first(problems)
    check_stopped(kit)
    if kit_role(kit) == "site":
        _check_paths_outside(kit)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".prepare-") as place:
        copy = copy_without_run_files(kit, Path(place) / kit.resolve().name)
        local = copy / "local"  # FLARE reads the kit's settings from there
        os.replace(local / RESOURCES, local / DEFAULT)
        (copy / RESOURCES).unlink()
        if read_json(copy / COMM):
            os.replace(copy / COMM, local / COMM)
        else:
            (copy / COMM).unlink()
        _run_flare_prepare(copy, settings, output)
    os.replace(output / "local" / DEFAULT, output / "local" / RESOURCES)
    for name in (RESOURCES, COMM):  # as kit_hardening.shadow_job_settings does
        (output / name).symlink_to(Path("local") / name)
        (output / "local" / name).chmod(0o600)
    if (chart := output / CHART_VALUES).is_file():
        values = read_yaml(chart)
        chart.write_text(yaml.safe_dump(values | {"name": values["serviceName"]}, sort_keys=False), encoding="utf-8")
    return output


def copy_without_run_files(kit: Path, target: Path) -> Path:
    """Copy a kit without the files of its use, such as logs, jobs, state, pid files and caches. Return the copy.

    From local/ only settings are copied (LOCAL). Approvals are not, because an approval that is withdrawn in the kit would stay
    valid in the copy. So jobs are approved anew there. Links in local/ become files, so that a change in the copy changes no
    file of the kit.
    """

    def left_out(folder: str, names: list[str]) -> set[str]:
        patterns = LOCAL if Path(folder) == kit / "local" else ("*",)
        return RUN_FILES(folder, names) | {name for name in names if not any(fnmatchcase(name, one) for one in patterns)}

    target.mkdir(mode=0o700)
    for folder in FOLDERS:  # each may be a link to a folder
        try:
            copy_tree(kit / folder, target / folder, symlinks=folder != "local", ignore=left_out)
        except OSError as error:  # such as a link to a file that is gone
            raise ConfigError(f"{error.filename}: cannot be copied ({error.strerror}); restore it, or delete it") from None
    for name in FILES:
        if os.path.lexists(kit / name):
            shutil.copy2(kit / name, target / name, follow_symlinks=False)
    return target


def _check_paths_outside(kit: Path) -> None:
    """Raise ConfigError unless state, ledger, data lists and checkpoints of a site are at absolute paths outside of the kit.

    The kit and its copy must share one ledger, or a budget could be spent twice. Data and checkpoints are not copied.
    """
    path = kit / "local" / "site.yaml"
    load_site(path)
    raw = read_yaml(path) or {}
    named = {"state": raw.get("state") or "", "privacy.ledger": (raw.get("privacy") or {}).get("ledger")}
    lists = {"datalist": raw} | {f"datasets.{name}.datalist": one for name, one in (raw.get("datasets") or {}).items()}
    named |= {field: one.get("datalist") for field, one in lists.items()} | {"checkpoints": raw.get("checkpoints")}
    for field, place in named.items():
        if place is not None and (not Path(place).is_absolute() or Path(place).resolve().is_relative_to(kit.resolve())):
            raise ConfigError(
                f"{path}: {field}: {place or 'not given'}: the copy would have a ledger and a budget of its own, or no files; "
                f"move {place or kit / STATE}, if it is there, out of the kit, and write its absolute path"
            )


def _run_flare_prepare(copy: Path, settings: Path, output: Path) -> None:
    output_text = io.StringIO()
    try:
        with redirect_stderr(output_text), redirect_stdout(output_text):
            prepare_deployment(SimpleNamespace(kit=str(copy), output=str(output.absolute()), config=str(settings)))
    except SystemExit:
        lines = [line for line in output_text.getvalue().splitlines() if line and not line.startswith(("Warning:", "Code:"))]
        raise ConfigError(f"{settings}: {' '.join(lines)}") from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # FLARE does not check the type of every value
        raise ConfigError(
            f"{settings}: FLARE cannot use it ({type(error).__name__}: {error}); "
            "compare it with provisioning/container/slurm.yaml"
        ) from None
