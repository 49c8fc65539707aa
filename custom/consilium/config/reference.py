"""The fields of job.yaml, site.yaml and sites.yml as tables, read from the sections themselves.

`python -m consilium.config.reference [ROOT]` rewrites them in the pages, between two comments. A field's meaning is its own
description, the part of its class's docstring that begins with its name, or the line of MEANINGS.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from consilium.adapters.registry import ADAPTERS
from consilium.config.capacity import CapacityConfig
from consilium.config.cross_site import CrossSiteConfig
from consilium.config.data import DataConfig, PhantomConfig
from consilium.config.datasets import DatasetConfig
from consilium.config.deployment import AdminEntry, DeploymentConfig, ServerEntry, SiteEntry
from consilium.config.diagnostics import DiagnosticsConfig, OracleConfig
from consilium.config.job import FederationConfig, JobConfig, TrainingConfig, ValidateConfig
from consilium.config.meanings import MEANINGS
from consilium.config.privacy import (
    BudgetConfig,
    HospitalPrivacyPolicy,
    PatientLevelDpConfig,
    RecordLevelDpConfig,
    SiteLevelDpConfig,
)
from consilium.config.secure_aggregation import SecureAggregationConfig, SitePartnersConfig
from consilium.config.server import ServerConfig
from consilium.config.site import CacheConfig, NodesConfig, SiteConfig, TrackingConfig
from consilium.config.statistics import StatisticsConfig
from consilium.core.registry import KindField
from consilium.models.registry import MODELS
from consilium.strategies.registry import STRATEGIES
from consilium.tasks.classification import ClassificationScoresConfig
from consilium.tasks.registry import TASKS
from consilium.tasks.segmentation.scores import SegmentationScoresConfig

KEYS = ("name", "kind", "unit")
"""Fields that tell kinds apart; a kind's own heading has them."""
BEGIN, END = "<!-- begin: written by python -m consilium.config.reference -->", "<!-- end -->"
PLAIN = {int: "whole number", float: "number", str: "text", bool: "`true` or `false`", Path: "path", Any: "anything"}


@dataclass(frozen=True)
class Field:
    """One field as a reader sees it; all texts are Markdown of one line."""

    name: str
    type: str
    default: str
    meaning: str


# types ----------------------------------------------------------------------------------------------------------------


def shown_type(kind: Any, marks: Iterable[Any] = ()) -> str:
    """Return what a value of this annotation may be, in words, with the bounds that `marks` set."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return shown_type(args[0], [*args[1:], *marks])
    if registry := next((mark for mark in marks if isinstance(mark, KindField)), None):
        return f"section; `{registry.key}` tells the kind"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(shown_type(one) for one in args if one is not NoneType))
    return _container(kind, origin, args) + (_bounds(list(_flat(marks))) if kind in (int, float) else "")


def _container(kind: Any, origin: Any, args: tuple[Any, ...]) -> str:
    if origin in (list, tuple):
        return f"list of {shown_type(args[0])}"
    if origin is dict:
        return f"map from {shown_type(args[0])} to {shown_type(args[1])}"
    if kind in PLAIN:
        return PLAIN[kind]
    return "section" if issubclass(kind, BaseModel) else "map of " + ", ".join(f"`{name}`" for name in _hints(kind))


def _flat(marks: Iterable[Any]) -> Iterator[Any]:
    for mark in marks:
        yield from mark.metadata if isinstance(mark, FieldInfo) else [mark]


def _bounds(marks: list[Any]) -> str:
    """Return the numbers that marks allow, as ", from 1 to 1,000"; how long texts and lists may be is no news to a reader."""
    said: dict[str, str] = {}
    for name, text in (("ge", "from {}"), ("gt", "over {}"), ("le", "to {}"), ("lt", "under {}")):
        values = [getattr(mark, name) for mark in marks if getattr(mark, name, None) is not None]
        said |= {name: text.format(_number(values[-1]))} if values else {}
    if "gt" in said:
        said.pop("ge", None)
    return ", " + " ".join(said.values()) if said else ""


def _number(value: float) -> str:
    powers = {2**exponent: f"2^{exponent}" for exponent in (16, 60, 63)}
    return powers.get(int(value), "") or (f"{int(value):,}" if value == int(value) else f"{value:g}")


# defaults and meanings ------------------------------------------------------------------------------------------------


def _default(value: Any) -> str:
    """Return a default as YAML has it; a section's own defaults are in its own table."""
    if value is None or isinstance(value, BaseModel):
        return "-"
    plain = json.dumps(value, default=lambda one: vars(one) if dataclasses.is_dataclass(one) else str(one))
    return f"`{value}`" if isinstance(value, str) else "-" if plain in ("{}", "[]") else f"`{plain}`"


