"""Statistics that may leave a site: counts of nobody or of many, once for a data set.

**Small counts.** Cells stand in an order that no data decide: that of the job's classes, of sizes, of grey levels. A cell of 1
to minimum - 1 people is merged with the cells after it until at least `minimum` people are in the group; what is left at the
end joins the group before it. A cell of nobody is shown as 0 where no group is open. Nothing is left out of a sum, so that a
total minus what is shown is a group again; and of a merged cell at least minimum - 1 values stay possible, even for those who
know this rule and the total. A split of fewer people than that is not shown at all. Classes that may overlap are shown one by
one, see `told_apart`.

**Asking again.** Two answers with other bins, classes or minima could be subtracted from one another, and so could two answers
about data that have changed in between. So a site answers one question about a data set, keeps the answer, and gives the same
bytes to whoever asks the same again. Another question is refused until the administrator removes the kept answer.
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
from consilium.core.schema import Section
from consilium.core.storage import locked, write_atomic
from consilium.data.counts import Tally, class_names, grey_bin_names
from consilium.data.settings import PictureSettings

FOLDER = "statistics"
SettingNames = tuple(name for name in PictureSettings.model_fields if name not in ("resize", "crop"))
Names = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=64)], ...], Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=0, le=10**9)]
Part = Annotated[float, Field(ge=0, le=1)]


class Group(Section):
    """So many samples are in these cells together."""

    names: Names
    samples: Count


class Portion(Section):
    """These cells together have this share."""

    names: Names
    share: Part


Groups = Annotated[tuple[Group, ...], Field(max_length=256)]
Portions = Annotated[tuple[Portion, ...], Field(max_length=256)]


class SplitStatistics(Section):
    """One split. `patients`: None where nobody knows them. `classes` that may overlap are there one by one, or left out."""

    samples: Count
    patients: Count | None
    classes: Groups


class SiteStatistics(Section):
    """All that a site tells. `minimum`: by which it merged; `areas`: the mean share of a picture that a class takes."""

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
    """What a site.yaml says of statistics: whether they may leave (None: as the module says), and its own minimum."""

    share: bool | None = None
    minimum: int = 10

    def check(self, name: str, protects: bool, private: bool) -> None:
        """Raise RefusedError unless statistics may leave to this job: a policy, or a private job, needs the site's word."""
        if self.share or (self.share is None and not protects and not private):
            return
        why = "the job is private" if private else "site.yaml has a privacy policy"
        why = "site.yaml has share_statistics: false" if self.share is False else why
        remedy = "statistics have no noise; share_statistics: true lets them leave all the same"
        raise RefusedError(f"{name}: {why}; nothing was sent; {remedy}", Reason.STATISTICS)


TERMS = Terms()


# one answer -----------------------------------------------------------------------------------------------------------


def question(config: JobConfig) -> str:
    """Return the SHA-256 of all in a job that its statistics depend on."""
    task = config.task.model_dump(mode="json")
    kept = {key: task[key] for key in ("name", "classes", *SettingNames) if key in task}
    section = config.statistics.model_dump(mode="json", exclude={"only"}) if config.statistics else None
    return hashlib.sha256(json.dumps([section, kept, config.data.model_dump(mode="json")]).encode()).hexdigest()


def check_question(folder: Path, dataset: str, config: JobConfig, listed: str = "") -> None:
    """Raise RefusedError where the site has answered another question about these data; `listed` as in `answer`."""
    _kept(folder, _name(folder, dataset, listed), config)


def answer(folder: Path, dataset: str, config: JobConfig, counted: Tally, terms: Terms, listed: str = "") -> dict[str, Any]:
    """Return the one answer about a data set, made and kept in `folder` if it is the first. Raises RefusedError.

    `listed`: what the data were called before they had a name, the path of their list; an answer from then stands.
    """
    with locked(folder / FOLDER):
        dataset = _name(folder, dataset, listed)
        if (found := _kept(folder, dataset, config)) is None:
            least = max(terms.minimum, config.statistics.minimum if config.statistics else 0)
            found = disclose(counted, config, least).model_dump(mode="json")
            write_atomic(_file(folder, dataset), json.dumps({"question": question(config), "answer": found}).encode())
            _file(folder, dataset).chmod(0o600)
    return found


def _name(folder: Path, dataset: str, listed: str) -> str:
    return listed if listed and _file(folder, listed).exists() else dataset


