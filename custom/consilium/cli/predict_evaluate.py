"""The commands `consilium predict` and `evaluate`, and the options of all commands that open a trained model."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from consilium.cli.options import CheckpointsOption, Format, FormatOption, emit, progress_bar, show
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.messages import Stage
from consilium.core.sanitize import LONGEST_LINE, rich_line, shown
from consilium.federation.job import reads_texts
from consilium.report.results_table import PICTURE, VALUES
from consilium.report.tables import Table, columns, number_text
from consilium.tasks.registry import COUNT, HIGH, LOW, TASKS, Scores
from consilium.tasks.segmentation import PROMPTS
from consilium.training.device import pick_device
from consilium.use.evaluate import Split, cross_sites, evaluate as evaluate_model
from consilium.use.inputs import Prompts, find_inputs, read_prompts
from consilium.use.model import TrainedModel, open_model
from consilium.use.predict import OutputOptions, predict as predict_inputs
from consilium.use.predictor import Predictor

# model options ---------------------------------------------------------------------------------------------------------
# Options of the commands that open a trained model, and the settings of the site at which they run.

ModelArgument = Annotated[Path, typer.Argument(help="a run's folder, STUDY/AXIS=VALUE,..., or an adapter folder")]
SiteOption = Annotated[
    str | None, typer.Option(help="site whose model to take from a run; default: the model that all sites share")
]
StageOption = Annotated[Stage | None, typer.Option(help="model to take from a run; default: global")]
BestOption = Annotated[bool, typer.Option("--best", help="take the best model by validation instead of the last")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:NUMBER or mps")]


def local_site_config(device: str, checkpoints: Path | None) -> SiteConfig:
    """Return a site's settings with a device and a folder of checkpoints. Raises ConfigError for an unusable device."""
    try:
        site = SiteConfig(device=device, checkpoints=checkpoints)
        pick_device(device, "--device")
    except ValidationError:
        raise ConfigError(f"--device: {shown(device, 40)!r}: expected auto, cpu, cuda, cuda:NUMBER or mps") from None
    except ConsiliumError as error:
        raise ConfigError(str(error)) from None
    return site


# predict ---------------------------------------------------------------------------------------------------------------
# The command `consilium predict`.

NAMED = 20
"""Bad inputs that the terminal names, at most. The others are counted."""


def predict(
    model: ModelArgument,
    images: Annotated[Path, typer.Argument(help="a picture, volume, DICOM series or .jsonl, or a folder of them")],
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for the predictions")],
    site: SiteOption = None,
    stage: StageOption = None,
    best: BestOption = False,
    overlays: Annotated[bool, typer.Option("--overlays", help="also write pictures with the masks on them")] = False,
    probabilities: Annotated[bool, typer.Option("--probabilities", help="also write each class's probability")] = False,
    boxes: Annotated[
        Path | None, typer.Option(help="CSV or JSON file of boxes, for a model that takes boxes as prompts")
    ] = None,
    points: Annotated[
        Path | None, typer.Option(help="CSV or JSON file of points, for a model that takes points as prompts")
    ] = None,
    batch: Annotated[
        int, typer.Option(min=0, max=4096, help="pictures, planes or records per call of the model; 0: as in training")
    ] = 0,
    device: DeviceOption = "auto",
    checkpoints: CheckpointsOption = None,
    force: Annotated[bool, typer.Option("--force", help="replace existing files")] = False,
    format: FormatOption = "txt",
) -> None:
    """Predict masks or classes of new images, or answers to texts, with a trained model. Not a medical device."""
    opened = open_model(model, site, stage, local_site_config(device, checkpoints), best)
    beside: list[Path] = []
    inputs = find_inputs(images, reads_texts(opened.config), out, beside)
    predictor = Predictor(
        opened, batch or opened.config.training.batch_size, _read_given_prompts(opened, {"box": boxes, "point": points})
    )
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bar("predicting", len(inputs), format, *bar) as advance:
        outcome = predict_inputs(predictor, inputs, OutputOptions(out, overlays, probabilities, force), lambda _: advance())
    bad = [{"input": name, "reason": why} for name, why in outcome.bad]
    count = f"{len(outcome.written)} predicted" + (f", {len(bad)} bad" if bad else "")
    count += f", {len(beside)} skipped (DICOM objects that are not images)" if beside else ""
    told = {"out": str(out), "written": outcome.written, "bad": bad, "skipped": [str(path) for path in beside]}
    if format == "txt":
        rest = [rich_line(f"and {len(bad) - NAMED} more", "red")] if len(bad) > NAMED else []
        show([*(rich_line(one["reason"], "red") for one in bad[:NAMED]), *rest], errors=True)
    emit(told, [rich_line(f"{count}: {out}", limit=4000)], format)
    if bad:
        raise typer.Exit(1)


