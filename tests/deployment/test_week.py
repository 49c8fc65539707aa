"""A week of a federation on kits: five jobs, a crash, a certificate and a budget that end, another root, an upgrade.

At its end three accounts of what left each hospital must be one: the record that the guard wrote (and the archive of evidence
signed over it), the messages that the site's processes handed to FLARE, and the bytes that a proxy before the site counted.
"""

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from typer.testing import CliRunner

from consilium.cli.main import app
from consilium.config.job import JobConfig
from consilium.core.errors import ExitCode, Reason
from consilium.federation.run_folders import RUNS, STATE
from consilium.flare.kit import connection_refusals
from consilium.flare.kit.connection_refusals import Cause
from consilium.flare.kit.doctor import examine
from consilium.flare.kit.renewal import renew, update_kit
from consilium.flare.kit.revocation import revoke
from consilium.privacy import audit_log
from consilium.privacy.ledger import Entry, Ledger
from tests.conftest import small_config, training_only
from tests.deployment import counted
from tests.deployment.federation import ADMIN, ROOT, SERVER, Federation
from tests.deployment.jobs import consilium
from tests.deployment.network import Relay
from tests.deployment.test_poc import COMMAND
from tests.deployment.test_renewal import age
from tests.flare.test_metrics import alert_rules, firing

pytestmark = pytest.mark.slow
SITES = ["site-1", "site-2", "site-3"]
REGISTERED = "Successfully registered client"
NAMES = {"train": "update", "evaluate": "evaluation", "model": "model"}
WEDNESDAY, THURSDAY = [(0, 0)], [(0, 0), (0, 1)]
ROWS = {"site-1": [WEDNESDAY, THURSDAY], "site-2": [WEDNESDAY, THURSDAY], "site-3": [WEDNESDAY], "site-4": []}
"""Round and phase of each release, by private job: DEeR has two phases a round; site 3's budget is for one job."""
A_FRAME, A_LINK = 200, 20_000
"""Bytes that gRPC, HTTP/2 and TLS may add to a frame, acknowledgements included, and to a connection (two handshakes)."""
ALERTS = alert_rules()
PRIVATE = {"privacy": {"unit": "site", "epsilon": 8, "clip": 0.5}}


class Week(Federation):
    """A federation each of whose sites reaches the server by a proxy of its own, with its messages written down."""

    def __init__(self, folder: Path, proxies: dict[str, Relay]) -> None:
        self.proxies, self.code = proxies, ROOT / "custom"
        super().__init__(folder, {name: {"share_personalized": name == "site-1"} for name in SITES})
        for name, proxy in proxies.items():
            self.tap(name).mkdir(parents=True)
            self.variables[name] = {"grpc_proxy": f"http://127.0.0.1:{proxy.port}", "WIRE_TAP": str(self.tap(name))}

    def environment(self) -> dict[str, str]:
        """Return an environment with the package that is in use; the tap does nothing where it has no folder."""
        places = [counted.TAP, self.code, ROOT]
        return super().environment() | {"PYTHONPATH": os.pathsep.join(map(str, places))}

    def tap(self, name: str) -> Path:
        return self.folder / "tap" / name

    def told(self) -> str:
        """Return the new root's fingerprint, as the hub tells it by telephone."""
        state = json.loads((self.kits.parent / "state/cert.json").read_text())
        return x509.load_pem_x509_certificate(state["root_cert"].encode()).fingerprint(hashes.SHA256()).hex()

    def change(self, name: str) -> None:
        """Put the new root's kit, made on Monday, in the place of a site's."""
        update_kit(self.kit(name), self.kits.parent / "prod_01" / name, self.told())

    def upgrade(self) -> None:
        """Let every participant that starts from now on have a package of a later version."""
        self.code = Path(shutil.copytree(ROOT / "custom", self.folder / "later", ignore=shutil.ignore_patterns("__pycache__")))
        path = self.code / "consilium" / "__init__.py"
        before, _, after = path.read_text().partition('__version__ = "')
        path.write_text(f'{before}__version__ = "9.0.0{after[after.index(chr(34)) :]}')

    def run(self, name: str, raw: dict[str, Any]) -> list[dict[str, Any]]:
        """Run a job to its end and return its events."""
        job = self.export(JobConfig.model_validate(raw))
        consilium(self, "submit", str(job), "--experiment", name, "--wait")
        assert self.server_files().name == name
        return self.events()


