"""Wire, filters, aggregator, allow-list and recipe without a running federation."""

import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.utils import fobs

from consilium.assemble import Job, assemble_job, build_guard
from consilium.config import SiteConfig
from consilium.errors import ConfigError, RefusedError
from consilium.flare import filters, wire
from consilium.flare.aggregator import StrategyAggregator
from consilium.flare.allow import allow_classes
from consilium.flare.filters import GuardResultFilter, GuardTaskFilter, ResultCheckFilter, without_paths
from consilium.flare.recipe import ConsiliumRecipe
from consilium.privacy.guard import Guard
from consilium.site import Hello
from consilium.strategy import Payload, Role, SiteInfo
from tests.conftest import JOBS, small_config

NAMES = {
    "server": ["controller.RoundController", "aggregator.StrategyAggregator", "filters.ResultCheckFilter"],
    "site": ["executor.SiteExecutor", "filters.GuardTaskFilter", "filters.GuardResultFilter"],
}
"""All that a job may name, by role, as the issue of the finding asks."""


@pytest.fixture(scope="module")
def job() -> Job:
    return assemble_job(small_config("fediat"))


def update(job: Job) -> Payload:
    names = job.strategy.names(job.initial, Role.SHARED, 0, 0)
    return Payload(0, 0, {n: torch.ones_like(job.initial[n]) for n in names}, {}, {"train/loss": 0.5})


@pytest.fixture
def guard(job: Job, tmp_path: Path) -> Iterator[Guard]:
    """The guard both filters meet; it has heard the broadcast of round 0."""
    found = build_guard(job, "site-1", SiteConfig(), tmp_path, tmp_path / "ledger.sqlite", lambda event: None)
    state = job.strategy.init_state(job.initial)
    key = (FLContext().get_job_id(), FLContext().get_identity_name())
    with patch.dict(filters._guards, {key: found}):
        passed(GuardTaskFilter, job, wire.encode(job.strategy.broadcast(state, SiteInfo("site-1", 1)), "r", update=False))
        yield found


def passed(filter_class: type, job: Job, shareable: Shareable) -> Shareable:
    checker = filter_class()
    checker._job = job
    return checker.process(shareable, FLContext())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_messages_survive_flares_serializer_exactly(dtype: torch.dtype) -> None:
    wire.register()
    sent = Payload(7, 1, {"a.lora_A": torch.randn(3, 4).to(dtype), "empty": torch.zeros(0)}, {"gate": 0.5}, {"train/loss": 1.5})
    heard, run = wire.decode(fobs.loads(fobs.dumps(wire.encode(sent, "run-1", update=True))))
    assert (heard.round, heard.phase, run, heard.scalars, heard.metrics) == (7, 1, "run-1", sent.scalars, sent.metrics)
    assert all(torch.equal(heard.tensors[n], t) and heard.tensors[n].dtype == t.dtype for n, t in sent.tensors.items())


def test_what_is_no_message_is_refused_by_name() -> None:
    with pytest.raises(RefusedError, match="not a consilium message"):
        wire.decode(Shareable())


def test_a_proper_update_passes_all_filters_with_its_bytes(job: Job, guard: Guard) -> None:
    message = passed(GuardResultFilter, job, wire.hold(update(job), "r"))
    again = passed(GuardResultFilter, job, message)  # the job's own pair after the site's
    heard, run = wire.decode(passed(ResultCheckFilter, job, again))
    assert run == "r"
    assert all(torch.equal(heard.tensors[n], t) for n, t in update(job).tensors.items())
    assert heard.metrics == {"train/loss": 0.5}


def test_what_no_guard_takes_up_never_becomes_a_message(job: Job) -> None:
    held = wire.hold(update(job), "r")
    assert dict(held).keys() <= {wire.HELD, "__headers__"}
    assert "not a consilium message" in wire.failure(passed(ResultCheckFilter, job, held))
    wire.take(held)
    with pytest.raises(RefusedError, match="the result is gone"):
        wire.take(held)


def test_a_hello_tells_the_number_the_guard_shows(job: Job, guard: Guard) -> None:
    hello = wire.encode_dict(wire.HELLO, Hello("site-1", 999, False, "1").to_dict())
    assert passed(GuardResultFilter, job, hello)[wire.HELLO]["num_samples"] == guard.num_samples


def test_a_task_the_guard_refuses_reaches_the_executor_as_a_reason(job: Job, guard: Guard) -> None:
    asked = wire.encode(Payload(-1, 0, {}), "r", update=False)
    assert "the job has no round -1" in passed(GuardTaskFilter, job, asked).get_header(wire.REASON)


