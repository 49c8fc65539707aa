"""The page of a run: all that its folder says, finished or not."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from consilium.messages import Stage
from consilium.report.clean import number_of, shown
from consilium.report.means import Results
from consilium.report.page import plots
from consilium.report.page.cases import Cases, read_cases, spread
from consilium.report.page.files import folders, read, sha256
from consilium.report.page.matrices import classes_of, confusion_tables, cross_site_table
from consilium.report.page.privacy import statement
from consilium.report.page.record import Record
from consilium.report.page.render import render
from consilium.report.page.scores import MEANT, gains, headline, losses, of_models
from consilium.report.page.traffic import absences, parameters, tensors, times, traffic
from consilium.report.progress import ending
from consilium.report.study_cells import values_of_cell

MOST_SITES = 24
"""Sites whose pictures are on one page."""
MOST_JOB = 256 * 1024
HASHED = ("job.yaml", "results.json", "metrics.jsonl", "privacy.json", "adapters/global/consilium.safetensors",
          "adapters/global/adapter_model.safetensors", "server/state.safetensors")  # fmt: skip


def run_page(record: Record) -> str:
    """Return the page of a run."""
    own = site_parts(record) if record.simulated else []
    closing, label = _trained(record), record.scores.heading(record.metric)
    absent, refused, more_refused = absences(record)
    facts, training = times(record)
    private, private_facts = statement(record)
    results = headline(closing, record.scores, shown(record.config.title))
    if results and record.apart:
        results = replace(results, notes=[*results.notes, *_apart(record, label)])
    confused = confusion_tables(closing, classes_of(record.config.task))
    crossed = cross_site_table(record.folder)
    values = {
        "warnings": warnings(record, bool(own)),
        "facts": about(record),
        "running": record.results is None,
        "headline": results,
        "gain": gains(closing, record.metric, label) if results else "",
        "beside": headline(closing, record.scores, shown(record.config.title), beside=True),
        "models": plots.models("models", of_models(record.closing, record.metric), label),
        "meant": MEANT,
        "crossed": crossed,
        "confused": confused,
        "figures": curve_figures(record),
        "sites": own[:MOST_SITES],
        "units": _units(own),
        "left_out": _left_out(own),
        "travelled": traffic(record),
        "parameters": parameters(record),
        "tensors": tensors(record),
        "times": facts,
        "training": training,
        "absences": absent,
        "refusals": refused,
        "more_refusals": more_refused,
        "privacy": private,
        "privacy_facts": private_facts,
        "versions": list(record.versions.items()) or [("versions.json", "is not here or is damaged")],
        "hashes": [("the job's digest", record.config.digest), *hashes(record.folder, HASHED)],
        "job": (read(record.folder / "job.yaml", MOST_JOB) or b"(too large to show)").decode(errors="replace"),
    }
    sections = _sections(bool(crossed), bool(confused), bool(own))
    return render("run.html", title_of(record), lead(record), str(record.folder), sections, values)


def _sections(crossed: bool, confused: bool, sites: bool) -> list[str]:
    """Return the page's sections in order, of some only where there is something to show."""
    scores = ["result", *["crossed"] * crossed, *["confusion"] * confused, "curves", *["sites"] * sites]
    return [*scores, "travelled", "time", "absences", "privacy", "versions"]


def _trained(record: Record) -> Results:
    """Return the closing scores of the sites that train; of all where none does."""
    return {site: one for site, one in record.closing.items() if site not in record.apart} or record.closing


def _apart(record: Record, label: str) -> list[str]:
    """Return a line of each site that only tests, with what the three models score there."""
    found = []
    for site, stages in of_models({s: record.closing[s] for s in record.apart if s in record.closing}, record.metric):
        told = ", ".join(f"{stage} {value:.3f}" for stage, (value, _, _) in stages.items())
        found.append(f"{shown(site)} only tests and is in no mean: {label} {told}")
    return found


