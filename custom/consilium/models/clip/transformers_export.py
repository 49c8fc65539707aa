"""Writes CLIP-like classifiers as `transformers` folders."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import ViTForImageClassification

from consilium.core.storage import PUBLIC, write_atomic
from consilium.models.clip import ClipConfig
from consilium.models.clip.network import PIXEL_MEAN, PIXEL_STD, ClipClassifier
from consilium.models.model_writer import page, save_pretrained

BILINEAR = 2  # as PIL counts filters
_LOAD = """import torch
from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained(".").eval()
mean = 255 * torch.tensor({mean}).view(3, 1, 1)
std = 255 * torch.tensor({std}).view(3, 1, 1)


@torch.no_grad()
def logits(images):
    \"\"\"Map RGB pictures (N, 3, {size}, {size}) in 0..255 to class logits (N, {outputs}).\"\"\"
    return model((images - mean) / std).logits
"""


def save(folder: Path, model: ClipClassifier, config: ClipConfig, task: Any, tokenizer: Any) -> str:
    """See registry.Saved. The classifier becomes a ViTForImageClassification."""
    size = config.image_size
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": size, "width": size},
        "resample": BILINEAR,
        "do_center_crop": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": PIXEL_MEAN,
        "image_std": PIXEL_STD,
        "do_convert_rgb": True,
    }
    write_atomic(folder / "preprocessor_config.json", json.dumps(settings, indent=1).encode(), PUBLIC)
    save_pretrained(folder, _as_vit(model, getattr(task, "classes", None)))
    code = _LOAD.format(mean=list(PIXEL_MEAN), std=list(PIXEL_STD), size=size, outputs=model.head.out_features)
    return page("A `transformers` folder: `AutoModelForImageClassification` loads it.", code)


@torch.no_grad()
def _as_vit(model: ClipClassifier, classes: list[str] | None) -> ViTForImageClassification:
    """Return the classifier as a ViTForImageClassification, with projection and head merged into one linear layer."""
    tower: Any = model.vision_model
    head = model.head
    config = type(tower.config)(**tower.config.to_dict())
    names = classes or [f"output {number}" for number in range(head.out_features)]
    config.id2label, config.label2id = dict(enumerate(names)), {name: number for number, name in enumerate(names)}
    whole = ViTForImageClassification(config)
    projection = model.projection.weight if isinstance(model.projection, nn.Linear) else None
    weight: Tensor = head.weight if projection is None else (head.weight.double() @ projection.double()).float()
    own = {f"vit.{name}": tensor for name, tensor in tower.state_dict().items()}
    whole.load_state_dict(own | {"classifier.weight": weight, "classifier.bias": head.bias})
    return whole.eval()
