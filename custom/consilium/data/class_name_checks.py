"""Names of classes that look like a mistake: two spellings of one class, a missing value, a class per sample."""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence

from consilium.core.grouping import group_by_key

MISSING = frozenset({"nan", "na", "n/a", "#n/a", "<na>", "null", "none", "nil", "-", "?", ".", "unknown", "missing"})
"""What programs and people write for an empty cell, in lower case."""
FEW = 10
"""Below this number of samples, a class per sample may be intended."""
SPELLINGS = "class in two spellings"
NO_NAME = "class that looks like a missing value"
EACH_ITS_OWN = "as many classes as samples"


def class_name(label: object, names: Sequence[str]) -> str | None:
    """Return the name of a label's class, which the label gives by name or by number from 0; None for any other label."""
    if isinstance(label, int):
        return names[label] if 0 <= label < len(names) else None
    return label if isinstance(label, str) and label in names else None


def doubtful_name_findings(counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield (kind, line) for each doubtful name of a class. `counts`: the number of samples per class."""
    for names in group_by_key((_normalize_class_name(name), name) for name in sorted(counts)).values():
        if len(names) > 1:
            told = " and ".join(f"{name!r} ({counts[name]})" for name in names)
            yield SPELLINGS, f"{told} differ in case, blanks or hyphens alone: write them alike if they are one"
    for name in sorted(counts):
        if name.strip().casefold() in MISSING:
            yield NO_NAME, f"{name!r} ({counts[name]}): take its samples out if it is one"
    if len(counts) == sum(counts.values()) >= FEW:
        yield EACH_ITS_OWN, f"{len(counts)}: no class has a second sample, so none can be learned and tested"


def _normalize_class_name(name: str) -> str:
    """Return a name in one case, without blanks, hyphens and underscores between letters and digits.

    A sign at the end stays, because HER2 and HER2- differ.
    """
    return re.sub(r"(?<=\w)[-_\s]+(?=[^\W_])", "", unicodedata.normalize("NFKC", name).casefold().strip())