@contextmanager
def week(folder: Path) -> Iterator[Week]:
    with ExitStack() as stack:
        proxies = {name: stack.enter_context(Relay(None)) for name in [*SITES, "site-4"]}
        yield stack.enter_context(Week(folder, proxies))


def concluded(events: list[dict[str, Any]]) -> list[list[str]]:
    return [event["sites"] for event in events if event["event"] == "concluded"]


def raw(strategy: Any, **sections: Any) -> dict[str, Any]:
    found = training_only(small_config(strategy, rounds=1, local_steps=2), test=1).model_dump()
    found["federation"] |= {"straggler_grace_seconds": 20.0}
    return found | sections


def test_a_week(tmp_path: Path) -> None:
    with week(tmp_path) as hospitals:
        hospitals.start()
        first = monday_a_plain_job_and_a_crash(hospitals)
        tuesday_masks(hospitals)
        wednesday_a_certificate_has_ended(hospitals)
        thursday_a_budget_runs_out(hospitals)
        friday_all_upgrade_one_is_out_and_one_is_new(hospitals, first)
        hospitals.shutdown()
        check_alarms(hospitals)
        for site in [*SITES, "site-4"]:
            check_what_left(hospitals, site)
            check_evidence(hospitals, site)
            check_ledger(hospitals, site)


def monday_a_plain_job_and_a_crash(hospitals: Week) -> dict[str, Any]:
    """The server comes back with another root's kit, people have theirs too; no hospital does anything."""
    config = raw("fedsa_lora", statistics={})
    config["training"] |= {"rounds": 2, "local_steps": 8}
    job = hospitals.export(JobConfig.model_validate(config))
    consilium(hospitals, "submit", str(job), "--experiment", "monday")
    hospitals.until(lambda: len(hospitals.events("started")) == 2, 240, "round 2")
    hospitals.kill("server")
    words = ["status", "monday", "--check", "--kit", str(hospitals.kit(ADMIN))]
    asked = subprocess.run([*COMMAND, *words], env=hospitals.environment(), capture_output=True, text=True)
    assert asked.returncode == ExitCode.UNREACHABLE, asked.stderr  # not "failed": nothing is known of the job
    new = renew(hospitals.file, hospitals.kits.parents[1], root="new")
    update_kit(hospitals.kit("server"), new / SERVER)
    shutil.copytree(new / ADMIN / "startup", hospitals.kit(ADMIN) / "startup", dirs_exist_ok=True)
    hospitals.start("server")
    consilium(hospitals, "resume", "monday", "--wait")
    assert concluded(hospitals.events()) == [SITES, SITES]
    return config


def tuesday_masks(hospitals: Week) -> None:
    config = raw("fedit", secure_aggregation={})
    config["federation"] |= {"min_sites": 3}
    assert concluded(hospitals.run("tuesday", config)) == [SITES]


def wednesday_a_certificate_has_ended(hospitals: Week) -> None:
    """Site 3's kit has ended; it joins by one of the new root. Its board has set a budget, of one such job."""
    hospitals.kill("site-3")
    state = json.loads((hospitals.kits.parent / "state/cert.json").read_text())
    former = hospitals.folder / "former.json"
    former.write_text(json.dumps({"root_pri_key": state["former_root"]["key"]}))
    age(hospitals.kit("site-3"), former, 361)
    assert "set the clock, or ask the hub" in {f.check: f for f in examine(hospitals.kit("site-3"))}["clock"].remedy
    registered = hospitals.log("site-3").count(REGISTERED)
    hospitals.start("site-3", wait=0)
    hospitals.until(lambda: "the kit's certificate is valid from" in hospitals.log("site-3"), 60, "the line in its log")
    assert hospitals.log("site-3").count(REGISTERED) == registered
    hospitals.kill("site-3")
    hospitals.change("site-3")
    path = hospitals.kit("site-3") / "local/site.yaml"
    path.write_text(yaml.safe_dump({"privacy": {"dataset": "ward", "budgets": {"site": {"epsilon": 10}}}}))
    hospitals.start("site-3")
    hospitals.until(lambda: hospitals.log("site-3").count(REGISTERED) > registered, 60, "site-3 to be back")
    assert concluded(hospitals.run("wednesday", raw("ffa_lora", **PRIVATE))) == [SITES]


