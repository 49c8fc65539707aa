"""`consilium data split` and `data partition`: a list cut into splits or folds, and a data set shared out among sites.

Split. Linked samples, such as those of one patient, study, volume or mask, stay in one split. Patients and studies are read
from the list and from DICOM files. Labels are spread evenly by iterative stratification (Sechidis, Tsoumakas and Vlahavas, ECML
PKDD 2011) of groups of linked samples instead of single samples: the rarest label comes first, and each of its groups goes to
the split that lacks most of it.

Partition among sites with uneven labels (Hsu et al., arXiv 1909.06335; Li et al., arXiv 2102.02079). For every class, the
sites' shares are drawn from Dirichlet(beta, ..., beta), and its shuffled samples are cut at these shares. Without a beta, all
shares are equal. Training and validation are cut at the same shares, so a site's validation split resembles its training split.
Then, while a site has fewer than `minimum` training samples, it takes a random one from the largest site. The test split is not
cut: every site gets all of it, so that all sites are scored on the same samples.

If the list names patients, whole patients are assigned and moved, each counted under its most frequent class. Under
patient-level privacy, a patient at two hospitals would count as two.

Texts are partitioned by the same rule. The value of one key of a record stands for its class; without a key, all records have
one class, so that sites differ in size alone. Instead of a key, a function `kinds` (clusters of the texts) may give the class
of each text. Records are copied unchanged, except that the path of a record's picture becomes absolute. The test split is one
file that all sites link to. With `local`, a site's training and validation records are pooled and cut 0.8 / 0.1 / 0.1 at the
site (FedHera, Appendix C.3), and the source's own test split becomes common_test.jsonl beside the sites.

The same data, numbers and seed give the same splits and the same partition.
"""

import json
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.random import Generator

from consilium.core.errors import DataError
from consilium.core.grouping import group_by_key
from consilium.core.lazy import figure, matplotlib
from consilium.core.seeding import seed_for
from consilium.core.storage import PUBLIC, write_atomic, write_figure
from consilium.data import volumes
from consilium.data.datalist import (
    SPLITS,
    DataList,
    Item,
    read_datalist,
    read_datalist_json,
    sample_files,
    with_challenge_splits,
)
from consilium.data.images import whole_labels
from consilium.data.patients import first_linked, item_pseudonym, pseudonym, samples_by_patient
from consilium.data.safe_open import absolute_path, is_there, raise_first_fault
from consilium.data.settings import PictureSettings
from consilium.data.text import read_texts, record_lines, split_files

COMMON_SPLIT = "test"
"""The split that every site gets in full."""
MOST_COLORS = 20
"""Classes that the figure names, each in a colour of its own. Further classes have the same colours again."""


@dataclass(frozen=True)
class Record:
    """A line of a JSONL file, its class (the value of the chosen key), and its patient, "" if unknown."""

    line: str
    label: str
    patient: str = ""


S = TypeVar("S", Item, Record)
"""A sample that is assigned to a site by its label."""
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
    test: bool = True,
) -> dict[str, Any]:
    """Write `folder`/site-K/datalist.json, partition.json and partition.png, and return the content of partition.json.

    Lists have absolute paths; no picture is copied. The content has the arguments, the classes, and counts by split, site and
    class. `beta`: None for even shares. `test`: False gives no site the test split and changes nothing else. Raises DataError
    for a source without classes, too few samples or patients, or a folder that already holds sites.
    """
    data = read_datalist(source, labels_are_classes=True)
    labels = {item.label for items in data.splits.values() for item in items}
    if None in labels:
        raise DataError(f"{source}: has samples without a class; give every one a label")
    ordered = sorted(labels, key=lambda v: (isinstance(v, str), v))  # numbers by value, then names
    classes = list(dict.fromkeys(map(str, ordered)))  # 1 and "1" are one class
    splits = data.splits if test else data.splits | {COMMON_SPLIT: ()}
    found = _assign_to_sites(source, folder, splits, classes, sites, beta, seed, minimum)
    own = _absolute_entries(source, data)
    entry_of = {id(item): entry for split in SPLITS for item, entry in zip(data.splits[split], own[split], strict=True)}
    for name, mine in found.items():
        entries = {split: [entry_of[id(item)] for item in items] for split, items in mine.items()}
        text = json.dumps({"name": name, "labels": dict(enumerate(classes)), **entries}, indent=1)
        write_atomic(folder / name / "datalist.json", text.encode(), PUBLIC)
    notes = []
    if nameless := sum(not item_pseudonym(item) for item in splits["training"]):
        notes.append(
            f"{nameless} of {len(splits['training'])} training samples name no patient, so one patient's pictures may be at "
            "several sites; name them as `patient` in the list, if you know them"
        )
    asked = {"sites": sites, "beta": beta, "seed": seed, "minimum": minimum, "notes": notes}
    return write_summary(source, folder, asked, classes, found)


