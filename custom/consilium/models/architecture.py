"""Sections of job.yaml for models of `transformers` in a local folder. The job contains their config.json.

The server has no weights but must know the shapes of all adapter tensors. So a job contains the architecture as `model.config`,
the contents of the folder's config.json. Server and sites build the model from it on the meta device, and a site with a
checkpoint of another architecture gets an error.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from consilium.core.errors import CheckpointError, ConfigError
from consilium.core.lazy import lazy
from consilium.core.schema import LONGEST_TEXT
from consilium.models.registry import ModelConfig, TargetSet

MERGED = (
    "merge it into its base first: PeftModel.from_pretrained(BASE, FOLDER).merge_and_unload().save_pretrained(NEW), copy the "
    "base's tokenizer and preprocessor files to NEW, and give NEW"
)
_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
"""Files that PEFT writes. The settings can name a base anywhere on the disk, so they are never read here."""


def refuse_adapter(path: Path, field: str = "model.checkpoint") -> None:
    """Raise CheckpointError for a folder with a PEFT adapter, alone or beside a base, and for a file of such an adapter."""
    places = [path / name for name in _FILES] if path.is_dir() else [path] if path.name in _FILES else []
    if found := next((place for place in places if os.path.lexists(place)), None):
        raise CheckpointError(f"{field}: {found}: belongs to an adapter of PEFT's, which is not a base; {MERGED}")


GGUF = ".gguf"


def gguf_files(path: Path) -> list[Path]:
    """Return the GGUF file at `path`, or those in a folder without a model of `transformers`. llama.cpp reads such files."""
    if path.is_dir():
        return [] if (path / "config.json").exists() else sorted(path.glob(f"*{GGUF}"))
    return [path] if path.suffix.lower() == GGUF and path.is_file() else []


def refuse_gguf(path: Path, field: str = "model.checkpoint") -> None:
    """Raise CheckpointError for a GGUF file, and for a folder of such files alone."""
    if found := gguf_files(path):
        raise CheckpointError(
            f"{field}: {path}: GGUF, which no job reads; import it once: consilium models import {found[0]} -o FOLDER, and "
            "name FOLDER here"
        )


def require_multiple(side: int, step: int, what: str) -> None:
    """Raise ConfigError if a picture's side is not a multiple of `step` pixels. `what`: the step in words, for the message."""
    if side % step:
        near = max(1, round(side / step)) * step
        raise ConfigError(f"model.image_size: {side} is not a multiple of {what}; use {near}")


class FolderConfig(ModelConfig):
    """Base of the `model:` sections that can use a folder of `transformers`.

    `config`: the contents of the folder's config.json, or its path, which is replaced by the contents when the job is made.
    """

    checkpoint: Annotated[
        str | None,
        Field(
            validate_default=True,
            description="the path of the weights or, for variant `folder`, of the folder; may start with `${SITE}`, the site's "
            "checkpoint folder",
        ),
    ] = None
    config: Annotated[
        dict[str, Any] | None,
        Field(validate_default=True, description="the folder's config.json: its path, its folder's path, or its contents"),
    ] = None

    apart: ClassVar[tuple[str, ...]] = ()
    """Architectures (`model_type`) known to treat the rows of a batch independently. Experts and recurrences may not."""

    @field_validator("config", mode="before")
    @classmethod
    def _check_embedded(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(
                "the contents of config.json: paths are read only where a job is made; run `consilium export JOB --output "
                "FOLDER`, and give FOLDER/NAME instead"
            )
        return value

    @field_validator("config")
    @classmethod
    def _check_config(cls, value: Any) -> Any:
        if value is None:
            return None
        if "peft_type" in value:
            raise ValueError(f"the config.json of a model; these are the settings of an adapter of PEFT's: {MERGED}")
        return check_and_clean_config({name: value[name] for name in sorted(value)})

    @field_validator("checkpoint", "config")
    @classmethod
    def _check_fits_variant(cls, value: Any, info: ValidationInfo) -> Any:
        variant, field = info.data.get("variant"), str(info.field_name)
        if value is None and variant == "folder":
            wanted = {"checkpoint": "the path of a transformers folder", "config": "the path of its config.json"}
            raise ValueError(f"{wanted[field]}; variant folder needs both checkpoint and config")
        if value is not None and variant != "folder" and field == "config":
            raise ValueError(f"none: variant {variant!r} has an architecture of its own; remove it, or use variant folder")
        return value

    def check_per_sample_gradients(self) -> None:
        """See ModelConfig. Raises ValueError."""
        if self.config is None:
            return
        if (kind := self.config.get("model_type")) not in self.apart:
            raise ValueError(
                f"model.config.model_type: {kind!r}: not known to keep records apart for privacy.unit record; use one of "
                f"{', '.join(self.apart)}"
            )
        for key, value in config_values(_DRAWN.get(kind, {}) | self.config):
            if found := _why_records_mix(key, value, kind):
                what, remedy = found
                raise ValueError(f"model.config.{key}: {value!r} {what} under privacy.unit record; {remedy}")

    @property
    def rope_depends_on_batch(self) -> bool:
        """Whether the frequencies of the rotary position embedding (RoPE) depend on the longest text of a batch.

        Records of a batch would then influence each other.
        """
        return any(_rope_depends_on_batch(key, value) for key, value in config_values(self.config or {}))


Channels = tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=0, le=1)]]
_Deviation = Annotated[float, Field(ge=0.001, le=1)]  # it divides pixels
Deviations = tuple[_Deviation, _Deviation, _Deviation]
HALF = (0.5, 0.5, 0.5)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OPENAI = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PIXELS: dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    **dict.fromkeys(("siglip", "siglip2", "vit", "paligemma", "gemma3", "sam3_tracker", "sam3_video"), (HALF, HALF)),
    **dict.fromkeys(("clip", "clip_vision_model", "qwen2_vl", "qwen2_5_vl", "llava"), OPENAI),
    "qwen3_vl": (HALF, HALF),
}
"""Mean and standard deviation of pixels in 0..1 by architecture, as in the publishers' processors; others use ImageNet's."""


