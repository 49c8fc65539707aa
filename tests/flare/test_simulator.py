"""Runs over FLARE: equal to the in-process engine, nothing local on the wire, bad results left out."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import Reason
from consilium.core.messages import Tensors
from consilium.data.synthetic.phantoms import make_phantoms
from consilium.federation.job_assembly import Job, assemble_job
from consilium.report import predictions
from consilium.runtime.engine import simulate
from consilium.strategies.fedit import FedIT
from consilium.strategies.strategy import Role, ServerState
from tests.conftest import small_config, training_only
from tests.flare.running import (
    MOSTLY_HERE,
    OFTEN,
    SITES,
    Runner,
    add_filter,
    check_equal,
    edited,
    in_simulator,
    in_this_process,
    listen,
    state_of,
)

DAMAGED, BROKEN = "site-4", "site-5"


class Runs(NamedTuple):
    """A job, and what FLARE's simulator and the in-process engine left of it."""

    job: Job
    flare: Path
    reference: Path


def events(workspace: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (workspace / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four hospitals, all but the last with generated data; a picture of the last one is none."""
    folder = tmp_path_factory.mktemp("hospitals")
    for name in [*SITES[:2], DAMAGED]:
        (folder / name).mkdir()
        (folder / name / "site.yaml").write_text("{}\n")
    datalist = make_phantoms(folder / BROKEN, "fundus", BROKEN, 0, 4, 2, 2, 64, 0.7, 0.7)
    (datalist.parent / json.loads(datalist.read_text())["training"][0]["image"]).write_bytes(b"no picture")
    return folder


@pytest.fixture(scope="module", params=["one-process", pytest.param("simulator", marks=pytest.mark.slow)])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One run of two sites for all: the simulator's three processes take seconds each to start."""
    config, here = small_config("fediat", local_steps=1, validate={"stages": ["global"]}), request.param == "one-process"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PANEL", "SIDE") if here else ():
            patch.setattr(predictions, name, 64)
        run = in_this_process if here else in_simulator
        workspace = run(tmp_path_factory.mktemp("flare") / "run", config, edited(client=listen), SITES[:2])
        job, reference = assemble_job(config), tmp_path_factory.mktemp("inprocess")
        simulate(job, {name: SiteConfig() for name in SITES[:2]}, reference, lambda event: None)
    return Runs(job, workspace, reference)


def site_state(workspace: Path, site: str) -> dict[str, torch.Tensor]:
    (path,) = (workspace / "sites" / site).glob("*/state.safetensors")
    return state_of(path)


def test_flare_equals_in_process(runs: Runs) -> None:
    ours, theirs = (state_of(w / "server/state.safetensors") for w in (runs.flare, runs.reference))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], t) for n, t in theirs.items())
    for site in SITES[:2]:
        ours, theirs = ((w / "sites" / site / "predictions.png").read_bytes() for w in (runs.flare, runs.reference))
        assert ours == theirs
        ours, theirs = site_state(runs.flare, site), site_state(runs.reference, site)
        assert all(torch.equal(ours[n], t) for n, t in theirs.items())
    ours, theirs = (json.loads((w / "results.json").read_text()) for w in (runs.flare, runs.reference))
    assert ours == theirs
    assert ours.keys() == set(SITES[:2])


def test_local_factors_stay(runs: Runs) -> None:
    private = runs.job.strategy.names(runs.job.initial, Role.LOCAL, 0, 0)
    for site in SITES[:2]:
        _check_bytes(runs.job.initial, private, site_state(runs.flare, site), runs.flare, site)


def _check_bytes(initial: dict, private: list[str], kept: dict, workspace: Path, site: str) -> None:
    sent = b"".join(p.read_bytes() for p in sorted((workspace / "heard" / site).iterdir()))
    shared = [t for n, t in kept.items() if n.startswith("reply/")]
    assert shared
    assert all(t.numpy().tobytes() in sent for t in shared)  # the listener does hear tensors
    for name in private:
        value, start = kept[f"params/{name}"], initial[name]
        assert not torch.equal(value, start)
        assert name.encode() not in sent
        for secret in (value, value - start):
            assert secret.numpy().tobytes() not in sent
            assert secret[0].numpy().tobytes() not in sent


DAMAGE = ("NaN or Inf", "'extra' is not expected", "has shape (1,)", "over 100 times the adapter's", "stale: answers")


