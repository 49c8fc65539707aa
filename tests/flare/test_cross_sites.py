"""A cross-site job: models of an ended run scored everywhere, over FLARE as in one process; scores alone come back."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from consilium import __version__
from consilium.client.build import build_guard
from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.config.site import Given, SiteConfig, find_site
from consilium.core.errors import ConfigError, Reason, RefusedError
from consilium.core.messages import Hello, Kind, Payload, Stage
from consilium.data.synthetic.phantoms import make_phantoms
from consilium.federation.job_assembly import assemble_job
from consilium.federation.run_folders import claim_run_folder, known_run
from consilium.privacy.guard.release import check_shares_model
from consilium.runtime.engine import simulate
from consilium.server.checks import check_shared_model
from consilium.server.coordinator import Coordinator
from consilium.server.cross_site import CrossSites
from consilium.server.run_start import Saved
from consilium.use.model import evaluate_cross_site
from tests.conftest import small_config
from tests.flare.running import Runner, edited, listen, state_of

TRAINED, SITES = ["gives", "keeps"], ["gives", "keeps", "new"]


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sites that train, one of which gives its model away, and one that comes later with test pictures only."""
    folder = tmp_path_factory.mktemp("hospitals")
    for name in SITES:
        path = make_phantoms(folder / name, "fundus", name, 0, 2, 0, 1, 64, 0.7, 0.7)
        if name == "new":
            path.write_text(json.dumps(json.loads(path.read_text()) | {"training": [], "validation": []}))
        site = {"datalist": "datalist.json", "share_personalized": name == "gives"}
        (folder / name / "site.yaml").write_text(yaml.safe_dump(site))
    return folder


def config(strategy: Any = "fedsa_lora", **sections: Any) -> JobConfig:
    return JobConfig.model_validate(small_config(strategy, rounds=1, lr=1e-2, local_steps=1).model_dump() | sections)


def crossing(**section: Any) -> JobConfig:
    return config(cross_site={"run": "first", "personalized": True, **section})


def train(folder: Path, hospitals: Path, one: JobConfig) -> Path:
    simulate(assemble_job(one), {name: find_site(name, Given(hospitals)) for name in TRAINED}, folder, lambda event: None)
    return folder


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, hospitals: Path) -> Path:
    """The run that the jobs here score."""
    return train(tmp_path_factory.mktemp("ended") / "first", hospitals, config())


@pytest.fixture
def beside(tmp_path: Path, ended: Path) -> Path:
    """Return a folder in which the run lies."""
    (tmp_path / "first").symlink_to(ended)
    return tmp_path


def crossed(folder: Path, hospitals: Path, one: JobConfig, sites: list[str] = SITES) -> dict[str, Any]:
    found = {name: find_site(name, Given(hospitals)) for name in sites}
    simulate(assemble_job(one), found, folder, lambda event: None)
    return json.loads((folder / "cross_sites.json").read_text())


@pytest.mark.slow
def test_matrix_equals_in_process(flare: Runner, hospitals: Path, beside: Path) -> None:
    results = json.loads((beside / "first/results.json").read_text())
    workspace = flare(crossing(), edited(client=listen), SITES, hospitals)
    found = json.loads((workspace / "cross_sites.json").read_text())
    assert found == crossed(beside / "inprocess", hospitals, crossing())
    assert (found["models"], found["sites"]) == (["(shared)", "gives"], SITES)
    shared, gives = found["values"]
    assert shared[:2] == [results[name]["test/global/dice"] for name in TRAINED]
    assert gives[0] == results["gives"]["test/personalized/dice"]
    other = evaluate_cross_site(
        beside / "first", hospitals, Stage.PERSONALIZED, SiteConfig(), "test", False, lambda *cell: None
    )
    assert gives == other.values[other.models.index("gives")]
    assert json.loads((workspace / "results.json").read_text())["gives"]["test/global/dice"] == shared[0]
    assert (workspace / "cross_sites.png").stat().st_size > 5000
    _check_wire(workspace, beside / "first")


