"""Wire, filters, aggregator, allow-list and recipe without a running federation."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.utils import fobs

from consilium.client.build import build_guard
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, Reason, RefusedError
from consilium.core.messages import Hello, Payload, SiteInfo
from consilium.federation.job_assembly import Job, assemble_job
from consilium.flare.job import job_context, site_jobs, wire
from consilium.flare.job.aggregator import StrategyAggregator
from consilium.flare.job.filters import GuardResultFilter, GuardTaskFilter
from consilium.flare.job.recipe import export
from consilium.flare.kit.kit_hardening import allow_classes
from consilium.privacy.guard.guard import Guard
from consilium.server.checks import check_update
from consilium.strategies.strategy import Role
from tests.conftest import JOBS, small_config
from tests.flare import process_state

NAMES = {
    "server": ["controller.RoundController", "aggregator.StrategyAggregator"],
    "site": ["executor.SiteExecutor", "filters.GuardTaskFilter", "filters.GuardResultFilter"],
}
"""All that a job may name, by role, as the issue of the finding asks."""


@pytest.fixture(scope="module")
def job() -> Job:
    return assemble_job(small_config("fediat"))


def update(job: Job) -> Payload:
    names = job.strategy.names(job.initial, Role.SHARED, 0, 0)
    return Payload(0, 0, {n: torch.ones_like(job.initial[n]) for n in names}, {}, {"train/loss": 0.5})


def broadcast(job: Job) -> Payload:
    return job.strategy.payload(job.strategy.initialize(job.initial), SiteInfo("site-1", 1))


@pytest.fixture
def guard(job: Job, tmp_path: Path) -> Iterator[Guard]:
    """The guard that the filters of this context meet."""
    found = build_guard(job, "site-1", SiteConfig(), tmp_path, tmp_path, lambda event: None, job_id="flare-1")
    with process_state.filters_put_back():
        process_state.put(found)
        yield found


def passed(filter_class: type, job: Job, shareable: Shareable, task: str = wire.TRAIN) -> Shareable:
    checker, context = filter_class(), FLContext()
    context.set_prop(FLContextKey.TASK_NAME, task, private=True, sticky=False)
    with patch("consilium.flare.job.job_context.load", return_value=job):
        return checker.process(shareable, context)


def asked(job: Job) -> Shareable:
    """Return round 0's task as the guard leaves it to the executor."""
    return passed(GuardTaskFilter, job, wire.encode(broadcast(job), "r", update=False))


def answered(job: Job, result: Payload) -> Shareable:
    """Return what the executor leaves to the guard."""
    return wire.put(wire.Answer(wire.pop(asked(job)), result))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_messages_survive_flares_serializer(dtype: torch.dtype) -> None:
    wire.register()
    sent = Payload(7, 1, {"a.lora_A": torch.randn(3, 4).to(dtype), "empty": torch.zeros(0)}, {"gate": 0.5}, {"train/loss": 1.5})
    heard, run = wire.decode(fobs.loads(fobs.dumps(wire.encode(sent, "run-1", update=True))))
    assert (heard.round, heard.phase, run, heard.scalars, heard.metrics) == (7, 1, "run-1", sent.scalars, sent.metrics)
    assert all(torch.equal(heard.tensors[n], t) and heard.tensors[n].dtype == t.dtype for n, t in sent.tensors.items())


def test_malformed_messages_are_refused() -> None:
    with pytest.raises(RefusedError, match="not a consilium message"):
        wire.decode(Shareable())


def test_valid_update_passes_all_filters(job: Job, guard: Guard) -> None:
    message = passed(GuardResultFilter, job, answered(job, update(job)))
    assert passed(GuardResultFilter, job, message) is message  # the job's own pair after the site's
    heard, run = wire.decode(message)
    assert run == ""
    assert all(torch.equal(heard.tensors[n], t) for n, t in update(job).tensors.items())
    assert heard.metrics == {"train/loss": 0.5}


def test_second_filter_pair_passes_the_same_task(job: Job, guard: Guard) -> None:
    first = asked(job)
    assert passed(GuardTaskFilter, job, first) is first
    assert wire.pop(first).payload.tensors.keys() == broadcast(job).tensors.keys()


def test_nothing_leaves_without_the_guard(job: Job, guard: Guard) -> None:
    held = answered(job, update(job))
    assert dict(held).keys() <= {wire.HELD, "__headers__"}
    wire.pop(held)
    with pytest.raises(RefusedError, match="the guard has seen"):
        wire.pop(held)