def _assign_to_sites(
    source: Path,
    folder: Path,
    splits: Mapping[str, Sequence[S]],
    classes: Sequence[str],
    sites: int,
    beta: float | None,
    seed: int,
    minimum: int,
) -> Sites[S]:
    """Return the samples of each site. Raises DataError for too few training samples, or a folder that already has sites."""
    if (folder / "partition.json").exists() or any(folder.glob("site-*")):
        raise DataError(f"{folder}: holds sites already; give another folder")
    if (training := len(splits["training"])) < sites * minimum:
        raise DataError(f"{source}: {training} training samples are too few for {sites} sites of {minimum}; ask for less")
    return share_out(splits, classes, [f"site-{i}" for i in range(1, sites + 1)], beta, seed, minimum)


def write_summary(source: Path, folder: Path, asked: dict[str, Any], classes: list[str], found: Sites[S]) -> dict[str, Any]:
    """Write partition.json and partition.png. Return the content of partition.json: `asked`, and counts by split and site."""
    counts = {s: {name: Counter(str(item.label) for item in mine[s]) for name, mine in found.items()} for s in SPLITS}
    by_class = {s: {name: {label: own[label] for label in classes} for name, own in mine.items()} for s, mine in counts.items()}
    summary = {"source": str(source.resolve()), **asked, "classes": classes, **by_class}
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
    """Return the samples of each site by the rule above. Raises DataError if `minimum` training samples cannot be reached."""
    rng = np.random.default_rng(seed_for(seed, "partition"))
    found: dict[str, dict[str, list[Patient[S]]]] = {name: {"training": [], "validation": []} for name in names}

    def most_frequent(patient: Patient[S]) -> str:  # of ties, the first
        return Counter(str(sample.label) for sample in patient).most_common(1)[0][0]

    of_class = {
        split: group_by_key((most_frequent(patient), patient) for patient in samples_by_patient(splits[split]))
        for split in ("training", "validation")
    }
    for label in classes:
        shares = np.full(len(names), 1 / len(names)) if beta is None else rng.dirichlet([beta] * len(names))
        for split, by_class in of_class.items():
            mine = by_class.get(label, [])
            cuts = np.rint(np.cumsum(shares)[:-1] * len(mine)).astype(int)
            for name, part in zip(names, np.split(rng.permutation(len(mine)), cuts), strict=True):
                found[name][split] += [mine[i] for i in part]
    _top_up([found[name]["training"] for name in names], minimum, rng)
    # a patient with training samples at a site has the validation samples there, too
    owner = {who: name for name, own in found.items() for one in own["training"] if (who := item_pseudonym(one[0]))}
    placed = [(owner.get(item_pseudonym(one[0]), name), one) for name, own in found.items() for one in own["validation"]]
    for name, own in found.items():
        own["validation"] = [one for place, one in placed if place == name]
    cut = {name: {split: list(chain(*patients)) for split, patients in own.items()} for name, own in found.items()}
    return {name: own | {COMMON_SPLIT: list(splits[COMMON_SPLIT])} for name, own in cut.items()}


def _top_up(training: list[list[Patient[S]]], minimum: int, rng: Generator) -> None:
    """Move patients, in place, to sites below the minimum, from the largest site that does not fall below it.

    Raises DataError if no patient can be moved.
    """
    sizes = [sum(map(len, patients)) for patients in training]
    while (least := min(sizes)) < minimum:
        for rich in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
            if movable := [n for n, patient in enumerate(training[rich]) if len(patient) <= sizes[rich] - minimum]:
                break
        else:
            raise DataError(
                f"--minimum: {minimum}: patients are not cut apart, and none can go to a site of {least} samples; "
                "ask for less, or for fewer sites"
            )
        poor, moved = sizes.index(least), training[rich].pop(movable[int(rng.integers(len(movable)))])
        training[poor].append(moved)
        sizes[poor], sizes[rich] = least + len(moved), sizes[rich] - len(moved)


