"""The commands `consilium privacy attack` and `invert`."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.model_options import BestOption, DeviceOption, ModelArgument, SiteOption, StageOption, site_of
from consilium.cli.options import CheckpointsOption, Format, FormatOption, page, progress_bar, table
from consilium.client.model_store import UNCOVERED
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.sanitize import shown
from consilium.use.attack import AttackResult, of_one_record
from consilium.use.attack import attack as run
from consilium.use.evaluate import read_site
from consilium.use.invert import Inversion, draw, inversion
from consilium.use.model import TrainedModel, open_model

DataOption = Annotated[Path | None, typer.Option(help="the site's folder or data list that the run had; default: its phantoms")]


def attack(
    model: ModelArgument,
    data: DataOption = None,
    site: SiteOption = None,
    stage: StageOption = None,
    best: BestOption = False,
    shadow: Annotated[
        list[Path] | None, typer.Option(help="a run on another part of the list (data.most_training, other seed); repeat")
    ] = None,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999, help="of the lower bounds on epsilon, all together")] = 0.95,
    device: DeviceOption = "auto",
    checkpoints: CheckpointsOption = None,
    format: FormatOption = Format.TXT,
) -> None:
    """Try to tell who a model was trained on, and print the epsilon that this proves at least beside what was promised.

    A bound near 0 proves no privacy: another attack may do better. A bound over what is promised for the same unit proves that
    it is not kept.
    """
    own = site_of(device, checkpoints)
    opened = open_model(model, site, stage, own, best)
    shadows = [open_model(one, site, stage, own, best) for one in shadow or []]
    given, name = _data(opened, data, site)
    with tempfile.TemporaryDirectory() as folder, progress_bar("losses", None, format) as advance:
        found = run(opened, given, name, shadows, Path(folder), confidence, advance)
    _print(found, opened, format)


def invert(
    model: ModelArgument,
    data: DataOption = None,
    site: SiteOption = None,
    batch: Annotated[int, typer.Option(min=1, max=16, help="pictures in the site's step")] = 1,
    sum: Annotated[int, typer.Option(min=2, max=100, help="sites in the sum that secure aggregation would open")] = 3,
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="of the attacker's search")] = 400,
    output: Annotated[Path, typer.Option("--output", "-o", help="the picture to write (PNG)")] = Path("inversion.png"),
    stage: StageOption = None,
    device: DeviceOption = "auto",
    checkpoints: CheckpointsOption = None,
    format: FormatOption = Format.TXT,
) -> None:
    """Try to draw a site's training pictures from one update of a model: as it is, in a sum of sites, and under masks.

    The picture that is written shows training pictures: it is the site's own to keep. A bad drawing proves no privacy.
    """
    opened = open_model(model, site, stage, site_of(device, checkpoints))
    given, name = _data(opened, data, site)
    with tempfile.TemporaryDirectory() as folder, progress_bar("search", 3 * steps, format) as advance:
        found = inversion(opened, given, name, Path(folder), batch, sum, steps, advance)
    draw(output, found)
    _print_inversion(found, output, format)


def _print_inversion(found: Inversion, output: Path, format: Format) -> None:
    values = [{name: value for name, value in vars(one).items() if name != "pictures"} for one in found.attacks]
    about = {
        "picture": str(output),
        "pictures": len(found.pictures),
        "candidates": found.candidates,
        "psnr_of_mean": found.guess,
    }
    if format is Format.JSON:
        print(json.dumps(about | {"attacks": values}, indent=1))
        return
    rows = table("seen", "PSNR, dB", f"picked of {found.candidates}", "by chance", "cosine distance left")
    for one in found.attacks:
        told = f"{one.told} of {len(found.pictures)}"
        rows.add_row(one.attack, f"{one.psnr:.1f}", told, f"{one.chance:.2f}", f"{one.distance:.3g}")
    page().print(rows)
    typer.echo(f"the mean of all candidates, which needs no update, has a PSNR of {found.guess:.1f}; picture: {output}")


def _data(opened: TrainedModel, data: Path | None, site: str | None) -> tuple[SiteConfig, str]:
    """Return the site whose samples are attacked, and its name in the run. Raises ConfigError."""
    if data is not None:
        return read_site(data, opened.config), site or data.resolve().name
    if opened.config.data.phantoms is None:
        raise ConfigError("--data: give the site's folder or data list that the run was given")
    if site is None and opened.card.site == "":
        raise ConfigError("--site: whose phantoms? Give a site's name, such as site-1")
    return SiteConfig(), site or opened.card.site


def _print(found: list[AttackResult], opened: TrainedModel, format: Format) -> None:
    private = opened.config.privacy
    unit, delta = ("patient" if private and private.unit == "patient" else "record"), private.delta if private else 1e-5
    covered = UNCOVERED not in opened.card.notes
    claim = opened.card.privacy or "none: the model was trained without privacy"
    promised = of_one_record(opened) if covered else None
    if format is Format.JSON:
        told = {"model": str(opened.folder), "claim": claim, "covered": covered, "unit": unit, "delta": delta}
        told["of_one_record"] = promised
        print(json.dumps(told | {"attacks": [asdict(one) for one in found]}, indent=1))
        return
    rows = table("attack", f"{unit}s", "AUC", "guesses", "right", "epsilon at least")
    for one in found:
        rows.add_row(one.attack, str(one.units), f"{one.auc:.3f}", str(one.guesses), str(one.correct), f"{one.epsilon:.3g}")
    typer.echo(f"{shown(opened.card.job)}, {shown(opened.card.name)}: who was trained on?")
    page().print(rows)
    sure = f"with confidence {found[0].confidence:g} for all {len(found)} bounds together"
    typer.echo(f"epsilon of one {unit} at delta {delta:g}, {sure}; an AUC of 0.5 is chance")
    typer.echo(f"promised: {shown(claim, 600)}" if covered else f"promised nothing of this model: {UNCOVERED}")
    if promised is not None:
        typer.echo(f"that is of the whole site; of one record of it the same noise keeps epsilon {promised:.3g}: compare this")
