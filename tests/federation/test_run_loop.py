"""The sequence of a run over transports: what is asked in which order, and what counts of a phase that ends early."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from consilium import __version__
from consilium.core.errors import ConsiliumError, Reason, RefusedError
from consilium.core.messages import Hello, Kind, Payload
from consilium.federation.job_assembly import Job
from consilium.flare.job import wire
from consilium.flare.job.transport import REPLIED, Aborted, FlareTransport
from consilium.runtime.engine import LocalTransport
from consilium.runtime.run_loop import RunLoop
from consilium.server.coordinator import Coordinator
from tests.conftest import assembled, small_config
from tests.federation.test_coordinator import coordinator, update
from tests.flare.answering import Federation, context, trained

SITES = ("site-1", "site-2", "site-3")


class Recorded(LocalTransport):
    """Sites that answer with what the coordinator accepts; keeps what was asked, in order."""

    def __init__(self, server: Coordinator, job: Job) -> None:
        self.asked: list[tuple[Kind, int, list[str]]] = []

        def site(name: str) -> Any:
            answers: dict[Kind, Callable[[Payload], Any]] = {
                Kind.HELLO: lambda message: Hello(name, 4, False, __version__),
                Kind.TRAIN: lambda message: update(job, 0.1, message.round),
                Kind.EVALUATE: lambda message: Payload(message.round, message.phase, {}),
            }
            return SimpleNamespace(prepare_ask=lambda kind, run, message: lambda: answers[kind](message))

        super().__init__(server, {name: site(name) for name in SITES})

    def begin(self, kind: Kind, messages: Mapping[str, Any], take: Any) -> Callable[[], None]:
        if messages:
            self.asked.append((kind, getattr(next(iter(messages.values())), "round", -1), sorted(messages)))
        return super().begin(kind, messages, take)


def test_every_step_of_a_run_is_asked_once_and_in_order(tmp_path: Path) -> None:
    config = small_config("fedit", rounds=2)
    federation = config.federation.model_copy(update={"fraction_train": 0.6, "fraction_evaluate": 1.0, "min_sites": 2})
    job = assembled(config.model_copy(update={"federation": federation}))
    server = Coordinator(job, tmp_path, lambda event: None)
    transport = Recorded(server, job)
    RunLoop(server, transport).run()
    server.close()
    assert [(kind, round) for kind, round, _ in transport.asked] == [
        (Kind.HELLO, -1), (Kind.EVALUATE, 0), (Kind.TRAIN, 0), (Kind.EVALUATE, 1), (Kind.TRAIN, 1), (Kind.EVALUATE, 2),
    ]  # fmt: skip
    whom = [set(names) for *_, names in transport.asked]
    assert whom[0] == whom[5] == set(SITES)
    for held_out, trainers in (whom[1:3], whom[3:5]):
        assert (len(held_out), len(trainers), held_out & trainers) == (1, 2, set())
    assert server.is_done
    assert (tmp_path / "results.json").is_file()


def test_a_site_that_fails_or_answers_nonsense_is_refused_and_the_others_are_asked(
    small_job: Callable[..., Job], tmp_path: Path
) -> None:
    events: list[Any] = []
    job = small_job("fedit")
    server = coordinator(job, tmp_path, 3)
    server.observer = events.append

    def fails() -> Any:
        raise RefusedError("site-0: its disk is full", Reason.LEDGER)

    answers = {"site-0": fails, "site-1": lambda: update(job, float("nan")), "site-2": lambda: update(job, 0.1)}
    members: Any = {name: SimpleNamespace(prepare_ask=lambda *words, answer=answer: answer) for name, answer in answers.items()}
    payloads = server.start()
    LocalTransport(server, members).ask(Kind.TRAIN, payloads, server.accept)
    refused = {event["site"]: event["reason"] for event in events if event["event"] == "refused"}
    assert refused.keys() == {"site-0", "site-1"}
    assert refused["site-0"] == "site-0: its disk is full"
    assert server.reasons["site-0"] == Reason.LEDGER.text  # a site's own text decides nothing
    assert server.accepted == {"site-2"}
    server.close()


def test_a_refusal_by_the_server_keeps_its_text(small_job: Callable[..., Job], tmp_path: Path) -> None:
    """The coordinator writes this text itself, so it names no data. The site's guard has refused nothing."""
    server = Coordinator(small_job("fedit"), tmp_path, lambda event: None)
    old: Any = SimpleNamespace(prepare_ask=lambda kind, run, message: lambda: Hello("site-1", 4, False, "0.1.0"))
    transport = LocalTransport(server, {"site-1": old})
    transport.register(first=True)
    assert "consilium 0.1.0, the server has" in server.declined["site-1"]
    with pytest.raises(ConsiliumError, match=r"1 site refused: site-1: site-1: consilium 0\.1\.0, the server has"):
        server.start()
    names = ("site-2", "site-3")
    for name in names:
        server.welcome(Hello(name, 4, False, __version__))
    bad: Any = SimpleNamespace(prepare_ask=lambda *words: lambda: update(server.job, float("nan")))
    members = dict.fromkeys(names, bad)
    LocalTransport(server, members).ask(Kind.TRAIN, server.start(), server.accept)
    assert "NaN or Inf" in server.reasons["site-2"]
    server.close()


