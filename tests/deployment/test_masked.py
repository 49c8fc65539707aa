"""Noise in shares under masks on real kits: pinned keys, a server killed amid a phase, a site killed before it reveals."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.cli.site_records import markdown
from consilium.config.job import JobConfig
from consilium.config.site import load_site
from consilium.core.errors import Reason
from consilium.core.storage import load_state
from consilium.federation.job_assembly import assemble_job
from consilium.federation.run_folders import STATE
from consilium.privacy import audit_log
from consilium.privacy.ledger import Ledger
from consilium.runtime.engine import simulate
from tests.conftest import small_config, training_only
from tests.deployment.federation import Federation
from tests.deployment.jobs import consilium, pin

SITES = ["site-1", "site-2", "site-3", "site-4"]
pytestmark = pytest.mark.slow


def ward(seed: int) -> dict[str, Any]:
    """Return a site.yaml that lends its data to noise in shares only, with a budget; its own noise is of a seed."""
    budgets = {"site": {"epsilon": 50}}
    return {"privacy": {"trust": ["distributed"], "budgets": budgets, "dataset": f"ward-{seed}", "noise_seed": seed}}


def masked_files(federation: Federation, run: str, round: int) -> list[Path]:
    return list((federation.kit("server") / STATE).rglob(f"{run}/**/masks/{round}-0-0/masked-*"))


def masked_job(rounds: int) -> JobConfig:
    raw = training_only(small_config("fedit", rounds=rounds, local_steps=8), test=1).model_dump()
    raw["federation"] |= {"min_sites": 3, "straggler_grace_seconds": 20.0}
    privacy = {"unit": "site", "trust": "distributed", "noise_multiplier": 1.0, "clip": 0.5}
    return JobConfig.model_validate(raw | {"privacy": privacy, "secure_aggregation": {}})


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Four sites that have pinned each other, for all tests here."""
    with Federation(tmp_path_factory.mktemp("masked") / "kits", {name: ward(n) for n, name in enumerate(SITES)}) as found:
        pin(found, SITES)
        found.start()
        yield found


def test_masked_noise_survives_killed_sites(federation: Federation, tmp_path: Path) -> None:
    """Noise is of seeds here, so the run must equal one in a single process, in which nobody is killed, to the last bit."""
    config, reference = masked_job(rounds=2), tmp_path / "reference"
    own = {name: load_site(federation.kit(name) / "local/site.yaml") for name in SITES}
    simulate(assemble_job(config), own, reference, lambda event: None)
    consilium(federation, "submit", str(federation.export(config)), "--experiment", "ward-study")
    federation.until(lambda: len(masked_files(federation, "ward-study", 0)) >= 1, 120, "a masked update of round 1")
    federation.kill("server")
    federation.start("server")
    consilium(federation, "resume", "ward-study")
    federation.until(lambda: len(masked_files(federation, "ward-study", 1)) == len(SITES), 120, "all masked updates of round 2")
    federation.kill_job("site-4")
    folder = federation.server_files()
    federation.until(lambda: (folder / "results.json").is_file(), 120, "the run to end")
    ours, theirs = (load_state(one / "server/state.safetensors")[0] for one in (folder, reference))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    claims = [json.loads((one / "privacy.json").read_text()) for one in (folder, reference)]
    assert claims[0] == claims[1]
    records = (federation.kit("site-1") / STATE).rglob(audit_log.FILE)
    page = markdown(audit_log.read_with_epsilon(max(records, key=lambda path: path.stat().st_mtime)))
    assert "masked; read by nobody alone; threshold 3 of 4" in page
    assert (
        f"epsilon {claims[0]['epsilon']['1e-05']:.4g} at delta 1e-05 so far in this run (site level, zero-out, trust distr"
        in page
    )
    for site in SITES:
        (path,) = (federation.kit(site) / STATE).rglob("ledger.sqlite")
        rows = Ledger(path).entries()
        assert [(r.trust, r.round, r.count) for r in rows] == [("distributed", 0, 1), ("distributed", 1, 1)], site
    for site in SITES[:3]:
        (kept,) = (federation.kit(site) / STATE).rglob("masks/masks.json")
        assert kept.read_text() == '{"ended": true}'


def test_a_masked_round_says_for_which_site_it_waits_and_edits_of_site_yaml_count_from_the_next_job_on(
    federation: Federation,
) -> None:
    """Site 4's machine loses power amid a round. Meanwhile site 1's administrator asks for approvals."""
    masked = masked_job(rounds=3)
    consilium(federation, "submit", str(federation.export(masked)), "--experiment", "next-study")
    federation.until(lambda: len(masked_files(federation, "next-study", 0)) == len(SITES), 120, "the updates of round 1")
    federation.kill("site-4")
    settings = federation.kit("site-1") / "local/site.yaml"
    settings.write_text(settings.read_text() + "approve: digest\n")
    seen = []

    def waits() -> bool:
        found = json.loads(consilium(federation, "status", "next-study", "--format", "json"))["progress"] or {}
        if found.get("waiting"):
            seen.append((found["waiting"], consilium(federation, "status", "next-study")))
        return any(one[0]["sites"] == ["site-4"] for one in seen)

    federation.until(waits, 60, "the status to name site 4")
    waiting, text = seen[-1]
    assert 0 <= waiting["seconds"] <= 20
    assert re.search(r"; waits for site-4( \(no heartbeat for \d+ s\))?, at most 1?\d s", text), text
    folder = federation.server_files()
    federation.until(lambda: (folder / "results.json").is_file(), 180, "the run to end")
    assert [event["sites"] for event in federation.events("concluded")][1:] == [SITES[:3]] * 2
    shares = json.loads(consilium(federation, "status", "next-study", "--format", "json"))["progress"]["sites"]
    assert {name: one["share"] is None for name, one in shares.items()} == {name: name == "site-4" for name in SITES}
    consilium(federation, "submit", str(federation.export(masked)), "--experiment", "next", "--wait", code=1)
    assert Reason.APPROVAL.text in {e["reason"] for e in federation.events("refused") if e["site"] == "site-1"}
