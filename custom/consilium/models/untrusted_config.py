"""The keys and values of a config.json that `transformers` gets: only those that the architecture's class declares.

A job contains the config.json, so its submitter can change it. Besides sizes, `transformers` reads from it names of hub
repositories that provide attention code, and names of weights, files and classes. `keep_listed_keys` keeps the keys that the
`model_type`'s configuration class declares, and the text values that occur in the architecture's code. It reads both lists from
the installed `transformers`, so a new version needs no change here. `models/transformers_folder.py` calls it before it makes a
configuration.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from importlib.abc import InspectLoader
from importlib.util import find_spec
from types import CodeType
from typing import Any, Literal, get_args, get_origin

from transformers import GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from consilium.core.errors import ConfigError
from consilium.models.architecture import IMPLEMENTATIONS, check_and_clean_config
from consilium.models.untrusted_tokenizer import quoted

DTYPES = frozenset({"float32", "float16", "bfloat16", "float64"})
_ROPE = ("rope_parameters", "rope_scaling")
_BASE = frozenset(
    {*_ROPE, *IMPLEMENTATIONS, "rope_theta", "partial_rotary_factor", "torch_dtype", "num_labels", "output_attentions"}
)
"""Keys that `transformers` accepts for every class, beside the fields that the class declares."""
_STAGES, _STAGE = ("out_features", "stage_names"), re.compile(r"stem|stage[0-9]{1,3}")
"""Names of the stages of a backbone."""
_GENERATION = frozenset(GenerationConfig._get_default_generation_params())
"""Keys that earlier versions wrote into a config.json; `transformers` itself drops them."""
_FORMER = {"position_embedding_type": "absolute", "directionality": "bidi", "pooler_type": "first_token_transform"}
"""Keys that earlier versions wrote, with the one value whose code is still there."""
_REMEDY = "leave it out, or give the contents of the model's own config.json"


def keep_listed_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that its architecture's class declares, with `model_type`.

    Labels, notes of earlier versions, and numbers that neither the class nor the architecture's code names are left out. Raises
    ConfigError for every other key, for a map in the place of a plain value, and for an unknown word.
    """
    try:
        values = check_and_clean_config(config)
    except ValueError as error:
        raise ConfigError(f"model.config.{error}") from None
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return values  # an unknown architecture, which AutoConfig refuses by its name
    return _section(values, CONFIG_MAPPING[kind], "")


def _section(values: Mapping[str, Any], kind: type[PreTrainedConfig], place: str) -> dict[str, Any]:
    """Return the listed part of one map, the configuration of a model or of a part of it."""
    found, unlisted = dict[str, Any](), list[str]()
    for key, value in values.items():
        where = f"{place}{key}"
        owner = _owner(kind, key)
        if key == "model_type":
            found |= {key: value} if isinstance(value, str) and value in CONFIG_MAPPING else {}
        elif key == "architectures":
            found[key] = [name for name in value if name in _words(kind)] if isinstance(value, list) else None
        elif key == "transformers_version":
            continue
        elif key in kind.sub_configs_defaults or _nested(kind, key):
            found[key] = None if value is None else _part(value, kind, key, where)
        elif key == "per_layer_config" and isinstance(value, dict):
            layers = {
                name: _require_map(item, f"{where}.{name}") for name, item in value.items()
            }  # they replace the model's settings
            found[key] = {name: _section(item, kind, f"{where}.{name}.") for name, item in layers.items()}
        elif (
            key in _STAGES and isinstance(value, list) and all(isinstance(one, str) and _STAGE.fullmatch(one) for one in value)
        ):
            found[key] = value
        elif key in _ROPE:
            _check_rope(value, kind, where)
            found[key] = value
        elif owner is not None:
            _check_value(value, owner, key, where)
            found[key] = value
        elif key in _GENERATION or value in ({}, [], "") or _FORMER.get(key) == value:
            continue
        elif value is None or isinstance(value, bool | int | float) or _is_number_list(value):
            found |= {key: value} if key in _names_in_code(kind) else {}
        elif key in _names_in_code(kind) and not isinstance(value, dict):
            _check_value(value, kind, key, where)
            found[key] = value
        else:
            unlisted.append(where)
    if unlisted:
        keys = ", ".join(unlisted[:8])
        raise ConfigError(
            f"model.config: {keys}: not declared by {kind.model_type or kind.__name__!r} of the installed transformers; leave "
            "them out"
        )
    return found


