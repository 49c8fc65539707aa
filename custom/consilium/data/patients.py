"""The patients of samples: which samples belong to one patient, and which samples are linked in other ways."""

import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

from consilium.core.grouping import group_by_key
from consilium.data.datalist import DataList
from consilium.data.identifiers import ALIKE, similar_patient_lines

S = TypeVar("S")
_log = logging.getLogger(__name__)


def training_indices_by_patient(data: DataList) -> tuple[tuple[int, ...], ...]:
    """Return the indices of every patient's samples in the training split, in the list's order.

    Samples without a patient are left out, because their patients could not be protected.
    """
    training = enumerate(data.splits["training"])
    return tuple(
        map(tuple, group_by_key((whose, place) for place, item in training if (whose := item_pseudonym(item))).values())
    )


def patients_and_most_samples(samples: Sequence[Any]) -> tuple[int, int]:
    """Return the number of patients that samples name, and the largest number of samples of one patient."""
    counts = Counter(whose for item in samples if (whose := item_pseudonym(item)))
    return len(counts), max(counts.values(), default=0)


def samples_by_patient(samples: Sequence[S]) -> list[list[S]]:
    """Return a group of samples per patient, in the order of first samples. A sample without a patient is a group alone."""
    return list(group_by_key((item_pseudonym(item) or place, item) for place, item in enumerate(samples)).values())


def first_linked(keys: Sequence[Iterable[Hashable]]) -> list[int]:
    """Return for each sample the index of the first sample that is linked to it. `keys`: the keys of each sample.

    Samples are linked if they share a key, directly or through other samples.
    """
    from scipy.cluster.hierarchy import DisjointSet  # imported here, because a server loads this module and links nothing

    linked, first, least = DisjointSet(range(len(keys))), dict[Hashable, int](), dict[int, int]()
    for index, own in enumerate(keys):
        for key in own:
            linked.merge(first.setdefault(key, index), index)
    return [least.setdefault(linked[index], index) for index in range(len(keys))]


def warn_of_similar_patients(data: DataList) -> None:
    """Warn in the site's own log of patients whose identifiers are nearly equal, because they may be one person."""
    samples = ((split, item) for split, items in data.splits.items() for item in items)
    for line in similar_patient_lines((item_pseudonym(item), f"{split}: {item.name}") for split, item in samples):
        _log.warning(f"{ALIKE}: {line}; give one person one identifier")


def item_pseudonym(item: Any) -> str:
    """Return the pseudonym of a sample's patient, "" if unknown."""
    return str(getattr(item, "patient", ""))
