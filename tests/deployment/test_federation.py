"""Real startup kits from provisioning to shutdown: what runs, what is refused by whom, and what is left.

The whole run is slow; what the kits decide in it test_policies asks without starting anything.
"""

import json
import subprocess
from pathlib import Path

import pytest
from nvflare.fuel.flare_api.api_spec import AuthorizationError

from consilium.flare.job.recipe import export
from consilium.flare.kit.doctor import examine
from tests.deployment.federation import ADMIN, Federation
from tests.deployment.jobs import check_private_run, job_yaml, private_job, ward, with_scope, without_guard


def console(federation: Federation, *commands: str) -> str:
    """Return what FLARE's admin console shows when a person types these commands into it."""
    words = "\n".join([ADMIN, *commands, "bye", ""])
    shell = ["bash", str(federation.kit(ADMIN) / "startup" / "fl_admin.sh")]
    found = subprocess.run(shell, input=words, env=federation.environment(), capture_output=True, text=True, timeout=60)
    return found.stdout


@pytest.mark.long
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
        check_private_run(federation)
        result = federation.download(job)
        assert json.loads((result / "meta.json").read_text())["job_id"] == job
        assert (result / "job/small/app/config/job.yaml").is_file()
        assert not [path for name in ("predictions.png", "cases*", "*.jpg") for path in result.rglob(name)]
        federation.shutdown()


@pytest.mark.parametrize(
    ("name", "file"),
    [("site-1", "startup/fed_client.json"), pytest.param("server", "startup/fed_server.json", marks=pytest.mark.slow)],
)
def test_an_altered_kit_does_not_start(name: str, file: str, tmp_path: Path) -> None:
    """Nor does an administrator's log in."""
    with Federation(tmp_path, {"site-1": {}}) as federation:
        path = federation.kit(name) / file
        path.write_text(path.read_text().replace("mtls", "clear"))
        with pytest.raises(AssertionError, match=f"(?s){name} has ended:.*not secure content.*{path.name}"):
            federation.start(name)
        path = federation.kit(ADMIN) / "startup/fed_admin.json"
        path.write_text(path.read_text().replace("localhost", "elsewhere"))
        assert "invalid fed_admin.json: tampered" in console(federation)
