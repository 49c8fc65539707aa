"""Refusals and odd ends of FLARE's side that no run of a whole federation brings up."""

import logging
import shutil
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from consilium.client.build import build_site
from consilium.client.data_parallel import rank_error
from consilium.client.data_parallel_worker import as_failure
from consilium.config.run_sections import ServerConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import CheckpointError, ConfigError, DataError, Reason, RefusedError
from consilium.core.messages import Kind, Payload, SiteInfo, Tensors
from consilium.federation.job_assembly import Job, assemble_job
from consilium.flare.admin.session import Admin
from consilium.flare.job import job_context, wire
from consilium.flare.job.aggregator import StrategyAggregator
from consilium.flare.job.controller import RoundController
from consilium.flare.job.executor import SiteExecutor
from consilium.flare.job.private_log import log_failure, route_to_private_log
from consilium.flare.kit import certificates, revocation
from consilium.flare.kit.evidence_archive import copy_ledger, verify_chains
from consilium.privacy.audit_log import FILE
from consilium.report.private_logging import OF_DATA
from consilium.strategies.strategy import Role
from tests.conftest import small_config
from tests.data.storing import break_pixels, make_site


@pytest.fixture(scope="module")
def job() -> Job:
    return assemble_job(small_config("fedit"))


def update(job: Job, value: float) -> Tensors:
    return {n: torch.full_like(job.initial[n], value) for n in job.strategy.names(job.initial, Role.SHARED, 0, 0)}


@pytest.fixture
def at_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FLContext:
    """Return the context of the job job-1 at a site, whose log of the data's errors is state/errors/job-1.log."""
    fl_ctx = FLContext()
    fl_ctx.set_prop(ReservedKey.RUN_NUM, "../runs/job-1")  # a server's choice leads nowhere else
    for logger in map(logging.getLogger, OF_DATA):
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(job_context, "state_folder", lambda fl_ctx: tmp_path / "state")
    return fl_ctx


# FLARE's own workflows over our aggregator


def model(params: Any, count: Any = 1, name: str = "clinic") -> FLModel:
    meta = {"client_name": name, "NUM_STEPS_CURRENT_ROUND": count}
    made = FLModel(params_type=ParamsType.DIFF, params={}, current_round=0, meta=meta)
    made.params = params
    return made


MALFORMED = [(params, 1) for params in (7, [1, 2], {"x": "no tensor"}, {7: torch.zeros(1)}, {"x": None})]
COUNTS = [(None, count) for count in (0, -1, 2.0, "3", True, None, 10**12)]


@pytest.mark.parametrize(("params", "count"), [*MALFORMED, *COUNTS])
def test_malformed_model_costs_its_sender_only(params: object, count: object, job: Job) -> None:
    aggregator = StrategyAggregator()
    aggregator.set_job(job)
    aggregator.accept_model(model(update(job, 3.0)))
    odd = update(job, 4.0) if params is None else params  # 5.0 would be refused for its norm
    aggregator.accept_model(model(odd, count, "odd"))
    assert all(torch.equal(t, torch.full_like(t, 3.0)) for t in aggregator.aggregate_model().params.values())


def test_flares_workflows_refuse_server_optimizers(job: Job) -> None:
    aggregator = StrategyAggregator()
    with pytest.raises(ConfigError, match="no run has begun"):
        aggregator.aggregate_model()
    config = job.config.model_copy(update={"server": ServerConfig(optimizer="adam")})
    aggregator.set_job(replace(job, config=config))
    with pytest.raises(ConfigError, match=r"server\.optimizer: only RoundController"):
        aggregator.aggregate_model()


# Server and site in FLARE's processes


def test_job_that_cannot_run_ends_with_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, fl_ctx, said = RoundController(), FLContext(), list[str]()

    def refused(fl_ctx: FLContext) -> Job:
        raise ConfigError("job.yaml: lr: missing; add it")

    monkeypatch.setattr("consilium.flare.job.job_context.load", refused)
    monkeypatch.setattr("consilium.flare.job.job_context.publish_reason", lambda fl_ctx, reason: said.append(reason))
    monkeypatch.setattr(controller, "system_panic", lambda reason, fl_ctx: said.append(reason))
    controller.start_controller(fl_ctx)
    assert said == ["job.yaml: lr: missing; add it"] * 2
    controller.control_flow(Signal(), fl_ctx)  # does nothing
    controller.stop_controller(fl_ctx)


