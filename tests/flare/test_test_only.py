"""A site that only tests: scored with the last global model, over FLARE as in one process, and without any part in it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from consilium.client.build import build_guard, build_site
from consilium.config.job import JobConfig
from consilium.config.site import Given, SiteConfig, find_site
from consilium.core.errors import ConfigError, ConsiliumError, RefusedError
from consilium.core.messages import Kind, Payload
from consilium.data.synthetic.phantoms import make_phantoms
from consilium.federation.job_assembly import assemble_job
from consilium.runtime.engine import simulate
from tests.conftest import small_config
from tests.flare.running import LONG, SLOW, Runner, state_of, untouched

SITES = ["a", "b", "source"]
PRIVACY = {"unit": "site", "noise_multiplier": 1.0, "clip": 0.5, "trust": "local"}


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sites that train, and one whose list has training pictures too, which it never uses."""
    folder = tmp_path_factory.mktemp("hospitals")
    for name in SITES:
        make_phantoms(folder / name, "fundus", name, 0, 2, 0, 1, 64, 0.7, 0.7)
        site = {"datalist": "datalist.json", "test_only": name == "source", "privacy": {"noise_seed": 1}}
        (folder / name / "site.yaml").write_text(yaml.safe_dump(site))
    return folder


def config(strategy: str = "fedsa_lora", **sections: Any) -> JobConfig:
    raw = small_config(strategy, rounds=2, local_steps=1).model_dump() | sections
    raw["federation"] |= {"min_sites": 2, "fraction_evaluate": 1.0}
    return JobConfig.model_validate(raw)


@pytest.mark.parametrize(
    ("privacy", "flare"),
    [
        pytest.param(PRIVACY, "one-process", marks=SLOW),
        pytest.param(None, "one-process", marks=SLOW),
        pytest.param(PRIVACY, "simulator", marks=LONG),
        pytest.param(None, "simulator", marks=LONG),
    ],
    indirect=["flare"],
)
def test_test_only_site_changes_nothing(privacy: dict | None, flare: Runner, hospitals: Path, tmp_path: Path) -> None:
    one = config(privacy=privacy, strategy={"name": "fedit"})
    workspace, found = flare(one, untouched, SITES, hospitals), {}
    for names in (SITES, SITES[:2]):
        folder = tmp_path / str(len(names))
        simulate(assemble_job(one), {n: find_site(n, Given(hospitals)) for n in names}, folder, lambda event: None)
        found[len(names)] = state_of(folder / "server/state.safetensors")
    assert all(torch.equal(found[2][n], t) for n, t in found[3].items())
    assert all(torch.equal(found[2][n], t) for n, t in state_of(workspace / "server/state.safetensors").items())
    scores = json.loads((tmp_path / "3/results.json").read_text())["source"]
    assert {"test/global/dice", "test/pretrained/dice"} <= scores.keys()
    assert "test/personalized/dice" not in scores
    lines = [json.loads(line) for line in (tmp_path / "3/metrics.jsonl").read_text().splitlines()]
    assert {line["event"] for line in lines if line.get("site") == "source"} == {"joined", "final"}
    over = json.loads((workspace / "results.json").read_text())
    assert over.keys() == set(SITES)
    assert over["source"] == scores


MORE = [pytest.param(name, marks=SLOW) for name in ("feddpa", "fedsca", "local_only")]


@pytest.mark.parametrize("strategy", ["centralized", *MORE])
def test_test_only_site_is_scored(strategy: str, hospitals: Path, tmp_path: Path) -> None:
    sites = {n: find_site(n, Given(hospitals)) for n in reversed(SITES)}
    one = config(strategy) if strategy != "fedsca" else config(strategy, adapter={"kind": "bottleneck"})
    simulate(assemble_job(one), sites, tmp_path / "run", lambda event: None)
    scores = json.loads((tmp_path / "run/results.json").read_text())
    assert all("test/global/dice" in scores[name] for name in SITES)
    assert "test/personalized/dice" not in scores["source"]


def test_test_only_guard_refuses_training(hospitals: Path, tmp_path: Path) -> None:
    """Under site-level DP too: the role is the site's own word, and no list, job or data set changes it."""
    job, own = assemble_job(config(privacy=PRIVACY)), find_site("source", Given(hospitals))
    guard = build_guard(job, "source", own, tmp_path, tmp_path, lambda event: None)
    site = build_site(job, "source", own, tmp_path, lambda event: None)
    task = guard.authorize(Kind.HELLO, "run")
    told = guard.release_hello(task, site.hello(task.run).to_dict())
    assert (told["num_samples"], told["test_only"]) == (0, True)
    with pytest.raises(RefusedError, match="no task train"):
        guard.authorize(Kind.TRAIN, "run", Payload(0, 0, {}))
    assert guard.ledger.seal() == build_guard(job, "b", own, tmp_path, tmp_path / "new", lambda event: None).ledger.seal()


def test_refusals(hospitals: Path, tmp_path: Path) -> None:
    record = config("fedit", privacy={"unit": "record", "noise_multiplier": 1.0, "clip": 0.5})
    own = find_site("source", Given(hospitals))
    with pytest.raises(ConfigError, match=r"source: test_only: .*privacy\.unit record"):
        build_guard(assemble_job(record), "source", own, tmp_path, tmp_path, lambda event: None)
    path = make_phantoms(tmp_path / "no", "fundus", "no", 0, 4, 2, 0, 64, 0.7, 0.7)
    with pytest.raises(ConfigError, match=r"no test split.*`test`"):
        build_guard(
            assemble_job(config()), "no", SiteConfig(datalist=path, test_only=True), tmp_path, tmp_path, lambda event: None
        )
    with pytest.raises(ConfigError, match="test_only: all sites are"):
        simulate(assemble_job(config("centralized")), {"source": own}, tmp_path / "pooled", lambda event: None)
    with pytest.raises(ConsiliumError, match="0 sites are here"):
        simulate(assemble_job(config()), {"source": own}, tmp_path / "alone", lambda event: None)
