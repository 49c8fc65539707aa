"""The base of every section of job.yaml, site.yaml and sites.yml: bounded values, YAML that others wrote, errors in one line.

It knows no kind of model, task, adapter or strategy.
"""

import base64
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


def read_fingerprint(text: str) -> str:
    """Return a SHA-256 fingerprint as 64 lower-case hex digits, from any of the forms in which tools print one.

    `AA:BB:..` and `aa bb ..` in either case, `SHA256:AA:BB:..` of `nvflare`, `sha256 Fingerprint=AA:BB:..` of openssl, and
    `SHA256:` with 43 characters of base64 of OpenSSH. Raises ValueError for everything else.
    """
    rest = _PREFIX.sub("", text, count=1) if _PREFIX.match(text) else text
    groups = [group for group in _SEPARATORS.split(rest) if group]
    digits = "".join(groups)
    if len(digits) == 64 and all(len(group) % 2 == 0 for group in groups) and re.fullmatch(r"[0-9a-fA-F]+", digits):
        return digits.lower()
    coded = rest.strip().removesuffix("=")
    if re.fullmatch(r"[A-Za-z0-9+/]{43}", coded):
        raw = base64.b64decode(f"{coded}=")
        if base64.b64encode(raw).decode() == f"{coded}=":  # its last character has two bits that must be 0
            return raw.hex()
    what = f"{ascii(text)[:100]} is not a SHA-256 fingerprint, which has 64 hex digits, with or without colons and `SHA256:`"
    raise ValueError(f"{what}; copy it whole, as `openssl x509 -noout -fingerprint -sha256` or `consilium doctor` prints it")


# sections -------------------------------------------------------------------------------------------------------------

LONGEST_TEXT = 1024
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, str_max_length=LONGEST_TEXT)
"""What sections and strategies have in common: unknown keys, infinities and endless texts are errors."""

MOST_CLASSES = 256
SMALLEST_NOISE = 0.05
"""Noise multipliers under this protect nothing, and accountants of sampled releases do not come to an end below."""

