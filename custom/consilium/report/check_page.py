"""check.html and check.json of `consilium data check --report`: every bad sample by name, the first of a kind as pictures.

One file without anything from elsewhere, so it opens offline. It names files and shows patients: it is the user's alone.
"""

import base64
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from PIL import Image, ImageDraw

from consilium.data.datalist import Item
from consilium.data.findings import WORTHLESS, Findings
from consilium.data.images import read_image, read_labels
from consilium.data.settings import DEFAULTS, PictureSettings
from consilium.data.volumes import header, is_volume
from consilium.errors import DataError
from consilium.report.clean import shown
from consilium.storage import open_private, private_folder

SIDE = 112
"""Pixels of a thumbnail's longer side."""
SHOWN = 2000
"""Lines of a kind on the page; check.json has all."""

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>Data check</title>
<style>
:root { color-scheme: light dark; --back: #fff; --text: #1a1d21; --soft: #5c6570; --rule: #d8dde3; --bad: #b3261e;
 --odd: #8a5a00 }
@media (prefers-color-scheme: dark) {
 :root { --back: #14171a; --text: #e6e9ec; --soft: #9aa4ae; --rule: #343a41; --bad: #ff8a80; --odd: #f3bf63 } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem;
 padding: 0 1rem } h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; border-top: 1px solid var(--rule); padding-top: 1rem }
.problem summary { color: var(--bad) } .warning summary { color: var(--odd) } summary { cursor: pointer; font-weight: 600 }
li, figcaption, .path { overflow-wrap: anywhere } .soft, figcaption { color: var(--soft) } ol { font-size: .85rem }
.pictures { display: flex; flex-wrap: wrap; gap: .8rem; margin: .6rem 0 } figure { margin: 0; width: 12rem }
figcaption { font-size: .72rem; line-height: 1.3 } table { border-collapse: collapse } td, th { padding: .1rem 1rem .1rem 0;
 text-align: left; font-weight: normal } img { border: 1px solid var(--rule); max-width: 100% }
</style>
<h1>Data check</h1>
{% for site in sites %}<section><h2>{{ site.name|seen }}</h2>
<p class="path soft">{{ site.path|seen }}</p>
{% for sentence in site.verdict %}<p><strong>{{ sentence|seen }}</strong></p>{% endfor %}
<table><tr><th></th>{% for split in site.samples %}<th class="soft">{{ split }}</th>{% endfor %}</tr>
{% for row in site.rows %}<tr><th>{{ row[0]|seen }}</th>{% for n in row[1] %}<td>{{ n }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% for kind in site.kinds %}{{ part(kind) }}{% endfor %}</section>{% endfor %}
{% if between %}<section><h2>Between sites</h2>{% for kind in between %}{{ part(kind) }}{% endfor %}</section>{% endif %}
</html>
"""
_PART = """<details class="{{ level }}" open><summary>{{ lines|length }} x {{ name|seen }}{{ note }}</summary>
{% if pictures %}<div class="pictures">{% for source, text in pictures %}<figure><img src="{{ source }}" alt="">
<figcaption>{{ text|seen }}</figcaption></figure>{% endfor %}</div>{% endif %}
<ol>{% for one in lines[:most] %}<li>{{ one|seen }}</li>{% endfor %}</ol>
{% if lines|length > most %}<p class="soft">and {{ lines|length - most }} more in check.json</p>{% endif %}</details>
"""


def write_report(folder: Path, found: Mapping[str, Findings], shared: Mapping[str, list[str]], settings: Any = None) -> None:
    """Write check.json and check.html into `folder`; `shared`: lines by kind that tell what sites have in common."""
    whole = {"sites": {name: one.to_dict(None) for name, one in found.items()}, "between_sites": dict(shared)}
    settings = settings if isinstance(settings, PictureSettings) else DEFAULTS
    private_folder(folder)
    for name, text in (("check.json", json.dumps(whole, indent=1)), ("check.html", _page(found, shared, settings))):
        with open_private(folder / name, "w") as file:
            file.write(text)


def _page(found: Mapping[str, Findings], shared: Mapping[str, list[str]], settings: PictureSettings) -> str:
    environment = Environment(autoescape=True)
    environment.filters["seen"] = lambda text: shown(text, 1000)
    part = environment.from_string(_PART)
    sites = [_site(name, one, settings) for name, one in found.items()]
    between = [{"level": "warning", "name": kind, "note": "", "lines": lines} for kind, lines in shared.items()]
    environment.globals["part"] = lambda kind: _safe(part.render(kind, most=SHOWN))
    return environment.from_string(_PAGE).render(sites=sites, between=between)


def _safe(text: str) -> Any:
    return Markup(text)  # the inner template has escaped it


def _site(name: str, found: Findings, settings: PictureSettings) -> dict[str, Any]:
    rows = [("samples", list(found.samples.values())), *_rows(found)]
    kinds = [_kind("problem", kind, lines, found, settings) for kind, lines in found.problems.items()]
    kinds += [_kind("warning", kind, lines, found, settings) for kind, lines in found.warnings.items()]
    site = {"name": name, "path": found.path, "verdict": found.verdict, "samples": list(found.samples)}
    return site | {"rows": rows, "kinds": kinds}


def _rows(found: Findings) -> list[tuple[str, list[int]]]:
    more = [("cannot be used", found.bad), ("planes", found.planes)]
    rows = [(what, counts) for what, counts in more if sum(counts.values())]
    rows += [(f"class {name}", counts) for name, counts in sorted(found.images_of_class.items())]
    return [(what, [counts[split] for split in found.samples]) for what, counts in rows]


def _kind(level: str, kind: str, lines: list[str], found: Findings, settings: PictureSettings) -> dict[str, Any]:
    note = (
        ": training runs, its scores are worthless" if kind in WORTHLESS else ": training stops" if level == "problem" else ""
    )
    pictures = [(_thumbnail(found.shown[one], settings), one) for one in lines if one in found.shown]
    return {"level": level, "name": kind, "note": note, "lines": lines, "pictures": [pair for pair in pictures if pair[0]]}


def _thumbnail(item: Item, settings: PictureSettings) -> str:
    """Return a small picture as text for a page, its mask's outline in colour beside it; "" where it cannot be read."""
    try:
        if item.slice is None and is_volume(item.image):
            item = Item(item.image, item.label, header(item.image).grid.planes(settings.slices.axis) // 2, settings.slices.axis)
        image = Image.fromarray(read_image(item, settings))
    except DataError:
        return ""
    image.thumbnail((SIDE, SIDE))
    sheet = Image.new("RGB", (image.width * 2 + 4, image.height), (128, 128, 128))
    sheet.paste(image, (0, 0))
    sheet.paste(_mask(item, settings, image.size), (image.width + 4, 0))
    kept = io.BytesIO()
    sheet.save(kept, "PNG")
    return "data:image/png;base64," + base64.b64encode(kept.getvalue()).decode()


def _mask(item: Item, settings: PictureSettings, size: tuple[int, int]) -> Image.Image:
    """Return a mask, every label white, or a cross where there is none to show."""
    try:
        if isinstance(item.label, Path):
            labels = read_labels(item, settings)
            return Image.fromarray(labels.where(labels.present() - {0})).convert("L").resize(size)
    except DataError:
        pass
    cross = Image.new("L", size, 40)
    ImageDraw.Draw(cross).line([(0, 0), size], fill=120)
    return cross
