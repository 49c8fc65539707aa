"""Options of the commands that open a trained model, and the site they run at."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.messages import Stage
from consilium.core.sanitize import shown
from consilium.training.device import pick_device

ModelArgument = Annotated[Path, typer.Argument(help="a run's folder, STUDY/AXIS=VALUE,..., or an adapter folder")]
SiteOption = Annotated[str | None, typer.Option(help="whose model of a run; default: what its sites share")]
StageOption = Annotated[Stage | None, typer.Option(help="which model of a run; default: global")]
BestOption = Annotated[bool, typer.Option("--best", help="the best by validation instead of the last")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps")]


def site_of(device: str, checkpoints: Path | None) -> SiteConfig:
    """Return a site with this device and checkpoint folder. Raises ConfigError for a device that is unknown or not here."""
    try:
        site = SiteConfig(device=device, checkpoints=checkpoints)
        pick_device(device, "--device")
    except ValidationError:
        raise ConfigError(f"--device: {shown(device, 40)!r}: expected auto, cpu, cuda, cuda:NUMBER or mps") from None
    except ConsiliumError as error:
        raise ConfigError(str(error)) from None
    return site
