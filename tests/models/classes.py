"""Small random models of every class that comes by folder, saved by `transformers` itself."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoModelForMaskGeneration, PreTrainedModel

SIDE = 32
_TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
_SEES = _TOWER | {"image_size": SIDE, "patch_size": 8}
_READS = _TOWER | {"vocab_size": 600, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIGLIP = {"text_config": _READS | {"projection_size": 32}, "vision_config": _SEES}
_PROMPT = {"hidden_size": 32, "image_size": SIDE, "patch_size": 8, "mask_input_channels": 8}
_DECODER = {"hidden_size": 32, "mlp_dim": 48, "num_attention_heads": 2, "iou_head_hidden_dim": 32}
_OLD_SAM = {
    "vision_config": {**_SEES, "output_channels": 32, "global_attn_indexes": [1], "window_size": 2, "num_pos_feats": 16,
                      "mlp_dim": 48, "initializer_range": 0.02},
    "prompt_encoder_config": _PROMPT | {"image_embedding_size": 4, "mask_input_channels": 16},
    "mask_decoder_config": _DECODER,
}  # fmt: skip
_GRIDS = [[8, 8], [4, 4], [2, 2]]
_NEW_SAM = {"prompt_encoder_config": _PROMPT | {"image_size": SIDE, "patch_size": 16}, "mask_decoder_config": _DECODER}
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "clip": {"text_config": _READS, "vision_config": _SEES, "projection_dim": 16},
    "clip_vision_model": _SEES,
    "siglip": _SIGLIP,
    "siglip2": {**_SIGLIP, "vision_config": _SEES | {"num_patches": 16}},
    "dinov2": _SEES | {"mlp_ratio": 2},
    "dinov2_with_registers": _SEES | {"mlp_ratio": 2},
    "dinov3_vit": _SEES,
    "vit": _SEES,
}
PROMPTABLE: dict[str, dict[str, Any]] = {
    "sam": _OLD_SAM,
    "sam_hq": {**_OLD_SAM, "mask_decoder_config": _DECODER | {"vit_dim": 32}},
    "sam2": {
        **_NEW_SAM,
        "vision_config": {
            "backbone_config": {
                "model_type": "sam2_hiera_det_model", "hidden_size": 8, "num_attention_heads": 1, "image_size": [SIDE, SIDE],
                "blocks_per_stage": [1, 1, 2, 1], "embed_dim_per_stage": [8, 16, 24, 32], "num_attention_heads_per_stage":
                [1, 1, 1, 1], "window_size_per_stage": [4, 4, 4, 4], "global_attention_blocks": [3],
                "window_positional_embedding_background_size": [2, 2],
            },
            "backbone_channel_list": [32, 24, 16, 8], "backbone_feature_sizes": _GRIDS, "fpn_hidden_size": 32,
        },
    },
    "sam3_tracker": {
        "prompt_encoder_config": _PROMPT | {"patch_size": 8},
        "mask_decoder_config": _DECODER,
        "vision_config": {
            "backbone_config": {"model_type": "sam3_vit_model", **_SEES, "pretrain_image_size": SIDE, "window_size": 2,
                                "global_attn_indexes": [1]},
            "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]], "fpn_hidden_size": 32,
        },
    },
}  # fmt: skip

_SPEAKS = _READS | {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256}
_QWEN = {
    "text_config": _SPEAKS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "image_token_id": 590,
    "vision_start_token_id": 591,
    "vision_end_token_id": 592,
    "video_token_id": 593,
}
SPEAKING: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**_QWEN, "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2,
                                            "patch_size": 4}},
    "qwen2_5_vl": {**_QWEN, "vision_config": {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2,
                                              "intermediate_size": 48, "patch_size": 4, "window_size": 16,
                                              "fullatt_block_indexes": [1]}},
    "qwen3_vl": {**_QWEN, "vision_config": {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2,
                                            "intermediate_size": 48, "patch_size": 4, "num_position_embeddings": 64,
                                            "deepstack_visual_indexes": [0]}},
    "paligemma": {"text_config": _SPEAKS | {"model_type": "gemma"}, "projection_dim": 32, "image_token_index": 590,
                  "vision_config": _SEES | {"model_type": "siglip_vision_model", "projection_dim": 32}},
    "gemma3": {"text_config": _SPEAKS | {"sliding_window": 32}, "mm_tokens_per_image": 4, "image_token_index": 590,
               "boi_token_index": 591, "eoi_token_index": 592, "vision_config": _SEES},
    "llava": {"text_config": _SPEAKS | {"model_type": "llama"}, "image_token_index": 590,
              "vision_config": _SEES | {"model_type": "clip_vision_model"}},
}  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A folder, what its config.json says, and the model as `transformers` has it."""

    folder: Path
    config: dict[str, Any]
    model: PreTrainedModel


def kinds(all: Iterable[str], *quick: str) -> list[Any]:
    """Return architectures as parameters of a test; all but the `quick` ones are for the slow suite."""
    return [pytest.param(kind, marks=() if kind in quick else pytest.mark.slow) for kind in all]


def make(folder: Path, kind: str, sizes: dict[str, Any]) -> Made:
    """Write a random model of an architecture into `folder`."""
    auto = AutoModelForMaskGeneration if kind in PROMPTABLE else AutoModelForImageTextToText if kind in SPEAKING else AutoModel
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    with torch.no_grad():  # small weights, and biases of zero, hide mistakes
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return Made(folder, json.loads((folder / "config.json").read_text()), model)


def write_records(folder: Path, **changes: Any) -> Path:
    """Write two training records with pictures, and one each to validate and to test."""
    folder.mkdir(parents=True)
    rows = np.random.default_rng(0).integers(0, 256, (4, SIDE, SIDE, 3), dtype=np.uint8)
    for number, row in enumerate(rows):
        Image.fromarray(row).save(folder / f"{number}.png")
    records = [{"image": f"{n}.png", "instruction": "What is seen?", "output": f"answer {n}"} | changes for n in range(4)]
    for split, part in (("training", records[:2]), ("validation", records[2:3]), ("test", records[3:])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in part))
    return folder
