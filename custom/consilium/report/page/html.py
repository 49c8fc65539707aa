"""HTML of pages: templates with escaped texts, figures as SVG in the page's colours, and privacy statements in words."""

import base64
import io
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.resources import files
from typing import Any, cast

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from PIL import Image

from consilium import __version__
from consilium.core.lazy import matplotlib
from consilium.core.sanitize import shown
from consilium.privacy.plan import not_private_sentence
from consilium.report.run_record import RunRecord
from consilium.report.untrusted_files import as_finite_float

LIMIT = 1000
"""Characters of one text on a page, at most."""
HEADINGS = {
    "result": "Result", "crossed": "Across sites", "confusion": "Confusion", "curves": "Learning curves",
    "sites": "Site by site", "training": "Training and communication", "cases": "Best, median and worst",
    "left": "Messages sent", "privacy": "Privacy", "versions": "Versions and hashes", "tables": "Tables",
    "figures": "Figures", "notes": "Notes",
}  # fmt: skip
"""Titles of the sections by id, in the order of the contents."""
INK, SOFT, RULE, PAPER = "#010101", "#020202", "#030303", "#040404"
SERIES = tuple(f"#0500{number:02d}" for number in range(1, 9))
"""Placeholder colours. In a figure's SVG they are replaced by variables of page.css."""
VARIABLES = {
    INK: "--text",
    SOFT: "--soft",
    RULE: "--rule",
    PAPER: "--back",
    **{colour: f"--c{number}" for number, colour in enumerate(SERIES, start=1)},
}
STYLE = {
    "svg.fonttype": "none", "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "text.color": INK, "axes.edgecolor": SOFT, "axes.labelcolor": INK, "xtick.color": SOFT, "ytick.color": SOFT,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "grid.color": RULE, "axes.grid": True, "axes.grid.axis": "both",
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "legend.frameon": False, "font.size": 10,
    "axes.titlesize": 10, "legend.labelcolor": INK, "axes.prop_cycle": f"cycler('color', {list(SERIES)!r})",
    "text.parse_math": False,
}  # fmt: skip


def render(template: str, title: str, lead: str, source: str, sections: Sequence[str], values: Mapping[str, Any]) -> str:
    """Return a page. `sections`: ids of its sections. `values`: the template's variables, whose texts are escaped."""
    environment = Environment(
        loader=PackageLoader("consilium.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["seen"] = lambda text: shown(text, LIMIT)
    # a browser may break a text after its dots, as long names of tensors need
    environment.filters["breakable"] = lambda text: Markup("<wbr>").join(
        escape(part) for part in re.split(r"(?<=\.)(?=\w)", shown(text, LIMIT))
    )
    environment.filters["lines"] = lambda text: "\n".join(shown(line, 4 * LIMIT) for line in text[: 4 * LIMIT].splitlines())
    css = Markup((files("consilium.report.page") / "templates" / "page.css").read_text(encoding="utf-8"))  # a file of ours
    contents = [(one, heading) for one, heading in HEADINGS.items() if one in sections]
    frame: dict[str, Any] = {
        "title": title,
        "lead": lead,
        "source": source,
        "css": css,
        "version": __version__,
        "warnings": [],
        "back": "",
        "today": time.strftime("%Y-%m-%d"),
        "contents": contents,
        "headings": HEADINGS,
    }
    return environment.get_template(template).render(frame | dict(values))


def page_figure_style(grid: bool = True) -> AbstractContextManager[None]:
    """Return a context manager in which figures get the style of pages. `grid`: whether they have grid lines."""
    return matplotlib.rc_context(cast(Any, {**STYLE, "axes.grid": grid}))


def inline_svg(figure: Any, name: str, alt: str, more: Mapping[str, str] | None = None) -> Markup:
    """Return a figure as an SVG element. `name`: a prefix for its ids. `alt`: a text that says what it shows.

    `more`: page variables for further colours of the figure.
    """
    file, variables = io.StringIO(), VARIABLES | dict(more or {})
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    head, _, body = file.getvalue().partition("<svg")[2].partition(">")
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.S)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)

    def styled(found: re.Match[str]) -> str:
        """Return a style attribute with the page's colours and without a font family, so that the page's font is used."""
        style = re.sub(r"font-family: [^;\"]*;? ?", "", found[0])
        return re.sub(r"#[0-9a-f]{6}\b", lambda one: f"var({variables[one[0]]})" if one[0] in variables else one[0], style)

    body = re.sub(r'style="[^"<>]*"', styled, body)  # matches no text, because < and > in texts are escaped
    sizes = dict(re.findall(r'(width|height|viewBox)="([\d. -]+)', head))
    width, height = float(sizes["width"]), float(sizes["height"])
    frame = f'viewBox="{sizes["viewBox"]}" style="--w: {width / 0.75:.0f}px; aspect-ratio: {width / height:.4f}"'
    return Markup(f'<svg role="img" aria-label="{escape(alt)}" {frame}>{body}')


