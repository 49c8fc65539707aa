"""Completion of a text model's PEFT folder, so that PEFT, and for language models also vLLM, can open it without Consilium."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from consilium.config.job import JobConfig
from consilium.core.storage import PUBLIC, write_atomic
from consilium.federation.model_card import UNSTATED
from consilium.models.checkpoint_file import tensor_names
from consilium.models.meta_device import layout
from consilium.models.model_writer import HEAD_FILE
from consilium.models.registry import MODELS
from consilium.models.text_encoder import TextEncoderConfig
from consilium.use.model_import import UNKNOWN, licence_of

SETTINGS = "adapter_config.json"


TASKS = {"causal_lm": "CAUSAL_LM", "text_encoder": "FEATURE_EXTRACTION"}
"""PEFT's task type for each kind of model."""
TAGS = {"causal_lm": "text-generation", "text_encoder": "text-classification"}
"""The pipeline tag of model hubs for each kind of model."""
WITH_POOLER = ("bert",)
"""Architectures whose classifier in `transformers` is a linear layer on the encoder's pooled output, as our classifier is."""


def is_classifier(config: JobConfig) -> bool:
    """Return whether AutoModelForSequenceClassification can build this model, including its head."""
    model = config.model
    return (
        isinstance(model, TextEncoderConfig)
        and model.features == "pooled"
        and (model.config or {}).get("model_type") in WITH_POOLER
    )


def complete_folder(made: Path, config: JobConfig, tokenizer: Any, base: str) -> None:
    """Write the base, the task type and short target names into a PEFT folder's settings, and save the tokenizer there.

    `base`: the base's name on the Hub, or its folder. A classifier's tensors are renamed to their names in `transformers`.
    """
    path = made / SETTINGS
    told = {"base_model_name_or_path": base, "task_type": TASKS[config.model.name]}
    settings = json.loads(path.read_text(encoding="utf-8")) | told
    with layout():
        modules = MODELS[config.model.name].build(config.model, config.task, None, False, False).named_modules()
    tensors = tensor_names(made / "adapter_model.safetensors")
    layers = {found[1] for name in tensors if (found := re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", name))}
    if short := short_names(layers, (name for name, _ in modules)):
        settings["target_modules"] = short
    if is_classifier(config):
        settings |= _rename_for_classifier(
            made, settings["target_modules"], str((getattr(config.model, "config", None) or {})["model_type"])
        )
    write_atomic(path, json.dumps(settings, indent=2, sort_keys=True).encode(), PUBLIC)
    tokenizer.save_pretrained(made)


def _rename_for_classifier(made: Path, targets: list[str] | str, prefix: str) -> dict[str, Any]:
    """Put an encoder's adapter and its head into one file, with a classifier's tensor names. Return the settings for PEFT."""
    path, head = made / "adapter_model.safetensors", made / HEAD_FILE
    tensors = {
        **{name.replace(".model.", f".model.{prefix}.", 1): tensor for name, tensor in load_file(path).items()},
        **{f"base_model.model.classifier.{n.rpartition('.')[2]}": tensor for n, tensor in load_file(head).items()},
    }
    save_file(tensors, path, metadata={"format": "pt"})
    head.unlink()
    named = targets if isinstance(targets, list) else rf"{prefix}\.({targets})"
    return {"task_type": "SEQ_CLS", "modules_to_save": ["classifier"], "target_modules": named}


def short_names(layers: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the last parts of the adapted layers' names, if PEFT would adapt exactly these layers by them; [] otherwise.

    `layers`: the adapted layers. `names`: all modules of the model.
    """
    adapted = set(layers)
    short = {name.rpartition(".")[2] for name in adapted}
    found = {name for name in names if name.rpartition(".")[2] in short}
    return sorted(short) if adapted and found == adapted and not any(part.isdecimal() for part in short) else []


def with_front_matter(page: str, library: str, base: str, folder: Path, tag: str) -> str:
    """Return a model card that begins with the fields that model hubs read. A licence that the card states is kept.

    `library`: the library that opens the model. `tag`: the hub's pipeline tag. `base`: the base's name. `folder`: the base's
    folder, which may state its licence.
    """
    head, _, rest = page.removeprefix("---\n").partition("\n---\n")
    stated = re.search(r"^license: (.+)$", head, re.MULTILINE)
    licence = stated[1] if stated and stated[1] != UNKNOWN else licence_of(folder)
    lines = [
        f"license: {licence}",
        f"library_name: {library}",
        f"pipeline_tag: {tag}",
        f"base_model: {json.dumps(base)}",
    ]
    if licence != UNKNOWN:
        rest = rest.replace(
            UNSTATED, f"The licence is {licence}. Before you pass the adapter on, check that it applies to it too."
        )
    return "\n".join(["---", *lines, "---", rest])