def _owner(kind: type[PreTrainedConfig], key: str) -> type[PreTrainedConfig] | None:
    """Return the configuration class that declares a key: `kind`, or one of its parts, whose keys older files write inline."""
    if key in _BASE or key in _fields(kind) or key in kind.attribute_map:
        return kind
    parts = (_default_part(kind, name) for name in kind.sub_configs_defaults)
    return next((part for part in parts if part is not None and (key in _fields(part) or key in part.attribute_map)), None)


def _part(value: Any, kind: type[PreTrainedConfig], key: str, where: str) -> dict[str, Any]:
    """Return the listed part of a nested configuration. If several classes are possible, its `model_type` chooses one."""
    value = _require_map(value, where)
    if own := _nested(kind, key):
        return _section(value, own, f"{where}.")
    spec, named = kind.sub_configs_defaults[key], value.get("model_type")
    free = key == "backbone_config" or not issubclass(spec.config_class, PreTrainedConfig)
    if free and named is not None and not (isinstance(named, str) and named in CONFIG_MAPPING):
        raise ConfigError(f"model.config.{where}.model_type: {quoted(named)} is not an architecture of transformers; {_REMEDY}")
    chosen = CONFIG_MAPPING[named] if free and named is not None else _default_part(kind, key)
    if chosen is None:
        raise ConfigError(f"model.config.{where}.model_type: missing; name the architecture of this part")
    return _section(value, chosen, f"{where}.")


def _require_map(value: Any, where: str) -> dict[str, Any]:
    """Return the value. Raises ConfigError if it is not a map."""
    if isinstance(value, dict):
        return value
    raise ConfigError(f"model.config.{where}: {quoted(value)} is not a map of settings; {_REMEDY}")


def _nested(kind: type[PreTrainedConfig], key: str) -> type[PreTrainedConfig] | None:
    """Return the configuration class in a field's type, for a part that the class does not list in `sub_configs_defaults`."""
    field = None if key in kind.sub_configs_defaults else _fields(kind).get(key)
    found = (one for one in get_args(field.type) if isinstance(one, type)) if field is not None else ()
    return next((one for one in found if issubclass(one, PreTrainedConfig) and one is not PreTrainedConfig), None)


def _default_part(kind: type[PreTrainedConfig], key: str) -> type[PreTrainedConfig] | None:
    spec = kind.sub_configs_defaults[key]
    if issubclass(spec.config_class, PreTrainedConfig):
        return spec.config_class
    return CONFIG_MAPPING.get(spec.model_type, None)


def _check_value(value: Any, kind: type[PreTrainedConfig], key: str, where: str) -> None:
    """Raise ConfigError for a word, a list or a map that the class does not declare for this key."""
    if isinstance(value, str):
        if value not in _choices(kind, key):
            raise ConfigError(f"model.config.{where}: {quoted(value)} is not a value that {kind.model_type!r} knows; {_REMEDY}")
    elif isinstance(value, list | tuple):
        for item in value:
            _check_value(item, kind, "" if isinstance(item, dict) else key, where)
    elif isinstance(value, dict):
        field = _fields(kind).get(key)
        if field is None or "dict" not in str(field.type) or "PreTrainedConfig" in str(field.type):
            raise ConfigError(f"model.config.{where}: a map, where transformers takes a plain value; {_REMEDY}")
        for name, item in value.items():
            if isinstance(item, bool | dict | list) or (isinstance(item, str) and item not in ACT2FN):
                raise ConfigError(f"model.config.{where}.{name}: {quoted(item)} is not a number; {_REMEDY}")


