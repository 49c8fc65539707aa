"""Share a data set out among sites with uneven labels (Hsu et al., arXiv 1909.06335; Li et al., arXiv 2102.02079).

The rule. For every class, shares over the sites are drawn from Dirichlet(beta, ..., beta); its samples, shuffled, are cut at
these shares. Training and validation samples are cut at the same shares; so a site's validation looks like its training.
Then, while a site has fewer than `minimum` training samples, it takes a random one from the site that has most. The test split
is not cut: every site gets all of it, so that all are judged by one measure. Same set, numbers and seed, same partition.
Without a beta all shares are equal. Where the list names patients, what is shared out and moved are whole patients, each of the
class that most of its samples have: a patient at two hospitals would be two to privacy by patients.

Texts are shared out by the same rule, with the values of a key of their records for classes; without a key all records are one
class, so that sites differ in size alone. Instead of a key, `kinds` may say what each text is (clusters). Records are copied
unchanged. The test split is one file that all sites have. With `local`, a site's share of training and validation is cut
0.8 / 0.1 / 0.1 at the site (FedHera, Appendix C.3), and the source's own test split is common_test.jsonl beside the sites.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.random import Generator

from consilium.core.errors import DataError
from consilium.core.seeding import seed_for
from consilium.core.storage import PUBLIC, write_atomic, write_figure
from consilium.data.datalist import SPLITS, Item, listed_patients, read_datalist
from consilium.data.patients import item_patient, together
from consilium.data.safe_open import text_lines
from consilium.data.text import FILES, Text, read_texts

SHARED_OUT = "test"
"""The split that every site gets all of."""
MOST_COLORS = 20
"""Classes with a colour of their own; further ones are drawn as one."""


class Labelled(Protocol):
    """A sample that can be shared out by its class."""

    @property
    def label(self) -> Any:
        """Its class."""


S = TypeVar("S", bound=Labelled)
Sites = dict[str, dict[str, list[S]]]
"""Samples by site and split."""
Patient = Sequence[S]
"""The samples of one patient, or one sample without a patient."""


def partition(
    source: Path,
    folder: Path,
    sites: int,
    beta: float | None,
    seed: int,
    minimum: int,
    exclude: Sequence[str] = (),
    test: bool = True,
) -> dict[str, Any]:
    """Write `folder`/site-K/datalist.json (absolute paths, nothing is copied), partition.json and partition.png.

    `beta` None: even shares. `test` False: no site gets the test split; all else is the same. Returns partition.json's content:
    the arguments, the classes, and counts by split, site and class. Raises DataError for a source without classes, an unknown
    class to leave out, too few samples or patients, or a folder that has sites already.
    """
    splits, classes = _read(source, exclude)
    splits = splits if test else splits | {SHARED_OUT: []}
    names = check_asked(source, folder, len(splits["training"]), sites, minimum)
    found = share_out(splits, classes, names, beta, seed, minimum)
    patients = listed_patients(source)
    for name in names:
        entries = {split: [_entry(item, patients) for item in items] for split, items in found[name].items()}
        (folder / name).mkdir(parents=True)
        text = json.dumps({"name": name, "labels": dict(enumerate(classes)), **entries}, indent=1)
        write_atomic(folder / name / "datalist.json", text.encode(), PUBLIC)
    asked = {"sites": sites, "beta": beta, "seed": seed, "minimum": minimum, "excluded": list(exclude)}
    return write_summary(source, folder, asked | {"notes": _notes(splits["training"])}, classes, found)


def _notes(samples: Sequence[Item]) -> list[str]:
    """Return a note on samples without a patient: they are shared out one by one."""
    nameless = sum(not item_patient(item) for item in samples)
    what = f"{nameless} of {len(samples)} training samples name no patient, so one patient's pictures may be at several sites"
    return [f"{what}; name them as `patient` in the list, if you know them"] if nameless else []


def check_asked(source: Path, folder: Path, training: int, sites: int, minimum: int) -> list[str]:
    """Return the sites' names. Raises DataError for too few training samples, or a folder that has sites already."""
    if (folder / "partition.json").exists() or any(folder.glob("site-*")):
        raise DataError(f"{folder}: holds sites already; give another folder")
    if training < sites * minimum:
        raise DataError(f"{source}: {training} training samples are too few for {sites} sites of {minimum}; ask for less")
    return [f"site-{i}" for i in range(1, sites + 1)]


