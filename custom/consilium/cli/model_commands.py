"""Commands that run a trained model: `predict`, `evaluate`, `privacy attack` and `invert`."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from consilium.cli.options import CheckpointsOption, FormatOption, emit, progress_bar, show
from consilium.client.model_store import UNCOVERED
from consilium.config.site import SIMULATION, SiteConfig
from consilium.core.errors import ConfigError, ConsiliumError, raise_first
from consilium.core.messages import Stage
from consilium.core.sanitize import LONGEST_LINE, rich_line, shown
from consilium.federation.job_assembly import reads_texts
from consilium.report.results_table import PICTURE, VALUES
from consilium.report.tables import Table, columns, number_text, only_true
from consilium.tasks.registry import COUNT, HIGH, LOW, TASKS, Scores
from consilium.tasks.segmentation import PROMPTS
from consilium.training.device import pick_device
from consilium.use.attack import attack as attack_model, record_level_epsilon
from consilium.use.invert import draw, run_inversion
from consilium.use.model import (
    Split,
    TrainedModel,
    check_generated_data,
    evaluate as evaluate_model,
    evaluate_cross_site,
    open_model,
    read_site_config,
)
from consilium.use.predict import OutputOptions, predict as predict_inputs
from consilium.use.predictor import Predictor, find_inputs, read_prompts

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
    boxes: Annotated[Path | None, typer.Option(help="CSV file of boxes, for a model that takes boxes as prompts")] = None,
    points: Annotated[Path | None, typer.Option(help="CSV file of points, for a model that takes points as prompts")] = None,
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
    kind, given, prompts = getattr(opened.config.task, "prompt", "none"), {"box": boxes, "point": points}, None
    takes = PROMPTS[kind].many if kind in PROMPTS else "no prompts"
    if wrong := [PROMPTS[one].many for one, path in given.items() if one != kind and path is not None]:
        raise ConfigError(f"--{wrong[0]}: the model takes {takes} (task.prompt: {kind}); leave the {wrong[0]} out")
    if kind in PROMPTS:
        if (file := given[kind]) is None:
            raise ConfigError(
                f"--{takes}: the model was trained with {takes} as prompts (task.prompt: {kind}); give a CSV file of them"
            )
        prompts = read_prompts(file, kind, list(opened.config.task.classes))  # type: ignore[attr-defined]
    predictor = Predictor(opened, batch or opened.config.training.batch_size, prompts)
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bar("predicting", len(inputs), format, *bar) as advance:
        outcome = predict_inputs(predictor, inputs, OutputOptions(out, overlays, probabilities, force), lambda _: advance())
    bad = [{"input": name, "reason": why} for name, why in outcome.bad]
    count = ", ".join(
        [f"{len(outcome.written)} predicted"]
        + [f"{len(bad)} bad"] * bool(bad)
        + [f"{len(beside)} skipped (DICOM objects that are not images)"] * bool(beside)
    )
    told = {"out": str(out), "written": outcome.written, "bad": bad, "skipped": [str(path) for path in beside]}
    if format == "txt":
        rest = [rich_line(f"and {len(bad) - NAMED} more", "red")] if len(bad) > NAMED else []
        show([*(rich_line(one["reason"], "red") for one in bad[:NAMED]), *rest], errors=True)
    emit(told, [rich_line(f"{count}: {out}", limit=4000)], format)
    if bad:
        raise typer.Exit(1)


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
    problems = {
        "--site: --matrix takes the models of all sites; leave one of them out": matrix and site is not None,
        "--out: is for --matrix; the scores of one model are printed (--format json)": out is not None and not matrix,
    }
    raise_first(problems)
    if matrix:
        files = [] if out is None else [out / PICTURE, out / VALUES]
        if there := [path for path in files if path.exists()]:
            raise ConfigError(f"--out: {there[0]}: is there already; give another folder")
        with progress_bar("evaluating", None, format) as advance:
            table = evaluate_cross_site(
                model, data, stage or Stage.PERSONALIZED, own, split, best, lambda model, site: advance()
            )
        if out is not None:
            table.write(out)
        emit(asdict(table), [table.table(), *[f"written: {', '.join(map(str, files))}"] * bool(files)], format)
        return
    if data is None:
        raise ConfigError("--data: which data? Give a site's folder or data list, or --matrix for all sites of a simulated run")
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
    shown_names = dict.fromkeys([*whole, *each])
    return [name for name in shown_names if name in found and not name.endswith((LOW, HIGH)) and name != COUNT]


DataOption = Annotated[Path | None, typer.Option(help="the site's folder or data list in the run; default: its phantoms")]


def attack(
    model: ModelArgument,
    data: DataOption = None,
    site: SiteOption = None,
    stage: StageOption = None,
    best: BestOption = False,
    shadow: Annotated[
        list[Path] | None,
        typer.Option(help="a run on another part of the data list (data.most_training, other seed); may be repeated"),
    ] = None,
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.999, help="confidence that all lower bounds on epsilon hold")
    ] = 0.95,
    device: DeviceOption = "auto",
    checkpoints: CheckpointsOption = None,
    format: FormatOption = "txt",
) -> None:
    """Try to find out on whose data a model was trained. Print a lower bound of epsilon that this proves, and the promised one.

    A bound near 0 does not prove privacy, because another attack may do better. A bound above the promised epsilon of the same
    unit proves that the promise is broken.
    """
    own = local_site_config(device, checkpoints)
    opened = open_model(model, site, stage, own, best)
    shadows = [open_model(one, site, stage, own, best) for one in shadow or []]
    given, name = _find_attacked_site(opened, data, site)
    with tempfile.TemporaryDirectory() as folder, progress_bar("losses", None, format) as advance:
        found = attack_model(opened, given, name, shadows, Path(folder), confidence, advance)
    private = opened.config.privacy
    unit, delta = ("patient" if private and private.unit == "patient" else "record"), private.delta if private else 1e-5
    covered = UNCOVERED not in opened.card.notes
    claim = opened.card.privacy or "none: the model was trained without privacy"
    promised = record_level_epsilon(opened) if covered else None
    told = {
        "model": str(opened.folder),
        "claim": claim,
        "covered": covered,
        "unit": unit,
        "delta": delta,
        "of_one_record": promised,
        "attacks": [asdict(one) for one in found],
    }
    rows = [
        [one.attack, str(one.units), f"{one.auc:.3f}", str(one.guesses), str(one.correct), f"{one.epsilon:.3g}"]
        for one in found
    ]
    heads = columns("attack", f"{unit}s", "AUC", "guesses", "right", "epsilon at least")
    sure = f"with confidence {found[0].confidence:g} for all {len(found)} bounds together"
    lines = {
        f"epsilon of one {unit} at delta {delta:g}, {sure}; an AUC of 0.5 is chance": True,
        f"promised: {shown(claim, 600)}": covered,
        f"promised nothing of this model: {UNCOVERED}": not covered,
        f"that is of the whole site; of one record of it the same noise keeps epsilon {promised or 0:.3g}: compare this": (
            promised is not None
        ),
    }
    emit(told, [Table(f"{opened.card.job}, {opened.card.name}: who was trained on?", heads, rows), *only_true(lines)], format)


def invert(
    model: ModelArgument,
    data: DataOption = None,
    site: SiteOption = None,
    batch: Annotated[int, typer.Option(min=1, max=16, help="pictures in the site's training step")] = 1,
    sum: Annotated[int, typer.Option(min=2, max=100, help="sites in the sum that a server with secure aggregation sees")] = 3,
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="steps of the attacker's search")] = 400,
    output: Annotated[Path, typer.Option("--output", "-o", help="PNG file to write")] = Path("inversion.png"),
    stage: StageOption = None,
    device: DeviceOption = "auto",
    checkpoints: CheckpointsOption = None,
    format: FormatOption = "txt",
) -> None:
    """Try to reconstruct a site's training pictures from one update: from the update itself, from a sum over sites, and masked.

    The PNG file shows training pictures, so it must stay at the site. A bad reconstruction does not prove privacy.
    """
    opened = open_model(model, site, stage, local_site_config(device, checkpoints))
    given, name = _find_attacked_site(opened, data, site)
    with tempfile.TemporaryDirectory() as folder, progress_bar("search", 3 * steps, format) as advance:
        found = run_inversion(opened, given, name, Path(folder), batch, sum, steps, advance)
    draw(output, found)
    values = [{name: value for name, value in vars(one).items() if name != "pictures"} for one in found.attacks]
    count = len(found.pictures)
    about = {"picture": str(output), "pictures": count, "candidates": found.candidates, "psnr_of_mean": found.guess}
    heads = columns("seen", "PSNR, dB", f"picked of {found.candidates}", "by chance", "cosine distance left")
    rows = [
        [one.attack, f"{one.psnr:.1f}", f"{one.told} of {count}", f"{one.chance:.2f}", f"{one.distance:.3g}"]
        for one in found.attacks
    ]
    text = f"the mean of all candidates, which needs no update, has a PSNR of {found.guess:.1f}; picture: {output}"
    emit(about | {"attacks": values}, [Table("", heads, rows), text], format)


def _find_attacked_site(opened: TrainedModel, data: Path | None, site: str | None) -> tuple[SiteConfig, str]:
    """Return the settings of the site whose samples are attacked, and the site's name in the run. Raises ConfigError."""
    if data is not None:
        return read_site_config(data, opened.config), site or data.resolve().name
    run = next((one for one in opened.folder.resolve().parents if (one / SIMULATION).is_file()), opened.folder)
    check_generated_data(run, opened, "the site's folder or data list")
    if site is None and opened.card.site == "":
        raise ConfigError("--site: whose phantoms? Give a site's name, such as site-1")
    return SiteConfig(), site or opened.card.site
