"""A study's page: its comparison, with the pictures of `compare` that show no patient."""

from collections.abc import Sequence

from consilium.core.messages import Stage
from consilium.core.sanitize import shown
from consilium.report.compare.comparability import Group
from consilium.report.compare.figures import COLOURS, PLOTS
from consilium.report.compare.scores import mean, scores_of
from consilium.report.page.html import drawing, inline, render
from consilium.report.tables import Table

INKED = {colour.lower(): f"--c{number}" for number, colour in enumerate(COLOURS, start=1)}
INKED |= {"#e0e0e0": "--rule", "#ebebeb": "--rule"}
"""The comparison's own colours, and the page's in their place: its black line would vanish in the dark."""
SHOWS = {
    "curves": "Learning curves on validation data, mean over sites",
    "along": "Scores along the study's axis",
    "sites": "Scores by method and site",
    "bytes": "Scores against bytes sent and received",
    "epsilon": "Scores against epsilon",
}


def study_page(
    name: str, source: str, groups: Sequence[Group], tables: Sequence[Table], notes: Sequence[str], stage: Stage
) -> str:
    """Return the page of a study. `notes`: what is missing from it and why."""
    figures, undrawn = [], list(notes)
    for number, group in enumerate(groups):
        scores = scores_of(group, stage, group.first.metric)
        means = {method: mean(scores.means(method)) for method in scores.methods[:8]}
        told = "; ".join(f"{shown(method, 60)} {value:.3f}" for method, value in means.items() if value is not None)
        for plot, make in PLOTS.items():
            with drawing(grid=False):
                figure, why = make(scores)
                if figure is None:
                    undrawn.append(group.titled(f"no figure of {SHOWS[plot].lower()}: {why}"))
                    continue
                alt = f"{SHOWS[plot]}. {group.heading(scores.metric)}, mean over sites: {told or 'none'}."
                more = {} if plot == "sites" else INKED  # numbers in a heat map's cells are black or white by the cell's colour
                caption = f"{group.titled(SHOWS[plot])}, {stage} model."
                figures.append((inline(figure, f"{plot}{number}", alt, more), caption))
    sections = ["tables", *["figures"] * bool(figures), *["notes"] * bool(undrawn)]
    values = {"tables": tables, "figures": figures, "notes": undrawn}
    runs = sum(len(group.runs) for group in groups)
    return render("study.html", shown(name), f"Comparison of {runs} finished runs", source, sections, values)
