"""A site whose answers are not messages of ours, over FLARE: each costs that site its result, and the run goes on."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply

from consilium import __version__
from consilium.core.errors import Reason
from consilium.core.messages import Hello, Payload
from consilium.flare.job import wire
from tests.flare.answering import Federation, context, trained

LONG = "/data/John Doe/1.png \x1b[2J" * 10**6


def reply(reason: Any, code: Any = ReturnCode.EXECUTION_EXCEPTION) -> Shareable:
    return make_reply(code, {wire.REASON: reason})


def refused(folder: Path) -> list[dict]:
    return [x for x in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if x["event"] == "refused"]


REPLIES: dict[str, tuple[Shareable, str]] = {
    "20 MB of text": (reply(LONG), "no reason that this version knows"),
    "a patient's name": (reply("John Doe"), "no reason that this version knows"),
    "a list": (reply(["a"]), "no reason that this version knows"),
    "no reason, an invented code": (make_reply(LONG), "no reason that this version knows"),
    "a code that is a list": (make_reply(["x"]), "cannot be used"),
    "no reason, FLARE's code": (make_reply(ReturnCode.TASK_ABORTED), "FLARE return code TASK_ABORTED"),
    "a word": (reply(Reason.BUDGET), Reason.BUDGET.text),
    "nothing": (Shareable(), "not a consilium message"),
    "no dictionary of tensors": (DXO(DataKind.WEIGHT_DIFF, {"a": 1}).to_shareable(), "missing"),
    "meta that is text": (DXO(DataKind.WEIGHT_DIFF, {}, {wire.KEY: "x"}).to_shareable(), "not a consilium message"),
    "scalars that are text": (
        DXO(DataKind.WEIGHT_DIFF, {}, {wire.KEY: {"scalars": "abc"}}).to_shareable(),
        "not a consilium message",
    ),
}


@pytest.mark.parametrize("kind", REPLIES)
def test_an_odd_answer_costs_its_site_the_round_and_is_told_in_our_words(kind: str, tmp_path: Path) -> None:
    answer, expected = REPLIES[kind]
    federation = Federation(tmp_path, {n: trained(1.0) for n in ("a", "b", "c")})
    fl_ctx = context(["a", "b", "c"])
    federation.register(fl_ctx)
    federation.answers["c"] = lambda message: answer
    federation.play_round(fl_ctx)
    assert federation.coordinator.state.round == 1
    (one,) = refused(tmp_path)
    assert (one["site"], one["round"], one["joining"]) == ("c", 0, False)
    assert expected in one["reason"]
    assert len(one["reason"]) < 300
    assert "John" not in one["reason"]


HELLOS: dict[str, Any] = {
    "nothing": None,
    "text": "hello",
    "a list": [1],
    "other keys": {"patients": 1},
    "keys that are not text": {7: 1},
    "another's name": Hello("a", 4, False, __version__).to_dict(),
    "text for a number": Hello("c", "4", False, __version__).to_dict(),
}


@pytest.mark.parametrize("kind", HELLOS)
def test_an_odd_hello_keeps_its_site_out_and_nobody_else(kind: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, {n: trained(1.0) for n in ("a", "b")})
    federation.answers["c"] = lambda message: wire.encode_dict(wire.HELLO, HELLOS[kind])
    federation.send = lambda *a, **k: _send(federation, *a, **k)
    federation.register(context(["a", "b", "c"]))
    assert federation.coordinator.sites.keys() == {"a", "b"}
    (one,) = refused(tmp_path)
    assert (one["site"], one["joining"]) == ("c", True)
    assert len(one["reason"]) < 300


def _send(federation: Federation, task: Any, fl_ctx: Any, targets: list[str]) -> None:
    if targets != ["c"]:
        Federation.send(federation, task, fl_ctx, targets)
        return
    client_task = SimpleNamespace(client=SimpleNamespace(name="c"), task=task, result=federation.answers["c"](task.data))
    task.result_received_cb(client_task=client_task, fl_ctx=fl_ctx)
    task.completion_status = "ok"


def test_an_odd_score_after_the_last_round_does_not_stop_the_results(tmp_path: Path) -> None:
    """A text among the scores used to raise after the result was counted."""
    federation = Federation(tmp_path, {n: trained(0.0) for n in ("a", "b", "c")})
    fl_ctx = context(["a", "b", "c"])
    federation.register(fl_ctx)

    def scored(value: Any) -> Any:
        def answer(message: Shareable) -> Shareable:
            asked, run = wire.decode(message)
            return wire.encode(Payload(asked.round, asked.phase, {}, {}, {"test/pretrained/dice": value}), run, True)

        return answer

    federation.answers |= {"a": scored(0.5), "b": scored(0.25), "c": scored("\x1b[31m1.0")}
    federation.play_final(fl_ctx)
    assert json.loads((tmp_path / "results.json").read_text()) == {
        "a": {"test/pretrained/dice": 0.5},
        "b": {"test/pretrained/dice": 0.25},
    }