def thursday_a_budget_runs_out(hospitals: Week) -> None:
    events = hospitals.run("thursday", raw("deer", **PRIVATE))
    assert {tuple(one) for one in concluded(events)} == {("site-1", "site-2")}
    assert Reason.BUDGET.text in next(e["reason"] for e in events if e["event"] == "refused" and e["site"] == "site-3")


def friday_all_upgrade_one_is_out_and_one_is_new(hospitals: Week, first: dict[str, Any]) -> None:
    """The former root is trusted no longer. Site 2 leaves and is revoked, site 4 comes; Monday's models are scored."""
    hospitals.shutdown()
    hospitals.upgrade()
    said = yaml.safe_load(hospitals.file.read_text())
    hospitals.file.write_text(yaml.safe_dump(said | {"sites": [*said["sites"], {"name": "site-4", "org": "site_4"}]}))
    for name in ("site-1", "site-2"):
        hospitals.change(name)
    new = renew(hospitals.file, hospitals.kits.parents[1], [SERVER, "site-4"], root="only-new")
    update_kit(hospitals.kit("server"), new / SERVER, hospitals.told())
    shutil.copytree(new / "site-4", hospitals.kit("site-4"), symlinks=True)
    hospitals.sites.append("site-4")
    hospitals.start("server", "site-1", "site-3", "site-4")
    revoke("site-2", hospitals.kit("server"))
    hospitals.start("site-2", wait=0)
    hospitals.until(lambda: "its credential was revoked" in hospitals.log("server"), 60, "the refusal")
    the_revoked_site_finds_out(hospitals)
    hospitals.kill("site-2")
    events = hospitals.run("friday", first | {"cross_site": {"run": "monday", "personalized": True}})
    assert {event["site"] for event in events if event["event"] == "refused"} == {"site-3"}  # nothing without noise leaves it
    assert "site-4" in (hospitals.server_files() / "cross_sites.json").read_text()


def the_revoked_site_finds_out(hospitals: Week) -> None:
    """Its log, its doctor, the hub's list, both ends' metrics and alert say the same cause."""
    kit, cause = hospitals.kit("site-2"), Cause.REVOKED
    hospitals.until(lambda: connection_refusals.noted_cause(kit) is cause, 60, "the cause at the site")
    assert f"does not let this site in: {cause}: {cause.text}" in hospitals.log("site-2")
    assert {f.check: f for f in examine(kit)}["admission"].remedy == cause.remedy
    rows = json.loads(consilium(hospitals, "sites", "--format", "json"))["sites"]
    assert next(row for row in rows if row["site"] == "site-2")["state"] == cause
    labels = f'{{site="site-2",cause="{cause}"}}'
    server, here = hospitals.kit("server"), hospitals.kit("site-1")
    hospitals.until(
        lambda: firing(ALERTS["SiteRefused"], [server], time.time()) == {labels}, 60, "the server's list in its file"
    )
    assert firing(ALERTS["SiteRefused"], [kit, here], time.time()) == {labels}


def check_alarms(hospitals: Week) -> None:
    """Four hours after the week no alarm comes of runs that have ended as they should."""
    for alert in ("RunStands", "RunStopped", "LedgerBroken"):
        kits = [hospitals.kit(name) for name in ("server", "site-1", "site-3", "site-4")]
        assert firing(ALERTS[alert], kits, time.time() + 4 * 3600) == set(), alert


