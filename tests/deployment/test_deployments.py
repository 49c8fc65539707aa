"""Other ways to deploy, each a whole federation of minutes: bundles, kits with the hospitals' own keys, altered jobs."""

import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import yaml

from consilium.cli.site_records import markdown
from consilium.config.job import JobConfig
from consilium.federation.run_folders import STATE
from consilium.flare.job.recipe import export
from consilium.flare.kit.local_folder import apply_local
from consilium.models.sam.network import build_sam
from consilium.privacy import audit_log
from consilium.privacy.ledger import Ledger
from tests.conftest import JOBS, small_cells, small_config, training_only
from tests.deployment.federation import LEAD, Federation
from tests.deployment.jobs import fingerprint_of, pin

SAYS_WHERE = '\nprint("bundled package in use:", __file__, flush=True)\n'


@pytest.mark.slow
def test_bundle_runs_only_where_allowed(tmp_path: Path) -> None:
    sites = {"site-1": {}, "site-2": {}, "site-3": {}}
    with Federation(tmp_path, sites, bundles=["server", "site-1", "site-2"], installed=False) as federation:
        federation.variables["site-3"] = Federation.scratch_environment(tmp_path)  # its kit counts on the package
        federation.start()
        job = tmp_path / "job.yaml"
        job.write_text(yaml.safe_dump(small_config("fedit", rounds=1).model_dump()))
        bundle = export(job, tmp_path / "bundle", bundle=True)
        with open(bundle / "app/custom/consilium/__init__.py", "a") as file:
            file.write(SAYS_WHERE)
        submitted = federation.submit(bundle, LEAD)
        assert federation.wait(submitted, 240) == "FINISHED:COMPLETED"
        assert "site-3: NVFLARE_ERROR: BYOC not permitted" in federation.meta(submitted)["job_deploy_detail"]
        (round,) = federation.events("concluded")
        assert round["sites"] == ["site-1", "site-2"]
        for name in ("server", "site-1", "site-2"):
            assert f"bundled package in use: {federation.kit(name)}/{submitted}/" in federation.log(name)
        assert "bundled package in use" not in federation.log("site-3")
        federation.shutdown()


def altered(data: Path) -> None:
    """Change one byte of the configuration in a stored job."""
    _rewrite(data, lambda name, body: body.replace(b"fedit", b"fedIt") if name.endswith("job.yaml") else body)


def unsigned(data: Path) -> None:
    """Take all signatures out of a stored job."""
    _rewrite(data, lambda name, body: None if Path(name).name.startswith(".__nvfl_") else body)


def _rewrite(data: Path, edit: Callable[[str, bytes], bytes | None]) -> None:
    with zipfile.ZipFile(data) as old:
        files = {name: edit(name, old.read(name)) for name in old.namelist()}
    with zipfile.ZipFile(data, "w") as new:
        for name, body in files.items():
            if body is not None:
                new.writestr(name, body)


def careless(server: Path) -> None:
    """Make a server of the federation take unsigned jobs: it can change its own kit."""
    (server / "startup/signature.json").unlink()
    path = server / "startup/fed_server.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"require_signed_jobs": False}))


@pytest.mark.slow
def test_altered_jobs_and_other_classes_are_refused(tmp_path: Path) -> None:
    """Jobs wait in the server's store for a second site while they are changed."""
    with Federation(tmp_path, {"site-1": {}, "site-2": {}}) as federation:
        server = "server: app app does not pass signature verification"
        federation.start("server", "site-1")
        _check_refusals(federation, [(altered, server), (unsigned, "server: unsigned job rejected")])
        _check_other_class(federation, tmp_path / "proof")
        federation.kill("site-2")
        federation.kill("server")
        careless(federation.kit("server"))
        federation.start("server")
        _check_refusals(federation, [(unsigned, "site-1: unsigned job rejected")])


def _check_refusals(federation: Federation, cases: list[tuple[Callable[[Path], None], str]]) -> None:
    jobs = [(federation.submit(federation.export(small_config("fedit"))), *case) for case in cases]
    for job, change, _ in jobs:
        change(federation.folder / "server-state/jobs" / job / "data")
    federation.start("site-2")
    for job, _, refusal in jobs:
        assert federation.wait(job, 60) == "FINISHED:FAILED_TO_RUN"
        assert refusal in "\n".join(federation.meta(job)["job_deploy_detail"])
    assert not federation.processes(jobs_only=True)


def _check_other_class(federation: Federation, proof: Path) -> None:
    job = federation.export(small_config("fedit", rounds=1))
    path = job / "app/config/config_fed_client.json"
    command = {"id": "x", "path": "subprocess.Popen", "args": {"args": ["touch", str(proof)]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"components": [command]}))
    assert federation.wait(federation.submit(job)) == "FINISHED:ABNORMAL"
    assert "Component 'subprocess.Popen' at config path 'components.#1' is not in allow_list" in federation.log("site-1")
    assert not proof.exists()


