"""The results of a run that has just ended, as `simulate` and `poc` print them."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.text import Text

from consilium.cli.options import Format, emit, show
from consilium.config.job import JobConfig, load_run_job
from consilium.core.sanitize import rich_line, shown
from consilium.report.live_view import ENDING, early_stop_text
from consilium.report.predictions import PREDICTIONS, join_predictions
from consilium.report.results_table import VALUES, no_improvement_warning, read_cross_site_matrix, results_table
from consilium.report.run_record import read_run
from consilium.report.tables import Table
from consilium.report.untrusted_files import read_json


def privacy_claim_text(folder: Path) -> str | None:
    """Return the privacy claim of the finished run in `folder`; None for a run without privacy."""
    if (folder / "privacy.json").is_file():
        return json.loads((folder / "privacy.json").read_text())["claim"]
    private = yaml.safe_load((folder / "job.yaml").read_text()).get(
        "privacy"
    )  # at record level only the sites know the epsilon
    return f"{private['unit']} level, each site by its own data: consilium privacy ledger {folder}" if private else None


def join_pictures_and_print(folder: Path, losses: dict[str, float], sites: list[str], format: Format) -> None:
    """Join the sites' predictions.png of a finished run into one picture, and print the run's results."""
    try:
        join_predictions({name: folder / "sites" / name / PREDICTIONS for name in sites}, folder / PREDICTIONS)
    except OSError as error:  # the scores are complete without the picture
        show([rich_line(f"no {PREDICTIONS}: {error}", "yellow")], errors=True)
    config = load_run_job(folder, None)  # the job as it ran, even if its file has changed since
    print_results(json.loads((folder / "results.json").read_text()), losses, config, folder, format)


def print_results(
    results: dict[str, dict[str, float]], losses: dict[str, float], config: JobConfig, folder: Path, format: Format
) -> None:
    """Print a run's final scores, the reason for an early end, its privacy claim, and where its files are.

    Exits with code 1 if sites were refused in the final evaluation.
    """
    record = read_run(folder)
    early = {name: record.early_end[name] for name in ENDING} if record.early_end else None
    refused = record.unscored if config.trains else {}
    surveyed = read_json(folder / "statistics.json")
    crossed = read_cross_site_matrix(read_json(folder / VALUES))
    found: dict[str, Any] = {
        "workspace": str(folder),
        "results": results,
        "losses": losses,
        "statistics": surveyed,
        "ended": early,
        "cross_sites": crossed and asdict(crossed),
        "refused": refused,
    }

    def lines() -> Iterator[Table | Text | str]:
        files = ["metrics.jsonl", "tb_events", "sites/*/adapters"]
        if surveyed:
            yield (folder / "statistics.txt").read_text(encoding="utf-8")
            files.append("statistics.json")
        if crossed:
            yield crossed.table()
            files = ["cross_sites.json", "cross_sites.png", "results.json"]
        elif not config.trains:
            files = ["statistics.json", "statistics.txt"]
        else:
            yield results_table(results, record.scores, config.title, record.test_only, refused, losses)
            yield from (shown(f"{site}: {reason}", 1000) for site, reason in sorted(refused.items()))
            if early:
                yield early_stop_text(early).capitalize()
            if told := no_improvement_warning(record):
                yield rich_line(told, "yellow", limit=1000)
            if claim := privacy_claim_text(folder):
                yield (
                    f"Privacy: {claim}. Scores above are of a simulation; no noise protects them, and in a deployment they "
                    "stay at the site."
                )
            files += [PREDICTIONS] * (folder / PREDICTIONS).is_file()
        yield f"Everything of this run: {folder} ({', '.join(files)})"

    told = {key: value for key, value in sorted(found.items()) if value or key in ("workspace", "results", "losses")}
    emit(told, lines(), format, "results.json has them")
    if refused and not crossed:
        raise typer.Exit(1)
