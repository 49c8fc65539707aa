"""What sums show together, beside a search through all groups of hospitals by the ranks of matrices."""

import itertools
import random
from collections.abc import Collection

import numpy as np
import pytest

from consilium.privacy.secagg import sum_ledger
from consilium.privacy.secagg.sum_ledger import UndecidedError, smallest_revealed_set

Sites = frozenset[str]


def fewest(new: Sites, known: Collection[Sites], least: int) -> int | None:
    """Return how many hospitals the smallest group below `least` has outside of which known sums make the new one."""
    names = sorted(new.union(*known))
    wanted = np.array([name in new for name in names], float)
    rows = np.array([[name in one for name in names] for one in known], float).reshape(len(known), len(names))
    for size in range(least):
        for group in itertools.combinations(range(len(names)), size):
            rest = [place for place in range(len(names)) if place not in group]
            made = np.linalg.matrix_rank(rows[:, rest]) if known and rest else 0
            both = np.linalg.matrix_rank(np.vstack([rows[:, rest], wanted[rest]])) if rest else 0
            if made == both:
                return size
    return None


def test_it_finds_what_a_search_through_all_groups_finds() -> None:
    drawn, found = random.Random(1), 0
    for _ in range(400):
        names = [str(number) for number in range(drawn.randint(3, 7))]
        known = [frozenset(drawn.sample(names, drawn.randint(2, len(names)))) for _ in range(drawn.randint(0, 4))]
        new, least = frozenset(drawn.sample(names, drawn.randint(2, len(names)))), drawn.randint(2, 6)
        shown = smallest_revealed_set(new, known, least)
        wanted = fewest(new, known, least)
        assert (shown and len(shown)) == (wanted or None), (new, known, least)  # 0: the new sum follows from the known ones
        found += shown is not None
    assert 100 < found < 300


@pytest.mark.parametrize(
    ("new", "known", "least", "shown"),
    [
        ("1234", ["123"], 3, "4"),
        ("123", ["1234"], 3, "4"),
        ("124", ["123"], 3, "34"),
        ("124", ["123"], 2, None),
        ("123", ["123", "1234"], 3, None),  # known already, whatever an administrator has let pass
        ("1456", ["123", "1234"], 3, None),  # less the known 4 it is 1, 5 and 6
        ("1245", ["123", "345"], 4, "3"),  # 123 + 345 - 1245 is twice 3
        ("12", [], 3, "12"),
        ("123", [], 3, None),
        ("1256", ["1234", "3456"], 3, "12"),  # 1256 + 1234 - 3456 is twice 1 and 2
        ("34", ["123", "1234", "3"], 3, None),  # hospitals 3 and 4 are known one by one
    ],
)
def test_cases_by_hand(new: str, known: list[str], least: int, shown: str | None) -> None:
    found = smallest_revealed_set(frozenset(new), [frozenset(one) for one in known], least)
    assert found == (None if shown is None else frozenset(shown))


def test_a_search_that_would_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum_ledger, "MOST_STEPS", 200)
    drawn, names = random.Random(0), [str(number) for number in range(40)]
    sets = [frozenset(drawn.sample(names, 20)) for _ in range(13)]
    with pytest.raises(UndecidedError):
        smallest_revealed_set(sets[0], sets[1:], 12)
