"""Checks of classes: names that look like a mistake, and mask values that a job's classes do not declare.

A name looks like a mistake if it is one of two spellings, a missing value, or one of as many as there are samples. Imports,
checks and jobs propose the same remedy for undeclared values: if no site has several values, such as 1 at one hospital and 255
at the others, all values are one class.
"""

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from consilium.core.grouping import group_by_key
from consilium.data.pairs import MOST_VALUES
from consilium.data.settings import Value

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


def text_label(label: str, names: Sequence[str]) -> str | int:
    """Return a text's label, as a number if it is one and not a class's name."""
    return int(label) if label.isdecimal() and label not in names and len(label) < 10 else label


def doubtful_name_findings(counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield (kind, line) for each doubtful name of a class. `counts`: the number of samples per class."""
    # one case, without blanks, hyphens and underscores between letters and digits; a sign at the end stays: HER2 is not HER2-
    plain = {name: unicodedata.normalize("NFKC", name).casefold().strip() for name in sorted(counts)}
    plain = {name: re.sub(r"^(\d+)\.0+$", r"\1", one) for name, one in plain.items()}  # 1.0 is 1 in a table with gaps
    for names in group_by_key((re.sub(r"(?<=\w)[-_\s]+(?=[^\W_])", "", one), name) for name, one in plain.items()).values():
        if len(names) > 1:
            told = " and ".join(f"{name!r} ({counts[name]})" for name in names)
            yield SPELLINGS, f"{told} differ in case, blanks, hyphens or a final .0 alone: write them alike if they are one"
    for name in sorted(counts):
        if name.strip().casefold() in MISSING:
            yield NO_NAME, f"{name!r} ({counts[name]}): take its samples out if it is one"
    if len(counts) == sum(counts.values()) >= FEW:
        yield EACH_ITS_OWN, f"{len(counts)}: no class has a second sample, so none can be learned and tested"


# values of masks ------------------------------------------------------------------------------------------------------------


UNDECLARED = "undeclared label value"
"""The kind of the error for a mask with a value of no class."""
OF_NO_CLASS = "belongs to no class"
"""The words in that error between the value and the remedy."""
ONE_CLASS = "object"
"""The name of the class if masks have a single one."""
LARGEST = 2**16
"""Values of `task.classes` must be lower. A site's `labels` take any value."""
Classes = Mapping[str, Sequence[Value]]
"""Label values per class. Classes may share values, because a cup is part of its disc."""


def all_masks_binary(by_site: Iterable[Collection[Value]]) -> bool:
    """Tell whether every site's masks have at most one value other than 0. The value may differ by site."""
    return all(len(set(values) - {0}) <= 1 for values in by_site)


def classes_for(by_site: Iterable[Collection[Value]]) -> dict[str, list[int]]:
    """Return classes for the values of masks at all sites: a single class if `all_masks_binary`, else one per value."""
    sets = [set(values) for values in by_site]
    values = sorted(value for value in set().union(*sets) - {0} if isinstance(value, int))
    return {ONE_CLASS: values} if all_masks_binary(sets) else {f"value-{value}": [value] for value in values}


def undeclared_label_values(values: Collection[Value], classes: Classes) -> list[int]:
    """Return the values that no class declares, sorted, without 0 and without names of regions."""
    return sorted(
        value
        for value in set(values) - {0, *(value for wanted in classes.values() for value in wanted)}
        if isinstance(value, int)
    )


def undeclared_remedy(by_site: Sequence[Collection[Value]], classes: Classes) -> str:
    """Return the text that says what to write so that all values of all sites belong to a class."""
    own = {name: [value for value in wanted if isinstance(value, int)] for name, wanted in classes.items()}
    lost = undeclared_label_values(set().union(*by_site), own)
    if len(lost) >= MOST_VALUES - 1:
        return f"{len(lost):,} values are single objects or grey levels, no classes; save masks with one value for each class"
    if any(not 0 <= value < LARGEST for value in lost):
        known = {value for wanted in own.values() for value in wanted}
        labels = one_line_yaml({value: [name for name in own if value in own[name]] for value in sorted({*known, *lost})})
        return f"write labels: {labels} for the data set under `datasets:` of site.yaml, where [] is background"
    name = next(iter(own))
    if len(own) == 1 and all_masks_binary(by_site):
        return f"write task.classes: {one_line_yaml({name: sorted({*own[name], *lost})})} in job.yaml"
    more = one_line_yaml(own | {f"value-{value}": [value] for value in lost})
    return f"write task.classes: {more} in job.yaml, or put {', '.join(map(str, lost))} to the class that it is"


def one_line_yaml(classes: Mapping[Any, Sequence[Any]]) -> str:
    """Return a map as one line of YAML."""
    return yaml.safe_dump(dict(classes), default_flow_style=True, sort_keys=False, width=10**6).strip()