def _kept(folder: Path, dataset: str, config: JobConfig) -> dict[str, Any] | None:
    path = _file(folder, dataset)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        asked, values = found["question"], SiteStatistics.read(found["answer"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RefusedError):
        raise RefusedError(
            f"{path}: the kept statistics cannot be read; nothing was sent; restore the file", Reason.LEDGER
        ) from None
    if asked != question(config):
        what = f"another question about data set {dataset!r} was answered before, and the two could be subtracted"
        told = "another question about the data was answered before"
        raise RefusedError(f"{what}; nothing was sent; remove {path} to answer anew", Reason.STATISTICS, told)
    return values.model_dump(mode="json")


def _file(folder: Path, dataset: str) -> Path:
    return folder / FOLDER / f"{hashlib.sha256(dataset.encode()).hexdigest()[:32]}.json"


# small counts ---------------------------------------------------------------------------------------------------------


def grouped(cells: Mapping[str, Sequence[int]], people: Sequence[str], minimum: int) -> list[tuple[str, ...]]:
    """Return the names of cells in groups, see the module; nothing where all together are fewer than `minimum` people.

    `cells` hold numbers of samples, and `people` says whom each is of.
    """
    groups: list[tuple[str, ...]] = []
    pending: tuple[str, ...] = ()
    for name, samples in cells.items():
        if not pending and not samples:
            groups.append((name,))
            continue
        pending += (name,)
        if _count(cells, pending, people) >= minimum:
            groups.append(pending)
            pending = ()
    while pending and _count(cells, pending, people) < minimum:
        if not groups:
            return []
        pending = (*groups.pop(), *pending)
    return [*groups, pending] if pending else groups


def _count(cells: Mapping[str, Sequence[int]], names: Sequence[str], people: Sequence[str]) -> int:
    return len({people[number] for name in names for number in cells[name]})


def told_apart(counted: Tally, split: str, minimum: int) -> list[str]:
    """Return the classes of masks whose counts may be known, in their order.

    Each stays only if every combination of it with those before it (shown, not shown, not annotated) is of nobody or of many:
    classes may lie in one another, so that the difference of two counts is a count too.
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
    """Return what may leave of a site's counts."""
    _, single = class_names(config.task)
    enough = {split for split, people in counted.people.items() if len(set(people)) >= minimum}
    splits: Any = {split: _split(counted, split, single, minimum) if split in enough else None for split in counted.people}
    people = counted.people["training"] if "training" in enough else []
    tables = {name: _groups(getattr(counted, name), people, minimum) for name in ("sizes", "spacing", "lengths")}
    areas = _areas(counted, minimum) if people and not single else ()
    greys_of = _greys(counted, config, minimum) if people else ()
    return SiteStatistics(minimum=minimum, splits=splits, areas=areas, greys=greys_of, **tables)


def _split(counted: Tally, split: str, single: bool, minimum: int) -> SplitStatistics:
    people, cells = counted.people[split], counted.classes[split]
    if single:
        classes = _groups(cells, people, minimum)
    else:
        classes = tuple(Group(names=(n,), samples=len(cells[n])) for n in told_apart(counted, split, minimum))
    patients = len(set(people)) if counted.patients[split] else None
    return SplitStatistics(samples=len(people), patients=patients, classes=classes)


def _groups(cells: Mapping[str, Sequence[int]], people: Sequence[str], minimum: int) -> tuple[Group, ...]:
    if not people or not any(cells.values()):
        return ()
    groups = grouped(cells, people, minimum)
    return tuple(Group(names=names, samples=sum(len(cells[n]) for n in names)) for names in groups)


def _areas(counted: Tally, minimum: int) -> tuple[Portion, ...]:
    shown = [name for name in told_apart(counted, "training", minimum) if counted.areas[name]]
    return tuple(Portion(names=(name,), share=round(float(np.mean(counted.areas[name])), 3)) for name in shown)


def _greys(counted: Tally, config: JobConfig, minimum: int) -> tuple[Portion, ...]:
    """Return the mean share of grey levels over samples; bins that few people's pictures reach are merged."""
    if not counted.light or config.statistics is None:
        return ()
    shares, names = np.stack(counted.light), grey_bin_names(config.statistics.bins)
    reached = {name: np.flatnonzero(column).tolist() for name, column in zip(names, shares.T, strict=True)}
    mean = dict(zip(names, shares.mean(0), strict=True))
    groups = grouped(reached, counted.people["training"], minimum)
    return tuple(Portion(names=group, share=round(min(1.0, float(sum(mean[n] for n in group))), 3)) for group in groups)