def test_hello_has_the_guards_sample_count(job: Job, guard: Guard) -> None:
    task = wire.pop(passed(GuardTaskFilter, job, wire.encode_dict(wire.HELLO, {"run": "r"}), wire.HELLO))
    answer = wire.Answer(task, Hello("site-1", 999, False, "1").to_dict() | {"patients": 3})
    hello = passed(GuardResultFilter, job, wire.put(answer), wire.HELLO)[wire.HELLO]
    assert hello["num_samples"] == guard.num_samples
    assert hello.keys() == Hello.__dataclass_fields__.keys()


def test_refused_task_reaches_the_executor_as_reason(job: Job, guard: Guard) -> None:
    refused = passed(GuardTaskFilter, job, wire.encode(Payload(-1, 0, {}), "r", update=False))
    assert wire.reason_of(refused) is Reason.TASK
    assert not set(refused) - {"__headers__"}
    assert passed(GuardTaskFilter, job, refused) is refused  # the second pair
    assert wire.reason_of(passed(GuardTaskFilter, job, wire.refusal(Reason.BUDGET))) is Reason.TASK  # a server's


def test_replayed_reply_has_the_jobs_upload_time(job: Job, guard: Guard) -> None:
    """It leaves before the site is built, so the guard sets it."""
    fl_ctx, runner = FLContext(), SimpleNamespace(submit_task_result_timeout=None)
    fl_ctx.set_prop(FLContextKey.RUNNER, runner, private=True)
    fl_ctx.set_prop(FLContextKey.TASK_NAME, wire.TRAIN, private=True, sticky=False)
    process_state.forget_guards()
    known = {"open_site_folder": guard.folder, "site_root": guard.records, "observer": print}
    with (
        patch.multiple(job_context, **{name: Mock(return_value=value) for name, value in known.items()}),
        patch.object(site_jobs, "approved_job", return_value=(job, "", SiteConfig())),
    ):
        GuardTaskFilter().process(wire.encode(broadcast(job), "r", update=False), fl_ctx)
    assert runner.submit_task_result_timeout == 300.0  # UPLOAD: a twelfth of the round is less


def bad_results(job: Job) -> dict[str, Payload]:
    good = update(job)
    local = job.strategy.names(job.initial, Role.LOCAL, 0, 0)[0]
    return {
        "local": Payload(0, 0, good.tensors | {local: job.initial[local]}),
        "scalar": Payload(0, 0, good.tensors, {"n": 1.0}),
        "nan": Payload(0, 0, {n: t * float("nan") for n, t in good.tensors.items()}),
    }


@pytest.mark.parametrize("name", ["local", "scalar", "nan"])
def test_bad_result_passes_neither_side(name: str, job: Job, guard: Guard) -> None:
    bad = bad_results(job)[name]
    answer = passed(GuardResultFilter, job, answered(job, bad))
    assert wire.reason_of(answer) is Reason.RESULT
    assert not set(answer) - {"__headers__"}
    with pytest.raises(RefusedError):
        check_update(job, None, wire.decode(wire.encode(bad, "r", update=True))[0], broadcast(job))


def test_other_objects_do_not_leave(job: Job, guard: Guard) -> None:
    for message in (
        Shareable({"patients": [1, 2]}),
        DXO(DataKind.APP_DEFINED, object()).to_shareable(),
        Shareable({wire.HELD: "guess"}),
        Shareable({wire.HELD: ["guess"]}),
    ):
        answer = passed(GuardResultFilter, job, message)
        assert wire.reason_of(answer)
        assert not set(answer) - {"__headers__"}


def test_failing_check_sends_nothing(job: Job, guard: Guard) -> None:
    with patch("consilium.privacy.guard.guard.check_upload", side_effect=ZeroDivisionError):
        answer = passed(GuardResultFilter, job, answered(job, update(job)))
    assert wire.reason_of(answer) is Reason.ERROR
    assert "DXO" not in answer


@pytest.mark.parametrize("said", ["disk full of John Doe", "", 7, None, ["data"]])
def test_refusal_keeps_reason_and_return_code_only(said: object, job: Job, guard: Guard) -> None:
    reply = make_reply(ReturnCode.TASK_ABORTED, {wire.REASON: said, "name": "John Doe"})
    reply["DXO"] = "secret"
    answer = passed(GuardResultFilter, job, reply)
    assert wire.reason_of(answer) is Reason.ERROR
    assert answer["__headers__"].keys() <= {wire.REASON, "__rc__", "__cookie_jar__"}
    assert set(answer) <= {"__headers__"}
    assert answer.get_return_code() == wire.REFUSED


