"""The HTML pages of a run, of one site in a run, and of a study."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from consilium.config.site import load_site
from consilium.core.errors import ConfigError, RefusedError
from consilium.core.grouping import group_by_key
from consilium.core.messages import BYTES_DOWN, BYTES_UP, TRAIN_LOSS, TRAIN_MEMORY, TRAIN_SECONDS, TRAIN_STEPS, Stage
from consilium.core.sanitize import count_with_noun, first_names_text, shown
from consilium.privacy.accounting import VOID
from consilium.privacy.audit_log import FILE, read_with_epsilon
from consilium.privacy.ledger import Ledger, summary
from consilium.report.audit_tables import record_tables
from consilium.report.compare import PAGE
from consilium.report.compare.comparability import Group
from consilium.report.compare.figures import COLOURS, PLOTS
from consilium.report.compare.score_statistics import mean, scores_of
from consilium.report.compare.tables import MEANT
from consilium.report.figures import ROUNDS
from consilium.report.live_view import early_stop_text, refusal_time_text
from consilium.report.page.html import NONE, Statement, inline_svg, page_figure_style, plan_statement, privacy_statement, render
from consilium.report.page.site_section import curve_figure as draw_curves, read_cases, score_intervals_figure, site_section
from consilium.report.predictions import CASES
from consilium.report.results_table import (
    VALUES,
    confusion_tables,
    no_improvement_warning,
    read_cross_site_matrix,
    results_table,
)
from consilium.report.run_files import versions
from consilium.report.run_record import RunRecord, is_simulation, read_run, stored_cell
from consilium.report.tables import Table, columns, duration_text, only_true, size_text, timestamp_text
from consilium.report.untrusted_files import (
    MOST_BYTES,
    as_finite_float,
    is_folder,
    plain_file_hashes,
    read_json,
    read_plain,
    subfolders,
)

MOST_SITES, MOST_REFUSALS = 24, 200
"""Sites with pictures on a page, and refusals that are listed, at most. The others are counted."""
HASHED = ("job.yaml", "results.json", "metrics.jsonl", "privacy.json", "adapters/global/consilium.safetensors",
          "adapters/global/adapter_model.safetensors", "server/state.safetensors")  # fmt: skip


def run_page(record: RunRecord, back: str = "") -> str:
    """Return the HTML page of a run. `back`: the address of a page of all runs, to which the page links."""
    config, label, title = record.config, record.scores.label(record.metric), shown(record.config.title)
    simulated = is_simulation(record.folder)  # only a simulation may have the sites' folders
    places = [place for place in subfolders(record.folder / "sites") if simulated and (place / CASES).exists()]
    read = [(place, read_cases(place)) for place in places]
    own = [(place, cases) for place, cases in read if cases is not None]
    left_out = {
        "--site shows these too": [place.name for place, _ in own[MOST_SITES:]],
        f"{CASES} is damaged, so nothing is shown of": [place.name for place, cases in read if cases is None],
    }
    trained = {site: one for site, one in record.latest_scores.items() if site not in record.test_only} or record.latest_scores
    crossed = read_cross_site_matrix(read_json(record.folder / VALUES))
    crossed = crossed and replace(crossed, grid=record.scores.grid)  # files of older versions have no grid
    confused = confusion_tables(trained, list(getattr(config.task, "classes", ())))
    private, private_facts = privacy_statement(record)
    refusals = [
        {
            "site": one["site"],
            "when": refusal_time_text(one, record.rounds_before_final_evaluation),
            "reason": shown(one["reason"], 600),
        }
        for one in record.lines_of("refused")
    ]
    level, damaged, lost = no_improvement_warning(record), sorted(record.damaged - {"metrics.jsonl"}), record.lost_lines
    warnings = {
        "This page shows test samples of the sites: patients, where the data are real. Keep it where the run is.": own,
        "The run has not ended. Scores are the last ones on validation data, not the final ones on test data.": (
            record.results is None
        ),
        f"{level}.": level,
        f"Damaged lines of metrics.jsonl: {lost}. They count nowhere on this page.": lost,
        f"Damaged files, left out: {', '.join(damaged)}. Copy the run's folder again from where it was written, or rerun the "
        "job.": damaged,
    }
    values = {
        "back": back,
        "warnings": only_true(warnings),
        "facts": _facts(record, simulated),
        "running": record.results is None,
        "headline": results_table(record.latest_scores, record.scores, title, record.test_only) if record.split else None,
        "models": score_intervals_figure(record.latest_scores, record.metric, label),
        "meant": MEANT,
        "crossed": None if crossed is None else crossed.table(),
        "confused": confused,
        "figures": curve_figures(record),
        "sites": [site_section(f"site{i}", place.name, place, one) for i, (place, one) in enumerate(own[:MOST_SITES])],
        "units": own[0][1].unit if own else "",
        "left_out": [f"{what}: {first_names_text(sites, 20)}" for what, sites in left_out.items() if sites],
        "pooled": record.is_pooled,
        "parameters": record.parameter_counts,
        "times": _time_facts(record),
        "training": _participation_and_cost_table(record),
        "refusals": refusals[:MOST_REFUSALS],
        "more_refusals": max(len(refusals) - MOST_REFUSALS, 0),
        "privacy": private,
        "privacy_facts": private_facts,
        "versions": list(record.versions.items()) or [("versions.json", "is not here or is damaged")],
        "hashes": [("the job's digest", config.digest), *plain_file_hashes(record.folder, HASHED)],
        "job": (read_plain(record.folder / "job.yaml", 256 * 1024) or b"(too large to show)").decode(errors="replace"),
    }
    there = {"crossed": crossed is not None, "confusion": confused, "sites": read}
    sections = ["result", "curves", "training", "privacy", "versions", *only_true(there)]
    model = f"{config.model.name} {getattr(config.model, 'variant', '')}".strip()
    counts = f"{count_with_noun(len(record.sites), 'site')}, {count_with_noun(config.training.rounds, 'round')}"
    lead = f"{config.strategy.name}, {model}, {config.adapter.kind}; {config.task.name}, {counts}"
    cell = stored_cell(record.folder).name.replace(",", ", ")
    source = record.folder.name if back else str(record.folder)
    return render("run.html", f"{title}: {cell}" if cell else title, lead, source, sections, values)


def _facts(record: RunRecord, simulated: bool) -> list[tuple[str, str]]:
    """Return facts on the run as pairs (name, value)."""
    early = f": {early_stop_text(record.early_end)}" if record.early_end else ""
    state = f"finished{early}"
    if record.results is None:
        phases = {(line["round"], line["phase"]) for line in record.lines_of("concluded")}
        done = sum(phase == max(phase for _, phase in phases) for _, phase in phases)
        state = f"not finished{early or f': {done} of {record.config.training.rounds} rounds have ended'}"
    where = "a simulation: all sites were on one machine" if simulated else "the server of a federation, or its result"
    crossed = record.config.cross_site
    scored = [("scores", f"the models of the run {crossed.run}; nothing was trained here")] if crossed else []
    return [("state", state), ("kind of run", where), *scored, ("seed", str(record.seed))]


def curve_figures(record: RunRecord, site: str | None = None) -> list[tuple[Any, str]]:
    """Return the learning curves as (figure, caption); only of `site` if it is given."""
    label, found = record.scores.label(record.metric), []
    wanted = [
        (str(stage), record.validation_curves(stage), label, f"Validation {label}, {stage} model") for stage in list(Stage)[1:]
    ]
    for name, curves, axis, what in [*wanted, ("loss", record.curves(TRAIN_LOSS, True), "loss", "Training loss")]:
        chosen = {one: curve for one, curve in curves.items() if site in (None, one)}
        if (figure := draw_curves(f"curve-{name}", chosen, axis, what)) is not None:
            found.append((figure, f"{what}, by {ROUNDS}."))
    return found


def _participation_and_cost_table(record: RunRecord) -> Table | None:
    """Return a table of each site's training: how often it was asked, answered, counted and refused; bytes, time and memory.

    Columns without known values are left out. None if no site took part.
    """
    asked, counted = (
        Counter(site for line in record.lines_of(event) for site in line["sites"]) for event in ("started", "concluded")
    )
    refused = Counter(line["site"] for line in record.lines_of("refused"))
    answers = group_by_key((line["site"], line["metrics"]) for line in record.lines_of("result"))
    rows, sent, received = list[dict[str, str]](), 0.0, 0.0
    for site in sorted({*record.sites, *asked, *refused, *answers}):
        found = answers.get(site, [])
        numbers = ([one.get(name, 0.0) for one in found] for name in (BYTES_UP, BYTES_DOWN, TRAIN_STEPS, TRAIN_MEMORY))
        up, down, steps, memory = numbers
        seconds = [one[TRAIN_SECONDS] for one in found if TRAIN_SECONDS in one]
        rows.append(
            {
                "site": site,
                "asked": str(asked[site]),
                "answered": str(len(found)),
                "absent": str(max(asked[site] - len(found), 0)),
                "in the mean": str(counted[site]),
                "refused": str(refused[site]),
                "steps": f"{sum(steps):,.0f}" if any(steps) else "-",
                "sent": size_text(sum(up)),
                "received": size_text(sum(down)),
                "largest update": size_text(max(up, default=0.0)),
                "time": duration_text(sum(seconds)) if seconds else "-",
                "a round, median": duration_text(statistics.median(seconds)) if seconds else "-",
                "GPU memory, most": size_text(max(memory, default=0.0)) if found else "-",
            }
        )
        sent, received = sent + sum(up), received + sum(down)
    if not rows:
        return None
    heads = [head for head in rows[0] if any(row[head] not in ("-", "0 B") for row in rows)]
    sums = {"site": "all sites", "answered": str(sum(map(len, answers.values())))}
    sums |= {"sent": size_text(sent), "received": size_text(received)}
    phases = max(record.config.strategy.traits.phases)
    notes = [f"asked: once in each phase; a round of {record.config.strategy.name} has up to {phases} phases"] * (phases > 1)
    table = [[row.get(head, "") for head in heads] for row in [*rows, sums]]
    return Table("Training at the sites", columns(*heads), table, notes, sums={len(rows)})


def _time_facts(record: RunRecord) -> list[tuple[str, str]]:
    """Return the run's times as pairs (name, value)."""
    timed = [line for line in record.lines if line["time"] is not None]
    stamps = [line["time"] for line in timed]
    began = {line["round"]: line["time"] for line in reversed(timed) if line["event"] == "started"}  # of the first phase
    ended = {line["round"]: line["time"] for line in timed if line["event"] == "concluded"}  # of the last phase
    took = [ended[r] - began[r] for r in sorted(ended) if r in began and ended[r] >= began[r]]
    facts = [("began", timestamp_text(min(stamps))), ("last record", timestamp_text(max(stamps)))] if stamps else []
    if took:
        middle = f"{duration_text(statistics.median(took))} (from {duration_text(min(took))} to {duration_text(max(took))})"
        facts += [("rounds, summed", duration_text(sum(took))), ("a round, median", middle)]
    finals = [line["time"] for line in timed if line["event"] == "final"]
    if finals and ended and max(finals) >= max(ended.values()):
        facts.append(("final evaluation", duration_text(max(finals) - max(ended.values()))))
    if resumed := sum(1 for _ in record.lines_of("resumed")):
        facts.append(("interrupted", f"gone on with {resumed} times; a pause is in no round's time but the one it fell into"))
    return facts


