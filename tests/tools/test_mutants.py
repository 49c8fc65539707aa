"""The mutants of a few lines, counted by hand, and the record of what is reached."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tools.mutants import Mutant, draw, instrument, mutants_of

SOURCE = '''
"""A page."""
LIMIT: int | None = 3


def kept(values: list[int], least: int = 1) -> list[int]:
    """Return 2 - 1 of them."""
    found = []
    for value in values:
        if value <= least or not value:
            continue
        found.append(value * 2)
    if len(found) > 99:
        raise ValueError(f"more than {LIMIT + 1}")
    return [one for one in found if one != LIMIT][:9]
'''


def texts(line: int) -> set[tuple[str, str]]:
    return {(one.old, one.new) for one in mutants_of("x.py", SOURCE) if one.line == line}


def test_a_line_has_these_mutants() -> None:
    assert texts(3) == {("3", "(4)"), ("3", "(2)")}
    assert texts(6) == {("1", "(2)"), ("1", "(0)")}
    assert texts(10) == {
        ("value <= least or not value", new)
        for new in (
            "(value <= least and (not value))",
            "(value <= least)",
            "(not value)",
            "(not (value <= least or not value))",
        )
    } | {("value <= least", "(value < least)"), ("value <= least", "(value > least)"), ("not value", "(value)")}
    assert texts(11) == {("continue", "break")}
    assert texts(12) == {
        ("found.append(value * 2)", "pass"),
        ("value * 2", "(value / 2)"),
        ("2", "(3)"),
        ("2", "(1)"),
    }
    assert texts(14) == {('raise ValueError(f"more than {LIMIT + 1}")', "pass")}
    whole = "[one for one in found if one != LIMIT]"
    assert texts(15) == {
        (f"{whole}[:9]", f"({whole})"),
        (whole, "([one for one in found])"),
        ("one != LIMIT", "(one == LIMIT)"),
        ("9", "(10)"),
        ("9", "(8)"),
    }


def test_a_larger_draw_begins_with_a_smaller_one_of_one_mutant_a_line() -> None:
    room = Path(__file__).parent
    few, many = draw(room, 7, 5), draw(room, 7, 50)
    assert many[:5] == few != draw(room, 8, 5)
    places: list[tuple[str, int]] = [(one.path, one.line) for one in many]
    assert len(set(places)) == len(places) == 50
    assert all(isinstance(one, Mutant) for one in many)


def test_instrumented_code_does_the_same_and_says_what_it_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[str] = []
    monkeypatch.setitem(sys.modules, "reach", SimpleNamespace(hit=places.append))
    space: dict[str, object] = {}
    exec(compile(instrument("x.py", SOURCE), "x.py", "exec"), space)
    kept = space["kept"]
    assert callable(kept)
    assert kept([1, 2]) == [4]
    assert kept.__doc__ == "Return 2 - 1 of them."
    assert places == [f"x.py:{line}" for line in (8, 9, 10, 11, 10, 12, 13, 15)]
