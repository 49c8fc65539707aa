"""The local loop: seeded, frozen parts without gradient, accumulation, penalty once a step, clear failure."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from consilium.config.job import TrainingConfig
from consilium.core.errors import ConsiliumError
from consilium.privacy.dpsgd import DpSgd
from consilium.strategies.strategy import LocalStep
from consilium.training.device import autocast, pick_device
from consilium.training.loop import make_optimizer, train


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

    def evaluate(self, model: nn.Module, split: str, batch_size: int, full: bool = False) -> dict[str, float]:
        return {}


def config(**options: object) -> TrainingConfig:
    return TrainingConfig.model_validate({"rounds": 1, "lr": 0.1, "batch_size": 2} | options)


def run(model: Line, trained: set[str], seed: int = 0, penalty=lambda step: None, **options: object) -> dict[str, float]:  # noqa: ANN001
    params = dict(model.named_parameters())
    return train(model, LineTask(), params, trained, config(**options), seed, penalty, lambda progress: None)


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


def test_gradients_of_a_failed_step_are_not_of_the_next_round() -> None:
    ends = []
    for left in (None, torch.tensor([3.0, 4.0])):
        model = Line()
        model.a.grad = left
        run(model, {"a", "b"}, optimizer="sgd")
        ends.append(model.a.detach())
    assert torch.equal(*ends)


def test_the_penalty_acts_once_a_step_with_anchors_of_the_start() -> None:
    seen: list[Tensor] = []

    def pull(step: LocalStep) -> Tensor:
        seen.append(step.anchors["a"])
        step.memory["count"] = step.memory.get("count", torch.zeros(())) + 1
        return step.params["a"].sum() * 0 + step.memory["count"] * 0 + (step.params["a"] - 3).square().sum()

    model = Line()
    run(model, {"a"}, penalty=pull, accumulate=2, local_steps=3)
    assert len(seen) == 3
    assert all(anchor.tolist() == [1.0, 2.0] for anchor in seen)


def test_a_loss_that_is_not_finite_stops_with_one_line() -> None:
    with pytest.raises(ConsiliumError, match=r"training\.lr: 1000\.0: the loss became"):
        run(Line(), {"a", "b"}, lr=1000.0, optimizer="sgd", local_steps=50)


@pytest.mark.parametrize(("loss", "what"), [(torch.ones(4), r"of shape \(4,\)"), (1.0, "a float"), (None, "a NoneType")])
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


def test_precision_and_device() -> None:
    with autocast(torch.device("cpu"), "bf16"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with autocast(torch.device("cpu"), "auto"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert pick_device("cpu") == torch.device("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConsiliumError, match="no CUDA device here"):
            pick_device("cuda")


# an optimizer's state between rounds ----------------------------------------------------------------------------------


class Slope(nn.Module):
    """A linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        nn.init.constant_(self.layer.weight, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).squeeze(-1)


def rounds(count: int, kept: dict[str, Tensor] | None, dp: DpSgd | None = None, **options: object) -> Tensor:
    """Return the weight after so many rounds of two steps, each on all eight points."""
    model = Slope()
    for seed in range(count):
        settings = config(local_steps=2, batch_size=8, **options)
        watch, params = (lambda progress: None), dict(model.named_parameters())
        train(model, LineTask(), params, set(params), settings, seed, lambda step: None, watch, dp, kept)
    return model.layer.weight.detach()


def plain(steps: int, anew: int, make: type, **options: float) -> Tensor:
    """Return the weight after plain steps of a torch optimizer that is made anew every `anew` steps."""
    model = Slope()
    for step in range(steps):
        if step % anew == 0:
            optimizer = make(model.parameters(), lr=0.1, **options)
        optimizer.zero_grad()
        LineTask().loss(model, {"x": LineTask.x}).backward()
        optimizer.step()
    return model.layer.weight.detach()


@pytest.mark.parametrize(
    ("options", "make", "torchs"),
    [
        ({"optimizer": "adam"}, torch.optim.Adam, {}),
        ({"optimizer": "adamw", "weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
        ({"optimizer": "sgd", "momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_three_rounds_of_a_kept_state_are_one_long_training(options: dict, make: type, torchs: dict) -> None:
    assert torch.allclose(rounds(3, {}, **options), plain(6, 6, make, **torchs), atol=1e-6)
    assert torch.allclose(rounds(3, None, **options), plain(6, 2, make, **torchs), atol=1e-6)
    assert not torch.allclose(plain(6, 6, make, **torchs), plain(6, 2, make, **torchs), atol=1e-3)


def test_plain_sgd_has_nothing_to_keep() -> None:
    kept: dict[str, Tensor] = {}
    rounds(1, kept, optimizer="sgd")
    assert kept == {}


def test_what_a_phase_does_not_train_keeps_its_state() -> None:
    model, kept = Line(), dict[str, Tensor]()
    counts = []
    for trained in ("b", "a", "b"):
        params = dict(model.named_parameters())
        train(model, LineTask(), params, {trained}, config(), 0, lambda step: None, lambda done: None, None, kept)
        counts.append({name: int(kept[f"{name}/step"]) for name in "ab" if f"{name}/step" in kept})
    assert counts == [{"b": 4}, {"a": 4, "b": 4}, {"a": 4, "b": 8}]
    assert kept.keys() == {f"{name}/{field}" for name in "ab" for field in ("step", "exp_avg", "exp_avg_sq")}


def test_private_steps_keep_what_noised_gradients_made() -> None:
    """With every point in each batch, no clipping and no noise, it is the plain training above."""
    free = DpSgd(noise_multiplier=0.0, clip=1e6, sample_rate=1.0, seed=0)
    assert torch.allclose(rounds(3, {}, free), plain(6, 6, torch.optim.Adam), atol=1e-5)


def test_correction_follows_the_learning_rate() -> None:
    """A loss without gradient: the whole correction is added by the round's end, in cosine shares of 1, 0.75 and 0.25 of 2."""
    model, seen = Line(), list[float]()
    params = dict(model.named_parameters())
    flat = type("Flat", (LineTask,), {"loss": lambda self, model, batch: (0 * model.a).sum()})()
    settings, correction = config(optimizer="sgd", local_steps=3, schedule="cosine"), {"a": torch.tensor([2.0, -4.0])}
    watch = lambda progress: seen.append(model.a[0].item())  # noqa: E731
    train(model, flat, params, {"a"}, settings, 0, lambda step: None, watch, correction=correction)
    assert seen == pytest.approx([1 + 1, 1 + 1.75, 1 + 2])
    assert model.a.tolist() == pytest.approx([3.0, -2.0])


@pytest.mark.parametrize(("name", "cls"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_optimizers_hold_only_what_they_are_given(name: str, cls: type) -> None:
    model = Line()
    optimizer = make_optimizer([model.b], config(optimizer=name))
    assert type(optimizer) is cls
    assert optimizer.param_groups[0]["params"] == [model.b]
