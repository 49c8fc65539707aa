"""Several devices at one site: the update of one device with the whole batch, and no process left."""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing import Pipe, get_context
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from torch.distributed.tensor import DTensor

from consilium.adapters import adapter_state
from consilium.client import data_parallel
from consilium.client.build import build_site
from consilium.client.client import Client
from consilium.client.data_parallel import DataParallelGroup, JointTask, make_data_parallel_group, training_only
from consilium.client.data_parallel_worker import (
    BlockRequest,
    Phase,
    Share,
    join_process_group,
    loss_and_gradients,
    process_messages,
    rendezvous_store,
    select_tensors,
)
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig, load_site
from consilium.core.child_process import ChildProcess, receive, send_by_value
from consilium.core.errors import ConfigError, ConsiliumError, Reason
from consilium.core.messages import Payload, SiteInfo
from consilium.data.datalist import DataList, Item, Loading
from consilium.federation.job_assembly import Job, assemble_job
from consilium.training.sharding import unsharded_parameters
from tests.conftest import small_cells, small_config, small_text
from tests.data.storing import make_site

SOON = timedelta(seconds=20)
"""How long a rank that is a thread waits for another one, so that a test of broken code ends."""
SENTENCES = {"kind": "sentences", "training": 5, "validation": 2, "test": 3}


def ranks() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "spawn_main" in " ".join(one.cmdline())]


def test_ranks_on_one_machine_find_each_other_by_a_file(tmp_path: Path) -> None:
    one, other = rendezvous_store(tmp_path, 2), rendezvous_store(tmp_path, 2)
    one.set("address", "here")
    assert other.get("address") == b"here"


@pytest.fixture
def job() -> Job:
    """Five samples in batches of three: shares of 1 and 2, and a last batch of two for three ranks. SGD adds no roots."""
    raw = small_config(
        "fedit", rounds=1, local_epochs=2, batch_size=3, optimizer="sgd", lr=0.5, validate={"stages": []}
    ).model_dump()
    raw["data"]["phantoms"]["training"] = 5
    return assemble_job(JobConfig.model_validate(raw))


def trained(job: Job, folder: Path, seen: Any = lambda event: None, **site: Any) -> tuple[Client, Payload]:
    made = build_site(job, "site-1", SiteConfig.model_validate(site), folder, seen)
    sent = job.strategy.payload(job.strategy.initialize(job.initial), SiteInfo("site-1", 5))
    try:
        return made, made.train("run", sent)
    finally:
        made.close()


class Killer:
    """Kills the first rank at a step, once."""

    def __init__(self) -> None:
        self.killed = 0

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "step" and not self.killed:
            (one,) = ranks()
            self.killed = one.pid
            os.kill(one.pid, signal.SIGKILL)


