"""Central pre-training of the tiny SAM whose weights the package ships: `python -m tests.pretraining.sam`.

Seeded; the same versions, thread count and arguments give the same file. It trains the three uses the package has: token 0
without prompt finds all objects, tokens 1 to 3 find wholes, parts and sub-parts, token 0 with a box finds the boxed object.
"""

import numpy as np
import torch
import torch.nn.functional as F
from monai.losses import DiceLoss
from safetensors.torch import save_file
from torch import Tensor

from consilium.models.sam.network import TINY_WEIGHTS, PromptedSam, build_sam
from tests.pretraining.loop import fit, options
from tests.pretraining.pictures import make_picture


def make_batch(seed: int, step: int, count: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images (N, 3, S, S), nested masks (N, 3, S, S), boxes (N, 4) with jitter and the boxed object (N, 1, S, S)."""
    rng = np.random.default_rng([seed, step])
    pictures = [make_picture(rng, size) for _ in range(count)]
    images = torch.from_numpy(np.stack([p.image for p in pictures])).permute(0, 3, 1, 2).float()
    masks = torch.from_numpy(np.stack([p.masks for p in pictures])).float()
    chosen = torch.from_numpy(np.stack([p.chosen for p in pictures]))[:, None].float()
    boxes = torch.tensor(np.stack([_box(rng, p.chosen) for p in pictures]), dtype=torch.float32)
    return images, masks, boxes, chosen


def _box(rng: np.random.Generator, mask: np.ndarray) -> np.ndarray:
    rows, cols = np.nonzero(mask)
    if not len(rows):  # hidden behind others
        return np.array([0, 0, mask.shape[1] - 1, mask.shape[0] - 1], float)
    box = np.array([cols.min(), rows.min(), cols.max(), rows.max()], float)
    side = np.array([box[2] - box[0], box[3] - box[1]] * 2)
    return np.clip(box + rng.uniform(-0.1, 0.1, 4) * side, 0, len(mask) - 1)


def predict(model: PromptedSam, images: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return low-resolution logits of tokens 0 to 3 without a prompt (N, 4, h, w), and of token 0 by box (N, 1, h, w)."""
    embedding = model.encode_normalized((images - model.pixel_mean) / model.pixel_std)
    return model.decode(embedding, None, [0, 1, 2, 3]), model.decode(embedding, boxes, [0])


def loss_of(model: PromptedSam, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Return Dice + BCE over all uses."""
    images, masks, boxes, chosen = batch
    free, boxed = predict(model, images, boxes)
    logits = torch.cat([free, boxed], dim=1)
    target = F.interpolate(torch.cat([masks[:, :1], masks, chosen], dim=1), logits.shape[-2:], mode="area")
    return DiceLoss(sigmoid=True)(logits, target) + F.binary_cross_entropy_with_logits(logits, target)


@torch.no_grad()
def held_out_dice(model: PromptedSam, seed: int, size: int) -> list[float]:
    """Return the mean Dice of the five uses (all objects, whole, part, sub-part, by box) on 64 unseen pictures."""
    images, masks, boxes, chosen = make_batch(seed + 1, 0, 64, size)
    free, boxed = predict(model.eval(), images, boxes)
    logits = F.interpolate(torch.cat([free, boxed], dim=1), images.shape[-2:], mode="bilinear")
    guess, truth = (logits > 0).float(), torch.cat([masks[:, :1], masks, chosen], dim=1)
    overlap, total = (guess * truth).sum((2, 3)), guess.sum((2, 3)) + truth.sum((2, 3))
    return [float((2 * overlap[:, i] / total[:, i])[total[:, i] > 0].mean()) for i in range(5)]


def pretrain(steps: int, batch: int, lr: float, seed: int, size: int = 128) -> PromptedSam:
    """Return the tiny SAM trained from random weights; prints a line every 50 steps."""
    torch.manual_seed(seed)
    model = build_sam("tiny", None, size, 3, weights=False).train()
    return fit(model, lambda step: loss_of(model, make_batch(seed, step, batch, size)), steps, lr, average=True)


def main() -> None:
    """Pre-train, print held-out Dice and write the weights."""
    wanted = options(__doc__, TINY_WEIGHTS, steps=2000, batch=16, lr=1e-3)
    model = pretrain(wanted.steps, wanted.batch, wanted.lr, wanted.seed)
    names = ("all", "whole", "part", "sub-part", "box")
    scores = dict(zip(names, held_out_dice(model, wanted.seed, 128), strict=True))
    print("held-out Dice:", "  ".join(f"{name} {score:.3f}" for name, score in scores.items()))
    wanted.output.parent.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous() for n, t in model.state_dict().items()}, wanted.output, metadata={"variant": "tiny"})


if __name__ == "__main__":
    main()
