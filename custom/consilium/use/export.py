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
from consilium.adapters.names import SHIFT, is_local_adapter
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import raise_first
from consilium.core.sanitize import markdown_cell
from consilium.core.storage import PUBLIC, write_atomic
from consilium.federation.job_assembly import checkpoint_of, tokenizer_of
from consilium.federation.model_card import FILES, UNSTATED
from consilium.federation.saved_model import CARD, TENSORS, convert_changes_to_parameters, export_adapter, read_adapter_folder
from consilium.models.causal_lm.network import TINY_FOLDER
from consilium.models.low_precision import QUANTIZED
from consilium.models.meta_device import build_on_meta_device
from consilium.models.registry import MODELS
from consilium.models.text_encoder import TextEncoderConfig
from consilium.models.weight_files import HEAD_FILE, tensor_names
from consilium.report.run_record import job_of
from consilium.use import export_formats
from consilium.use.base_model_import import UNKNOWN, licence_of
from consilium.use.export_folder import LICENCES, check_destination, new_folder, write_record
from consilium.use.export_formats import ENVIRONMENT
from consilium.use.model import TrainedModel

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
    peft, kind, dtype = format == "peft", config.adapter.kind, config.model.dtype
    problems = {
        "--stage personalized: its local adapter's weight is computed per sample from the site's records, which an export does "
        "not contain; export the global model": kept.similar,
        f"--format peft: the model is two adapters, {1 - kept.share:g} and {kept.share:g}; use merged": peft and kept.share,
        f"--format peft: the adapter is scaled by {kept.scaling:g}, which PEFT does not read; use merged": (
            peft and kept.scaling != 1
        ),
        f"--format {format}: the base is quantized ({dtype}), which other programs cannot read; use peft, which exports the "
        "adapter without its base": not peft and dtype in QUANTIZED,
        f"--format peft: PEFT does not know adapter.kind {kind!r}; use merged, bundle or onnx": (
            peft and not (folder / SETTINGS).is_file()
        ),
        "--format peft: the model has a vector behind its encoder, which PEFT does not know; use merged": (
            peft and SHIFT in kept.values
        ),
    }
    raise_first(problems)
    if format == "merged":
        export_formats.check_merged(config)
    elif format == "onnx":
        export_formats.check_onnx(config)
    elif format == "bundle":
        export_formats.check_bundle(config, card)


def export(found: TrainedModel, format: Format, folder: Path, own: SiteConfig, base: str = "") -> Exported:
    """Export a model into a new `folder`. The model is changed and cannot be used afterwards.

    `base`: the name of the base in a language model's PEFT folder and card; by default the base's folder on this machine. The
    folder is renamed to its final name last, so that a crash leaves no unfinished folder of this name. Raises ConfigError,
    CheckpointError.
    """
    check_destination(folder)
    check_exportable(format, found.folder)
    # the library that opens the export of a text model; "" for other models and formats
    library = {"peft": "peft", "merged": "transformers"}.get(format, "") if found.config.model.name in TAGS else ""
    with new_folder(folder) as made:
        config, difference = found.config, None
        if format == "peft":
            about = _write_peft(found, made, own, base)
            if library:
                complete_peft_folder(made, config, tokenizer_of(config, own), base or str(_base_folder(found, own)))
        else:
            model = found.model.cpu().float()  # the base may be stored in bfloat16
            if format == "merged":
                about, difference = export_formats.write_merged(made, model, config, tokenizer_of(config, own))
            elif format == "onnx":
                about, difference = export_formats.write_onnx(made, model, config)
            else:
                about, difference = export_formats.write_bundle(made, model, config, found.card)
        _copy_companion_files(found, own, made)
        name = f"docs/{CARD}" if format == "bundle" else CARD
        card = found.folder / CARD
        text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() and not card.is_symlink() else ""
        parts = [
            text.partition(FILES)[0].rstrip(),
            f"## {_TITLES[format]}",
            about.rstrip(),
            _describe_inputs(found.config).rstrip(),
        ]
        if difference is not None:
            parts.append(f"On noise its logits differ from the trained model's by {difference:.1g} at most, which is rounding.")
        page = "\n\n".join(part for part in parts if part) + "\n"
        if library:
            page = with_front_matter(page, library, base, _base_folder(found, own), TAGS[found.config.model.name])
        write_atomic(made / name, page.encode(), PUBLIC)
        record = {"format": format, "consilium": __version__, "job": found.config.title, "model": found.card.name}
        write_record(made, record | {"difference": difference})
    return Exported(folder, difference)


