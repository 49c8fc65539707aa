"""Export a model as a PEFT folder, merged weights, a MONAI bundle or ONNX, and compare its logits with the model's."""

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file, save_file

from consilium import __version__
from consilium.adapters.names import SHIFT, is_local
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.sanitize import markdown_cell
from consilium.core.storage import PUBLIC, write_atomic
from consilium.federation.job import checkpoint_of, tokenizer_of
from consilium.federation.model_card import FILES, UNSTATED
from consilium.federation.saved_model import CARD, TENSORS, convert_changes_to_parameters, export_adapter, read_adapter_folder
from consilium.models.base_weights import tensor_names
from consilium.models.causal_lm.network import TINY_FOLDER
from consilium.models.dtypes import QUANTIZED
from consilium.models.meta_device import build_on_meta_device
from consilium.models.model_writer import HEAD_FILE
from consilium.models.registry import MODELS
from consilium.models.text_encoder import TextEncoderConfig
from consilium.report.run_record import job_of
from consilium.use import bundle_export, merge, onnx_export
from consilium.use.base_model_import import UNKNOWN, licence_of
from consilium.use.model import TrainedModel
from consilium.use.output_folder import LICENCES, RECORD, check_destination, match_file_mode, new_folder, write_record

Format = Literal["peft", "merged", "bundle", "onnx"]


@dataclass(frozen=True)
class Exported:
    """An export. `difference`: largest difference of its logits from the model's; None if weights were only copied."""

    folder: Path
    difference: float | None


def check_exportable(format: Format, folder: Path) -> None:
    """Raise ConfigError if the model in an adapter folder cannot be exported in this format. Its base is not loaded."""
    kept, card = read_adapter_folder(folder)
    config = job_of(folder)
    if kept.similar:
        raise ConfigError(
            "--stage personalized: its local adapter's weight is computed per sample from the site's records, which an export "
            "does not contain; export the global model"
        )
    if format == "peft" and kept.share:
        raise ConfigError(f"--format peft: the model is two adapters, {1 - kept.share:g} and {kept.share:g}; use merged")
    if format == "peft" and kept.scaling != 1:
        raise ConfigError(f"--format peft: the adapter is scaled by {kept.scaling:g}, which PEFT does not read; use merged")
    if format != "peft" and (dtype := config.model.dtype) in QUANTIZED:
        raise ConfigError(
            f"--format {format}: the base is quantized ({dtype}), which other programs cannot read; use peft, which exports "
            "the adapter without its base"
        )
    if format == "peft":
        if not (folder / SETTINGS).is_file():
            raise ConfigError(
                f"--format peft: PEFT does not know adapter.kind {config.adapter.kind!r}; use merged, bundle or onnx"
            )
        if SHIFT in kept.values:
            raise ConfigError("--format peft: the model has a vector behind its encoder, which PEFT does not know; use merged")
    elif format == "merged":
        merge.check(config)
    elif format == "onnx":
        onnx_export.check(config)
    else:
        bundle_export.check(config, card)


def export(found: TrainedModel, format: Format, folder: Path, own: SiteConfig, force: bool = False, base: str = "") -> Exported:
    """Export a model into a new `folder`. The model is changed and cannot be used afterwards.

    `force`: replace an earlier export in `folder`. `base`: the name of the base in a language model's PEFT folder and card; by
    default the base's folder on this machine. The folder is renamed to its final name last, so that a crash leaves no
    unfinished folder of this name. Raises ConfigError, CheckpointError.
    """
    check_destination(folder, force)
    check_exportable(format, found.folder)
    with new_folder(folder, force) as made:
        about, difference = _write_format(found, format, made, own, base)
        _copy_companion_files(found, own, made)
        name = f"docs/{CARD}" if format == "bundle" else CARD
        card = found.folder / CARD
        text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() and not card.is_symlink() else ""
        parts = [
            text.partition(FILES)[0].rstrip(),
            f"## {_TITLES[format]}",
            about.rstrip(),
            *_describe_inputs(found.config),
        ]
        if difference is not None:
            parts.append(f"On noise its logits differ from the trained model's by {difference:.1g} at most, which is rounding.")
        page = "\n\n".join(part for part in parts if part) + "\n"
        if library := _loader_library(found, format):
            page = with_front_matter(
                page,
                library,
                base or str(_base_folder(found, own)),
                _base_folder(found, own),
                TAGS[found.config.model.name],
            )
        write_atomic(made / name, page.encode(), PUBLIC)
        record = {"format": format, "consilium": __version__, "job": found.config.title, "model": found.card.name}
        write_record(made, record | {"difference": difference})
        match_file_mode(made, made / RECORD)
    return Exported(folder, difference)


