"""Generates the tables of fields of job.yaml, site.yaml and sites.yml from the sections' JSON schemas.

`python -m consilium.config.reference [ROOT]` rewrites the tables in the pages, between two comments. The column "meaning" is
the field's description.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from consilium.adapters.registry import ADAPTERS
from consilium.config.data import DataConfig, DatasetConfig, PhantomConfig
from consilium.config.deployment import AdminEntry, DeploymentConfig, ServerEntry, SiteEntry
from consilium.config.job import JobConfig
from consilium.config.privacy import (
    BudgetConfig,
    HospitalPrivacyPolicy,
    PatientLevelDpConfig,
    RecordLevelDpConfig,
    SecureAggregationConfig,
    SiteLevelDpConfig,
    SitePartnersConfig,
)
from consilium.config.run_sections import (
    CrossSiteConfig,
    DiagnosticsConfig,
    FederationConfig,
    OracleConfig,
    ServerConfig,
    StatisticsConfig,
    TrainingConfig,
    ValidateConfig,
)
from consilium.config.site import CacheConfig, CapacityConfig, SiteConfig, TrackingConfig
from consilium.models.registry import MODELS
from consilium.strategies.heterogeneous_ranks.ranks import UnequalRanks
from consilium.strategies.registry import STRATEGIES
from consilium.tasks.classification import ClassificationScoresConfig
from consilium.tasks.registry import TASKS
from consilium.tasks.segmentation.scores import SegmentationScoresConfig

KEYS = ("name", "kind", "unit")
"""Fields that select the kind of a section. The heading of a kind shows them, so its table does not."""
BEGIN, END = "<!-- begin: written by python -m consilium.config.reference -->", "<!-- end -->"
WORDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true` or `false`"}
BOUNDS = {"minimum": "from", "exclusiveMinimum": "over", "maximum": "to", "exclusiveMaximum": "under"}
POWERS = {2**exponent: f"2^{exponent}" for exponent in (16, 60, 63)}


def fields_of(section: type) -> dict[str, dict[str, Any]]:
    """Return by name the JSON schema of every field of a section; of a strategy without its base classes' fields.

    The field that selects the kind is left out. A required field has no "default".
    """
    schema = TypeAdapter(section).json_schema()
    own = None if issubclass(section, BaseModel) else section.__annotations__
    return {
        name: field | ({} if name in schema.get("required", []) else {"default": field.get("default")})
        for name, field in schema.get("properties", {}).items()
        if not (name in KEYS and "const" in field) and (own is None or name in own)
    }


def shown_type(field: Mapping[str, Any]) -> str:
    """Return the allowed values of a field in words."""
    if "kind" in field:
        return f"section; `{field['kind']}` tells the kind"
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if parts := field.get("anyOf", field.get("oneOf")):
        return " or ".join(dict.fromkeys(shown_type(one) for one in parts if one.get("type") != "null"))
    if field.get("type") == "array":
        return f"list of {shown_type(field.get('items') or field['prefixItems'][0])}"
    if field.get("type") == "object":
        values = field.get("additionalProperties") or next(iter(field.get("patternProperties", {}).values()), True)
        return f"map to {shown_type(values)}" if isinstance(values, dict) else "map"
    if "$ref" in field:
        return "section"
    if field.get("format") == "path":
        return "path"
    bounds = [
        f"{word} {_number(field[key])}"
        for key, word in BOUNDS.items()
        if key in field and f"exclusive{key.capitalize()}" not in field
    ]
    return WORDS.get(field.get("type", ""), "anything") + (", " + " ".join(bounds) if bounds else "")


def _number(value: float) -> str:
    return POWERS.get(int(value), "") or (f"{int(value):,}" if value == int(value) else f"{value:g}")


def _default(field: Mapping[str, Any]) -> str:
    """Return a field's default as YAML, "-" for none or for a section, whose own table has its defaults."""
    if "default" not in field:
        return "required"
    value = field.get("default_kind", field["default"])
    if value in (None, {}, []) or "$ref" in field:
        return "-"
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def table(section: type) -> str:
    """Return a section's fields as a Markdown table."""
    rows = [("field", "value", "default", "meaning"), ("---",) * 4]
    for name, field in fields_of(section).items():
        rows.append((f"`{name}`", shown_type(field), _default(field), field.get("description", "")))
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def chapter(title: str, section: type, cited: str = "") -> str:
    """Return a heading, `cited`, a section's docstring, and its table."""
    intro = " ".join((section.__dict__.get("__doc__") or "").split())
    parts = (f"## {title}", cited, intro, table(section) if fields_of(section) else "")
    return "\n\n".join(part for part in parts if part)