def test_unexpected_error_leaves_as_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(shareable: Shareable) -> object:
        raise ZeroDivisionError("/data/ward/John Doe.dcm")

    executor = SiteExecutor()
    monkeypatch.setattr(wire, "pop", take)
    answer = executor.execute(wire.TRAIN, Shareable(), FLContext(), Signal())
    assert wire.reason_of(answer) is Reason.ERROR
    assert "Doe" not in str(dict(answer))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (DataError("/ward/John Doe/1.png: is cut off"), "the data cannot be used; the text is in "),
        (OSError(5, "bad sector", "/ward/John Doe/1.png"), "unexpected error (OSError); the text is in "),
        (CheckpointError("/srv/vit.pth: is damaged"), "/srv/vit.pth: is damaged"),
    ],
)
def test_data_errors_go_to_the_private_log(
    error: Exception, told: str, at_site: FLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def take(shareable: Shareable) -> object:
        logging.getLogger("consilium.data.cache").warning("left out of training: /ward/Jane Doe/2.png")
        logging.getLogger("consilium.tasks.language.task").warning("/ward/Jane Doe/3.jsonl: 2 records are longer")
        raise error

    executor = SiteExecutor()
    monkeypatch.setattr(job_context, "preset_exit_success", lambda fl_ctx: None)
    monkeypatch.setattr(wire, "pop", take)
    executor.handle_event(EventType.START_RUN, at_site)
    executor.execute(wire.TRAIN, Shareable(), at_site, Signal())
    assert told in caplog.text
    kept = tmp_path / "state/errors/job-1.log"
    assert all(f"Jane Doe/{file}" in kept.read_text() for file in ("2.png", "3.jsonl"))
    assert ("John Doe" in kept.read_text()) is ("John" in str(error))
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    shutil.rmtree(kept.parent)
    kept.parent.write_text("no folder: nothing can be kept")
    executor.execute(wire.TRAIN, Shareable(), at_site, Signal())
    assert "Doe" not in caplog.text + "".join(capfd.readouterr())


def test_picture_errors_go_to_the_private_log(
    at_site: FLContext, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard's picture of a validation sample: the event went to FLARE's log with the error's text."""
    listed = make_site(tmp_path / "list")
    listed.write_text(listed.read_text().replace('"test"', '"validation"'))
    route_to_private_log(at_site)
    caplog.set_level(logging.INFO)
    job, observer = assemble_job(small_config("fedit")), job_context.observer(SiteExecutor(), at_site, "site-1")
    site = build_site(job, "site-1", SiteConfig(datalist=listed), tmp_path / "one", observer)
    break_pixels(tmp_path / "list" / "Muster_Erika_test_0.png")
    with pytest.raises(DataError, match="Muster_Erika_test_0"):  # which log_failure keeps apart
        site.train("run", job.strategy.payload(job.strategy.initialize(job.initial), SiteInfo("site-1", 5)))
    assert '"reason": "tb_events: DataError"' in caplog.text
    assert "Muster" not in caplog.text + "".join(capfd.readouterr())
    assert "tb_events: DataError: " in (kept := (tmp_path / "state/errors/job-1.log").read_text())
    assert "Muster_Erika_test_0.png" in kept


def test_device_errors_are_public(at_site: FLContext, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another process of a site with several: an error of the system went public, with the path it names."""
    who = "rank 1 on cuda:1: "
    said: list[tuple[Exception, str]] = [
        (PermissionError(13, "denied", "/ward/Jane Doe/1.png"), "PermissionError; the text is in "),
        (DataError("/ward/Jane Doe/1.png: is cut off"), "the data cannot be used; the text is in "),
        (CheckpointError("/srv/vit.pth: is damaged"), "/srv/vit.pth: is damaged"),
    ]
    for error, told in said:
        log_failure(SiteExecutor(), at_site, rank_error(who, as_failure(error)))
        assert f"site.yaml: devices: {who}{told}" in caplog.text
    kept = (tmp_path / "state/errors/job-1.log").read_text()
    assert "Doe" not in caplog.text
    assert kept.count(f"devices: {who}") == 2
    assert "PermissionError: [Errno 13] denied: '/ward/Jane Doe/1.png'" in kept  # the traceback's last line


def test_lost_private_text_is_reported(at_site: FLContext, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = tmp_path / "state/errors/job-1.log"
    kept.mkdir(parents=True)
    log_failure(SiteExecutor(), at_site, DataError("/ward/Jane/\udcff.png: is cut off"))
    assert "the text could not be kept" in caplog.text
    kept.rmdir()
    log_failure(SiteExecutor(), at_site, DataError("/ward/Jane/\udcff.png: is cut off"))
    assert r"/ward/Jane/\udcff.png" in kept.read_text()


@pytest.mark.parametrize("other", [wire.HELLO, wire.STATISTICS, wire.MODEL, "DXO"])
def test_secagg_task_is_of_one_kind(other: str) -> None:
    asked = wire.encode_dict(wire.MASKS, {"run": "r", "question": {}})
    assert wire.decode_task(Kind.MASKS, asked) == ("r", Payload(-1, -1, {}), "")
    asked[other] = {"run": "r"}
    with pytest.raises(RefusedError):
        wire.decode_task(Kind.MASKS, asked)


def test_malformed_packed_header_is_refused() -> None:
    sent, rest = wire.pack({"x": torch.ones(3)}, {"phase": 0})
    for broken in (b"", b"none", rest[:-1], rest + b"x", rest[:4] + b"\xff" + rest[5:]):
        with pytest.raises(ValueError, match=r"."):
            wire.unpack(dict(sent), broken)


# Kits, evidence and sessions


def test_server_address_needs_a_kit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no startup kit: none of"):
        certificates.server_address(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"components": 7}', '{"components": [7]}', "{}"])
def test_unreadable_resources_check_no_revocation(text: str, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "resources.json").write_text(text)
    assert revocation.has_revocation_check(tmp_path) is False


def test_malformed_records_are_reported(tmp_path: Path) -> None:
    for content in (b"", b"{", b"\xff\xfe", b"null\n", b'{"kind": 7}\n'):
        found = verify_chains({FILE.replace(".jsonl", "-1.jsonl"): content, "ledger.sqlite": content or b"x" * 200})
        assert found["record"] or not content.strip()
        assert found["ledger"]
        assert "/tmp" not in found["ledger"]


def test_copy_of_a_ledger(tmp_path: Path) -> None:
    assert copy_ledger(tmp_path / "none.sqlite") == b""
    with sqlite3.connect(tmp_path / "one.sqlite") as opened:
        opened.execute("create table t (x)")
        opened.execute("insert into t values (7)")
    (tmp_path / "copy.sqlite").write_bytes(copy_ledger(tmp_path / "one.sqlite"))
    assert sqlite3.connect(tmp_path / "copy.sqlite").execute("select x from t").fetchall() == [(7,)]


class Session:
    """FLARE's session over jobs, with the sites that join one after the other, at every question."""

    def __init__(self, jobs: list[dict[str, Any]], sites: list[str]) -> None:
        self.listed, self.arriving, self.there = jobs, sites, list[str]()

    def list_jobs(self, detailed: bool) -> list[dict[str, Any]]:
        return self.listed

    def get_system_info(self) -> SimpleNamespace:
        self.there += self.arriving[len(self.there) :][:1]
        running = [SimpleNamespace(job_id=job["job_id"]) for job in self.listed]
        return SimpleNamespace(job_info=running, client_info=[SimpleNamespace(name=name) for name in self.there])


NOTES = {"job_id": "1-id", "name": "study", "experiment": "study-1", "submit_time": 1, "status": "RUNNING"}


def test_running_experiment_is_not_resumed() -> None:
    admin = Admin(Session([NOTES], []))
    with pytest.raises(ConfigError, match="job 1-id is still running"):
        admin.former_plan("study-1")
    with pytest.raises(ConfigError, match="no such job or experiment"):
        admin.find_job("study-2")


def test_await_sites_names_missing_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert Admin(Session([], ["a", "b"])).await_sites({"a", "b"}, 30) == set()
    assert Admin(Session([], ["a"])).await_sites({"a", "b"}, 0.01) == {"b"}
