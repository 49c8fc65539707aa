"""What is wrong with a configuration, one line per problem: file, field, value, remedy."""

import difflib
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

KINDS = {
    "model": ("sam", "clip", "causal_lm"),
    "adapter": ("lora", "dual_rank", "bottleneck"),
    "task": ("segmentation", "classification", "language"),
    "privacy": ("site", "record"),
}
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
"""What other programs and papers call it, where no spelling leads to our name."""
MOST_LINES = 20
LONGEST_VALUE = 120


def describe(error: ValidationError, path: Path | str, prefix: str, fields: list[str]) -> str:
    """Return one line per problem: file: field: value: what is expected, and the nearest known name."""
    lines = []
    items = [item for item in error.errors() if item["type"] != "default_factory_not_called"]  # what it needs is named itself
    for item in items[:MOST_LINES]:
        field = prefix + ".".join(_place(item["loc"]))
        if item["type"] in ("union_tag_invalid", "union_tag_not_found"):  # only privacy.unit has no default
            key, known = item["ctx"]["discriminator"].strip("'"), item["ctx"].get("expected_tags", "'site', 'record'")
            lines.append(f"{path}: {field}.{key}: {_shown(item['ctx'].get('tag', 'missing'))}: expected one of {known}")
        elif item["type"] == "missing":
            lines.append(f"{path}: {field}: missing; add it")
        elif item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            lines.append(f"{path}: {field}: unknown field; remove it{nearest(str(item['loc'][-1]), fields)}")
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            where = f"{field}: {_shown(item['input'])}: expected " if item["loc"] else ""
            lines.append(f"{path}: {where}{message}")
    if len(items) > MOST_LINES:
        lines.append(f"{path}: and {len(items) - MOST_LINES} more; mend these first")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    """Return a value as it goes into one line: without control characters, and cut."""
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _place(loc: tuple[int | str, ...]) -> list[str]:
    """Return pydantic's location without what it adds: the kind of a section, the type of a value, a mark for keys."""
    kinds = KINDS.get(str(loc[0]), ()) if loc else ()
    parts = [str(part) for i, part in enumerate(loc) if not _added(str(part)) and not (i == 1 and part in kinds)]
    return [part if part.isprintable() and len(part) <= LONGEST_VALUE else _shown(part) for part in parts]


def _added(part: str) -> bool:
    """Tell whether pydantic put this into a location for itself."""
    return part == "[key]" or part.startswith(("list[", "dict[", "literal[", "constrained-"))


def nearest(word: str | None, known: Any) -> str:
    """Return " (did you mean ...?)" for the closest known word, or an empty string."""
    short, known = str(word)[:64], list(known)
    meant = SYNONYMS.get(short.lower())
    match = [meant] if meant in known else difflib.get_close_matches(short, known, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def all_fields(model: type[BaseModel]) -> list[str]:
    """Return the names of a section's fields and of all sections below it."""
    names = list(model.model_fields)
    for info in model.model_fields.values():
        for kind in get_args(info.annotation) or (info.annotation,):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                names += all_fields(kind)
    return names
