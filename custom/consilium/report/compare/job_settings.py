"""Tables of a comparison's settings and data for a paper's appendix, from the job.yaml and the events of its runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from consilium.config.privacy import MOST_WEIGHT
from consilium.core.messages import Stage
from consilium.core.sanitize import first_names_text
from consilium.report.compare.comparability import UNNAMED, Group
from consilium.report.run_record import RunRecord, finite_score
from consilium.report.tables import Column, Table, columns, only_true
from consilium.tasks.registry import COUNT

SECTIONS = ("strategy.", "model.", "adapter.", "task.", "training.", "federation.", "privacy.", "data.")
"""Sections of job.yaml with settings of a method."""
COMMON = (
    "model.name", "model.variant", "model.checkpoint", "model.image_size", "model.dtype", "adapter.kind", "adapter.rank",
    "adapter.alpha", "adapter.width", "adapter.targets", "adapter.decoder", "task.name", "task.loss", "task.augment",
    "training.rounds", "training.local_epochs", "training.local_steps", "training.batch_size", "training.accumulate",
    "training.optimizer", "training.lr", "training.schedule", "training.weight_decay", "training.momentum",
    "training.precision", "federation.fraction_train", "privacy.unit", "privacy.epsilon", "data.most_training",
)  # fmt: skip
"""Settings that the table shows if all methods have the same value, by field of job.yaml."""
MOST = 24
"""Fields of one method in the table, at most."""


def settings_tables(groups: Sequence[Group], about: str = "") -> list[Table]:
    """Return for each group the tables of common settings, of settings that differ, and of samples. `about`: the study's."""
    return [table for group in groups for table in (*_settings(group, about), _samples(group))]


def _settings(group: Group, about: str) -> list[Table]:
    """Return the table of settings that all methods share, and the table of those that differ, if any do."""
    firsts = {method: runs[0].settings for method in group.methods if (runs := group.runs_of(method))}
    fields = dict.fromkeys(key for one in firsts.values() for key in one if key.startswith(SECTIONS) and key not in UNNAMED)
    differing = [key for key in fields if len({_value_text(one.get(key)) for one in firsts.values()}) > 1]
    first = group.first.settings
    rows = [[key, _value_text(first[key])] for key in COMMON if first.get(key) is not None and key not in differing]
    both = [Column("setting", right=False), Column("value", right=False)]
    notes = ["fields as in job.yaml", *([f"the study: {about}"] if about else [])]
    found = [Table(group.with_group_name("Settings common to all methods"), both, rows, notes, appendix=True)]
    own = [[method, _own_text(one, differing)] for method, one in firsts.items()]
    heads = [Column("method", right=False), Column("settings", right=False)]
    title = group.with_group_name("Settings that differ by method")
    return found + ([Table(title, heads, own, ["fields as in job.yaml"], appendix=True)] if differing else [])


def _own_text(settings: Mapping[str, Any], fields: Sequence[str]) -> str:
    """Return a method's values of the differing fields that it has."""
    return first_names_text([f"{key} {_value_text(settings[key])}" for key in fields if settings.get(key) is not None], MOST)


def _value_text(value: Any) -> str:
    """Return a setting's value as a text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        ", ".join(map(str, value))
        if isinstance(value, list | tuple)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _samples(group: Group) -> Table:
    """Return the table of samples, with a row per site. A number is a range if runs have different ones."""
    runs, split = list(group.runs.values()), group.first.split or "test"
    rows = []
    for site in sorted(frozenset[str]().union(*(run.sites for run in runs))):
        scored = {int(n) for run in runs for stage in Stage if (n := finite_score(run.score(site, stage, COUNT))) is not None}
        trained = {n for run in runs if (n := training_samples(run, site))}
        validated = {n for run in runs if (n := _generated_validation_samples(run, site))}
        rows.append([site, *map(_range_text, [trained, *([validated] if split != "validation" else []), scored])])
    heads = columns("site", "training", *(["validation"] if split != "validation" else []), split)
    equal = any(row[1] == "-" for row in rows)
    notes = {
        f"training: as the sites reported; {split}: samples that were scored": True,
        "training -: not known, because updates have equal weights or a site did not train": equal,
        "validation -: not on record; known for generated data only": split != "validation" and any(r[2] == "-" for r in rows),
    }
    return Table(group.with_group_name("Samples by site"), heads, rows, only_true(notes), appendix=True)


def _generated_validation_samples(run: RunRecord, site: str) -> int:
    """Return a site's number of validation samples if its data are generated; 0 if they are not, or if it is not known."""
    generated = run.content.get(site) == ""  # a digest for real data; no entry in a run of startup kits
    count = run.settings.get("data.phantoms.validation") if generated else None
    return count if isinstance(count, int) else 0


def training_samples(run: RunRecord, site: str) -> int:
    """Return a site's number of training samples, which is its weight in the mean; 0 if the weight is not that number."""
    if run.config.weighting != "samples":
        return 0
    weights = [line["weight"] for line in run.lines_of("result") if line["site"] == site and line.get("weight")]
    most = max(weights, default=0)
    return int(most) if most < (run.config.federation.max_weight or MOST_WEIGHT) else 0


def _range_text(values: set[int]) -> str:
    """Return numbers as one number or a range; "-" for none."""
    return "–".join(f"{n:,}" for n in dict.fromkeys((min(values), max(values)))) if values else "-"
