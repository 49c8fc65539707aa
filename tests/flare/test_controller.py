"""The controller's patience: quorum and grace, late and missing sites, without a running federation."""

import importlib
import json
import re
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from nvflare.apis.controller_spec import Task, TaskCompletionStatus
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from consilium import __version__
from consilium.cli.jobs import progress_line
from consilium.core.errors import ConsiliumError, Reason
from consilium.core.messages import Hello, Payload
from consilium.flare.job import controller, transport, wire
from consilium.runtime.run_loop import RunLoop
from tests.flare.answering import Federation, context, trained


def registered(folder: Path, values: dict[str, float]) -> tuple[Federation, FLContext]:
    """Return a federation whose sites, which answer with these values, are registered, and its context."""
    federation, fl_ctx = Federation(folder, {name: trained(value) for name, value in values.items()}), context([*values])
    federation.register(fl_ctx)
    return federation, fl_ctx


def test_hello_must_have_the_certificates_name(tmp_path: Path) -> None:
    federation = Federation(tmp_path, {n: trained(0.0) for n in ("a", "b")})
    liar = Hello("a", 4, False, __version__).to_dict()
    federation.answers["c"] = lambda message: wire.encode_dict(wire.HELLO, liar)
    federation.register(context(["a", "b", "c"]))
    assert federation.coordinator.sites.keys() == {"a", "b"}
    assert "it says it is 'a', its certificate says 'c'" in (tmp_path / "metrics.jsonl").read_text()


def test_silent_site_costs_the_grace_only(tmp_path: Path) -> None:
    federation, fl_ctx = registered(tmp_path, {"a": 1.0, "b": 3.0, "c": 9.0})
    federation.answers["c"] = lambda message: None
    began = time.monotonic()
    federation.play_round(fl_ctx)
    assert time.monotonic() - began < 2
    assert federation.coordinator.state.round == 1
    name, start = next(iter(federation.coordinator.job.initial.items()))
    assert torch.allclose(federation.coordinator.state.shared[name], start + 2.0)
    assert '"c", "round": 0, "reason": "no answer in time' in (tmp_path / "metrics.jsonl").read_text()


def test_dead_site_is_skipped_until_it_returns(tmp_path: Path) -> None:
    federation, fl_ctx = registered(tmp_path, dict.fromkeys("abc", 1.0))
    federation.dead["c"] = 1.0
    federation.sent.clear()
    federation.play_round(fl_ctx)
    assert {name for name, _ in federation.sent} == {"a", "b"}
    assert "its process has ended" in (tmp_path / "metrics.jsonl").read_text()
    federation.dead.clear()
    federation.play_round(fl_ctx)
    assert '"round": 1, "phase": 0, "sites": ["a", "b", "c"]}' in (tmp_path / "metrics.jsonl").read_text()


def test_time_left_is_known_though_no_site_replies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consilium.flare.job.transport.SILENT", 0.05)
    federation = Federation(tmp_path, dict.fromkeys(("a", "b"), lambda message: None))
    signal, found = Signal(), []
    tasks = federation.transport_of(context(["a", "b"]), signal)
    sent = tasks.send(wire.HELLO, {"a": Shareable(), "b": Shareable()}, lambda name, result: None)

    def look() -> bool:
        found.append(dict(tasks.waiting))
        if tasks.waiting:
            signal.trigger("seen")
        return False

    tasks.wait_for(sent, look)
    limit = federation.coordinator.job.config.federation.round_timeout
    assert found[0] == {}
    assert found[-1] == {"sites": ["a", "b"], "seconds": pytest.approx(limit, abs=5), "kind": wire.HELLO}


def scored(message: Shareable) -> Shareable:
    asked, run = wire.decode(message)
    return wire.encode(Payload(asked.round, asked.phase, {}, {}, {"test/pretrained/dice": 0.5}), run, True)