def plot(summary: dict[str, Any]) -> "figure.Figure":
    """Return a figure of the training samples per site as stacked bars, with one colour per class."""
    training, classes, sites = summary["training"].values(), summary["classes"], list(summary["training"])
    bars = {label: np.array([counts[label] for counts in training]) for label in classes}
    picture = figure.Figure(figsize=(9, 1.6 + 0.32 * len(sites)), layout="constrained")
    axes, left = picture.subplots(), np.zeros(len(sites))
    colors = matplotlib.colormaps["tab10" if len(bars) <= 10 else "tab20"]
    for index, (label, widths) in enumerate(bars.items()):
        axes.barh(
            sites,
            widths,
            left=left,
            label=label if index < MOST_COLORS else None,
            color=colors(index % colors.N),
            edgecolor="white",
            lw=0.5,
        )
        left = left + widths
    axes.invert_yaxis()
    axes.set_xlabel("training samples")
    shares = "Even shares" if summary["beta"] is None else f"Dirichlet({summary['beta']:g})"
    what = f"values of {summary['by']}" if summary.get("by") else "classes"
    axes.set_title(f"{shares} of {len(classes)} {what} over {len(sites)} sites, seed {summary['seed']}")
    axes.spines[["top", "right"]].set_visible(False)
    picture.legend(loc="outside right center", frameon=False)
    return picture


# texts -----------------------------------------------------------------------------------------------------------------------


Kinds = Callable[[Sequence[str]], list[str]]
"""A function that returns the class of each text, such as its cluster."""
COMMON = "common_test.jsonl"
ALL = "records"
"""The class of every record if no key is named."""
MOST_VALUES = 1000
"""Values of a key. A key with more values holds names rather than classes, and cannot be drawn."""


def partition_texts(
    source: Path,
    folder: Path,
    sites: int,
    beta: float | None,
    seed: int,
    minimum: int,
    by: str = "",
    classify_texts: Kinds | None = None,
    local_splits: bool = False,
) -> dict[str, Any]:
    """Write `folder`/site-K/{training,validation,test}.jsonl, partition.json and partition.png.

    Return the content of partition.json. `beta`: None for even shares. `by`: the key whose value is the class of a record.
    `classify_texts`, `local_splits`: see above. Raises DataError for records without the key, too few records, or a folder
    that already holds sites.
    """
    splits, values = _read_records(source, by, classify_texts)
    found = _assign_to_sites(source, folder, splits, values, sites, beta, seed, minimum)
    if local_splits:
        for name, mine in found.items():
            # a record without a patient counts as a patient
            patients = samples_by_patient([*mine["training"], *mine["validation"]])
            rng = np.random.default_rng(seed_for(seed, "local", name))
            order = [patients[i] for i in rng.permutation(len(patients))]
            # a tenth each for validation and test; from three patients on at least one
            part = max(round(0.1 * len(order)), 1) if len(order) >= 3 else 0
            cut = {"training": order[2 * part :], "validation": order[:part], "test": order[part : 2 * part]}
            found[name] = {split: list(chain(*own)) for split, own in cut.items()}
        if splits[COMMON_SPLIT]:
            write_atomic(folder / COMMON, _jsonl_bytes(splits[COMMON_SPLIT]), PUBLIC)
    for name, mine in found.items():
        for split, records in mine.items():
            path, first = folder / name / f"{split}.jsonl", folder / "site-1" / f"{split}.jsonl"
            if split == COMMON_SPLIT and not local_splits and first.is_file():
                try:
                    os.link(first, path)  # equal files take the disk's space once
                except OSError:  # a file system without links
                    shutil.copyfile(first, path)
            elif records:
                write_atomic(path, _jsonl_bytes(records), PUBLIC)
    asked = {"sites": sites, "beta": beta, "seed": seed, "minimum": minimum, "by": by or ("clusters" if classify_texts else "")}
    return write_summary(source, folder, asked | {"local": local_splits}, values, found)


def _jsonl_bytes(records: Sequence[Record]) -> bytes:
    return "".join(f"{record.line}\n" for record in records).encode()


