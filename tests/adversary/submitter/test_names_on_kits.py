"""On real kits: a run's name reaches nobody else's files, and a job that fails says why."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from consilium.cli.main import app
from consilium.federation.run_folders import STATE
from tests.adversary.network.modes import open_to_others
from tests.conftest import small_config
from tests.deployment.federation import ADMIN, LEAD, Federation

pytestmark = pytest.mark.long


def consilium(federation: Federation, *words: str, user: str = ADMIN, code: int = 0) -> str:
    found = CliRunner().invoke(app, [*words, "--kit", str(federation.kit(user))])
    assert found.exit_code == code, (found.output, found.exception)
    return found.stdout if code == 0 else f"{found.output}{found.exception}"


def reason(federation: Federation, job: str) -> str:
    return json.loads(consilium(federation, "status", job, "--format", "json"))["reason"]


def exported(federation: Federation, experiment: str | None = None, rounds: int = 1, **parts: dict) -> Path:
    """Return a job folder as FLARE's own tools submit it; `parts`: a component for "server" or "client"."""
    folder = federation.export(small_config("fedit", rounds=rounds, local_steps=1))
    path = folder / "app/config/job.yaml"
    path.write_text(path.read_text().replace("experiment: null", f"experiment: {experiment or 'null'}"))
    for side, component in parts.items():
        path = folder / f"app/config/config_fed_{side}.json"
        found = json.loads(path.read_text())
        path.write_text(json.dumps(found | {"components": [*found.get("components", []), component]}))
    return folder


def test_names_owners_and_reasons_on_kits(tmp_path: Path) -> None:
    with Federation(tmp_path, {"site-1": {}, "site-2": {}}) as federation:
        federation.start()
        _check_refused_classes(federation)
        _check_names_of_files(federation)
        _check_owners(federation)
        for name in ("server", "site-1"):
            assert open_to_others(federation.kit(name) / STATE) == []
        federation.shutdown()


def _check_refused_classes(federation: Federation) -> None:
    """FLARE calls such a job ABNORMAL or EXECUTION_EXCEPTION and says no more."""
    popen = {"id": "x", "path": "subprocess.Popen", "args": {"args": ["true"]}}
    job = federation.submit(exported(federation, server=popen))
    assert federation.wait(job) == "FINISHED:EXECUTION_EXCEPTION"
    assert "'subprocess.Popen' at config path 'components.#2' is not in allow_list" in reason(federation, job)
    job = federation.submit(exported(federation, client=popen))
    assert federation.wait(job) == "FINISHED:ABNORMAL"
    said = reason(federation, job)
    assert said.startswith("FLARE ended the job before the first round; see the logs of site-")


def _check_names_of_files(federation: Federation) -> None:
    job = federation.submit(exported(federation, "ledger.sqlite"))
    assert federation.wait(job) == "FINISHED:EXECUTION_EXCEPTION"
    assert "'ledger.sqlite' is the name of a file or folder of ours" in reason(federation, job)
    assert not [p for p in federation.kits.rglob("ledger.sqlite") if p.is_dir()]


def _check_owners(federation: Federation) -> None:
    """What the admin began with FLARE's own tools the lead neither takes over nor goes on with; the admin does."""
    folder = exported(federation, "same", rounds=3)
    job = federation.submit(folder)
    federation.until(lambda: federation.concluded() >= 1, 120, "round 1")
    federation.abort(job)
    federation.wait(job)
    refused = consilium(federation, "resume", "same", str(folder), "--wait", user=LEAD, code=1)
    assert f"'same' is a run of {ADMIN}, not of {LEAD}" in refused
    said = consilium(federation, "resume", "same", str(folder), "--wait")
    assert "same: FINISHED:COMPLETED" in said
    assert "resumed" in [event["event"] for event in federation.events()]