def clauses(text: str, names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Return (what a docstring says before any of `names`, what it says of each).

    A field's part begins with its name in backquotes, at the start of a sentence or after a comma, colon or semicolon; it ends
    where the next one begins.
    """
    plain = " ".join(text.split())
    begin = re.compile(r"(?:^|(?<=[.,:;)] ))`(" + "|".join(map(re.escape, names)) + r")\b[^`]*`(?!\))")
    found = list(begin.finditer(plain))
    ends = [*(match.start() for match in found[1:]), len(plain)]
    said: dict[str, str] = {}
    for match, end in zip(found, ends, strict=False):
        part = plain[match.start() : end].strip(" ,;:").removesuffix(".")
        said[match[1]] = f"{said[match[1]]}. {part}" if match[1] in said else part
    before = plain[: found[0].start()] if found else plain
    return re.sub(r"[^.]*:\s*$", "", before).strip(), said


def meaning(owner: type, name: str, info: Any, names: list[str]) -> str:
    """Return what a field means; "" where nothing says it."""
    said = MEANINGS.get(f"{owner.__name__}.{name}") or described(owner, name, names)
    given = {mark.description for mark in _marks(info) if mark.description and mark.description not in said}
    return "; ".join(filter(None, [said, *sorted(given)]))


def described(owner: type, name: str, names: list[str]) -> str:
    """Return what the docstrings of a field's class, of its bases and of its module say of it; "" for nothing."""
    found = next((one for doc in _docs(owner) if (one := clauses(doc, names)[1].get(name))), "")
    return found.removeprefix(f"`{name}`:").strip()


def _docs(owner: type) -> Iterator[str]:
    """Return docstrings of a class and its bases, then of its module."""
    yield from (base.__dict__["__doc__"] for base in owner.__mro__ if base.__dict__.get("__doc__") and base is not object)
    yield sys.modules[owner.__module__].__doc__ or ""


def _marks(kind: Any) -> Iterator[Any]:
    """Return all marks anywhere in an annotation."""
    if isinstance(kind, FieldInfo):
        yield kind
        yield from _marks(kind.annotation)
        return
    for arg in get_args(kind):
        yield from [arg] if isinstance(arg, FieldInfo) else _marks(arg)


# fields ---------------------------------------------------------------------------------------------------------------


def fields_of(section: type) -> list[Field]:
    """Return the fields of a section, or of a strategy's dataclass without those of its base classes."""
    return _section_fields(section) if issubclass(section, BaseModel) else _strategy_fields(section)


def _section_fields(section: type[BaseModel]) -> list[Field]:
    names, found = list(section.model_fields), []
    for name, info in section.model_fields.items():
        if not (name in KEYS and len(get_args(info.annotation)) == 1):
            said = meaning(section, name, info, names)
            found.append(Field(info.alias or name, shown_type(info.annotation, info.metadata), _default_of(info), said))
    return found


def _default_of(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    if registry := next((mark for mark in info.metadata if isinstance(mark, KindField)), None):
        return f"`{registry.default}`"
    if info.default_factory is None:
        return _default(info.default)
    return "see there" if info.default_factory_takes_validated_data else _default(info.default_factory())  # type: ignore[call-arg]


def _strategy_fields(kind: type) -> list[Field]:
    hints, own = _hints(kind), [f for f in dataclasses.fields(kind) if f.name in kind.__annotations__]
    found = []
    for one in own:
        start = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        said = meaning(kind, one.name, hints[one.name], [f.name for f in own])
        found.append(Field(one.name, shown_type(hints[one.name]), _default(start), said))
    return found


def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


# pages ----------------------------------------------------------------------------------------------------------------


def table(section: type) -> str:
    """Return a section's fields as a Markdown table."""
    rows = [[f"`{f.name}`", f.type, f.default, f.meaning] for f in fields_of(section)]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in [["field", "value", "default", "meaning"], *rows]]
    return "\n".join("| " + " | ".join(row) + " |" for row in [cells[0], ["---"] * 4, *cells[1:]])


def chapter(title: str, section: type) -> str:
    """Return a heading, what a section's docstring says of the whole, and its table."""
    intro = clauses(section.__doc__ or "", [f.name for f in fields_of(section)] or ["-"])[0]
    return "\n\n".join(part for part in (f"#### {title}", intro, table(section) if fields_of(section) else "") if part)


def _strategy(name: str, kind: type) -> str:
    """Return an algorithm's chapter, with the sentence that cites it."""
    heading, *rest = chapter(f"`strategy: {{name: {name}}}`", kind).split("\n\n")
    return "\n\n".join([heading, cited(kind), *rest])


def cited(kind: type) -> str:
    """Return the first sentence of an algorithm's file: its name, its source."""
    text = " ".join((sys.modules[kind.__module__].__doc__ or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z])", text)[0] if ". " in text else text


def job_reference() -> str:
    """Return all of job.yaml."""
    from consilium.strategies.heterogeneous_ranks.ranks import UnequalRanks

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
    parts += [_strategy(name, kind) for name, kind in STRATEGIES.items()]
    return "\n\n".join([*parts, chapter("`strategy:` of every algorithm with unequal ranks", UnequalRanks)])


def site_reference() -> str:
    """Return all of site.yaml."""
    parts = [chapter("The whole file", SiteConfig), chapter("An entry of `datasets:`", DatasetConfig)]
    parts += [chapter("`cache:`", CacheConfig), chapter("`tracking:`", TrackingConfig), chapter("`capacity:`", CapacityConfig)]
    parts += [chapter("`privacy:`", HospitalPrivacyPolicy), chapter("An entry of `privacy: {budgets:}`", BudgetConfig)]
    return "\n\n".join([*parts, chapter("`secure_aggregation:`", SitePartnersConfig), chapter("`nodes:`", NodesConfig)])


def deployment_reference() -> str:
    """Return all of sites.yml."""
    parts = [chapter("The whole file", DeploymentConfig), chapter("`server:`", ServerEntry)]
    return "\n\n".join([*parts, chapter("An entry of `sites:`", SiteEntry), chapter("An entry of `admins:`", AdminEntry)])


PAGES: dict[str, Callable[[], str]] = {
    "jobs/README.md": job_reference,
    "provisioning/administrator.md": site_reference,
    "provisioning/engineer.md": deployment_reference,
}


def rewritten(page: str, reference: str) -> str:
    """Return a page with the part between the comments replaced. Raises ValueError for a page without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"no {BEGIN} ... {END} in the page; put both lines where the tables belong")
    return f"{before}{BEGIN}\n\n{reference}\n\n{END}{after}"


def main() -> None:
    """Rewrite the pages below the folder that is given, or the current one."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for name, reference in PAGES.items():
        page = root / name
        page.write_text(rewritten(page.read_text(encoding="utf-8"), reference()), encoding="utf-8")
        print(page)


if __name__ == "__main__":
    main()