def test_status_names_no_site_that_has_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE ends a task some time after its reply. Meanwhile an administrator asks for the status."""
    (federation, fl_ctx), lines = registered(tmp_path, dict.fromkeys("abc", 1.0)), list[str]()
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(federation.coordinator.job.config.model_dump()))
    federation.transport = federation.transport_of(fl_ctx)
    loop = RunLoop(federation.coordinator, federation.transport)

    def look(seconds: float) -> None:
        """Ask for the status while `wait_for` sleeps, then end the tasks as FLARE's monitor does."""
        collector = GroupInfoCollector()
        fl_ctx.set_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR, collector, private=True, sticky=False)
        federation.handle_event(InfoCollector.EVENT_TYPE_GET_STATS, fl_ctx)
        lines.append(progress_line(collector.info["consilium"]).partition("; ETA")[0])
        for task in federation.unended:
            task.completion_status = TaskCompletionStatus.OK
        time.sleep(seconds)

    ends_at_once = federation.send

    def send(task: Task, fl_ctx: FLContext, targets: list[str], **_: object) -> None:
        ends_at_once(task, fl_ctx, targets)
        if task.completion_status:
            task.completion_status = None
            federation.unended.append(task)

    federation.unended = list[Task]()
    monkeypatch.setattr(federation, "send", send)
    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=time.monotonic, sleep=look))
    federation.answers["c"] = lambda message: None
    loop.run_phase()
    assert {re.sub(r", at most \d+ s$", "", line) for line in lines} == {"round 1/2: 2 of 3 sites have answered; waits for c"}
    lines.clear()
    federation.answers |= {"a": lambda message: None, "b": scored, "c": scored}
    loop.finish()
    (line,) = {re.sub(r", at most \d+ s$", "", line) for line in lines}
    assert line == "round 1/2: 2 of 3 sites have answered; waits for scores of a"


def test_final_evaluation_waits_the_grace_only(tmp_path: Path) -> None:
    federation, fl_ctx = registered(tmp_path, dict.fromkeys("abc", 0.0))
    federation.answers |= {"a": scored, "b": scored, "c": lambda message: None}
    importlib.import_module("peft")  # which writing the adapter needs, and which takes seconds to import
    began = time.monotonic()
    federation.play_final(fl_ctx)
    assert time.monotonic() - began < federation.coordinator.job.config.federation.round_timeout / 4  # the grace is 0.05 s
    assert json.loads((tmp_path / "results.json").read_text()).keys() == {"a", "b"}


def test_one_task_per_site(tmp_path: Path) -> None:
    federation, fl_ctx = registered(tmp_path, dict.fromkeys("ab", 0.0))
    federation.sent.clear()
    federation.play_round(fl_ctx)
    (_, first), (_, second) = federation.sent[:2]
    assert first is not second
    assert first.data is not second.data


def test_missed_quorum_has_a_reason(tmp_path: Path) -> None:
    federation, fl_ctx = registered(tmp_path, dict.fromkeys("ab", 0.0))
    federation.answers["b"] = lambda message: wire.refusal(Reason.DATA)
    with pytest.raises(ConsiliumError, match="1 of 2 results"):
        federation.play_round(fl_ctx)
    assert Reason.DATA.text in (tmp_path / "metrics.jsonl").read_text()


def test_full_disk_ends_the_run_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no file can say it, FLARE's own log does; what was saved last is whole."""
    federation, said = Federation(tmp_path, {n: trained(0.0) for n in ("a", "b")}), []
    monkeypatch.setattr(federation, "system_panic", lambda reason, fl_ctx: said.append(reason))
    fl_ctx = context(["a", "b"])
    fl_ctx.get_engine().get_workspace = lambda: SimpleNamespace(get_run_dir=lambda job: "/dev/full")
    saved = (tmp_path / "server/state.safetensors").read_bytes()
    federation.coordinator.log._file = full = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115 - it fails again
    federation.control_flow(Signal(), fl_ctx)
    with suppress(OSError):
        full.close()
    (line,) = said
    assert line == "the server cannot use the run's files (No space left on device); make room, then `consilium resume`"
    assert (tmp_path / "server/state.safetensors").read_bytes() == saved