def hospitals_own_keys(sites: Path, folder: Path) -> Path:
    """Make all kits as provisioning/engineer.md says: each participant its key, the hub its signature, one command of ours."""
    raw = yaml.safe_load(sites.read_text())
    port, name = raw["server"]["port"], raw["name"]
    server = {"host": raw["server"]["name"], "fed_learn_port": port, "admin_port": port}
    hub = folder / "hub"
    hub.mkdir(parents=True)
    profile = {"name": name, "scheme": "grpc", "connection_security": "mtls", "server": server}
    (hub / "profile.yml").write_text(yaml.safe_dump(profile))
    fingerprint = _nvflare(hub, "cert", "init", "--profile", "profile.yml", "-o", "ca")["rootca_fingerprint_sha256"]
    clients = [{"name": s["name"], "org": s["org"], "type": "client"} for s in raw["sites"]]
    people = [p | {"type": "admin"} for p in raw["admins"] if p["role"] == "lead"]
    for participant in [{"name": raw["server"]["name"], "org": "hub", "type": "server"}, *clients, *people]:
        own, who = folder / f"at-{participant['name']}", participant["name"]
        own.mkdir()
        (own / "me.yml").write_text(yaml.safe_dump({"name": name, "participants": [participant]}))
        _nvflare(own, "cert", "request", "-p", "me.yml")
        shutil.copy(own / who / f"{who}.request.zip", hub)
        _nvflare(hub, "cert", "approve", f"{who}.request.zip", "-c", "ca", "--profile", "profile.yml")
        shutil.copy(hub / f"{who}.signed.zip", own)
        request = ["--request-dir", who, "--fingerprint", fingerprint, "-w", folder / "kits"]
        _nvflare(own, "package", f"{who}.signed.zip", *request)
    kits = folder / "kits" / name / "prod_00"
    for who in [raw["server"]["name"], *(client["name"] for client in clients)]:
        apply_local(sites, kits / who)
    return kits


def _nvflare(folder: Path, *words: object) -> dict:
    """Run one of FLARE's commands in a folder, which is also its home, and return what it answers."""
    command, environment = ["nvflare", "--format", "json", *map(str, words)], Federation.scratch_environment(folder)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout[done.stdout.index('{"schema_version"') :])["data"]


def steps_over_all_sites() -> JobConfig:
    """Return a job of DP-SGD by the step, with its noise in shares under masks."""
    raw = training_only(small_cells("fedit", local_steps=1, rounds=2), test=1).model_dump()
    raw["data"]["phantoms"]["training"] = 8
    raw["federation"] |= {"min_sites": 3}
    privacy = {"unit": "record", "trust": "distributed", "epsilon": 4, "sample_rate": 0.5, "divisor": 12.0, "clip": 0.05}
    return JobConfig.model_validate(raw | {"privacy": privacy, "secure_aggregation": {}})


def check_pins(federation: Federation) -> None:
    """Sites that named one another by their own keys train under masks; one with a wrong fingerprint says so in a line."""
    sites, job = federation.sites, federation.export(steps_over_all_sites())
    for name in sites:
        (federation.kit(name) / "local/site.yaml").write_text(
            "privacy: {dataset: ward, budgets: {record: {epsilon: 9}}, trust: [distributed]}\n"
        )
    pin(federation, sites)
    assert federation.wait(federation.submit(job)) == "FINISHED:COMPLETED"
    records = (federation.kit("site-1") / STATE).rglob(audit_log.FILE)
    page = markdown(audit_log.read_with_epsilon(max(records, key=lambda path: path.stat().st_mtime)))
    assert "masked; read by nobody alone; threshold 3 of 3" in page
    for name in sites:
        rows = [row for row in Ledger(federation.kit(name) / STATE / "ledger.sqlite").entries() if row.count]
        assert [(r.unit, r.trust, r.round, r.private) for r in rows] == [("record", "distributed", n, True) for n in (0, 1)]
    path = federation.kit("site-3") / "local/site.yaml"
    path.write_text(path.read_text().replace(fingerprint_of(federation.kit("site-1")), "ab" * 32))
    assert federation.wait(federation.submit(job)) == "FINISHED:EXECUTION_EXCEPTION"
    refused = "secure aggregation: the certificate of 'site-1' has another key than in secure_aggregation.partners of site.yaml"
    assert refused in federation.log("site-3")
    assert refused not in federation.log("site-2")
    assert "2 of 3 sites have prepared, a sum needs 3 (threshold 3 of 3)" in federation.log("server")
    assert "Traceback" not in federation.log("site-3")
    spent = [row for row in Ledger(path.parents[1] / STATE / "ledger.sqlite").entries() if row.count]
    assert len(spent) == 2


@pytest.mark.slow
def test_kits_with_own_keys_train(tmp_path: Path) -> None:
    sites = {"site-1": {}, "site-2": {}, "site-3": {}}
    with Federation(tmp_path, sites, make=hospitals_own_keys, admin=LEAD) as federation:
        federation.start()
        check_pins(federation)


@pytest.mark.long
def test_quickstart_on_kits_with_own_keys(tmp_path: Path) -> None:
    sites = {"site-1": {}, "site-2": {}, "site-3": {}}
    with Federation(tmp_path, sites, make=hospitals_own_keys, admin=LEAD) as federation:
        federation.start()
        results = run_on(federation, JOBS / "quickstart")
        for site in sites:
            assert results[site]["test/personalized/dice"] > results[site]["test/pretrained/dice"] + 0.1
            (folder,) = {path.parent for path in federation.kit(site).rglob("adapters/global/adapter_config.json")}
            peft.PeftModel.from_pretrained(build_sam("tiny", None, 128, 2), str(folder))


def run_on(federation: Federation, job: Path) -> dict[str, dict[str, float]]:
    """Submit a job folder by FLARE's own command, and return the final scores of its sites."""
    command = ["nvflare", "--format", "json", "job", "submit", "-j", str(job), "--startup-kit", str(federation.kit(LEAD))]
    done = subprocess.run(command, env=federation.environment(), capture_output=True, text=True, check=True, timeout=60)
    assert federation.wait(json.loads(done.stdout)["data"]["job_id"], 400) == "FINISHED:COMPLETED"
    return json.loads((federation.server_files() / "results.json").read_text())
