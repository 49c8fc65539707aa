"""HTML of a page: templates that escape all texts, and figures as SVG whose colours follow the page's scheme."""

import io
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.resources import files
from typing import Any, cast

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.figure import Figure

from consilium import __version__
from consilium.core.sanitize import shown

LIMIT = 1000
"""Characters of one text on a page."""
HEADINGS = {
    "result": "Result", "crossed": "Across sites", "confusion": "Confusion", "curves": "Learning curves",
    "sites": "Site by site", "travelled": "What travelled", "time": "Time",
    "absences": "Refusals and absences", "cases": "Best and worst", "left": "What left", "privacy": "Privacy",
    "versions": "Versions", "tables": "Tables", "figures": "Figures", "notes": "What is not here",
}  # fmt: skip
"""Titles of sections in the contents, by id, in their order."""
INK, SOFT, RULE, PAPER = "#010101", "#020202", "#030303", "#040404"
SERIES = tuple(f"#0500{number:02d}" for number in range(1, 9))
"""Colours that stand for variables of page.css."""
VARIABLES = {INK: "--text", SOFT: "--soft", RULE: "--rule", PAPER: "--back"}
VARIABLES |= {colour: f"--c{number}" for number, colour in enumerate(SERIES, start=1)}
STYLE = {
    "svg.fonttype": "none", "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "text.color": INK, "axes.edgecolor": SOFT, "axes.labelcolor": INK, "xtick.color": SOFT, "ytick.color": SOFT,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "grid.color": RULE, "axes.grid": True, "axes.grid.axis": "both",
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "legend.frameon": False, "font.size": 10,
    "axes.titlesize": 10, "legend.labelcolor": INK, "axes.prop_cycle": f"cycler('color', {list(SERIES)!r})",
    "text.parse_math": False,
}  # fmt: skip


def render(template: str, title: str, lead: str, source: str, sections: Sequence[str], values: Mapping[str, Any]) -> str:
    """Return a page. `sections`: ids of its sections; `values`: what the template needs. All texts in them are escaped."""
    environment = Environment(
        loader=PackageLoader("consilium.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["seen"] = lambda text: shown(text, LIMIT)
    environment.filters["lines"] = lambda text: "\n".join(shown(line, 4 * LIMIT) for line in text[: 4 * LIMIT].splitlines())
    css = Markup((files("consilium.report.page") / "templates" / "page.css").read_text(encoding="utf-8"))  # a file of ours
    contents = [(one, heading) for one, heading in HEADINGS.items() if one in sections]
    frame: dict[str, Any] = {"title": title, "lead": lead, "source": source, "css": css, "version": __version__, "warnings": []}
    frame |= {"today": time.strftime("%Y-%m-%d"), "contents": contents, "sections": sections}
    return environment.get_template(template).render(frame | dict(values))


def drawing(grid: bool = True) -> AbstractContextManager[None]:
    """Return the block in which figures are made and written; `grid`: every figure has one."""
    return rc_context(cast(Any, {**STYLE, "axes.grid": grid}))


def inline(figure: Figure, name: str, alt: str, more: Mapping[str, str] | None = None) -> Markup:
    """Return a figure as an element of the page. `name` tells its ids from other figures'; `alt` says what it shows.

    `more`: page variables for other colours that are in it.
    """
    file, variables = io.StringIO(), VARIABLES | dict(more or {})
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    head, _, body = file.getvalue().partition("<svg")[2].partition(">")
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.S)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)

    def styled(found: re.Match[str]) -> str:
        """Return a style attribute with the page's colours, and without a font family, which is the page's."""
        style = re.sub(r"font-family: [^;\"]*;? ?", "", found[0])
        return re.sub(r"#[0-9a-f]{6}\b", lambda one: f"var({variables[one[0]]})" if one[0] in variables else one[0], style)

    body = re.sub(r'style="[^"<>]*"', styled, body)  # in no text: there < and > are escaped
    sizes = dict(re.findall(r'(width|height|viewBox)="([\d. -]+)', head))
    width, height = float(sizes["width"]), float(sizes["height"])
    frame = f'viewBox="{sizes["viewBox"]}" style="--w: {width / 0.75:.0f}px; aspect-ratio: {width / height:.4f}"'
    return Markup(f'<svg role="img" aria-label="{escape(alt)}" {frame}>{body}')