def _read_records(source: Path, by: str, classify_texts: Kinds | None) -> tuple[dict[str, list[Record]], list[str]]:
    """Return the records by split, and their classes, sorted. Raises DataError."""
    data = read_texts(source)  # raises for a bad record
    splits: dict[str, list[Record]] = {split: [] for split in SPLITS}
    for split, path in split_files(data.path).items():
        for (number, line), text in zip(record_lines(path), data.splits[split], strict=True):
            record = json.loads(line) if by or '"image"' in line else {}
            value = record.get(by) if by else ALL
            if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
                raise DataError(
                    f"{path}:{number}: --by {by}: expected a text or a whole number there; "
                    f"found the keys {', '.join(record)[:200]}"
                )
            picture = path.parent / record["image"] if isinstance(record.get("image"), str) else path.parent
            if is_there(picture) and picture.is_file():  # a relative path would lead nowhere from another folder
                line = json.dumps(record | {"image": str(absolute_path(picture))})
            splits[split].append(Record(line.removesuffix("\n"), str(value), text.patient))
    if classify_texts:  # the splits are clustered together
        of_texts = iter(classify_texts([text.prompt_without_template for split in SPLITS for text in data.splits[split]]))
        splits = {split: [replace(record, label=next(of_texts)) for record in splits[split]] for split in SPLITS}
    values = sorted({record.label for records in splits.values() for record in records})
    if len(values) > MOST_VALUES:
        raise DataError(f"{source}: --by {by}: {len(values):,} values, at most {MOST_VALUES:,} are allowed; name another key")
    return splits, values


