"""Learning-rate schedules by hand; Adam by its papers, on any number of threads."""

import pytest
import torch
from torch import nn

from consilium.config.job import TrainingConfig
from consilium.training.loop import learning_rate, make_optimizer


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [("constant", [0.8, 0.8, 0.8, 0.8]), ("linear", [0.8, 0.6, 0.4, 0.2]), ("cosine", [0.8, 0.682843, 0.4, 0.117157])],
)
def test_the_rate_of_each_of_four_steps(schedule: str, rates: list[float]) -> None:
    """lr 0.8: linear loses a quarter a step; cosine is 0.4 (1 + cos(pi t / 4))."""
    config = TrainingConfig(rounds=1, lr=0.8, schedule=schedule)
    assert [learning_rate(config, done, 4) for done in range(4)] == pytest.approx(rates, abs=1e-6)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_fused_adam_is_adam(name: str) -> None:
    """Against Kingma and Ba's Algorithm 1 (AdamW: Loshchilov and Hutter's Algorithm 2) in float64.

    A step moves a weight by about lr at most: ten steps in float32 are within ten times its rounding and that of a step.
    """
    config, steps, decay = TrainingConfig(rounds=1, lr=0.01, weight_decay=0.1, optimizer=name), 10, 0.1
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(37, generator=generator), torch.randn(steps, 37, generator=generator)
    parameter = nn.Parameter(start.clone())
    optimizer = make_optimizer([parameter], config)
    assert optimizer.defaults["fused"]
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    w, m, v = start.double(), torch.zeros(37).double(), torch.zeros(37).double()
    for t, gradient in enumerate(gradients.double(), start=1):
        g = gradient + decay * w if name == "adam" else gradient
        w = w if name == "adam" else w * (1 - config.lr * decay)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w - config.lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    bound = steps * 2**-23 * (w.abs() + 8 * config.lr)
    assert ((parameter.double() - w).abs() <= bound).all()


@pytest.mark.parametrize("count", [1, 5, 37, 4099])
def test_fused_adam_gives_equal_bits_on_any_number_of_threads(count: int) -> None:
    ends, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            generator = torch.Generator().manual_seed(count)
            parameter = nn.Parameter(torch.randn(count, 33, generator=generator))
            optimizer = make_optimizer([parameter], TrainingConfig(rounds=1, lr=0.01))
            for _ in range(3):
                parameter.grad = torch.randn(count, 33, generator=generator)
                optimizer.step()
            ends.append(parameter.detach().clone())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
