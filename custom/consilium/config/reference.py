"""Generates the tables of fields of job.yaml, site.yaml and sites.yml from the sections' JSON schemas.

`python -m consilium.config.reference [ROOT]` rewrites the tables in the pages, between two comments. The column "meaning" is
the field's description.
"""

import json
import sys
from collections.abc import Callable, Mapping
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
ALGORITHMS = "[Algorithms](algorithms.md) describes each algorithm. One without a row here has no fields."
UNEQUAL = "all for unequal ranks"
POWERS = {2**exponent: f"2^{exponent}" for exponent in (16, 60, 63)}


def fields_of(section: type) -> dict[str, dict[str, Any]]:
    """Return by name the JSON schema of every field of a section; of a strategy without its base classes' fields.

    The field that selects the kind is left out. A required field has no "default".
    """
    own = None if issubclass(section, BaseModel) else section.__annotations__
    return {
        name: field
        for name, field in _with_defaults(TypeAdapter(section).json_schema()).items()
        if not (name in KEYS and "const" in field) and (own is None or name in own)
    }


def _with_defaults(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields of a section's schema; those that are not required have a "default"."""
    required = schema.get("required", [])
    return {
        name: field | ({} if name in required else {"default": field.get("default")})
        for name, field in schema.get("properties", {}).items()
    }


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
        values = field.get("additionalProperties") or next(iter(field.get("patternProperties", {}).values()), True)
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


def rows_of(section: type, nested: bool = True) -> dict[str, tuple[str, str, str]]:
    """Return value, default and meaning of a section's fields by name; `nested`: also of sections in it, as `outer.inner`."""
    found = dict[str, tuple[str, str, str]]()
    sections = TypeAdapter(section).json_schema().get("$defs", {}) if nested else {}

    def add(prefix: str, fields: Mapping[str, dict[str, Any]]) -> None:
        for name, field in fields.items():
            value = field.get("default_kind", field.get("default"))
            if "default" not in field:
                default = "required"
            elif value in (None, {}, []) or "$ref" in field:  # a section's fields show their own defaults
                default = ""
            elif isinstance(value, float):
                default = f"`{value:.6g}`"
            else:
                default = f"`{value if isinstance(value, str) else json.dumps(value)}`"
            found[prefix + name] = (describe_type(field), default, field.get("description", ""))
            if (inner := _section_and_suffix(field)) and inner[0] != SiteConfig.__name__:  # has a page of its own
                add(f"{prefix}{name}{inner[1]}.", _with_defaults(sections.get(inner[0], {})))

    add("", fields_of(section))
    return found


def _section_and_suffix(field: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the name of the one section that a field is or contains, and its key suffix: .NAME for a map, [] for a list."""
    parts = [one for one in field.get("anyOf", [field]) if one.get("type") != "null"]
    values = field.get("additionalProperties") or next(iter(field.get("patternProperties", {}).values()), None)
    for inner, key in ((parts[0] if len(parts) == 1 else {}, ""), (field.get("items"), "[]"), (values, ".NAME")):
        if isinstance(inner, dict) and "$ref" in inner:
            return inner["$ref"].rpartition("/")[2], key
    return None


def markdown_table(kinds: Mapping[str, type], nested: bool = True, by_field: bool = True) -> str:
    """Return the fields of a section as a Markdown table. Kinds that agree on a field share its row; column "of" names them.

    Rows of one field stand together if `by_field`, else those of one kind.
    """
    of = dict[tuple[str, ...], list[str]]()
    for kind, section in kinds.items():
        for name, cells in rows_of(section, nested).items():
            of.setdefault((name, *cells), []).append(kind)
    order = list(dict.fromkeys(name for name, *_ in of))
    head = ["field", "of", "value", "default", "meaning"]
    rows = [head, ["---"] * len(head)]
    for (field, *rest), names in sorted(of.items(), key=lambda one: order.index(one[0][0]) if by_field else 0):
        rows.append([f"`{field}`", "all" if len(names) == len(kinds) else ", ".join(names), *rest])
    several = len(kinds) > 1
    shown = [row if several else [row[0], *row[2:]] for row in rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in shown)


def _docstring(section: type) -> str:
    return " ".join((section.__dict__.get("__doc__") or "").split())


def chapter(title: str, kinds: type | Mapping[str, type], about: str | None = None, nested: bool = True) -> str:
    """Return a heading, `about` (by default the docstring of the section, or of each of its kinds), and the table."""
    if isinstance(kinds, type):
        return "\n\n".join([f"## {title}", _docstring(kinds) if about is None else about, markdown_table({"": kinds}, nested)])
    intro = "\n".join(f"- `{name}`: {_docstring(kind)}" for name, kind in kinds.items()) if about is None else about
    return "\n\n".join([f"## {title}", intro, markdown_table(kinds, nested)])


def job_reference() -> str:
    """Return the reference of job.yaml as Markdown."""
    parts = [chapter("The whole file", JobConfig, "Server and sites read the same file.", nested=False)]
    parts += [chapter("`training:`", TrainingConfig, ROUNDS), chapter("`federation:`", FederationConfig)]
    parts += [chapter("`server:`", ServerConfig)]
    for key, registry in (("model", MODELS), ("adapter", ADAPTERS), ("task", TASKS)):
        parts += [chapter(f"`{key}:`", {name: kind.config for name, kind in registry.items()})]
    units = {"site": SiteLevelDpConfig, "patient": PatientLevelDpConfig, "record": RecordLevelDpConfig}
    parts += [chapter("`privacy:`", units), chapter("`secure_aggregation:`", SecureAggregationConfig)]
    parts += [chapter("`statistics:`", StatisticsConfig), chapter("`cross_site:`", CrossSiteConfig)]
    parts += [chapter("`diagnostics:`", DiagnosticsConfig), chapter("`data:`", DataConfig), "## `strategy:`", ALGORITHMS]
    return "\n\n".join([*parts, markdown_table({**STRATEGIES, UNEQUAL: UnequalRanks}, by_field=False)])


def site_reference() -> str:
    """Return the reference of site.yaml as Markdown."""
    return markdown_table({"": SiteConfig})


def deployment_reference() -> str:
    """Return the reference of sites.yml as Markdown."""
    return markdown_table({"": DeploymentConfig})


PAGES: dict[str, Callable[[], str]] = {
    "jobs/fields.md": job_reference,
    "provisioning/site-settings.md": site_reference,
    "provisioning/federation-settings.md": deployment_reference,
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
