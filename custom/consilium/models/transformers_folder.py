"""Loads models and tokenizers of `transformers` from a local folder. The weights must fit the config.json exactly.

Nothing is downloaded, and no code of a folder runs. By default `transformers` would ask on the terminal whether it may.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from consilium.core.errors import STOPS, CheckpointError, ConfigError
from consilium.models.architecture import config_values, refuse_gguf
from consilium.models.untrusted_config import keep_listed_keys
from consilium.models.untrusted_folder import TOKENS, WANTED, link_tokenizer, link_weights, read_json
from consilium.models.untrusted_tokenizer import check_backend
from consilium.models.weight_files import quiet_transformers

_SLOW = "convert it once where sentencepiece is installed: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
_PACKED = "weights that are quantized already are not read; use the original folder, with model.dtype: nf4 or int8"
_OTHERS_HEAD = re.compile(r"(^|\.)(classifier|pooler|score|lm_head|qa_outputs|head)\.")
_PLAIN = "the folder's model is made for another task; give the folder of the model that it was made from"
UNSUPPORTED = frozenset(
    {
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling2_loop", "jamba", "longcat_flash", "mamba", "mamba2",
        "nemotron_h", "reformer", "rwkv", "xlstm", "zamba2",
    }
)  # fmt: skip
"""Architectures whose code reads the weights of linear layers past the layers, rescales them, or hashes at random. An adapter
there may train nothing, and low precision changes results. tests/models/test_read_weights.py compares with the code."""
_OWN: dict[str, Any] = {"trust_remote_code": False}
"""Options for loading with the classes of `transformers` only."""
LEAST = 8
"""The fewest tokens that must be possible for a prompt, as in `model.max_length`."""
PIXELS = ("pixel_mean", "pixel_std")
PREPROCESSOR = ("preprocessor_config.json", "processor_config.json")


class Known(NamedTuple):
    """The kind of model that a folder must hold, and known examples, for messages.

    `among`: the auto class of `transformers` whose architectures are accepted, by default the one that builds the model.
    `spare`: a pattern of tensors that a checkpoint may have in addition, or lack. `lacking`: the remedy if it lacks other
    tensors.
    """

    what: str
    examples: str
    among: Any = None
    spare: str = "(?!)"
    lacking: str = ""


def build(
    auto: Any, folder: Path | None, config: Mapping[str, Any] | None, weights: bool, known: Known, **options: Any
) -> PreTrainedModel:
    """Return a model built by the auto class `auto`, float32, with the folder's weights; without `weights` only its structure.

    `config`: the contents of its config.json; None reads it from the folder. `options` are passed to `transformers`. Raises
    CheckpointError for a missing, damaged or unfitting checkpoint, ConfigError for an unknown architecture.
    """
    if config is None:
        path = _require_folder(folder) / "config.json"
        if not path.is_file():
            raise CheckpointError(f"model.checkpoint: {path}: no such file; {WANTED}")
        config = read_json(path.parent, path.name)
    shape = transformers_config(config, known.among or auto, known)
    try:
        if weights:
            return _build_with_weights(auto, folder, shape, options, known)
        return auto.from_config(shape, dtype=torch.float32, **_OWN, **options)  # type: ignore[no-any-return]
    except (CheckpointError, ConfigError, MemoryError):
        raise
    except ImportError as error:
        found = re.search(r"requires the (\S+) library", str(error))
        what = (
            f"needs the package {found[1]}, which is not here" if found else f"cannot be loaded here ({shorten_error(error)})"
        )
        raise ConfigError(f"model.config: {shape.model_type!r} {what}; use another model") from None
    except Exception as error:  # each architecture fails in its own way
        raise ConfigError(
            f"model.config: {shape.model_type!r} cannot be made of these sizes ({shorten_error(error)}); give the contents "
            "of the model's config.json"
        ) from None


def load_tokenizer(
    folder: Path | None, config: Mapping[str, Any] | None = None, writes: bool = True
) -> PreTrainedTokenizerBase:
    """Return the tokenizer in the folder of the weights. `config`: the model's config.json, to check the vocabulary's size.

    A padding token without a row in the model is removed, because padding is never read. Raises CheckpointError if there is no
    usable tokenizer, if its tokens exceed the model's, or if it has no end-of-text token and the model `writes` texts.
    """
    folder = _require_folder(folder)
    only_slow = (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file()
    wanted = f"tokenizer.model alone is not enough: {_SLOW}" if only_slow else WANTED
    with link_tokenizer(folder) as view:
        if not any((view / name).exists() for name in TOKENS):
            raise CheckpointError(f"model.checkpoint: {folder}: no tokenizer to read (no tokenizer.json); {wanted}")
        try:
            tokenizer = AutoTokenizer.from_pretrained(view, local_files_only=True, **_OWN)
        except STOPS:
            raise
        except BaseException as error:  # each class fails in its own way, and a panic of the library is not an Exception
            why = shorten_error(error, view, folder)
            raise CheckpointError(f"model.checkpoint: {folder}: no tokenizer to read ({why}); {wanted}") from None
        tokenizer.name_or_path = tokenizer.init_kwargs["name_or_path"] = str(folder)
    check_backend(tokenizer, str(folder))
    if writes and tokenizer.eos_token_id is None:
        raise CheckpointError(f"model.checkpoint: {folder}: its tokenizer has no eos_token; name one in tokenizer_config.json")
    _fit_tokenizer_to_model(folder, tokenizer, config or {})
    return tokenizer


def _fit_tokenizer_to_model(folder: Path, tokenizer: Any, config: Mapping[str, Any]) -> None:
    text = config.get("text_config")
    rows = (text if isinstance(text, dict) else config).get("vocab_size")
    if not isinstance(rows, int):
        return
    # Special tokens may have larger numbers, because no text contains them; those of Code Llama 34B do.
    named = {"eos_token": tokenizer.eos_token_id, "bos_token": tokenizer.bos_token_id}
    if len(tokenizer) > rows:
        special = {*tokenizer.all_special_ids, *(i for i, one in tokenizer.added_tokens_decoder.items() if one.special)}
        named |= {f"token {token!r}": at for token, at in tokenizer.get_vocab().items() if at not in special}
    found = next((f"{name} is number {at}" for name, at in named.items() if at is not None and at >= rows), "")
    if found:
        raise CheckpointError(
            f"model.checkpoint: {folder}: its tokenizer's {found}, of the model's {rows} tokens; copy the tokenizer that the "
            "model was trained with"
        )
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id >= rows:
        tokenizer.pad_token = None


def context_length(model: nn.Module) -> int:
    """Return a model's context length in tokens; 2**30 if its config names none.

    `transformers` knows the other names of `max_position_embeddings` (`n_positions`), all but MPT's. RoBERTa's positions begin
    after that of padding: of 514 rows, texts use 512.
    """
    shape = getattr(model, "config", None)
    text = shape.get_text_config() if isinstance(shape, PreTrainedConfig) else shape
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    rows = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    unused = max((one.padding_idx + 1 for one in rows if getattr(one, "padding_idx", None) is not None), default=0)
    # XLNet has -1, which means no limit
    return next((limit - unused for limit in limits if isinstance(limit, int) and limit > 0), 2**30)


def max_prompt_tokens(model: nn.Module, written: int) -> int:
    """Return how many tokens a prompt may have if `written` tokens follow. Raises ConfigError if fewer than LEAST are left."""
    left = context_length(model) - written
    if left < LEAST:
        raise ConfigError(
            f"task.max_new_tokens: {written}: of the model's {context_length(model)} positions {max(left, 0)} are left for a "
            f"prompt; use {max(context_length(model) - LEAST, 1)} or less"
        )
    return left


def require_positions(model: PreTrainedModel, longest: int, written: int) -> None:
    """Raise ConfigError if `longest` (`model.max_length`) exceeds the model's positions, or `written` leaves none for a prompt.

    Rotary positions may exceed the model's length, but dynamic ones may not: they would depend on the longest text that the
    process has read.
    """
    most, turned = context_length(model), getattr(model.config.get_text_config(), "rope_parameters", None)
    max_prompt_tokens(model, written)
    if longest <= most:
        return
    if not turned:
        raise ConfigError(f"model.max_length: {longest}: this folder's model has {most} positions; use {most} at most")
    if "dynamic" in str(turned):
        raise ConfigError(
            f"model.max_length: {longest}: over {most} tokens its dynamic rotary positions follow the texts that were read "
            f"before; use {most} at most, or rope_type linear or yarn"
        )


def require_normalization(folder: Path | None, mean: tuple[float, ...], deviation: tuple[float, ...]) -> None:
    """Raise CheckpointError if a folder's preprocessor normalizes pixels differently from the job."""
    for name in PREPROCESSOR if folder is not None else ():
        path = Path(folder or "", name)
        found = read_json(path.parent, name) if path.is_file() else {}
        found = found.get("image_processor", found)
        for key, field, ours in (("image_mean", "pixel_mean", mean), ("image_std", "pixel_std", deviation)):
            theirs = found.get(key) if isinstance(found, dict) else None
            each = theirs if isinstance(theirs, list) else [theirs] * len(ours)  # one number is for all channels
            known = [round(one, 3) if isinstance(one, int | float) else one for one in each]
            if theirs is not None and known != [round(one, 3) for one in ours]:
                raise CheckpointError(f"model.{field}: {list(ours)}: {path} has {key} {theirs}; write {each} into the job")


