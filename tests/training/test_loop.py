"""The local loop: seeded, frozen parts without gradient, accumulation, regularizer once a step, clear failure."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from consilium.config.job import TrainingConfig
from consilium.errors import ConsiliumError
from consilium.strategies.strategy import LocalStep
from consilium.training.device import autocast, pick_device
from consilium.training.loop import train
from consilium.training.optim import make_optimizer


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([0.5, 0.5]))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (self.dropout(x) * self.a * self.b).sum(-1)


class LineTask:
    """Least squares on eight points."""

    num_samples, metric_names = 8, frozenset({"loss"})
    x = torch.arange(16.0).reshape(8, 2) / 16

    def has(self, split: str) -> bool:
        return True

    def batch(self, indices: Sequence[int], seed: int) -> dict[str, Tensor]:
        return {"x": self.x[list(indices)]}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]) - 1).square().mean()

    def evaluate(self, model: nn.Module, split: str, batch_size: int, distances: bool = False) -> dict[str, float]:
        return {}


def config(**options: object) -> TrainingConfig:
    return TrainingConfig.model_validate({"rounds": 1, "lr": 0.1, "batch_size": 2} | options)


def run(model: Line, trained: set[str], seed: int = 0, regularizer=lambda step: None, **options: object) -> dict[str, float]:  # noqa: ANN001
    params = dict(model.named_parameters())
    return train(model, LineTask(), params, trained, config(**options), seed, regularizer, {}, lambda progress: None)


def test_a_seed_fixes_everything_and_another_changes_it() -> None:
    ends = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(ends))  # what happened before must not matter
        model = Line()
        run(model, {"a", "b"}, seed)
        ends.append(model.a.detach())
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_training_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    run(Line(), {"a"})
    assert torch.equal(torch.rand(1), expected)


def test_frozen_tensors_do_not_move_even_with_weight_decay() -> None:
    model = Line()
    run(model, {"b"}, optimizer="adamw", weight_decay=0.5)
    assert model.a.tolist() == [1.0, 2.0]
    assert model.a.grad is None
    assert not model.a.requires_grad
    assert not torch.equal(model.b.detach(), torch.tensor([0.5, 0.5]))


def test_accumulation_equals_a_larger_batch() -> None:
    ends = []
    for options in ({"batch_size": 4}, {"batch_size": 2, "accumulate": 2}):
        model = Line()
        model.dropout.p = 0.0
        found = run(model, {"a", "b"}, optimizer="sgd", **options)
        ends.append(model.a.detach())
        assert found["steps"] == 2
    assert torch.allclose(*ends, atol=1e-6)


def test_the_regularizer_acts_once_a_step_with_anchors_of_the_start() -> None:
    seen: list[Tensor] = []

    def pull(step: LocalStep) -> Tensor:
        seen.append(step.anchors["a"])
        step.memory["count"] = step.memory.get("count", torch.zeros(())) + 1
        return step.params["a"].sum() * 0 + step.memory["count"] * 0 + (step.params["a"] - 3).square().sum()

    model = Line()
    run(model, {"a"}, regularizer=pull, accumulate=2, local_steps=3)
    assert len(seen) == 3
    assert all(anchor.tolist() == [1.0, 2.0] for anchor in seen)


def test_a_loss_that_is_not_finite_stops_with_one_line() -> None:
    with pytest.raises(ConsiliumError, match=r"training\.lr: 1000\.0: the loss became"):
        run(Line(), {"a", "b"}, lr=1000.0, optimizer="sgd", local_steps=50)


@pytest.mark.parametrize(
    ("loss", "what"),
    [(torch.ones(4), r"of shape \(4,\)"), (1.0, "a float"), (None, "a NoneType")],
)
def test_a_loss_that_is_no_single_number_stops_with_one_line(loss: object, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LineTask, "loss", lambda self, model, batch: loss)
    with pytest.raises(ConsiliumError, match=rf"the task's loss\(\) is {what}; return a tensor with one number"):
        run(Line(), {"a"})


@pytest.mark.parametrize(
    ("samples", "options", "steps"),
    [(8, {}, 4), (9, {}, 5), (9, {"accumulate": 2}, 3), (8, {"local_epochs": 3}, 12), (8, {"local_steps": 7}, 7)],
)
def test_steps_per_round(samples: int, options: dict, steps: int) -> None:
    assert config(**options).steps_per_round(samples) == steps


@pytest.mark.parametrize(("name", "cls"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_optimizers_hold_only_what_they_are_given(name: str, cls: type) -> None:
    model = Line()
    optimizer = make_optimizer([model.b], config(optimizer=name))
    assert type(optimizer) is cls
    assert optimizer.param_groups[0]["params"] == [model.b]


def test_precision_and_device() -> None:
    with autocast(torch.device("cpu"), "bf16"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with autocast(torch.device("cpu"), "auto"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert pick_device("cpu") == torch.device("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConsiliumError, match="no CUDA device here"):
            pick_device("cuda")
