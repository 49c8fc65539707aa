"""Which classes of models by folder hold what the pages say, on small random models that `transformers` itself has saved.

    python -m tests.benchmarks.model_classes

For each: by how much its outputs differ from `transformers`' own once it is loaded, how many of the linear layers of its blocks
`all-linear` adapts, what ten steps make of the loss, and by how much outputs differ after plain PEFT has loaded the exported
adapter on the unchanged base, and after merging. Outputs are pooled features, logits of masks, or logits of tokens.
"""

import argparse
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import logging

from consilium.adapters import adapter_state, lora
from consilium.adapters.kinds import LoraConfig
from consilium.adapters.names import prepare_linear_layers
from consilium.models.registry import MODELS
from consilium.tasks.registry import TASKS
from tests.models.classes import CLASSIFIERS, PROMPTABLE, SIDE, SPEAKING, Made, make

Answer = Callable[[Any], Tensor]
STEPS, RANK, ALPHA = 10, 2, 4.0
HEADINGS = (
    "model",
    "`model_type`",
    "loads, off by",
    "all-linear of linear layers",
    "loss in ten steps",
    "PEFT",
    "merged",
)


@dataclass(frozen=True)
class Case:
    """A model of ours, and how it and `transformers`' own are asked the same."""

    model: Any
    ours: Answer
    plain: Answer
    blocks: str
    """What names of layers that a set may adapt have in them, as a pattern."""


def _built(name: str, made: Made, task: dict[str, Any], **more: Any) -> Any:
    section = {"name": name, "variant": "folder", "checkpoint": str(made.folder), "config": made.config, "image_size": SIDE}
    config = MODELS[name].config.model_validate(section | more)
    return MODELS[name].build(config, TASKS[task["name"]].config.model_validate(task), made.folder, True, False)


def _classifier(made: Made, images: Tensor) -> Case:
    model = _built("vision", made, {"name": "classification", "classes": ["a", "b"]})
    seen: list[Tensor] = []
    model.pooled.register_forward_hook(lambda module, given, output: seen.append(output))

    def ours(one: Any) -> Tensor:
        one(images)
        return seen.pop()

    def plain(one: Any) -> Tensor:
        tower = getattr(one, "base_model", one)
        tower = getattr(tower, "model", tower) if isinstance(one, peft.PeftModel) else one
        encode = tower.get_image_features if hasattr(tower, "get_image_features") else tower
        return encode(**model_inputs).pooler_output

    pixels = (images - model.pixel_mean) / model.pixel_std
    model_inputs: dict[str, Tensor] = {"pixel_values": pixels}
    if made.config["model_type"] == "siglip2":
        patches = F.unfold(pixels, 8, stride=8).transpose(1, 2).unflatten(2, (3, 64)).transpose(2, 3).flatten(2)
        shapes, mask = torch.tensor([[4, 4]] * len(images)), torch.ones(len(images), 16)
        model_inputs = {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}
    return Case(model, ours, plain, r"(^|\.)layers?\.\d")


def _promptable(made: Made, images: Tensor) -> Case:
    model = _built("sam", made, {"name": "segmentation", "classes": ["a"], "prompt": "box"})
    boxes = torch.tensor([[[2.0, 3, 20, 25]]]).expand(len(images), -1, -1)
    pixels = (images - model.pixel_mean) / model.pixel_std

    def plain(one: Any) -> Tensor:
        low = one(pixel_values=pixels, input_boxes=boxes, multimask_output=False).pred_masks[:, :, 0]
        return F.interpolate(low, (SIDE, SIDE), mode="bilinear", align_corners=False)

    if hasattr(made.model.mask_decoder, "dynamic_multimask_via_stability"):
        made.model.mask_decoder.dynamic_multimask_via_stability = False  # as ours: the same mask of every picture
    return Case(model, lambda one: one(images, boxes), plain, r"\.(layers|blocks)\.\d")


def _speaking(made: Made, images: Tensor) -> Case:
    model = _built("vision_language", made, {"name": "report"})
    from consilium.models.vision_language.network import picture_tokens

    shown = picture_tokens(model.config, SIDE).ids
    ids = torch.tensor([[*shown, *range(10, 30)]]).expand(len(images), -1)
    given = model.picture_inputs(ids, torch.ones_like(ids), images, torch.zeros_like(ids).bool())

    def ours(one: Any) -> Tensor:
        return one(**given, use_cache=False).logits

    return Case(model, ours, ours, r"language_model\.layers\.\d")


GROUPS: dict[str, tuple[dict[str, dict[str, Any]], Callable[[Made, Tensor], Case]]] = {
    "vision": (CLASSIFIERS, _classifier),
    "sam": (PROMPTABLE, _promptable),
    "vision_language": (SPEAKING, _speaking),
}


def row(name: str, kind: str, sizes: dict[str, Any], case_of: Callable[[Made, Tensor], Case], folder: Path) -> list[str]:
    """Return a model's row of the table."""
    made, base = make(folder / "base", kind, sizes), MODELS[name]
    images = torch.randint(256, (2, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(1)).float()
    case = case_of(made, images)
    with torch.no_grad():
        wanted, found = case.plain(made.model), case.ours(case.model)
    adapted = prepare_linear_layers(case.model, base.target("all-linear"))
    there = [n for n, m in case.model.named_modules() if isinstance(m, nn.Linear) and re.search(case.blocks, n)]
    lora.inject(case.model, LoraConfig(rank=RANK, alpha=ALPHA, targets="all-linear"), base)
    losses = _train(case, wanted)
    case.model.eval()
    with torch.no_grad():
        ours = case.ours(case.model)
        lora.save_peft(folder / "adapter", adapter_state.values(case.model), RANK, ALPHA, name, base.target("all-linear"), True)
        tuned = peft.PeftModel.from_pretrained(made.model, folder / "adapter").eval()
        through = case.plain(tuned)
        lora.merge(case.model)
        merged = case.ours(case.model)
    moved = float((ours - found).abs().max())
    assert moved > 1e-3, "training has changed nothing, so that equal logits say nothing"
    offs = [f"{float((one - other).abs().max()):.1e}" for one, other in ((found, wanted), (through, ours), (merged, ours))]
    share = f"{len(set(adapted) & set(there))} of {len(there)}"
    return [name, f"`{kind}`", offs[0], share, f"{losses[0]:.3f} to {losses[-1]:.3f}", *offs[1:]]


def _train(case: Case, first: Tensor) -> list[float]:
    """Take ten steps towards logits that are other than the base's; return each step's mean squared error."""
    goal = first + torch.randn(first.shape, generator=torch.Generator().manual_seed(2)) * first.std()
    trained = [tensor for tensor in adapter_state.tensors(case.model).values() if isinstance(tensor, nn.Parameter)]
    for name, tensor in adapter_state.tensors(case.model).items():
        if name.endswith("lora_A"):
            nn.init.kaiming_uniform_(tensor, a=5**0.5)
    optimizer, losses = torch.optim.Adam(trained, lr=0.02), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(case.ours(case.model), goal)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    print(f"| {' | '.join(HEADINGS)} |\n{'|---' * len(HEADINGS)}|")
    for name, (kinds, case_of) in GROUPS.items():
        for kind, sizes in kinds.items():
            with tempfile.TemporaryDirectory() as folder:
                print(f"| {' | '.join(row(name, kind, sizes, case_of, Path(folder)))} |", flush=True)


if __name__ == "__main__":
    main()
