"""Views of model folders for `transformers`: temporary folders with links to allowed files only.

A model folder is untrusted. By default `transformers` also loads adapters and pickles from it, and files elsewhere that its
indices and settings name. `link_weights` and `link_tokenizer` make a folder of links for one load.
`models/transformers_folder.py` calls them.
"""

import json
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from consilium.core.errors import CheckpointError, ConfigError
from consilium.core.sanitize import shown
from consilium.models.untrusted_tokenizer import check_tokenizer_json, quoted
from consilium.models.weight_files import refuse_adapter, refuse_adapter_tensors, tensor_names

WANTED = "give a transformers folder with config.json, model.safetensors and tokenizer.json"
CODELESS = (
    "its tokenizer is code of its own, which never runs here; give a folder with tokenizer.json and a class of transformers"
)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PROGRAM = "tokenizer.json"
VOCABULARIES = ("vocab.json", "merges.txt", "vocab.txt")
"""Files from which a class of `transformers` makes a tokenizer if there is no tokenizer.json."""
TOKENS = (PROGRAM, "vocab.json", "vocab.txt")
"""Files of which a tokenizer needs at least one."""
LARGEST_JSON = 64 * 2**20
"""The most bytes of a JSON file or a vocabulary; Gemma 3's tokenizer.json has 33 million."""
LONGEST_TOKEN = 1024
LONGEST_TEMPLATE = 2**20
_SHARD = re.compile(r"[A-Za-z0-9_][\w.-]*\.safetensors", re.ASCII)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5")
_CLASS = re.compile(r"[A-Za-z]\w*(Tokenizer|TokenizerFast|Backend)", re.ASCII)
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
_VERSION = re.compile(r"[0-9a-z.+]{1,32}", re.ASCII)
_FLAGS = frozenset(
    {
        "add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces", "do_basic_tokenize",
        "do_lower_case", "fix_mistral_regex", "keep_accents", "legacy", "remove_space", "spaces_between_special_tokens",
        "split_special_tokens", "strip_accents", "tokenize_chinese_chars", "trim_offsets", "use_default_system_prompt",
    }
)  # fmt: skip
_WORDS = {
    "padding_side": ("left", "right"),
    "truncation_side": ("left", "right"),
    "errors": ("strict", "ignore", "replace"),
}
_TOKEN = re.compile(r"[a-z][a-z0-9_]{0,63}_token", re.ASCII)
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_ADDED = {"content": str, "lstrip": bool, "normalized": bool, "rstrip": bool, "single_word": bool, "special": bool}


@contextmanager
def name_field_in_errors(field: str, wanted: str = WANTED) -> Iterator[None]:
    """Within the context, errors about a folder name `field` instead of model.checkpoint, and `wanted` for a missing file."""
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        text = str(error).replace("model.checkpoint:", f"{field}:", 1).replace(WANTED, wanted)
        text = text.replace("another architecture than model.config", "another architecture than its config.json says")
        text = text.replace("copy the folder's config.json into model.config", "fetch weights and config.json again")
        raise type(error)(re.sub(r"\Amodel\.config\b", f"{field}: config.json", text)) from None


