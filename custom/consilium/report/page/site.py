"""A site's own page: what a hospital may keep of a run. It is made where the site's folder is, and nowhere else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from consilium.errors import ConfigError
from consilium.report.clean import shown
from consilium.report.page import kept
from consilium.report.page.cases import Cases, read_cases
from consilium.report.page.files import folders, is_folder
from consilium.report.page.matrices import confusion_tables
from consilium.report.page.privacy import NONE, of_summary
from consilium.report.page.record import Record, is_simulation, read_record
from consilium.report.page.render import render
from consilium.report.page.run import curve_figures, hashes, site_part
from consilium.report.page.scores import MEANT, headline
from consilium.report.runlog import versions

HASHED = (
    *(f"adapters/{which}/consilium.safetensors" for which in ("global", "global-best", "personalized", "personalized-best")),
    "cases.json",
)


def site_folder(folder: Path, site: str) -> Path:
    """Return the folder of a site's own files in a run's. Raises ConfigError, also where the run's is a federation's server."""
    server = (folder / "metrics.jsonl").exists() and not is_simulation(folder)
    inside = {one.name: one for one in folders(folder / "sites")}
    if server:
        what = "is a server's, which has nothing of a site's own; give the run's folder at the site"
        raise ConfigError(f"--site: {folder} {what}")
    if site in inside:
        return inside[site]
    if not inside and ((folder / "cases.json").is_file() or kept.audits(folder)):
        return folder  # a site with a state folder of its own
    known = ", ".join(shown(name, 40) for name in sorted(inside)[:12]) or "none"
    raise ConfigError(f"--site: {shown(site, 80)!r}: no such site in {folder}; there: {known}")


def site_page(folder: Path, site: str) -> str:
    """Return the page of a site. Raises ConfigError where the folder has none of that name."""
    place = site_folder(folder, site)
    cases = read_cases(place)
    if cases is not None and place == folder and cases.site not in ("", site):
        raise ConfigError(f"--site: {shown(site, 80)!r}: {folder} is {cases.site}'s; name that")
    record = read_record(folder) if (folder / "metrics.jsonl").is_file() and (folder / "job.yaml").is_file() else None
    values = _scores(record, cases, site) | _left(place) | _private(cases, record)
    values |= {
        "site": site_part("own", site, cases) if cases else {"cases": None},
        "cases_heading": f"Best, median and worst {cases.units}s" if cases else "Best, median and worst",
        "versions": list(versions().items()),
        "hashes": hashes(place, HASHED),
        "meant": MEANT,
    }
    sections = ["result", "cases", "left", "privacy", "versions"]
    job = cases.job if cases else record.config.title if record else "a run"
    return render(
        "site.html", f"{shown(site, 120)}: {job}", "What this hospital keeps of the run", str(place), sections, values
    )


def _scores(record: Record | None, cases: Cases | None, site: str) -> dict[str, Any]:
    scores = cases.scores if cases else record.scores if record else None
    closing = {site: cases.metrics} if cases else {}
    facts = [("site", site)]
    if record is not None:
        facts.append(("state", "finished" if record.results is not None else "not finished"))
    warnings = (
        ["This page is the hospital's own: it shows test samples of this site, patients where the data are real."]
        if cases
        else []
    )
    return {
        "warnings": warnings,
        "facts": facts,
        "headline": headline(closing, scores, cases.job if cases else "") if scores else None,
        "beside": headline(closing, scores, cases.job if cases else "", beside=True) if scores else None,
        "confused": confusion_tables(closing, [name for name, _ in cases.key]) if cases else [],
        "figures": curve_figures(record, site) if record else [],
    }


def _left(place: Path) -> dict[str, Any]:
    path = kept.ledger_of(place)
    nothing = "There is no ledger here: no private job has run, or it is kept elsewhere."
    ledger, problem = kept.ledger(path) if path else (None, nothing)
    return {"audits": [_audit(one) for one in kept.audits(place)], "ledger": ledger, "no_ledger": problem}


def _audit(path: Path) -> dict[str, Any]:
    found, why = kept.audit(path)
    if found is None:
        return {"record": None, "why": why}
    run = shown(path.parent.name, 80)
    return {"record": found, "messages": kept.messages(found, run), "tensors": kept.tensors(found, run)}


def _private(cases: Cases | None, record: Record | None) -> dict[str, Any]:
    """Return what this site's own plan promises; it is in cases.json, because at record level only the site knows it."""
    private: Mapping[str, Any] | None = cases.privacy if cases else None
    if private is not None:
        sentences, facts = of_summary(private)
        return {"privacy": sentences, "privacy_facts": facts}
    known = cases is not None or (record is not None and record.config.privacy is None)
    return {"privacy": [NONE] if known else ["What the job promises is not known here before its end."], "privacy_facts": []}


def sites_of(folder: Path) -> list[str]:
    """Return the names of the sites in a run's folder."""
    return [one.name for one in folders(folder / "sites") if is_folder(one)]
