"""The command `consilium evaluate`."""

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.model_options import BestOption, DeviceOption, ModelArgument, SiteOption, site_of
from consilium.cli.options import LONGEST_LINE, CheckpointsOption, Format, FormatOption, page, progress_bar, table
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.messages import Stage
from consilium.core.sanitize import line, shown
from consilium.report.matrices import PICTURE, VALUES
from consilium.report.tables import terminal
from consilium.tasks.registry import COUNT, HIGH, LOW, TASKS, Scores
from consilium.use.evaluate import cross_sites
from consilium.use.evaluate import evaluate as run
from consilium.use.model import TrainedModel, open_model


class Split(StrEnum):
    """Which samples of a data list are scored."""

    TRAINING = "training"
    VALIDATION = "validation"
    TEST = "test"


def evaluate(
    model: ModelArgument,
    data: Annotated[
        Path | None, typer.Option(help="a site's folder or data list; with --matrix the folder with all sites")
    ] = None,
    split: Annotated[Split, typer.Option(help="which samples")] = Split.TEST,
    site: SiteOption = None,
    stage: Annotated[
        Stage | None, typer.Option(help="which model of a run; default: global, with --matrix personalized")
    ] = None,
    best: BestOption = False,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="every site's model of a simulated run on every site's data")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="folder for the matrix as a picture and JSON")] = None,
    device: DeviceOption = "auto",
    checkpoints: CheckpointsOption = None,
    format: FormatOption = Format.TXT,
) -> None:
    """Score a trained model on any site's data, as training's closing evaluation does."""
    own = site_of(device, checkpoints)
    if matrix:
        if site is not None:
            raise ConfigError("--site: --matrix takes the models of all sites; leave one of them out")
        _matrix(model, data, stage or Stage.PERSONALIZED, own, split, best, out, format)
        return
    if data is None:
        raise ConfigError("--data: which data? Give a site's folder or data list, or --matrix for all sites of a simulated run")
    if out is not None:
        raise ConfigError("--out: is for --matrix; the scores of one model are printed (--format json)")
    opened = open_model(model, site, stage, own, best)
    _print(run(opened, data, split.value), opened, split, data, format)


def _print(found: Mapping[str, float], opened: TrainedModel, split: Split, data: Path, format: Format) -> None:
    if format is Format.JSON:
        told = {"model": str(opened.folder), "data": str(data), "split": str(split), "scores": dict(found)}
        print(json.dumps(told, indent=1, sort_keys=True))
        return
    scores: Scores = TASKS[opened.config.task.name].scores(opened.config.task)
    title = f"{opened.card.job}, {opened.card.name}: {split} of {data.name}{scores.remark}"
    rows = table("score", "value", "95 %")
    for name in shown_scores(found, scores):
        metric, _, part = name.partition("/")
        heading = f"{scores.heading(metric)} {part}".rstrip()
        rows.add_row(line(heading), f"{found[name]:.3f}", _interval(found, name))
    if COUNT in found:
        rows.add_row("n", f"{found[COUNT]:.0f}", "")
    typer.echo(shown(title))
    page().print(rows)
    for meaning in dict.fromkeys(meaning for metric, meaning in scores.meanings.items() if metric in found):
        typer.echo(meaning)
    for name in sorted(found):
        metric, _, part = name.partition(f"/{split}/")
        if part and metric == scores.too_small:
            what = f"nothing of {part} is left at the model's size, so that single pixels stand for it"
            typer.echo(shown(f"note: in {found[name]:.0f} {split} pictures {what}", LONGEST_LINE))


def shown_scores(found: Mapping[str, float], scores: Scores) -> list[str]:
    """Return the names of the scores for people: the leading one, those beside it, then those of each class."""
    whole = [scores.lead(found), *scores.beside]
    each = [name for metric in whole for name in sorted(found) if name.startswith(f"{metric}/")]
    ended = tuple(f"{end}" for end in (LOW, HIGH))
    return [name for name in dict.fromkeys([*whole, *each]) if name in found and not name.endswith(ended) and name != COUNT]


def _interval(found: Mapping[str, float], name: str) -> str:
    low, high = found.get(name + LOW), found.get(name + HIGH)
    return "-" if low is None or high is None else f"{low:.3f}–{high:.3f}"


def _matrix(
    run: Path, data: Path | None, stage: Stage, own: SiteConfig, split: Split, best: bool, out: Path | None, format: Format
) -> None:
    _check_free([out / PICTURE, out / VALUES] if out is not None else [])
    with progress_bar("evaluating", None, format) as advance:
        found = cross_sites(run, data, stage, own, split.value, best, lambda model, site: advance())
    if out is not None:
        found.write(out)
    if format is Format.JSON:
        print(json.dumps(found.to_dict(), indent=1))
        return
    console = page()
    console.print(terminal(found.table(), console.width))
    if out is not None:
        typer.echo(f"written: {out / PICTURE}, {out / VALUES}")


def _check_free(files: list[Path]) -> None:
    if there := [path for path in files if path.exists()]:
        raise ConfigError(f"--out: {there[0]}: is there already; give another folder")
