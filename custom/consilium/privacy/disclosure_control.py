"""Statistical disclosure control, without noise: counts of no person or at least `minimum` persons, once per data set.

**Small counts.** A cell is one class, one size range or one range of grey levels. The order of the cells does not depend on the
data. A cell of 1 to minimum - 1 people is merged with the cells after it until the group has at least `minimum` people. A
remainder at the end joins the group before it. A cell of no people is shown as 0 unless a group is being merged. Every sample
is in some group, so a total minus the shown groups is again a group. At least minimum - 1 values remain possible for a merged
cell, even to a reader who knows this rule and the total. A split of fewer than `minimum` people is not shown. Classes that may
overlap are shown one by one, see `releasable_classes`.

**Asking again.** Two answers with different bins, classes or minima could be subtracted from each other. So could two answers
about data that changed in between. So a site answers one question per data set, stores the answer, and returns the same bytes
when the same question comes again. A different question is refused until the administrator removes the stored answer.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from consilium.config.job import JobConfig
from consilium.core.errors import Reason, RefusedError
from consilium.core.schema import Section, Share
from consilium.core.storage import lock_folder, read_json, refuse_if_unwritable, write_json
from consilium.data.settings import PictureSettings
from consilium.data.stats import Tally, class_cells, grey_bin_names

FOLDER = "statistics"
Names = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=64)], ...], Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=0, le=10**9)]


class Group(Section):
    """The number of samples in the cells `names` together."""

    names: Names
    samples: Count


class AreaShare(Section):
    """The mean share of a picture that the cells `names` take together."""

    names: Names
    share: Share


Groups = Annotated[tuple[Group, ...], Field(max_length=256)]
Portions = Annotated[tuple[AreaShare, ...], Field(max_length=256)]


class SplitStatistics(Section):
    """The counts of one split. `patients`: None if the list names none. `classes` that may overlap are never merged."""

    samples: Count
    patients: Count | None
    classes: Groups


class SiteStatistics(Section):
    """The statistics of one site, as they leave it.

    `minimum`: the smallest number of people in a group; `areas`: the mean share of a picture that each class covers.
    """

    minimum: Annotated[int, Field(ge=1, le=100_000)]
    splits: dict[Literal["training", "validation", "test"], SplitStatistics | None]
    areas: Portions
    sizes: Groups
    spacing: Groups
    lengths: Groups
    greys: Portions

    @classmethod
    def read(cls, values: Any) -> "SiteStatistics":
        """Return the statistics in a message. Raises RefusedError for an invalid message."""
        try:
            return cls.model_validate_json(json.dumps(values), strict=True)
        except (ValidationError, TypeError, ValueError, RecursionError):
            raise RefusedError("no statistics of this version; see that site") from None


@dataclass(frozen=True)
class Terms:
    """A site.yaml's rules for statistics. `share`: whether they may leave; None allows it without privacy only, see `check`.

    `minimum`: the site's own smallest number of people in a group.
    """

    share: bool | None = None
    minimum: int = 10

    def check(self, name: str, protects: bool, private: bool) -> None:
        """Raise RefusedError unless statistics may leave in this job.

        If the site `protects` its data by a privacy policy, or the job is `private`, site.yaml must allow them.
        """
        if self.share or (self.share is None and not protects and not private):
            return
        why = "the job is private" if private else "site.yaml has a privacy policy"
        why = "site.yaml has share_statistics: false" if self.share is False else why
        raise RefusedError(
            f"{name}: {why}; nothing was sent; statistics have no noise; share_statistics: true lets them leave all the same",
            Reason.STATISTICS,
        )


TERMS = Terms()


# one answer -----------------------------------------------------------------------------------------------------------


def question_hash(config: JobConfig) -> str:
    """Return the SHA-256 of all job settings on which the statistics depend."""
    task = config.task.model_dump(mode="json")
    names = [name for name in ("name", "classes", *PictureSettings.model_fields) if name not in ("resize", "crop")]
    kept = {name: task[name] for name in names if name in task}
    section = config.statistics.model_dump(mode="json", exclude={"only"}) if config.statistics else None
    return hashlib.sha256(json.dumps([section, kept, config.data.model_dump(mode="json")]).encode()).hexdigest()


def check_question(folder: Path, dataset: str, config: JobConfig, list_path: str = "") -> None:
    """Raise RefusedError if the site has answered a different question about this data set; `list_path` as in `answer_once`."""
    _read_stored_answer(folder, _stored_name(folder, dataset, list_path), config)


def answer_once(
    folder: Path, dataset: str, config: JobConfig, counted: Tally, terms: Terms, list_path: str = ""
) -> dict[str, Any]:
    """Return the one answer about a data set. The first call computes it and stores it in `folder`.

    `list_path`: the path of the data list, the former name of the data set; an answer stored under it stays valid. Raises
    RefusedError if a different question was answered before, or the stored answer cannot be read.
    """
    with refuse_if_unwritable(folder / FOLDER), lock_folder(folder / FOLDER):
        dataset = _stored_name(folder, dataset, list_path)
        if (found := _read_stored_answer(folder, dataset, config)) is None:
            least = max(terms.minimum, config.statistics.minimum if config.statistics else 0)
            found = disclose(counted, config, least).model_dump(mode="json")
            write_json(_answer_path(folder, dataset), {"question": question_hash(config), "answer": found})
    return found


def _stored_name(folder: Path, dataset: str, list_path: str) -> str:
    return list_path if list_path and _answer_path(folder, list_path).exists() else dataset


def _read_stored_answer(folder: Path, dataset: str, config: JobConfig) -> dict[str, Any] | None:
    path = _answer_path(folder, dataset)
    try:
        found = read_json(path)
        asked, values = found["question"], SiteStatistics.read(found["answer"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RefusedError):
        raise RefusedError(
            f"{path}: the kept statistics cannot be read; nothing was sent; restore the file", Reason.LEDGER
        ) from None
    if asked != question_hash(config):
        raise RefusedError(
            f"another question about data set {dataset!r} was answered before, and the two could be subtracted; "
            f"nothing was sent; remove {path} to answer anew",
            Reason.STATISTICS,
            "another question about the data was answered before",
        )
    return values.model_dump(mode="json")


def _answer_path(folder: Path, dataset: str) -> Path:
    return folder / FOLDER / f"{hashlib.sha256(dataset.encode()).hexdigest()[:32]}.json"


# small counts ---------------------------------------------------------------------------------------------------------


def merge_small_cells(cells: Mapping[str, Sequence[int]], people: Sequence[str], minimum: int) -> list[tuple[str, ...]]:
    """Return the groups of cells, by name (see the module); [] if all cells together have fewer than `minimum` people.

    `cells`: the sample indices in each cell; `people`: the person of each sample.
    """
    groups: list[tuple[str, ...]] = []
    pending: tuple[str, ...] = ()
    for name, samples in cells.items():
        if not pending and not samples:
            groups.append((name,))
            continue
        pending += (name,)
        if _count_people(cells, pending, people) >= minimum:
            groups.append(pending)
            pending = ()
    while pending and _count_people(cells, pending, people) < minimum:
        if not groups:
            return []
        pending = (*groups.pop(), *pending)
    return [*groups, pending] if pending else groups


def _count_people(cells: Mapping[str, Sequence[int]], names: Sequence[str], people: Sequence[str]) -> int:
    return len({people[number] for name in names for number in cells[name]})


def releasable_classes(counted: Tally, split: str, minimum: int) -> list[str]:
    """Return the mask classes whose counts may leave, in order.

    A sample shows a class, does not show it, or is not annotated for it. A class stays only if every combination of these
    states, over it and the classes chosen before it, has no people or at least `minimum` people. The reason is that classes may
    overlap, so the difference of two counts is also a count.
    """
    people, kinds, chosen = counted.people[split], [0] * len(counted.people[split]), list[str]()
    with_it, without = ({n: set(v) for n, v in one[split].items()} for one in (counted.classes, counted.absent))
    for name in with_it:
        marks = [(kind, (i in with_it[name]) - (i in without[name])) for i, kind in enumerate(kinds)]
        owners: dict[tuple[int, int], set[str]] = {}
        for mark, whom in zip(marks, people, strict=True):
            owners.setdefault(mark, set()).add(whom)
        if all(len(each) >= minimum for each in owners.values()):
            numbers = {mark: number for number, mark in enumerate(owners)}
            kinds = [numbers[mark] for mark in marks]
            chosen.append(name)
    return chosen


def disclose(counted: Tally, config: JobConfig, minimum: int) -> SiteStatistics:
    """Return the part of a site's counts that may leave."""
    _, single = class_cells(config.task)
    enough = {split for split, people in counted.people.items() if len(set(people)) >= minimum}
    splits: Any = dict.fromkeys(counted.people)
    for split in enough:
        people, cells = counted.people[split], counted.classes[split]
        if single:
            classes = _merged_groups(cells, people, minimum)
        else:
            classes = tuple(Group(names=(n,), samples=len(cells[n])) for n in releasable_classes(counted, split, minimum))
        patients = len(set(people)) if counted.patients[split] else None
        splits[split] = SplitStatistics(samples=len(people), patients=patients, classes=classes)
    people = counted.people["training"] if "training" in enough else []
    tables = {name: _merged_groups(getattr(counted, name), people, minimum) for name in ("sizes", "spacing", "lengths")}
    shown = releasable_classes(counted, "training", minimum) if people and not single else []
    areas = tuple(
        AreaShare(names=(name,), share=round(float(np.mean(counted.areas[name])), 3)) for name in shown if counted.areas[name]
    )
    greys: tuple[AreaShare, ...] = ()
    if people and counted.light and config.statistics is not None:
        # the mean share of each grey level over samples; bins that occur in the pictures of few people are merged
        shares, names = np.stack(counted.light), grey_bin_names(config.statistics.bins)
        reached = {name: np.flatnonzero(column).tolist() for name, column in zip(names, shares.T, strict=True)}
        mean = dict(zip(names, shares.mean(0), strict=True))
        groups = merge_small_cells(reached, people, minimum)
        greys = tuple(AreaShare(names=group, share=round(min(1.0, float(sum(mean[n] for n in group))), 3)) for group in groups)
    return SiteStatistics(minimum=minimum, splits=splits, areas=areas, greys=greys, **tables)


def _merged_groups(cells: Mapping[str, Sequence[int]], people: Sequence[str], minimum: int) -> tuple[Group, ...]:
    if not people or not any(cells.values()):
        return ()
    groups = merge_small_cells(cells, people, minimum)
    return tuple(Group(names=names, samples=sum(len(cells[n]) for n in names)) for names in groups)
