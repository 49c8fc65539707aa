"""predictions.png: what each model of a run predicts for a few pictures, beside the references; and cases.json and cases/.

predictions.png shows patients, so it stays at the site. The PNG's metadata has the positions of its parts. So a simulation can
join rows from several sites, and `compare` can join the predictions from several runs.

cases.json and cases/ have the final score of each unit, and pictures or texts of the best, the median and the worst unit. A
unit is what the task scores: an image, a volume, a patient or a text record. A site writes these files into its own folder.
They show patients, so only this user can read them, and no message contains them.
"""

import colorsys
import io
import json
import math
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont
from PIL.PngImagePlugin import PngInfo
from pydantic import BaseModel, Field, ValidationError

from consilium.core.lazy import Tensor
from consilium.core.messages import Stage
from consilium.core.sanitize import first_names_text, shown
from consilium.core.storage import write_atomic
from consilium.report.private_logging import log_failed_drawing
from consilium.report.tables import shorten_names
from consilium.report.untrusted_files import read_plain
from consilium.tasks.base import Answered, Classified, Examples, Segmented, Shown, ShowsUnits, Task, UnitScores

# image grid ------------------------------------------------------------------------------------------------------------
# Draw the parts of a figure in pixels: texts that fit a width, pictures with masks on them, and a page of such parts.

Colour = tuple[int, int, int]
BLACK, GREY, WHITE = (17, 17, 17), (110, 110, 110), (255, 255, 255)
RIGHT, WRONG = (22, 120, 60), (196, 38, 38)
PALETTE = (
    (0, 200, 255), (255, 214, 0), (255, 72, 160), (60, 230, 110), (255, 130, 20), (160, 120, 255),
    (0, 150, 136), (240, 50, 50), (190, 240, 60), (60, 110, 255), (220, 170, 120), (255, 180, 230),
)  # fmt: skip
FILL = 0.25
"""Opacity of a mask's colour inside. Its outline is opaque."""
FINE, OUTLINE = 2, 3
"""Masks are drawn on a grid FINE times finer. An outline is OUTLINE pixels wide, which is FINE * OUTLINE on that grid."""


def colours(count: int) -> list[Colour]:
    """Return a different colour for each of `count` classes: the palette, then hues in steps of the golden ratio."""
    more = (colorsys.hsv_to_rgb(i * 0.618034 % 1, 0.55 + 0.4 * (i % 2), 0.9) for i in range(len(PALETTE), count))
    return [*PALETTE[:count], *((round(255 * r), round(255 * g), round(255 * b)) for r, g, b in more)]


