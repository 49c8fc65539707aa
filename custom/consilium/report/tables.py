"""Tables that fit their screen: narrower layouts first, then names shortened in the middle; nothing is cut off unseen."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

SHORT = 16
"""Names are not shortened below this many cells while a narrower layout is left to try."""
Layout = Callable[[Mapping[str, str]], Table]
"""Makes a table; the argument says how each name is written."""


def fit(layouts: Sequence[Layout], names: Iterable[str], width: int) -> Table:
    """Return the first layout that fits into `width` cells; from the second one on, names may be shortened for it."""
    names = list(names)
    whole = {name: name for name in names}
    longest = max(map(cell_len, [*names, ""]))
    room = longest
    for index, layout in enumerate(layouts):
        room = longest - max(needed(layout(whole)) - width, 0)
        if room == longest or (index and room >= SHORT):
            return layout(shortened(names, room))
    return layouts[-1](shortened(names, max(room, 1)))


def shortened(names: Sequence[str], width: int) -> dict[str, str]:
    """Return how each name is written in at most `width` cells: whole, or its two ends; different names stay different.

    Where so many names are alike that `width` cannot tell them apart, some are longer than it.
    """
    found: dict[str, str] = {}
    used: set[str] = set()
    tried: Counter[str] = Counter()
    for name in sorted(set(names), key=lambda n: (cell_len(n) > width, n)):
        first = short = _ends(name, width, "…")
        while short in used:  # names that begin and end alike count on from one another
            tried[first] += 1
            short = _ends(name, width, f"…{tried[first] + 1}")
        found[name] = short
        used.add(short)
    return found


def _ends(name: str, width: int, mark: str) -> str:
    """Return the name itself, or as much of its beginning and end, equally, as fits with `mark` between them."""
    if cell_len(name) <= width and mark == "…":
        return name
    kept = len(name)
    while kept and cell_len(_cut(name, kept, mark)) > width:
        kept -= 1
    return _cut(name, kept, mark)


def _cut(name: str, kept: int, mark: str) -> str:
    return name[: (kept + 1) // 2] + mark + name[len(name) - kept // 2 :]


def needed(table: Table) -> int:
    """Return the cells a table takes with every column at its full width."""
    console = Console(width=100_000)
    return Measurement.get(console, console.options, table).maximum
