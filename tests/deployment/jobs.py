"""Private jobs for kits of three wards, ways to weaken them, what a run must leave, and partners named by fingerprint."""

import json
import shutil
from pathlib import Path

import peft
import yaml
from typer.testing import CliRunner

from consilium.cli.main import app
from consilium.config.job import JobConfig
from consilium.core.errors import Reason
from consilium.federation.run_folders import STATE
from consilium.flare.kit.doctor import examine
from consilium.models.sam.network import build_sam
from consilium.privacy.ledger import Ledger
from consilium.report.page.run_page import run_page, site_page
from consilium.report.run_record import read_run
from tests.conftest import small_config
from tests.deployment.federation import ADMIN, Federation


def ward(epsilon: float) -> dict:
    """Return a site.yaml with a budget."""
    return {"privacy": {"dataset": "ward", "noise_seed": 1, "budgets": {"site": {"epsilon": epsilon}}}}


def private_job() -> JobConfig:
    return JobConfig.model_validate(
        small_config("fedit", rounds=1).model_dump() | {"privacy": {"unit": "site", "epsilon": 8, "clip": 0.5}}
    )


def pin(federation: Federation, sites: list[str]) -> None:
    """Name to every site the others, by the fingerprints that `consilium doctor` prints of their kits."""
    prints = {name: fingerprint_of(federation.kit(name)) for name in sites}
    for name in sites:
        path = federation.kit(name) / "local" / "site.yaml"
        partners = {other: found for other, found in prints.items() if other != name}
        path.write_text(
            yaml.safe_dump((yaml.safe_load(path.read_text()) or {}) | {"secure_aggregation": {"partners": partners}})
        )


def fingerprint_of(kit: Path) -> str:
    """Return the fingerprint of a kit's key, 64 hex digits, as its administrator reads it out."""
    (said,) = (one.found for one in examine(kit) if one.check == "fingerprint")
    return said.split()[0]


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


def consilium(federation: Federation, *words: str, code: int = 0) -> str:
    """Return what the command prints for the admin; as JSON for programs where it can."""
    found = CliRunner().invoke(app, [*words, "--kit", str(federation.kit(ADMIN))])
    assert found.exit_code == code, (found.output, found.exception)
    return found.stdout if code == 0 else str(found.exception)


def check_private_run(federation: Federation) -> None:
    """Sites 1 and 2 took part, each spent its budget once, and plain PEFT loads their adapters; site 3 said why not.

    The guard that did this is the sites' own: the job came without one.
    """
    (round,) = federation.events("concluded")
    assert round["sites"] == ["site-1", "site-2"]
    reasons = [e["reason"] for e in federation.events("refused") if (e["site"], e["round"]) == ("site-3", 0)]
    assert Reason.BUDGET.text in reasons[0]
    for site, rows in {"site-1": [(0, 0)], "site-2": [(0, 0)], "site-3": []}.items():
        assert [(r.round, r.phase) for r in Ledger(federation.kit(site) / STATE / "ledger.sqlite").entries()] == rows
    (folder,) = {path.parent for path in federation.kit("site-1").rglob("adapters/global/adapter_config.json")}
    peft.PeftModel.from_pretrained(build_sam("tiny", None, 64, 2), str(folder))
    assert not list(federation.kit("site-3").rglob("adapter_config.json"))
    for name in ("predictions.png", "cases.json", "best-global.jpg"):  # of patients: with the sites that have them only
        assert {path.relative_to(federation.kits).parts[0] for path in federation.kits.rglob(name)} == {"site-1", "site-2"}
    check_reports(federation)


def check_reports(federation: Federation) -> None:
    """The server's page shows no patient, not even one that somebody put there; a site's has its own, and what left it."""
    server, (own,) = federation.server_files(), {path.parent for path in federation.kit("site-1").rglob("cases.json")}
    shutil.copytree(own, server / "sites" / "site-1")
    page = run_page(read_run(server))
    assert "data:image" not in page
    assert "the server of a federation" in page
    shutil.rmtree(server / "sites")
    page = site_page(own.parents[1], "site-1")
    assert page.count("data:image/jpeg") >= 4
    assert "Messages that left this site" in page
    assert "Privacy spent by all jobs together" in page
