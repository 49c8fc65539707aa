"""Pre-training pictures: nested, seeded, boxed."""

import numpy as np
import torch

from tests.pretraining.pictures import make_picture
from tests.pretraining.sam import make_batch


def test_the_seed_fixes_a_picture() -> None:
    one, again = (make_picture(np.random.default_rng(3), 64) for _ in range(2))
    assert np.array_equal(one.image, again.image)
    assert np.array_equal(one.masks, again.masks)


def test_parts_lie_in_wholes_but_for_a_few_pixels() -> None:
    """A shifted part may cross the edge of an outline with a dent; over many pictures that is rare."""
    masks = np.concatenate([make_picture(np.random.default_rng(i), 128).masks.reshape(3, -1) for i in range(20)], axis=1)
    whole, part, sub = masks
    assert (part & ~whole).sum() < 0.02 * part.sum()
    assert (sub & ~part).sum() < 0.02 * sub.sum()


def test_batches_are_the_same_for_seed_and_step_only() -> None:
    first, again, other = make_batch(0, 3, 2, 64), make_batch(0, 3, 2, 64), make_batch(0, 4, 2, 64)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert (first[2][:, 2:] >= first[2][:, :2]).all()
