"""A site's state folder that was restored from a backup, between jobs of running kits."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from consilium.cli.main import app
from consilium.federation.run_folders import STATE
from consilium.server.coordinator import FILE
from tests.deployment.federation import Federation
from tests.deployment.jobs import private_job

SITES = ["site-1", "site-2"]


@pytest.mark.slow
def test_restored_site_needs_acceptance(tmp_path: Path) -> None:
    """Its ledger and record fit each other, so the next job was charged as if the second had never been."""
    sites = {name: {"privacy": {"dataset": "ward", "budgets": {"site": {"epsilon": 50}}}} for name in SITES}
    with Federation(tmp_path / "federation", sites) as federation:
        federation.start()
        own = federation.kit("site-1") / STATE
        assert run(federation, "one") == "FINISHED:COMPLETED"
        shutil.copytree(own, tmp_path / "backup")
        assert run(federation, "two") == "FINISHED:COMPLETED"
        shutil.rmtree(own)
        shutil.copytree(tmp_path / "backup", own)
        assert run(federation, "three") != "FINISHED:COMPLETED"
        assert [event["site"] for event in federation.events("refused")] == ["site-1"]
        seal = json.loads((federation.kit("server") / STATE / FILE).read_text())["site-1"]
        remedy = f"consilium privacy accept KIT --seal {seal} --reason TEXT"
        assert remedy in federation.log("site-1")
        words = remedy.replace("KIT", str(federation.kit("site-1"))).replace("TEXT", "disk").split()
        CliRunner().invoke(app, words[1:], catch_exceptions=False)
        assert run(federation, "four") == "FINISHED:COMPLETED"


def run(federation: Federation, name: str) -> str:
    job = private_job().model_copy(update={"experiment": name})
    return federation.wait(federation.submit(federation.export(job)), 300)
