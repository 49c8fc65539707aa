"""Packed rows: equal losses and gradients, each record as if alone; batches by length; answers written with a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.federation.job_assembly import build_model, build_task
from consilium.tasks.language.losses import group_by_length, mean_loss, pack, token_losses
from consilium.tasks.language.task import LanguageTask
from consilium.tasks.language.tokens import IGNORED
from consilium.training.gradient_probe import WithFeatures
from tests.conftest import small_text
from tests.tasks.scoring import batches


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    found = build_model(small_text("fedit"), SiteConfig())
    for tensor in adapter_state.tensors(found).values():
        tensor.data.normal_(std=0.05)
    return found


def records(lengths: list[int], prompt: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    ids = torch.randint(3, 200, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    labels = ids.masked_fill(~mask, IGNORED)
    labels[:, :prompt] = IGNORED
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": labels}


LENGTHS = [[9, 30, 4, 11, 2, 17], [5], [8, 8, 8], [2, 2, 2, 2, 64]]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_losses_are_those_of_padded_records(lengths: list[int], model: nn.Module) -> None:
    """In float32, whose sums over other zeros differ in the last places."""
    batch = records(lengths)
    with torch.no_grad():
        (padded, learned), (packed, also) = (token_losses(model, batch, how) for how in (False, True))
    assert torch.equal(learned, also)
    assert torch.allclose(padded, packed, atol=2e-5)
    assert (packed > 0).sum() == learned.sum() == sum(lengths) - len(lengths)


def test_gradients_are_too(model: nn.Module) -> None:
    found = []
    for packed in (False, True):
        model.zero_grad()
        mean_loss(model, records(LENGTHS[0]), packed).backward()
        found.append({n: t.grad for n, t in adapter_state.tensors(model).items()})
    assert all(torch.allclose(g, found[1][n], atol=1e-5) and g.abs().sum() > 0 for n, g in found[0].items())


def test_another_record_in_the_row_changes_nothing(model: nn.Module) -> None:
    one, other = records([10, 6, 4]), records([10, 6, 4])
    other["input_ids"][1] = (other["input_ids"][1] + 7) * other["attention_mask"][1]
    with torch.no_grad():
        (before, _), (after, _) = (token_losses(model, batch, True) for batch in (one, other))
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(before[1], after[1])


def test_rows_are_filled_first_fit_with_the_longest_first() -> None:
    """By hand: 6 fills a row of its own; 4 and 2 share one; 3 and 1 the next."""
    rows = pack(records([2, 6, 3, 1, 4]))
    assert rows.segments.tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 2, 2], [1, 1, 1, 2, 0, 0]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]]
    assert rows.places[:, 0].tolist() == [10, 0, 12, 15, 6]
    assert (rows.labels[:, -1] == IGNORED).all()


def test_batches_by_length_have_every_record_once_and_less_padding() -> None:
    order = torch.randperm(203, generator=torch.Generator().manual_seed(0)).tolist()
    lengths = torch.randint(4, 120, (203,), generator=torch.Generator().manual_seed(1)).tolist()

    def padding(one: list[int]) -> int:
        parts = [[lengths[i] for i in one[at : at + 4]] for at in range(0, len(one), 4)]
        return sum(len(part) * max(part) - sum(part) for part in parts)

    found = group_by_length(order, lengths, 4)
    assert sorted(found) == list(range(203))
    assert padding(found) < padding(order) / 5
    assert found == group_by_length(order, lengths, 4)
    means = [sum(lengths[i] for i in found[at : at + 4]) for at in range(0, 128, 4)]
    assert means not in (sorted(means), sorted(means, reverse=True))  # batches are not in the order of their lengths


def test_batches_by_length_by_hand() -> None:
    """By length 1, 3 | 4, 2 | 0. Whole batches are in the order of their first record, a smaller one is last."""
    assert group_by_length([0, 1, 2, 3], [5, 1, 4, 2], 2) == [2, 0, 1, 3]
    assert group_by_length([0, 1, 2, 3, 4], [5, 1, 4, 2, 3], 2) == [1, 3, 4, 2, 0]
    assert group_by_length(list(range(66)), [*range(1, 65), 0, 99], 2) == list(range(66))


def job(**task: Any) -> JobConfig:
    raw = small_text("fedit").model_dump()
    raw["task"] |= task
    return JobConfig.model_validate(raw)


def task_of(config: JobConfig, place: Path) -> LanguageTask:
    found = build_task(config, load_site_data(config, "site-1", SiteConfig(), place))
    assert isinstance(found, LanguageTask)
    return found


def test_a_job_says_both_and_scores_stay(model: nn.Module, tmp_path: Path) -> None:
    plain, own = (task_of(config, tmp_path) for config in (job(), job(packed=True, bucketed=True)))
    wrapped: Any = WithFeatures(own, lambda mean: None)  # from Python 3.12 on isinstance looks through no __getattr__
    widths = [[batch["input_ids"].shape[1] for batch in batches(task, 4, 0)] for task in (plain, own, wrapped)]
    assert widths[2] == widths[1]
    assert sum(widths[1]) < sum(widths[0])
    batch = plain.batch([0, 1, 2, 3], 0)
    assert own.loss(model, batch).item() == pytest.approx(plain.loss(model, batch).item(), rel=1e-5)
    scored, again = (task.evaluate(model, "validation", 2) for task in (plain, own))
    assert scored == pytest.approx(again, rel=1e-5)


def test_where_rows_cannot_be_read_it_is_refused() -> None:
    shape = {"model_type": "mistral", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    raw = job(packed=True).model_dump()
    folder = raw["model"] | {"variant": "folder", "checkpoint": "x"}
    JobConfig.model_validate(raw | {"model": folder | {"config": shape | {"sliding_window": 4096}}})
    for change in ({"model_type": "bloom"}, {"sliding_window": 64}):
        with pytest.raises(ValueError, match=r"task\.packed: true needs a llama.*use false"):
            JobConfig.model_validate(raw | {"model": folder | {"config": shape | change}})
    with pytest.raises(ValueError, match=r"task\.packed: true puts several records into a row"):
        JobConfig.model_validate(raw | {"privacy": {"unit": "record", "epsilon": 8.0, "delta": 1e-5, "clip": 1.0}})
    with pytest.raises(ValueError, match=r"task\.packed: true needs"):
        JobConfig.model_validate(raw | {"strategy": {"name": "feddpa"}})


def test_answers_are_written_in_batches_with_what_was_read_remembered(model: nn.Module, tmp_path: Path) -> None:
    """After the prompts every call reads one token a record."""
    task, seen = task_of(job(), tmp_path), list[tuple[int, ...]]()
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    task.predict(model, "test", 6)
    handle.remove()
    assert {rows for rows, _ in seen} == {6}
    assert seen[0][1] > 1
    assert {width for _, width in seen[1:]} == {1}
