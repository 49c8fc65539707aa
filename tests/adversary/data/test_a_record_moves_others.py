"""A record that joins a DP-SGD batch moves the clipped sum by its own clipped gradient, never by what it does to others."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from consilium.adapters import adapter_state
from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.messages import Tensors
from consilium.federation.job_assembly import assemble_job, build_model, build_task
from consilium.privacy.discrete_gaussian import rounding
from consilium.privacy.dpsgd import DpSgd, PrivateSteps
from consilium.privacy.secagg.arithmetic import UNIT
from consilium.training.loop import train
from tests.conftest import small_cells, small_config, small_text
from tests.data.storing import make_site

CLIP = 1e-2  # far under the gradients' norms, so that every record counts in full
RECORDS = 6
JOBS = {
    "segmentation": lambda: small_config("fedit"),
    "segmentation, bottlenecks": lambda: small_config("fedsca"),
    "classification": lambda: small_cells("fedit"),
    "language": lambda: small_text("fedit"),
}
MORE = {
    "segmentation, checkpointed": lambda: small_config("fedit", gradient_checkpointing=True),
    "segmentation by boxes": lambda: changed(small_config("fedit"), task={"prompt": "box"}),
    "segmentation by points": lambda: changed(small_config("fedit"), task={"prompt": "point"}),
    "segmentation, DoRA": lambda: changed(small_config("fedit"), adapter={"dora": True}),
    "segmentation, a decoder": lambda: changed(small_config("fedit"), adapter={"decoder": "share", "targets": "encoder-qkv"}),
}


def changed(config: JobConfig, **sections: dict) -> JobConfig:
    raw = config.model_dump()
    return JobConfig.model_validate(raw | {name: raw[name] | fields for name, fields in sections.items()})


class Sums:
    """Training whose first step is on a batch of the test's choice, and stops at that batch's clipped sum."""

    def __init__(self, config: JobConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        phantoms = config.data.phantoms.model_dump() | {"training": RECORDS, "validation": 0, "test": 0}
        privacy = {"unit": "record", "noise_multiplier": 1.0, "clip": CLIP}
        training = config.training.model_dump() | {"local_steps": 1, "batch_size": 2}
        raw = config.model_dump() | {"privacy": privacy, "data": {"phantoms": phantoms}, "training": training}
        self.config = JobConfig.model_validate(raw)
        self.initial = moved(assemble_job(self.config).initial)
        self.model = build_model(self.config, SiteConfig())
        self.task = build_task(self.config, load_site_data(self.config, "site-1", SiteConfig(), folder))
        monkeypatch.setattr(PrivateSteps, "draw", lambda steps: self.batch)
        monkeypatch.setattr(PrivateSteps, "step", lambda steps, penalty: self._keep(steps))

    def of(self, batch: list[int], seed: int) -> Tensor:
        """Return the clipped sum, flat and in float64, of a step on these records."""
        self.batch = batch
        adapter_state.load(self.model, self.initial)
        params, dp = adapter_state.tensors(self.model), DpSgd(1.0, CLIP, 0.5, seed=0)
        trained = {name for name in params if name in self.initial}
        train(self.model, self.task, params, trained, self.config.training, seed, lambda s: None, lambda p: None, dp)
        return self.found

    def _keep(self, steps: PrivateSteps) -> None:
        self.found = steps.sum.take().double() * UNIT


def moved(initial: Tensors) -> Tensors:
    """Return an adapter in the midst of training, where every tensor has a gradient."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(t.shape, generator=generator) * 0.1 for name, t in initial.items()}


def batches() -> Iterator[tuple[int, list[int], int]]:
    """Yield (seed, batch, the record that joins it), the record at any place in it."""
    draw = random.Random(0)
    for seed in range(2):
        order = draw.sample(range(RECORDS), RECORDS)
        size = draw.randint(0, RECORDS - 1)
        yield seed, order[:size], order[size]


@pytest.mark.parametrize("job", [*JOBS, *(pytest.param(job, marks=pytest.mark.slow) for job in MORE)])
def test_a_record_moves_the_clipped_sum_by_the_clip_at_most(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: whatever record is added to whatever batch, the sum that noise is added to moves by the clip at most.

    Augmentation is on, the job's batches hold two records, and every record is over the clip. The record adds what it is worth
    alone, to the last bit: were it computed beside others, float32 would round their gradients by it, and a server that
    chooses weights could make that rounding larger than the clip.
    """
    sums = Sums((JOBS | MORE)[job](), tmp_path, monkeypatch)
    for seed, batch, joins in batches():
        moved_by = sums.of(sorted([*batch, joins]), seed) - sums.of(sorted(batch), seed)
        assert torch.equal(moved_by, sums.of([joins], seed))
        assert 0.5 * CLIP < float(moved_by.norm()) <= CLIP + rounding(moved_by.numel())


@pytest.mark.parametrize("unit", ["record", "patient"])
def test_the_label_of_one_record_takes_no_test_split_away(unit: str, tmp_path: Path) -> None:
    """Elsewhere a test split without labels is left out where some training sample has one."""
    path = make_site(tmp_path, 3)
    listed = json.loads(path.read_text())
    bare = [{"image": entry["image"], "patient": f"p{number}"} for number, entry in enumerate(listed["training"])]
    raw = small_config("fedit").model_dump() | {"privacy": {"unit": unit, "epsilon": 3.0}}
    tested = []
    for training in (bare, [listed["training"][0] | {"patient": "p0"}, *bare[1:]]):
        path.write_text(json.dumps(listed | {"training": training, "validation": [], "test": [{"image": bare[0]["image"]}]}))
        data = load_site_data(JobConfig.model_validate(raw), "site-1", SiteConfig(datalist=path), tmp_path)
        tested.append(len(data.splits["test"]))
    assert tested[0] == tested[1]


@pytest.mark.parametrize("unit", ["record", "patient"])
def test_the_fold_of_one_record_takes_no_other_out_of_training(unit: str, tmp_path: Path) -> None:
    """The lowest fold is the validation split elsewhere: one record of fold 0 more would put those of fold 1 back."""
    path = make_site(tmp_path, 5)
    listed = json.loads(path.read_text())
    entries = [
        entry | {"fold": 0 if not number else 1 + number % 2, "patient": f"p{number}"}
        for number, entry in enumerate(listed["training"])
    ]
    config = changed(small_config("fedit"))
    raw = config.model_dump() | {"privacy": {"unit": unit, "epsilon": 3.0}}
    trained = []
    for some in (entries, entries[1:]):
        path.write_text(json.dumps(listed | {"training": some, "validation": []}))
        data = load_site_data(JobConfig.model_validate(raw), "site-1", SiteConfig(datalist=path), tmp_path)
        trained.append({Path(str(item.image)).name for item in data.splits["training"]})
    assert len(trained[0] ^ trained[1]) == 1
    assert len(trained[0]) == len(entries)
