"""A site's own page: what a hospital may keep of a run. It is made where the site's folder is, and nowhere else."""

from pathlib import Path

from consilium.core.errors import ConfigError
from consilium.core.sanitize import shown
from consilium.privacy.ledger.audit import FILE
from consilium.report.best_worst_cases import CASES
from consilium.report.compare.tables import MEANT
from consilium.report.matrices import confusion_tables
from consilium.report.page.audit_section import audits, ledger, ledger_of
from consilium.report.page.cases import read_cases, site_section
from consilium.report.page.html import render
from consilium.report.page.run_page import curve_figures
from consilium.report.page.words import NONE, Statement, of_plan
from consilium.report.plain_files import hashes, subfolders
from consilium.report.results_table import results_table
from consilium.report.run_log import versions
from consilium.report.run_record import is_simulation, read_run

HASHED = (
    *(f"adapters/{which}/consilium.safetensors" for which in ("global", "global-best", "personalized", "personalized-best")),
    CASES,
)


def site_folder(folder: Path, site: str) -> Path:
    """Return the folder of a site's own files in a run's. Raises ConfigError, also where the run's is a federation's server."""
    if (folder / "metrics.jsonl").exists() and not is_simulation(folder):
        what = "is a server's, which has nothing of a site's own; give the run's folder at the site"
        raise ConfigError(f"--site: {folder} {what}")
    inside = {one.name: one for one in subfolders(folder / "sites")}
    if site in inside:
        return inside[site]
    own = [place / FILE for place in (folder, *subfolders(folder))]
    if not inside and any(path.is_file() and not path.is_symlink() for path in [folder / CASES, *own]):
        return folder  # a site with a state folder of its own
    known = ", ".join(shown(name, 40) for name in sorted(inside)[:12]) or "none"
    raise ConfigError(f"--site: {shown(site, 80)!r}: no such site in {folder}; there: {known}")


def site_page(folder: Path, site: str) -> str:
    """Return the page of a site. Raises ConfigError where the folder has none of that name."""
    place = site_folder(folder, site)
    cases = read_cases(place)
    if cases is not None and place == folder and cases.site not in ("", site):
        raise ConfigError(f"--site: {shown(site, 80)!r}: {folder} is {shown(cases.site, 80)}'s; name that")
    record = read_run(folder) if (folder / "metrics.jsonl").is_file() and (folder / "job.yaml").is_file() else None
    scores = cases.scores if cases else record.scores if record else None
    closing, job = ({site: cases.metrics}, cases.job) if cases else ({}, record.config.title if record else "a run")
    state = [("state", "not finished" if record.results is None else "finished")] if record else []
    own = "This page is the hospital's own: it shows test samples of this site, patients where the data are real."
    table, problem = ledger(ledger_of(place))
    known = cases is not None or (record is not None and record.config.privacy is None)
    private: Statement = [NONE] if known else ["What the job promises is not known here before its end."], []
    if cases and cases.privacy is not None:  # a site's own plan: at record level only the site knows it
        private = of_plan(cases.privacy)
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
        "cases_heading": f"Best, median and worst {cases.unit}s" if cases else "Best, median and worst",
        "audits": audits(place),
        "ledger": table,
        "no_ledger": problem,
        "privacy": private[0],
        "privacy_facts": private[1],
        "versions": list(versions().items()),
        "hashes": hashes(place, HASHED),
    }
    sections = ["result", "cases", "left", "privacy", "versions"]
    title = f"{shown(site, 120)}: {shown(job, 160)}"
    return render("site.html", title, "What this hospital keeps of the run", str(place), sections, values)