def bad_messages(job: Job) -> dict[str, Shareable]:
    good = update(job)
    local = job.strategy.names(job.initial, Role.LOCAL, 0, 0)[0]
    return {
        "local": wire.encode(Payload(0, 0, good.tensors | {local: job.initial[local]}), "r", update=True),
        "scalar": wire.encode(Payload(0, 0, good.tensors, {"n": 1.0}), "r", update=True),
        "nan": wire.encode(Payload(0, 0, {n: t * float("nan") for n, t in good.tensors.items()}), "r", update=True),
        "no message": Shareable({"patients": [1, 2]}),
        "other data kind": DXO(DataKind.APP_DEFINED, object()).to_shareable(),
        "hello with more": wire.encode_dict(wire.HELLO, {"name": "a", "patients": 3}),
        "hello with tensors": Shareable(wire.encode(good, "r", update=True) | {wire.HELLO: {}}),
    }


@pytest.mark.parametrize("kind", [GuardResultFilter, ResultCheckFilter])
@pytest.mark.parametrize(
    "name", ["local", "scalar", "nan", "no message", "other data kind", "hello with more", "hello with tensors"]
)
def test_filters_fail_closed(kind: type, name: str, job: Job, guard: Guard) -> None:
    answer = passed(kind, job, bad_messages(job)[name])
    assert answer.get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR
    assert wire.failure(answer)
    assert not set(answer) - {"__headers__"}


def test_a_check_that_breaks_sends_nothing(job: Job, guard: Guard) -> None:
    with patch("consilium.privacy.guard.check_release", side_effect=ZeroDivisionError):
        answer = passed(GuardResultFilter, job, wire.encode(update(job), "r", update=True))
    assert "ZeroDivisionError" in wire.failure(answer)
    assert "DXO" not in answer


def test_an_error_reply_keeps_code_and_reason_and_nothing_else(job: Job) -> None:
    reply = wire.refusal("disk full")
    reply["DXO"] = "secret"
    answer = passed(GuardResultFilter, job, reply)
    assert wire.failure(answer) == "disk full"
    assert "DXO" not in answer
    assert "return code" in wire.failure(make_reply(ReturnCode.TASK_ABORTED))


def test_the_aggregator_serves_scatter_and_gather(job: Job) -> None:
    aggregator, context = StrategyAggregator(), FLContext()
    aggregator.use(job)
    for value, count in ((1.0, 3), (5.0, 1)):
        payload = Payload(0, 0, {n: t * value for n, t in update(job).tensors.items()})
        assert aggregator.accept(wire.encode(payload, "r", update=True, num_samples=count), context)
    model = FLModelUtils.from_shareable(aggregator.aggregate(context))
    assert all(torch.equal(t, torch.full_like(t, 2.0)) and t.dtype == torch.float32 for t in model.params.values())


def test_allow_keeps_what_is_there_and_replaces_what_is_ours(tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    (local / "resources.json.default").write_text(json.dumps({"class_allow_list": ["nvflare.x.Y", "consilium."], "keep": 1}))
    ours = {role: [f"consilium.flare.{name}" for name in names] for role, names in NAMES.items()}
    for roles in (["site"], ["site"], ["server"], ["server", "site"]):
        found = json.loads(allow_classes(tmp_path, *roles).read_text())
        assert found == {"class_allow_list": ["nvflare.x.Y", *(name for role in roles for name in ours[role])], "keep": 1}
    (local / "resources.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        allow_classes(tmp_path, "site")
    (local / "resources.json").write_text(json.dumps({"class_allow_list": "consilium."}))
    with pytest.raises(ConfigError, match="expected a list of class names"):
        allow_classes(tmp_path, "site")


@pytest.mark.parametrize(
    "folder", sorted(p.parent.parent.parent for p in JOBS.glob("*/app/config/job.yaml")), ids=lambda p: p.name
)
def test_job_folders_are_what_the_recipe_exports(folder: Path, tmp_path: Path) -> None:
    """The folders lie ready in jobs/; a drift from the recipe, or code inside them (BYOC), would show here."""
    ConsiliumRecipe(folder).export(str(tmp_path))
    exported = tmp_path / folder.name
    assert not (exported / "app" / "custom").exists()
    assert not (folder / "app" / "custom").exists()
    for name in ("config_fed_server.json", "config_fed_client.json"):
        ours, theirs = (json.loads((f / "app/config" / name).read_text()) for f in (folder, exported))
        for section in ("workflows", "components", "executors", "task_data_filters", "task_result_filters"):
            assert _classes(ours.get(section)) == _classes(theirs.get(section))
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


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("/data/John Doe/1.png: cannot be read; mend it", "[path]: cannot be read; mend it"),
        ("site-1: no such file '/data/doe.png' in ~/lists", "site-1: no such file '[path]' in [path]"),
        ("[path]: mask is (3, 4), its image doe.png (3, 3)", "[path]: mask is (3, 4), its image [path] (3, 3)"),
        ("entry images/doe.png has no mask", "entry [path] has no mask"),
        ("release: metric 'train/loss' is not declared", "release: metric 'train/loss' is not declared"),
        ("budget: epsilon 3 of 5; noise / signal 7", "budget: epsilon 3 of 5; noise / signal 7"),
    ],
)
def test_a_reason_names_no_file(reason: str, shown: str) -> None:
    assert without_paths(reason) == shown