def cluster_points(points: np.ndarray, count: int, seed: int) -> list[str]:
    """Return the name of each point's cluster, "cluster-0" and so on, for points (N, D): embeddings of texts.

    FedHera's Table 10 partitions instructions by K-means clusters of "semantic embeddings" and does not name the embedding
    model. Here, it is the base model's mean hidden state, see models/causal_lm/text_embeddings.py; K-means starts by k-means++.
    The same points and seed give the same clusters. Raises DataError if there are fewer different points than clusters.
    """
    if len(np.unique(points, axis=0)) < count:
        raise DataError(f"--clusters: {count} are more than there are different records; ask for less")
    from scipy.cluster.vq import kmeans2

    draw = np.random.default_rng(seed_for(seed, "clusters"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a cluster that loses all its points stays empty, and no record has it
        _, found = kmeans2(points.astype(np.float64), count, iter=100, minit="++", rng=draw)
    width = len(str(count - 1))
    return [f"cluster-{int(number):0{width}d}" for number in found]


# splits of one list -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """An entry of the new list. `split`: its split in the source; `keys`: link it to others; `labels`: that it shows."""

    split: str
    entry: dict[str, Any]
    keys: tuple[Hashable, ...]
    labels: frozenset[str]


Parts = dict[str, list[Entry]]


def split_list(
    source: Path,
    folder: Path,
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    keep_test: bool = False,
    folds: int = 0,
) -> dict[str, Any]:
    """Write `folder`/datalist.json, or one list each in fold-1, fold-2, ..., and split.json. Return the content of split.json.

    `validation`, `test`: shares of all samples. `keep_test`: the list's own test split stays, and `validation` is a share of
    the other samples. `folds`: number of parts, each of which is the test split of one fold; `validation` is a share of the
    others. Paths are absolute, and no picture is copied. Entries keep their own keys; identifiers from files are not added.
    Raises DataError for a list or mask that cannot be read, shares that sum to 1 or more, too few groups, or a folder in use.
    """
    test = 0.0 if folds or keep_test else test
    names = ("datalist.json", "split.json", "fold-1")
    raise_first_fault(
        folder,
        (any((folder / name).exists() for name in names), "holds a split already; give another folder"),
        (
            validation + test >= 1,
            f"--validation {validation:g} and --test {test:g} leave nothing to train on; ask for less",
        ),
    )
    samples, more = _read_entries(source)
    groups = linked_groups(samples)
    if folds > len(groups):
        raise DataError(f"{source}: {len(groups)} patients or volumes are too few for {folds} folds; ask for less")
    lists: dict[str, Parts] = {}
    tests = share_by_labels(samples, {f"fold-{number}": 1 / folds for number in range(1, folds + 1)}, seed) if folds else {}
    for number, (name, own) in enumerate(tests.items()):  # every sample is in the test split of exactly one fold
        rest = [s for other, part in tests.items() if other != name for s in part]
        shares = {"training": 1 - validation, "validation": validation}
        lists[name] = share_by_labels(rest, shares, seed_for(seed, "fold", number)) | {"test": own}
    if not folds:
        kept = [s for s in samples if keep_test and s.split == "test"]
        parts = share_by_labels(
            [s for s in samples if not (keep_test and s.split == "test")],
            {"training": 1 - validation - test, "validation": validation, "test": test},
            seed,
        )
        lists = {"": parts | {"test": parts["test"] + kept}}
    notes, splits = [], {}
    if not any(key[0] == "patient" for s in samples for key in s.keys if isinstance(key, tuple)):
        notes.append('no entry names its "patient", so one patient\'s pictures may be in two splits')
    for name, parts in lists.items():
        write_atomic(
            folder / name / "datalist.json",
            json.dumps(more | {split: [s.entry for s in parts[split]] for split in SPLITS}, indent=1).encode(),
            PUBLIC,
        )
        for split in SPLITS:
            place, labels = f"{name} {split}".strip(), _count_labels(parts[split])
            splits[place] = {
                "samples": labels.pop("", 0),
                "groups": len(linked_groups(parts[split])),
                "labels": dict(sorted(labels.items())),
            }
            if not parts[split] and (split != "validation" or validation):
                notes.append(f"{place}: no sample; there are too few groups for its share")
    summary = {"source": str(source.resolve()), "seed": seed, "groups": len(groups), "splits": splits, "notes": notes}
    write_atomic(folder / "split.json", json.dumps(summary, indent=1).encode(), PUBLIC)
    return summary


def share_by_labels(samples: Sequence[Entry], shares: dict[str, float], seed: int) -> Parts:
    """Return the samples by part. Each part has nearly its share of the samples and of every label; groups stay whole."""
    groups = linked_groups(samples)
    order = np.random.default_rng(seed_for(seed, "split")).permutation(len(groups))
    left = sorted((groups[i] for i in order), key=len, reverse=True)
    wanted = {part: Counter({key: share * n for key, n in _count_labels(samples).items()}) for part, share in shares.items()}
    found: dict[str, list[Entry]] = {part: [] for part in shares}
    while left:
        counts = _count_labels([s for group in left for s in group])
        rarest = min(counts, key=lambda label: (counts[label], label))
        now, left = [g for g in left if rarest in _count_labels(g)], [g for g in left if rarest not in _count_labels(g)]
        for group in now:
            part = max((p for p in shares if shares[p] > 0), key=lambda p: (wanted[p][rarest], wanted[p][""]))
            found[part] += group
            wanted[part].subtract(_count_labels(group))
    return found


def linked_groups(samples: Sequence[Entry]) -> list[list[Entry]]:
    """Return the groups of linked samples, in the order of the list. Linked samples share a key, directly or through others."""
    return list(group_by_key(zip(first_linked([sample.keys for sample in samples]), samples, strict=True)).values())


def _count_labels(samples: Sequence[Entry]) -> Counter[str]:
    """Return the number of samples that show each label; the key "" has the number of all samples."""
    return Counter(label for sample in samples for label in (*sample.labels, ""))


def _read_entries(source: Path) -> tuple[list[Entry], dict[str, Any]]:
    """Return all samples of a list, and the values of its other keys. Raises DataError."""
    data = read_datalist(source, None)
    kept = {split for split in SPLITS if split != "test" or with_challenge_splits(data).splits[split]}
    raw, written, found = {} if source.is_dir() else read_datalist_json(source), _absolute_entries(source, data), []
    for split in (one for one in SPLITS if one in kept):
        for item, own in zip(data.splits[split], written[split], strict=True):
            header = volumes.header(item.image, "sform") if volumes.is_volume(item.image) else None
            patient, study = (header.patient, header.study) if header else ("", "")
            whose = (("patient", item.patient or pseudonym(patient)), ("study", item.study or pseudonym(study)))
            keys = [("file", str(file.resolve())) for file in sample_files(item)] + [pair for pair in whose if pair[1]]
            labels = set() if item.label is None else {str(item.label)}
            if isinstance(item.label, Path):
                shown = whole_labels(replace(item, affine=item.affine or "sform"), PictureSettings(resample_masks=True))
                labels = {str(value) for one in shown for value in one.present() - {0}}
            found.append(Entry(split, own, tuple(keys), frozenset(labels)))
    volumes.drop_caches()
    if not found:
        raise DataError(f"{source}: holds no samples; give a list with some")
    return found, {key: value for key, value in raw.items() if key not in SPLITS}


def _absolute_entries(source: Path, data: DataList) -> dict[str, list[dict[str, Any]]]:
    """Return the entries of a list by split, with all their keys but `fold`, and with absolute paths.

    Identifiers from files are not in them.
    """
    raw = {} if source.is_dir() else read_datalist_json(source)
    found: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for split, written in found.items():
        for item, entry in zip(data.splits[split], raw.get(split) or [{}] * len(data.splits[split]), strict=True):
            own = {key: value for key, value in entry.items() if key != "fold"} if isinstance(entry, dict) else {}
            own |= {"image": str(absolute_path(item.image))}
            if item.label is not None:
                own["label"] = str(absolute_path(item.label)) if isinstance(item.label, Path) else item.label
            written.append(own)
    return found
