"""A site that sends what no honest one does: the message is refused with a reason, before anything of it is counted or kept."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from consilium import __version__
from consilium.core.messages import HELD_OUT, Hello, Payload
from consilium.federation.job_assembly import Job
from consilium.server.coordinator import Coordinator
from consilium.strategies.strategy import Role
from tests.conftest import assembled, small_config

ESCAPE = "\x1b]0;owned\x07"


@pytest.fixture(scope="module")
def job() -> Job:
    config = small_config("fedit")
    federation = config.federation.model_copy(update={"fraction_train": 0.5, "fraction_evaluate": 1.0})
    return assembled(config.model_copy(update={"federation": federation}))


@pytest.fixture
def server(job: Job, tmp_path: Path) -> Coordinator:
    """A run of four sites in its first round, in which two are asked and two held out."""
    made = Coordinator(job, tmp_path, lambda event: None)
    for name in "abcd":
        made.welcome(Hello(name, 24, False, __version__))
    made.start()
    return made


def update(job: Job, **more: Any) -> Payload:
    names = job.strategy.names(job.initial, Role.SHARED, 0, 0)
    return replace(Payload(0, 0, {n: torch.full_like(job.initial[n], 0.1) for n in names}), **more)


def lines(server: Coordinator, event: str) -> list[dict]:
    return [x for x in map(json.loads, (server.folder / "metrics.jsonl").read_text().splitlines()) if x["event"] == event]


BAD_METRICS: dict[str, tuple[Any, Any]] = {
    "a text": ("train/loss", "0.5"),
    "not a number": ("train/loss", float("nan")),
    "without end": ("train/loss", float("-inf")),
    "a truth": ("train/loss", True),
    "nothing": ("train/loss", None),
    "a list": ("train/loss", [0.5]),
    "larger than single precision": ("train/loss", 1e300),
    "of 500 digits": ("train/loss", 10**500),
    "an invented name": ("train/patients", 3.0),
    "a path": ("../../../../tmp/owned", 0.5),
    "an escape code": (ESCAPE, 0.5),
    "no text for a name": (7, 0.5),
}


@pytest.mark.parametrize("kind", BAD_METRICS)
def test_a_metric_that_is_none_is_refused_and_the_result_not_counted(kind: str, server: Coordinator) -> None:
    name, value = BAD_METRICS[kind]
    bad, good = sorted(server.asked)
    reason = server.accept(bad, update(server.job, metrics={"train/loss": 0.5} | {name: value}))
    assert reason.startswith("metric ")
    assert ESCAPE not in reason
    assert bad not in server.accepted
    assert server.accept(good, update(server.job)) is None
    assert [x["site"] for x in lines(server, "result")] == [good]
    held_out = sorted(server.evaluation_payloads())[0]
    assert server.accept_held_out(held_out, Payload(0, HELD_OUT, {}, metrics={name: value})).startswith("metric ")
    assert server.accept_final(bad, Payload(0, 0, {}, metrics={name: value})).startswith("metric ")
    server.finish()
    assert lines(server, "held_out") == lines(server, "final") == []
    assert json.loads((server.folder / "results.json").read_text()) == {}


def test_a_bad_result_changes_nothing_of_the_round(job: Job, server: Coordinator, tmp_path: Path) -> None:
    """The mean of a round with a refused result is that of the others."""
    bad, good = sorted(server.asked)
    assert "not a real" in server.accept(bad, update(job, metrics={"train/loss": "x"}))
    assert server.accept(good, update(job)) is None
    mean = server.aggregate.take()
    assert all(torch.allclose(t, torch.full_like(t, 0.1), atol=1e-10) for t in mean.values())


def tensors(job: Job) -> dict[str, Callable[[Tensor], Any]]:
    return {
        "of torch.int64": lambda t: t.to(torch.int64),
        "of torch.complex64": lambda t: t.to(torch.complex64),
        "of torch.float64": lambda t: t.double(),
        "of torch.bool": lambda t: t.bool(),
        "of torch.float8": lambda t: t.to(torch.float8_e4m3fn),
        "plain: sparse": lambda t: t.to_sparse(),
        "plain: on no device": lambda t: torch.empty(t.shape, device="meta"),
        "plain: a list": lambda t: t.tolist(),
        "plain: a number": lambda t: 0.5,
        "plain: a subclass": lambda t: torch.nn.Parameter(t),
        "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        "claims more: a trillion of one": lambda t: torch.zeros(1).expand(10**6, 10**6),
        "claims more: a row many times": lambda t: t[:1].clone().expand(t.shape),
        "has shape": lambda t: t.reshape(-1),
        "has NaN": lambda t: t * float("nan"),
    }


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", tensors(None))
def test_a_tensor_of_another_kind_is_refused(kind: str, job: Job, server: Coordinator) -> None:
    name, good = next((n, t) for n, t in update(job).tensors.items() if t.shape[0] != t.shape[1])
    site = sorted(server.asked)[0]
    reason = server.accept(site, update(job, tensors=update(job).tensors | {name: tensors(job)[kind](good)}))
    said = "is of torch.qint8" if kind == "quantized" else kind.split(":")[0].removeprefix("plain") or "is not a plain one"
    assert said in reason
    assert site not in server.accepted
    assert lines(server, "result") == []


def test_a_reason_quotes_no_name_of_twenty_megabytes(job: Job, server: Coordinator) -> None:
    site = sorted(server.asked)[0]
    reason = server.accept(site, update(job, tensors=update(job).tensors | {ESCAPE * 10**6: torch.zeros(1)}))
    assert "is not expected" in reason
    assert len(reason) < 1000
    assert "\x1b" not in reason


@pytest.mark.parametrize("scalars", [{"x": 1.0}, {7: 1.0}, {"x": "1"}, {ESCAPE * 100: None}])
def test_a_scalar_is_refused(scalars: dict, job: Job, server: Coordinator) -> None:
    reason = server.accept(sorted(server.asked)[0], update(job, scalars=scalars))
    assert "is not expected: a site sends tensors and metrics" in reason


@pytest.mark.parametrize("place", [(7, 0), (0, 5), (-(10**30), 10**30), (1, HELD_OUT)])
def test_an_evaluation_of_another_round_is_not_recorded(place: tuple[int, int], server: Coordinator) -> None:
    """A round of 31 digits in the record would stop TensorBoard, and with it the run."""
    metrics = {"test/pretrained/dice": 0.5}
    for record in (server.accept_final, server.accept_held_out):
        assert record("a", Payload(*place, {}, metrics=metrics)).startswith("stale")
    assert "tensors or scalars" in server.accept_final("a", Payload(0, 0, {"x": torch.zeros(1)}, metrics=metrics))
