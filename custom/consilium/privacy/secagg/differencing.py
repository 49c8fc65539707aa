"""Differencing: what sums of several sets of hospitals show together, where training repeats and no noise is added.

Let x_i be hospital i's weighted update, the same vector in every sum: training repeats bit for bit. A server with the sums over
the sets U_1 to U_k, written as vectors of 0 and 1, can make of them sum_j c_j U_j for any numbers c_j, and nothing else that is
linear. So it reads a sum over U_4 = {1, 2, 3, 4} less one over {1, 2, 3} as hospital 4's update.

The rule. A new set W is let in where every W + sum_j c_j U_j holds at least `least` hospitals (numbers that are not 0), or
where W itself is such a combination of earlier sets, so that it shows nothing new. By induction over the sets, every
combination of sums that were let in is 0 or holds `least` hospitals: the last set in it that adds anything was let in with
that property. With `least` = threshold, c colluders among them leave threshold - c honest ones, as they do in one sum. A
difference of threshold - c hospitals would not do: {1, 2, 3} and {1, 2, 4} differ in 3 and 4, and a colluding 4 takes its own
part off.

Pairs are not enough: of A+B+x, A+C+x, D+B+x and D+C+x+y, where A to D are two hospitals each, any two differ in four or more,
and the first less the second less the third plus the fourth is hospital y. The rule looks at all combinations.

What the rule does not give:
- It counts hospitals, not how much each weighs in a combination.
- It looks at the sets that one hospital was in, because it knows no others. Any two sums share a hospital that remembers both,
  or no honest one, and then their difference holds all the honest ones of each. For three sums that fails: {1, 2, 3}, {3, 4, 5}
  and {1, 2, 4, 5} give twice hospital 3's update, and no hospital is in all of them.
- It compares sets, not values. Where only one hospital's data change between two sums of the same hospitals, their difference
  shows that change. A hospital whose updates left without masks counts as one that colludes.
- It says nothing of what one sum of many hospitals tells of one of them, or of a model that many sums have made.
Over many runs only noise protects.
"""

from collections import Counter
from collections.abc import Collection
from fractions import Fraction

MOST_STEPS = 20_000
"""Combinations that are looked at, a few seconds. The search grows with the number of sets that overlap."""
Sites = frozenset[str]
Row = list[Fraction]


class UndecidedError(Exception):
    """So many sets overlap that what they show together was not found in MOST_STEPS."""


def smallest_shown(summed: Sites, known: Collection[Sites], least: int) -> Sites | None:
    """Return the fewest hospitals that the new sum shows together with known ones, None where these are `least` or more.

    None also where the new sum follows from the known ones. Hospitals that are in the same sets count together: a combination
    has one number for all of them. Raises UndecidedError.
    """
    sets = [summed, *known]
    kinds = Counter(tuple(name in one for one in sets) for name in sorted(frozenset[str]().union(*sets)))
    order = sorted(kinds, key=lambda kind: (-kinds[kind], kind))  # the largest first: they leave the fewest ways
    basis, new = list[Row](), [Fraction(kind[0]) for kind in order]
    for number in range(1, len(sets)):
        row = _reduced([Fraction(kind[number]) for kind in order], basis)
        basis += [row] if any(row) else []
    if not any(_reduced(new, basis)):
        return None
    try:
        found = _Search([kinds[kind] for kind in order], least).run(new, basis)
    except RecursionError:  # a frame for each kind of hospital
        raise UndecidedError from None
    if found is None:
        return None
    shown = {kind for kind, number in zip(order, found, strict=True) if number}
    return frozenset(name for name in frozenset[str]().union(*sets) if tuple(name in one for one in sets) in shown)


def _first(row: Row) -> int:
    return next(place for place, number in enumerate(row) if number)


def _reduced(row: Row, basis: list[Row]) -> Row:
    """Return a row less what of it the rows of a basis make; all 0 where they make it whole."""
    for one in basis:
        row = _without(row, one, _first(one))
    return row


def _without(row: Row, other: Row, place: int) -> Row:
    """Return a row less as much of another as makes its number at a place 0."""
    if not row[place]:
        return row
    factor = row[place] / other[place]
    return [a - factor * b for a, b in zip(row, other, strict=True)]


class _Search:
    """Finds the lightest `new` + combination of rows by deciding place after place: 0 there, or paid for by its weight.

    A lightest one is among those that are found: where a row is left, it can make one more place 0, which is no heavier.
    """

    def __init__(self, weights: list[int], least: int) -> None:
        self.weights, self.best, self.steps = weights, least, 0
        self.found: Row | None = None

    def run(self, new: Row, rows: list[Row]) -> Row | None:
        """Return a combination lighter than `least`, the lightest, None without one."""
        self._look(0, 0, new, rows)
        return self.found

    def _look(self, place: int, weight: int, new: Row, rows: list[Row]) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise UndecidedError
        if weight >= self.best:
            return
        if place == len(new):
            self.best, self.found = weight, new
            return
        heavier = weight + self.weights[place]
        pivot = next((row for row in rows if row[place]), None)
        if pivot is None:
            self._look(place + 1, heavier if new[place] else weight, new, rows)
            return
        others = [_without(row, pivot, place) for row in rows if row is not pivot]
        self._look(place + 1, weight, _without(new, pivot, place), others)
        self._look(place + 1, heavier, new, rows)