def title_of(record: Record) -> str:
    """Return the job's title, and of a study's run which of its runs it is."""
    values = values_of_cell(record.folder)
    return f"{shown(record.config.title)}: {values.replace(',', ', ')}" if values else shown(record.config.title)


def lead(record: Record) -> str:
    """Return what the run is, in a line."""
    config = record.config
    parts = [config.strategy.name, f"{config.model.name} {getattr(config.model, 'variant', '')}".strip(), config.adapter.kind]
    counts = f"{number_of(len(record.sites), 'site')}, {number_of(config.training.rounds, 'round')}"
    return f"{', '.join(parts)}; {config.task.name}, {counts}"


def about(record: Record) -> list[tuple[str, str]]:
    """Return the run's facts as pairs of texts."""
    config = record.config
    state = _state(record)
    where = "a simulation: all sites were on one machine" if record.simulated else "the server of a federation, or its result"
    crossed = config.cross_site
    scored = [("scores", f"the models of the run {crossed.run}; nothing was trained here")] if crossed else []
    return [("state", state), ("kind of run", where), *scored, ("seed", str(config.training.seed))]


def _state(record: Record) -> str:
    """Return whether the run is finished, and after how many rounds."""
    early = f": {ending(record.ended)}" if record.ended else ""
    if record.results is not None:
        return f"finished{early}"
    return f"not finished{early or f': {record.rounds} of {record.config.training.rounds} rounds have ended'}"


def warnings(record: Record, pictures: bool) -> list[str]:
    """Return what a reader must know before anything else."""
    found = []
    if pictures:
        found.append("This page shows test samples of the sites: patients, where the data are real. Keep it where the run is.")
    if record.results is None:
        found.append("The run has not ended. Scores are the last ones on validation data, not the closing ones on test data.")
    if record.damaged:
        found.append(f"Damaged lines of metrics.jsonl: {record.damaged}. They count nowhere on this page.")
    return found


def curve_figures(record: Record, site: str | None = None) -> list[tuple[Any, str]]:
    """Return the learning curves as (figure, caption), of one site where named."""
    label = record.scores.heading(record.metric)
    wanted = [(str(s), record.validation(s), f"Validation {label}, {s} model") for s in (Stage.GLOBAL, Stage.PERSONALIZED)]
    wanted.append(("loss", losses(record), "Training loss"))
    found = []
    for name, curves, what in wanted:
        chosen = curves if site is None else {one: curve for one, curve in curves.items() if one == site}
        if (figure := plots.curves(f"curve-{name}", chosen, label if name != "loss" else "loss", what)) is not None:
            when = "after each round's training" if name != "global" else "before each round's training"
            found.append((figure, f"{what}, {when}."))
    return found


def site_parts(record: Record) -> list[dict[str, Any]]:
    """Return what the sites of a simulation kept, as the page shows it; pictures of the first MOST_SITES."""
    places = [place for place in folders(record.folder / "sites") if (place / "cases.json").is_file()]
    found = []
    for number, place in enumerate(places):
        if (cases := read_cases(place, pictures=number < MOST_SITES)) is not None:
            found.append(site_part(f"site{number}", place.name, cases))
    return found


def site_part(name: str, site: str, cases: Cases) -> dict[str, Any]:
    """Return one site's own scores and cases. `name` tells its figures from others'."""
    figure = plots.distribution(name, cases.values, cases.score, cases.units, site)
    return {"name": site, "cases": cases, "distribution": figure, "spread": spread(cases, site)}


def _units(own: Sequence[Mapping[str, Any]]) -> str:
    return own[0]["cases"].units if own else ""


def _left_out(own: Sequence[Mapping[str, Any]]) -> list[str]:
    rest = [part["name"] for part in own[MOST_SITES:]]
    return [f"{len(rest)} more sites are not shown here; --site shows one: {', '.join(rest[:20])}"] if rest else []


def hashes(folder: Path, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the SHA-256 of those files that are there."""
    inside = [name for name in names if not (folder / name).parent.is_symlink()]
    return [(name, found) for name in inside if (found := sha256(folder / name)) is not None]
