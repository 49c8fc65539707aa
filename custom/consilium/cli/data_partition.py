"""The command `consilium data partition`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.options import FormatOption, check_finite, emit
from consilium.core.errors import ConfigError
from consilium.core.lazy import call
from consilium.core.sanitize import shown
from consilium.core.storage import nothing_left_on_failure
from consilium.data.partition import partition, partition_texts
from consilium.data.text import has_texts
from consilium.federation.simulated_sites import MOST_SITES


def data_partition(
    source: Annotated[
        Path, typer.Argument(help="a folder with a folder per class (also in train/ and test/), a datalist.json, or JSONL")
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="DEST", help="folder for a folder per site, partition.json and partition.png")
    ],
    sites: Annotated[int, typer.Option(min=1, max=MOST_SITES)] = 12,
    beta: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="Dirichlet concentration: 0.1 very uneven, 100 nearly even")
    ] = 0.1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    minimum: Annotated[int, typer.Option(min=1, help="fewest training samples of a site")] = 8,
    iid: Annotated[bool, typer.Option("--iid", help="give all sites equal shares; ignores --beta")] = False,
    by: Annotated[
        str, typer.Option(metavar="KEY", help="texts: key of the records whose values are unevenly distributed over sites")
    ] = "",
    clusters: Annotated[
        int, typer.Option(min=0, max=1000, help="texts: distribute this many K-means clusters of the instructions unevenly")
    ] = 0,
    model: Annotated[
        Path | None,
        typer.Option(help="texts: folder of a transformers language model for --clusters; default: the tiny model"),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="texts: split each site's own texts 0.8 / 0.1 / 0.1")] = False,
    exclude: Annotated[list[str] | None, typer.Option(help="leave out this class; may be repeated")] = None,
    no_test: Annotated[
        bool, typer.Option("--no-test", help="pictures: make no test split, for runs that choose settings")
    ] = False,
    format: FormatOption = "txt",
) -> None:
    """Distribute a classification data set, or texts, unevenly over sites, with one test split for all (except --local)."""
    check_finite(beta=beta)
    shares, left_out = None if iid else beta, exclude or []
    with nothing_left_on_failure(folder):
        if has_texts(source) or source.suffix == ".jsonl":
            if no_test:
                raise ConfigError("--no-test: is for pictures; with --local every site tests on its own texts")
            if clusters == 1 or (clusters and by):
                raise ConfigError("--clusters: take 2 or more, and without --by")
            kinds = partial(call, "consilium.cli.text_clusters:text_clusters", clusters, model, seed) if clusters else None
            found = partition_texts(source, folder, sites, shares, seed, minimum, by, left_out, kinds, local)
        elif by or clusters:
            what = f"--by {by}" if by else f"--clusters {clusters}"
            raise ConfigError(f"{what}: is for texts; pictures are uneven by their class; leave it out")
        elif local:
            raise ConfigError("--local: is for texts; cut a site's pictures by patient with consilium data split")
        else:
            found = partition(source, folder, sites, shares, seed, minimum, left_out, not no_test)
    lines = []
    for site, counts in found["training"].items():
        parts = ", ".join(f"{n} {shown(name)}" for name, n in counts.items() if n)
        lines.append(f"{site}: {sum(counts.values())} training samples: {parts}")
    lines += [f"note: {note}" for note in found.get("notes", [])]
    emit(found, [*lines, f"{folder}: a data list or JSONL files per site, partition.json and partition.png"], format)
