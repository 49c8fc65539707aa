"""The controller's patience: quorum and grace, late and missing sites, without a running federation."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from consilium import __version__
from consilium.errors import ConsiliumError, Reason
from consilium.federation.build import assemble_job
from consilium.federation.coordinator import Coordinator
from consilium.flare import wire
from consilium.flare.controller import RoundController
from consilium.messages import Hello, Payload
from tests.conftest import small_config

Answer = Callable[[Shareable], Shareable | None]


class Federation(RoundController):
    """The controller over sites that answer at once by a function, or (None) never."""

    def __init__(self, folder: Path, answers: dict[str, Answer]) -> None:
        super().__init__()
        self.task_check_period = 0.01
        config = small_config("fedit")
        federation = config.federation.model_copy(update={"straggler_grace_seconds": 0.05})
        job = assemble_job(config.model_copy(update={"federation": federation}))
        self.coordinator = Coordinator(job, folder, lambda event: None)
        self.answers, self.sent, self.dead = answers, [], {}

    def send(self, task: Task, fl_ctx: FLContext, targets: list[str], **_: object) -> None:
        (name,) = targets
        self.sent.append((name, task))
        result = self.answers[name](task.data)
        if result is not None:
            if wire.HELLO in result and not result[wire.HELLO]["name"]:
                result[wire.HELLO]["name"] = name  # as an honest site does
            client_task = ClientTask(client=SimpleNamespace(name=name), task=task)
            client_task.result = result
            task.result_received_cb(client_task=client_task, fl_ctx=fl_ctx)
            task.completion_status = TaskCompletionStatus.OK

    def get_client_disconnect_time(self, client_name: str) -> float | None:
        return self.dead.get(client_name)

    def cancel_task(self, task: Task, completion_status: TaskCompletionStatus, fl_ctx: FLContext) -> None:
        task.completion_status = completion_status


def trained(value: float) -> Answer:
    def answer(message: Shareable) -> Shareable:
        if wire.HELLO in message:
            return wire.encode_dict(wire.HELLO, Hello("", 4, False, __version__).to_dict())
        payload, run = wire.decode(message)
        return wire.encode(
            Payload(payload.round, 0, {n: torch.full_like(t, value) for n, t in payload.tensors.items()}), run, True
        )

    return answer


def context(names: list[str]) -> FLContext:
    fl_ctx = FLContext()
    clients = [SimpleNamespace(name=n) for n in names]
    engine = SimpleNamespace(get_clients=lambda: clients, fire_event=lambda *event: None)
    fl_ctx.get_engine = lambda: engine
    return fl_ctx


def test_sites_are_known_by_their_certificates_name_and_say_no_other(tmp_path: Path) -> None:
    federation = Federation(tmp_path, {n: trained(0.0) for n in ("a", "b")})
    liar = Hello("a", 4, False, __version__).to_dict()
    federation.answers["c"] = lambda message: wire.encode_dict(wire.HELLO, liar)
    federation._invite(context(["a", "b", "c"]))
    assert federation.coordinator.sites.keys() == {"a", "b"}
    assert "it says it is 'a', its certificate says 'c'" in (tmp_path / "metrics.jsonl").read_text()


def test_a_silent_site_costs_the_grace_and_no_more(tmp_path: Path) -> None:
    federation = Federation(tmp_path, {"a": trained(1.0), "b": trained(3.0), "c": trained(9.0)})
    fl_ctx = context(["a", "b", "c"])
    federation._invite(fl_ctx)
    federation.answers["c"] = lambda message: None
    began = time.monotonic()
    federation._round(Signal(), fl_ctx)
    assert time.monotonic() - began < 2
    assert federation.coordinator.state.round == 1
    name, start = next(iter(federation.coordinator.job.initial.items()))
    assert torch.allclose(federation.coordinator.state.shared[name], start + 2.0)
    assert '"c", "round": 0, "reason": "no answer in time' in (tmp_path / "metrics.jsonl").read_text()


def test_a_site_flare_holds_for_dead_is_not_waited_for_and_may_come_back(tmp_path: Path) -> None:
    federation = Federation(tmp_path, {n: trained(1.0) for n in ("a", "b", "c")})
    fl_ctx = context(["a", "b", "c"])
    federation._invite(fl_ctx)
    federation.dead["c"] = 1.0
    federation.sent.clear()
    federation._round(Signal(), fl_ctx)
    assert {name for name, _ in federation.sent} == {"a", "b"}
    assert "its process has ended" in (tmp_path / "metrics.jsonl").read_text()
    federation.dead.clear()
    federation._round(Signal(), fl_ctx)
    assert '"round": 1, "phase": 0, "sites": ["a", "b", "c"]}' in (tmp_path / "metrics.jsonl").read_text()


def test_the_closing_evaluation_waits_for_a_silent_site_no_longer_than_the_grace(tmp_path: Path) -> None:
    federation = Federation(tmp_path, {n: trained(0.0) for n in ("a", "b", "c")})
    fl_ctx = context(["a", "b", "c"])
    federation._invite(fl_ctx)

    def scored(message: Shareable) -> Shareable:
        asked, run = wire.decode(message)
        return wire.encode(Payload(asked.round, asked.phase, {}, {}, {"test/pretrained/dice": 0.5}), run, True)

    federation.answers |= {"a": scored, "b": scored, "c": lambda message: None}
    began = time.monotonic()
    federation._final(Signal(), fl_ctx)
    assert time.monotonic() - began < 2
    assert json.loads((tmp_path / "results.json").read_text()).keys() == {"a", "b"}


def test_every_site_gets_a_task_of_its_own(tmp_path: Path) -> None:
    federation = Federation(tmp_path, {n: trained(0.0) for n in ("a", "b")})
    fl_ctx = context(["a", "b"])
    federation._invite(fl_ctx)
    federation.sent.clear()
    federation._round(Signal(), fl_ctx)
    (_, first), (_, second) = federation.sent[:2]
    assert first is not second
    assert first.data is not second.data


def test_failures_under_the_quorum_end_with_the_reason(tmp_path: Path) -> None:
    federation = Federation(tmp_path, {n: trained(0.0) for n in ("a", "b")})
    fl_ctx = context(["a", "b"])
    federation._invite(fl_ctx)
    federation.answers["b"] = lambda message: wire.refusal(Reason.DATA)
    with pytest.raises(ConsiliumError, match="1 of 2 results"):
        federation._round(Signal(), fl_ctx)
    assert Reason.DATA.text in (tmp_path / "metrics.jsonl").read_text()


def test_a_late_comer_is_invited_after_the_round_and_another_version_is_not_admitted(tmp_path: Path) -> None:
    old = wire.encode_dict(wire.HELLO, Hello("old", 4, False, "0.0.0").to_dict())
    federation = Federation(tmp_path, {n: trained(0.0) for n in ("a", "b", "late")} | {"old": lambda message: old})
    federation._invite(context(["a", "b", "old"]))
    federation._round(Signal(), context(["a", "b", "old", "late"]))
    assert federation.coordinator.sites.keys() == {"a", "b", "late"}
    assert "consilium 0.0.0, the server has" in (tmp_path / "metrics.jsonl").read_text()
    assert "late" in federation.coordinator.start()
