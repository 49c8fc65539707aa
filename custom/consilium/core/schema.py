"""The base of every section of job.yaml, site.yaml and sites.yml: bounded values, safe reading of YAML, one-line errors.

It does not depend on any kind of model, task, adapter or strategy.
"""

import copy
import difflib
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from consilium.core.errors import ConfigError

T = TypeVar("T", bound=BaseModel)

# fingerprints ---------------------------------------------------------------------------------------------------------

_PREFIX = re.compile(r"\s*sha-?256(\s*fingerprint)?\s*[:=\s]\s*", re.IGNORECASE)
_SEPARATORS = re.compile(r"[\s:-]+")


def fingerprint_digits(text: str) -> str:
    """Return a SHA-256 fingerprint as 64 lower-case hex digits, from any form in which tools print it.

    The forms are `AA:BB:..` and `aa bb ..` in either case, `SHA256:AA:BB:..` (nvflare), and `sha256 Fingerprint=AA:BB:..`
    (openssl). Raises ValueError for anything else.
    """
    rest = _PREFIX.sub("", text, count=1) if _PREFIX.match(text) else text
    groups = [group for group in _SEPARATORS.split(rest) if group]
    digits = "".join(groups)
    if len(digits) == 64 and all(len(group) % 2 == 0 for group in groups) and re.fullmatch(r"[0-9a-fA-F]+", digits):
        return digits.lower()
    raise ValueError(
        f"{ascii(text)[:100]} is not a SHA-256 fingerprint, which has 64 hex digits, with or without colons and `SHA256:`; "
        "copy it whole, as `openssl x509 -noout -fingerprint -sha256` or `consilium doctor` prints it"
    )


# sections -------------------------------------------------------------------------------------------------------------

LONGEST_TEXT = 1024
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, str_max_length=LONGEST_TEXT)
"""The settings shared by sections and strategies: unknown keys, infinite numbers and very long texts are errors."""

MOST_CLASSES = 256
SMALLEST_NOISE = 0.05
"""Noise multipliers under this protect nothing, and accountants of sampled releases do not finish for them."""

SHA256 = r"^[0-9a-f]{64}$"
Sha256 = Annotated[str, Field(pattern=SHA256, description="64 hex digits; `consilium doctor` prints a checkpoint's")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
"""The name of a job or a run, and of its folder."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
Rank = Annotated[int, Field(ge=1, le=1024)]
Share = Annotated[float, Field(ge=0, le=1)]
Factor = Annotated[float, Field(ge=0, le=1e6)]
"""A factor that may be 0, such as the weight of a loss."""
Positive = Annotated[float, Field(gt=0, le=1e6)]
Seconds = Annotated[float, Field(ge=0, le=30 * 86400)]
ClassName = Annotated[
    str, Field(min_length=1, max_length=64, pattern=r"^[^/\p{C}\p{Zl}\p{Zp}]+$", description="printable, without /")
]
"""The name of a class. It becomes part of the names of metrics."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values cannot change after validation."""

    model_config = STRICT | ConfigDict(frozen=True)


def check_unique(names: list[str], what: str = "class") -> list[str]:
    """Return `names`. Raises ValueError if a name occurs twice."""
    if twice := sorted(name for name in set(names) if names.count(name) > 1):
        raise ValueError(f"every {what} once; {twice[0]!r} is there twice")
    return names


# reading YAML ---------------------------------------------------------------------------------------------------------

LARGEST_FILE = 2**20
LONGEST_VALUE = 4096
DEEPEST = 32
if TYPE_CHECKING or not yaml.__with_libyaml__:
    from yaml import SafeLoader as Fast
else:  # libyaml reads the largest file in seconds, pure Python in a minute
    from yaml import CSafeLoader as Fast


class Loader(Fast):
    """Reads YAML 1.1 as PyYAML does, and also numbers such as 1e-05 of a pasted config.json, which YAML 1.1 takes for text."""


def _construct_map(loader: Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    """Return a map. Raises YAMLError for a key that occurs twice, because it is not clear which one was meant."""
    found = yaml.SafeLoader.construct_mapping(loader, node, deep)
    if len(found) < len(node.value):
        keys = Counter(loader.construct_object(key, deep=True) for key, _ in node.value)  # type: ignore[no-untyped-call]
        twice = str(keys.most_common(1)[0][0])[:80]
        raise yaml.YAMLError(f"line {node.start_mark.line + 1}: {twice!r} is there twice; keep one")
    return found


Loader.add_constructor("tag:yaml.org,2002:map", _construct_map)
Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


def read_yaml(path: Path | zipfile.Path) -> Any:
    """Return the content of a YAML file. Raises ConfigError if it cannot be read or is not valid."""
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise ConfigError(f"{path}: not a file; give an existing file")
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
        text = data.decode("utf-8")
        _check_size(text, len(data))
        return yaml.load(text, Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give an existing file") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:  # not UTF-8, a date in month 13, `!!bool maybe`
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())[:300]}); fix the line named") from None