def _base_folder(found: TrainedModel, own: SiteConfig) -> Path:
    return (checkpoint_of(found.config.model, own) or TINY_FOLDER).resolve()


_PEFT = ENVIRONMENT.from_string("""\
{% if auto == "SequenceClassification" %}
An adapter for PEFT and the classifier's head, with its tokenizer:
{% elif auto %}
An adapter for PEFT, with its tokenizer. `base_model_name_or_path` in adapter_config.json names the base:
{% else %}
An adapter for PEFT, on the unchanged base, which
{{- " is the checkpoint that the job names" if place else " comes with consilium" }}:
{% endif %}

```python
{% if auto %}
from peft import AutoPeftModelFor{{ auto }}
from transformers import AutoTokenizer

model = AutoPeftModelFor{{ auto }}.from_pretrained("."{{ arguments }})
tokenizer = AutoTokenizer.from_pretrained(".")
{% else %}
from pathlib import Path

from consilium.config.job import load_run_job
from consilium.federation.job_assembly import bare_model
from peft import PeftModel
{% if decoder or head %}
from safetensors.torch import load_file
{% endif %}

base = bare_model(load_run_job(Path("."), None), {{ place or "None" }}, weights=True)
{% if decoder %}
base.load_state_dict(load_file("decoder.safetensors"), strict=False)  # trained beside it
{% endif %}
{% if head %}
base.head.load_state_dict(load_file("head.safetensors"))  # the linear layer on the features
{% endif %}
model = PeftModel.from_pretrained(base, "."){{ inner }}.eval()
{% endif %}
```
{% if quantized %}

In training and scoring, bitsandbytes stored the base as {{ quantized }}. On a base in 32 bits, the outputs differ slightly.
{% endif %}
{% if not has_local %}

`consilium predict` and `evaluate` open this folder too.
{% endif %}
""")


def _write_peft(found: TrainedModel, made: Path, own: SiteConfig, base: str) -> str:
    """Write the files that PEFT reads, from the tensors that were checked. The adapter folder's own files may have others.

    Returns how to use the files, in Markdown.
    """
    values, config = convert_changes_to_parameters(found.model, found.kept.values), found.config
    export_adapter(made, {name: tensor for name, tensor in values.items() if not is_local_adapter(name)}, config)
    has_local = any(map(is_local_adapter, found.kept.values))
    if not has_local:  # local tensors are not copied to the export
        shutil.copyfile(found.folder / TENSORS, made / TENSORS)
    classifies, is_encoder = is_sequence_classifier(config), config.model.name == "text_encoder"
    dtype = {"fp32": ', dtype="float32"', "bf16": ', dtype="bfloat16"'}.get(config.model.dtype, "")
    checkpoint = checkpoint_of(config.model, own)
    place = base or (checkpoint and checkpoint.resolve())  # the card's code runs in the export's folder
    return _PEFT.render(
        auto="SequenceClassification" if classifies else "CausalLM" if config.model.name == "causal_lm" else "",
        arguments=(f", num_labels={getattr(config.task, 'outputs', 0)}" if classifies else "") + dtype,
        place=f"Path({str(place)!r})" if place else "",
        decoder=(made / "decoder.safetensors").is_file(),
        head=(made / HEAD_FILE).is_file(),
        inner=".base_model" if is_encoder else "",  # PEFT's own class for encoders gives the base arguments of its own
        quantized=config.model.dtype if config.model.dtype in QUANTIZED else "",
        has_local=has_local,
    )