def set_evaluation_mode(model: Any, use_checkpointing: bool) -> Any:
    """Return the model in evaluation mode, with gradient checkpointing if asked. Raises ConfigError if its code has none."""
    try:
        if use_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        return model.eval()
    except ValueError:
        raise ConfigError(
            f"training.gradient_checkpointing: true: the blocks of {model.config.model_type!r} cannot be computed again in the "
            "backward pass; use false"
        ) from None


def remove_generation_config(model: PreTrainedModel) -> None:
    """Remove a folder's generation_config, which would change greedy answers silently.

    Router logits are disabled too, because their loss is defined for whole texts, not for single steps of generation.
    """
    model.generation_config = GenerationConfig()
    for shape in (model.config, model.config.get_text_config()):
        if getattr(shape, "output_router_logits", False):
            shape.output_router_logits = False


def add_head(model: Any, names: Iterable[str], width: int, outputs: int, known: Known) -> None:
    """Add a linear `head` that starts at zero, and `pooled`, the module before it.

    Raises ConfigError if the encoder has one of the `names` itself.
    """
    if taken := next((name for name in names if hasattr(model, name)), None):
        raise ConfigError(
            f"model.config: model_type {model.config.model_type!r} has a {taken!r} of its own, where ours would stand; known "
            f"are {known.examples}"
        )
    model.head, model.pooled = nn.Linear(width, outputs), nn.Identity()
    for tensor in model.head.parameters():
        nn.init.zeros_(tensor)


