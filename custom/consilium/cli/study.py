"""The commands `consilium study show` and `run`: grids of runs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from consilium.cli.options import (
    CheckpointsOption,
    Format,
    FormatOption,
    WorkspaceOption,
    page,
    pipeline_note,
    study_command,
    study_size,
)
from consilium.cli.resume_hint import again as same_command
from consilium.cli.resume_hint import exit_interrupted, stoppable
from consilium.config.code_digest import code_of
from consilium.config.site import Given
from consilium.core.sanitize import line, number_of
from consilium.report.run_record import earlier_cells, keep_cells
from consilium.study.estimate import bytes_of, fewer_steps
from consilium.study.plan import Planner
from consilium.study.records import CellRecord, log_of, record_of
from consilium.study.runner import run_study
from consilium.study.study import Cell, Study, load, named, pick
from consilium.study.view import StudyView, cells_table, duration

StudyArgument = Annotated[Path, typer.Argument(help="a file, or a name in jobs/studies")]
SmokeOption = Annotated[bool, typer.Option("--smoke", help="seconds: a tiny model, generated data")]
SmallOption = Annotated[bool, typer.Option("--small", help="minutes: tests the pipeline on your data, not the methods")]
DataOption = Annotated[Path | None, typer.Option(help="folder with a folder per site, as for simulate")]


def study_show(
    study: StudyArgument,
    data: DataOption = None,
    checkpoints: CheckpointsOption = None,
    smoke: SmokeOption = False,
    small: SmallOption = False,
    workspace: WorkspaceOption = None,
    format: FormatOption = Format.TXT,
) -> None:
    """Show a study's cells: how far each is, what it took, the MB it will send, and what is left out and why.

    With the --data and --checkpoints of `study run` it tells which cells ran on other data, and the MB of all sites there.
    """
    chosen = load(study, study_size(smoke, small), workspace)
    cells = chosen.cells()
    records, sizes = _standing(chosen, _given(data, checkpoints))
    if format is Format.JSON:
        more = {
            c.id: {"outdated": records[c.id].outdated(code_of(c.load())), "labels": c.labels, "folder": str(c.folder)}
            for c in cells
        }
        rows = [vars(records[c.id]) | more[c.id] | {"bytes": sizes[c.id]} for c in cells]
        print(json.dumps({"study": chosen.name, "cells": rows, "excluded": chosen.excluded()}, indent=1, default=str))
        return
    _print_study(chosen, records, sizes)


def _given(data: Path | None, checkpoints: Path | None) -> Given:
    return Given(data and data.resolve(), checkpoints and checkpoints.resolve())


def _standing(study: Study, given: Given) -> tuple[dict[str, CellRecord], dict[str, int | None]]:
    """Return how far each cell is and the bytes it will send; with a folder of data, as it stands to them."""
    records = {cell.id: record_of(cell.folder) for cell in study.cells()}
    if given.data is None:
        return records, {cell.id: bytes_of(cell) for cell in study.cells()}
    planned = Planner(given, study.workspace).plan(study.cells())
    sizes = {one.cell.id: bytes_of(one.cell, len(one.names)) for one in planned}
    return {one.cell.id: records[one.cell.id].held(one.data) for one in planned}, sizes


def _print_study(study: Study, records: dict[str, CellRecord], sizes: dict[str, int | None]) -> None:
    cells, console = study.cells(), page()
    console.print(cells_table(f"{study.heading}: {study.config.about}", cells, records, sizes, console.width))
    for cell in (one for one in cells if records[one.id].state == "failed"):
        _say(f"{cell.name}: failed: {records[cell.id].reason}")
    for labels, reason in study.excluded():
        _say(f"{named(labels)}: left out: {reason}")
    _tell_fewer_steps(cells)
    if None in sizes.values():
        _say("MB: --data FOLDER tells how many sites there are")
    if older := earlier_cells(study.workspace, study.title, (cell.id for cell in cells)):
        _say(f"{number_of(len(older), 'cell')} of an earlier form of this study: {', '.join(map(str, older))}")
    _tell_outdated({cell.name: (records[cell.id], code_of(cell.load())) for cell in cells})
    took = [record.seconds for record in records.values() if record.state == "done"]
    left = (len(cells) - len(took)) * sum(took) / max(len(took), 1)
    more = f", about {duration(left)} of one worker left" if left else ""
    failed, other = (sum(record.state == state for record in records.values()) for state in ("failed", "other data"))
    failed_or = f"{failed} failed" + (f", {other} of other data, which `study run` runs anew" if other else "")
    _say(f"{len(took)} of {len(cells)} cells done, {failed_or}{more}; the runs are in {study.workspace / 'cells'}")


def study_run(
    study: StudyArgument,
    data: DataOption = None,
    checkpoints: CheckpointsOption = None,
    workers: Annotated[int, typer.Option(min=1, max=1024, help="cells at a time, each in a process of its own")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="AXIS=VALUE; twice for two values or two axes")] = None,
    smoke: SmokeOption = False,
    small: SmallOption = False,
    workspace: WorkspaceOption = None,
    again: Annotated[bool, typer.Option("--again", help="run cells anew that are done by code that has changed since")] = False,
) -> None:
    """Run what is left of a study: finished cells stay, interrupted ones go on. The same command again goes on."""
    chosen = load(study, study_size(smoke, small), workspace)
    try:
        with stoppable():
            done, failed = _run(chosen, only or [], _given(data, checkpoints), workers, again)
    except KeyboardInterrupt:
        exit_interrupted(same_command())
    if chosen.size:
        _say(pipeline_note(chosen.size))
    if done:
        _say(f"their table: {study_command('compare', study, chosen.size, workspace)}")
    if failed:
        raise typer.Exit(1)


def _run(study: Study, only: list[str], given: Given, workers: int, again: bool) -> tuple[int, int]:
    """Run the cells that `only` leaves; return how many are done and how many failed."""
    cells = Planner(given, study.workspace, again).plan(pick(study, only))
    keep_cells(study.workspace, study.title, {cell.id: cell.labels for cell in study.cells()}, study.config.named_axes)
    there = {one.cell.name: (record_of(one.cell.folder).held(one.data), one.code) for one in cells}
    _tell_outdated({name: stands for name, stands in there.items() if stands[0].state != "done"})
    _tell_fewer_steps([one.cell for one in cells])
    with StudyView(Console(), study.heading, cells, workers) as view:
        ended = run_study(cells, workers, view)
    failed = [one.cell.name for one in cells if ended[one.cell.id].state == "failed"]
    done = sum(ended[one.cell.id].state == "done" for one in cells)
    _say(f"{done} of {len(cells)} cells done; the runs are in {study.workspace / 'cells'}")
    _tell_outdated({one.cell.name: (ended[one.cell.id], one.code) for one in cells})
    for one in cells:
        if (ended_so := ended[one.cell.id]).state == "failed":
            _say(f"{one.cell.name}: failed: {ended_so.reason}; its text is in {log_of(one.cell.folder)}", "red")
    return done, len(failed)


def _tell_fewer_steps(cells: Sequence[Cell]) -> None:
    """Say which cells on pooled data are not an upper bound, because they train less than all sites together."""
    if names := [cell.name for cell in fewer_steps(cells)]:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        what = "pooled data see fewer samples a round than all sites together, so they are not an upper bound"
        _say(f"{'; '.join(names[:3])}{more}: {what}; raise its training.local_steps, or set training.local_epochs", "yellow")


def _tell_outdated(standing: Mapping[str, tuple[CellRecord, str]]) -> None:
    """Say which cells, by name, ran by other code than theirs is now."""
    older = {name: record.state == "done" for name, (record, code) in standing.items() if record.outdated(code)}
    begun, done = ([name for name, whole in older.items() if whole is wanted] for wanted in (False, True))
    _tell_older("begun", begun, "`consilium study run` sets that aside and begins anew")
    _tell_older("done", done, "`consilium study run --again` runs them anew")


def _tell_older(how: str, names: list[str], remedy: str) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        _say(
            f"{number_of(len(names), 'cell')} {how} by code that has changed since: {'; '.join(names[:3])}{more}; {remedy}",
            "yellow",
        )


def _say(text: str, style: str = "") -> None:
    Console(soft_wrap=True).print(line(text, style, limit=4000))
