"""The command `consilium study list`."""

from collections import Counter
from typing import Annotated, Any

import typer

from consilium.cli.options import ASSUMED, TFLOPS, FormatOption, TflopsOption, emit, gpu_hours
from consilium.core.lazy import call
from consilium.report.tables import Column, Table
from consilium.study.definition import load, studies_folder
from consilium.study.records import current_record, known_flops


def study_list(
    count: Annotated[bool, typer.Option("--count", help="count the FLOPs of studies that have changed; takes minutes")] = False,
    tflops: TflopsOption = TFLOPS,
    format: FormatOption = "txt",
) -> None:
    """List the studies in jobs/studies: what each makes, its cells, how many are done, and estimated GPU hours."""
    found, rows = list[dict[str, Any]](), []
    for path in sorted(studies_folder().glob("*.yaml")):
        study = load(path)
        cells = len(study.unfiltered_grid()) - len(study.excluded())
        begun = study.cells() if study.workspace.exists() else []  # making the cells of all studies would take long
        states = Counter(current_record(cell.folder).state for cell in begun)
        flops = known_flops(study)
        if flops is None and count:
            flops = call("consilium.study.preflight:count_and_cache_flops", study)
        hours = None if flops is None else gpu_hours(flops, tflops)
        makes, needs = study.config.table or study.config.about, study.config.needs
        told = {"study": study.name, "table": makes, "needs": needs, "cells": cells, "done": states["done"]}
        found.append(told | {"failed": states["failed"], "gpu_hours": hours})
        time = "-" if hours is None else hours_text(hours)
        rows.append([study.name, makes or "-", str(cells), str(states["done"]), time, needs or "-"])
    heads = [
        Column(one, right=one in ("cells", "done", "GPU h")) for one in ("study", "makes", "cells", "done", "GPU h", "needs")
    ]
    note = f"GPU h: an estimate, FLOPs at {tflops:g} TFLOP/s; {ASSUMED}. -: not counted, or changed since: --count"
    emit(found, [Table("", heads, rows), note], format)


def hours_text(hours: float) -> str:
    """Return hours with three significant digits and without an exponent; "< 0.01" for less."""
    return "< 0.01" if 0 < hours < 0.01 else f"{float(f'{hours:.3g}'):,.15g}"
