"""`consilium fit`: how much memory a training step takes, and what to change so that it fits."""

import json
from typing import Annotated

import typer

from consilium.cli.options import Format, FormatOption, JobArgument, SetOption, check_finite, load
from consilium.config.job import JobConfig
from consilium.core.errors import ConfigError
from consilium.estimates.memory import StepMemory, memory_of, remedies
from consilium.federation.job import assemble_job

GIB = 2**30


def fit(
    job: JobArgument,
    override: SetOption = None,
    within: Annotated[
        float | None, typer.Option(min=0.01, max=1e6, help="GiB that a card has: says whether a step fits, exit code 1 if not")
    ] = None,
    devices: Annotated[int, typer.Option(min=1, max=1024, help="so many share every batch, as `devices` of a site.yaml")] = 1,
    sharded: Annotated[bool, typer.Option("--sharded", help="and the base, as `base: sharded` of a site.yaml")] = False,
    format: FormatOption = Format.TXT,
) -> None:
    """Predict the peak memory of a training step, without weights and without a GPU, and what takes less."""
    check_finite(within=within)
    config, source = load(job, override or [])
    if sharded and devices == 1:
        raise ConfigError("--sharded: is for several devices; give --devices too")
    rows = {"as the job is": memory_of(assemble_job(config, source), devices, sharded)}
    for said, changed in remedies(config, sharded):
        enough = "batch_size" in said if within is None else min(row.peak for row in rows.values()) <= within * GIB
        if enough:
            break
        rows[said] = memory_of(assemble_job(changed, source), devices, sharded)
    _print(config, rows, within, format)
    raise typer.Exit(1 if within is not None and rows["as the job is"].peak > within * GIB else 0)


def _print(config: JobConfig, rows: dict[str, StepMemory], within: float | None, format: Format) -> None:
    if format is Format.JSON:
        found = [{"set": name, **vars(row), "peak": row.peak} for name, row in rows.items()]
        print(json.dumps({"job": config.name, "within": within, "steps": found}, indent=1))
        return
    typer.echo("  GiB: base + trained + activations = peak")
    for name, row in rows.items():
        parts = " + ".join(f"{size / GIB:6.2f}" for size in (row.base, row.trained, row.activations))
        typer.echo(f"  {parts} = {row.peak / GIB:6.2f}  {name}")
    typer.echo("Counted without a GPU: what its driver and kernels keep for themselves (0.5 to 1 GiB) comes on top.")
    if within is not None:
        typer.echo(_verdict(rows, within))


def _verdict(rows: dict[str, StepMemory], within: float) -> str:
    fitting = next((name for name, row in rows.items() if row.peak <= within * GIB), None)
    if fitting == "as the job is":
        return f"It fits into {within:g} GiB."
    if fitting is None:
        return f"Nothing that is named here makes it fit into {within:g} GiB; use a smaller model, image or max_length."
    return f"It does not fit into {within:g} GiB. With this it does: " + " ".join(f"--set {one}" for one in fitting.split())