def _source(kind: type) -> str:
    """Return the first sentence of the docstring of an algorithm's module."""
    text = " ".join((sys.modules[kind.__module__].__doc__ or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z])", text)[0] if ". " in text else text


def job_reference() -> str:
    """Return the reference of job.yaml as Markdown."""
    parts = [chapter("The whole file", JobConfig), chapter("`training:`", TrainingConfig)]
    parts += [chapter("`training: {validate:}`", ValidateConfig)]
    parts += [chapter("`federation:`", FederationConfig), chapter("`server:`", ServerConfig)]
    parts += [chapter("`secure_aggregation:`", SecureAggregationConfig)]
    for key, word, registry in (("model", "name", MODELS), ("adapter", "kind", ADAPTERS), ("task", "name", TASKS)):
        parts += [chapter(f"`{key}: {{{word}: {name}}}`", kind.config) for name, kind in registry.items()]
    parts += [chapter("`task: {scores:}` of segmentation", SegmentationScoresConfig)]
    parts += [chapter("`task: {scores:}` of classification", ClassificationScoresConfig)]
    units = {"site": SiteLevelDpConfig, "patient": PatientLevelDpConfig, "record": RecordLevelDpConfig}
    parts += [chapter(f"`privacy: {{unit: {unit}}}`", section) for unit, section in units.items()]
    parts += [chapter("`statistics:`", StatisticsConfig), chapter("`cross_site:`", CrossSiteConfig)]
    parts += [chapter("`diagnostics:`", DiagnosticsConfig), chapter("`diagnostics: {oracle:}`", OracleConfig)]
    parts += [chapter("`data:`", DataConfig), chapter("`data: {phantoms:}`", PhantomConfig)]
    parts += [chapter(f"`strategy: {{name: {name}}}`", kind, _source(kind)) for name, kind in STRATEGIES.items()]
    return "\n\n".join([*parts, chapter("`strategy:` of every algorithm with unequal ranks", UnequalRanks)])


def site_reference() -> str:
    """Return the reference of site.yaml as Markdown."""
    parts = [chapter("The whole file", SiteConfig), chapter("An entry of `datasets:`", DatasetConfig)]
    parts += [chapter("`cache:`", CacheConfig), chapter("`tracking:`", TrackingConfig), chapter("`capacity:`", CapacityConfig)]
    parts += [chapter("`privacy:`", HospitalPrivacyPolicy), chapter("An entry of `privacy: {budgets:}`", BudgetConfig)]
    return "\n\n".join([*parts, chapter("`secure_aggregation:`", SitePartnersConfig)])


def deployment_reference() -> str:
    """Return the reference of sites.yml as Markdown."""
    parts = [chapter("The whole file", DeploymentConfig), chapter("`server:`", ServerEntry)]
    return "\n\n".join([*parts, chapter("An entry of `sites:`", SiteEntry), chapter("An entry of `admins:`", AdminEntry)])


PAGES: dict[str, Callable[[], str]] = {
    "jobs/fields.md": job_reference,
    "provisioning/site-settings.md": site_reference,
    "provisioning/federation-settings.md": deployment_reference,
}


def rewritten(page: str, reference: str) -> str:
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
        page.write_text(rewritten(page.read_text(encoding="utf-8"), reference()), encoding="utf-8")
        print(page)


if __name__ == "__main__":
    main()