def test_aggregator_serves_scatter_and_gather(job: Job) -> None:
    aggregator, context = StrategyAggregator(), FLContext()
    aggregator.set_job(job)
    for value, count in ((1.0, 3), (5.0, 1)):
        payload = Payload(0, 0, {n: t * value for n, t in update(job).tensors.items()})
        assert aggregator.accept(wire.encode(payload, "r", update=True, num_samples=count), context)
    model = FLModelUtils.from_shareable(aggregator.aggregate(context))
    assert all(torch.equal(t, torch.full_like(t, 2.0)) and t.dtype == torch.float32 for t in model.params.values())


def test_allow_replaces_our_entries_only(tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    (local / "resources.json.default").write_text(json.dumps({"class_allow_list": ["nvflare.x.Y", "consilium."], "keep": 1}))
    ours = {role: [f"consilium.flare.job.{name}" for name in names] for role, names in NAMES.items()}
    for roles in (["site"], ["site"], ["server"], ["server", "site"]):
        found = json.loads(allow_classes(tmp_path, *roles).read_text())
        assert found == {"class_allow_list": ["nvflare.x.Y", *(name for role in roles for name in ours[role])], "keep": 1}
    (local / "resources.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        allow_classes(tmp_path, "site")
    (local / "resources.json").write_text(json.dumps({"class_allow_list": "consilium."}))
    with pytest.raises(ConfigError, match="is not a list of names"):
        allow_classes(tmp_path, "site")


@pytest.mark.parametrize(
    "folder", sorted(p.parent.parent.parent for p in JOBS.glob("*/app/config/job.yaml")), ids=lambda p: p.name
)
def test_job_folders_equal_the_recipes_export(folder: Path, tmp_path: Path) -> None:
    """The folders lie ready in jobs/; a drift from the recipe, or code inside them (BYOC), would show here."""
    exported = export(folder, tmp_path)
    assert not (exported / "app" / "custom").exists()
    assert not (folder / "app" / "custom").exists()
    for name in ("config_fed_server.json", "config_fed_client.json"):
        ours, theirs = (json.loads((f / "app/config" / name).read_text()) for f in (folder, exported))
        for section in ("workflows", "components", "executors", "task_data_filters", "task_result_filters"):
            assert _classes(ours.get(section)) == _classes(theirs.get(section))
        assert ours.get("server") == theirs.get("server")  # how often sites ask
    assert (exported / "app/config/job.yaml").read_text() == (folder / "app/config/job.yaml").read_text()
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["name"] == folder.name
    assert meta["min_clients"] == json.loads((exported / "meta.json").read_text())["min_clients"]


def _classes(section: object) -> list[str]:
    """Return every class path of ours in a config section, in order."""
    if isinstance(section, dict):
        own = [section["path"]] if str(section.get("path", "")).startswith("consilium") else []
        return own + [p for v in section.values() for p in _classes(v)]
    return [p for v in section for p in _classes(v)] if isinstance(section, list) else []


def test_published_files_have_no_state_and_no_pictures(tmp_path: Path) -> None:
    fl_ctx = FLContext()
    workspace = SimpleNamespace(get_run_dir=lambda job: tmp_path / "job")
    fl_ctx.get_engine = lambda: SimpleNamespace(get_workspace=lambda: workspace)
    pictures = ("results.json", "collaboration.png", "predictions.png", "sites/site-1/predictions.png")
    for name in (*pictures, "server/state", "tb_events/server/events", ".run.lock", "audit.lock", ".predictions.png.7"):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("x")
    job_context.publish(fl_ctx, tmp_path / "run")
    out = tmp_path / "job/consilium"
    left = sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file())
    assert left == ["collaboration.png", "results.json", "tb_events/server/events"]


@pytest.mark.parametrize("name", ["frlora", "fedra", "flora", "deer", "dp_dylora", "scaffold", "fedheal"])
def test_flares_workflows_refuse_other_server_halves(name: str) -> None:
    aggregator = StrategyAggregator()
    aggregator.set_job(assemble_job(small_config(name)))
    said = rf"strategy\.name: '{name}': FLARE's own workflows add the mean.*use RoundController"
    with pytest.raises(ConfigError, match=said):
        aggregator.aggregate_model()