def _copy_companion_files(found: TrainedModel, own: SiteConfig, made: Path) -> None:
    """Copy job.yaml, privacy.json, and the licence files in the folders of the adapter and the base.

    Links in the adapter's folder are not followed. The folder may come from somebody else, and a link could lead to other files
    of this user.
    """
    base = checkpoint_of(found.config.model, own)
    licences = [path for pattern in LICENCES for path in sorted(base.glob(pattern))] if base is not None else []
    names = ("job.yaml", "privacy.json", *LICENCES)
    own_files = [path for name in names for path in sorted(found.folder.glob(name)) if not path.is_symlink()]
    for path in [*licences, *own_files]:
        if path.is_file():
            shutil.copyfile(path, made / path.name)


_TITLES = {"peft": "Use it with PEFT", "merged": "Load it", "bundle": "Run it", "onnx": "Run it"}


_INPUTS = ENVIRONMENT.from_string("""\
Pictures are RGB in 0..255, bilinear and anti-aliased:
{%- if task.resize == "stretch" %}
 stretched to {{ side }} x {{ side }} pixels.
{%- else %}
 the longer side becomes {{ side }} pixels, the rest is padded right and below with RGB {{ padding }}.
{%- endif %}
{% if task.window %}
 Values from {{ "%g" % (task.window.center - task.window.width / 2) }} to
{{- " %g" % (task.window.center + task.window.width / 2) }} become 0 to 255.
{%- endif %}
{% if crop %}
 It was trained on square parts of {{ crop }} pixels of larger pictures: give it such parts.
{%- endif %}
{% if classes %}


Logits are in the order of the classes: {{ classes | join(", ") }}
{{- "; a mask is where its logit is over 0" if task.name == "segmentation" }}.
{%- endif %}
""")


def _describe_inputs(config: JobConfig) -> str:
    """Return how pictures or reports become inputs, and the order of the logits. "" for models that write texts."""
    task: Any = config.task
    classes, crop = [markdown_cell(name) for name in getattr(task, "classes", ())], getattr(task, "crop", None)
    if isinstance(config.model, TextEncoderConfig):
        order = f"Logits are in the order of the classes: {', '.join(classes)}."
        return f"{order} Texts are cut at their end, to {config.model.max_length} tokens with the tokenizer's special tokens."
    if not config.model.image_side or getattr(task, "resize", None) is None:
        return ""
    return _INPUTS.render(task=task, side=config.model.image_side, padding=config.model.padding, classes=classes, crop=crop)


# PEFT folder -----------------------------------------------------------------------------------------------------------
# Completion of a text model's PEFT folder, so that PEFT, and for language models also vLLM, can open it without Consilium.

SETTINGS = "adapter_config.json"
TASKS = {"causal_lm": "CAUSAL_LM", "text_encoder": "FEATURE_EXTRACTION"}
"""PEFT's task type for each kind of model."""
TAGS = {"causal_lm": "text-generation", "text_encoder": "text-classification"}
"""The pipeline tag of model hubs for each kind of model."""


def is_sequence_classifier(config: JobConfig) -> bool:
    """Return whether AutoModelForSequenceClassification can build this model, including its head.

    Of BERT its head is a linear layer on the encoder's pooled output, as our classifier is; of other architectures it is not.
    """
    model = config.model
    return (
        isinstance(model, TextEncoderConfig) and model.features == "pooled" and (model.config or {}).get("model_type") == "bert"
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

    `library`: the library that opens the model. `tag`: the hub's pipeline tag. `base`: the base's name, by default its
    `folder`, which may state its licence.
    """
    # a folder without a card has a page without fields
    head, _, rest = page.removeprefix("---\n").partition("\n---\n") if page.startswith("---\n") else ("", "", page)
    stated = re.search(r"^license: (.+)$", head, re.MULTILINE)
    licence = stated[1] if stated and stated[1] != UNKNOWN else licence_of(folder)
    lines = [
        f"license: {licence}",
        f"library_name: {library}",
        f"pipeline_tag: {tag}",
        f"base_model: {json.dumps(base or str(folder))}",
    ]
    if licence != UNKNOWN:
        rest = rest.replace(
            UNSTATED, f"The licence is {licence}. Before you pass the adapter on, check that it applies to it too."
        )
    return "\n".join(["---", *lines, "---", rest])
