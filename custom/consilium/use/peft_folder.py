"""What a PEFT folder of a causal language model needs beside its tensors, so that PEFT and vLLM open it alone."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from consilium.core.storage import PUBLIC, write_atomic
from consilium.federation.model_card import UNSTATED
from consilium.models.causal_lm import CausalLmConfig
from consilium.models.causal_lm.network import build_causal_lm
from consilium.models.checkpoint_file import tensor_names
from consilium.models.layout import layout
from consilium.use.model_import import UNKNOWN, licence_of

SETTINGS = "adapter_config.json"


def complete(made: Path, config: CausalLmConfig, tokenizer: Any, base: str) -> None:
    """Write base, task and short targets into the folder's settings, and the tokenizer with its chat template beside them.

    `base`: the base's name on the Hub, or its folder.
    """
    path = made / SETTINGS
    settings = json.loads(path.read_text(encoding="utf-8")) | {"base_model_name_or_path": base, "task_type": "CAUSAL_LM"}
    with layout():
        modules = build_causal_lm(config.variant, None, config.config, weights=False).named_modules()
    tensors = tensor_names(made / "adapter_model.safetensors")
    layers = {found[1] for name in tensors if (found := re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", name))}
    if short := short_names(layers, (name for name, _ in modules)):
        settings["target_modules"] = short
    write_atomic(path, json.dumps(settings, indent=2, sort_keys=True).encode(), PUBLIC)
    tokenizer.save_pretrained(made)


def short_names(layers: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the last parts of the adapted layers' names if PEFT finds these layers and no other by them, [] otherwise."""
    adapted = set(layers)
    short = {name.rpartition(".")[2] for name in adapted}
    found = {name for name in names if name.rpartition(".")[2] in short}
    return sorted(short) if adapted and found == adapted and not any(part.isdecimal() for part in short) else []


def top(page: str, library: str, base: str, folder: Path) -> str:
    """Return a model card with base and licence in its first lines, which model hubs read; a licence stated there stays.

    `library` opens the model; `folder` is the base's.
    """
    head, _, rest = page.removeprefix("---\n").partition("\n---\n")
    stated = re.search(r"^license: (.+)$", head, re.MULTILINE)
    licence = stated[1] if stated and stated[1] != UNKNOWN else licence_of(folder)
    lines = [
        f"license: {licence}",
        f"library_name: {library}",
        "pipeline_tag: text-generation",
        f"base_model: {json.dumps(base)}",
    ]
    if licence != UNKNOWN:
        rest = rest.replace(
            UNSTATED, f"The licence is {licence}. Before you pass the adapter on, check that it applies to it too."
        )
    return "\n".join(["---", *lines, "---", rest])
