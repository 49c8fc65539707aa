"""Generates the tables of fields of job.yaml, site.yaml and sites.yml from the sections' JSON schemas.

`python -m consilium.config.reference [ROOT]` rewrites the tables in the pages, between two comments. The column "meaning" is
the field's description.
"""

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from consilium.adapters.registry import ADAPTERS
from consilium.config.data import DataConfig
from consilium.config.deployment import DeploymentConfig
from consilium.config.job import JobConfig
from consilium.config.privacy import (
    PatientLevelDpConfig,
    RecordLevelDpConfig,
    SecureAggregationConfig,
    SiteLevelDpConfig,
)
from consilium.config.run_sections import (
    CrossSiteConfig,
    DiagnosticsConfig,
    FederationConfig,
    ServerConfig,
    StatisticsConfig,
    TrainingConfig,
)
from consilium.config.site import SiteConfig
from consilium.core.grouping import group_by_key
from consilium.models.registry import MODELS
from consilium.strategies.registry import STRATEGIES
from consilium.strategies.unequal_ranks import UnequalRanks
from consilium.tasks.registry import TASKS

KEYS = ("name", "kind", "unit")
"""Fields that select the kind of a section. The heading of a kind shows them, so its table does not."""
BEGIN, END = "<!-- begin: written by python -m consilium.config.reference -->", "<!-- end -->"
WORDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true` or `false`"}
BOUNDS = {"minimum": "from", "exclusiveMinimum": "over", "maximum": "to", "exclusiveMaximum": "under"}
ROUNDS = "Validation takes place in rounds `every`, 2 `every` and so on, counted from 1; the final evaluation in any case."
POWERS = {2**exponent: f"2^{exponent}" for exponent in (16, 60, 63)}


def fields_of(section: type, schema: Mapping[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Return by name the JSON schema of every field of a section; of a strategy without its base classes' fields.

    The field that selects the kind is left out. A required field has no "default". `schema`: the section's own, if it is known.
    """
    found = TypeAdapter(section).json_schema() if schema is None else schema
    own = None if issubclass(section, BaseModel) else section.__annotations__
    return {
        name: field | ({} if name in found.get("required", ()) else {"default": field.get("default")})
        for name, field in found.get("properties", {}).items()
        if not (name in KEYS and "const" in field) and (own is None or name in own)
    }


def _values_of_map(field: Mapping[str, Any]) -> Any:
    """Return the schema of a map's values."""
    return field.get("additionalProperties") or next(iter(field.get("patternProperties", {}).values()), None)


def describe_type(field: Mapping[str, Any]) -> str:
    """Return the allowed values of a field in words."""
    if "kind" in field:
        return f"section; `{field['kind']}` tells the kind"
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if parts := field.get("anyOf", field.get("oneOf")):
        return " or ".join(dict.fromkeys(describe_type(one) for one in parts if one.get("type") != "null"))
    if field.get("type") == "array":
        return f"list of {describe_type(field.get('items') or field['prefixItems'][0])}"
    if field.get("type") == "object":
        values = _values_of_map(field)
        return f"map to {describe_type(values)}" if isinstance(values, dict) else "map"
    if "$ref" in field:
        return "section"
    if field.get("format") == "path":
        return "path"
    bounds = []
    for key, word in BOUNDS.items():
        if key in field and f"exclusive{key.capitalize()}" not in field:
            value = field[key]
            plain = f"{int(value):,}" if value == int(value) else f"{value:g}"
            bounds.append(f"{word} {POWERS.get(int(value), '') or plain}")
    return WORDS.get(field.get("type", ""), "anything") + (", " + " ".join(bounds) if bounds else "")


def describe_default(field: Mapping[str, Any]) -> str:
    """Return a field's default for the table; "" for null, for empty lists, and for sections, whose fields have defaults."""
    if "default" not in field:
        return "required"
    value = field.get("default_kind", field["default"])
    if value in (None, {}, []) or "$ref" in field:
        return ""
    return f"`{value:.6g}`" if isinstance(value, float) else f"`{value if isinstance(value, str) else json.dumps(value)}`"


def rows_of(section: type, nested: bool = True) -> dict[str, tuple[str, str, str]]:
    """Return value, default and meaning of a section's fields by name; `nested`: also of sections in it, as `outer.inner`.

    A section in a map is named `outer.NAME.inner`, in a list `outer[].inner`.
    """
    found = dict[str, tuple[str, str, str]]()
    sections = TypeAdapter(section).json_schema().get("$defs", {}) if nested else {}

    def add(prefix: str, fields: Mapping[str, dict[str, Any]]) -> None:
        for name, field in fields.items():
            found[prefix + name] = (describe_type(field), describe_default(field), field.get("description", ""))
            parts = [one for one in field.get("anyOf", [field]) if one.get("type") != "null"]
            inside = ((parts[0] if len(parts) == 1 else None, ""), (field.get("items"), "[]"), (_values_of_map(field), ".NAME"))
            for inner, suffix in inside:
                kind = inner.get("$ref", "").rpartition("/")[2] if isinstance(inner, dict) else ""
                if kind and kind != SiteConfig.__name__:  # it has a page of its own
                    add(f"{prefix}{name}{suffix}.", fields_of(BaseModel, sections.get(kind, {})))
                    break

    add("", fields_of(section))
    return found


def markdown_table(kinds: Mapping[str, type], nested: bool = True, by_field: bool = True) -> str:
    """Return the fields of a section as a Markdown table. Kinds that agree on a field share its row; column "of" names them.

    Rows of one field stand together if `by_field`, else those of one kind.
    """
    of = group_by_key(
        ((name, *cells), kind) for kind, section in kinds.items() for name, cells in rows_of(section, nested).items()
    )
    order = list(dict.fromkeys(name for name, *_ in of))
    rows = [
        ["field", "of", "value", "default", "meaning"],
        ["---"] * 5,
        *(
            [f"`{field}`", "all" if len(names) == len(kinds) else ", ".join(names), *rest]
            for (field, *rest), names in sorted(of.items(), key=lambda one: order.index(one[0][0]) if by_field else 0)
        ),
    ]
    shown = rows if len(kinds) > 1 else [[row[0], *row[2:]] for row in rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in shown)


def chapter(key: str, kinds: type | Mapping[str, type], about: str = "") -> str:
    """Return the heading `key:`, `about` (by default the docstring of the section, or of each of its kinds), and the table."""
    one = isinstance(kinds, type)
    several = {"": kinds} if isinstance(kinds, type) else kinds
    texts = {name: " ".join((kind.__dict__.get("__doc__") or "").split()) for name, kind in several.items()}
    intro = about or (texts[""] if one else "\n".join(f"- `{name}`: {text}" for name, text in texts.items()))
    return f"## `{key}:`\n\n{intro}\n\n{markdown_table(several)}"


def job_reference() -> str:
    """Return the reference of job.yaml as Markdown."""
    units = {"site": SiteLevelDpConfig, "patient": PatientLevelDpConfig, "record": RecordLevelDpConfig}
    registries: dict[str, Mapping[str, Any]] = {"model": MODELS, "adapter": ADAPTERS, "task": TASKS}
    sections: dict[str, type | Mapping[str, type]] = {
        "federation": FederationConfig,
        "server": ServerConfig,
        **{key: {name: kind.config for name, kind in registry.items()} for key, registry in registries.items()},
        "privacy": units,
        "secure_aggregation": SecureAggregationConfig,
        "statistics": StatisticsConfig,
        "cross_site": CrossSiteConfig,
        "diagnostics": DiagnosticsConfig,
        "data": DataConfig,
    }
    parts = [
        "## The whole file",
        "Server and sites read the same file.",
        markdown_table({"": JobConfig}, nested=False),
        chapter("training", TrainingConfig, ROUNDS),
        *(chapter(key, kinds) for key, kinds in sections.items()),
        "## `strategy:`",
        "[Algorithms](algorithms.md) describes each algorithm. One without a row here has no fields.",
        markdown_table({**STRATEGIES, "all for unequal ranks": UnequalRanks}, by_field=False),
    ]
    return "\n\n".join(parts)


PAGES: dict[str, Callable[[], str]] = {
    "jobs/fields.md": job_reference,
    "provisioning/site-settings.md": partial(markdown_table, {"": SiteConfig}),
    "provisioning/federation-settings.md": partial(markdown_table, {"": DeploymentConfig}),
}


def replace_tables(page: str, reference: str) -> str:
    """Return a page with the part between the comments replaced. Raises ValueError for a page without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"no {BEGIN} ... {END} in the page; put both lines where the tables belong")
    return f"{before}{BEGIN}\n\n{reference}\n\n{END}{after}"


def main() -> None:
    """Rewrite the pages in the folder given as argument, by default the current folder."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for name, reference in PAGES.items():
        page = root / name
        page.write_text(replace_tables(page.read_text(encoding="utf-8"), reference()), encoding="utf-8")
        print(page)


if __name__ == "__main__":
    main()