class Straggler(Federation):
    """FLARE hands over a result while the server ends the exchange: the site has replied, and nothing has read the reply."""

    def __init__(self, folder: Path, answers: dict[str, Any], name: str) -> None:
        super().__init__(folder, answers)
        self.late, self.deliver = name, list[Callable[[], None]]()

    def send(self, task: Task, fl_ctx: FLContext, targets: list[str], **more: object) -> None:
        if targets != [self.late] or task.name == wire.HELLO:
            return super().send(task, fl_ctx, targets, **more)
        client_task = ClientTask(client=SimpleNamespace(name=self.late), task=task)
        client_task.result = self.answers[self.late](task.data)
        task.set_prop(REPLIED, True)  # FLARE's thread has come so far, and goes on by `deliver`
        self.deliver.append(lambda: task.result_received_cb(client_task=client_task, fl_ctx=fl_ctx))
        return None


class Reconnecting(Federation):
    """Site b reconnects amid a round, whose result it still sends, and answers the new hello a moment later."""

    def send(self, task: Task, fl_ctx: FLContext, targets: list[str], **more: object) -> None:
        if targets == ["b"] and task.name == Kind.TRAIN:
            self.coordinator.forget_sites({"b"})
        if targets == ["b"] and task.name == wire.HELLO and self.coordinator.accepted:
            threading.Timer(0.3, super().send, [task, fl_ctx, targets]).start()
        else:
            super().send(task, fl_ctx, targets, **more)


def test_a_site_that_reconnects_amid_a_round_is_in_the_next_one(tmp_path: Path) -> None:
    names = ["a", "b"]
    federation, fl_ctx = Reconnecting(tmp_path, dict.fromkeys(names, trained(0.01))), context(names)
    loop = federation.sequence(fl_ctx)
    loop.transport.register(first=True)
    for _ in range(2):
        loop.run_phase()
        assert federation.coordinator.accepted == {"a", "b"}
        loop.transport.register(first=False)
    federation.coordinator.close()


@pytest.mark.parametrize("final", [False, True], ids=["a round", "the final evaluation"])
def test_no_answer_is_taken_after_its_exchange(final: bool, tmp_path: Path) -> None:
    names, taken = ["a", "b"], list[str]()
    federation, fl_ctx = Straggler(tmp_path, dict.fromkeys(names, trained(0.01)), "b"), context(names)
    server, transport = federation.coordinator, federation.transport_of(fl_ctx)
    transport.send_hellos()
    kind, messages = (Kind.EVALUATE, server.start_final_evaluation()) if final else (Kind.TRAIN, server.start())
    transport.ask(kind, messages, lambda name, result: taken.append(name), lambda: bool(taken))
    assert taken == ["a"]
    federation.deliver[0]()
    assert taken == ["a"]
    assert "after" in server.reasons["b"]
    server.close()


def test_every_task_of_a_short_round_has_a_time_limit(tmp_path: Path) -> None:
    """FLARE takes a limit of 0 s for none, and whole seconds only."""
    federation, fl_ctx = Federation(tmp_path, {"a": trained(1.0)}), context(["a"])
    server = federation.coordinator
    short = server.job.config.federation.model_copy(update={"round_timeout": 0.5})
    server.job = assembled(server.job.config.model_copy(update={"federation": short}))
    federation.transport_of(fl_ctx).send_hellos()
    ((_, task),) = federation.sent
    assert task.timeout == 1
    server.close()


@pytest.mark.parametrize("last", [False, True], ids=["amid a phase", "with its last reply"])
def test_nothing_of_a_phase_counts_once_flare_ends_the_job(last: bool, tmp_path: Path) -> None:
    names, signal, replies = ["a", "b", "c"], Signal(), list[str]()

    def ends(message: Shareable) -> Shareable | None:
        if wire.HELLO not in message:
            replies.append("")
            if len(replies) == (3 if last else 2):
                signal.trigger(True)
        return trained(1.0)(message)

    federation, fl_ctx = Federation(tmp_path, dict.fromkeys(names, ends)), context(names)
    transport = FlareTransport(federation, federation.coordinator, signal, fl_ctx, set, 0.01)
    sequence = RunLoop(federation.coordinator, transport)
    with pytest.raises(Aborted):
        sequence.run()
    assert (federation.coordinator.state.round, (tmp_path / "results.json").exists()) == (0, False)
    federation.coordinator.close()
