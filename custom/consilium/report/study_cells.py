"""Which cells the studies of a workspace have now: written by `study run`, read by reports, comparisons and `use`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium.core.errors import ConfigError
from consilium.core.sanitize import shown
from consilium.core.storage import locked, write_atomic
from consilium.report.plain_files import read_json, subfolders

CELLS, KEPT = "cells", "studies.json"
SEED = "seed"
"""The axis of seeds in workspaces of former versions, which do not say it."""


@dataclass(frozen=True)
class StudyCell:
    """A cell of a study: its folder, its values on all axes, and on those that name what is compared."""

    folder: Path
    labels: Mapping[str, str]
    method: Mapping[str, str]

    @property
    def name(self) -> str:
        """Its values on all axes, as `method=IAT,seed=0`; "" where it has none."""
        return ",".join(f"{shown(axis)}={shown(value)}" for axis, value in self.labels.items())


def keep_cells(workspace: Path, study: str, cells: Mapping[str, Mapping[str, str]], axes: Sequence[str]) -> None:
    """Keep a study's cells, by folder and in its order, and the `axes` that name what is compared; other studies' stay."""
    with locked(workspace):
        kept = _kept(workspace) | {study: {"axes": list(axes), "cells": {name: dict(one) for name, one in cells.items()}}}
        write_atomic(workspace / KEPT, json.dumps(kept, indent=1).encode())


def study_cells(workspace: Path) -> list[StudyCell]:
    """Return the cells that have begun and are of a study as it was last run; of a workspace that does not say, all."""
    there = {one.name: one for one in subfolders(workspace / CELLS)}
    found = {}
    for one in (kept := _kept(workspace)).values():
        for name, labels in one["cells"].items():
            if name in there:
                found[name] = StudyCell(there[name], labels, {axis: labels[axis] for axis in one["axes"]})
    if kept:
        return list(found.values())
    places = {folder: read_json(folder / "cell.json").get("place") for folder in there.values()}
    ordered = sorted(places, key=lambda folder: place if isinstance(place := places[folder], int) else 0)
    labels_of = {folder: _labels(folder) for folder in ordered}
    return [StudyCell(f, of, {axis: value for axis, value in of.items() if axis != SEED}) for f, of in labels_of.items()]


def earlier_cells(workspace: Path, study: str, present: Iterable[str]) -> list[Path]:
    """Return the folders of cells that neither a study, which now has those `present`, nor another one here has any more."""
    known = {*present, *(name for key, one in _kept(workspace).items() if key != study for name in one["cells"])}
    return [one for one in subfolders(workspace / CELLS) if one.name not in known and (one / "cell.json").is_file()]


def check_names(workspace: Path, cells: Sequence[StudyCell]) -> None:
    """Raise ConfigError for two cells of one name."""
    seen: dict[str, StudyCell] = {}
    for cell in cells:
        if cell.name and (other := seen.setdefault(cell.name, cell)) is not cell:
            two = f"{CELLS}/{other.folder.name} and {CELLS}/{cell.folder.name}, of two forms of a study or of two studies"
            remedy = "run `consilium study run` again, which keeps what is the study's now, or move the older folder away"
            raise ConfigError(f"{shown(workspace, 200)}: {cell.name} is two runs, {two}; {remedy}")


def values_of_cell(folder: Path) -> str:
    """Return a study's run's values on all axes, as `method=IAT,seed=0`; "" for any other run."""
    return StudyCell(folder, _labels(folder), {}).name


def _labels(folder: Path) -> dict[str, str]:
    labels = read_json(folder / "cell.json").get("labels")
    return labels if isinstance(labels, dict) else {}


def _kept(workspace: Path) -> dict[str, Any]:
    """Return what is kept of each study that has axes, and cells with a value on each; {} where it is damaged."""
    found = {}
    for key, one in read_json(workspace / KEPT).items():
        cells, axes = (one.get("cells"), one.get("axes")) if isinstance(one, dict) else (None, None)
        rows = list(cells.values()) if isinstance(cells, dict) and isinstance(axes, list) else [None]
        if all(isinstance(labels, dict) and set(axes or ()) <= labels.keys() for labels in rows):
            found[key] = one
    return found
