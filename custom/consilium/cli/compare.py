"""The commands `consilium compare` and `report`, which write runs and studies as tables, pictures and pages."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
from rich.console import Console

from consilium.cli.options import (
    FILE_WIDTH,
    WorkspaceOption,
    pipeline_test_note,
    show,
    study_command,
    study_size,
    table_console,
)
from consilium.core.errors import ConfigError
from consilium.core.lazy import call
from consilium.core.messages import Stage
from consilium.core.sanitize import first_names_text, rich_line, shown
from consilium.core.storage import PUBLIC, make_private_folder, name_path_in_errors, write_atomic
from consilium.report.compare import COLUMN, PAGE
from consilium.report.compare.comparability import (
    Group,
    MissingRun,
    check_one_tokenizer,
    group_comparable,
    mixed_code_notes,
    with_short_names,
)
from consilium.report.compare.run_tables import settings_tables
from consilium.report.compare.tables import ROW, Published, as_json, comparison_tables, method_of, read_published, records
from consilium.report.predictions import CASES
from consilium.report.run_record import CELLS, RunRecord, cell_folder, read_finished_run, read_run
from consilium.report.tables import csv_text, latex_text, markdown_text, terminal_table
from consilium.report.untrusted_files import subfolders
from consilium.study.definition import Size, Study, load
from consilium.study.records import current_record

YAML = (".yaml", ".yml")
"""Endings of a study's file. Other files among the paths, such as logs, are left out."""


TableFormat = Literal["txt", "md", "tex", "csv", "json", "html"]
"""Formats of tables."""


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="STUDY|RUN...", help="a study's file or name, or runs: folders or STUDY/AXIS=VALUE"),
    ],
    format: Annotated[
        TableFormat | None,
        typer.Option(
            "--format", help="csv: a row per score; html: a page with pictures; default: by the ending of -o, else txt"
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="file to write, instead of the screen")
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="folder for the pictures as PNG, PDF, SVG and CSV")
    ] = None,
    columns: Annotated[int, typer.Option(min=1, max=2, help="width of pictures in columns of a paper: 3.5 or 7.16 inches")] = 1,
    model: Annotated[Literal["global", "personalized"], typer.Option(help="model for ranks, tests and pictures")] = "global",
    metric: Annotated[
        str, typer.Option(help="score to compare, such as f1 or dice/cup; default: the task's leading score")
    ] = "",
    against: Annotated[str, typer.Option(metavar="METHOD", help="test all other methods against this one only")] = "",
    smoke: Annotated[bool, typer.Option("--smoke", help="compare the runs of `study run --smoke`")] = False,
    small: Annotated[bool, typer.Option("--small", help="compare the runs of `study run --small`")] = False,
    workspace: WorkspaceOption = None,
) -> None:
    """Compare runs: means over sites and seeds, paired tests, ranks, bytes, seconds, epsilon, pictures."""
    runs = [(path if path.exists() or "=" not in path.name else cell_folder(path)) for path in runs]
    named = [path for path in runs if not path.is_dir() and (path.suffix in YAML or not path.is_file())]
    if len(runs) > 1 and named:
        raise ConfigError(f"{named[0]}: no folder of a run; give folders of runs, or one study and nothing else")
    study = load(runs[0], study_size(smoke, small), workspace) if len(runs) == 1 and not runs[0].is_dir() else None
    groups, notes, published = _study_groups(study, runs[0], workspace) if study else (*comparable_groups(runs), [])
    notes += [one for group in groups for one in mixed_code_notes(group)]
    stage = Stage(model)
    _check_metric_and_method(groups, metric, against)
    tables = comparison_tables(groups, stage, metric or None, against or None, published)
    kind = format or ("txt" if output is None else output.suffix[1:])
    if kind not in get_args(TableFormat):
        raise ConfigError(f"--output: {output}: no format of this ending; end it in .{', .'.join(get_args(TableFormat))}")
    if pictures is not None:
        with name_path_in_errors(pictures):
            width = COLUMN if columns == 1 else PAGE
            files, undrawn = call(
                "consilium.report.compare.figures:draw", make_private_folder(pictures), groups, stage, metric or None, width
            )
        if kind == "html":  # the page names the pictures that it lacks itself
            show((f"note: {shown(note, 2000)}" for note in undrawn), errors=True)
        else:
            notes += undrawn
        names = [file.name for file in files if file.suffix in (".png", ".tex")]
        if names:
            typer.echo(f"{pictures}: {', '.join(names)}; PDF, SVG and CSV beside them", err=True)
    if output is not None or kind != "txt":  # on a screen the scores come first, and `report` shows a run's settings
        tables += settings_tables(groups, study.config.about if study else "")
    if kind == "csv":
        show((f"note: {shown(note, 2000)}" for note in notes), errors=True)
        text = csv_text(records(groups, metric), ROW)
    elif kind == "json":
        text = as_json(groups, tables, notes, metric) + "\n"
    elif kind == "html":
        source = runs[0] if len(runs) == 1 else Path("comparison")
        name = study.heading if study else source.resolve().name
        text = call(f"{PAGES}:study_page", name, str(source), groups, tables, notes, stage, metric)
    elif kind != "txt":
        text = (markdown_text if kind == "md" else latex_text)(tables, notes)
    else:
        console = table_console() if output is None else Console(width=FILE_WIDTH)
        with console.capture() as written:
            for table in tables:
                console.print(terminal_table(table, console.width))
            for note in notes:
                console.print(rich_line(f"note: {note}", "yellow", limit=2000))
        text = written.get()
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_atomic(output, text.encode(errors="backslashreplace"), PUBLIC)
        typer.echo(f"{output}: written")


