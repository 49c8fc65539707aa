"""The same test pictures with the predictions of several methods, cut out of each run's predictions.png of a site.

Only where all runs show the same pictures and references, to the pixel. They show patients, so the result stays where the runs
are.
"""

import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from PIL import Image
from rich.cells import cell_len

from consilium.core.messages import Stage
from consilium.core.sanitize import shown
from consilium.core.storage import write_atomic
from consilium.report.compare.comparability import Group
from consilium.report.image_grid import arrange, fit, font, words
from consilium.report.plain_files import subfolders
from consilium.report.predictions import GAP, LINE, MARGIN, PANEL, POINTS, PREDICTIONS, REFERENCE, Page, read_page
from consilium.report.tables import few, shortened

MOST_METHODS = 8


def draw_examples(folder: Path, group: Group, stage: Stage, end: str) -> tuple[list[Path], list[str]]:
    """Write examples-SITE.png for every site where it can be; return the files, and which are missing and why.

    They are of the seed that most methods have, the first of several.
    """
    counts = Counter(seed for _, seed in group.runs)
    seed = max(group.seeds, key=lambda seed: counts[seed])
    runs = {m: group.runs[m, seed] for m in group.methods if (m, seed) in group.runs}
    files: list[Path] = []
    undrawn: dict[str, list[str]] = {}
    places = {m: {one.name: one for one in subfolders(run.folder / "sites")} for m, run in list(runs.items())[:MOST_METHODS]}
    for site in sorted(group.first.sites):  # a stranger's record may name a site "..", or with a path
        paths = {method: inside[site] / PREDICTIONS for method, inside in places.items() if site in inside}
        read = {method: read_page(path) for method, path in paths.items()}
        pages = {method: page for method, page in read.items() if page is not None and page[1].boxes.get(stage)}
        parts = [[(part.size, part.tobytes()) for part in _parts(page, REFERENCE)] for page in pages.values()]
        if len(pages) < 2:
            unread = any(page is None and paths[method].exists() for method, page in read.items())
            more = "; predictions.png of some is damaged, or of a former version" if unread else ""
            undrawn.setdefault(f"fewer than two methods have pictures of this model there{more}", []).append(site)
        elif any(one != parts[0] for one in parts):
            undrawn.setdefault("the runs show other pictures or references", []).append(site)
        else:
            files.append(folder / f"examples{end}-{''.join(c if c.isalnum() or c in '._-' else '_' for c in site)}.png")
            _draw(files[-1], pages, stage)
    notes = [f"no examples of {few(sites, 3)}: {why}" for why, sites in undrawn.items()]
    lacking = [method for method in group.methods if method not in runs]
    notes += [f"examples show seed {seed}; no run with it: {few(lacking, 3)}"] if lacking and files else []
    left = len(runs) - MOST_METHODS
    shows = f"examples show the first {MOST_METHODS} methods; {left} more are left out"
    return files, notes + ([shows] if left > 0 and files else [])


def _parts(page: Page, what: str) -> list[Image.Image]:
    return [page[0].crop(box) for box in page[1].boxes.get(what, ())]


def _draw(path: Path, pages: Mapping[str, Page], stage: Stage) -> None:
    """Draw a row per picture: itself with its reference, and each method's prediction."""
    body, layout = next(iter(pages.values()))
    columns = [_parts((body, layout), REFERENCE), *(_parts(page, stage) for page in pages.values())]
    top, parts, x = 2 * LINE, list[tuple[int, int, Image.Image]](), 0
    width, points = (PANEL, POINTS) if layout.side == PANEL else (layout.side, POINTS - 6)
    for name, column in zip(["picture, reference", *_written(pages, width, points)], columns, strict=True):
        for number, text in enumerate(_two_lines(name)):
            parts.append((x, number * LINE, words(text, (column[0].width, LINE), points, bold=True)))
        for index, part in enumerate(column):
            parts.append((x, top + index * (columns[0][0].height + LINE + GAP), part))
        x += column[0].width + GAP
    bottom = top + len(columns[0]) * (columns[0][0].height + LINE + GAP)
    parts.append((0, bottom, body.crop((0, layout.rows[-1], body.width, body.height))))
    page, file = arrange(parts), io.BytesIO()
    arrange([(MARGIN, MARGIN, page)], (page.width + 2 * MARGIN, page.height + 2 * MARGIN)).save(file, "PNG", compress_level=3)
    write_atomic(path, file.getvalue())


def _two_lines(name: str) -> list[str]:
    """Return a name in two lines; the second is empty where it needs one."""
    half = name if len(name) <= 20 else name[:20].rpartition(" ")[0] or name[:20]
    return [half, name[len(half) :].strip()]


def _written(names: Iterable[str], width: int, points: int) -> Sequence[str]:
    """Return names, shortened in the middle until both lines of each fit into `width` pixels, different ones different."""
    whole, face = list(names), font(points, True)
    for cells in range(max(map(cell_len, whole)), 0, -1):
        found = shortened(whole, cells)
        if all(fit(text, width, face) == shown(text) for name in found.values() for text in _two_lines(name)):
            break
    return [found[name] for name in whole]
