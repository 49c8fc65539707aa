"""A plug-in is changed after a site's administrator approved a job that uses it, and the job comes again."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from consilium.cli.main import app as command_line
from consilium.client import approval
from consilium.config.job import JobConfig, load_job
from consilium.config.site import SiteConfig
from consilium.core.errors import Reason, RefusedError
from consilium.flare.job.recipe import export
from consilium.strategies.registry import STRATEGIES
from tests.conftest import JOBS
from tests.plugin.test_plugin import EXAMPLE, MODULE, NAME, job_file

PLUGINS = frozenset({NAME})
SITE = SiteConfig(approve="digest", plugins=(NAME,))
METADATA = f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {{}}\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder in which the example package lies as an installer leaves it, with a module that no class imports."""
    folder = tmp_path / "site-packages"
    shutil.copytree(EXAMPLE / MODULE, folder / MODULE, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / MODULE / "helper.py").write_text("STRENGTH = 1\n")
    about = folder / f"{MODULE}-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(METADATA.format("0.1.0"))
    (about / "entry_points.txt").write_text(f"[consilium.strategies]\nfedavgm = {MODULE}:FedAvgM\n")
    monkeypatch.syspath_prepend(folder)
    forget()
    yield folder
    forget()


def forget() -> None:
    """Let the next job load the package again, as the process of another job does."""
    invalidate_caches()
    STRATEGIES._added.pop("fedavgm", None)
    STRATEGIES.packages.pop("fedavgm", None)
    for name in (MODULE, f"{MODULE}.helper"):
        sys.modules.pop(name, None)


@pytest.fixture
def job(installed: Path, tmp_path: Path) -> Path:
    """Return the app of a job that uses the package."""
    return export(job_file(tmp_path), tmp_path / "export", plugins=PLUGINS) / "app"


@pytest.fixture
def local(job: Path, tmp_path: Path) -> Path:
    """Return local/ of a kit whose administrator has approved the job."""
    folder = tmp_path / "kit/local"
    folder.mkdir(parents=True)
    (folder / "site.yaml").write_text(f"{{approve: digest, plugins: [{NAME}]}}")
    approval.approve(job, folder, PLUGINS)
    return folder


def check(job: Path, local: Path) -> None:
    approval.check_approved(job, load(job), SITE, local)


def load(job: Path) -> JobConfig:
    return load_job(job / approval.JOB, plugins=PLUGINS)


def code(folder: Path) -> None:
    path = folder / MODULE / "__init__.py"
    path.write_text(path.read_text().replace("self.momentum * before", "2 * self.momentum * before"))


def helper(folder: Path) -> None:
    (folder / MODULE / "helper.py").write_text("STRENGTH = 2\n")


def data(folder: Path) -> None:
    (folder / MODULE / "settings.json").write_text("{}")


def version(folder: Path) -> None:
    (folder / f"{MODULE}-0.1.0.dist-info/METADATA").write_text(METADATA.format("0.1.1"))


@pytest.mark.parametrize("change", [code, helper, data, version])
def test_a_plug_in_changed_after_approval_is_refused(
    change: Callable[[Path], None], installed: Path, job: Path, local: Path
) -> None:
    check(job, local)
    change(installed)
    forget()
    with pytest.raises(RefusedError, match=rf"is not approved here .*plug-ins installed here \({NAME}") as told:
        check(job, local)
    assert told.value.reason is Reason.APPROVAL
    assert "\n" not in str(told.value)
    again = CliRunner().invoke(command_line, ["approve", str(job), "--kit", str(local.parent), "--yes"])
    assert again.exit_code == 0
    assert NAME in again.stdout
    check(job, local)


def test_another_job_with_a_changed_plug_in_was_never_approved(installed: Path, job: Path, local: Path) -> None:
    code(installed)
    forget()
    path = job / approval.JOB
    raw = yaml.safe_load(path.read_text())
    raw["training"]["rounds"] += 1
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises(RefusedError, match="is not approved here"):
        check(job, local)


def test_the_same_plug_in_installed_again_is_the_same(
    installed: Path, job: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own cache and what an installer writes about itself are not part of it, nor is the folder."""
    (installed / MODULE / "__pycache__").mkdir(exist_ok=True)
    (installed / MODULE / "__pycache__/helper.cpython-311.pyc").write_bytes(b"x")
    (installed / f"{MODULE}-0.1.0.dist-info/INSTALLER").write_text("uv")
    shutil.move(installed, installed.parent / "elsewhere")
    monkeypatch.syspath_prepend(installed.parent / "elsewhere")
    forget()
    check(job, local)


def before(app: Path, config: JobConfig) -> str:
    """Return the digest that versions up to 0.2.0 made of an app: of its files alone, the two configurations as values."""
    job, client = app / "config/job.yaml", app / "config/config_fed_client.json"
    values = {
        job: json.dumps(config.model_dump(mode="json", exclude={"experiment"})),
        client: json.dumps(json.loads(client.read_text(), object_hook=in_order), sort_keys=True),
    }
    files = sorted(path for path in app.rglob("*") if path.is_file() and path.name != "config_fed_server.json")
    lines = [
        f"{sha256(values.get(path, '').encode() or path.read_bytes()).hexdigest()}  {path.relative_to(app).as_posix()}\n"
        for path in files
    ]
    return sha256("".join(lines).encode()).hexdigest()


def in_order(section: dict[str, Any]) -> dict[str, Any]:
    return section | ({"tasks": sorted(section["tasks"])} if isinstance(section.get("tasks"), list) else {})


def record(local: Path, digest: str) -> None:
    one = {"job": "small", "time": "2026-01-01T00:00:00+00:00", "by": "admin"}
    (local / approval.FILE).write_text(json.dumps({digest: one}))


def test_an_approval_of_before_is_given_again_where_a_plug_in_is_in_play(job: Path, local: Path) -> None:
    record(local, before(job, load(job)))
    with pytest.raises(RefusedError, match=rf"plug-ins installed here \({NAME} 0\.1\.0\); review it and run"):
        check(job, local)


def test_an_approval_of_before_holds_for_a_job_without_plug_ins(tmp_path: Path) -> None:
    app = JOBS / "quickstart/app"
    config = load_job(app / approval.JOB)
    record(tmp_path, before(app, config))
    approval.check_approved(app, config, SITE, tmp_path)
