"""The same test pictures as several methods see them, cut out of what each run drew of itself (predictions.png of a site).

Only where it is the truth: all runs must show the same pictures and references, to the pixel. They show patients, so what is
drawn stays where the runs are.
"""

import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from PIL import Image
from pydantic import Field, TypeAdapter
from rich.cells import cell_len

from consilium.messages import Stage
from consilium.report.clean import shown
from consilium.report.compare.groups import Group
from consilium.report.panels import BLACK, WHITE, above, beside, fit, font, words
from consilium.report.predictions import CUTS, GAP, LINE, MARGIN, NAMES, PANEL, POINTS, PREDICTIONS, SIDE, SMALL
from consilium.report.tables import shortened
from consilium.storage import write_atomic

CUT_AT = TypeAdapter(Annotated[list[Annotated[int, Field(ge=0, le=10**6)]], Field(min_length=2)])
"""Where the rows of a page end."""
MOST_METHODS = 8
PICTURES = 3
"""Pictures of a site that are shown, where they are masks; of classes, as many as a run drew."""


def draw_examples(folder: Path, group: Group, stage: Stage, end: str) -> tuple[list[Path], list[str]]:
    """Write examples-SITE.png for every site at which it can be done; return the files, and what is not there and why."""
    seed = _seed(group)
    runs = {m: group.runs[m, seed] for m in group.methods if (m, seed) in group.runs}
    files: list[Path] = []
    undrawn: dict[str, list[str]] = {}
    for site in sorted(group.first.sites):
        pages = {m: page for m, run in runs.items() if (page := _read(run.folder / "sites" / site / PREDICTIONS)) is not None}
        pages = {m: page for m, page in list(pages.items())[:MOST_METHODS] if stage in page.stages}
        why = _why_not(pages)
        if why is not None:
            undrawn.setdefault(why, []).append(site)
            continue
        path = folder / f"examples{end}-{_file_name(site)}.png"
        _save(path, _joined(pages, stage))
        files.append(path)
    notes = [f"no examples of {_few(sites)}: {why}" for why, sites in undrawn.items()]
    return files, notes + (_left_out(group, seed, len(runs)) if files else [])


def _seed(group: Group) -> str:
    """Return the seed that most methods have, the first of several."""
    counts = Counter(seed for _, seed in group.runs)
    return max(group.seeds, key=lambda seed: counts[seed])


def _left_out(group: Group, seed: str, runs: int) -> list[str]:
    """Return which methods the examples of a seed do not show, that has so many runs."""
    lacking = [method for method in group.methods if (method, seed) not in group.runs]
    notes = [f"examples show seed {seed}; no run with it: {_few(lacking)}"] if lacking else []
    left = runs - MOST_METHODS
    return notes + ([f"examples show the first {MOST_METHODS} methods; {left} more are left out"] if left > 0 else [])