def same(alone: Payload, joint: Payload) -> None:
    """Only the order of float32 sums differs: four steps of it, each within 2^-24 of a thousand addends at most."""
    assert alone.tensors.keys() == joint.tensors.keys()
    whole, apart = (torch.cat([t.flatten() for t in one.tensors.values()]) for one in (alone, joint))
    assert whole.norm() > 0
    assert (whole - apart).norm() <= 4 * 1000 * 2**-24 * whole.norm()
    assert abs(alone.metrics["train/loss"] - joint.metrics["train/loss"]) < 1e-5
    assert alone.metrics["train/steps"] == joint.metrics["train/steps"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("base", ["replicated", "sharded"])
def test_the_update_is_that_of_one_device_with_the_whole_batch(job: Job, tmp_path: Path, base: str) -> None:
    _, alone = trained(job, tmp_path / "1", devices=["cpu"])
    _, joint = trained(job, tmp_path / "3", devices=["cpu"] * 3, base=base)
    assert not ranks()
    same(alone, joint)
    assert not list((tmp_path / "3").glob("ranks-*"))


@pytest.mark.slow
def test_a_sharded_language_model_trains_and_scores_as_a_whole_one_in_its_part_of_the_memory(tmp_path: Path) -> None:
    """Two ranks, the blocks checkpointed: half of each block's frozen numbers at each, all else whole."""
    raw = small_text("fedit", local_steps=4, batch_size=3, optimizer="sgd", lr=0.5, gradient_checkpointing=True).model_dump()
    job = assemble_job(JobConfig.model_validate(raw | {"data": raw["data"] | {"phantoms": SENTENCES}}))
    found = []
    for devices, base in ((["cpu"], "replicated"), (["cpu", "cpu"], "sharded")):
        site = build_site(job, "site-1", SiteConfig(devices=tuple(devices), base=base), tmp_path / base, lambda event: None)
        sent = job.strategy.payload(job.strategy.initialize(job.initial), SiteInfo("site-1", 5))
        found.append((site, site.train("run", sent), site.evaluate("run", sent).metrics))
        site.close()
    (alone, update, scores), (joint, joint_update, joint_scores) = found
    same(update, joint_update)
    assert scores.keys() == joint_scores.keys()
    assert all(joint_scores[name] == pytest.approx(value, abs=1e-3) for name, value in scores.items())
    whole = unsharded_parameters(alone.context.model)
    split = sum(p.numel() for p in alone.context.model.parameters() if p not in whole)
    held = sum(p.to_local().numel() for p in joint.context.model.parameters() if isinstance(p, DTensor))
    assert split > 100_000
    assert held == pytest.approx(split / 2, rel=0.01)


@pytest.mark.slow
def test_a_rank_that_dies_fails_the_round_with_the_reason_and_the_next_try_works(job: Job, tmp_path: Path) -> None:
    site = build_site(job, "site-1", SiteConfig(devices=("cpu", "cpu")), tmp_path / "site", killer := Killer())
    sent = job.strategy.payload(job.strategy.initialize(job.initial), SiteInfo("site-1", 5))
    with pytest.raises(ConsiliumError, match=r"site\.yaml: devices: rank 1 on cpu: .*exit code -9") as error:
        site.train("run", sent)
    assert killer.killed
    assert "\n" not in str(error.value)
    assert not ranks()
    again = site.train("run", sent)
    site.close()
    assert not ranks()
    other = trained(job, tmp_path / "other", devices=["cpu", "cpu"])[1]
    assert all(torch.equal(t, again.tensors[n]) for n, t in other.tensors.items())


@pytest.mark.slow
def test_a_rank_opens_no_file_of_the_data_and_says_nothing_of_what_is_left_out(
    job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A test file that was missing ended each round there; what was left out stood in the journal, by name."""
    given = SiteConfig(devices=("cpu", "cpu"), datalist=make_site(tmp_path / "data"), bad_samples="skip")
    (tmp_path / "data" / "Muster_Erika_training_1.png").write_bytes(b"no picture")
    site = build_site(job, "site-1", given, tmp_path / "site", lambda event: None)
    assert "Muster_Erika_training_1.png" in caplog.text  # of the site's own process, which keeps it apart in a kit
    (tmp_path / "data" / "Muster_Erika_test_0.png").unlink()
    (tmp_path / "data" / "datalist.json").unlink()
    found = site.train("run", job.strategy.payload(job.strategy.initialize(job.initial), SiteInfo("site-1", 5)))
    assert len(ranks()) == 1
    site.close()
    assert found.metrics["train/steps"] == 4
    assert "Muster" not in "".join(capfd.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sample", "told", "traced"),
    [
        (Item(Path("/ward/Jane Doe/1.png"), None, annotated=("HIV",)), "the data cannot be used", False),
        ("Jane Doe", "AttributeError", True),
    ],
)
def test_what_a_rank_says_of_a_failure_goes_to_its_site_alone(
    sample: Any, told: str, traced: bool, job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its traceback went to the journal."""
    site = build_site(job, "site-1", SiteConfig(devices=("cpu", "cpu")), tmp_path / "site", lambda event: None)
    assert site.context.ranks
    site.context.ranks.data.splits["training"] = (sample,)
    with pytest.raises(ConsiliumError, match=r"site\.yaml: devices: rank 1 on cpu: .*(HIV|'str' object)") as error:
        site.train("run", job.strategy.payload(job.strategy.initialize(job.initial), SiteInfo("site-1", 5)))
    assert (error.value.reason, error.value.told) == (Reason.TRAINING, f"site.yaml: devices: rank 1 on cpu: {told}")
    assert ["Traceback" in note for note in getattr(error.value, "__notes__", ())] == [True] * traced
    assert "".join(capfd.readouterr()) == ""
    assert not ranks()


@pytest.mark.slow
def test_with_dropout_a_new_process_trains_a_round_as_the_one_that_trained_those_before(job: Job, tmp_path: Path) -> None:
    raw = job.config.model_dump()
    raw["training"] |= {"rounds": 2, "local_epochs": 1}
    raw["adapter"] |= {"dropout": 0.5}
    job, last = assemble_job(JobConfig.model_validate(raw)), list[Payload]()
    start = job.strategy.initialize(job.initial)
    for name in ("whole", "broken"):
        site = build_site(job, "site-1", SiteConfig(devices=("cpu", "cpu")), tmp_path / name, lambda event: None)
        for round in range(2):
            sent = job.strategy.payload(replace(start, round=round), SiteInfo("site-1", 5))
            if round and name == "broken":
                site.close()
                site = build_site(job, "site-1", SiteConfig(devices=("cpu", "cpu")), tmp_path / name, lambda event: None)
            found = site.train("run", sent)
        site.close()
        last.append(found)
    assert all(torch.equal(tensor, last[1].tensors[name]) for name, tensor in last[0].tensors.items())
    assert any(tensor.any() for tensor in last[0].tensors.values())


def test_shares_add_up_to_the_gradient_of_the_batch(job: Job, tmp_path: Path) -> None:
    """In this process: 2/3 and 1/3 of three samples, and nothing of none."""
    site = build_site(job, "site-1", SiteConfig(), tmp_path, lambda event: None)
    batch = site.context.task.batch([0, 1, 2], 0)
    live = [p for p in site.context.model.parameters() if p.requires_grad]
    whole = loss_and_gradients(site.context.task, site.context.model, Share(batch, 1.0, 0), live)
    parts = [Share({k: v[:2] for k, v in batch.items()}, 2 / 3, 0), Share({k: v[2:] for k, v in batch.items()}, 1 / 3, 0)]
    summed = sum(loss_and_gradients(site.context.task, site.context.model, one, live) for one in [*parts, Share({}, 0.0, 0)])
    assert whole.abs().sum() > 0
    assert torch.allclose(whole, summed, rtol=0, atol=1e-5 * float(whole.abs().max()))


@pytest.mark.parametrize(
    ("base", "size", "parts", "weights"),
    [
        ("replicated", 5, [[3, 4], [1, 2], [0]], [0.4, 0.4, 0.2]),
        ("replicated", 2, [[1], [0], []], [0.5, 0.5, 0.0]),
        ("sharded", 2, [[1], [0], [0]], [0.5, 0.5, 0.0]),  # each rank must run each block
    ],
)
def test_a_batch_is_dealt_out_over_the_ranks_by_hand(
    base: str, size: int, parts: list[list[int]], weights: list[float], job: Job, tmp_path: Path
) -> None:
    made = DataParallelGroup(job.config, SiteConfig(devices=("cpu",) * 3, base=base), DataList(tmp_path, {}), tmp_path)
    pipes = [Pipe() for _ in range(2)]
    children: Any = [SimpleNamespace(pipe=own) for own, _ in pipes]
    made.children = children
    seeds = list[int]()
    for _ in range(2):
        own = made.share_out_batch({"x": torch.arange(size), "y": 10 * torch.arange(size)})
        shares = [own, *(receive(other) for _, other in pipes)]
        assert [share.batch["x"].tolist() if share.batch else [] for share in shares] == parts
        assert all(torch.equal(share.batch["y"], 10 * share.batch["x"]) for share in shares if share.batch)
        assert [share.weight for share in shares] == weights
        seeds += [share.seed for share in shares]
    assert len(set(seeds)) == 6, "dropout is drawn anew, for each rank on its own"
    made.start_joint_task(Mock(), {}, set(), 1.0)
    assert [receive(other) for _, other in pipes] == [Phase({}, frozenset(), 1.0)] * 2
    assert made.share_out_batch({"x": torch.arange(size)}).seed == seeds[0], "whatever the process has trained before"


def test_two_ranks_compute_the_loss_and_gradient_of_one(job: Job, tmp_path: Path) -> None:
    """The other rank is a thread with a model of its own, whose values come by the pipe and by rank 0's broadcast."""
    main, other = (build_site(job, "site-1", SiteConfig(), tmp_path, lambda event: None).context for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    values = {n: 0.1 * torch.randn(t.shape, generator=generator) for n, t in adapter_state.values(main.model).items()}
    main.load_values(values)
    trained = {name for name in values if name.endswith("lora_B")}
    for name, one in adapter_state.tensors(main.model).items():
        one.requires_grad_(name in trained)
        adapter_state.tensors(other.model)[name].requires_grad_(name not in trained)
    batch, live = main.task.batch([0, 1, 2], 0), select_tensors(main.model, trained)
    expected = main.task.loss(main.model, batch)
    gradients = torch.autograd.grad(expected, live)
    (own, theirs), groups = Pipe(), dict[int, Any]()
    made = DataParallelGroup(job.config, SiteConfig(devices=("cpu", "cpu")), DataList(tmp_path, {}), tmp_path)

    def work() -> None:
        groups[1] = join_process_group(rendezvous_store(tmp_path, 2), 1, 2, SOON)
        with suppress(EOFError):
            process_messages(theirs, other.model, other.task, job.config, groups[1], [])

    rank = Thread(target=work, daemon=True)
    rank.start()
    child: Any = SimpleNamespace(pipe=own)
    made.children, made._group = [child], join_process_group(rendezvous_store(tmp_path, 2), 0, 2, SOON)
    joint = made.start_joint_task(main.task, values, trained, 1.0)
    for factor in (1.0, 3.0):  # the other rank has the values of rank 0 at each step
        with torch.no_grad():
            for one in live:
                one.mul_(factor)
        found = joint.loss(main.model, batch)
        assert not made.together
        if factor == 1.0:
            assert found.item() == pytest.approx(expected.item(), rel=1e-5)
            for one, whole in zip(torch.autograd.grad(2 * found, live), gradients, strict=True):
                assert torch.allclose(one, 2 * whole, rtol=0, atol=1e-4 * float(whole.abs().max()))
    there = adapter_state.tensors(other.model)
    assert all(torch.equal(there[name], adapter_state.tensors(main.model)[name]) for name in values)
    assert {name for name, one in there.items() if one.requires_grad} == trained
    assert joint.num_samples == 5
    own.close()
    rank.join(10)
    assert not rank.is_alive()


def test_a_rank_reports_why_it_ends(job: Job, tmp_path: Path) -> None:
    (ours, theirs), context = Pipe(), build_site(job, "site-1", SiteConfig(), tmp_path, lambda event: None).context
    send_by_value(ours, Phase({"unknown": torch.zeros(1)}, frozenset(), 1.0))
    process_messages(theirs, context.model, context.task, job.config, Mock(), [])
    assert ours.poll(10)
    assert "a rank: no value for " in str(receive(ours))


def waits(pipe: Any) -> None:
    with suppress(EOFError):
        while True:
            receive(pipe)


def reports(pipe: Any) -> None:
    error = ConsiliumError("no room", told="MemoryError")
    error.add_note("Traceback")
    send_by_value(pipe, error)
    waits(pipe)


def dies(pipe: Any) -> None:
    os._exit(3)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rank that only waits be waited for as good as not at all: one that has failed has done so before."""
    monkeypatch.setattr(data_parallel, "FAILURE_WAIT", 0.01)


@pytest.mark.parametrize(
    ("others", "said", "told", "notes"),
    [
        ([waits, reports], "rank 2 on cpu: no room", "rank 2 on cpu: MemoryError", ["Traceback"]),
        ([dies, waits], "rank 1 on cpu: its process ended (exit code 3)", "", []),
        ([waits], "the file is gone", "OSError", None),
    ],
)
def test_a_failure_names_its_rank_and_ends_all(
    others: list[Any], said: str, told: str, notes: list[str] | None, job: Job, tmp_path: Path, impatient: None
) -> None:
    made = DataParallelGroup(job.config, SiteConfig(devices=("cpu",) * 3), DataList(tmp_path, {}), tmp_path)
    made.place = tmp_path / "ranks-1"
    made.place.mkdir()
    made.children = children = [ChildProcess(one, 1, get_context("fork")) for one in others]
    for child, other in zip(children, others, strict=True):
        assert other is not reports or child.pipe.poll(10)
        child.process.join(10 if other is dies else 0)
    found = made.end_after_failure(OSError("the file is gone"))
    assert (str(found), found.reason) == (f"site.yaml: devices: {said}", Reason.TRAINING)
    assert found.told == (told and f"site.yaml: devices: {told}")
    assert notes is None or getattr(found, "__notes__", []) == notes
    assert made.children == []
    assert not any(child.process.is_alive() for child in children)
    assert not made.place.exists()


def test_a_step_that_fails_ends_all_ranks(job: Job, tmp_path: Path, impatient: None) -> None:
    """In this process alone: the other rank only waits."""
    model = build_site(job, "site-1", SiteConfig(), tmp_path, lambda event: None).context.model
    for number, (error, kind, said) in enumerate(
        [
            (RuntimeError("no room"), RuntimeError, "no room"),
            (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
            (OSError("gone"), ConsiliumError, r"site\.yaml: devices: gone"),
        ]
    ):
        (place := tmp_path / str(number)).mkdir()
        made = DataParallelGroup(job.config, SiteConfig(devices=("cpu",) * 2), DataList(tmp_path, {}), place)
        child = ChildProcess(waits, 1, get_context("fork"))
        made.children, made._group = [child], join_process_group(rendezvous_store(place, 1), 0, 1)
        task: Any = SimpleNamespace(loss=Mock(side_effect=error))
        with pytest.raises(kind, match=said):
            JointTask(task, made, set()).loss(model, {"x": torch.zeros(2)})
        assert (made.children, made.together) == ([], False)
        assert not child.process.is_alive()


def test_a_block_is_asked_of_all_ranks_but_not_within_a_step_nor_for_gradients(job: Job, tmp_path: Path) -> None:
    made = DataParallelGroup(job.config, SiteConfig(devices=("cpu",) * 3, base="sharded"), DataList(tmp_path, {}), tmp_path)
    pipes = [Pipe() for _ in range(2)]
    children: Any = [SimpleNamespace(pipe=own) for own, _ in pipes]
    made.children, made.together = children, True
    made._request_block_parts(3)
    made.together = False
    with pytest.raises(ConsiliumError, match="wants gradients outside of its steps") as refused:
        made._request_block_parts(3)
    assert refused.value.reason is Reason.POLICY
    assert not any(other.poll() for _, other in pipes)
    with torch.no_grad():
        made._request_block_parts(3)
    assert [receive(other) for _, other in pipes] == [BlockRequest(3)] * 2


def test_other_ranks_get_the_training_samples_alone(tmp_path: Path) -> None:
    data = DataList(tmp_path, {"training": ("a",), "validation": ("b",), "test": ("c",)}, loading=Loading(ignore_unfit=True))
    found = training_only(data)
    assert found.splits == {"training": ("a",), "validation": (), "test": ()}
    assert (found.loading.prechecked, found.loading.ignore_unfit, found.loading.skip) == (True, True, False)


@pytest.mark.parametrize(
    ("strategy", "privacy", "why"),
    [
        ("fedit", {"unit": "record", "epsilon": 8, "delta": 1e-5, "clip": 1.0}, "privacy.unit record"),
        ("fedit", {"unit": "patient", "epsilon": 8, "delta": 1e-5, "clip": 1.0}, "privacy.unit patient"),
        ("feddpa", None, "strategy 'feddpa' trains more beside the adapter"),
    ],
)
def test_training_that_is_more_than_a_batchs_loss_is_refused(
    strategy: str, privacy: dict[str, Any] | None, why: str, tmp_path: Path
) -> None:
    config = JobConfig.model_validate(small_cells(strategy).model_dump() | {"privacy": privacy})
    with pytest.raises(ConsiliumError, match=f"site.yaml: devices: {why}.*; give one device"):
        make_data_parallel_group(config, SiteConfig(devices=("cpu", "cpu")), DataList(tmp_path, {}), tmp_path)


def test_site_yaml_names_gpus_by_number(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("devices: [0, 2, 3]")
    assert load_site(path).devices == ("cuda:0", "cuda:2", "cuda:3")
    assert load_site(path).main_device == "cuda:0"


@pytest.mark.parametrize(
    "text", ["devices: [0, 0]", "{devices: [0, 1], device: cpu}", "devices: [gpu]", "devices: [-1]", "devices: 4"]
)
def test_devices_that_cannot_be_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(ConfigError, match="device"):
        load_site(tmp_path / "site.yaml")