def _read_given_prompts(opened: TrainedModel, given: dict[str, Path | None]) -> Prompts | None:
    """Return the prompts from the file of the kind that the model takes; None if it takes none.

    `given`: files by kind of prompt. Raises ConfigError if the file is missing, or a file of another kind is given.
    """
    kind, found = getattr(opened.config.task, "prompt", "none"), None
    for one, path in given.items():
        many = PROMPTS[one].many
        if one == kind and path is None:
            raise ConfigError(
                f"--{many}: the model was trained with {many} as prompts (task.prompt: {kind}); give a CSV or JSON of them"
            )
        if one != kind and path is not None:
            takes = PROMPTS[kind].many if kind in PROMPTS else "no prompts"
            raise ConfigError(f"--{many}: the model takes {takes} (task.prompt: {kind}); leave the {many} out")
        if path is not None:
            found = read_prompts(path, kind, list(opened.config.task.classes))  # type: ignore[attr-defined]
    return found


# evaluate --------------------------------------------------------------------------------------------------------------
# The command `consilium evaluate`.


def evaluate(
    model: ModelArgument,
    data: Annotated[
        Path | None, typer.Option(help="a site's folder or data list; with --matrix, the folder of all sites")
    ] = None,
    split: Annotated[Split, typer.Option(help="split to score")] = "test",
    site: SiteOption = None,
    stage: Annotated[
        Stage | None, typer.Option(help="model to take from a run; default: global; with --matrix: personalized")
    ] = None,
    best: BestOption = False,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="score each site's model of a simulated run on each site's data")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="with --matrix: folder for the matrix as a picture and JSON")
    ] = None,
    device: DeviceOption = "auto",
    checkpoints: CheckpointsOption = None,
    format: FormatOption = "txt",
) -> None:
    """Score a trained model on any site's data, as the final evaluation of a run does."""
    own = local_site_config(device, checkpoints)
    if matrix:
        if site is not None:
            raise ConfigError("--site: --matrix takes the models of all sites; leave one of them out")
        _score_matrix(model, data, stage or Stage.PERSONALIZED, own, split, best, out, format)
        return
    if data is None:
        raise ConfigError("--data: which data? Give a site's folder or data list, or --matrix for all sites of a simulated run")
    if out is not None:
        raise ConfigError("--out: is for --matrix; the scores of one model are printed (--format json)")
    opened = open_model(model, site, stage, own, best)
    found = evaluate_model(opened, data, split)
    told = {"model": str(opened.folder), "data": str(data), "split": split, "scores": dict(sorted(found.items()))}
    emit(told, _score_lines(found, opened, split, data), format)


def _score_lines(found: Mapping[str, float], opened: TrainedModel, split: Split, data: Path) -> Iterator[Table | str]:
    """Yield the scores of a model as a table and notes."""
    scores: Scores = TASKS[opened.config.task.name].scores(opened.config.task)
    rows = []
    for name in score_names_to_show(found, scores):
        metric, _, part = name.partition("/")
        ends = [found.get(name + end) for end in (LOW, HIGH)]
        interval = "-" if None in ends else "–".join(map(number_text, ends))
        rows.append([f"{scores.heading(metric)} {part}".rstrip(), f"{found[name]:.3f}", interval])
    rows += [["n", f"{found[COUNT]:.0f}", ""]] if COUNT in found else []
    title = f"{opened.card.job}, {opened.card.name}: {split} of {data.name}{scores.remark}"
    yield Table(title, columns("score", "value", "95 %"), rows)
    yield from dict.fromkeys(meaning for metric, meaning in scores.meanings.items() if metric in found)
    for name in sorted(found):
        metric, _, part = name.partition(f"/{split}/")
        if part and metric == scores.too_small:
            what = f"nothing of {part} is left at the model's size, so that single pixels stand for it"
            yield shown(f"note: in {found[name]:.0f} {split} pictures {what}", LONGEST_LINE)


def score_names_to_show(found: Mapping[str, float], scores: Scores) -> list[str]:
    """Return the names of the scores to print: the leading score, the scores beside it, and the scores of each class."""
    whole = [scores.leading_name(found), *scores.beside]
    each = [name for metric in whole for name in sorted(found) if name.startswith(f"{metric}/")]
    ended = tuple(f"{end}" for end in (LOW, HIGH))
    return [name for name in dict.fromkeys([*whole, *each]) if name in found and not name.endswith(ended) and name != COUNT]


def _score_matrix(
    model: Path,
    data: Path | None,
    stage: Stage,
    own: SiteConfig,
    split: Split,
    best: bool,
    out: Path | None,
    format: Format,
) -> None:
    files = [] if out is None else [out / PICTURE, out / VALUES]
    if there := [path for path in files if path.exists()]:
        raise ConfigError(f"--out: {there[0]}: is there already; give another folder")
    with progress_bar("evaluating", None, format) as advance:
        found = cross_sites(model, data, stage, own, split, best, lambda model, site: advance())
    if out is not None:
        found.write(out)
    written = [f"written: {', '.join(map(str, files))}"] if files else []
    emit(asdict(found), [found.table(), *written], format)