class PictureFolderConfig(FolderConfig):
    """Base of the sections of folder models that take pictures.

    `pixel_mean` and `pixel_std`, in 0..1, must equal those of the folder's preprocessor_config.json. By default they are the
    architecture's usual ones. A site whose folder has other values gets an error.
    """

    image_size: Annotated[
        int,
        Field(
            ge=16,
            le=4096,
            description="side of the pictures in pixels, a multiple of the patch size; for a folder its own size, for a SAM "
            "folder also smaller",
        ),
    ]
    pixel_mean: Annotated[
        Channels | None,
        Field(
            description="mean of the pixels in 0..1, for a folder whose preprocessor_config.json differs from the "
            "architecture's usual values"
        ),
    ] = None
    pixel_std: Annotated[
        Deviations | None, Field(description="standard deviation of the pixels in 0..1, over 0; see `pixel_mean`")
    ] = None

    @field_validator("pixel_mean", "pixel_std")
    @classmethod
    def _check_only_for_folder(cls, value: Channels | None, info: ValidationInfo) -> Channels | None:
        if value is not None and info.data.get("variant") != "folder":
            raise ValueError("none: only a folder's pixels may differ; remove it, or use variant folder")
        return value

    @property
    def pixel_normalization(self) -> tuple[Channels, Channels]:
        """Mean and standard deviation, in 0..1, with which the model's pixels are normalized."""
        mean, deviation = PIXELS.get(str((self.config or {}).get("model_type")), IMAGENET)
        return self.pixel_mean or mean, self.pixel_std or deviation

    @property
    def padding(self) -> tuple[int, int, int]:
        """See ModelConfig."""
        red, green, blue = (round(255 * one) for one in self.pixel_normalization[0])
        return red, green, blue


