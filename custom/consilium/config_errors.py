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


def describe(error: ValidationError, path: Path | str, prefix: str, fields: list[str]) -> str:
    """Return one line per problem: file: field: value: what is expected, and the nearest known name."""
    lines = []
    for item in error.errors():
        field = prefix + ".".join(_place(item["loc"]))
        if item["type"] in ("union_tag_invalid", "union_tag_not_found"):  # only privacy.unit has no default
            key, known = item["ctx"]["discriminator"].strip("'"), item["ctx"].get("expected_tags", "'site', 'record'")
            lines.append(f"{path}: {field}.{key}: {item['ctx'].get('tag', 'missing')!r}: expected one of {known}")
        elif item["type"] == "missing":
            lines.append(f"{path}: {field}: missing; add it")
        elif item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            lines.append(f"{path}: {field}: unknown field; remove it{nearest(str(item['loc'][-1]), fields)}")
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            where = f"{field}: {item['input']!r}: expected " if item["loc"] else ""
            lines.append(f"{path}: {where}{message}")
    return "\n".join(lines)


def _place(loc: tuple[int | str, ...]) -> list[str]:
    """Return pydantic's location without what it adds: the kind of a section, the type of a value, a mark for keys."""
    kinds = KINDS.get(str(loc[0]), ()) if loc else ()
    return [str(part) for i, part in enumerate(loc) if part not in ("list[int]", "[key]") and not (i == 1 and part in kinds)]


def nearest(word: str | None, known: Any) -> str:
    """Return " (did you mean ...?)" for the closest known word, or an empty string."""
    match = difflib.get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def all_fields(model: type[BaseModel]) -> list[str]:
    """Return the names of a section's fields and of all sections below it."""
    names = list(model.model_fields)
    for info in model.model_fields.values():
        for kind in get_args(info.annotation) or (info.annotation,):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                names += all_fields(kind)
    return names
