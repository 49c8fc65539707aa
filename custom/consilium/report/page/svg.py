"""A figure as SVG inside a page: its colours follow the page's scheme, its texts are texts, its names are its own."""

import io
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.figure import Figure

INK, SOFT, RULE, PAPER = "#010101", "#020202", "#030303", "#040404"
SERIES = tuple(f"#0500{number:02d}" for number in range(1, 9))
"""What is drawn in these colours has the page's instead, see page.css: they stand for its variables."""
VARIABLES = {INK: "--text", SOFT: "--soft", RULE: "--rule", PAPER: "--back"} | {
    colour: f"--c{number}" for number, colour in enumerate(SERIES, start=1)
}
STYLE = {
    "svg.fonttype": "none", "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "text.color": INK, "axes.edgecolor": SOFT, "axes.labelcolor": INK, "xtick.color": SOFT, "ytick.color": SOFT,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "grid.color": RULE, "axes.grid": True, "axes.grid.axis": "both",
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "legend.frameon": False, "font.size": 10,
    "axes.titlesize": 10, "legend.labelcolor": INK, "axes.prop_cycle": f"cycler('color', {list(SERIES)!r})",
    "text.parse_math": False,
}  # fmt: skip


def drawing(grid: bool = True) -> AbstractContextManager[None]:
    """Return the block in which figures are made and written; without `grid` those draw one that want it."""
    return rc_context(cast(Any, {**STYLE, "axes.grid": grid}))


def inline(figure: Figure, name: str, alt: str, more: Mapping[str, str] | None = None) -> Markup:
    """Return a figure as an element of the page. `name` tells its ids from other figures'; `alt` says what it shows.

    `more`: page variables for other colours that are in it.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    body = text[text.index("<svg") :]
    head, _, body = body.partition(">")
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.S)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    variables = VARIABLES | dict(more or {})
    body = re.sub(r'style="[^"<>]*"', lambda found: _styled(found[0], variables), body)  # in no text: there < and > are escaped
    width, height = (float(re.search(rf'{side}="([\d.]+)', head)[1]) for side in ("width", "height"))  # type: ignore[index]
    box = re.search(r'viewBox="([\d. -]+)"', head)
    assert box is not None
    frame = f'viewBox="{box[1]}" style="--w: {width / 0.75:.0f}px; aspect-ratio: {width / height:.4f}"'
    return Markup(f'<svg role="img" aria-label="{escape(alt)}" {frame}>{body}')


def _styled(style: str, variables: Mapping[str, str]) -> str:
    """Return a style attribute with the page's colours, and without a font family, which is the page's."""
    style = re.sub(r"font-family: [^;\"]*;? ?", "", style)
    return re.sub(r"#[0-9a-f]{6}\b", lambda found: f"var({variables[found[0]]})" if found[0] in variables else found[0], style)