def register_normalization(model: nn.Module, pixels: tuple[Any, Any]) -> None:
    """Add the mean and standard deviation of pixels, scaled to 0..255, to a model as buffers outside of its state dict."""
    for name, values in zip(PIXELS, pixels, strict=True):
        model.register_buffer(name, 255 * torch.tensor(values).view(3, 1, 1), persistent=False)


def extend_class(model: Any, ours: type) -> None:
    """Change a model's class, in place, to one that derives from `ours` and from the model's own class."""
    model.__class__ = type(f"{ours.__name__}{type(model).__name__}", (ours, type(model)), {})


def restore_class(model: Any, *added: str, pixels: bool = True) -> None:
    """Undo `extend_class` and, with `pixels`, `register_normalization`; also remove the attributes `added`."""
    for name in (*(PIXELS if pixels else ()), *added):
        delattr(model, name)
    model.__class__ = type(model).__mro__[2]


def require_no_running_means(model: nn.Module, what: str) -> None:
    """Raise ConfigError for a model with batch norm, whose running means would change although the model is frozen."""
    if found := next((n for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)), None):
        raise ConfigError(f"model.config: {what}: {found!r} keeps running means of what it trains on; use a transformer")


def _require_folder(folder: Path | None) -> Path:
    if folder is None:
        raise CheckpointError(f"model.checkpoint: missing; variant folder needs its weights by path: {WANTED}")
    refuse_gguf(folder)
    if not folder.is_dir():
        raise CheckpointError(f"model.checkpoint: {folder}: no such folder; {WANTED}")
    return folder