def _loader_library(found: TrainedModel, format: Format) -> str:
    """Return the library that opens an exported text model: peft, transformers, or "" for other models and formats."""
    return {"peft": "peft", "merged": "transformers"}.get(format, "") if found.config.model.name in TAGS else ""


def _base_folder(found: TrainedModel, own: SiteConfig) -> Path:
    return (checkpoint_of(found.config.model, own) or TINY_FOLDER).resolve()


def _write_format(found: TrainedModel, format: Format, made: Path, own: SiteConfig, base: str) -> tuple[str, float | None]:
    """Write the format's files into `made`. Return (how to use them, in Markdown; largest difference of logits or None)."""
    if format == "peft":
        about = _write_peft(found, made, own, base)
        if _loader_library(found, format):
            complete_peft_folder(made, found.config, tokenizer_of(found.config, own), base or str(_base_folder(found, own)))
        return about, None
    model, config = found.model.cpu().float(), found.config  # the base may be stored in bfloat16
    if format == "merged":
        return merge.merge_and_write(made, model, config, tokenizer_of(config, own))
    return (
        onnx_export.merge_and_write(made, model, config)
        if format == "onnx"
        else bundle_export.merge_and_write(made, model, config, found.card)
    )


_PEFT = """An adapter for PEFT, on the unchanged base, which {where}:

```python
from pathlib import Path

from consilium.config.job import load_run_job
from consilium.federation.job import bare_model
from peft import PeftModel
{loads}
base = bare_model(load_run_job(Path("."), None), {checkpoint}, weights=True)
{beside}model = PeftModel.from_pretrained(base, "."){inner}.eval()
```
"""
_PEFT_TEXT = """An adapter for PEFT, with its tokenizer. `base_model_name_or_path` in adapter_config.json names the base:

```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("."{dtype})
tokenizer = AutoTokenizer.from_pretrained(".")
```
"""
_PEFT_CLASSES = """An adapter for PEFT and the classifier's head, with its tokenizer:

```python
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoTokenizer

model = AutoPeftModelForSequenceClassification.from_pretrained(".", num_labels={outputs}{dtype})
tokenizer = AutoTokenizer.from_pretrained(".")
```
"""
_BESIDE = {
    "decoder.safetensors": 'base.load_state_dict(load_file("decoder.safetensors"), strict=False)  # trained beside it\n',
    "head.safetensors": 'base.head.load_state_dict(load_file("head.safetensors"))  # the linear layer on the features\n',
}
_KEPT = """
In training and scoring, bitsandbytes stored the base as {}. On a base in 32 bits, the outputs differ slightly.
"""


def _write_peft(found: TrainedModel, made: Path, own: SiteConfig, base: str) -> str:
    """Write the files that PEFT reads, from the tensors that were checked. The adapter folder's own files may have others.

    Returns how to use the files, in Markdown.
    """
    values = convert_changes_to_parameters(found.model, found.kept.values)
    export_adapter(made, {name: tensor for name, tensor in values.items() if not is_local(name)}, found.config)
    kept_as = {"fp32": "float32", "bf16": "bfloat16"}.get(found.config.model.dtype)
    text = _PEFT_CLASSES if is_sequence_classifier(found.config) else _PEFT_TEXT
    dtype = f', dtype="{kept_as}"' if kept_as else ""
    about = text.format(dtype=dtype, outputs=getattr(found.config.task, "outputs", 0))
    is_encoder = found.config.model.name == "text_encoder" and not is_sequence_classifier(found.config)
    if is_encoder or not _loader_library(found, "peft"):
        place = base or checkpoint_of(found.config.model, own)
        beside = "".join(text for name, text in _BESIDE.items() if (made / name).is_file())
        about = _PEFT.format(
            where="is the checkpoint that the job names" if place else "comes with consilium",
            loads="from safetensors.torch import load_file\n" if beside else "",
            checkpoint=f"Path({str(place)!r})" if place else "None", beside=beside,
            inner=".base_model" if is_encoder else "",  # PEFT's own class for encoders gives the base arguments of its own
        )  # fmt: skip
    about += _KEPT.format(found.config.model.dtype) if found.config.model.dtype in QUANTIZED else ""
    if any(map(is_local, found.kept.values)):  # local tensors are not copied to the export
        return about
    shutil.copyfile(found.folder / TENSORS, made / TENSORS)
    return f"{about}\n`consilium predict` and `evaluate` open this folder too.\n"


def _copy_companion_files(found: TrainedModel, own: SiteConfig, made: Path) -> None:
    """Copy job.yaml, privacy.json, and the licence files in the folders of the adapter and the base.

    Links in the adapter's folder are not followed. The folder may come from somebody else, and a link could lead to other files
    of this user.
    """
    base = checkpoint_of(found.config.model, own)
    for name in ("job.yaml", "privacy.json"):
        _copy_file(found.folder / name, made, follow_links=False)
    for place, links in ((base, True), (found.folder, False)):
        for pattern in LICENCES if place is not None and place.is_dir() else ():
            for path in sorted(place.glob(pattern)):  # type: ignore[union-attr]
                _copy_file(path, made, links)


