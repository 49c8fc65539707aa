"""Pictures the tiny tower learns from: seeded, and their attributes tell the truth."""

import numpy as np

from tests.pretraining.clip import Pupil, make_batch
from tests.pretraining.objects import ATTRIBUTES, make_object


def test_pictures_are_seeded_and_the_attributes_true() -> None:
    one, again = (make_object(np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(one.image, again.image)
    assert np.array_equal(one.attributes, again.attributes)
    drawn = [make_object(np.random.default_rng(seed)) for seed in range(60)]
    values = np.stack([d.attributes for d in drawn])
    assert values.shape == (60, len(ATTRIBUTES))
    assert len(np.unique(values, axis=0)) == 60
    area = [d.covers[0].sum() for d in drawn]
    size = values[:, 0] ** 2 * values[:, 1]
    assert np.corrcoef(area, size)[0, 1] > 0.8
    part = [d.covers[1].max() > 0 for d in drawn]
    assert part == (values[:, ATTRIBUTES.index("part")] == 1).tolist()


def test_a_few_steps_of_pre_training_lower_the_loss() -> None:
    import torch

    torch.manual_seed(0)
    pupil, batch = Pupil(), make_batch(0, 0, 8, 64)
    spread = batch[1].std(0) + 0.1
    optimizer = torch.optim.AdamW(pupil.parameters(), 1e-3)
    losses = []
    for _ in range(6):
        losses.append(pupil.loss(batch, spread))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