# audit section ---------------------------------------------------------------------------------------------------------
# The part of a site's page on what left the site: the messages in its audit.jsonl, and its privacy ledger.

LEDGER = "ledger.sqlite"


def audit_log_section(path: Path) -> dict[str, Any]:
    """Return the record in an audit.jsonl and its tables; or None, why it is not shown, and whether it is `too_large`."""
    if path.stat().st_size > MOST_BYTES:
        size = f"{path} has more than {MOST_BYTES // 1024**2} MiB, which is too large for this page"
        return {"record": None, "too_large": True, "why": f"{size}. See consilium audit."}
    try:
        record = read_with_epsilon(path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {"record": None, "too_large": False, "why": f"{path} cannot be read as a record; see consilium audit."}
    messages, *details = record_tables(record, f", run {shown(path.parent.name, 80)}")
    return {"record": record, "messages": messages, "details": details}


def ledger_path(folder: Path) -> Path | None:
    """Return the file of a site's ledger; None if there is none.

    A simulation has it in the site's folder. A kit has it beside its runs, or where site.yaml says.
    """
    folder = folder.absolute()
    # STATE/runs/RUN and STATE/runs/RUN/sites/NAME
    kits = [runs.parent for runs in (folder.parent, folder.parent.parent.parent) if runs.name == "runs"]
    found = [place / LEDGER for place in (folder, *kits) if is_folder(place)]
    for settings in (kit.parent / "local" / "site.yaml" for kit in kits):
        try:
            own = load_site(settings).privacy.ledger if settings.is_file() and not settings.is_symlink() else None
        except ConfigError:
            own = None
        found += [own] if own is not None else []
    return next((path for path in found if path.is_file() and not path.is_symlink()), None)


def ledger_table(path: Path | None) -> tuple[Table | None, str]:
    """Return a table of what all jobs together cost each data set of this site, or None and the reason."""
    if path is None:
        return None, "There is no ledger here: no private job has run, or it is kept elsewhere."
    try:
        entries: list[Mapping[str, Any]] = list(summary(Ledger(path)))
    except RefusedError as error:
        return None, shown(error, 600)
    rows = []
    for one in entries:
        spent = [one["epsilon"][unit]["1e-05"] for unit in ("record", "patient", "site")]
        void = f"{one['void']}: {VOID}" if one["void"] else "0"
        row = [one["dataset"], ", ".join(one["jobs"]), str(one["releases"]), void, one["adjacency"], ", ".join(one["trust"])]
        no_bound = "no bound (its jobs are of a finer unit, or without noise)"
        rows.append([*row, *(no_bound if as_finite_float(value) is None else f"{value:.4g}" for value in spent)])
    units = (f"epsilon of {unit}" for unit in ("a record", "a patient", "the site"))
    heads = columns("data set", "jobs", "releases", "void rows", "adjacency", "trust", *units)
    return Table("Privacy spent by all jobs together, at delta 1e-05", heads, rows), ""


# site page -------------------------------------------------------------------------------------------------------------
# The page of a site, which a hospital may keep. It can only be made where the site's folder is.

HASHED_AT_SITE = (
    *(f"adapters/{which}/consilium.safetensors" for which in ("global", "global-best", "personalized", "personalized-best")),
    CASES,
)


def site_folder(folder: Path, site: str) -> Path:
    """Return the folder of a site's own files in the folder of a run.

    Raises ConfigError if there is no such site, and for the run's folder at the server of a federation.
    """
    if (folder / "metrics.jsonl").exists() and not is_simulation(folder):
        raise ConfigError(
            f"--site: {folder} is a server's, which has nothing of a site's own; give the run's folder at the site"
        )
    inside = {one.name: one for one in subfolders(folder / "sites")}
    if site in inside:
        return inside[site]
    own = [place / FILE for place in (folder, *subfolders(folder))]
    if not inside and any(path.is_file() and not path.is_symlink() for path in [folder / CASES, *own]):
        return folder  # a site with a state folder of its own
    known = ", ".join(shown(name, 40) for name in sorted(inside)[:12]) or "none"
    raise ConfigError(f"--site: {shown(site, 80)!r}: no such site in {folder}; there: {known}")


def site_page(folder: Path, site: str) -> str:
    """Return the HTML page of a site. Raises ConfigError if the folder has no site of that name."""
    place = site_folder(folder, site)
    cases = read_cases(place)
    if cases is not None and place == folder and cases.site not in ("", site):
        raise ConfigError(f"--site: {shown(site, 80)!r}: {folder} is {shown(cases.site, 80)}'s; name that")
    record = read_run(folder) if (folder / "metrics.jsonl").is_file() and (folder / "job.yaml").is_file() else None
    scores = cases.scores if cases else record.scores if record else None
    closing, job = ({site: cases.metrics}, cases.job) if cases else ({}, record.config.title if record else "a run")
    state = [("state", "not finished" if record.results is None else "finished")] if record else []
    own = "This page is the hospital's own: it shows test samples of this site, patients where the data are real."
    table, problem = ledger_table(ledger_path(place))
    private: Statement = ["The job's privacy guarantee appears here after the final evaluation."], []
    if cases and cases.privacy is not None:  # at record level only the site itself knows its plan
        private = plan_statement(cases.privacy)
    elif cases or (record and record.config.privacy is None):
        private = [NONE], []
    elif record and record.results is not None:
        private = ["The privacy guarantee cannot be shown: cases.json is missing or cannot be read."], []
    audits = [one / FILE for one in [place, *subfolders(place)]]
    values = {
        "warnings": [own] if cases else [],
        "facts": [("site", site), *state],
        "headline": results_table(closing, scores, job)
        if scores and any("/" in name for name in closing.get(site, ()))
        else None,
        "meant": MEANT,
        "confused": confusion_tables(closing, cases.classes) if cases else {},
        "figures": curve_figures(record, site) if record else [],
        "site": site_section("own", site, place, cases) if cases else None,
        "audits": [audit_log_section(path) for path in audits if path.is_file() and not path.is_symlink()],
        "ledger": table,
        "no_ledger": problem,
        "privacy": private[0],
        "privacy_facts": private[1],
        "versions": list(versions().items()),
        "hashes": plain_file_hashes(place, HASHED_AT_SITE),
    }
    sections = ["result", "cases", "left", "privacy", "versions"]
    title = f"{shown(site, 120)}: {shown(job, 160)}"
    return render("site.html", title, "What this hospital keeps of the run", str(place), sections, values)


# study page ------------------------------------------------------------------------------------------------------------
# The page of a study: its comparison, with those pictures of `compare` that show no patient.

INKED = {
    **{colour.lower(): f"--c{number}" for number, colour in enumerate(COLOURS, start=1)},
    "#e0e0e0": "--rule",
    "#ebebeb": "--rule",
}
"""The page's variable for each colour of a comparison, because its black would be invisible in dark mode."""
SHOWS = {
    "curves": "Learning curves on validation data, mean over sites",
    "along": "Scores along the study's axis",
    "sites": "Scores by method and site",
    "bytes": "Scores against bytes sent and received",
}


def study_page(
    name: str, source: str, groups: Sequence[Group], tables: Sequence[Table], notes: Sequence[str], stage: Stage, metric: str
) -> str:
    """Return the HTML page of a comparison. `notes`: lines on what is missing and why. `metric`: "" for the leading score."""
    figures, undrawn = [], list(notes)
    for place, group in enumerate(groups):
        scores = scores_of(group, stage, metric or group.first.metric)
        means = {method: mean(scores.means(method)) for method in scores.methods[:8]}
        told = "; ".join(f"{shown(method, 60)} {value:.3f}" for method, value in means.items() if value is not None)
        for plot, make in PLOTS.items():
            with page_figure_style(grid=False):
                found = make(scores, PAGE)
                if isinstance(found, str):
                    undrawn.append(group.with_group_name(f"no figure of {SHOWS[plot].lower()}: {found}"))
                    continue
                alt = f"{SHOWS[plot]}. {group.heading(scores.metric)}, mean over sites: {told or 'none'}."
                more = {} if plot == "sites" else INKED  # numbers in a heat map's cells are black or white by the cell's colour
                figures.append((inline_svg(found.figure, f"{plot}{place}", alt, more), group.with_group_name(found.caption)))
    sections = ["tables", *["figures"] * bool(figures), *["notes"] * bool(undrawn)]
    values = {"tables": tables, "figures": figures, "notes": undrawn}
    runs = sum(len(group.runs) for group in groups)
    return render("study.html", shown(name), f"Comparison of {runs} finished runs", source, sections, values)
