"""Random changes of a training sample, by MONAI's dictionary transforms."""

from collections.abc import Sequence

from monai.data import MetaTensor
from monai.transforms import Compose, RandAdjustContrastd, RandFlipd, RandGaussianNoised, RandRotate90d, RandScaleIntensityd
from torch import Tensor

from consilium.data.images import Sample
from consilium.seeding import seed_for


def augmentation(moved: Sequence[str] = ("image", "label")) -> Compose:
    """Return the training transforms: flips and quarter turns of the keys `moved`, mild changes of the image's intensity."""
    return Compose(
        [
            RandFlipd(moved, prob=0.5, spatial_axis=0),
            RandFlipd(moved, prob=0.5, spatial_axis=1),
            RandRotate90d(moved, prob=0.5, max_k=3),
            RandAdjustContrastd("image", prob=0.3, gamma=(0.8, 1.25)),
            RandScaleIntensityd("image", factors=0.15, prob=0.3),
            RandGaussianNoised("image", prob=0.2, std=4.0),
        ]
    )


def augment(transforms: Compose, sample: Sample, seed: int, index: int) -> Sample:
    """Return an augmented copy, within 0..255; the draw depends on (seed, index) alone, whichever order or worker asks."""
    transforms.set_random_state(seed=seed_for(seed, "augment", index) % 2**32)
    moved = transforms({key: tensor.clone() for key, tensor in sample.items()})
    return {key: _plain(moved[key]).clamp(0, 255) for key in sample}


def _plain(tensor: Tensor) -> Tensor:
    """Return an ordinary tensor: MONAI's MetaTensor slows every operation of the model down."""
    return (tensor.as_tensor() if isinstance(tensor, MetaTensor) else tensor).contiguous()
