"""Pictures are encoded once where the encoder is frozen, with equal results."""

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.client.evaluator import enable_embedding_cache
from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig
from consilium.config.site import CacheConfig, SiteConfig
from consilium.data import disk_cache as cache_folder
from consilium.federation.job_assembly import build_model, build_task
from consilium.tasks.segmentation.task import SegmentationTask
from consilium.training.loop import train
from tests.conftest import small_config

DECODER = {"targets": r"mask_decoder\.transformer\..*\.(q_proj|v_proj)", "rank": 2}


def frozen(augment: bool = False) -> JobConfig:
    raw = small_config("fedit", local_steps=3, batch_size=2).model_dump()
    raw["task"] |= {"augment": augment}
    return JobConfig.model_validate(raw | {"adapter": DECODER})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a site's folder, whose phantoms are made once."""
    return tmp_path_factory.mktemp("site")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build_model(frozen(), SiteConfig())


def task_of(config: JobConfig, place: Path, gigabytes: float = 1.0) -> SegmentationTask:
    site = SiteConfig(cache=CacheConfig(folder=place / "cache", gigabytes=gigabytes), workers=0)
    task = build_task(config, load_site_data(config, "site-1", site, place), site)
    assert isinstance(task, SegmentationTask)
    return task


@pytest.fixture
def encoded(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the batches that the encoder gets from now on."""
    sizes: list[int] = []
    encode = model.encode_normalized

    def counted(images: Tensor) -> Tensor:
        sizes.append(len(images))
        return encode(images)

    monkeypatch.setattr(model, "encode_normalized", counted)
    return sizes


def trained(config: JobConfig, model: nn.Module, task: SegmentationTask) -> tuple[float, dict[str, Tensor], float]:
    """Return loss, adapter and validation loss of a round from a fixed start."""
    params = adapter_state.tensors(model)
    adapter_state.load(model, {n: adapter_state.initial_tensor(n, tuple(t.shape), 0) for n, t in params.items()})
    found = train(model, task, params, set(params), config.training, 0, lambda step: None, lambda done: None)
    return found["loss"], adapter_state.values(model), task.evaluate(model, "validation", 2)["loss"]


def test_a_picture_is_encoded_once_for_all_steps_and_stages(model: nn.Module, place: Path, encoded: list[int]) -> None:
    config = frozen()
    task = task_of(config, place / "once")
    enable_embedding_cache(config, model, task)
    trained(config, model, task)
    assert encoded == [1] * 5  # four to train on, in six draws, and one to validate
    again = task_of(config, place / "once")  # another process
    enable_embedding_cache(config, model, again)
    trained(config, model, again)
    assert len(encoded) == 5


def test_what_is_kept_changes_no_bit_and_encoding_one_by_one_next_to_none(
    model: nn.Module, place: Path, encoded: list[int]
) -> None:
    """Against whole batches: sums of a matrix product in another order, float32's 2^-24 times the depth of the net."""
    config = frozen()
    kept, unkept, plain = (task_of(config, place / "equal", size) for size in (1.0, 0.0, 0.0))
    for task in (kept, unkept):
        enable_embedding_cache(config, model, task)
    (loss, end, score), (other, others, scored), (batched, by_batch, _) = (
        trained(config, model, t) for t in (kept, unkept, plain)
    )
    assert (loss, score) == (other, scored)
    assert all(torch.equal(tensor, others[name]) for name, tensor in end.items())
    assert loss == pytest.approx(batched, rel=1e-5)
    assert max(encoded) == 2
    for name, tensor in end.items():
        assert torch.allclose(tensor, by_batch[name], atol=1e-4)


def test_augmented_pictures_are_encoded_anew_and_validation_ones_are_not(
    model: nn.Module, place: Path, encoded: list[int]
) -> None:
    config = frozen(augment=True)
    task = task_of(config, place / "augmented")
    enable_embedding_cache(config, model, task)
    for _ in range(2):
        trained(config, model, task)
    assert encoded == [2, 2, 2, 1, 2, 2, 2]


@pytest.mark.parametrize("adapter", [{"rank": 2, "targets": "paper"}, {"kind": "full"}, {"kind": "bottleneck", "width": 2}])
def test_an_encoder_in_which_something_trains_runs(adapter: dict[str, Any], place: Path) -> None:
    config = JobConfig.model_validate(frozen().model_dump() | {"adapter": adapter})
    task = task_of(config, place / "other")
    enable_embedding_cache(config, build_model(config, SiteConfig()), task)
    assert task._embeddings is None


def test_a_strategy_that_looks_behind_the_encoder_has_it_run(
    model: nn.Module, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = frozen()
    task = task_of(config, place / "parts")
    traits = replace(config.strategy.traits, parts=frozenset({"a shift behind the encoder"}))
    monkeypatch.setattr(type(config.strategy), "traits", traits)
    enable_embedding_cache(config, model, task)
    assert task._embeddings is None


def test_files_are_the_users_alone_and_go_with_the_samples(model: nn.Module, place: Path) -> None:
    config, site = frozen(), place / "files"
    task = task_of(config, site)
    task._samples("validation", 0)
    before = set((site / "cache" / cache_folder.FOLDER).glob("*.sample"))
    enable_embedding_cache(config, model, task)
    task.evaluate(model, "validation", 1)
    (new,) = set((site / "cache" / cache_folder.FOLDER).glob("*.sample")) - before
    assert stat.S_IMODE(new.stat().st_mode) == 0o600
    assert str(new.stem) not in str(site)
    cache_folder.clear_cache(cache_folder.find_cache(site / "cache"))
    assert not new.exists()


def test_another_encoder_or_precision_has_embeddings_of_its_own(place: Path, encoded: list[int], model: Any) -> None:
    config = frozen()
    task = task_of(config, place / "keys")
    enable_embedding_cache(config, model, task)
    image = torch.zeros(1, 3, 64, 64)
    first = task._embeddings(model, image)  # type: ignore[misc]
    with torch.autocast("cpu", torch.bfloat16):
        task._embeddings(model, image)  # type: ignore[misc]
    assert len(encoded) == 2
    changed = build_model(config, SiteConfig())
    with torch.no_grad():
        changed.image_encoder.pos_embed.add_(1.0)
    enable_embedding_cache(config, changed, task)
    assert not torch.equal(task._embeddings(changed, image), first)  # type: ignore[misc]


def test_an_altered_embedding_is_made_again(model: nn.Module, place: Path, encoded: list[int]) -> None:
    config, site = frozen(), place / "altered"
    task = task_of(config, site)
    task._samples("validation", 0)
    before = set((site / "cache" / cache_folder.FOLDER).glob("*.sample"))
    enable_embedding_cache(config, model, task)
    whole = task.evaluate(model, "validation", 1)
    (new,) = set((site / "cache" / cache_folder.FOLDER).glob("*.sample")) - before
    new.write_bytes(new.read_bytes()[:-4] + b"\0\0\xff\x7f")
    assert task_again(config, model, site).evaluate(model, "validation", 1) == whole
    assert encoded == [1, 1]


def task_again(config: JobConfig, model: nn.Module, site: Path) -> SegmentationTask:
    task = task_of(config, site)
    enable_embedding_cache(config, model, task)
    return task