def _check_size(text: str, size: int) -> None:
    """Raise YAMLError, before any value is built, for content with which even a small file could take very long to read."""
    if size > LARGEST_FILE:
        raise yaml.YAMLError(f"over {LARGEST_FILE} bytes, which no configuration needs")
    depth = 0
    for event in yaml.parse(text, Fast):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"line {line}: alias *{event.anchor}: aliases are not read; write the value out")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > LONGEST_VALUE:
            raise yaml.YAMLError(f"line {line}: a value of {len(event.value)} characters, over {LONGEST_VALUE}")
        if depth > DEEPEST:
            raise yaml.YAMLError(f"line {line}: sections in sections over {DEEPEST} deep")


# errors ---------------------------------------------------------------------------------------------------------------

UNIONS = {"privacy": ("site", "patient", "record")}
"""Sections that are unions, with their kinds. pydantic puts the kind into a problem's location, where the file has none."""

SYNONYMS = {
    "learning_rate": "lr",
    "num_rounds": "rounds",
    "communication_rounds": "rounds",
    "epochs": "local_epochs",
    "num_epochs": "local_epochs",
    "steps": "local_steps",
    "max_steps": "local_steps",
    "batch": "batch_size",
    "gradient_accumulation_steps": "accumulate",
    "lr_scheduler": "schedule",
    "r": "rank",
    "lora_r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "bottleneck": "width",
    "min_clients": "min_sites",
    "sample": "fraction_train",
    "fraction_fit": "fraction_train",
    "held_out": "fraction_evaluate",
    "grace": "straggler_grace_seconds",
    "split": "sharing values_in",
    "max_grad_norm": "clip",
    "max_seq_length": "max_length",
    "num_classes": "classes",
    "fedavg": "fedit",
    "fed_avg": "fedit",
    "fedsa": "fedsa_lora",
    "ffa": "ffa_lora",
    "fed_it": "fedit",
    "iat": "fediat",
    "sor": "fediat",
    "homolora": "fedhomolora",
    "dylora": "dp_dylora",
    "local": "local_only",
    "central": "centralized",
}
"""Names in other programs, papers and former versions, with our names, if they are too different for a spelling match."""
SECTION = ("dict_type", "model_type", "model_attributes_type", "dataclass_type", "mapping_type")
EXPECTED = dict.fromkeys(SECTION, "a map, such as {name: value}") | {
    "list_type": "a list, such as [a, b]", "tuple_type": "a list, such as [a, b]", "string_type": "a text",
    "int_type": "a whole number", "int_parsing": "a whole number", "int_from_float": "a whole number",
    "float_type": "a number", "float_parsing": "a number", "bool_type": "true or false", "bool_parsing": "true or false",
    "none_required": "null",
}  # fmt: skip
"""By pydantic's type of error, the expected value in the words of job.yaml."""
HINTS = {
    "task.classes": "or a list of names, such as [nucleus]",
    "data": "the folder of the sites' data is not a part of the job: give it with --data",
}
"""By field, a hint for the message if the value is not a section."""
MOST_LINES = 20
LONGEST_SHOWN = 120


def describe_errors(
    error: ValidationError, path: Path | str, fields: list[str], suggest_field: Callable[[list[str]], str]
) -> str:
    """Return one line per problem: file, field, value, and the expected value.

    `fields`: the dotted names of all fields; `suggest_field`: returns the field that was probably meant by an unknown one, or
    "".
    """
    lines = []
    items = [item for item in error.errors() if item["type"] != "default_factory_not_called"]  # its cause has its own line
    for item in items[:MOST_LINES]:
        field = ".".join(_location(item["loc"]))
        if item["type"] in ("union_tag_invalid", "union_tag_not_found"):  # only privacy.unit has no default
            key, known = (
                item["ctx"]["discriminator"].strip("'"),
                item["ctx"].get("expected_tags", "'site', 'patient', 'record'"),
            )
            lines.append(f"{path}: {field}.{key}: {_quoted(item['ctx'].get('tag', 'missing'))}: expected one of {known}")
        elif item["type"] == "missing":
            lines.append(f"{path}: {field}: missing; add it")
        elif item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            meant = suggest_field(_location(item["loc"]))
            lines.append(f"{path}: {field}: unknown field; {f'write {meant} instead' if meant else 'remove it'}")
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            message = EXPECTED.get(item["type"], message)
            if isinstance(item["input"], bool) and item["type"] == "string_type":
                message = "a text; YAML reads yes, no, on and off as true and false: write it in quotes"
            if own := [one.rpartition(".")[2] for one in fields if one.rpartition(".")[0] == field][:3]:
                message = message if item["type"] not in SECTION else f"a section with fields such as {', '.join(own)}"
            message += f"; {HINTS[field]}" if field in HINTS and item["type"] in SECTION else ""
            lines.append(f"{path}: {_field_and_value(item, field, message)}{message}")
    if len(items) > MOST_LINES:
        lines.append(f"{path}: and {len(items) - MOST_LINES} more; fix these first")
    return "\n".join(lines)