def check_refused(workspace: Path, rounds: int) -> None:
    """Each round the damaged site is refused, for another reason each time."""
    reasons = [(x["round"], x["reason"]) for x in events(workspace, "refused") if x["site"] == DAMAGED]
    assert [round for round, _ in reasons] == list(range(rounds))
    assert all(kind in reason for kind, (_, reason) in zip(DAMAGE, reasons, strict=False))


@MOSTLY_HERE
def test_damaged_sites_are_left_out(flare: Runner, hospitals: Path) -> None:
    """The one whose data are broken says why, without a file's name."""
    edit = edited(client=partial(add_filter, "Corrupter"))
    workspace = flare(small_config("fediat"), edit, [*SITES[:2], DAMAGED, BROKEN], hospitals)
    check_refused(workspace, 2)
    assert [x["sites"] for x in events(workspace, "concluded")] == [SITES[:2]] * 2
    assert json.loads((workspace / "results.json").read_text()).keys() == {*SITES[:2], DAMAGED}
    reasons = [x["reason"] for x in events(workspace, "refused") if x["site"] == BROKEN]
    assert reasons
    assert all(reason == Reason.DATA.text for reason in reasons)  # a file's name may be a patient's
    record = (workspace / "sites" / BROKEN).rglob("audit.jsonl")
    assert {json.loads(line)["kind"] for path in record for line in path.read_text().splitlines()} == {"refusal"}


class AsFlareAdds(FedIT):
    """FedIT whose server adds the mean as FLARE's FedAvg does: rounded to the tensors' own type, then summed in that type."""

    def aggregate(self, state: ServerState, results: Tensors) -> ServerState:
        after = super().aggregate(state, results)
        return replace(after, shared={n: t + results[n].to(t.dtype) for n, t in state.shared.items()})


def test_flares_fedavg_uses_the_aggregator(flare: Runner, tmp_path: Path) -> None:
    """To the bit: a reference that adds in another order drifts from it by as much as Adam makes of a last bit."""
    config = training_only(small_config("fedit", local_steps=1))

    def use_fedavg(server: dict[str, Any]) -> None:
        aggregator = {"path": "consilium.flare.job.aggregator.StrategyAggregator", "args": {}}
        fedavg = {"num_clients": 3, "num_rounds": 2, "persistor_id": "", "aggregator": aggregator}
        fedavg["task_check_period"] = OFTEN
        server["workflows"] = [{"id": "c", "path": "tests.flare.components.InitialFedAvg", "args": fedavg}]

    workspace = flare(config, edited(server=use_fedavg))
    reference = tmp_path / "inprocess"
    job = assemble_job(config.model_copy(update={"strategy": AsFlareAdds()}))
    simulate(job, {name: SiteConfig() for name in SITES}, reference, lambda event: None)
    ours, theirs = state_of(workspace / "fedavg.safetensors"), state_of(reference / "server/state.safetensors")
    assert all(torch.equal(t, theirs[f"shared/{n}"]) for n, t in ours.items())
    assert len(ours) == len(theirs)


@MOSTLY_HERE
def test_early_stopping_equals_in_process(flare: Runner, tmp_path: Path) -> None:
    """Nothing moves at this rate, so that the second validation is no better than the first."""
    config = small_config("fedit", rounds=6, lr=1e-30, local_steps=1, validate={"patience": 1, "stages": ["global"]})
    workspace = flare(config, sites=SITES[:2])
    simulate(assemble_job(config), {name: SiteConfig() for name in SITES[:2]}, tmp_path / "here", lambda event: None)
    ended = {"round": 2, "rounds": 6, "validations": 1, "best_round": 0}
    for folder in (workspace, tmp_path / "here"):
        assert [ended.items() <= line.items() for line in events(folder, "ended")] == [True]
    over_flare, here = (json.loads((folder / "results.json").read_text()) for folder in (workspace, tmp_path / "here"))
    assert over_flare == here


@MOSTLY_HERE
@pytest.mark.parametrize("name", ["frlora", "fedra"])
def test_server_halves_equal_in_process(name: str, flare: Runner, tmp_path: Path) -> None:
    raw = training_only(small_config("fedit", local_steps=2, rounds=2)).model_dump() | {"strategy": name}
    config = JobConfig.model_validate(raw)
    simulate(assemble_job(config), {one: SiteConfig() for one in SITES}, tmp_path / "inprocess", lambda event: None)
    check_equal(flare(config), tmp_path / "inprocess")
