"""Central pre-training of the tiny CLIP tower whose weights the package ships: `python -m tests.pretraining.clip`.

Seeded; the same versions, thread count and arguments give the same file. The tower learns to tell the attributes of a
generated object (generic_objects.py) from its class token and where the object and its part are from its patch tokens; the
linear layers for both are thrown away afterwards.

Measured on red blood cells (Chula RBC-12, 11 classes, 100 training and 35 test crops each, 64 pixels) by logistic regression
on frozen features of the crops and three flips of them, one seed: accuracy 0.49 with the shipped weights, 0.34 with random
ones at the same penalty; chance is 0.09. The tower tells size, contrast, parts and neighbours of an object, but the fine shape
of its outline (teeth, taper) hardly at all.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from consilium.models.clip.network import SHAPES, TINY_WEIGHTS, ClipClassifier, build_clip
from tests.pretraining.loop import fit, options
from tests.pretraining.objects import ATTRIBUTES, make_object

Batch = tuple[Tensor, Tensor, Tensor]


def make_batch(seed: int, step: int, count: int, size: int) -> Batch:
    """Return images (N, 3, S, S) in 0..255, attributes (N, len(ATTRIBUTES)) and covers (N, 2, S, S) in 0..1."""
    rng = np.random.default_rng([seed, step])
    drawn = [make_object(rng, size) for _ in range(count)]
    images = torch.from_numpy(np.stack([d.image for d in drawn])).permute(0, 3, 1, 2).float()
    covers = torch.from_numpy(np.stack([d.covers for d in drawn])).float()
    return images, torch.from_numpy(np.stack([d.attributes for d in drawn])), covers


class Pupil(nn.Module):
    """The tiny model, its head telling attributes, with a second linear layer that draws covers from patch tokens."""

    def __init__(self) -> None:
        super().__init__()
        shape = SHAPES["tiny"]
        self.model = build_clip("tiny", None, shape.native, len(ATTRIBUTES), weights=False)
        self.covers = nn.Linear(shape.width, 2 * shape.patch**2)
        grid = shape.native // shape.patch
        with torch.no_grad():  # places that differ from the start: random ones of 0.02 cost most of a short training
            self.model.vision_model.embeddings.position_embeddings[0, 1:] = _waves(grid, shape.width)

    def loss(self, batch: Batch, spread: Tensor) -> Tensor:
        """Return the squared error of standardized attributes plus the cross-entropy of the covers."""
        images, attributes, covers = batch
        model, patch = self.model, SHAPES["tiny"].patch
        tokens = model.vision_model((images - model.pixel_mean) / model.pixel_std).last_hidden_state
        told = F.mse_loss(model.head(tokens[:, 0]) / spread, attributes / spread)
        target = F.unfold(covers, patch, stride=patch).transpose(1, 2)
        return told + F.binary_cross_entropy_with_logits(self.covers(tokens[:, 1:]), target)


def _waves(grid: int, width: int) -> Tensor:
    """Return sines and cosines (grid * grid, width) of rows and columns at width / 4 frequencies each."""
    speed = 10 ** -torch.linspace(0, 2, width // 4)
    angle = torch.arange(grid)[:, None] * speed
    one = torch.cat([angle.sin(), angle.cos()], 1)
    return 0.3 * torch.cat([one.repeat_interleave(grid, 0), one.repeat(grid, 1)], 1)


def pretrain(steps: int, batch: int, lr: float, seed: int) -> ClipClassifier:
    """Return the tiny model, its head telling attributes, trained from random weights; prints a line every 50 steps."""
    torch.manual_seed(seed)
    size, pupil = SHAPES["tiny"].native, Pupil().train()
    spread = make_batch(seed + 1, 0, 512, size)[1].std(0)
    return fit(pupil, lambda step: pupil.loss(make_batch(seed, step, batch, size), spread), steps, lr, average=True).model


@torch.no_grad()
def explained(model: ClipClassifier, seed: int) -> dict[str, float]:
    """Return the explained variance of each attribute (1 is perfect, 0 a constant guess) on 512 unseen pictures."""
    images, values, _ = make_batch(seed + 2, 0, 512, SHAPES["tiny"].native)
    found = 1 - (model.eval()(images) - values).square().mean(0) / values.var(0)
    return dict(zip(ATTRIBUTES, found.tolist(), strict=True))


@torch.no_grad()
def standardize(model: ClipClassifier, seed: int) -> None:
    """Fold into the last LayerNorm what makes every feature zero-mean and unit-variance on generated pictures.

    A head that starts at zero learns faster then: no feature stands out by its scale, none acts as a bias.
    """
    features = model.eval().features(make_batch(seed + 3, 0, 512, SHAPES["tiny"].native)[0])
    norm, spread = model.vision_model.layernorm, features.std(0)
    norm.weight.div_(spread)
    norm.bias.sub_(features.mean(0)).div_(spread)


def main() -> None:
    """Pre-train, print the explained variance, and write the weights, half precision, without the head, standardized."""
    wanted = options(__doc__, TINY_WEIGHTS, steps=2000, batch=32, lr=1e-3)
    model = pretrain(wanted.steps, wanted.batch, wanted.lr, wanted.seed)
    print("explained variance:", "  ".join(f"{name} {value:.2f}" for name, value in explained(model, wanted.seed).items()))
    wanted.output.parent.mkdir(parents=True, exist_ok=True)
    save(model, wanted.output)
    stored = build_clip("tiny", wanted.output, None, len(ATTRIBUTES))
    standardize(stored, wanted.seed)
    save(stored, wanted.output)


def save(model: ClipClassifier, path: Path) -> None:
    """Write the weights without the head in half precision."""
    state = {n: t.half().contiguous() for n, t in model.state_dict().items() if not n.startswith("head.")}
    save_file(state, path, metadata={"variant": "tiny"})


if __name__ == "__main__":
    main()