@cache
def font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Return the font DejaVu Sans, which comes with matplotlib and has the letters of most alphabets."""
    home = find_spec("matplotlib")  # find_spec, because importing matplotlib takes half a second
    assert home is not None
    assert home.origin is not None
    name = f"DejaVuSans{'-Bold' if bold else ''}.ttf"
    return ImageFont.truetype(Path(home.origin).parent / "mpl-data" / "fonts" / "ttf" / name, size)


def fit_text(text: object, width: int, face: ImageFont.FreeTypeFont) -> str:
    """Return a text as one line of at most `width` pixels. A longer text is cut and ends in an ellipsis."""
    whole = shown(text)
    if face.getlength(whole) <= width:
        return whole
    kept = next((n for n in range(len(whole), 0, -1) if face.getlength(whole[:n].rstrip() + "…") <= width), 0)
    return whole[:kept].rstrip() + "…"


def draw_text(
    text: object, size: tuple[int, int], points: int, colour: Colour = BLACK, bold: bool = False, left: bool = False
) -> Image.Image:
    """Draw a text in the middle, or at the `left`, of a white strip of `size` (width, height)."""
    strip, face = Image.new("RGB", size, WHITE), font(points, bold)
    place = (0 if left else size[0] / 2, size[1] / 2)
    ImageDraw.Draw(strip).text(place, fit_text(text, size[0], face), colour, face, anchor="lm" if left else "mm")
    return strip


def panel(image: Tensor, size: int) -> Image.Image:
    """Return a picture (3, H, W) uint8 as a square of `size` pixels."""
    return Image.fromarray(image.permute(1, 2, 0).numpy()).resize((size, size), Image.Resampling.BICUBIC)


def overlay(image: Tensor, masks: Tensor, size: int) -> Image.Image:
    """Draw masks (C, H, W) bool on a picture (3, H, W) uint8, each as a translucent fill and an outline in its colour.

    All outlines are drawn after all fills, so that a class inside another stays visible in any order of the classes.
    """
    canvas = panel(image, FINE * size)
    drawn = (pair for pair in zip(colours(len(masks)), masks, strict=True) if pair[1].any())
    shapes = [(colour, *_enlarged_mask(mask, FINE * size)) for colour, mask in drawn]
    for colour, shape, corner in shapes:
        canvas.paste(colour, corner, shape.point(lambda v: round(v * FILL)))
    for colour, shape, corner in shapes:
        inside = shape.filter(ImageFilter.BoxBlur(FINE * OUTLINE)).point(lambda v: 255 * (v == 255))
        canvas.paste(colour, corner, ImageChops.subtract(shape, inside))
    return canvas.reduce(FINE)


def draw_outlines(canvas: Image.Image, masks: Tensor) -> Image.Image:
    """Draw masks (C, H, W) bool on a square picture as thin white lines with dark edges, visible on any background."""
    size = canvas.width
    fine = canvas.resize((FINE * size, FINE * size), Image.Resampling.BICUBIC)
    shapes = [_enlarged_mask(mask, FINE * size) for mask in masks if mask.any()]
    for colour, width in ((BLACK, 2), (WHITE, 1)):
        for shape, corner in shapes:
            # after the blur only pixels near a border are between 0 and 255; a rank filter would take longer
            fine.paste(colour, corner, shape.filter(ImageFilter.BoxBlur(width)).point(lambda v: 255 * (0 < v < 255)))
    return fine.reduce(FINE)


def _enlarged_mask(mask: Tensor, size: int) -> tuple[Image.Image, tuple[int, int]]:
    """Return a mask (H, W) enlarged to `size` with a smooth border, as 0 and 255, cropped to its object; and the crop's corner.

    The crop has an empty margin of an outline's width, as far as the grid allows, because a blur at the border reads it.
    """
    enlarged = Image.fromarray(mask.byte().numpy() * 255).resize((size, size), Image.Resampling.BILINEAR)
    whole, room = enlarged.point(lambda v: 255 * (v > 127)), FINE * OUTLINE + 1
    left, top, right, bottom = whole.getbbox() or (0, 0, 0, 0)
    box = (max(0, left - room), max(0, top - room), min(size, right + room), min(size, bottom + room))
    return whole.crop(box), box[:2]


def arrange(parts: Iterable[tuple[int, int, Image.Image]], size: tuple[int, int] = (0, 0)) -> Image.Image:
    """Paste parts (x, y, picture) onto a white page of at least `size` pixels."""
    parts = list(parts)
    width = max([size[0], *(x + part.width for x, _, part in parts)])
    page = Image.new("RGB", (width, max([size[1], *(y + part.height for _, y, part in parts)])), WHITE)
    for x, y, part in parts:
        page.paste(part, (x, y))
    return page


# predictions -----------------------------------------------------------------------------------------------------------

PREDICTIONS = "predictions.png"
SITES = 12
"""Sites on a joint page, at most."""
PANEL, GAP, MARGIN = 300, 12, 16
"""Pixels of a tile's width, of the gap between tiles, and of the margin around a page."""
LINE, POINTS = 40, 24
"""Pixels of a line of text, and of its letters. A tile is PANEL + LINE high: a picture and a line for its score."""
LETTERS = 18
"""Letters per line of a heading. Most fit a tile; wider ones are cut."""
EDGE = 48
"""Width in pixels of the strip for a site's name."""
KEYS = 24
"""Classes named in a key, at most."""
MOST_PIXELS = 2**25
"""Pixels of a page that is read, at most. A run draws at most 6 rows, each with a picture, a reference and the models."""
LAYOUT, PICTURE, REFERENCE = "layout", "picture", "reference"
"""The name of the PNG's metadata with the layout, and the headings of the two columns before those of the models."""
Tiles = Mapping[str, Sequence[Image.Image]]
"""Columns by heading. All have the same number of tiles."""
Page = tuple[Tiles, Image.Image]
"""The tiles of a page, and the key below them."""


