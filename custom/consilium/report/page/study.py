"""A study's page: its comparison, with the pictures of `compare` that show no patient."""

from collections.abc import Sequence

from consilium.messages import Stage
from consilium.report.clean import shown
from consilium.report.compare.groups import Group
from consilium.report.compare.pictures import COLOURS, PLOTS
from consilium.report.compare.sheets import Sheet, heading_of, titled
from consilium.report.compare.table import Table, mean, table_of
from consilium.report.page.render import render
from consilium.report.page.svg import drawing, inline

INKED = {colour.lower(): f"--c{number}" for number, colour in enumerate(COLOURS, start=1)} | {
    "#e0e0e0": "--rule",
    "#ebebeb": "--rule",
}
"""The comparison's own colours, and the page's in their place: its black line would vanish in the dark."""
SHOWS = {
    "curves": "Learning curves on validation data, mean over sites",
    "along": "Scores along the study's axis",
    "sites": "Scores by method and site",
    "bytes": "Scores against bytes sent and received",
    "epsilon": "Scores against epsilon",
}


def study_page(
    name: str, source: str, groups: Sequence[Group], sheets: Sequence[Sheet], notes: Sequence[str], stage: Stage
) -> str:
    """Return the page of a study. `notes`: what is missing from it and why."""
    figures, undrawn = [], list(notes)
    for number, group in enumerate(groups):
        table = table_of(group, stage, group.first.metric)
        for plot, make in PLOTS.items():
            with drawing(grid=False):
                figure, why = make(table)
                if figure is None:
                    undrawn.append(titled(group, f"no figure of {SHOWS[plot].lower()}: {why}"))
                    continue
                alt = f"{SHOWS[plot]}. {in_words(table)}"
                more = {} if plot == "sites" else INKED  # numbers in a heat map's cells are black or white by the cell's colour
                figures.append((inline(figure, f"{plot}{number}", alt, more), f"{titled(group, SHOWS[plot])}, {stage} model."))
    runs = sum(len(group.runs) for group in groups)
    sections = ["tables", *["figures"] * bool(figures), *["notes"] * bool(undrawn)]
    values = {"tables": sheets, "figures": figures, "notes": undrawn}
    return render("study.html", shown(name), f"Comparison of {runs} finished runs", source, sections, values)


def in_words(table: Table) -> str:
    """Return the means of the first methods as a text."""
    means = [(method, mean(table.means(method))) for method in table.methods[:8]]
    told = "; ".join(f"{shown(method, 60)} {value:.3f}" for method, value in means if value is not None)
    return f"{heading_of(table.group, table.metric)}, mean over sites: {told or 'none'}."
