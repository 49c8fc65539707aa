"""The command `consilium predict`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from consilium.cli.model_options import BestOption, DeviceOption, ModelArgument, SiteOption, StageOption, site_of
from consilium.cli.options import CheckpointsOption, Format, FormatOption, progress_bar
from consilium.core.errors import ConfigError
from consilium.core.sanitize import line
from consilium.tasks.segmentation import PROMPTS
from consilium.use.inputs import Prompts, find_inputs, read_prompts
from consilium.use.model import TrainedModel, open_model
from consilium.use.predict import Outcome, OutputOptions
from consilium.use.predict import predict as run
from consilium.use.predictor import Predictor

NAMED = 20
"""Bad inputs that are named on the terminal; the others are counted."""


def predict(
    model: ModelArgument,
    images: Annotated[Path, typer.Argument(help="a picture, volume, DICOM series or .jsonl, or a folder of them")],
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for what is predicted")],
    site: SiteOption = None,
    stage: StageOption = None,
    best: BestOption = False,
    overlays: Annotated[bool, typer.Option("--overlays", help="also a picture with the mask drawn on it")] = False,
    probabilities: Annotated[bool, typer.Option("--probabilities", help="also each class's probability")] = False,
    boxes: Annotated[Path | None, typer.Option(help="CSV or JSON of boxes, for a task prompted with them")] = None,
    points: Annotated[Path | None, typer.Option(help="CSV or JSON of points, for a task prompted with them")] = None,
    batch: Annotated[int, typer.Option(min=0, max=4096, help="pictures, planes or records at once; 0: as in training")] = 0,
    device: DeviceOption = "auto",
    checkpoints: CheckpointsOption = None,
    force: Annotated[bool, typer.Option("--force", help="replace files that are there")] = False,
    format: FormatOption = Format.TXT,
) -> None:
    """Let a trained model predict new images (masks, classes) or texts (answers). Not a medical device."""
    opened = open_model(model, site, stage, site_of(device, checkpoints), best)
    beside: list[Path] = []
    inputs = find_inputs(images, opened.config.task.name in ("language", "report"), out, beside)
    predictor = Predictor(opened, batch or opened.config.training.batch_size, _prompts(opened, {"box": boxes, "point": points}))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bar("predicting", len(inputs), format, *columns) as advance:
        outcome = run(predictor, inputs, OutputOptions(out, overlays, probabilities, force), lambda _: advance())
    _print(outcome, beside, out, format)
    if outcome.bad:
        raise typer.Exit(1)


def _prompts(opened: TrainedModel, given: dict[str, Path | None]) -> Prompts | None:
    """Return the prompts that the model takes, of the files given by kind. Raises ConfigError where they are not its own."""
    kind, found = getattr(opened.config.task, "prompt", "none"), None
    for one, path in given.items():
        many = PROMPTS[one].many
        if one == kind and path is None:
            what = f"the model was trained with {many} as prompts (task.prompt: {kind})"
            raise ConfigError(f"--{many}: {what}; give a CSV or JSON of them")
        if one != kind and path is not None:
            takes = PROMPTS[kind].many if kind in PROMPTS else "no prompts"
            raise ConfigError(f"--{many}: the model takes {takes} (task.prompt: {kind}); leave the {many} out")
        if path is not None:
            found = read_prompts(path, kind, list(opened.config.task.classes))  # type: ignore[attr-defined]
    return found


def _print(outcome: Outcome, beside: list[Path], out: Path, format: Format) -> None:
    if format is Format.JSON:
        bad = [{"input": name, "reason": why} for name, why in outcome.bad]
        told = {"out": str(out), "written": outcome.written, "bad": bad, "skipped": [str(path) for path in beside]}
        print(json.dumps(told, indent=1))
        return
    errors = Console(stderr=True, soft_wrap=True)
    for _, why in outcome.bad[:NAMED]:
        errors.print(line(why, "red"))
    if len(outcome.bad) > NAMED:
        errors.print(line(f"and {len(outcome.bad) - NAMED} more", "red"))
    count = f"{len(outcome.written)} predicted" + (f", {len(outcome.bad)} bad" if outcome.bad else "")
    if beside:
        count += f", {len(beside)} skipped (DICOM objects that are no images)"
    Console(soft_wrap=True, highlight=False).print(line(f"{count}: {out}", limit=4000))
