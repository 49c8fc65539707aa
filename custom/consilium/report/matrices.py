"""Numbers with names on both sides: every model on every site's data, and which class was taken for which."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from consilium.core.messages import MetricKey, Stage
from consilium.core.storage import write_atomic
from consilium.report import figures
from consilium.report.run_record import Results
from consilium.report.tables import Table, columns, number

PICTURE, VALUES = "cross_sites.png", "cross_sites.json"
SHARED = "(shared)"
"""The name of the model that all sites share, each with its own local factors; no site can have this name."""
WORDS = "rows: whose model; columns: whose data"
CONFUSION = "confusion/"


@dataclass(frozen=True)
class CrossSiteMatrix:
    """A score of every model on every site's data: `values` (models, sites), NaN where there is none.

    `models` are named by their sites, or SHARED; `stages`: each model's; `grid`: whose pixels are scored, "" for no masks.
    """

    metric: str
    split: str
    models: tuple[str, ...]
    stages: tuple[Stage, ...]
    sites: tuple[str, ...]
    values: np.ndarray
    grid: str = ""

    @property
    def title(self) -> str:
        """What is scored, in a line."""
        of = " and ".join(dict.fromkeys(map(str, self.stages)))
        grid = f" ({self.grid})" if self.grid else ""
        return f"{self.metric}{grid} of the {of} models on every site's {self.split} data"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self) | {"values": [[None if math.isnan(v) else v for v in row] for row in self.values.tolist()]}

    def table(self) -> Table:
        """Return a row per model."""
        rows = [[name, *map(number, row)] for name, row in zip(self.models, self.values.tolist(), strict=True)]
        notes = [WORDS, "(shared): the model that all sites share; each runs it with its own local factors"]
        return Table(self.title, columns("model of", *self.sites), rows, notes[: 1 + (SHARED in self.models)])

    def write(self, folder: Path) -> None:
        """Write the matrix as a picture and as JSON."""
        figures.plot_cross_sites(folder / PICTURE, self.values, self.models, self.sites, self.title)
        write_atomic(folder / VALUES, json.dumps(self.to_dict(), indent=1).encode())


def cross_site_matrix(metric: str, split: str, rows: Sequence[tuple[str, Stage, Results]], grid: str = "") -> CrossSiteMatrix:
    """Return the matrix of `metric`, of rows (model, stage, metrics by site)."""
    sites = sorted({site for _, _, found in rows for site in found})
    values = [[found.get(site, {}).get(metric, math.nan) for site in sites] for _, _, found in rows]
    models, stages = [model for model, _, _ in rows], [stage for _, stage, _ in rows]
    shaped = np.array(values, float).reshape(len(rows), len(sites))
    return CrossSiteMatrix(metric, split, tuple(models), tuple(stages), tuple(sites), shaped, grid)


def read_matrix(raw: Any) -> CrossSiteMatrix | None:
    """Return the matrix of a cross_sites.json, which anybody may have written; None where it is none."""
    try:
        models, stages, sites = (tuple(map(str, raw[key])) for key in ("models", "stages", "sites"))
        cells = [[math.nan if value is None else float(value) for value in row] for row in raw["values"]]
        values = np.array(cells, float).reshape(len(models), len(sites))
        metric, split, grid = (str(one) for one in (raw["metric"], raw["split"], raw.get("grid", "")))
        found = CrossSiteMatrix(metric, split, models, tuple(map(Stage, stages)), sites, values, grid)
    except (TypeError, ValueError, KeyError, OverflowError, AttributeError):
        return None
    return found if models and len(stages) == len(models) else None


def confusions(results: Results, classes: Sequence[str]) -> dict[str, np.ndarray]:
    """Return counts (C, C), rows true and columns predicted, by stage, summed over sites; {} where none reports any."""
    pairs = {f"{CONFUSION}{true}/{said}": (i, j) for i, true in enumerate(classes) for j, said in enumerate(classes)}
    found: dict[str, np.ndarray] = {}
    for name, count in ((n, c) for metrics in results.values() for n, c in metrics.items()):
        key = MetricKey.parse(name)
        if key is not None and key.metric in pairs:
            found.setdefault(str(key.stage), np.zeros((len(classes), len(classes))))[pairs[key.metric]] += count
    return {str(stage): found[stage] for stage in Stage if stage in found}


def confusion_tables(results: Results, classes: Sequence[str], most: int = 24) -> dict[str, list[Table]]:
    """Return a table per model, by site, at first of all sites together where there are several; {} for no such task.

    A row is a true class; recall is the share of it that was found. Over `most` classes there is no table.
    """
    if not 1 < len(classes) <= most:
        return {}
    there = {site: {site: found} for site, found in sorted(results.items()) if confusions({site: found}, classes)}
    parts: dict[str, Results] = {"all sites": results} if len(there) > 1 else {}
    made: dict[str, list[Table]] = {}
    for name, part in [*parts.items(), *list(there.items())[:most]]:
        for stage, counts in confusions(part, classes).items():
            wholes = counts.sum(1).tolist()
            recalls = [number(counts[i, i] / whole if whole else None) for i, whole in enumerate(wholes)]
            rows = [[one, *(f"{n:.0f}" for n in counts[i]), recalls[i]] for i, one in enumerate(classes)]
            table = Table(f"{name}, {stage} model", columns("true class", *classes, "recall"), rows)
            made.setdefault(name, []).append(table)
    return made
