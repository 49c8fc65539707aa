"""Learning-rate schedules by hand."""

import pytest

from consilium.config.job import TrainingConfig
from consilium.training.optim import learning_rate


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [("constant", [0.8, 0.8, 0.8, 0.8]), ("linear", [0.8, 0.6, 0.4, 0.2]), ("cosine", [0.8, 0.682843, 0.4, 0.117157])],
)
def test_the_rate_of_each_of_four_steps(schedule: str, rates: list[float]) -> None:
    """lr 0.8: linear loses a quarter a step; cosine is 0.4 (1 + cos(pi t / 4))."""
    config = TrainingConfig(rounds=1, lr=0.8, schedule=schedule)
    assert [learning_rate(config, done, 4) for done in range(4)] == pytest.approx(rates, abs=1e-6)