def check_what_left(hospitals: Week, site: str) -> None:
    """The record holds each answer that crossed, as it crossed; no other message holds a tensor; nothing else crossed."""
    tap, proxy = hospitals.tap(site), hospitals.proxies[site]
    crossed = {json.dumps(one, sort_keys=True) for one in map(as_recorded, counted.answers(tap))}
    assert recorded(hospitals, site) == crossed
    held = [one for message in counted.messages(tap) for one in counted.tensors_in(message)]
    answered = [one for _, message in counted.answers(tap) for one in counted.tensors_in(message)]
    assert sorted(held) == sorted(answered)
    frames, size = counted.frames(tap), sum(len(one[2]) for one in answered)
    handed, links = sum(frames), proxy.connections
    told = f"{site}: {proxy.up:,} bytes in {links} links; {len(frames):,} frames of {handed:,}, tensors {size:,}"
    assert proxy.up < handed + A_FRAME * len(frames) + A_LINK * links, told
    assert size <= 0.9 * handed < proxy.up, told  # what a killed server had not yet taken never crossed
    print(told)


def as_recorded(answer: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what the record must say of an answer that crossed."""
    kind, message = answer
    headers = message["__headers__"]
    if (word := headers.get("consilium_reason")) is not None:
        return {"kind": "refusal", "reason": word}
    if kind in ("hello", "statistics"):
        return {"kind": kind, "values": message[kind]}
    if kind == "masks":
        return {"kind": kind}
    return {"kind": NAMES[kind], "tensors": counted.said(message), "round": headers["current_round"]}


def recorded(hospitals: Week, site: str) -> set[str]:
    """Return what a site's records say, of each message that left."""
    found = set()
    for path in (hospitals.kit(site) / STATE).rglob(audit_log.FILE):
        for line in audit_log.read_with_epsilon(path)["messages"]:
            kept = ("kind", "reason") if line["kind"] == "refusal" else ("kind", "values", "tensors", "round")
            kept = ("kind",) if line["kind"] == "masks" else kept
            one = {key: line[key] for key in kept if key in line}
            for tensor in one.get("tensors", {}).values():
                tensor["norm"] = f"{tensor['norm']:.6g}"
            found.add(json.dumps(one, sort_keys=True))
    return found


def check_evidence(hospitals: Week, site: str) -> None:
    """Each run at each site has an archive that any kit of the project verifies, over the record and the ledger as they are."""
    state, kit = hospitals.kit(site) / STATE, hospitals.kit(site)
    for run in sorted(path.name for path in (state / RUNS).iterdir() if path.is_dir()):
        archive = hospitals.folder / f"{site}-{run}.zip"
        words = ["evidence", run, "--kit", str(kit), "-o", str(archive), "--format", "json"]
        made = CliRunner().invoke(app, words)
        assert made.exit_code == 0, (made.output, made.exception)
        lines = [line for path in (state / RUNS / run).rglob(audit_log.FILE) for line in path.read_text().splitlines()]
        assert json.loads(made.stdout)["messages"] == len(lines)
        checked = CliRunner().invoke(app, ["evidence", str(archive), "--verify", "--kit", str(hospitals.kit("server"))])
        assert checked.exit_code == 0, (checked.output, checked.exception)


def check_ledger(hospitals: Week, site: str) -> None:
    """Each private job that a site let out cost what it promised, by the analytic formula of a Gaussian release."""
    spent: dict[str, list[Entry]] = {}
    for row in Ledger(hospitals.kit(site) / STATE / "ledger.sqlite").entries():
        spent.setdefault(row.run, []).append(row)
    assert [[(row.round, row.phase) for row in rows] for rows in spent.values()] == ROWS[site]
    for rows in spent.values():
        together = sum(row.noise_multiplier**-2 for row in rows) ** -0.5
        assert delta(8, together) == pytest.approx(1e-5, rel=0.01)


def delta(epsilon: float, noise: float) -> float:
    """Return delta of a sum of sensitivity 1 with noise of this deviation (Balle and Wang, ICML 2018, theorem 8)."""
    normal = NormalDist().cdf
    return normal(0.5 / noise - epsilon * noise) - math.exp(epsilon) * normal(-0.5 / noise - epsilon * noise)