@contextmanager
def link_weights(folder: Path, remedy: str) -> Iterator[Path]:
    """Yield a temporary folder with links to model.safetensors, or to the parts that its index names.

    Raises CheckpointError for missing weights or an adapter, with `remedy` for weights that are pickles.
    """
    refuse_adapter(folder)
    with _temporary_view() as view:
        if _is_present(folder / WEIGHTS):
            _link(view, folder, WEIGHTS)
            refuse_adapter_tensors(folder / WEIGHTS, tensor_names(view / WEIGHTS))
        elif _is_present(folder / INDEX):
            parts = _tensor_files(folder)
            refuse_adapter_tensors(folder / INDEX, parts)
            for name in sorted(set(parts.values())):
                _link(view, folder, name)
            (view / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": parts}), encoding="utf-8")
        else:
            found = next((path.name for form in _PICKLES for path in sorted(folder.glob(form))), None)
            what = "no such file" if found is None else f"missing, and {shown(found, 64)!r} may be a pickle, which is not read"
            raise CheckpointError(f"model.checkpoint: {folder / WEIGHTS}: {what}; {WANTED if found is None else remedy}")
        (view / "generation_config.json").write_text("{}", encoding="utf-8")  # transformers fails without one
        yield view


def _tensor_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor from the index. Raises CheckpointError for an entry that is not a plain file name."""
    path = folder / INDEX
    found = read_json(folder, INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(
            f"model.checkpoint: {path}: weight_map: {quoted(found)} is not a map of tensors to files; {WANTED}"
        )
    for tensor, name in found.items():
        if not (isinstance(name, str) and _SHARD.fullmatch(name)):
            raise CheckpointError(
                f"model.checkpoint: {path}: weight_map.{shown(tensor, 64)}: {quoted(name)} is not a name of a .safetensors "
                "file in the folder; fetch the index and its files again"
            )
    return dict(found)


@contextmanager
def link_tokenizer(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder with the tokenizer's files, its settings reduced to the keys that this module allows.

    Raises CheckpointError for settings of another form, and for a tokenizer.json that may grow or backtrack without bound.
    """
    model = read_json(folder, "config.json") if _is_present(folder / "config.json") else None
    given = read_json(folder, "tokenizer_config.json") if _is_present(folder / "tokenizer_config.json") else None
    name = given.get("tokenizer_class") if given and "auto_map" in given else None
    if isinstance(name, str) and not (
        _CLASS.fullmatch(name) and any(map(tokenizer_class_from_name, (name, name.removesuffix("Fast"))))
    ):  # its class is not part of `transformers`
        raise CheckpointError(f"model.checkpoint: {folder}: no tokenizer to read; {CODELESS}")
    with _temporary_view() as view:
        if model is not None:  # of its entries only the architecture, the tokenizer's class and the version that wrote it
            kind, named, version = (model.get(key) for key in ("model_type", "tokenizer_class", "transformers_version"))
            entries = {"model_type": kind} if isinstance(kind, str) and kind in CONFIG_MAPPING else {}
            if isinstance(named, str) and _CLASS.fullmatch(named):
                entries["tokenizer_class"] = named
            if isinstance(version, str) and _VERSION.fullmatch(version):
                entries["transformers_version"] = version
            (view / "config.json").write_text(json.dumps(entries), encoding="utf-8")
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if _is_present(folder / name):
                (view / name).write_text(json.dumps(_allowed_settings(folder, name)), encoding="utf-8")
        if _is_present(folder / "added_tokens.json"):
            added = read_json(folder, "added_tokens.json")
            for token, at in added.items():
                if type(at) is not int or not _is_token(token):
                    raise CheckpointError(
                        f"model.checkpoint: {folder / 'added_tokens.json'}: {shown(token, 64)}: {quoted(at)} is not a token's "
                        "number; use the file that the model's publisher ships"
                    )
            (view / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
        if _is_present(folder / "chat_template.jinja"):
            _link(view, folder, "chat_template.jinja", LONGEST_TEMPLATE)
        if _is_present(folder / PROGRAM):
            check_tokenizer_json(read_json(folder, PROGRAM), str(folder / PROGRAM))
        for name in (PROGRAM, *VOCABULARIES):
            if _is_present(folder / name):
                _link(view, folder, name, LARGEST_JSON)
        yield view


def _allowed_settings(folder: Path, name: str) -> dict[str, Any]:
    """Return the allowed part of a tokenizer's settings. Raises CheckpointError for an allowed key with an invalid value."""
    kept = dict[str, Any]()
    for key, value in read_json(folder, name).items():
        fits = _is_valid_setting(key, value)
        if fits is False:
            raise CheckpointError(
                f"model.checkpoint: {folder / name}: {shown(key, 64)}: {quoted(value)} is not a value of this key; use the "
                "file that the model's publisher ships"
            )
        kept |= {key: value} if fits else {}
    return kept


def _is_valid_setting(key: str, value: Any) -> bool | None:
    """Return whether an allowed key has a valid value; None for a key that is not allowed, which is left out."""
    if key in _FLAGS:
        return value is None or isinstance(value, bool)
    if key == "model_max_length":
        return value is None or (isinstance(value, int | float) and value > 0)
    if key in _WORDS:
        return value is None or value in _WORDS[key]
    if key == "tokenizer_class":
        return value is None or (isinstance(value, str) and _CLASS.fullmatch(value) is not None)
    if key == "chat_template":
        if isinstance(value, list):  # several templates by name
            return all(
                isinstance(one, dict) and one.keys() == {"name", "template"} and all(map(_is_text, one.values()))
                for one in value
            )
        return value is None or (all(map(_is_text, value.values())) if isinstance(value, dict) else _is_text(value))
    if key in _LISTS:
        named = isinstance(value, dict) and all(_NAME.fullmatch(name) and _is_token(one) for name, one in value.items())
        return value is None or named or (isinstance(value, list) and all(map(_is_token, value)))
    if key == "added_tokens_decoder":
        return isinstance(value, dict) and all(
            at.isdecimal() and isinstance(v, dict) and _is_token(v) for at, v in value.items()
        )
    return value is None or _is_token(value) if _TOKEN.fullmatch(key) else None


def _is_token(value: Any) -> bool:
    """Return whether a value is a token: its text, or a map with the text and the rules for matching it."""
    if isinstance(value, dict):
        kinds = _ADDED | {"__type": str}
        return (
            "content" in value
            and all(type(one) is kinds.get(name) for name, one in value.items())
            and _is_token(value["content"])
        )
    return isinstance(value, str) and len(value) <= LONGEST_TOKEN


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_TEMPLATE


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return a folder's JSON file. Raises CheckpointError for one that is not a map, or outside of the folder."""
    path = plain_file(folder, name, LARGEST_JSON)
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_refuse_repeated_keys)
    except (OSError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:120]
        raise CheckpointError(f"model.checkpoint: {folder / name}: not valid JSON ({why}); fetch it again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"model.checkpoint: {folder / name}: no JSON map, but {quoted(found)}; fetch it again")
    return found


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON map. Raises ValueError for a repeated key, because another reader may use the other value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"a key is there twice: {next(ascii(name)[:64] for name in names if names.count(name) > 1)}")
    return found


def plain_file(folder: Path, name: str, most: int | None = None) -> Path:
    """Return the real path of a folder's file. Raises CheckpointError unless it is a plain file inside the folder.

    It may have at most `most` bytes. A folder of Hugging Face's cache has links to the `blobs` beside it, which are followed.
    """
    path = folder / name
    try:
        home, real = folder.resolve(strict=True), path.resolve(strict=True)
        found = real.stat()
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or "a link to itself"
        raise CheckpointError(f"model.checkpoint: {path}: cannot be read ({why}); {WANTED}") from None
    cache = home.parent.parent  # in Hugging Face's cache `home` is models--NAME/snapshots/REVISION
    cached = home.parent.name == "snapshots" and cache.name.startswith("models--") and real.parent == cache / "blobs"
    if not real.is_relative_to(home) and not cached:
        raise CheckpointError(f"model.checkpoint: {path}: a link to {real}, outside the folder; copy the file into the folder")
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"model.checkpoint: {path}: no plain file; {WANTED}")
    if most is not None and found.st_size > most:
        raise CheckpointError(f"model.checkpoint: {path}: {found.st_size:,} bytes, at most {most:,} are read; fetch it again")
    return real


def _link(view: Path, folder: Path, name: str, most: int | None = None) -> None:
    (view / name).symlink_to(plain_file(folder, name, most))


def _is_present(path: Path) -> bool:
    return path.exists() or path.is_symlink()


@contextmanager
def _temporary_view() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="consilium-model-") as folder:
        yield Path(folder)