def test_unexpected_error_of_a_strategy_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE logs the error itself and ends the job. Its text stays in the server's log."""
    federation, fl_ctx = Federation(tmp_path, {n: trained(0.0) for n in ("a", "b")}), context(["a", "b"])
    fl_ctx.get_job_id = lambda: "1"
    fl_ctx.get_engine().get_workspace = lambda: SimpleNamespace(get_run_dir=lambda job: str(tmp_path / "flare"))

    def fails(*_: object) -> None:
        raise KeyError("block.3")

    monkeypatch.setattr(type(federation.coordinator.job.strategy), "aggregate", fails)
    with pytest.raises(KeyError):
        federation.control_flow(Signal(), fl_ctx)
    reason = "an unexpected error at the server (KeyError); see the server's log"
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["reason"] == reason
    assert (tmp_path / "flare" / "consilium" / "stopped.txt").read_text() == reason


def test_full_disk_at_the_start_ends_the_run_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, said, fl_ctx = Federation(tmp_path, {}), list[str](), context([])
    fl_ctx.get_job_id = lambda: "1"
    fl_ctx.get_engine().get_workspace = lambda: SimpleNamespace(get_run_dir=lambda job: "/dev/full")
    monkeypatch.setattr(federation, "system_panic", lambda reason, fl_ctx: said.append(reason))

    def full(fl_ctx: FLContext) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(controller.job_context, "load", full)
    federation.start_controller(fl_ctx)
    assert said == ["the server cannot use the run's files (No space left on device); make room, then `consilium resume`"]


@pytest.mark.parametrize(
    ("log", "fatal", "reason"),
    [
        ("[U:lead@hub.example][A:abort_job 4a34]", "", "aborted by lead@hub.example in round 1"),
        ("[U:lead@hub.example][A:abort_job 4a34-5]", "", "FLARE ended the job in round 1; see the logs of a, b"),
        ("[U:x][A:list_jobs [U:y][A:abort_job 4a34]]", "", "FLARE ended the job in round 1; see the logs of a, b"),
        ("[U:x][A:list_jobs]", "fatal return code from a", "FLARE ended the job in round 1: fatal return code from a"),
    ],
)
def test_abort_by_a_person_blames_no_site(log: str, fatal: str, reason: str, tmp_path: Path) -> None:
    """FLARE's audit.log names the person. FLARE ends the job in the same way if a site reports a failure."""
    (tmp_path / "audit.log").write_text(f"[E:1][T:2026-11-28 14:57:45.982156]{log}\n")
    signal, fl_ctx = Signal(), context(["a", "b"])
    fl_ctx.get_job_id = lambda: "4a34"
    (folder := tmp_path / "run").mkdir()
    workspace = SimpleNamespace(get_root_dir=lambda: str(tmp_path), get_run_dir=lambda job: str(folder))
    fl_ctx.get_engine().get_workspace = lambda: workspace
    federation = Federation(folder, {n: trained(0.0) for n in ("a", "b")})

    def abort(message: Shareable) -> Shareable | None:
        if wire.HELLO in message:
            return trained(0.0)(message)
        if fatal:
            fl_ctx.set_prop(FLContextKey.EVENT_DATA, fatal, private=True)
            federation.handle_event(EventType.FATAL_SYSTEM_ERROR, fl_ctx)
        signal.trigger("abort")
        return None

    federation.answers = dict.fromkeys(("a", "b"), abort)
    federation.control_flow(signal, fl_ctx)
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["reason"] == reason
    assert (folder / "consilium" / "stopped.txt").read_text().strip() == reason


def test_late_site_is_registered_after_the_round(tmp_path: Path) -> None:
    old = wire.encode_dict(wire.HELLO, Hello("old", 4, False, "0.0.0").to_dict())
    federation = Federation(tmp_path, {n: trained(0.0) for n in ("a", "b", "late")} | {"old": lambda message: old})
    federation.register(context(["a", "b", "old"]))
    federation.play_round(context(["a", "b", "old", "late"]))
    assert federation.coordinator.sites.keys() == {"a", "b", "late"}
    assert "consilium 0.0.0, the server has" in (tmp_path / "metrics.jsonl").read_text()
    assert "late" in federation.coordinator.start()
