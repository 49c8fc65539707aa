"""From what a page says to its HTML: templates that escape all they are given."""

import time
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from consilium import __version__
from consilium.report.clean import shown

LIMIT = 1000
"""Characters of one text on a page."""
HEADINGS = {
    "result": "Result", "crossed": "Across sites", "confusion": "Confusion", "curves": "Learning curves",
    "sites": "Site by site", "travelled": "What travelled", "time": "Time",
    "absences": "Refusals and absences", "cases": "Best and worst", "left": "What left", "privacy": "Privacy",
    "versions": "Versions", "tables": "Tables", "figures": "Figures", "notes": "What is not here",
}  # fmt: skip
"""How the contents call a section, by its id."""


def render(template: str, title: str, lead: str, source: str, sections: list[str], values: Mapping[str, Any]) -> str:
    """Return a page. `sections`: ids of those it has, in order; `values`: what the template asks for."""
    environment = Environment(
        loader=PackageLoader("consilium.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["seen"] = seen
    css = Markup((files("consilium.report.page") / "templates" / "page.css").read_text(encoding="utf-8"))  # ours, no one's text
    frame: dict[str, Any] = {"title": title, "lead": lead, "source": source, "css": css, "version": __version__, "warnings": []}
    frame |= {"today": time.strftime("%Y-%m-%d"), "contents": [(one, HEADINGS[one]) for one in sections]}
    return environment.get_template(template).render(frame | dict(values))


def seen(text: object) -> str:
    """Return a text for a page: what cannot be seen as escapes, and no more than LIMIT characters; escaped by the template."""
    return shown(text, LIMIT)