def _field_and_value(item: Any, field: str, message: str) -> str:
    """Return the field and value that go before a message; "" or the section's name if the message names field and value."""
    if not item["loc"]:
        return ""
    section = item["type"] == "value_error" and isinstance(item["input"], dict)
    if section and (told := re.match(r"(?!none:)[a-z_.]+(?=: )", message)):  # after "none:" comes a value, not a field
        return "" if told[0].startswith(f"{field}.") else f"{field}."
    return f"{field}: {_quoted(item['input'])}: expected "


def _quoted(value: Any) -> str:
    """Return a value for one line of a message: without control characters, and cut to LONGEST_SHOWN."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _location(loc: tuple[int | str, ...]) -> list[str]:
    """Return pydantic's location without the parts that it adds: the kind of a section, the type of a value, "[key]"."""
    kinds = UNIONS.get(str(loc[0]), ()) if loc else ()
    parts = [str(part) for i, part in enumerate(loc) if not (i == 1 and part in kinds)]
    parts = [part for part in parts if part != "[key]" and not part.startswith(("list[", "dict[", "literal[", "constrained-"))]
    return [part if part.isprintable() and len(part) <= LONGEST_SHOWN else _quoted(part) for part in parts]


def did_you_mean(word: str | None, known: Any) -> str:
    """Return " (did you mean ...?)" for the closest known word, or an empty string."""
    short, known = str(word)[:64], list(known)
    meant = [name for name in SYNONYMS.get(short.lower(), "").split() if name in known]
    if short in known:  # a field of another kind
        return ""
    match = meant or difflib.get_close_matches(short, known, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def all_fields(model: type[BaseModel], before: str = "") -> list[str]:
    """Return the dotted names of all fields of a section and of the sections below it."""
    names = []
    for name, info in model.model_fields.items():
        place = f"{before}{info.alias or name}"
        names.append(place)
        names += [
            f"{place}.{one}" for mark in info.metadata if hasattr(mark, "kind_field_names") for one in mark.kind_field_names()
        ]
        for kind in get_args(info.annotation) or (info.annotation,):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                names += all_fields(kind, f"{place}.")
    return list(dict.fromkeys(names))


def _meant_field(model: type[BaseModel], raw: Any, plugins: Any, fields: list[str], place: list[str]) -> str:
    """Return the known field that was probably meant by the unknown one at `place`, or "".

    A candidate is accepted if `raw` validates with the value moved there.
    """
    *section, word = place
    own = {one.rpartition(".")[2] for one in fields if one.rpartition(".")[0] == ".".join(section)}
    last = [one.rpartition(".")[2] for one in fields]
    close = [*SYNONYMS.get(word.lower(), "").split(), *difflib.get_close_matches(word[:64], own, n=2)]
    close += [] if word in last else difflib.get_close_matches(word[:64], last, n=2)
    elsewhere = [one for one in fields if one.rpartition(".")[2] == word]
    candidates = (elsewhere if len(elsewhere) == 1 else []) + [".".join([*section, name]) for name in close if name in own]
    candidates += [one for name in close for one in fields if one.rpartition(".")[2] == name]
    sections = {".".join(section[:depth]) for depth in range(1, len(place))}  # a field is never meant to be its own section
    for candidate in (one for one in dict.fromkeys(candidates) if one not in sections):
        tried = copy.deepcopy(raw)
        *above, name = candidate.split(".")
        try:
            value = _get_or_create_section(tried, section).pop(word)
            _get_or_create_section(tried, above).setdefault(name, value)
            model.model_validate(tried, context={"plugins": plugins})
        except ValidationError as error:
            unknown = ("extra_forbidden", "unexpected_keyword_argument")
            if any(item["type"] in unknown and _location(item["loc"]) == candidate.split(".") for item in error.errors()):
                continue  # a field of another kind
        except (ConfigError, KeyError, TypeError, AttributeError):
            continue
        return candidate
    return ""


def _get_or_create_section(raw: Any, section: list[str]) -> Any:
    for name in section:
        if raw.get(name) is None:  # as `privacy:` is where the lines below it lost their indentation
            raw[name] = {}
        raw = raw[name]
    return raw


def flatten_settings(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested settings as one map by dotted field. An empty map counts as a value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping) and value
        found |= flatten_settings(value, f"{before}{key}.") if nested else {f"{before}{key}": value}
    return found


def validate(model: type[T], raw: Any, path: Path, plugins: frozenset[str] | None = frozenset()) -> T:
    """Return `raw`, the content of the file `path`, as a section. Raises ConfigError with one line per problem."""
    if not isinstance(raw, Mapping):
        required = [name for name, field in model.model_fields.items() if field.is_required()]
        first = ", ".join(f"`{name}:`" for name in (required or [*model.model_fields])[:3])
        raise ConfigError(f"{path}: is not a map of sections; start with {first} ...")
    try:
        return model.model_validate(raw, context={"plugins": plugins})
    except ValidationError as error:
        fields = all_fields(model)
        raise ConfigError(describe_errors(error, path, fields, partial(_meant_field, model, raw, plugins, fields))) from None
    except ConfigError as error:  # a strategy's own check of its values
        raise ConfigError(f"{path}: {error}") from None
