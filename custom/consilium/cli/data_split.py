"""The command `consilium data split`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.data_check import lists_of
from consilium.cli.options import FormatOption, check_finite, emit
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.sanitize import shown
from consilium.core.storage import nothing_left_on_failure
from consilium.data.site_names import renamed_notes, renamed_sites
from consilium.data.split import Cut, split_list
from consilium.report.tables import Column, Table


def data_split(
    source: Annotated[
        Path,
        typer.Argument(metavar="LIST|FOLDER", help="a data list, a site's folder, a folder per class, or a folder of sites"),
    ],
    dest: Annotated[
        Path,
        typer.Argument(
            metavar="DEST",
            help="folder for datalist.json, or fold-1 and so on, and split.json; a folder per site for several sites",
        ),
    ],
    validation: Annotated[
        float,
        typer.Option(
            min=0, max=0.9, help="share of all samples; with --folds or --keep-test, of the samples outside the test split"
        ),
    ] = 0.1,
    test: Annotated[float, typer.Option(min=0, max=0.9, help="share of all samples")] = 0.2,
    folds: Annotated[
        int, typer.Option(min=0, max=100, help="make this many lists; each part of the data is once the test split")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="seed of the random splits")] = 0,
    keep_test: Annotated[bool, typer.Option("--keep-test", help="keep the list's own test split")] = False,
    format: FormatOption = "txt",
) -> None:
    """Split a data list anew, with similar labels in each split. Pictures stay where they are.

    All samples of a patient, a study and a volume are in the same split.
    """
    check_finite(validation=validation, test=test)
    if folds == 1 or (folds and keep_test):
        raise ConfigError("--folds: take 2 or more, and without --keep-test")
    cut, lists = Cut(validation, test, folds, seed, keep_test), lists_of(source)
    names = renamed_sites(lists, source) if len(lists) > 1 else {}
    with nothing_left_on_failure(dest):
        found = {name: split_list(one.own.datalist, dest / names.get(name, ""), cut) for name, one in lists.items()}

    def lines() -> Iterator[Table | str]:
        for name, summary in found.items():
            rows, place = [], dest / names.get(name, "")
            for split_name, parts in summary["lists"].items():
                for split, counts in parts.items():
                    labels = ", ".join(f"{label}: {n}" for label, n in counts["labels"].items())
                    rows.append([split_name, split, labels, str(counts["samples"]), str(counts["groups"])])
            headings = ("list", "split", "samples by label", "samples", "groups")
            heads = [Column(one, right=one in ("samples", "groups")) for one in headings]
            yield Table(f"{summary['groups']} groups", heads, rows, whole=True)
            yield from (f"note: {note}" for note in summary["notes"])
            yield f"{place}: {', '.join(summary['lists'])} and split.json"
        yield from (f"note: {shown(note)}" for note in renamed_notes(names))
        for name, one in lists.items():
            if one.site != SiteConfig(datalist=one.own.datalist):
                yield f"note: {shown(name)}: its site.yaml is not copied; put it beside the new list, with `datalist:` of that"

    emit({names[name]: one for name, one in found.items()} if names else next(iter(found.values())), lines(), format)