def transformers_config(config: Mapping[str, Any], auto: Any, known: Known) -> PreTrainedConfig:
    """Return `transformers`' configuration of a config.json, for a model of one of `auto`'s classes. Raises ConfigError."""
    if config.get("quantization_config"):
        raise ConfigError(f"model.config.quantization_config: {_PACKED}")
    sizes = keep_listed_keys(config)
    kind = sizes.pop("model_type", None)
    try:
        shape = AutoConfig.for_model(kind, **sizes)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.config: model_type {kind!r}: {shorten_error(error)}; known are {known.examples}") from None
    except Exception as error:  # transformers' own validation errors share no base
        raise ConfigError(f"model.config: {shorten_error(error)}; give the contents of the model's config.json") from None
    if type(shape) not in auto._model_mapping:
        raise ConfigError(f"model.config: model_type {kind!r} is not a {known.what}; known are {known.examples}")
    parts = (value for key, value in config_values(shape.to_dict()) if key.rpartition(".")[2] == "model_type")
    if found := sorted(UNSUPPORTED.intersection(map(str, parts))):
        raise ConfigError(
            f"model.config: model_type {found[0]!r}: its code uses weights past their layers, so no adapter fits; known are "
            f"{known.examples}"
        )
    return shape


def _build_with_weights(
    auto: Any, folder: Path | None, shape: PreTrainedConfig, options: Mapping[str, Any], known: Known
) -> PreTrainedModel:
    """Return the model with the folder's weights. A missing, extra or differently shaped tensor raises CheckpointError."""
    folder = _require_folder(folder)
    if (folder / "config.json").is_file() and read_json(folder, "config.json").get("quantization_config"):
        raise CheckpointError(f"model.checkpoint: {folder}: {_PACKED}")
    remedy = f"convert it once: {auto.__name__}.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
    with link_weights(folder, remedy) as view, quiet_transformers():
        try:
            model, found = auto.from_pretrained(
                view,
                config=shape,
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **_OWN,
                **options,
            )
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
            why = shorten_error(error, view, folder)
            raise CheckpointError(f"model.checkpoint: {folder}: cannot be read ({why}); {WANTED}") from None
    model.name_or_path = model.config._name_or_path = str(folder)
    for kind, what in (
        ("mismatched_keys", "of another shape"),
        ("missing_keys", "missing"),
        ("unexpected_keys", "one too many"),
    ):
        names = sorted(str(key[0] if isinstance(key, tuple) else key) for key in found[kind])
        if first := next((name for name in names if not re.fullmatch(known.spare, name)), ""):
            reason = f"another architecture than model.config: {first} is {what}"
            remedy = (
                known.lacking
                if kind == "missing_keys" and known.lacking
                else _PLAIN
                if _OTHERS_HEAD.search(first)
                else "copy the folder's config.json into model.config"
            )
            raise CheckpointError(f"model.checkpoint: {folder}: {reason}; {remedy}")
    return model


def shorten_error(error: BaseException, view: Path | None = None, folder: Path | None = None) -> str:
    """Return an error's text on one line of at most 120 characters, with the path of a `view` replaced by its `folder`."""
    text = str(error) if view is None else str(error).replace(str(view), str(folder))
    return " ".join(text.split())[:120] or type(error).__name__
