"""Which cells the studies of a workspace have now: what `study run` keeps of them, and what reads it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium.errors import ConfigError
from consilium.report.clean import shown
from consilium.report.page.files import folders, read_json
from consilium.storage import locked, write_atomic

CELLS, KEPT = "cells", "studies.json"
SEED = "seed"
"""What the axis of seeds is called in workspaces of former versions, which do not say it."""


@dataclass(frozen=True)
class StudyCell:
    """A cell as its study calls it: its folder, its values on all axes, and on those that name what is compared."""

    folder: Path
    labels: Mapping[str, str]
    method: Mapping[str, str]

    @property
    def name(self) -> str:
        """Its values on all axes, as `method=IAT,seed=0`; "" where it has none."""
        return _name(self.labels)


def keep_cells(workspace: Path, study: str, cells: Mapping[str, Mapping[str, str]], axes: Sequence[str]) -> None:
    """Keep a study's cells, by folder and in its order, and the `axes` that name what is compared; other studies' stay."""
    with locked(workspace):
        kept = _kept(workspace) | {study: {"axes": list(axes), "cells": {name: dict(one) for name, one in cells.items()}}}
        write_atomic(workspace / KEPT, json.dumps(kept, indent=1).encode())


def study_cells(workspace: Path) -> list[StudyCell]:
    """Return the cells that have begun and are of a study as it was last run; of a workspace that does not say, all."""
    there = {one.name: one for one in folders(workspace / CELLS)}
    if not (kept := _kept(workspace)):
        return [_former(folder) for folder in sorted(there.values(), key=_place)]
    found = {}
    for one in kept.values():
        for name, labels in one["cells"].items():
            if name in there:
                found[name] = StudyCell(there[name], labels, {axis: labels[axis] for axis in one["axes"]})
    return list(found.values())


def earlier_cells(workspace: Path, study: str, present: Iterable[str]) -> list[Path]:
    """Return the folders of cells that neither a study, which now has those `present`, nor another one here has any more."""
    others = {name for key, one in _kept(workspace).items() if key != study for name in one["cells"]}
    known = {*present, *others}
    return [one for one in folders(workspace / CELLS) if one.name not in known and (one / "cell.json").is_file()]


def check_names(workspace: Path, cells: Sequence[StudyCell]) -> None:
    """Raise ConfigError for two cells of one name."""
    seen: dict[str, StudyCell] = {}
    for cell in cells:
        if cell.name and (other := seen.setdefault(cell.name, cell)) is not cell:
            who = (
                f"{shown(workspace, 200)}: {cell.name} is two runs, {CELLS}/{other.folder.name} and {CELLS}/{cell.folder.name}"
            )
            remedy = "run `consilium study run` again, which keeps what is the study's now, or move the older folder away"
            raise ConfigError(f"{who}, of two forms of a study or of two studies; {remedy}")


def values_of_cell(folder: Path) -> str:
    """Return a study's run's values on all axes, as `method=IAT,seed=0`; "" for any other run."""
    return _name(_labels(folder))


def _name(labels: Mapping[str, str]) -> str:
    return ",".join(f"{shown(axis)}={shown(value)}" for axis, value in labels.items())


def _labels(folder: Path) -> dict[str, str]:
    labels = found.get("labels") if isinstance(found := read_json(folder / "cell.json"), dict) else None
    return labels if isinstance(labels, dict) else {}


def _former(folder: Path) -> StudyCell:
    labels = _labels(folder)
    return StudyCell(folder, labels, {axis: value for axis, value in labels.items() if axis != SEED})


def _place(folder: Path) -> int:
    found = read_json(folder / "cell.json")
    place = found.get("place") if isinstance(found, dict) else None
    return place if isinstance(place, int) else 0


def _kept(workspace: Path) -> dict[str, Any]:
    """Return what is kept of each study; {} where nothing is, or it is damaged."""
    found = read_json(workspace / KEPT)
    return {key: one for key, one in found.items() if _is_whole(one)} if isinstance(found, dict) else {}


def _is_whole(one: Any) -> bool:
    """Tell whether what is kept of a study has axes, and cells with a value on each."""
    cells, axes = (one.get("cells"), one.get("axes")) if isinstance(one, dict) else (None, None)
    if not isinstance(cells, dict) or not isinstance(axes, list):
        return False
    return all(isinstance(labels, dict) and set(axes) <= labels.keys() for labels in cells.values())