_NOTES = frozenset(
    {"id2label", "label2id", "auto_map", "_name_or_path", "_commit_hash"}
    | {"tokenizer_class", "task_specific_params", "prefix", "finetuning_task"}
)
"""Keys of a config.json that do not influence a model's layers. They are left out at every depth.

They hold the publisher's class names (sometimes thousands), its folder, its own code, and settings of pipelines.
"""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*|[0-9]{1,4}", re.ASCII)
"""An allowed key: a setting's name, or the number of a layer with its own settings."""
_WORD = re.compile(r"[A-Za-z0-9_.+-]*", re.ASCII)
"""The allowed characters of a text value, which exclude paths, repositories, addresses and sentences."""
IMPLEMENTATIONS = {
    "attn_implementation": ("eager", "sdpa"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
"""Keys that choose a layer's implementation, with the values whose code is part of `transformers`."""
_COUNTS = re.compile(r"(layer|block|expert|head|stage|group|codebook|quantizer|label|predictor|level|depth)s?(_per_\w+)?$")
"""Keys of counts of modules or of list entries."""
_BLOCKS = 1024
_EXPERTS = re.compile(r"experts$")
"""Counts of experts may be larger: they are often rows of a tensor, and modules are counted when they are created."""
_STAGES = re.compile(
    r"(^|_)depths?$|(^|_)(num|n|numb_of)_(\w+_)?(blocks|layers)$|(blocks|layers)_per_\w+$|^(blocks|layers)$|numb_of_layers$"
)
"""Keys of lists with the number of blocks per stage. The limit for one count holds for their sum."""
_DROPS = re.compile(r"drop")
_STATIC = ("default", "linear", "llama3", "yarn")
"""Types of rotary positions with the same frequencies for every text; dynamic and longrope depend on a batch's longest text."""
_DRAWN: dict[str, dict[str, Any]] = {"dinov3_vit": {"pos_embed_rescale": 2.0}}
"""Random augmentations that an architecture has by default."""
_DRAWS = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")


def check_and_clean_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without the keys in _NOTES. Raises ValueError, beginning with the key, for a forbidden entry.

    Keys must be names that do not begin with `_`. Text values must not be paths, addresses or sentences. Implementations must
    be part of `transformers`. The check does not import `transformers`, so it runs when a job is read.
    `keep_listed_keys` of untrusted_config.py also checks by architecture.
    """
    found: dict[str, Any] = _checked(dict(config), "", "")
    return found


def _checked(value: Any, where: str, key: str, depth: int = 0) -> Any:
    """Return an entry of a config.json without notes. `where`: its dotted place; `key`: the last key of it.

    Raises ValueError for a forbidden entry, and for one that would make building the model take minutes or gigabytes. The
    server builds the model on the meta device. Tensor sizes cost nothing there, but every layer or expert is a module.
    """
    if isinstance(value, dict | list | tuple):
        if len(value) > 1024 or depth > 8:
            raise ValueError(f"{key or 'a map'} of at most 1024 entries, nested 8 deep at most")
        if isinstance(value, dict):
            kept = {name: f"{where}.{name}" if where else str(name) for name in value}
            return {
                name: _checked(value[name], place, str(name)[:64], depth + 1)
                for name, place in kept.items()
                if _is_setting(name, value[name], place)
            }
        if _STAGES.search(key) and not _total(value) <= _BLOCKS:
            raise ValueError(f"{key} of at most {_BLOCKS} in all")
        return [_checked(item, where, key, depth + 1) for item in value]
    if isinstance(value, int | float):
        most = 2**14 if _EXPERTS.search(key) else _BLOCKS if _COUNTS.search(key) else 2**25
        most = 2**40 if isinstance(value, float) or "theta" in key else most
        if not abs(value) <= most:  # so that NaN does not pass
            raise ValueError(f"{key} of at most {most}")
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        raise ValueError(f"{key} of at most {LONGEST_TEXT} characters")
    if isinstance(value, str) and not _WORD.fullmatch(value):
        raise ValueError(
            f"{where}: {ascii(value)[:64]} is not a single word of letters, digits and _ . + -; leave it out: files, "
            "repositories and code are never named here"
        )
    return value


def _is_setting(key: Any, value: Any, where: str) -> bool:
    """Return whether an entry of a map is kept: it influences the model's layers. Raises ValueError for a forbidden one."""
    hidden = str(key).startswith("_")  # written by `transformers` for its own use
    if key in _NOTES or (hidden and (value is None or value == "" or isinstance(value, bool | int | float))):
        return False
    if hidden or not (isinstance(key, str) and _NAME.fullmatch(key)):
        raise ValueError(f"{ascii(where)[1:-1][:64]}: no key of a config.json, which begins with a letter; leave it out")
    if (known := IMPLEMENTATIONS.get(key)) and value is not None and value not in known:
        raise ValueError(f"{where}: {ascii(value)[:64]} names code of another place; use {' or '.join(known)}")
    return True


def config_values(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested config.json with their dotted keys."""
    if not isinstance(value, dict):
        yield key, value
        return
    for name, item in value.items():
        yield from config_values(item, f"{key}.{name}" if key else str(name))


def _rope_depends_on_batch(key: str, value: Any) -> bool:
    """Return whether an entry of a config.json names rotary positions that depend on the text (or picture)."""
    own = key.rpartition(".")[2]
    return (own.endswith("rope_type") or (own == "type" and "rope" in key)) and value not in (*_STATIC, "axial")


def _why_records_mix(key: str, value: Any, kind: str) -> tuple[str, str] | None:
    """Return why an entry of a config.json makes a record's gradient depend on its batch, and the remedy; else None."""
    own = key.rpartition(".")[2]
    if value and _DROPS.search(key):
        return "draws all masks of a batch at once, which ties records together", "use 0"
    if value and own in _DRAWS:
        return "is drawn for a whole batch at once, which has no gradient of one record", "use null"
    if _rope_depends_on_batch(key, value):
        return "follows the longest text of a batch, which ties records together", f"use one of {', '.join(_STATIC)}"
    if own == "model_type" and str(value).partition("_")[0] != kind.partition("_")[0]:
        return "is a part of another architecture, not known to keep records apart", f"use {kind}'s own"
    return None


def _total(value: list[Any] | tuple[Any, ...]) -> float:
    """Return the sum of the absolute numbers in a list and its nested lists."""
    nested = (one for one in value if isinstance(one, list | tuple | int | float))
    return sum(abs(one) if isinstance(one, int | float) else _total(one) for one in nested)


def named_sets(tower: str = "") -> dict[str, TargetSet]:
    """Return the named target sets. `paper` means qkv.

    Each set finds its layers by their function in the model, or in its part `tower`.
    """
    names = ("paper", "qv", "qkv", "attention", "all-linear")
    return {name: TargetSet(select=lazy("consilium.models.targets:pattern", name, tower)) for name in names}
