"""The cross-site matrix: a score of every model on every site's data, as a table, a picture and JSON."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from consilium.messages import Stage
from consilium.report.clean import line
from consilium.report.tables import fit
from consilium.storage import write_atomic

PICTURE, VALUES = "cross_sites.png", "cross_sites.json"
SHARED = "(shared)"
"""What the model is called that all sites share, each with its own local factors; no site can have this name."""
WORDS = "rows: whose model; columns: whose data"


@dataclass(frozen=True)
class Matrix:
    """A score of every model on every site's data: `values` (models, sites), NaN where there is none.

    `models` are called by the sites they are of, or SHARED; `stages`: each model's.
    """

    metric: str
    split: str
    models: tuple[str, ...]
    stages: tuple[Stage, ...]
    sites: tuple[str, ...]
    values: np.ndarray

    @property
    def cells(self) -> list[list[float | None]]:
        """The values as JSON has them."""
        return [[None if math.isnan(value) else value for value in row] for row in self.values.tolist()]

    @property
    def title(self) -> str:
        """What is scored, in a line."""
        of = " and ".join(dict.fromkeys(str(stage) for stage in self.stages))
        return f"{self.metric} of the {of} models on every site's {self.split} data"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        told = {"metric": self.metric, "split": self.split, "models": self.models, "stages": [str(one) for one in self.stages]}
        return told | {"sites": self.sites, "values": self.cells}


def matrix(metric: str, split: str, rows: Sequence[tuple[str, Stage, Mapping[str, Mapping[str, float]]]]) -> Matrix:
    """Return the matrix of `metric`, of rows (model, stage, metrics by site)."""
    sites = sorted({site for _, _, found in rows for site in found})
    values = [[found.get(site, {}).get(metric, math.nan) for site in sites] for _, _, found in rows]
    models, stages = [model for model, _, _ in rows], [stage for _, stage, _ in rows]
    shape = (len(rows), len(sites))
    return Matrix(metric, split, tuple(models), tuple(stages), tuple(sites), np.array(values, float).reshape(shape))


def write(folder: Path, found: Matrix) -> None:
    """Write the matrix as a picture and as JSON."""
    from consilium.report.figures import plot_cross_sites

    file = io.BytesIO()
    plot_cross_sites(file, found.values, found.models, found.sites, found.title)
    write_atomic(folder / PICTURE, file.getvalue())
    write_atomic(folder / VALUES, json.dumps(found.to_dict(), indent=1).encode())


def read(raw: Any) -> Matrix | None:
    """Return the matrix of a cross_sites.json, which anybody may have written; None where it is none."""
    try:
        models, stages, sites = (tuple(map(str, raw[key])) for key in ("models", "stages", "sites"))
        cells = [[math.nan if value is None else float(value) for value in row] for row in raw["values"]]
        values = np.array(cells, float).reshape(len(models), len(sites))
        return Matrix(str(raw["metric"]), str(raw["split"]), models, tuple(map(Stage, stages)), sites, values)
    except (TypeError, ValueError, KeyError, OverflowError):
        return None


def table(found: Matrix, width: int) -> Table:
    """Return the matrix as a table of at most `width` cells: a row per model, or where it is too wide a line per score."""

    def wide(names: Mapping[str, str]) -> Table:
        made = _table("")
        for name in found.sites:
            made.add_column(line(names[name]), justify="right", no_wrap=True)
        for name, row in zip(found.models, found.values.tolist(), strict=True):
            made.add_row(line(names[name]), *map(number, row))
        return made

    def tall(names: Mapping[str, str]) -> Table:
        made = _table("model")
        for heading in ("data", "score"):
            made.add_column(heading, justify="right" if heading == "score" else "left", no_wrap=True)
        for name, row in zip(found.models, found.values.tolist(), strict=True):
            for place, (site, value) in enumerate(zip(found.sites, row, strict=True)):
                made.add_row("" if place else line(names[name]), line(names[site]), number(value))
            made.add_section()
        return made

    return fit([wide, wide, tall], {*found.models, *found.sites}, width)


def number(value: float) -> str:
    """Return a cell's text."""
    return "-" if math.isnan(value) else f"{value:.3f}"


def _table(first: str) -> Table:
    made = Table(box=SIMPLE, pad_edge=False)
    made.add_column(first, no_wrap=True)
    return made