def write_summary(source: Path, folder: Path, asked: dict[str, Any], classes: list[str], found: Sites[S]) -> dict[str, Any]:
    """Write partition.json and partition.png; returns the content of the first: counts by split, site and class."""
    summary = {"source": str(source.resolve()), **asked, "classes": classes}
    summary |= {split: {name: _counts(mine[split], classes) for name, mine in found.items()} for split in SPLITS}
    write_atomic(folder / "partition.json", json.dumps(summary, indent=1).encode(), PUBLIC)
    write_figure(folder / "partition.png", plot(summary), dpi=120, mode=PUBLIC)
    return summary


def share_out(
    splits: Mapping[str, Sequence[S]],
    classes: Sequence[str],
    names: Sequence[str],
    beta: float | None,
    seed: int,
    minimum: int,
) -> Sites[S]:
    """Return the samples of each site by the rule above. Raises DataError where no site can have `minimum` training samples."""
    rng = np.random.default_rng(seed_for(seed, "partition"))
    found: dict[str, dict[str, list[Patient[S]]]] = {name: {"training": [], "validation": []} for name in names}
    of_class = {split: _by_class(splits[split]) for split in ("training", "validation")}
    for label in classes:
        shares = np.full(len(names), 1 / len(names)) if beta is None else rng.dirichlet([beta] * len(names))
        for split in of_class:
            mine = of_class[split].get(label, [])
            cuts = np.rint(np.cumsum(shares)[:-1] * len(mine)).astype(int)
            for name, part in zip(names, np.split(rng.permutation(len(mine)), cuts), strict=True):
                found[name][split] += [mine[i] for i in part]
    _top_up([found[name]["training"] for name in names], minimum, rng)
    _follow(found)
    cut = {name: {split: list(chain(*patients)) for split, patients in mine.items()} for name, mine in found.items()}
    return {name: mine | {SHARED_OUT: list(splits[SHARED_OUT])} for name, mine in cut.items()}


def _follow(found: Mapping[str, dict[str, list[Patient[S]]]]) -> None:
    """Move, in place, the validation samples of patients who train to the site where they do."""
    owner = {who: name for name, mine in found.items() for patient in mine["training"] if (who := item_patient(patient[0]))}
    placed = [(owner.get(item_patient(one[0]), name), one) for name, mine in found.items() for one in mine["validation"]]
    for name, mine in found.items():
        mine["validation"] = [one for place, one in placed if place == name]


def _by_class(samples: Sequence[S]) -> dict[str, list[Patient[S]]]:
    found: dict[str, list[Patient[S]]] = {}
    for patient in together(samples):
        often = Counter(str(sample.label) for sample in patient).most_common(1)  # of two as frequent, the first in the list
        found.setdefault(often[0][0], []).append(patient)
    return found


def _top_up(training: list[list[Patient[S]]], minimum: int, rng: Generator) -> None:
    """Move patients, in place, from the largest sites to those under the minimum. Raises DataError where none can be moved."""
    sizes = [sum(map(len, patients)) for patients in training]
    while (least := min(sizes)) < minimum:
        rich, movable = _giver(training, sizes, minimum)
        poor, moved = sizes.index(least), training[rich].pop(movable[int(rng.integers(len(movable)))])
        training[poor].append(moved)
        sizes[poor], sizes[rich] = least + len(moved), sizes[rich] - len(moved)


def _giver(training: list[list[Patient[S]]], sizes: list[int], minimum: int) -> tuple[int, list[int]]:
    """Return the largest site that stays at the minimum without one of its patients, and which of them. Raises DataError."""
    for site in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        if movable := [place for place, patient in enumerate(training[site]) if len(patient) <= sizes[site] - minimum]:
            return site, movable
    what = f"{minimum}: patients are not cut apart, and none can go to a site of {min(sizes)} samples"
    raise DataError(f"--minimum: {what}; ask for less, or for fewer sites")


