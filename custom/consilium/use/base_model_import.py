"""`consilium models import`: import a causal language model from a GGUF file or a `transformers` folder.

The written folder can be named in `model.checkpoint`. An adapter can be merged first. `provenance.json` in the folder says
where the weights came from. Nothing is downloaded, and of the source only known plain files are read.
"""

import json
import math
import re
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from consilium import __version__
from consilium.core.errors import STOPS, CheckpointError, ConfigError, raise_first
from consilium.core.sanitize import shown
from consilium.core.storage import PUBLIC, file_hash, write_atomic
from consilium.data.safe_open import read_text
from consilium.models.architecture import gguf_files, refuse_adapter
from consilium.models.causal_lm.network import build_causal_lm, load_tokenizer, restore_conv1d
from consilium.models.text_encoder import TextEncoderConfig
from consilium.models.transformers_folder import shorten_error
from consilium.models.untrusted_folder import INDEX, WEIGHTS, name_field_in_errors, plain_file, read_json
from consilium.models.weight_files import quiet_transformers, save_text_model
from consilium.report.tables import only_true
from consilium.tasks.language.prompts import Prompt
from consilium.use.export_folder import LICENCES, check_destination, new_folder

PROVENANCE = "provenance.json"
UNKNOWN = "unknown"
"""The licence that is recorded for a source that names none."""
LONGEST_TEMPLATE = 2**20
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_KEPT = {
    "r",
    "lora_alpha",
    "target_modules",
    "exclude_modules",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "layers_to_transform",
    "layers_pattern",
}
"""Settings of a LoRA adapter that decide the result of a merge."""
_UNREAD = {
    "init_lora_weights",  # which is checked alone
    "base_model_name_or_path",
    "peft_type",
    "task_type",
    "revision",
    "peft_version",
    "auto_mapping",
    "inference_mode",
    "lora_dropout",
    "fan_in_fan_out",
    "megatron_core",
    "loftq_config",
    "runtime_config",
    "qalora_group_size",
    "ensure_weight_tying",
}
"""Settings that do not influence a merge. `fan_in_fan_out` is for layers that are ordinary linear layers here."""
_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that do not change the base's weights. PiSSA, OLoRA, LoftQ and others change them."""
REMEDY = "merge it by PEFT's merge_and_unload, and import the merged folder"
_NAMES = re.compile(r"[\w.^$|-]*", re.ASCII)
"""Allowed names and patterns of layers. Repetition is not allowed, because such a regular expression may run for ever."""
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True)
class Imported:
    """An imported model. `stored`: bytes of its parameters on disk. `notes`: lines for the user about the import."""

    parameters: int
    stored: int
    licence: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Source:
    """A loaded source: model, tokenizer, and the values `told` for provenance.json. `home`: the folder with its licences."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    told: Mapping[str, Any]
    dtype: torch.dtype
    home: Path


def import_model(
    source: Path, folder: Path, adapter: Path | None = None, template: Path | None = None, licence: str | None = None
) -> Imported:
    """Import a GGUF file or a folder into a new `folder` that jobs can name.

    `adapter`: a PEFT folder of LoRA, which is merged first. `template`: a Jinja file that replaces the source's chat template.
    `licence` replaces the licence that the source names. Raises ConfigError, CheckpointError; then nothing is written.
    """
    check_destination(folder)
    with name_field_in_errors("SOURCE"):
        found = _load_gguf(source) if gguf_files(source) else _load_folder(source)
    if template is not None:
        found.tokenizer.chat_template = read_text(template, "give a chat template in Jinja", LONGEST_TEMPLATE)
    told = dict(found.told) | {"licence": licence or found.told["licence"]}
    if adapter is not None:
        with name_field_in_errors(
            "--adapter", "give a folder of PEFT's with adapter_config.json and adapter_model.safetensors"
        ):
            told |= {"adapter": merge_adapter(found.model, adapter)}
    for name, tensor in found.model.named_parameters():
        if wrong := int((~torch.isfinite(tensor)).sum()):
            raise CheckpointError(f"SOURCE: {source}: {shown(name, 120)}: {wrong:,} numbers are NaN or Inf; fetch it again")
    notes = _notes(told, found.tokenizer, template or source)
    dtype = torch.float32 if adapter is not None else found.dtype
    told |= {
        "architecture": found.model.config.model_type,
        "parameters": sum(parameter.numel() for parameter in found.model.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
        "tied_embeddings": bool(found.model.config.get_text_config().tie_word_embeddings),
        "chat_template": bool(found.tokenizer.chat_template),
        "consilium": __version__,
        "transformers": transformers.__version__,
    }
    with new_folder(folder) as made:
        restore_conv1d(found.model)
        save_text_model(made, found.model.to(dtype), found.tokenizer)
        # `transformers` writes private keys into config.json, which jobs refuse.
        public = {k: v for k, v in read_json(made, "config.json").items() if not k.startswith("_")}
        write_atomic(made / "config.json", json.dumps(public, indent=2).encode(), PUBLIC)
        with name_field_in_errors("SOURCE"):
            for path in [path for pattern in LICENCES for path in sorted(found.home.glob(pattern)) if path.is_file()]:
                shutil.copyfile(plain_file(found.home, path.name, LONGEST_TEMPLATE), made / path.name)
        written = {path.name: file_hash(path) for path in sorted(made.iterdir())}
        write_atomic(made / PROVENANCE, json.dumps({**told, "written": written}, indent=1).encode(), PUBLIC)
        # A job must be able to load the written folder.
        with name_field_in_errors("SOURCE"):
            build_causal_lm("folder", made, public)
            load_tokenizer("folder", made, public)
        stored = sum(path.stat().st_size for path in made.glob("*.safetensors"))
    return Imported(told["parameters"], stored, str(told["licence"]), tuple(notes))


# GGUF ------------------------------------------------------------------------------------------------------------------


def _load_gguf(source: Path) -> _Source:
    """Load a GGUF file's model, with all weights as float32. Raises ConfigError, CheckpointError."""
    files = gguf_files(source)
    if len(files) > 1:
        names = ", ".join(shown(path.name, 64) for path in files[:4])
        raise ConfigError(f"SOURCE: {source}: holds {len(files)} GGUF files ({names}); name one of them")
    (path,) = files
    if _SPLIT.search(path.stem):
        raise CheckpointError(
            f"SOURCE: {path}: one part of several, which transformers does not join; join them by llama.cpp's "
            "`llama-gguf-split --merge`, and name the result"
        )
    if find_spec("gguf") is None:
        raise ConfigError(f"SOURCE: {path}: needs the package gguf; install it: pip install 'consilium-flare[gguf]'")
    real = plain_file(path.parent, path.name)
    told, sizes = _gguf_header(path)
    with tempfile.TemporaryDirectory(prefix="consilium-model-") as view, quiet_transformers():
        (Path(view) / "model.gguf").symlink_to(real)
        try:
            tokenizer = AutoTokenizer.from_pretrained(view, gguf_file="model.gguf", local_files_only=True)
            model, loaded = AutoModelForCausalLM.from_pretrained(
                view, gguf_file="model.gguf", local_files_only=True, dtype=torch.float32,
                quantization_config=transformers.GgufConfig(dequantize=True), output_loading_info=True,
            )  # fmt: skip
        except STOPS:
            raise
        except BaseException as error:  # architectures fail in different ways, and a Rust panic is not an Exception
            why = shorten_error(error, Path(view) / "model.gguf", path)
            raise CheckpointError(
                f"SOURCE: {path}: cannot be read ({why}); use a GGUF file of Llama, Qwen, Mistral or Gemma"
            ) from None
    if missing := loaded["missing_keys"]:
        raise CheckpointError(f"SOURCE: {path}: lacks {shown(min(missing), 120)!r}, which would be random; fetch it again")
    # transformers ignores tensors that it does not know without a message, so the model must have as many numbers as the file
    if over := sum(sizes.values()) - sum(parameter.numel() for parameter in model.parameters()):
        where = "of it are left out by transformers" if over > 0 else "of the model are not in it"
        raise CheckpointError(
            f"SOURCE: {path}: {abs(over):,} numbers {where}, so its answers would differ from the original model's; "
            "use the model's original folder"
        )
    model.name_or_path = model.config._name_or_path = path.stem
    return _Source(model.eval(), tokenizer, told, torch.float32, path.parent)