def comparable_groups(paths: Sequence[Path]) -> tuple[list[Group], list[str]]:
    """Return the groups of comparable runs, and a line for each run that is left out or not comparable with the first."""
    found, files = list[RunRecord](), [str(path) for path in paths if not path.is_dir()]
    notes = [f"left out: {first_names_text(files, 1)}: no folder of a run"] if files else []
    for path in dict.fromkeys(path.resolve() for path in paths if path.is_dir()):
        try:
            run = read_finished_run(path)
        except ConfigError as error:
            notes.append(f"left out: {error}".replace("\n", "; "))
            continue
        found.append(run) if run.split else notes.append(f"left out: {path}: nothing was scored in the end")
    if not found:
        raise ConfigError("\n".join(notes))
    groups, why = group_comparable(with_short_names(found))
    notes += [f"does not compare with the first run: {one}" for one in why]
    return groups, notes + [one for group in groups for one in group.left]


def _study_groups(study: Study, path: Path, workspace: Path | None) -> tuple[list[Group], list[str], list[Published]]:
    """Return the groups of a study's finished runs, notes on missing runs, and the published numbers.

    `path`, `workspace`: the study's, as the user gave them.
    """
    axes = study.config.compared_axes
    found: list[RunRecord] = []
    absent: list[MissingRun] = []
    for cell in study.cells():
        labels = {axis: cell.labels[axis] for axis in axes}
        try:
            run = read_finished_run(cell.folder, cell.display_name, labels)
            if run.split is None:
                raise ConfigError("nothing was scored in the end; delete its folder and run it anew")
            record = current_record(cell.folder)
            found.append(replace(run, data=(cell.data, record.data), whole=record.whole))
        except ConfigError as error:
            record = current_record(cell.folder)
            known = {"locked": "still running", "done": shown(str(error).replace("\n", "; "), 300)}
            state = f"{record.state}: {record.reason}" if record.reason else f"not done ({record.state})"
            absent.append(MissingRun(labels, cell.load().training.seed, known.get(record.state, state)))
    if not found:
        data = ["--data", "FOLDER"] if any(cell.load().data.phantoms is None for cell in study.cells()) else []
        command = study_command("study run", path, study.size, workspace, *data)
        place = study.workspace.absolute() / CELLS
        sizes = (f"--{size}" for size in get_args(Size) if size and Path(f"{study.workspace}-{size}", CELLS).is_dir())
        other = "".join(f"; for the runs of {size} add {size}" for size in sizes if not (study.size or workspace))
        raise ConfigError(f"{path}: in {place} (of --workspace) no cell is done; run it: {command}{other}")
    groups, why = group_comparable(found, absent)
    numbers = read_published(study.config.published, axes, study.config.floor)
    notes = [f"left out by the study: {' '.join(one[axis] for axis in axes)}: {reason}" for one, reason in study.excluded()]
    notes = [
        *dict.fromkeys(notes),
        *(f"other data: {one}" for one in why),
        *([pipeline_test_note(study.size)] * bool(study.size)),
    ]
    if study.size and numbers:
        return groups, [*notes, f"published numbers and floor are of the whole study, not of --{study.size}: not shown"], []
    alone = sum(all(method_of(one, group) is None for group in groups) for one in numbers if not one.floor)
    return groups, [*notes, *([f"{alone} published numbers are of methods without a finished run"] if alone else [])], numbers


def _check_metric_and_method(groups: Sequence[Group], metric: str, against: str) -> None:
    """Raise ConfigError if no run has the metric, or no group has the method."""
    scores = [one for group in groups for run in group.runs.values() for one in run.latest_scores.values()]
    scored = {name.split("/", 2)[2] for one in scores for name in one if name.count("/") > 1}
    if metric and metric not in scored:
        some = ", ".join(sorted(name for name in scored if not name.startswith("confusion"))[:12])
        raise ConfigError(f"--metric: {shown(metric, 80)!r}: no run has it; take one of {some}")
    check_one_tokenizer(groups, metric)
    methods = list(dict.fromkeys(method for group in groups for method in group.methods))
    if against and against not in methods:
        raise ConfigError(f"--against: {shown(against, 80)!r}: no such method; take one of {'; '.join(methods[:12])}")


# report ----------------------------------------------------------------------------------------------------------------
# The command `consilium report`.

FILE = "report.html"
PAGES = "consilium.report.page.run_page"


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run, or STUDY/AXIS=VALUE,...")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="default: report.html in the folder")
    ] = None,
    site: Annotated[
        str, typer.Option(metavar="NAME", help="write this site's own page: its pictures, what left it, its ledger")
    ] = "",
) -> None:
    """Write a run, finished or not, as one HTML page that works offline in any browser, in light and dark, and in print."""
    if (run / CELLS).is_dir() and not (run / "job.yaml").exists():
        raise ConfigError(f"{run}: is a study's; its page is of `consilium compare STUDY -o report.html`")
    run = run if run.is_dir() else cell_folder(run)
    if not run.is_dir():
        raise ConfigError(f"{shown(run, 200)}: no such folder; give the folder of `simulate --workspace`, or of a study's run")
    target = output or (call(f"{PAGES}:site_folder", run, site) if site else run) / FILE
    if target.is_dir():
        raise ConfigError(f"--output: {target}: is a folder; give a file, such as {target / FILE}")
    names = [one.name for one in subfolders(run / "sites")] or ["NAME"] * (run / CASES).is_file()
    if names and not site and not (run / "job.yaml").exists():
        raise ConfigError(f"{run}: is a site's; name it: --site {shown(names[0], 80)}")
    text = call(f"{PAGES}:site_page", run, site) if site else call(f"{PAGES}:run_page", read_run(run))
    write_atomic(target, text.encode(errors="backslashreplace"))
    typer.echo(f"{target}: written")
