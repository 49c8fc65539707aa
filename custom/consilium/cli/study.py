"""The commands `consilium study show` and `run`. A study is a grid of runs."""

import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from consilium.cli.options import (
    CheckpointsOption,
    FormatOption,
    WorkspaceOption,
    emit,
    pipeline_test_note,
    show,
    study_command,
    study_size,
)
from consilium.cli.resume_hint import exit_interrupted, same_command_hint as same_command, stop_on_signals
from consilium.config.code_digest import strategy_code_digest
from consilium.config.site import Given
from consilium.core.errors import ConfigError
from consilium.core.sanitize import count_with_noun, first_names_text, rich_line
from consilium.report.run_record import orphaned_cells, save_cells
from consilium.report.tables import Table, duration_text
from consilium.study.definition import Study, labels_text, load, pick
from consilium.study.preflight import Planner
from consilium.study.records import CellRecord, current_record, log_of, stored_record
from consilium.study.runner import StudyView, cells_table, has_other_data, run_study, set_aside_folder

StudyArgument = Annotated[Path, typer.Argument(help="a study's file, or its name in jobs/studies")]
SmokeOption = Annotated[bool, typer.Option("--smoke", help="take seconds: a tiny model and generated data")]
SmallOption = Annotated[bool, typer.Option("--small", help="take minutes: test the pipeline on your data, not the methods")]
DataOption = Annotated[Path | None, typer.Option(help="folder with a folder per site, as in `consilium simulate`")]
_line = partial(rich_line, limit=4000)


def study_show(
    study: StudyArgument,
    smoke: SmokeOption = False,
    small: SmallOption = False,
    workspace: WorkspaceOption = None,
    format: FormatOption = "txt",
) -> None:
    """Show a study's cells: each cell's state and run time; and the excluded cells with reasons."""
    chosen = load(study, study_size(smoke, small), workspace)
    cells = chosen.cells()
    records = {cell.id: current_record(cell.folder) for cell in cells}
    rows = [
        vars(records[cell.id])
        | {"outdated": records[cell.id].is_outdated(strategy_code_digest(cell.load()))}
        | {"labels": cell.labels, "folder": str(cell.folder)}
        for cell in cells
    ]
    emit({"study": chosen.name, "cells": rows, "excluded": chosen.excluded()}, _lines(chosen, records), format)


def _lines(study: Study, records: dict[str, CellRecord]) -> Iterator[Table | Text]:
    """Yield a study's cells as a table, and notes as lines."""
    cells = study.cells()
    yield cells_table(f"{study.heading}: {study.config.about}", cells, records)
    for cell in (one for one in cells if records[one.id].state == "failed"):
        yield _line(f"{cell.display_name}: failed: {records[cell.id].reason}")
    yield from (_line(f"{labels_text(labels)}: left out: {reason}") for labels, reason in study.excluded())
    if older := orphaned_cells(study.workspace, (cell.id for cell in cells)):
        yield _line(f"{count_with_noun(len(older), 'cell')} of an earlier form of this study: {', '.join(map(str, older))}")
    yield from _outdated_lines({cell.display_name: (records[cell.id], strategy_code_digest(cell.load())) for cell in cells})
    took = [record.seconds for record in records.values() if record.state == "done"]
    left = (len(cells) - len(took)) * sum(took) / max(len(took), 1)
    more = f", about {duration_text(left)} of one worker left" if left else ""
    failed = sum(record.state == "failed" for record in records.values())
    yield _line(f"{len(took)} of {len(cells)} cells done, {failed} failed{more}; the runs are in {study.workspace / 'cells'}")


def study_run(
    study: StudyArgument,
    data: DataOption = None,
    checkpoints: CheckpointsOption = None,
    workers: Annotated[int, typer.Option(min=1, max=1024, help="cells to run at a time, each in its own process")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="run only the cells with AXIS=VALUE; may be repeated")] = None,
    smoke: SmokeOption = False,
    small: SmallOption = False,
    workspace: WorkspaceOption = None,
    again: Annotated[
        bool, typer.Option("--again", help="run finished cells anew if their algorithm's code has changed")
    ] = False,
) -> None:
    """Run the cells of a study that are not done. After an interruption, the same command continues the study."""
    chosen = load(study, study_size(smoke, small), workspace)
    try:
        with stop_on_signals():
            given = Given(data and data.resolve(), checkpoints and checkpoints.resolve())
            done, failed = _run(chosen, only or [], given, workers, again)
    except KeyboardInterrupt:
        exit_interrupted(same_command())
    if chosen.size:
        show([pipeline_test_note(chosen.size)])
    if done:
        show([_line(f"their table: {study_command('compare', study, chosen.size, workspace)}")])
    if failed:
        raise typer.Exit(1)


def _run(study: Study, only: list[str], given: Given, workers: int, again: bool) -> tuple[int, int]:
    """Run the cells that fit `only`. Return how many are done and how many failed."""
    cells = Planner(given, study.workspace, again).plan(pick(study, only))
    stored = [(one, stored_record(one.cell.folder)) for one in cells]
    moved = [record for one, record in stored if has_other_data(record, one)]
    # generated data would replace those that the runs have read
    if given.data is None and (source := next((record.source for record in moved if record.source), "")):
        raise ConfigError(
            f"--data: missing; {count_with_noun(len(moved), 'run')} of this study read {source}; add --data "
            f"{shlex.quote(source)}, or use another --workspace"
        )
    if moved:
        show([_line(f"{count_with_noun(len(moved), 'run')} on other data: moved to set-aside", "yellow")])
    if back := sum(
        set_aside_folder(one).is_dir() for one, record in stored if record.state != "done" or has_other_data(record, one)
    ):
        show([_line(f"{count_with_noun(back, 'run')} on these data: restored from set-aside")])
    save_cells(study.workspace, {cell.id: cell.labels for cell in study.cells()})
    there = {
        one.cell.display_name: (record, one.code)
        for one in cells
        if (record := current_record(one.cell.folder)).data == one.data
    }
    show(_outdated_lines({name: stands for name, stands in there.items() if stands[0].state != "done"}))
    with StudyView(Console(), study.heading, cells) as view:
        ended = run_study(cells, workers, view)
    failed = [one.cell for one in cells if ended[one.cell.id].state == "failed"]
    done = sum(ended[one.cell.id].state == "done" for one in cells)
    show([_line(f"{done} of {len(cells)} cells done; the runs are in {study.workspace / 'cells'}")])
    show(_outdated_lines({one.cell.display_name: (ended[one.cell.id], one.code) for one in cells}))
    for cell in failed:
        show([_line(f"{cell.display_name}: failed: {ended[cell.id].reason}; its text is in {log_of(cell.folder)}", "red")])
    return done, len(failed)


def _outdated_lines(standing: Mapping[str, tuple[CellRecord, str]]) -> Iterator[Text]:
    """Yield lines that name the cells whose code has changed since they ran, and the remedy.

    `standing`: by cell name its record and the digest of its present code.
    """
    older = {name: record.state for name, (record, code) in standing.items() if record.is_outdated(code)}
    begun = [name for name, state in older.items() if state != "done"], "`consilium study run` sets that aside and begins anew"
    done = [name for name, state in older.items() if state == "done"], "`consilium study run --again` runs them anew"
    for how, (names, remedy) in {"begun": begun, "done": done}.items():
        if names:
            what = f"{count_with_noun(len(names), 'cell')} {how} by code that has changed since"
            yield _line(f"{what}: {first_names_text(names, 3)}; {remedy}", "yellow")