def _gguf_header(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return (values for provenance.json, the number of values per tensor) from a GGUF file's header.

    Raises CheckpointError for a damaged file.
    """
    from gguf import GGMLQuantizationType
    from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

    try:
        values, _ = read_gguf_metadata(str(path))
        header = GgufHeader.from_file(str(path))
        tensors = header.tensors
        types = Counter(str(GGMLQuantizationType(one.ggml_type).name) for one in tensors)
    except Exception as error:  # a truncated file can fail anywhere
        raise CheckpointError(
            f"SOURCE: {path}: no GGUF file that can be read ({shorten_error(error)}); fetch it again, or a file with weights "
            "of kind Q8_0"
        ) from None
    needed, there = header.data_start + max((one.offset + one.nbytes for one in tensors), default=0), path.stat().st_size
    if there < needed:
        raise CheckpointError(f"SOURCE: {path}: cut short: it has {there:,} of at least {needed:,} bytes; fetch it again")
    named = {
        key: str(values[f"general.{key}"])[:200] for key in ("name", "organization", "basename") if f"general.{key}" in values
    }
    return {
        "source": path.name,
        "format": "gguf",
        "files": {path.name: file_hash(path)},
        "licence": str(values.get("general.license", UNKNOWN))[:200],
        "named": named,
        "weights": dict(sorted(types.items())),
    }, {one.name: math.prod(one.shape) for one in tensors}


# a folder ----------------------------------------------------------------------------------------------------------------


def _load_folder(source: Path) -> _Source:
    """Load the model of a `transformers` folder. Raises CheckpointError, ConfigError."""
    if any((source / name).exists() for name in _ADAPTER) and not (source / "config.json").exists():
        raise ConfigError(
            f"SOURCE: {source}: an adapter alone, without the base's weights; name its base, and the adapter beside it: "
            f"consilium models import BASE --adapter {source} -o FOLDER"
        )
    if not source.is_dir():
        raise CheckpointError(f"SOURCE: {source}: no such folder or GGUF file; give a GGUF file or a transformers folder")
    refuse_adapter(source)
    config = read_json(source, "config.json")
    if (kind := config.get("model_type")) in TextEncoderConfig.apart and not config.get("is_decoder"):
        place = json.dumps(str(source.resolve()), ensure_ascii=False)  # whole, and quoted for YAML
        raise ConfigError(
            f"SOURCE: {source}: {kind!r} is a text encoder, which needs no import; name the folder in job.yaml: "
            f"model: {{name: text_encoder, variant: folder, checkpoint: {place}, config: {place}}}"
        )
    try:
        model = build_causal_lm("folder", source, config)
    except CheckpointError as error:
        if config.get("tie_word_embeddings") is False and "lm_head.weight is missing" in str(error):
            raise CheckpointError(
                f"SOURCE: {source / 'config.json'}: tie_word_embeddings: false: the weights hold no lm_head.weight; write true "
                "there, or fetch all parts"
            ) from None
        raise
    tokenizer = load_tokenizer("folder", source, config)
    files = [WEIGHTS] if (source / WEIGHTS).exists() else sorted(set(read_json(source, INDEX)["weight_map"].values()))
    kinds, embeddings = Counter[str](), dict[str, Tensor]()
    for name in files:
        with safe_open(source / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                kinds[file.get_slice(key).get_dtype()] += 1
                if key == "lm_head.weight" or key.endswith("embed_tokens.weight"):
                    embeddings[key.removesuffix(".weight").rpartition(".")[2]] = file.get_tensor(key)
    head, rows = embeddings.get("lm_head"), embeddings.get("embed_tokens")
    # transformers ignores a tied model's own lm_head.weight without a message
    if config.get("tie_word_embeddings") is True and head is not None and rows is not None and not torch.equal(head, rows):
        raise CheckpointError(
            f"SOURCE: {source / 'config.json'}: tie_word_embeddings: true: the weights hold an lm_head.weight of their own; "
            "write false there"
        )
    if bad := sorted(kind for kind in kinds if not re.fullmatch(r"B?F\d+", kind)):
        raise CheckpointError(
            f"SOURCE: {source}: weights of type {bad[0]}, whole numbers or others without their scales; import the original "
            "folder, or a GGUF file"
        )
    told = {
        "source": source.resolve().name,
        "format": "transformers",
        "files": {name: file_hash(source / name) for name in ("config.json", *files)},
        "licence": licence_of(source),
        "named": {},
        "weights": dict(sorted(kinds.items())),
    }
    # one dtype that holds all weights without rounding
    dtype = torch.bfloat16 if set(kinds) == {"BF16"} else torch.float16 if set(kinds) == {"F16"} else torch.float32
    return _Source(model, tokenizer, told, dtype, source)


def licence_of(folder: Path) -> str:
    """Return the licence in a folder's provenance.json, or else in the first lines of its README.md, as model hubs read it.

    It is one line, because it becomes a line of a model card's fields.
    """
    if (folder / PROVENANCE).is_file():
        return shown(read_json(folder, PROVENANCE).get("licence", UNKNOWN), 200)
    path = folder / "README.md"
    if not path.is_file() or path.is_symlink() or path.stat().st_size > LONGEST_TEMPLATE:
        return UNKNOWN
    found = re.match(r"---\n(.*?)\n---", path.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    try:
        top = yaml.safe_load(found[1]) if found else None
    except (yaml.YAMLError, RecursionError):
        return UNKNOWN
    licence = top.get("license") if isinstance(top, dict) else None
    return shown(licence, 200) if isinstance(licence, str) and licence else UNKNOWN


# an adapter ----------------------------------------------------------------------------------------------------------------


def merge_adapter(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """Merge a LoRA adapter in a PEFT folder into the model's weights, in place. Return its values for provenance.json.

    Raises ConfigError for an adapter that cannot be merged, CheckpointError for an adapter of another base.
    """
    from peft import LoraConfig, get_peft_model
    from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict

    settings, where = read_json(folder, _ADAPTER[0]), f"--adapter: {folder}"
    kept = _lora_settings(settings, where)
    path = plain_file(folder, _ADAPTER[1])
    try:
        tensors = load_file(path)
        _check_rank(kept, tensors, where)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT reads an attribute that transformers has renamed
            adapted = get_peft_model(model, LoraConfig(**kept))
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{where}: does not belong to this base ({shorten_error(error)}); name the base it was trained on"
        ) from None
    wanted = {name: tensor.shape for name, tensor in get_peft_model_state_dict(adapted, save_embedding_layers=False).items()}
    if bad := sorted(
        name for name in wanted.keys() | tensors.keys() if wanted.get(name) != getattr(tensors.get(name), "shape", None)
    ):
        raise CheckpointError(f"{where}: tensor {shown(bad[0], 120)!r} does not fit this base; name the base it was trained on")
    if bad := sorted(name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()):
        raise CheckpointError(f"{where}: tensor {shown(bad[0], 120)!r} has NaN or Inf; fetch it again")
    head, rows = model.get_output_embeddings(), model.get_input_embeddings()
    base = getattr(head, "base_layer", head), getattr(rows, "base_layer", rows)
    if (hasattr(head, "base_layer") or hasattr(rows, "base_layer")) and base[0].weight is base[1].weight:
        raise ConfigError(
            f"{where}: it changes 'lm_head', whose weight the embeddings share; merge it by PEFT where they are apart"
        )
    set_peft_model_state_dict(adapted, tensors)
    adapted.merge_and_unload()
    return {
        "source": folder.resolve().name,
        "base": str(settings.get("base_model_name_or_path"))[:200],
        "files": {n: file_hash(folder / n) for n in _ADAPTER},
    }


def _lora_settings(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings for PEFT's LoraConfig. Raises ConfigError for other kinds of adapters and for unknown settings."""
    kind, start = settings.get("peft_type"), settings.get("init_lora_weights")
    problems = {
        f"{where}: peft_type {kind!r}: only LORA is merged; merge it by PEFT, and import the merged folder": kind != "LORA",
        f"{where}: init_lora_weights: {ascii(start)[:80]}: its base is not the original one; {REMEDY}": start not in _STARTS,
    }
    raise_first(problems)
    for key in ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern"):
        words = [value] if isinstance(value := settings.get(key) or (), str) else value
        if bad := next((word for word in words if not (isinstance(word, str) and _NAMES.fullmatch(word))), None):
            raise ConfigError(
                f"{where}: {key}: {ascii(bad)[:80]} is not a name of a layer; list the names, such as q_proj, or merge it by "
                "PEFT's merge_and_unload"
            )
    for key, value in settings.items():
        if key not in _KEPT | _UNREAD and value not in (None, False, "none", [], {}):
            raise ConfigError(f"{where}: {shown(key, 64)}: {ascii(value)[:80]} is not merged here; {REMEDY}")
    return {key: value for key, value in settings.items() if key in _KEPT and value is not None}


def _check_rank(kept: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise ConfigError for a rank above the ranks of the adapter's tensors, before layers of that rank use memory."""
    largest = max((len(tensor) for name, tensor in tensors.items() if ".lora_A." in name and tensor.ndim), default=0)
    patterns = kept.get("rank_pattern") or {}
    ranks = [kept.get("r", 8), *(patterns.values() if isinstance(patterns, dict) else ())]
    if bad := next((rank for rank in ranks if type(rank) is not int or not 0 < rank <= largest), None):
        raise ConfigError(
            f"{where}: a rank of {ascii(bad)[:40]} does not fit this base with the adapter's tensors, of at most {largest} "
            "rows; fetch it again"
        )


# checks --------------------------------------------------------------------------------------------------------------------


def _notes(provenance_values: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, source: Path) -> list[str]:
    """Return notes for the user. Raises CheckpointError if the chat template of `source` renders no conversation."""
    quantized = [kind for kind in provenance_values["weights"] if not re.fullmatch(r"B?F\d+", kind)]
    base, name, said = provenance_values.get("adapter", {}).get("base", ""), str(provenance_values["source"]), ""
    if tokenizer.chat_template:
        try:
            said = Prompt("chat", tokenizer).default_system
        except ConfigError as error:
            why = str(error).removeprefix("task.prompt: 'chat': ").rpartition("; ")[0]
            raise CheckpointError(f"SOURCE: {source}: chat template: {why}; give another by --template FILE") from None
    notes = {
        f"weights were kept as {', '.join(quantized)}: they are the quantized model's, not the original's": quantized,
        "the source names no licence; write it with --licence NAME once you know it": provenance_values["licence"] == UNKNOWN,
        f"the adapter names {shown(base, 120)!r} as its base; its layers fit {shown(name, 120)!r}": (
            base and Path(base).name.lower() != Path(name).stem.lower()
        ),
        "no chat template: use task.prompt alpaca or a template of your own; or import with --template FILE": (
            not tokenizer.chat_template
        ),
        f"its chat template adds a system prompt of its own: {shown(said, 200)!r}": said,
    }
    return only_true(notes)