def _check_wire(workspace: Path, run: Path) -> None:
    """No number of the model that stays is on the wire; the one that leaves is on record; nothing else left but scores."""
    own = {name: state_of(run / f"sites/{name}/adapters/personalized/consilium.safetensors") for name in TRAINED}
    local = [name for name, tensor in own["keeps"].items() if not torch.equal(tensor, own["gives"][name])]
    sent = {name: b"".join(path.read_bytes() for path in (workspace / "heard" / name).iterdir()) for name in SITES}
    assert all(own["gives"][name].numpy().tobytes() in sent["gives"] for name in local)
    assert not any(own["keeps"][name].numpy().tobytes() in said for said in sent.values() for name in local)
    kinds = {name: [line["kind"] for line in _record(workspace / "sites" / name)] for name in SITES}
    assert kinds["gives"] == ["hello", "evaluation", "model", "evaluation"]
    assert kinds["keeps"] == ["hello", "evaluation", "evaluation", "refusal"]
    assert kinds["new"] == ["hello", "evaluation", "evaluation"]
    (line,) = (line for line in _record(workspace / "sites/gives") if line["kind"] == "model")
    assert line["tensors"].keys() == own["gives"].keys()
    refused = [json.loads(x) for x in (workspace / "metrics.jsonl").read_text().splitlines() if '"refused"' in x]
    assert [(one["site"], one["reason"]) for one in refused] == [("keeps", Reason.MODEL.text)]


def _record(site: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for path in site.rglob("audit.jsonl") for x in path.read_text().splitlines()]


def test_shared_model_scores_as_its_file(hospitals: Path, beside: Path) -> None:
    results = json.loads((beside / "first/results.json").read_text())
    shared, gives = crossed(beside / "second", hospitals, crossing())["values"]
    assert shared[:2] == [results[name]["test/global/dice"] for name in TRAINED]
    other = evaluate_cross_site(
        beside / "first", hospitals, Stage.PERSONALIZED, SiteConfig(), "test", False, lambda *cell: None
    )
    assert gives == other.values[other.models.index("gives")]
    assert gives != shared


def test_matrix_of_the_jobs_split_and_model(tmp_path: Path) -> None:
    """A site that also tells what nobody asked for changes nothing: 0.5 and 0.25 stand among scores of 0.9."""
    job = assemble_job(crossing())
    server = Coordinator(job, tmp_path / "second", lambda event: None)
    server.welcome(Hello("gives", 4, True, __version__))
    server.welcome(Hello("new", 4, False, __version__))  # it took no part in the run, so it has no model of its own
    after = replace(job.strategy.initialize(job.initial), round=1)
    matrix = CrossSites(server, job.config.cross_site, Saved("r", None, after))
    scores = {f"{split}/{stage}/dice": 0.9 for split in ("test", "validation") for stage in Stage}
    assert matrix.owners == ["gives"]
    sent = matrix.start_shared_model_scoring()["gives"]
    assert matrix.num_scored == 0
    told = replace(sent, tensors={}, metrics=scores | {"test/global/dice": 0.5})
    assert "stale" in matrix.accept("gives", replace(told, phase=1))
    assert matrix.accept("gives", told) is None
    for name in ("gives", "stranger"):
        assert "was not asked, or has answered already" in matrix.accept(name, told)
    assert matrix.num_scored == 1
    matrix.take_model("gives", Payload(-1, -1, job.initial, {"scaling": 1.0, "share": 0.0}))
    sent = matrix.take_owner_model_payloads()["gives"]
    told = replace(sent, tensors={}, scalars={}, metrics=scores | {"test/personalized/dice": 0.25})
    assert matrix.take_owner_model_payloads() == {}  # one model is scored once
    assert matrix.accept("gives", told) is None
    matrix.finish()
    server.close()
    assert json.loads((tmp_path / "second/cross_sites.json").read_text())["values"] == [[0.5], [0.25]]


def test_shared_model_of_a_private_run_is_scored_with_local_factors(hospitals: Path, tmp_path: Path) -> None:
    """The guard tells the server of no release in the scoring job, which so sends the initial factors to all."""
    privacy = {"unit": "site", "noise_multiplier": 1.0, "clip": 0.5, "trust": "local"}
    sites = {name: find_site(name, Given(hospitals)).model_copy(update={"share_metrics": True}) for name in TRAINED}
    for folder, section in (("first", {}), ("second", {"cross_site": {"run": "first"}})):
        simulate(assemble_job(config(privacy=privacy, **section)), sites, tmp_path / folder, lambda event: None)
    results = json.loads((tmp_path / "first/results.json").read_text())
    (shared,) = json.loads((tmp_path / "second/cross_sites.json").read_text())["values"]
    assert shared == [results[name]["test/global/dice"] for name in TRAINED]
    assert all(results[name]["test/pretrained/dice"] != score for name, score in zip(TRAINED, shared, strict=True))


