"""Split a data list into training, validation and test. Linked samples stay in one part.

Entries of one patient, study, volume or mask are linked. Patients and studies are read from the list and from DICOM files.
Labels are spread evenly by iterative stratification (Sechidis, Tsoumakas and Vlahavas, ECML PKDD 2011) of groups of linked
samples instead of single samples: the rarest label comes first, and each of its groups goes to the part that lacks most of it.
The same list, numbers and seed give the same split.
"""

import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from consilium.core.errors import DataError
from consilium.core.grouping import group_by_key
from consilium.core.seeding import seed_for
from consilium.core.storage import PUBLIC, write_atomic
from consilium.data import volumes
from consilium.data.datalist import SPLITS, Item, files_of, read_datalist, read_datalist_json, with_challenge_splits
from consilium.data.images import whole_labels
from consilium.data.patients import first_linked, pseudonym
from consilium.data.settings import PictureSettings


@dataclass(frozen=True)
class Sample:
    """An entry of the new list. `split`: its split in the source; `keys`: link it to others; `labels`: that it shows."""

    split: str
    entry: dict[str, Any]
    keys: tuple[Hashable, ...]
    labels: frozenset[str]


Parts = dict[str, list[Sample]]


def split_list(
    source: Path, folder: Path, validation: float = 0.1, test: float = 0.2, seed: int = 0, keep_test: bool = False
) -> dict[str, Any]:
    """Write `folder`/datalist.json and split.json. Return the content of split.json.

    `validation`, `test`: shares of all samples. `keep_test`: the list's own test split stays, and `validation` is a share of
    the other samples. Paths are absolute, and no picture is copied. Entries keep their own keys; identifiers from files are
    not added. Raises DataError for a list or mask that cannot be read, shares that sum to 1 or more, or a folder in use.
    """
    if (folder / "datalist.json").exists() or (folder / "split.json").exists():
        raise DataError(f"{folder}: holds a cut already; give another")
    if validation + test >= 1:
        raise DataError(f"{folder}: --validation {validation:g} and --test {test:g} leave nothing to train on; ask for less")
    samples, more = _read_samples(source)
    kept = [s for s in samples if keep_test and s.split == "test"]
    test = 0.0 if keep_test else test
    shares = {"training": 1 - validation - test, "validation": validation, "test": test}
    parts = share_out([s for s in samples if not (keep_test and s.split == "test")], shares, seed)
    parts["test"] += kept
    entries = {split: [s.entry for s in parts[split]] for split in SPLITS}
    write_atomic(folder / "datalist.json", json.dumps(more | entries, indent=1).encode(), PUBLIC)
    notes = []
    if not any(key[0] == "patient" for s in samples for key in s.keys if isinstance(key, tuple)):
        notes.append('no entry names its "patient", so one patient\'s pictures may be in two splits')
    splits = {}
    for split in SPLITS:
        labels, groups = _count_labels(parts[split]), len(linked_groups(parts[split]))
        splits[split] = {"samples": labels.pop("", 0), "groups": groups, "labels": dict(sorted(labels.items()))}
        if not parts[split] and (split != "validation" or validation):
            notes.append(f"{split}: no sample; there are too few groups for its share")
    summary = {"source": str(source.resolve()), "seed": seed, "groups": len(linked_groups(samples))}
    summary |= {"splits": splits, "notes": notes}
    write_atomic(folder / "split.json", json.dumps(summary, indent=1).encode(), PUBLIC)
    return summary


def share_out(samples: Sequence[Sample], shares: dict[str, float], seed: int) -> Parts:
    """Return the samples by part. Each part has nearly its share of the samples and of every label; groups stay whole."""
    groups = linked_groups(samples)
    order = np.random.default_rng(seed_for(seed, "split")).permutation(len(groups))
    left = sorted((groups[i] for i in order), key=len, reverse=True)
    wanted = {part: Counter({key: share * n for key, n in _count_labels(samples).items()}) for part, share in shares.items()}
    found: dict[str, list[Sample]] = {part: [] for part in shares}
    while left:
        counts = _count_labels([s for group in left for s in group])
        rarest = min(counts, key=lambda label: (counts[label], label))
        now, left = [g for g in left if rarest in _count_labels(g)], [g for g in left if rarest not in _count_labels(g)]
        for group in now:
            part = max((p for p in shares if shares[p] > 0), key=lambda p: (wanted[p][rarest], wanted[p][""]))
            found[part] += group
            wanted[part].subtract(_count_labels(group))
    return found


def linked_groups(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the groups of linked samples, in the order of the list. Linked samples share a key, directly or through others."""
    return list(group_by_key(zip(first_linked([sample.keys for sample in samples]), samples, strict=True)).values())


def _count_labels(samples: Sequence[Sample]) -> Counter[str]:
    """Return the number of samples that show each label; the key "" has the number of all samples."""
    return Counter(label for sample in samples for label in (*sample.labels, ""))


def _read_samples(source: Path) -> tuple[list[Sample], dict[str, Any]]:
    """Return all samples of a list, and the values of its other keys. Raises DataError."""
    data = read_datalist(source, None)
    kept = {split for split in SPLITS if split != "test" or with_challenge_splits(data).splits[split]}
    raw = {} if source.is_dir() else read_datalist_json(source)
    found = []
    for split in (one for one in SPLITS if one in kept):
        entries = raw.get(split) or [{}] * len(data.splits[split])
        for item, entry in zip(data.splits[split], entries, strict=True):
            own = {key: value for key, value in entry.items() if key != "fold"} if isinstance(entry, dict) else {}
            own |= {"image": str(item.image.resolve())}
            if item.label is not None:
                own["label"] = str(item.label.resolve()) if isinstance(item.label, Path) else item.label
            header = volumes.header(item.image, "sform") if volumes.is_volume(item.image) else None
            patient, study = (header.patient, header.study) if header else ("", "")
            whose = (("patient", item.patient or pseudonym(patient)), ("study", item.study or pseudonym(study)))
            keys = [("file", str(file.resolve())) for file in files_of(item)] + [pair for pair in whose if pair[1]]
            found.append(Sample(split, own, tuple(keys), frozenset(_labels_of(item))))
    volumes.forget()
    if not found:
        raise DataError(f"{source}: holds no samples; give a list with some")
    return found, {key: value for key, value in raw.items() if key not in SPLITS}


def _labels_of(item: Item) -> set[str]:
    if not isinstance(item.label, Path):
        return set() if item.label is None else {str(item.label)}
    settings = PictureSettings(resample_masks=True)
    found = (labels.present() - {0} for labels in whole_labels(replace(item, affine=item.affine or "sform"), settings))
    return {str(value) for values in found for value in values}
