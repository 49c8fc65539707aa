"""Tables with classes or sites on both sides: who took which class for which, and every model on every site's data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from consilium.report.clean import shown
from consilium.report.confusion import confusions
from consilium.report.cross_sites import VALUES, WORDS, number, read
from consilium.report.means import Results
from consilium.report.page.files import read_json
from consilium.report.page.scores import Table

MOST_CLASSES, MOST_SITES = 24, 24
"""Of tables on one page; confusion.png and results.json have more."""


@dataclass(frozen=True)
class Confusion:
    """The confusion tables of one site, or of all: one for each model."""

    name: str
    tables: Sequence[Table]


def confusion_tables(results: Results, classes: Sequence[str]) -> list[Confusion]:
    """Return the confusion tables of all sites together, where there are two or more, and of each; [] for no such task."""
    if not 1 < len(classes) <= MOST_CLASSES:
        return []
    reporting = {site: found for site, found in sorted(results.items()) if confusions({site: found}, list(classes))}
    parts: dict[str, Results] = {"all sites": reporting} if len(reporting) > 1 else {}
    parts |= {site: {site: reporting[site]} for site in list(reporting)[:MOST_SITES]}
    return [Confusion(name, _tables(name, found, classes)) for name, found in parts.items()]


def _tables(name: str, results: Results, classes: Sequence[str]) -> list[Table]:
    return [_table(f"{name}, {stage} model", counts, classes) for stage, counts in confusions(results, list(classes)).items()]


def _table(what: str, counts: np.ndarray, classes: Sequence[str]) -> Table:
    """Return a row for each true class: how many were taken for which, and the share that was found."""
    rows = []
    for place, name in enumerate(classes):
        whole = float(counts[place].sum())
        found = f"{counts[place, place] / whole:.3f}" if whole else "-"
        rows.append([name, *(f"{count:.0f}" for count in counts[place]), found])
    return Table(what, ["true class", *classes, "recall"], rows)


def cross_site_table(folder: Path) -> Table | None:
    """Return the matrix of a cross-site job; None for any other run, or a damaged file."""
    found = read(read_json(folder / VALUES))
    if found is None or not found.models:
        return None
    rows = [[name, *map(number, row)] for name, row in zip(found.models, found.values.tolist(), strict=True)]
    columns = ["model of", *(f"on {site}" for site in found.sites)]
    return Table(shown(found.title), columns, rows, notes=[f"{WORDS[0].upper()}{WORDS[1:]}.", _MEANT])


_MEANT = "(shared): the model that all sites share; each runs it with its own local factors."


def classes_of(task: object) -> Sequence[str]:
    """Return the classes of a task's section, in the job's order."""
    classes = getattr(task, "classes", ())
    return list(classes) if isinstance(classes, Mapping | list | tuple) else []