KINDS = ["fedit", "local_only", {"name": "feddpa", "weighting": "fixed"}, "fedala", "fedhera", "fedsca", "flora", "frlora"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", KINDS, ids=lambda one: str(one)[:20])
def test_diagonal_equals_the_final_scores(strategy: Any, hospitals: Path, tmp_path: Path) -> None:
    results = json.loads((train(tmp_path / "first", hospitals, config(strategy)) / "results.json").read_text())
    job = config(strategy, cross_site={"run": "first", "personalized": True})
    found = crossed(tmp_path / "second", hospitals, job, TRAINED)
    values = dict(zip(found["models"], found["values"], strict=True))
    assert values["(shared)"] == [results[name]["test/global/dice"] for name in TRAINED]
    if (own := results["gives"].get("test/personalized/dice")) is not None:
        assert values["gives"][0] == own


def test_private_job_shares_no_model(hospitals: Path, tmp_path: Path) -> None:
    privacy = {"unit": "site", "noise_multiplier": 1.0, "clip": 0.5, "trust": "local"}
    with pytest.raises(ValueError, match=r"cross_site\.personalized: true: .*no noise"):
        config(privacy=privacy, cross_site={"run": "first", "personalized": True})
    job = assemble_job(config("fedit", privacy=privacy, cross_site={"run": "first"}))
    guard = build_guard(job, "gives", find_site("gives", Given(hospitals)), tmp_path, tmp_path, lambda event: None)
    task = guard.authorize(Kind.EVALUATE, "r", Payload(1, 0, {}))
    assert guard.release_scores(task, Payload(1, 0, {}, metrics={"test/global/dice": 0.5})).metrics == {}
    with pytest.raises(RefusedError, match="asks for no personalized model"):
        guard.authorize(Kind.MODEL, "r")


def gate(hospitals: Path, folder: Path, name: str = "gives", **policy: Any) -> Any:
    site = find_site(name, Given(hospitals)).model_copy(update=policy)
    return build_guard(assemble_job(crossing()), name, site, folder, folder, lambda event: None)


def test_sites_refuse_to_share_models(hospitals: Path, tmp_path: Path) -> None:
    """A server that asks for more: to train, for a second model at one place, for a model of who keeps it or of no adapter."""
    guard = gate(hospitals, tmp_path)
    for kind, place in ((Kind.TRAIN, (0, 0)), (Kind.EVALUATE, (0, -1)), (Kind.EVALUATE, (1, 257)), (Kind.STATISTICS, (-1, -1))):
        with pytest.raises(RefusedError, match="the job has no task"):
            guard.authorize(kind, "r", Payload(*place, {}))
    one, other = (Payload(1, 1, {"x": torch.ones(1) * value}, {"scaling": 1.0, "share": 0.0}) for value in (1, 2))
    for again in (one, one):
        guard.authorize(Kind.EVALUATE, "r", again)
    with pytest.raises(RefusedError, match="had another model before"):
        guard.authorize(Kind.EVALUATE, "r", other)
    next(tmp_path.rglob("scored.json")).write_text("[")
    with pytest.raises(RefusedError, match=r"scored\.json: cannot be read"):
        guard.authorize(Kind.EVALUATE, "r", one)
    with pytest.raises(RefusedError, match="its model stays here"):
        gate(hospitals, tmp_path / "keeps", "keeps").authorize(Kind.MODEL, "r")
    numbers = {"scaling": 1.0, "share": 0.0}
    name = next(iter(assemble_job(crossing()).initial))
    for tensors, scalars in (
        ({"picture": torch.zeros(4)}, numbers),
        ({name: torch.full((4, 4), torch.nan)}, numbers),
        ({name: torch.zeros(4, dtype=torch.uint8)}, numbers),
        ({name: torch.zeros(4)}, numbers | {"age": 63.0}),
    ):
        with pytest.raises(RefusedError, match="nothing was sent"):
            guard.release_model(guard.authorize(Kind.MODEL, "r"), Payload(-1, -1, tensors, scalars))


def test_privacy_policy_forbids_sharing(hospitals: Path, tmp_path: Path) -> None:
    policy = HospitalPrivacyPolicy(trust=("local",))
    with pytest.raises(RefusedError, match="privacy"):
        gate(hospitals, tmp_path, privacy=policy).authorize(Kind.MODEL, "r")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cross_site": {"run": "second"}}, "no run of that name here has come to its end"),
        ({"adapter": {"rank": 2, "alpha": 4}}, "take that run's job.yaml and add cross_site"),
        ({"strategy": "fedit"}, "take that run's job.yaml and add cross_site"),
    ],
)
def test_unscorable_run_is_one_line(change: dict, said: str, hospitals: Path, beside: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        crossed(beside / "cross", hospitals, JobConfig.model_validate(crossing().model_dump() | change))


def test_other_submitters_run_is_refused(tmp_path: Path) -> None:
    folder = claim_run_folder(tmp_path, "first", "lead@hub")
    assert known_run(tmp_path, "first", "lead@hub") == folder
    assert known_run(tmp_path, "other", "lead@hub") is None
    for name, who in (("first", "guest@hub"), ("../runs/first", "lead@hub")):
        with pytest.raises(ConfigError):
            known_run(tmp_path, name, who)


def test_server_forwards_adapters_only() -> None:
    """A site's answer is relayed to all others: its names, shapes, types and numbers are those of the job's adapter."""
    job, numbers = assemble_job(crossing()), {"scaling": 1.0, "share": 0.0}
    good = Payload(-1, -1, {name: tensor.clone() for name, tensor in job.initial.items()}, numbers)
    check_shared_model(job, good)
    name = next(iter(good.tensors))
    for bad, said in (
        ({name: torch.zeros(2**20)}, "has shape"),
        ({name: good.tensors[name].double()}, "float64"),
        ({name: good.tensors[name] * torch.inf}, "NaN or Inf"),
        ({"x": torch.zeros(1)}, "none of the adapter's"),
        ({7: torch.zeros(1)}, "none of the adapter's"),
    ):
        with pytest.raises(RefusedError, match=said):
            check_shared_model(job, replace(good, tensors=good.tensors | bad))
    with pytest.raises(RefusedError, match="other numbers than declared"):
        check_shared_model(job, replace(good, metrics={"test/global/dice": 0.5}))
    for wrong in ({"scaling": 1.0}, numbers | {"age": 1.0}, numbers | {"share": math.nan}, numbers | {"share": "x"}):
        with pytest.raises(RefusedError):
            check_shared_model(job, replace(good, scalars=wrong))


def test_masked_jobs_share_no_model(tmp_path: Path) -> None:
    """A lent model less what all were sent is an update; and a run's name is the server's word."""
    raw = crossing().model_dump() | {"secure_aggregation": {"colluders": 1}}
    with pytest.raises(ValueError, match="an update without its mask"):
        JobConfig.model_validate(raw | {"cross_site": {"run": "first", "personalized": True}})
    masked = JobConfig.model_validate(raw | {"cross_site": {"run": "first"}})
    asks = masked.model_copy(update={"cross_site": masked.cross_site.model_copy(update={"personalized": True})})  # type: ignore[union-attr]
    with pytest.raises(RefusedError, match="privacy or masks"):
        check_shares_model("a", asks, shares=True, protects=False)
    job = assemble_job(masked.model_copy(update={"secure_aggregation": None}))
    guard = build_guard(job, "a", SiteConfig(), tmp_path, tmp_path, lambda event: None, simulated=True)
    rounds = job.config.training.rounds
    guard.authorize(Kind.EVALUATE, "aaaa", Payload(rounds, 0, {"w": torch.zeros(1)}))
    with pytest.raises(RefusedError, match="had another model before"):
        guard.authorize(Kind.EVALUATE, "aaab", Payload(rounds, 0, {"w": torch.ones(1)}))
    with pytest.raises(RefusedError, match="no task evaluate"):  # it asks for no personalized models
        guard.authorize(Kind.EVALUATE, "aaaa", Payload(rounds, 1, {"w": torch.zeros(1)}))