def _check_rope(value: Any, kind: type[PreTrainedConfig], where: str, depth: int = 0) -> None:
    """Raise ConfigError for anything but numbers in the settings of rotary positions, and the name of their type."""
    for name, item in _require_map({} if value is None else value, where).items():
        if isinstance(item, dict) and depth == 0:
            _check_rope(item, kind, f"{where}.{name}", 1)  # by type of layer
        elif isinstance(item, str):
            if name not in ("rope_type", "type") or item not in {"default", "mrope", *ROPE_INIT_FUNCTIONS, *_words(kind)}:
                raise ConfigError(f"model.config.{where}.{name}: {quoted(item)} is not a rotary position known; {_REMEDY}")
        elif not (item is None or isinstance(item, bool | int | float) or _is_number_list(item)):
            raise ConfigError(f"model.config.{where}.{name}: {quoted(item)} is not a number; {_REMEDY}")


def _choices(kind: type[PreTrainedConfig], key: str) -> frozenset[str]:
    """Return the text values that a key may have."""
    if key in IMPLEMENTATIONS:
        return frozenset(IMPLEMENTATIONS[key])
    field = _fields(kind).get(kind.attribute_map.get(key, key))
    own, types = set[str](), [] if field is None else [field.type]
    if field is not None and field.default is not MISSING:
        defaults = field.default if isinstance(field.default, tuple) else (field.default,)
        own.update(one for one in defaults if isinstance(one, str))
    while types:  # the words that the field's type spells out
        one = types.pop()
        if get_origin(one) is Literal:
            own.update(word for word in get_args(one) if isinstance(word, str))
        else:
            types.extend(get_args(one))
    return frozenset(own | DTYPES if key.endswith("dtype") else own | _words(kind) | ACT2FN.keys())


def _fields(kind: type[PreTrainedConfig]) -> dict[str, Field[Any]]:
    return {field.name: field for field in fields(kind) if not field.name.startswith("_")}


def _code_strings_and_names(kind: type[PreTrainedConfig]) -> list[tuple[frozenset[str], frozenset[str]]]:
    """Return (string constants, identifiers) of each module with the code of a configuration class, its bases or its model."""
    own = {base.__module__ for base in kind.__mro__ if base.__module__.startswith("transformers.")}
    return [_literals_and_names(name) for name in sorted(own | {name.replace(".configuration_", ".modeling_") for name in own})]


@cache
def _literals_and_names(name: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the texts and names in the code of a module of `transformers`. The code is not run; empty sets if none exists."""
    loader = spec.loader if (spec := find_spec(name)) is not None else None
    todo: list[Any] = [loader.get_code(name)] if isinstance(loader, InspectLoader) else []
    texts, names = set[str](), set[str]()
    while todo:
        one = todo.pop()
        if isinstance(one, str):
            texts.add(one)
        elif isinstance(one, tuple | frozenset):
            todo.extend(one)
        elif isinstance(one, CodeType):
            todo.extend(one.co_consts)
            names.update(one.co_names)
    return frozenset(texts), frozenset(names)


def _words(kind: type[PreTrainedConfig]) -> frozenset[str]:
    return frozenset().union(*(texts for texts, _ in _code_strings_and_names(kind)))


def _names_in_code(kind: type[PreTrainedConfig]) -> frozenset[str]:
    return frozenset().union(*(part for parts in _code_strings_and_names(kind) for part in parts))


def _is_number_list(value: Any) -> bool:
    """Return whether a value is a (nested) list of numbers."""
    if not isinstance(value, list | tuple):
        return False
    return all(item is None or isinstance(item, bool | int | float) or _is_number_list(item) for item in value)