SHA256 = r"^[0-9a-f]{64}$"
Sha256 = Annotated[str, Field(pattern=SHA256, description="64 hex digits; `consilium doctor` prints a checkpoint's")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
"""A job's or a run's; it becomes a folder's."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
Rank = Annotated[int, Field(ge=1, le=1024)]
Share = Annotated[float, Field(ge=0, le=1)]
Factor = Annotated[float, Field(ge=0, le=1e6)]
"""A weight of a loss, a strength, a scale that may be 0."""
Positive = Annotated[float, Field(gt=0, le=1e6)]
Seconds = Annotated[float, Field(ge=0, le=30 * 86400)]
ClassName = Annotated[
    str, Field(min_length=1, max_length=64, pattern=r"^[^/\p{C}\p{Zl}\p{Zp}]+$", description="printable, without /")
]
"""It becomes part of metrics' names."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values cannot change after validation."""

    model_config = STRICT | ConfigDict(frozen=True)


def each_once(names: list[str], what: str = "class") -> list[str]:
    """Return `names`. Raises ValueError if one is there twice."""
    if twice := sorted(name for name in set(names) if names.count(name) > 1):
        raise ValueError(f"every {what} once; {twice[0]!r} is there twice")
    return names


# reading YAML ---------------------------------------------------------------------------------------------------------

LARGEST_FILE = 2**20
LONGEST_VALUE = 4096
DEEPEST = 32
if TYPE_CHECKING or not yaml.__with_libyaml__:
    from yaml import SafeLoader as Fast
else:  # libyaml reads a file of the largest size in seconds, Python in a minute
    from yaml import CSafeLoader as Fast


class Loader(Fast):
    """YAML 1.1 as PyYAML reads it, and numbers as JSON writes them: a pasted config.json has 1e-05, which would be text."""


def _map(loader: Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    """Return a map. Raises YAMLError for a key that is there twice: which one was meant, nobody knows."""
    found = yaml.SafeLoader.construct_mapping(loader, node, deep)
    if len(found) < len(node.value):
        keys = Counter(loader.construct_object(key, deep=True) for key, _ in node.value)  # type: ignore[no-untyped-call]
        twice = str(keys.most_common(1)[0][0])[:80]
        raise yaml.YAMLError(f"line {node.start_mark.line + 1}: {twice!r} is there twice; keep one")
    return found


Loader.add_constructor("tag:yaml.org,2002:map", _map)
Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


def read_yaml(path: Path | zipfile.Path) -> Any:
    """Return what a YAML file holds. Raises ConfigError."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ConfigError(f"{path}: not a file; give an existing file")
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
        text = data.decode("utf-8")
        _check(text, len(data))
        return yaml.load(text, Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give an existing file") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, a day of month 13, a number of 5,000 digits
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())[:300]}); fix the line named") from None


def _check(text: str, size: int) -> None:
    """Raise YAMLError for what would take a small file long to read, before any of it is built."""
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
"""Sections of several kinds; pydantic puts the kind into the location of a problem, a reader of the file wants none."""

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
"""What other programs, papers and former versions call it, where no spelling leads to our name."""
SECTION = ("dict_type", "model_type", "model_attributes_type", "dataclass_type", "mapping_type")
EXPECTED = dict.fromkeys(SECTION, "a map, such as {name: value}") | {
    "list_type": "a list, such as [a, b]", "tuple_type": "a list, such as [a, b]", "string_type": "a text",
    "int_type": "a whole number", "int_parsing": "a whole number", "int_from_float": "a whole number",
    "float_type": "a number", "float_parsing": "a number", "bool_type": "true or false", "bool_parsing": "true or false",
    "none_required": "null",
}  # fmt: skip
"""What pydantic's kinds of errors expect, in the words of job.yaml."""
HINTS = {
    "task.classes": "or a list of names, such as [nucleus]",
    "data": "the folder of the sites' data is not a part of the job: give it with --data",
}
"""What else to say where a section has another value."""
MOST_LINES = 20
LONGEST_SHOWN = 120


def describe(error: ValidationError, path: Path | str, fields: list[str], rename: Callable[[list[str]], str]) -> str:
    """Return one line per problem: file: field: value: what is expected.

    `fields`: all dotted fields there are; `rename`: returns the field that an unknown one is meant for, "" for none.
    """
    lines = []
    items = [item for item in error.errors() if item["type"] != "default_factory_not_called"]  # what it needs is named itself
    for item in items[:MOST_LINES]:
        field = ".".join(_place(item["loc"]))
        if item["type"] in ("union_tag_invalid", "union_tag_not_found"):  # only privacy.unit has no default
            key, known = (
                item["ctx"]["discriminator"].strip("'"),
                item["ctx"].get("expected_tags", "'site', 'patient', 'record'"),
            )
            lines.append(f"{path}: {field}.{key}: {_quoted(item['ctx'].get('tag', 'missing'))}: expected one of {known}")
        elif item["type"] == "missing":
            lines.append(f"{path}: {field}: missing; add it")
        elif item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            meant = rename(_place(item["loc"]))
            lines.append(f"{path}: {field}: unknown field; {f'write {meant} instead' if meant else 'remove it'}")
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            message = EXPECTED.get(item["type"], message)
            if isinstance(item["input"], bool) and item["type"] == "string_type":
                message = "a text; YAML reads yes, no, on and off as true and false: write it in quotes"
            if own := [one.rpartition(".")[2] for one in fields if one.rpartition(".")[0] == field][:3]:
                message = message if item["type"] not in SECTION else f"a section with fields such as {', '.join(own)}"
            message += f"; {HINTS[field]}" if field in HINTS and item["type"] in SECTION else ""
            lines.append(f"{path}: {_where(item, field, message)}{message}")
    if len(items) > MOST_LINES:
        lines.append(f"{path}: and {len(items) - MOST_LINES} more; fix these first")
    return "\n".join(lines)


def _where(item: Any, field: str, message: str) -> str:
    """Return the place and value before a message: of a section as a whole, its message names field and value itself."""
    if not item["loc"]:
        return ""
    section = item["type"] == "value_error" and isinstance(item["input"], dict)
    if section and (told := re.match(r"(?!none:)[a-z_.]+(?=: )", message)):  # "none" is a value
        return "" if told[0].startswith(f"{field}.") else f"{field}."
    return f"{field}: {_quoted(item['input'])}: expected "


def _quoted(value: Any) -> str:
    """Return a value as it goes into one line: without control characters, and cut."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _place(loc: tuple[int | str, ...]) -> list[str]:
    """Return pydantic's location without what it adds: the kind of a section, the type of a value, a mark for keys."""
    kinds = UNIONS.get(str(loc[0]), ()) if loc else ()
    parts = [str(part) for i, part in enumerate(loc) if not _added(str(part)) and not (i == 1 and part in kinds)]
    return [part if part.isprintable() and len(part) <= LONGEST_SHOWN else _quoted(part) for part in parts]


def _added(part: str) -> bool:
    """Tell whether pydantic put this into a location for itself."""
    return part == "[key]" or part.startswith(("list[", "dict[", "literal[", "constrained-"))


def nearest(word: str | None, known: Any) -> str:
    """Return " (did you mean ...?)" for the closest known word, or an empty string."""
    short, known = str(word)[:64], list(known)
    meant = [name for name in SYNONYMS.get(short.lower(), "").split() if name in known]
    if short in known:  # known elsewhere: a field of another kind
        return ""
    match = meant or difflib.get_close_matches(short, known, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def all_fields(model: type[BaseModel], before: str = "") -> list[str]:
    """Return the dotted names of a section's fields and of all sections below it."""
    names = []
    for name, info in model.model_fields.items():
        place = f"{before}{info.alias or name}"
        names.append(place)
        names += [f"{place}.{one}" for mark in info.metadata if hasattr(mark, "fields") for one in mark.fields()]
        for kind in get_args(info.annotation) or (info.annotation,):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                names += all_fields(kind, f"{place}.")
    return list(dict.fromkeys(names))


def _renamed(model: type[BaseModel], raw: Any, plugins: Any, fields: list[str], place: list[str]) -> str:
    """Return the field that an unknown one at `place` is meant for: one that is known there, "" for none."""
    *section, word = place
    own = {one.rpartition(".")[2] for one in fields if one.rpartition(".")[0] == ".".join(section)}
    last = [one.rpartition(".")[2] for one in fields]
    close = [*SYNONYMS.get(word.lower(), "").split(), *difflib.get_close_matches(word[:64], own, n=2)]
    close += [] if word in last else difflib.get_close_matches(word[:64], last, n=2)
    candidates = [".".join([*section, name]) for name in close if name in own]
    candidates += [one for name in close for one in fields if one.rpartition(".")[2] == name]
    for candidate in dict.fromkeys(candidates):
        tried = copy.deepcopy(raw)
        *above, name = candidate.split(".")
        try:
            value = _down(tried, section).pop(word)
            _down(tried, above).setdefault(name, value)
            model.model_validate(tried, context={"plugins": plugins})
        except ValidationError as error:
            unknown = ("extra_forbidden", "unexpected_keyword_argument")
            if any(item["type"] in unknown and _place(item["loc"]) == candidate.split(".") for item in error.errors()):
                continue  # a field of another kind
        except (ConfigError, KeyError, TypeError, AttributeError):
            continue
        return candidate
    return ""


def _down(raw: Any, section: list[str]) -> Any:
    for name in section:
        raw = raw.setdefault(name, {})
    return raw


def dotted(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested settings by dotted field; an empty map is a value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping) and value
        found |= dotted(value, f"{before}{key}.") if nested else {f"{before}{key}": value}
    return found


def validate(model: type[T], raw: Any, path: Path, plugins: frozenset[str] | None = frozenset()) -> T:
    """Return `raw`, what the file `path` holds, as a section. Raises ConfigError with one line per problem."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path}: is not a map of sections; start with `name:`, `strategy:`, `model:` ...")
    try:
        return model.model_validate(raw, context={"plugins": plugins})
    except ValidationError as error:
        fields = all_fields(model)
        rename = partial(_renamed, model, raw, plugins, fields)
        raise ConfigError(describe(error, path, fields, rename)) from None
    except ConfigError as error:  # a strategy's own check of its values
        raise ConfigError(f"{path}: {error}") from None
