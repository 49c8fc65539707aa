"""The command `consilium study list`."""

import json
from collections import Counter
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from consilium.cli.options import ASSUMED, TFLOPS, Format, FormatOption, TflopsOption, gpu_hours, page
from consilium.core.lazy import call
from consilium.core.sanitize import LONGEST_LINE, line
from consilium.study.records import cached_flops, known_flops, record_of
from consilium.study.study import Study, load, studies_folder


def study_list(
    count: Annotated[bool, typer.Option("--count", help="count anew what has changed; minutes")] = False,
    tflops: TflopsOption = TFLOPS,
    format: FormatOption = Format.TXT,
) -> None:
    """List the studies in jobs/studies: what each makes, its cells, how many are done, and GPU hours by estimate."""
    found = [_summary(load(path), count, tflops) for path in sorted(studies_folder().glob("*.yaml"))]
    if format is Format.JSON:
        print(json.dumps(found, indent=1))
        return
    table = Table(box=SIMPLE, pad_edge=False)
    for heading in ("study", "makes", "cells", "done", "GPU h", "needs"):
        table.add_column(heading, justify="right" if heading in ("cells", "done", "GPU h") else "left", overflow="fold")
    for one in found:
        told = one | {"hours": "-" if one["gpu_hours"] is None else f"{one['gpu_hours']:,.2g}"}
        keys = ("study", "table", "cells", "done", "hours", "needs")
        table.add_row(*(line("-" if told[key] == "" else str(told[key])) for key in keys))
    page().print(table)
    Console(soft_wrap=True).print(
        line(
            f"GPU h: an estimate, FLOPs at {tflops:g} TFLOP/s; {ASSUMED}. -: not counted, or changed since: --count",
            limit=LONGEST_LINE,
        )
    )


def _summary(study: Study, count: bool, tflops: float) -> dict[str, Any]:
    cells = len(study.grid()) - len(study.excluded())
    begun = study.cells() if study.workspace.exists() else []  # cells are made by their jobs, which takes a while for all
    states = Counter(record_of(cell.folder).state for cell in begun)
    told = {"study": study.name, "table": study.config.table or study.config.about, "needs": study.config.needs}
    flops = known_flops(study, cached_flops())
    if flops is None and count:
        flops = call("consilium.study.estimate:count_flops", study)
    hours = None if flops is None else gpu_hours(flops, tflops)
    return told | {"cells": cells, "done": states["done"], "failed": states["failed"], "gpu_hours": hours}
