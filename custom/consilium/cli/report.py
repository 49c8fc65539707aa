"""The command `consilium report`: a run or a study as one page."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from consilium.config.job import load_job
from consilium.core.errors import ConfigError
from consilium.core.messages import Stage
from consilium.core.sanitize import shown
from consilium.core.storage import write_atomic
from consilium.report.best_worst_cases import CASES
from consilium.report.compare.comparability import MissingRun, grouped
from consilium.report.compare.tables import comparison_tables
from consilium.report.page.run_page import run_page, site_folder, site_page, study_page
from consilium.report.plain_files import subfolders
from consilium.report.run_record import CELLS, RunRecord, cell_folder, check_names, read_finished, read_run, study_cells
from consilium.study.cell_record import record_of

FILE = "report.html"


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN|STUDY", help="the folder of a run, or of a study's runs")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="default: report.html in the folder")
    ] = None,
    site: Annotated[
        str, typer.Option(metavar="NAME", help="what this site may keep: its pictures, what left it, its ledger")
    ] = "",
) -> None:
    """Write a run, finished or not, or a study as one page for any browser: no network, light and dark, printable."""
    run = run if run.is_dir() else cell_folder(run)
    if not run.is_dir():
        raise ConfigError(f"{shown(run, 200)}: no such folder; give the folder of `simulate --workspace`, or of a study's runs")
    target = output or (site_folder(run, site) if site else run) / FILE
    if target.is_dir():
        raise ConfigError(f"--output: {target}: is a folder; give a file, such as {target / FILE}")
    write_atomic(target, _page(run, site).encode(errors="backslashreplace"))
    typer.echo(f"{target}: written")


def _page(run: Path, site: str) -> str:
    if (run / CELLS).is_dir() and not (run / "job.yaml").exists():
        return _study_page(run, site)
    if site:
        return site_page(run, site)
    if not (run / "job.yaml").exists() and (
        names := [one.name for one in subfolders(run / "sites")] or ["NAME"] * (run / CASES).is_file()
    ):
        raise ConfigError(f"{run}: is a site's; name it: --site {shown(names[0], 80)}")
    return run_page(read_run(run))


def _study_page(folder: Path, site: str) -> str:
    """Return the comparison of a study's finished cells. Raises ConfigError where there is none."""
    if site:
        raise ConfigError(f"--site: {folder} is a study's; give one of its runs in {folder / CELLS}")
    found, absent = _cells(folder)
    if not found:
        raise ConfigError(f"{folder}: no cell is done; go on with consilium study run")
    groups, why = grouped(found, absent)
    notes = [*(f"other data: {one}" for one in why), *(one for group in groups for one in group.left)]
    return study_page(folder.resolve().name, str(folder), groups, comparison_tables(groups, Stage.GLOBAL), notes, Stage.GLOBAL)


def _seed(job: Path) -> int:
    """Return a job's seed; 0 for an unreadable job."""
    try:
        return load_job(job, plugins=None).training.seed
    except ConfigError:
        return 0


def _cells(folder: Path) -> tuple[list[RunRecord], list[MissingRun]]:
    """Return a study's finished runs in its order, and why the others have no scores. Raises ConfigError."""
    found: list[RunRecord] = []
    absent: list[MissingRun] = []
    cells = study_cells(folder)
    check_names(folder, [cell for cell in cells if (cell.folder / "results.json").is_file()])
    for cell in cells:
        record = record_of(cell.folder)
        try:
            run = read_finished(cell.folder, ", ".join(cell.labels.values()) or cell.folder.name, cell.method)
            data = None if record.folder is None else (record.folder, record.data)
            found.append(run if data is None else replace(run, data=data, whole=record.whole))
        except ConfigError as error:
            if (job := cell.folder / "job.yaml").is_file():
                why = f"{record.state}: {record.reason}" if record.reason else str(error)
                absent.append(MissingRun(cell.method, _seed(job), why))
    return found, absent