class Layout(BaseModel):
    """Layout of a page: `titles` of its columns, number of `rows`, and the height of the headings, `top`, in pixels."""

    titles: Annotated[list[str], Field(min_length=2, max_length=12)]
    rows: Annotated[int, Field(ge=1, le=100)]
    top: Annotated[int, Field(ge=0, le=10 * LINE)]


def write_predictions(path: Path, found: Mapping[Stage, Examples]) -> None:
    """Draw the examples of all models, if there are any, into a file that only this user can read."""
    if any(stage in found for stage in Stage):
        write_page(path, _page({stage: found[stage] for stage in Stage if stage in found}))


def draw_example_rows(found: Mapping[Stage, Examples]) -> np.ndarray:
    """Return the examples as a picture (H, W, 3) uint8, at half the size of predictions.png."""
    body, _ = _sheet(_page(found))
    return np.asarray(body.resize((body.width // 2, body.height // 2), Image.Resampling.BOX))


def join_predictions(pictures: Mapping[str, Path], path: Path) -> bool:
    """Draw the first row of each site's predictions.png on one page, for at most SITES sites. Return whether there was any.

    `pictures`: the sites' files, in the order of the page. The last line names sites that are left out: those over the limit,
    and those without a file.
    """
    pages = {site: page for site, picture in pictures.items() if (page := read_page(picture)) is not None}
    if not pages:
        return False
    columns, key = max(pages.values(), key=lambda page: len(page[0]))  # a site that never trained has one model fewer
    shown, blank = dict(list(pages.items())[:SITES]), [Image.new("RGB", (PANEL, PANEL + LINE), WHITE)]
    joint = {title: [tiles.get(title, blank)[0] for tiles, _ in shown.values()] for title in columns}
    if left := [site for site in pictures if site not in shown]:
        width = len(joint) * (PANEL + GAP) - GAP
        told = f"{len(shown)} of {len(pictures)} sites; without {first_names_text(left, 3)}"
        key = arrange([(0, 0, key), (0, key.height, draw_text(told, (width, LINE), POINTS, GREY, left=True))])
    write_page(path, (joint, key), list(shown))
    return True


def _page(stages: Mapping[Stage, Examples]) -> Page:
    """Return a page with a row per picture: the picture, its reference, and each model's prediction.

    All examples are of one kind: masks or classes.
    """
    first = next(iter(stages.values()))
    columns: dict[str, list[Image.Image]] = {PICTURE: [panel(image, PANEL) for image in first.images]}
    if isinstance(first, Segmented):
        columns[REFERENCE] = [overlay(image, masks, PANEL) for image, masks in zip(first.images, first.references, strict=True)]
        for stage, said in stages.items():
            assert isinstance(said, Segmented)
            columns[str(stage)] = []
            for image, masks, dice in zip(first.images, said.predictions, said.dice.tolist(), strict=True):
                score = draw_text("Dice –" if math.isnan(dice) else f"Dice {dice:.2f}", (PANEL, LINE), POINTS)
                columns[str(stage)].append(arrange([(0, 0, overlay(image, masks, PANEL)), (0, PANEL, score)]))
        return columns, _draw_legend(first.classes, (2 + len(stages)) * (PANEL + GAP) - GAP, first.grid)
    true = [first.classes[number] for number in first.references.tolist()]
    columns[REFERENCE] = [draw_text(name, (PANEL, PANEL), POINTS, bold=True) for name in true]
    face = font(POINTS - 2)
    for stage, said in stages.items():
        columns[str(stage)] = []
        for name, probabilities in zip(true, said.predictions, strict=True):
            guess, share = said.classes[int(probabilities.argmax())], float(probabilities.max())
            mark, number, colour = ("✓ " if guess == name else "✗ "), f" {share:.2f}", RIGHT if guess == name else WRONG
            short = fit_text(guess, PANEL - math.ceil(face.getlength(mark + number)), face)  # never cuts the number
            columns[str(stage)].append(draw_text(f"{mark}{short}{number}", (PANEL, PANEL), POINTS - 2, colour))
    return columns, Image.new("RGB", (1, 1), WHITE)


def _draw_legend(classes: tuple[str, ...], width: int, grid: str) -> Image.Image:
    """Draw each class's colour and name, and the grid on which scores are taken, in as many lines as needed."""
    face, side = font(POINTS), 22
    entries = []
    for name, colour in zip(classes[:KEYS], colours(KEYS), strict=False):
        text = fit_text(name, width // 3 - side - 10, face)
        entry = Image.new("RGB", (side + 10 + math.ceil(face.getlength(text)), LINE), WHITE)
        draw, top = ImageDraw.Draw(entry), (LINE - side) // 2
        draw.rectangle((0, top, side - 1, top + side - 1), colour)
        draw.text((side + 10, LINE / 2), text, BLACK, face, anchor="lm")
        entries.append(entry)
    more = len(classes) - KEYS
    told = [f"and {more} more"] * (more > 0) + [f"Dice: {grid}"] * bool(grid)
    entries += [draw_text(text, (PANEL, LINE), POINTS, GREY, left=True) for text in told]
    parts, x, y = list[tuple[int, int, Image.Image]](), 0, 0
    for entry in entries:
        if x and x + entry.width > width:
            x, y = 0, y + LINE
        parts.append((x, y, entry))
        x += entry.width + 3 * GAP
    return arrange(parts, (width, 0))


def _sheet(page: Page, names: Sequence[str] = ()) -> tuple[Image.Image, Layout]:
    """Return a picture of the tiles under their headings, with the rows' `names` upright at the left; and its layout."""
    (columns, key), step, high = page, PANEL + GAP, PANEL + LINE + GAP
    short = shorten_names(list(columns), 2 * LETTERS)
    lines = [textwrap.wrap(short[title], LETTERS) or [""] for title in columns]
    top, left, rows = LINE * max(map(len, lines)) + 8, EDGE * bool(names), len(columns[PICTURE])
    parts = []
    for x, heading, tiles in zip(range(left, left + 100 * step, step), lines, columns.values(), strict=False):
        parts += [(x, y * LINE, draw_text(line, (PANEL, LINE), POINTS, bold=True)) for y, line in enumerate(heading)]
        parts += [(x, top + row * high, tile) for row, tile in enumerate(tiles)]
    for row, name in enumerate(names):
        upright = draw_text(name, (PANEL, EDGE), POINTS, bold=True).transpose(Image.Transpose.ROTATE_90)
        parts.append((0, top + row * high, upright))
    return arrange([*parts, (left, top + rows * high, key)]), Layout(titles=list(columns), rows=rows, top=top)


def write_page(path: Path, page: Page, names: Sequence[str] = ()) -> None:
    """Write a page as a PNG of 300 dots per inch whose metadata has the layout."""
    (body, layout), notes, file = _sheet(page, names), PngInfo(), io.BytesIO()
    notes.add_text(LAYOUT, layout.model_dump_json())
    sheet = arrange([(MARGIN, MARGIN, body)], (body.width + 2 * MARGIN, body.height + 2 * MARGIN))
    sheet.save(file, "PNG", pnginfo=notes, dpi=(300, 300), compress_level=3)
    write_atomic(path, file.getvalue())


def read_page(path: Path) -> Page | None:
    """Return the page in a site's predictions.png; None if it is missing, damaged, reached by a link, or not written by a run.

    Anybody may have written the file. So only PIL's PNG reader opens it, it has MOST_PIXELS at most, and all tiles must be
    inside the picture.
    """
    if path.parent.is_symlink() or path.parent.parent.is_symlink() or (data := read_plain(path)) is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            sheet = Image.open(io.BytesIO(data), formats=("PNG",))
        with sheet:
            layout = Layout.model_validate_json(str(sheet.info[LAYOUT]))
            step, high, top = PANEL + GAP, PANEL + LINE + GAP, MARGIN + layout.top
            right, bottom = MARGIN + len(layout.titles) * step - GAP, top + layout.rows * high
            if sheet.width * sheet.height > MOST_PIXELS or right > sheet.width or bottom + MARGIN >= sheet.height:
                return None
            body = sheet.convert("RGB")
    except (OSError, KeyError, ValueError, SyntaxError, ValidationError, Image.DecompressionBombError):
        return None  # PIL raises SyntaxError for a truncated PNG
    columns = {
        title: [body.crop((x, y, x + PANEL, y + PANEL + LINE)) for y in range(top, bottom, high)]
        for x, title in zip(range(MARGIN, right, step), layout.titles, strict=True)
    }
    return columns, body.crop((MARGIN, bottom, body.width - MARGIN, body.height - MARGIN))


# best, median and worst cases -------------------------------------------------------------------------------------------

CASES, FOLDER = "cases.json", "cases"
WHICH = ("best", "median", "worst")
ENDING = ".jpg"
SIDE, QUALITY = 288, 88
"""Pixels of a picture's side, and the quality of its JPEG."""
LIKELIEST, LONGEST = 5, 4000
"""Classes listed per picture (the likeliest ones), and characters kept per text, at most."""
FORM = 1
"""Version of the format of cases.json. A reader refuses any other."""


class Closing:
    """Collects, while a final evaluation scores one model after the other, a few predictions and the selected units.

    `first`: predictions of the first samples, by model. `scored`: each unit's score, by model. `cases`: each model's answers
    for the selected units. `picked`: numbers of the best, median and worst unit. `by`: the model whose scores selected them,
    which is the first one scored. `problems`: a line per error in this class; such an error never changes a score.
    """

    def __init__(self) -> None:
        self.first: dict[Stage, Examples] = {}
        self.scored: dict[Stage, UnitScores] = {}
        self.cases: dict[Stage, Shown] = {}
        self.picked: dict[str, int] = {}
        self.by: Stage | None = None
        self.problems: list[str] = []

    def collect_predictions(self, stage: Stage, task: Task, model: Any, split: str) -> None:
        """Collect a model's predictions. Called right after the task scored the whole split with this model."""
        with self._note_errors(PREDICTIONS):
            if (examples := task.examples(model, split)) is not None:
                self.first[stage] = examples
        with self._note_errors(CASES):
            if not isinstance(task, ShowsUnits) or task.scored is None:
                return
            if self.by is None:
                self.by, self.picked = stage, pick(task.scored)
            elif task.scored.names != self.scored[self.by].names:
                raise ValueError(f"the {stage} model was scored on other samples")  # a file became unreadable
            self.scored[stage] = task.scored
            samples = [self.scored[self.by].samples[number] for number in self.picked.values()]
            if samples and (found := task.show(model, split, samples)) is not None:
                count = len(found.answers if isinstance(found, Answered) else found.images)
                self.cases |= {stage: found} if count == len(samples) else {}

    def write(self, folder: Path, about: Mapping[str, Any], more: Callable[[], None]) -> list[str]:
        """Write predictions.png, cases.json and cases/ into a site's folder, then call `more`. Return the problems.

        `about`: further fields of cases.json. `more`: writes the site's diagnostics; its error becomes a problem too.
        """
        with self._note_errors(PREDICTIONS):
            write_predictions(folder / PREDICTIONS, self.first)
        with self._note_errors(CASES):
            if self.by is not None:
                by = self.by
                first, pictures = self.scored[by], self._pictures()
                for stale in (folder / FOLDER).glob(f"*{ENDING}"):  # of an earlier evaluation
                    stale.unlink()
                for name, image in pictures.items():
                    file = io.BytesIO()
                    image.save(file, "JPEG", quality=QUALITY, subsampling=0)
                    write_atomic(folder / FOLDER / name, file.getvalue())
                values = {str(stage): list(map(_number, scored.values)) for stage, scored in self.scored.items()}
                classes = next((list(one.classes) for one in self.cases.values() if isinstance(one, Segmented)), [])
                found = {"form": FORM, **about, "score": first.score, "lower": first.lower, "by": str(by), "units": first.names}
                cases = [self._case_fields(place, which, number) for place, (which, number) in enumerate(self.picked.items())]
                found |= {"values": values, "classes": classes, "cases": cases, "pictures": sorted(pictures)}
                write_atomic(folder / CASES, json.dumps(found).encode())
        with self._note_errors("diagnostics"):
            more()
        return self.problems

    def _case_fields(self, place: int, which: str, number: int) -> dict[str, Any]:
        """Return the fields of one case: its reference and each model's answer as text or probabilities; None for masks.

        `place`: the case's index in `picked`; `which`: best, median or worst; `number`: the unit's number.
        """
        found: dict[str, Any] = {"which": which, "unit": number, "said": {}}
        for stage, one in self.cases.items():
            found["said"][str(stage)] = None
            if isinstance(one, Answered):
                found["said"][str(stage)] = one.answers[place][:LONGEST]
                found |= {"prompt": one.prompts[place][:LONGEST], REFERENCE: one.references[place][:LONGEST]}
            elif isinstance(one, Classified):
                probabilities, true = one.predictions[place], int(one.references[place])
                named = dict.fromkeys([*probabilities.argsort(descending=True)[:LIKELIEST].tolist(), true])
                found["said"][str(stage)] = [[one.classes[i], _number(float(probabilities[i]))] for i in named]
                found[REFERENCE] = one.classes[true]
        return found

    def _pictures(self) -> dict[str, Image.Image]:
        """Return pictures by file name: each case's picture and, for masks, the reference and each model's prediction on it."""
        found: dict[str, Image.Image] = {}
        for stage, one in self.cases.items():
            for place, which in enumerate(self.picked if not isinstance(one, Answered) else ()):
                image = one.images[place]  # type: ignore[union-attr]
                if case_file_name(which, PICTURE) not in found:
                    found[case_file_name(which, PICTURE)] = panel(image, SIDE)
                if isinstance(one, Segmented):
                    found.setdefault(case_file_name(which, REFERENCE), overlay(image, one.references[place], SIDE))
                    masks = overlay(image, one.predictions[place], SIDE)
                    found[case_file_name(which, str(stage))] = draw_outlines(masks, one.references[place])
        return found

    @contextmanager
    def _note_errors(self, what: str) -> Iterator[None]:
        """Turn an error in the block into a line of `problems`."""
        try:
            yield
        except Exception as error:
            self.problems.append(log_failed_drawing(what, error))


def pick(scored: UnitScores) -> dict[str, int]:
    """Return the numbers of the best, the median and the worst unit that have a score.

    Of units with equal scores the first is taken. No unit is taken twice, so fewer than three units give fewer cases.
    """
    known = [number for number, value in enumerate(scored.values) if not math.isnan(value)]
    ordered = sorted(known, key=lambda number: scored.values[number], reverse=not scored.lower)
    places = {"best": 0, "worst": len(ordered) - 1, "median": len(ordered) // 2}
    found: dict[str, int] = {}
    for which, place in places.items() if ordered else ():
        if ordered[place] not in found.values():
            found[which] = ordered[place]
    return {which: found[which] for which in WHICH if which in found}


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def case_file_name(which: str, what: str) -> str:
    """Return the file name of a case's picture. `what`: PICTURE, REFERENCE or a model."""
    return f"{which}-{what}{ENDING}"