def data_url(image: Image.Image, format: str, **options: Any) -> str:
    """Return a picture as a data URL, encoded in `format` with Pillow's `options`."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return f"data:image/{format.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


# words -----------------------------------------------------------------------------------------------------------------
# The privacy statement of a page, in words.

NONE = (
    "This job has no differential privacy. Updates left the sites as trained. The guard let only shared tensors and declared "
    "numbers pass, but what can be inferred from them has no proven bound."
)
BY_UNIT = (
    "{unit}-level differential privacy: each site trains by DP-SGD on its own data, so noise and epsilon differ by site. The "
    "server does not know them; each site's own report does."
)
SCORES = (
    "Scores are not covered by it. In a simulation no noise protects them. In a federation a private job's scores stay at the "
    "site, unless its administrator shares them."
)
FACTS = {
    **{name: name for name in ("unit", "adjacency", "trust", "accountant", "calibration")},
    "clip": "clip (C)",
    "noise_multiplier": "noise multiplier (sigma)",
    "releases": "releases",
}
"""Headings of a privacy plan's fields, in the order of the page."""
Statement = tuple[list[str], list[tuple[str, str]]]
"""Sentences, and facts as pairs (name, value)."""


def privacy_statement(record: RunRecord) -> Statement:
    """Return a run's privacy statement, not yet HTML: sentences, and facts as (name, value).

    It says what is promised, from whom it protects, and the noise.
    """
    if (private := record.config.privacy) is None:
        return [NONE], []
    if record.privacy is not None:
        sentences, facts = plan_statement(record.privacy)
        return [*sentences, SCORES], facts
    sentences = [shown(not_private_sentence(record.seeded_sites), 600)] if record.seeded_sites else []
    facts = [("unit", private.unit), ("adjacency", private.adjacency), ("trust", private.trust), ("clip", f"{private.clip:g}")]
    if private.unit != "site" and private.trust == "local":
        return [*sentences, BY_UNIT.format(unit=private.unit.capitalize()), SCORES], facts
    spent = [
        value for line in record.lines_of("concluded") if (value := as_finite_float(line.get("privacy/epsilon"))) is not None
    ]
    facts += [("epsilon so far", f"{spent[-1]:.4g} at delta {private.delta:g}")] if spent else []
    return [*sentences, "The run has not ended: what it promises is known at its end.", SCORES], facts


def plan_statement(found: Mapping[str, Any]) -> Statement:
    """Return the privacy statement of a plan, from a privacy.json or a site's cases.json."""
    given = [(heading, found[name]) for name, heading in FACTS.items() if name in found]
    facts = [(what, shown(raw, 80) if (one := as_finite_float(raw)) is None else f"{one:.4g}") for what, raw in given]
    clip, multiplier = (as_finite_float(found.get(name)) for name in ("clip", "noise_multiplier"))
    if clip is not None and multiplier is not None and found.get("calibration") != "paper":
        noise = multiplier * clip * (2 if found.get("adjacency") == "replace" else 1)
        adds = {
            "local": "by each site on its own update",
            "distributed": "by all sites in shares, on the sum of what they send",
        }
        where = adds.get(str(found.get("trust")), "by the server on the sum of the updates")
        text = f"of deviation {noise:.4g} per number (whitened where a factor has a public peer), {where}, at every release"
        if found.get("unit") in ("record", "patient") and found.get("trust") != "distributed":
            text = f"in every training step, of deviation {multiplier * clip:.4g} on the sum of the batch's clipped gradients"
        facts.append(("noise", text if multiplier else "none: the multiplier is 0, so nothing is protected"))
    epsilons = found["epsilon"].items() if isinstance(found.get("epsilon"), dict) else ()
    spent = [(f"epsilon at delta {shown(delta, 20)}", as_finite_float(value)) for delta, value in epsilons]
    facts += [(what, "no bound" if value is None else f"{value:.4g}") for what, value in spent]
    return [shown(found.get("claim", "privacy.json has no claim."), 600)], facts
