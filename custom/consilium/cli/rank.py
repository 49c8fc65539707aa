"""`consilium rank`: a device of another machine works for a site."""

from pathlib import Path
from typing import Annotated

import typer

from consilium.client.ddp_rendezvous import read_secret, stand_by
from consilium.config.site import NodesConfig, SiteConfig
from consilium.core.errors import ConfigError
from consilium.training.device import pick_device


def rank(
    address: Annotated[str, typer.Argument(help="HOST:PORT, as nodes.address in the site's site.yaml")],
    secret: Annotated[Path, typer.Option(help="the file of nodes.secret, or a copy of it")],
    device: Annotated[list[str] | None, typer.Option(help="where it computes; again for one more rank")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="of each rank on a CPU")] = None,
) -> None:
    """Work for a site whose site.yaml has `nodes:`, on this other machine, until it is stopped (Ctrl-C).

    It waits for the site to begin, computes its share of every batch, and waits again when the job is over or has failed.
    """
    import torch
    from pydantic import ValidationError

    devices = device or ["auto"]
    try:
        place = NodesConfig(address=address, secret=secret, ranks=len(devices)).place
        found = [str(pick_device(SiteConfig(device=one).device)) for one in devices]
    except ValidationError as error:
        raise ConfigError(
            f"{address}, {', '.join(devices)}: {error.errors()[0]['msg']}; give HOST:PORT, cpu or cuda:0"
        ) from None
    typer.echo(f"{', '.join(found)}: waits for {address}")
    stand_by(place, read_secret(secret), found, threads or torch.get_num_threads())
