"""The command `consilium metrics`."""

from pathlib import Path
from typing import Annotated

import typer

from consilium.core.errors import ConfigError
from consilium.core.storage import PUBLIC, write_atomic
from consilium.flare.admin.metrics import HELP, collect
from consilium.report.exposition import exposition


def metrics(
    kit: Annotated[Path, typer.Argument(help="a site's or the server's startup kit")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="FILE.prom for node_exporter's textfile collector")
    ] = None,
) -> None:
    """Write numbers for Prometheus: rounds, sites last seen, refusals, epsilon left, disk, certificates. Opens no port."""
    text = exposition(collect(kit), HELP)
    if output is None:
        typer.echo(text, nl=False)
    elif output.suffix != ".prom":
        raise ConfigError(f"--output: {output}: the collector reads files that end in .prom; name it so")
    else:
        write_atomic(output, text.encode(), PUBLIC)
