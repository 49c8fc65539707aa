"""The commands `consilium privacy attack` and `invert`, which attack a trained model to measure what it reveals."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.options import CheckpointsOption, Format, FormatOption, emit, progress_bar
from consilium.cli.predict_evaluate import BestOption, DeviceOption, ModelArgument, SiteOption, StageOption, local_site_config
from consilium.client.model_store import UNCOVERED
from consilium.config.site import SIMULATION, SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.sanitize import shown
from consilium.report.tables import Table, columns
from consilium.use.attack import AttackResult, attack as attack_model, record_level_epsilon
from consilium.use.evaluate import read_site_config
from consilium.use.invert import draw, run_inversion
from consilium.use.model import TrainedModel, check_generated_data, open_model

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
    _print_attacks(found, opened, format)


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


def _print_attacks(found: list[AttackResult], opened: TrainedModel, format: Format) -> None:
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
    lines = [
        f"epsilon of one {unit} at delta {delta:g}, {sure}; an AUC of 0.5 is chance",
        f"promised: {shown(claim, 600)}" if covered else f"promised nothing of this model: {UNCOVERED}",
    ]
    if promised is not None:
        lines.append(
            f"that is of the whole site; of one record of it the same noise keeps epsilon {promised:.3g}: compare this"
        )
    emit(told, [Table(f"{opened.card.job}, {opened.card.name}: who was trained on?", heads, rows), *lines], format)
