"""The commands `consilium cost` and `fit`: what a job trains, sends, computes and how much memory a step takes."""

import json
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from consilium.cli.options import (
    ASSUMED,
    TFLOPS,
    Format,
    FormatOption,
    JobArgument,
    SetOption,
    TflopsOption,
    check_finite,
    gpu_hours,
    load,
)
from consilium.config.job import JobConfig
from consilium.core.errors import ConfigError
from consilium.core.sanitize import line, number_of
from consilium.estimates.communication import adapters, what_masks_hide, whole_run
from consilium.estimates.communication import compare as costs_of
from consilium.estimates.flops import Samples, own_samples, run_flops, step_flops, work_of
from consilium.estimates.memory import StepMemory, memory_of, remedies
from consilium.federation.job import Job, assemble_job
from consilium.federation.trainable_checks import trained_set


def cost(
    job: JobArgument,
    override: SetOption = None,
    sites: Annotated[int, typer.Option(min=1, max=10_000, help="how many take part, for the whole run's bytes")] = 1,
    samples: Annotated[int | None, typer.Option(min=1, max=10**9, help="training samples of a site, for GPU hours")] = None,
    tested: Annotated[int, typer.Option(min=0, max=10**9, help="test samples of a site, for GPU hours")] = 0,
    tflops: TflopsOption = TFLOPS,
    format: FormatOption = Format.TXT,
) -> None:
    """Show trainable parameters, what a site sends and receives in a round beside every other strategy, and GPU hours."""
    config, source = load(job, override or [])
    hides = what_masks_hide(config)
    ready = assemble_job(config, source)
    costs, bottlenecks, trained = costs_of(ready), adapters(ready), trained_set(config.adapter, ready.initial)
    whole, computes = whole_run(ready, costs[0], sites), _computes(ready, sites, samples, tested)
    if format is Format.JSON:
        hours = {"gpu_hours": gpu_hours(computes["run"], tflops), "tflops": tflops} if "run" in computes else {}
        own = {"trained_set": trained, **(bottlenecks or {}), "bytes": whole, "flops": computes, **hours}
        own |= {"masks": hides} if hides else {}
        print(json.dumps([c.to_dict() | (own if i == 0 else {}) for i, c in enumerate(costs)], indent=1))
        return
    typer.echo(f"trains: {trained}")
    if bottlenecks:
        k, each, low, saved = bottlenecks.values()
        typer.echo(f"{k} adapters of {each:,} parameters; {low} travel: {saved:g} times fewer bytes than all of them")
    title = f"{config.name}: parameters per site and round; * this job"
    table = Table(title=line(title), title_justify="left", box=SIMPLE, pad_edge=False)
    for heading in ("strategy", "trainable", "up", "down", "up + down", "KiB up", "KiB down"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right", no_wrap=True)
    for index, one in enumerate(costs):
        numbers = (one.trainable, one.up, one.down, one.total, one.bytes_up // 1024, one.bytes_down // 1024)
        table.add_row(one.strategy + (" *" if index == 0 else ""), *(f"{n:,}" for n in numbers))
    Console(width=max(Console().width, 100)).print(table)
    mib = {name: f"{size / 2**20:,.1f} MiB" for name, size in whole.items()}
    typer.echo(
        f"* trains {mib['trained']}; {config.training.rounds} rounds move {mib['run_site']} up and down at a site, "
        f"{mib['run']} at {number_of(sites, 'site')}"
    )
    _tell_hours(computes, sites, tflops)
    if hides:
        typer.echo(f"* {hides}")
    if bottlenecks:
        typer.echo(
            f"* as FedSCA's Table 3 counts (all that trains, one way, decoder included): {mib['one_way']}, over {k} adapters "
            f"{mib['one_way_each']} for each that travels"
        )


def _computes(job: Job, sites: int, samples: int | None, tested: int) -> dict[str, float]:
    """Return FLOPs of a step, of a scored sample, and of the run as far as it is known how many samples there are."""
    work = work_of(job)
    given = Samples(sites, samples * sites, 0, tested * sites) if samples else own_samples(job.config, sites)
    if given is None and job.config.training.local_steps:
        given = Samples(sites, sites, 0, tested * sites)
    found = {"step": float(step_flops(job, work)), "scored": float(work.scoring)}
    return found | ({} if given is None else {"run": run_flops(job, work, given)})


def _tell_hours(computes: dict[str, float], sites: int, tflops: float) -> None:
    step, scored = (f"{computes[name] / 1e9:,.4g}" for name in ("step", "scored"))
    typer.echo(f"* a step computes {step} GFLOP, a scored sample {scored}")
    if "run" not in computes:
        typer.echo("  GPU hours of the run need --samples, the training samples of a site")
        return
    hours = gpu_hours(computes["run"], tflops)
    told = f"{computes['run'] / 1e15:,.3g} PFLOP, by estimate {hours:,.2g} GPU hours at {tflops:g} TFLOP/s"
    typer.echo(f"  the run at {number_of(sites, 'site')}: {told}")
    typer.echo(f"  ({ASSUMED})")


# fit -------------------------------------------------------------------------------------------------------------------
# `consilium fit`: how much memory a training step takes, and what to change so that it fits.

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