def _few(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"


class _Page:
    """A site's predictions.png: its pixels, where its rows are, and whose predictions it shows."""

    def __init__(self, body: Image.Image, ends: Sequence[int], side: int) -> None:
        self.body, self.ends, self.side = body, ends, side

    @property
    def masks(self) -> bool:
        """Whether it shows masks; else classes."""
        return self.side == PANEL

    @property
    def stages(self) -> list[Stage]:
        """Which models it shows: a site that never trained has no personalized one."""
        room = self.body.width - 2 * MARGIN + GAP
        count = room // (PANEL + GAP) - 2 if self.masks else (self.ends[1] - self.ends[0] - SMALL - 2 * GAP) // LINE - 1
        return list(Stage)[:count]

    def reference(self, row: int) -> Image.Image:
        """Return a row's picture and reference."""
        if self.masks:
            return self._cut(0, row, 2 * PANEL + GAP, PANEL)
        return self._cut(0, row, self.body.width - 2 * MARGIN, SMALL + LINE)

    def said(self, row: int, stage: Stage) -> Image.Image:
        """Return what a model says of a row's pictures."""
        place = self.stages.index(stage)
        if self.masks:
            return self._cut((2 + place) * (PANEL + GAP), row, PANEL, PANEL + LINE)
        top = SMALL + LINE * (1 + place)
        return self._cut(NAMES, row, self.body.width - 2 * MARGIN - NAMES, LINE, top)

    def _cut(self, left: int, row: int, width: int, height: int, down: int = 0) -> Image.Image:
        x, y = MARGIN + left, self.ends[row] + down
        return self.body.crop((x, y, x + width, y + height))


def _read(path: Path) -> _Page | None:
    """Return a page that a run drew, None where there is none or it is another's."""
    try:
        with Image.open(path) as sheet:
            ends = CUT_AT.validate_json(str(sheet.info[CUTS]), strict=True)
            return _Page(sheet.convert("RGB"), ends, int(str(sheet.info[SIDE])))
    except (OSError, KeyError, ValueError, SyntaxError, Image.DecompressionBombError):  # a torn PNG is a SyntaxError too
        return None


def _why_not(pages: Mapping[str, _Page]) -> str | None:
    """Return why pages cannot stand side by side, None where they can."""
    if len(pages) < 2:
        return "fewer than two methods have pictures of this model there"
    first, *others = pages.values()
    for other in others:
        same = (other.side, len(other.ends)) == (first.side, len(first.ends))
        if not same or any(not _equal(first.reference(i), other.reference(i)) for i in range(len(first.ends) - 1)):
            return "the runs show other pictures or references"
    return None


def _equal(one: Image.Image, other: Image.Image) -> bool:
    return one.size == other.size and np.array_equal(np.asarray(one), np.asarray(other))


def _joined(pages: Mapping[str, _Page], stage: Stage) -> Image.Image:
    first = next(iter(pages.values()))
    return _masks(pages, first, stage) if first.masks else _classes(pages, first, stage)


def _masks(pages: Mapping[str, _Page], first: _Page, stage: Stage) -> Image.Image:
    """Return a row per picture: itself, its reference, and each method's masks with their Dice."""
    written = _written(pages, lambda name: all(_fits(line, PANEL, POINTS, True) for line in _two_lines(name)))
    titles = [_heading(name) for name in ("picture", "reference", *written)]
    rows = [
        beside([first.reference(i), *(page.said(i, stage) for page in pages.values())], GAP)
        for i in range(min(PICTURES, len(first.ends) - 1))
    ]
    key = first.body.crop((MARGIN, first.ends[-1], first.body.width - MARGIN, first.body.height - MARGIN))
    return above([beside(titles, GAP), *rows, key])


def _heading(name: str) -> Image.Image:
    """Return a name over a column."""
    return above([words(one, (PANEL, LINE), POINTS, BLACK, True) for one in _two_lines(name)])


def _two_lines(name: str) -> list[str]:
    """Return a name in two lines; the second is empty where it needs one."""
    half = name if len(name) <= 20 else name[:20].rpartition(" ")[0] or name[:20]
    return [half, name[len(half) :].strip()]


def _written(names: Iterable[str], fits: Callable[[str], bool]) -> list[str]:
    """Return names as they are written where each must fit: whole, or its two ends; see `shortened`."""
    whole = list(names)
    tried = (shortened(whole, width) for width in range(max(map(cell_len, whole)), 0, -1))
    found = next((one for one in tried if all(map(fits, one.values()))), shortened(whole, 1))
    return [found[name] for name in whole]


def _fits(text: str, width: int, points: int, bold: bool = False) -> bool:
    face = font(points, bold)
    return fit(text, width, face) == shown(text)


def _classes(pages: Mapping[str, _Page], first: _Page, stage: Stage) -> Image.Image:
    """Return pictures above their classes, and below a line per method: its class and probability."""
    lines = [first.reference(0)]
    written = _written(pages, lambda name: _fits(name, NAMES, POINTS - 6))
    for name, page in zip(written, pages.values(), strict=True):
        lines.append(beside([words(name, (NAMES, LINE), POINTS - 6), page.said(0, stage)], 0))
    return above(lines)


def _file_name(site: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in site)


def _save(path: Path, body: Image.Image) -> None:
    sheet, file = Image.new("RGB", (body.width + 2 * MARGIN, body.height + 2 * MARGIN), WHITE), io.BytesIO()
    sheet.paste(body, (MARGIN, MARGIN))
    sheet.save(file, "PNG", compress_level=3)
    write_atomic(path, file.getvalue())
