"""Whatever a site sends the coordinator, it is taken whole or refused in one short line; the run's record stays readable."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from consilium import __version__
from consilium.core.errors import RefusedError
from consilium.core.messages import HELD_OUT, Hello, Payload
from consilium.federation.job_assembly import Job, assemble_job
from consilium.report.untrusted_files import read_lines
from consilium.server.coordinator import Coordinator
from consilium.strategies.strategy import Role
from tests.adversary.fuzzing import PLAIN, VALUES, attack, fuzzed
from tests.conftest import small_config

JOB: Job = assemble_job(small_config("fedit"))
NAMES = JOB.strategy.names(JOB.initial, Role.SHARED, 0, 0)
GOOD = {name: torch.full_like(JOB.initial[name], 0.1) for name in NAMES}

KNOWN = st.sampled_from(["train/loss", "train/steps", "validation/global/dice", "test/pretrained/iou"])
NUMBERS = st.dictionaries(st.one_of(KNOWN, PLAIN), st.one_of(st.floats(0, 9), VALUES), max_size=4)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64, torch.bool, torch.uint8])
SHAPES = st.lists(st.integers(0, 5), max_size=4)
TENSORS = st.one_of(
    VALUES,
    st.builds(lambda shape, dtype: torch.zeros(shape, dtype=dtype), SHAPES, DTYPES),
    st.builds(lambda shape: torch.zeros(1).expand([*shape, 1]), SHAPES),
    st.builds(lambda shape: torch.full(shape, float("nan")), SHAPES),
    st.just(torch.empty(2, 2, device="meta")),
    st.just(torch.eye(3).to_sparse()),
)
UPDATES = st.dictionaries(st.one_of(st.sampled_from(NAMES), PLAIN), TENSORS, max_size=3)
PLACES = st.one_of(st.just(0), st.integers(), st.just(HELD_OUT))


@pytest.fixture
def server(tmp_path: Path) -> Coordinator:
    made = Coordinator(JOB, tmp_path, lambda event: None)
    for name in ("a", "b", "c"):
        made.welcome(Hello(name, 24, False, __version__))
    made.start()
    return made


def check(server: Coordinator, reason: str | None) -> None:
    """A refusal is one short, visible line; the record has nothing that JSON does not know, and grows by little."""
    assert reason is None or (reason.isprintable() and len(reason) < 1100)
    path = server.folder / "metrics.jsonl"
    text = path.read_text()
    for line in text.splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is in the record"))
    assert len(read_lines(path)[0]) == len(text.splitlines())
    assert len(text) < 10_000
    path.write_text("")
    server.log._file.seek(0)


@fuzzed
def test_updates(cases: int, server: Coordinator) -> None:
    def body(tensors: dict, whole: bool, scalars: dict, metrics: dict, round: int, phase: int) -> None:
        server.accepted = set()
        server.aggregate.reset()
        sent = GOOD | tensors if whole else tensors
        reason = server.accept("a", Payload(round, phase, sent, scalars, metrics))
        check(server, reason)
        assert (reason is None) == ("a" in server.accepted)
        server.accept("b", Payload(0, 0, GOOD))
        mean = server.aggregate.take()
        assert all(torch.isfinite(mean[n]).all() and mean[n].shape == GOOD[n].shape for n in NAMES)

    attack(cases, body, tensors=UPDATES, whole=st.booleans(), scalars=NUMBERS, metrics=NUMBERS, round=PLACES, phase=PLACES)


@fuzzed
def test_scores(cases: int, server: Coordinator) -> None:
    def body(tensors: dict, scalars: dict, metrics: dict, round: int, phase: int, ledger: Any) -> None:
        payload = Payload(round, phase, tensors, scalars, metrics, ledger)
        for record in (server.accept_final, server.accept_held_out):
            check(server, record("a", payload))

    drawn = {"tensors": UPDATES, "scalars": NUMBERS, "metrics": NUMBERS, "round": PLACES, "phase": PLACES}
    attack(cases, body, **drawn, ledger=st.one_of(st.just(""), VALUES))


@fuzzed
def test_hellos(cases: int, server: Coordinator) -> None:
    def body(name: Any, **values: Any) -> None:
        server.sites.pop("d", None)
        try:
            server.welcome(Hello(name, **values))
        except RefusedError as error:
            check(server, server.refuse("d", str(error), joining=True))
        assert server.sites.keys() <= {"a", "b", "c", name if isinstance(name, str) else "d"}

    attack(
        cases,
        body,
        name=st.one_of(VALUES, st.just("d")),
        num_samples=st.one_of(VALUES, st.just(24)),
        joined=st.one_of(VALUES, st.booleans()),
        version=st.one_of(VALUES, st.just(__version__)),
        checkpoint=st.one_of(VALUES, st.just("")),
        capacity=st.one_of(VALUES, st.dictionaries(st.sampled_from(["time", "memory", "patients"]), VALUES, max_size=3)),
        ledger=st.one_of(VALUES, st.just("")),
    )