def _copy_file(path: Path, made: Path, follow_links: bool) -> None:
    if path.is_file() and (follow_links or not path.is_symlink()):
        shutil.copyfile(path, made / path.name)


_TITLES = {"peft": "Use it with PEFT", "merged": "Load it", "bundle": "Run it", "onnx": "Run it"}


def _describe_inputs(config: JobConfig) -> list[str]:
    """For a task on pictures, return lines on how pictures become inputs, and on the order of the logits. [] for others."""
    side, resize = config.model.image_side, getattr(config.task, "resize", None)
    if not side or resize is None:
        return []
    crop = getattr(config.task, "crop", None)
    part = f" It was trained on square parts of {crop} pixels of larger pictures: give it such parts." if crop else ""
    pad = f"the longer side becomes {side} pixels, the rest is padded right and below with RGB {config.model.padding}"
    how = f"stretched to {side} x {side} pixels" if resize == "stretch" else pad
    window = getattr(config.task, "window", None)
    ends = (window.center - window.width / 2, window.center + window.width / 2) if window else ()
    grey = f"Values from {ends[0]:g} to {ends[1]:g} become 0 to 255. " if ends else ""
    names = ", ".join(markdown_cell(name) for name in getattr(config.task, "classes", ()))
    mask = "; a mask is where its logit is over 0" if config.task.name == "segmentation" else ""
    order = [f"Logits are in the order of the classes: {names}{mask}."] if names else []
    return [f"Pictures are RGB in 0..255, bilinear and anti-aliased: {how}. {grey}".rstrip() + part, *order]


# PEFT folder -----------------------------------------------------------------------------------------------------------
# Completion of a text model's PEFT folder, so that PEFT, and for language models also vLLM, can open it without Consilium.

SETTINGS = "adapter_config.json"
TASKS = {"causal_lm": "CAUSAL_LM", "text_encoder": "FEATURE_EXTRACTION"}
"""PEFT's task type for each kind of model."""
TAGS = {"causal_lm": "text-generation", "text_encoder": "text-classification"}
"""The pipeline tag of model hubs for each kind of model."""
WITH_POOLER = ("bert",)
"""Architectures whose classifier in `transformers` is a linear layer on the encoder's pooled output, as our classifier is."""


def is_sequence_classifier(config: JobConfig) -> bool:
    """Return whether AutoModelForSequenceClassification can build this model, including its head."""
    model = config.model
    return (
        isinstance(model, TextEncoderConfig)
        and model.features == "pooled"
        and (model.config or {}).get("model_type") in WITH_POOLER
    )


def complete_peft_folder(made: Path, config: JobConfig, tokenizer: Any, base: str) -> None:
    """Write the base, the task type and short target names into a PEFT folder's settings, and save the tokenizer there.

    `base`: the base's name on the Hub, or its folder. A classifier's tensors are renamed to their names in `transformers`.
    """
    path = made / SETTINGS
    told = {"base_model_name_or_path": base, "task_type": TASKS[config.model.name]}
    settings = json.loads(path.read_text(encoding="utf-8")) | told
    with build_on_meta_device():
        modules = MODELS[config.model.name].build(config.model, config.task, None, False, False).named_modules()
    tensors = tensor_names(made / "adapter_model.safetensors")
    layers = {found[1] for name in tensors if (found := re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", name))}
    if short := short_names(layers, (name for name, _ in modules)):
        settings["target_modules"] = short
    if is_sequence_classifier(config):
        # put the encoder's adapter and its head into one file, with a classifier's tensor names
        prefix, weights = str((getattr(config.model, "config", None) or {})["model_type"]), made / "adapter_model.safetensors"
        renamed = {
            **{name.replace(".model.", f".model.{prefix}.", 1): tensor for name, tensor in load_file(weights).items()},
            **{f"base_model.model.classifier.{n.rpartition('.')[2]}": t for n, t in load_file(made / HEAD_FILE).items()},
        }
        save_file(renamed, weights, metadata={"format": "pt"})
        (made / HEAD_FILE).unlink()
        targets = settings["target_modules"]
        named = targets if isinstance(targets, list) else rf"{prefix}\.({targets})"
        settings |= {"task_type": "SEQ_CLS", "modules_to_save": ["classifier"], "target_modules": named}
    write_atomic(path, json.dumps(settings, indent=2, sort_keys=True).encode(), PUBLIC)
    tokenizer.save_pretrained(made)


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