def plot(summary: dict[str, Any]) -> Figure:
    """Return the training samples of every site as stacked bars, a colour per class."""
    bars, sites = _bars(summary), list(summary["training"])
    figure = Figure(figsize=(9, 1.6 + 0.32 * len(sites)), layout="constrained")
    axes, left = figure.subplots(), np.zeros(len(sites))
    colors = colormaps["tab10" if len(bars) <= 10 else "tab20"]
    for index, (label, widths) in enumerate(bars.items()):
        axes.barh(sites, widths, left=left, label=label, color=colors(index % colors.N), edgecolor="white", lw=0.5)
        left = left + widths
    axes.invert_yaxis()
    axes.set_xlabel("training samples")
    axes.set_title(_title(summary))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False)
    return figure


def _bars(summary: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return each class' samples by site; the rarest as one where there are more classes than colours."""
    training = summary["training"].values()
    bars = {label: np.array([counts[label] for counts in training]) for label in summary["classes"]}
    if len(bars) <= MOST_COLORS:
        return bars
    often = sorted(bars, key=lambda label: -int(bars[label].sum()))
    kept, others = often[: MOST_COLORS - 1], often[MOST_COLORS - 1 :]
    rest = np.sum([bars[label] for label in others], axis=0)
    return {label: bars[label] for label in bars if label in kept} | {f"{len(others)} others": rest}


def _title(summary: dict[str, Any]) -> str:
    shares = "Even shares" if summary["beta"] is None else f"Dirichlet({summary['beta']:g})"
    what = f"values of {summary['by']}" if summary.get("by") else "classes"
    count = len(summary["classes"])
    return f"{shares} of {count} {what} over {len(summary['training'])} sites, seed {summary['seed']}"


def _read(source: Path, exclude: Sequence[str]) -> tuple[dict[str, list[Item]], list[str]]:
    """Return the samples by split and the classes left, sorted (numbers by size)."""
    data = read_datalist(source, classes=True)
    labels = {item.label for items in data.splits.values() for item in items}
    if None in labels:
        raise DataError(f"{source}: has samples without a class; give every one a label")
    known = [str(label) for label in sorted(labels, key=lambda v: (isinstance(v, str), v))]
    if unknown := [name for name in exclude if name not in known]:
        raise DataError(f"{source}: --exclude: no class {unknown[0]!r}; there are {', '.join(known)}")
    kept = {s: [item for item in items if str(item.label) not in exclude] for s, items in data.splits.items()}
    return kept, [name for name in known if name not in exclude]


def _entry(item: Item, patients: dict[str, str]) -> dict[str, Any]:
    patient = patients.get(item.patient)  # the list's own identifier; identifiers of files are never written
    found = {"image": str(item.image.resolve()), "label": item.label, "slice": item.slice, "patient": patient}
    return {key: value for key, value in found.items() if value is not None}


def _counts(items: Sequence[Labelled], classes: list[str]) -> dict[str, int]:
    found = Counter(str(item.label) for item in items)
    return {label: found[label] for label in classes}


# texts -----------------------------------------------------------------------------------------------------------------------


Kinds = Callable[[Sequence[str]], list[str]]
"""Returns the kind of each text."""
COMMON = "common_test.jsonl"
ALL = "records"
"""The class of every record where no key is named."""
MOST_VALUES = 1000
"""Of a key: more are names rather than kinds, and make no picture."""


@dataclass(frozen=True)
class Record:
    """A line of a JSONL file, its value of the key that sites differ in, and its patient, "" where unknown."""

    line: str
    label: str
    patient: str = ""


def partition_texts(
    source: Path,
    folder: Path,
    sites: int,
    beta: float | None,
    seed: int,
    minimum: int,
    by: str = "",
    exclude: Sequence[str] = (),
    kinds: Kinds | None = None,
    local: bool = False,
) -> dict[str, Any]:
    """Write `folder`/site-K/{training,validation,test}.jsonl, partition.json and partition.png.

    `beta` None: even shares. Returns partition.json's content. Raises DataError for records without the key, an unknown value
    to leave out, too few records, or a folder that has sites already.
    """
    splits, values = _read_records(source, by, exclude, kinds)
    names = check_asked(source, folder, len(splits["training"]), sites, minimum)
    found = share_out(splits, values, names, beta, seed, minimum)
    if local:
        whole = {name: [*mine["training"], *mine["validation"]] for name, mine in found.items()}
        found = {name: _cut_locally(mine, seed_for(seed, "local", name)) for name, mine in whole.items()}
    for name in names:
        for split in SPLITS:
            _write_lines(folder, name, split, [record.line for record in found[name][split]], not local)
    if local and splits[SHARED_OUT]:
        write_atomic(folder / COMMON, "\n".join([*(record.line for record in splits[SHARED_OUT]), ""]).encode(), PUBLIC)
    by = by or ("clusters" if kinds else "")
    asked = {
        "sites": sites,
        "beta": beta,
        "seed": seed,
        "minimum": minimum,
        "by": by,
        "excluded": list(exclude),
        "local": local,
    }
    return write_summary(source, folder, asked, values, found)


def _cut_locally(records: list[Record], seed: int) -> dict[str, list[Record]]:
    """Return a site's patients, shuffled, as its splits: a tenth each to validate and to test, at least one of three.

    A record without a patient is a patient of its own.
    """
    patients = together(records)
    order = [patients[i] for i in np.random.default_rng(seed).permutation(len(patients))]
    part = max(round(0.1 * len(order)), 1) if len(order) >= 3 else 0
    cut = {"training": order[2 * part :], "validation": order[:part], "test": order[part : 2 * part]}
    return {split: list(chain(*mine)) for split, mine in cut.items()}


def _write_lines(folder: Path, name: str, split: str, lines: list[str], shared: bool) -> None:
    """Write one split of a site; of equal files, which the test splits are, there is one on the disk where it can link."""
    path, first = folder / name / f"{split}.jsonl", folder / "site-1" / f"{split}.jsonl"
    if shared and split == SHARED_OUT and first.is_file():
        try:
            os.link(first, path)
        except OSError:  # a file system without links
            shutil.copyfile(first, path)
    elif lines:
        write_atomic(path, "\n".join([*lines, ""]).encode(), PUBLIC)


def _read_records(
    source: Path, by: str, exclude: Sequence[str], kinds: Kinds | None
) -> tuple[dict[str, list[Record]], list[str]]:
    """Return the records by split and the values of the key, sorted. Raises DataError."""
    data = read_texts(source)  # raises for a bad record
    folder = data.path
    paths = {split: next((f for name in FILES[split] if (f := folder / name).is_file()), None) for split in SPLITS}
    splits = {split: _lines_of(path, data.splits[split], by) if path else [] for split, path in paths.items()}
    if kinds:  # the splits are clustered together
        of_texts = iter(kinds([text.prompt_words for split in SPLITS for text in data.splits[split]]))
        splits = {split: [replace(record, label=next(of_texts)) for record in splits[split]] for split in SPLITS}
    values = sorted({record.label for records in splits.values() for record in records})
    if len(values) > MOST_VALUES:
        raise DataError(f"{source}: --by {by}: {len(values):,} values, at most {MOST_VALUES:,} are kinds; name another key")
    if unknown := [value for value in exclude if value not in values]:
        raise DataError(f"{source}: --exclude: no value {unknown[0]!r}; there are {', '.join(values)[:300]}")
    kept = {split: [record for record in records if record.label not in exclude] for split, records in splits.items()}
    return kept, [value for value in values if value not in exclude]


def _lines_of(path: Path, texts: Sequence[Text], by: str) -> list[Record]:
    lines = enumerate(text_lines(path, "give a JSONL file in UTF-8"), start=1)
    told = ((f"{path}:{number}", line.removesuffix("\n")) for number, line in lines if line.strip())
    return [Record(line, _value(where, line, by), text.patient) for (where, line), text in zip(told, texts, strict=True)]


def _value(where: str, line: str, by: str) -> str:
    if not by:
        return ALL
    record = json.loads(line)
    value = record.get(by)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{where}: --by {by}: expected a text or a number there; found the keys {', '.join(record)[:200]}")
    return str(value)
