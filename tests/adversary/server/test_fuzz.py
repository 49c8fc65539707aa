"""Whatever a server sends a site, the guard lets the job's own tasks through and answers all else with one word."""

from typing import Any

import torch
from hypothesis import strategies as st
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.shareable import Shareable

from consilium.core.errors import Reason
from consilium.core.messages import HELD_OUT
from consilium.flare.job import wire
from tests.adversary.fuzzing import PLAIN, VALUES, attack, fuzzed
from tests.adversary.server.conftest import RECORD_LEVEL, SITE_LEVEL, Client, MakeClient

TASKS = st.one_of(st.sampled_from(["train", "evaluate", "hello"]), VALUES)
PLACES = st.one_of(st.integers(-2, 3), st.just(HELD_OUT), VALUES)
RUNS = st.one_of(st.sampled_from(["run-1", "run-2", ""]), VALUES)
TENSORS = st.one_of(
    VALUES,
    st.builds(lambda shape: torch.zeros(shape), st.lists(st.integers(0, 4), max_size=3)),
    st.just(torch.empty(2, 2, device="meta")),
    st.just(torch.eye(3).to_sparse()),
    st.just(torch.full((4, 128), float("nan"))),
)
EXTRAS = st.dictionaries(st.one_of(st.sampled_from(["scalars", "metrics", "ledger", "phase"]), PLAIN), VALUES, max_size=3)
FORMS = st.sampled_from(["ours", "hello", "both", "held", "odd", "kind"])


def message(client: Client, form: str, place: tuple[Any, Any], run: Any, tensors: dict, extras: dict) -> Shareable:
    """Return a message that is nearly one of ours."""
    round, phase = place
    rest = {"run": run, "phase": phase, "scalars": {}, "metrics": {}} | extras
    kind = DataKind.APP_DEFINED if form == "kind" else DataKind.WEIGHTS
    made = DXO(kind, client.broadcast().tensors | tensors, {wire.KEY: extras if form == "odd" else rest}).to_shareable()
    made.set_header("current_round", round)
    if form in ("hello", "both"):
        made = made if form == "both" else Shareable()
        made[wire.HELLO] = {"run": run} | (extras if form == "both" else {})
    if form == "held":
        made[wire.HELD] = run
    return made


def check(client: Client, answer: Shareable) -> None:
    """Whatever ran is a task of the job; what leaves is a word or an answer in its form; and every training is paid for."""
    config = client.job.config
    for did in client.trainer.did:
        if did[0] == "train":
            assert 0 <= did[2].round < config.training.rounds
            assert did[2].phase == 0
        if did[0] == "evaluate":
            assert did[2].round == config.training.rounds or did[2].phase == HELD_OUT
    trained = {(did[1], did[2].round) for did in client.trainer.did if did[0] == "train"}
    if config.privacy is not None:
        paid = {(row.run, row.round) for row in client.guard.ledger.entries()}
        assert (trained if config.privacy.unit == "record" else set()) <= paid
    if (reason := wire.reason_of(answer)) is not None:
        assert reason in Reason
        assert set(answer) <= {"__headers__"}
    elif wire.HELLO in answer:
        assert answer[wire.HELLO]["name"] == "site-1"
    else:
        wire.decode(answer)


@fuzzed
def test_tasks(cases: int, client: MakeClient) -> None:
    for number, privacy in enumerate((None, SITE_LEVEL, RECORD_LEVEL)):
        site = client(privacy, folder=f"fuzz-{number}")

        def body(task: Any, form: str, place: tuple, run: Any, tensors: dict, extras: dict, site: Client = site) -> None:
            try:
                made = message(site, form, place, run, tensors, extras)
            except (ValueError, TypeError):
                return  # FLARE itself cannot write such a message
            check(site, site.ask(task, made))

        names = st.one_of(st.sampled_from(sorted(site.job.initial)), PLAIN)
        tensors = st.dictionaries(names, TENSORS, max_size=2)
        drawn = {"task": TASKS, "form": FORMS, "place": st.tuples(PLACES, PLACES), "run": RUNS}
        attack(cases // 3, body, **drawn, tensors=tensors, extras=EXTRAS)
