"""A table of text, before it has a format."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from consilium.report.compare.groups import Group

MARK = "*"
"""Stands behind a mean from which seeds are missing."""


@dataclass(frozen=True)
class Column:
    """A heading. `rank`: columns of a higher one are the first that a narrow terminal does without; `right`: numbers."""

    heading: str
    rank: int = 0
    right: bool = True


@dataclass(frozen=True)
class Sheet:
    """A table of text. `best`: cells (row, column) to stand out; the first column names a row."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    best: frozenset[tuple[int, int]] = field(default_factory=frozenset)


def titled(group: Group, text: str) -> str:
    """Return a title that begins with the group's name, where it has one."""
    return f"{group.name}: {text}" if group.name else text
