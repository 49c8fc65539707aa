"""Real startup kits from provisioning to shutdown: what runs, what is refused by whom, and what is left."""

import json
import subprocess
from pathlib import Path

import peft
import pytest
import yaml
from nvflare.fuel.flare_api.api_spec import AuthorizationError

from consilium.config.job import JobConfig
from consilium.errors import Reason
from consilium.federation.runs import STATE
from consilium.flare.doctor import examine
from consilium.flare.recipe import export
from consilium.models.sam.network import build_sam
from consilium.privacy.ledger import Ledger
from tests.conftest import small_config
from tests.deployment.federation import ADMIN, Federation


def ward(epsilon: float) -> dict:
    """Return a site.yaml with a budget."""
    return {"privacy": {"dataset": "ward", "noise_seed": 1, "budgets": {"site": {"epsilon": epsilon}}}}


def private_job() -> JobConfig:
    return JobConfig.model_validate(
        small_config("fedit", rounds=1).model_dump() | {"privacy": {"unit": "site", "epsilon": 8, "clip": 0.5}}
    )


def job_yaml(folder: Path) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(private_job().model_dump()))
    return path


def without_guard(job: Path) -> Path:
    """Take the filters out of a job's client configuration, as an author who wants no guard would."""
    path = job / "app/config/config_fed_client.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"task_data_filters": [], "task_result_filters": []}))
    return job


def with_scope(job: Path) -> Path:
    """Let a job choose a privacy scope, which decides what filters a site applies."""
    path = job / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scope": "open"}))
    return job


def console(federation: Federation, *commands: str) -> str:
    """Return what FLARE's admin console shows when a person types these commands into it."""
    words = "\n".join([ADMIN, *commands, "bye", ""])
    shell = ["bash", str(federation.kit(ADMIN) / "startup" / "fl_admin.sh")]
    found = subprocess.run(shell, input=words, env=federation.environment(), capture_output=True, text=True, timeout=60)
    return found.stdout


def test_a_private_job_on_real_kits(tmp_path: Path) -> None:
    with Federation(tmp_path, {"site-1": ward(50), "site-2": ward(50), "site-3": ward(1)}) as federation:
        federation.start()
        assert [f.check for f in examine(federation.kit("site-1")) if not f.ok] == ["data list"]  # generated ones will do here
        for name in ("server", "site-1"):
            with federation.session() as session, pytest.raises(AuthorizationError):
                session.ls_target(name)

        bundle = export(job_yaml(tmp_path), tmp_path / "bundle", bundle=True)
        refused = federation.submit(bundle)
        assert federation.wait(refused) == "FINISHED:FAILED_TO_RUN"
        assert federation.meta(refused)["job_deploy_detail"] == ["server: BYOC not permitted"]
        elsewhere = federation.submit(with_scope(federation.export(private_job())))
        assert federation.wait(elsewhere) == "FINISHED:FAILED_TO_RUN"
        assert "site-1: NVFLARE_ERROR: privacy scope 'open' is not allowed" in federation.meta(elsewhere)["job_deploy_detail"]

        config_only = without_guard(federation.export(private_job()))
        shown = console(federation, f"submit_job {config_only}")
        assert "Submitted job: " in shown
        job = shown.split("Submitted job: ")[1].split()[0]
        assert federation.wait(job) == "FINISHED:COMPLETED"
        _check_run(federation)
        result = federation.download(job)
        assert json.loads((result / "meta.json").read_text())["job_id"] == job
        assert (result / "job/small/app/config/job.yaml").is_file()
        assert not list(result.rglob("predictions.png"))
        federation.shutdown()


def _check_run(federation: Federation) -> None:
    """Sites 1 and 2 took part, each spent its budget once, and plain PEFT loads their adapters; site 3 said why not.

    The guard that did this is the sites' own: the job came without one.
    """
    (round,) = federation.events("concluded")
    assert round["sites"] == ["site-1", "site-2"]
    reasons = [e["reason"] for e in federation.events("refused") if (e["site"], e["round"]) == ("site-3", 0)]
    assert Reason.BUDGET.text in reasons[0]
    for site, rows in {"site-1": [(0, 0)], "site-2": [(0, 0)], "site-3": []}.items():
        assert [(r.round, r.phase) for r in Ledger(federation.kit(site) / STATE / "ledger.sqlite").entries()] == rows
    (folder,) = {path.parent for path in federation.kit("site-1").rglob("adapter_config.json")}
    peft.PeftModel.from_pretrained(build_sam("tiny", None, 64, 2), str(folder))
    assert not list(federation.kit("site-3").rglob("adapter_config.json"))
    pictures = federation.kits.rglob("predictions.png")  # of patients: with the sites that have them, and nowhere else
    assert {path.relative_to(federation.kits).parts[0] for path in pictures} == {"site-1", "site-2"}


@pytest.mark.parametrize(("name", "file"), [("site-1", "startup/fed_client.json"), ("server", "startup/fed_server.json")])
def test_an_altered_kit_does_not_start(name: str, file: str, tmp_path: Path) -> None:
    with Federation(tmp_path, {"site-1": {}}) as federation:
        path = federation.kit(name) / file
        path.write_text(path.read_text().replace("mtls", "clear"))
        with pytest.raises(AssertionError, match=f"(?s){name} has ended:.*not secure content.*{path.name}"):
            federation.start(name)


def test_an_altered_admin_kit_does_not_log_in(tmp_path: Path) -> None:
    with Federation(tmp_path, {"site-1": {}}) as federation:
        path = federation.kit(ADMIN) / "startup/fed_admin.json"
        path.write_text(path.read_text().replace("localhost", "elsewhere"))
        assert "invalid fed_admin.json: tampered" in console(federation)
