"""The commands `consilium cost` and `fit`: a job's trained parameters, bytes and FLOPs, and the memory of a step."""

from collections.abc import Iterator
from typing import Annotated, Literal

import typer

from consilium.cli.options import (
    ASSUMED,
    TFLOPS,
    FormatOption,
    JobArgument,
    SetOption,
    TflopsOption,
    emit,
    gpu_hours,
    load,
)
from consilium.core.errors import raise_first
from consilium.core.sanitize import count_with_noun
from consilium.estimates.communication import bottleneck_counts, compare as costs_of, masking_protection_text, run_bytes
from consilium.estimates.compute import (
    Samples,
    StepMemory,
    flops_per_sample,
    generated_samples,
    memory_of,
    remedies,
    run_flops,
    step_flops,
)
from consilium.federation.job_assembly import Job, assemble_job
from consilium.federation.job_consistency import describe_trained_tensors
from consilium.report.tables import Table, columns, size_text
from consilium.training.device import has_native_bf16


def cost(
    job: JobArgument,
    override: SetOption = None,
    sites: Annotated[int, typer.Option(min=1, max=10_000, help="number of sites, for the bytes of the whole run")] = 1,
    samples: Annotated[int | None, typer.Option(min=1, max=10**9, help="training samples per site, for GPU hours")] = None,
    tested: Annotated[int, typer.Option(min=0, max=10**9, help="test samples per site, for GPU hours")] = 0,
    tflops: TflopsOption = TFLOPS,
    format: FormatOption = "txt",
) -> None:
    """Show a job's trainable parameters, its bytes per site and round with each strategy, and GPU hours."""
    config, source = load(job, override or [])
    hides = masking_protection_text(config)
    ready = assemble_job(config, source)
    costs, bottlenecks = costs_of(ready), bottleneck_counts(ready)
    trained = describe_trained_tensors(config.adapter, ready.initial)
    whole, computes = run_bytes(ready, costs[0], sites), _count_flops(ready, sites, samples, tested)
    hours = {"gpu_hours": gpu_hours(computes["run"], tflops), "tflops": tflops} if "run" in computes else {}
    own = {
        "trained_set": trained,
        **(bottlenecks or {}),
        "bytes": whole,
        "flops": computes,
        **hours,
        **({"masks": hides} if hides else {}),
    }

    def lines() -> Iterator[Table | str]:
        yield f"trains: {trained}"
        if bottlenecks:
            k, each, low, saved = bottlenecks.values()
            yield f"{k} adapters of {each:,} parameters; {low} are sent: {saved:g} times fewer bytes than all of them"
        rows = [[one.strategy, *(f"{n:,}" for n in (one.trainable, one.up, one.down, one.total_parameters))] for one in costs]
        for row, one in zip(rows, costs, strict=True):
            row += map(size_text, (one.bytes_up, one.bytes_down))
        rows[0][0] += " *"
        heads = columns("strategy", "trainable", "up", "down", "up + down", "bytes up", "bytes down")
        yield Table(f"{config.name}: parameters per site and round; * this job", heads, rows)
        mib = {name: size_text(count) for name, count in whole.items()}
        moved = f"{config.training.rounds} rounds move {mib['run_site']} up and down at a site"
        yield f"* trains {mib['trained']}; {moved}, {mib['run']} at {count_with_noun(sites, 'site')}"
        yield f"* a step computes {computes['step'] / 1e9:,.4g} GFLOP, a scored sample {computes['scored'] / 1e9:,.4g}"
        if hours:
            told = f"{computes['run'] / 1e15:,.3g} PFLOP, by estimate {hours['gpu_hours']:,.2g} GPU hours at {tflops:g} TFLOP/s"
            yield f"  the run at {count_with_noun(sites, 'site')}: {told}\n  ({ASSUMED})"
        else:
            yield "  GPU hours of the run need --samples, the training samples of a site"
        if hides:
            yield f"* {hides}"
        if bottlenecks:
            yield (
                f"* as FedSCA's Table 3 counts (all that trains, one way, decoder included): {mib['one_way']}, over {k} "
                f"adapters {mib['one_way_each']} for each that is sent"
            )

    emit([c.to_dict() | (own if i == 0 else {}) for i, c in enumerate(costs)], lines(), format)


def _count_flops(job: Job, sites: int, samples: int | None, tested: int) -> dict[str, float]:
    """Return the FLOPs of a step, of a scored sample and, if the number of samples is known, of the run."""
    work = flops_per_sample(job)
    given = Samples(sites, samples * sites, 0, tested * sites) if samples else generated_samples(job.config, sites)
    if given is None and job.config.training.local_steps:
        given = Samples(sites, sites, 0, tested * sites)
    found = {"step": float(step_flops(job, work)), "scored": float(work.scoring)}
    return found | ({} if given is None else {"run": run_flops(job, work, given)})


# fit -------------------------------------------------------------------------------------------------------------------
# The command `consilium fit`: the memory of a training step, and changes with which it fits.

GIB = 2**30


def fit(
    job: JobArgument,
    override: SetOption = None,
    within: Annotated[
        float | None,
        typer.Option(min=0.01, max=1e6, help="GiB that the device has; exit code 1 if a step does not fit"),
    ] = None,
    device: Annotated[
        Literal["gpu", "cpu"], typer.Option(help="gpu: a step on any GPU; cpu: the whole process on this machine's processor")
    ] = "gpu",
    devices: Annotated[
        int, typer.Option(min=1, max=1024, help="number of devices that share each batch, as `devices` in site.yaml")
    ] = 1,
    sharded: Annotated[
        bool, typer.Option("--sharded", help="share the base model among the devices too, as `base: sharded` in site.yaml")
    ] = False,
    format: FormatOption = "txt",
) -> None:
    """Predict the peak memory of a training step, and which changes reduce it. Needs no weights and no GPU."""
    problems = {
        "--device cpu: is for one process; leave --devices and --sharded out": device == "cpu" and devices > 1,
        "--sharded: is for several devices; give --devices too": sharded and devices == 1,
    }
    raise_first(problems)
    config, source = load(job, override or [])
    spread = (devices, sharded, device == "gpu")
    rows = {"as the job is": memory_of(assemble_job(config, source), *spread)}
    for said, changed in remedies(config, *spread[1:]):
        enough = "batch_size" in said if within is None else min(row.peak for row in rows.values()) <= within * GIB
        if enough:
            break
        rows[said] = memory_of(assemble_job(changed, source), *spread)
    found = [{"set": name, **vars(row), "peak": row.peak} for name, row in rows.items()]
    emit({"job": config.name, "within": within, "steps": found}, _lines(rows, within), format)
    raise typer.Exit(1 if within is not None and rows["as the job is"].peak > within * GIB else 0)


def _lines(rows: dict[str, StepMemory], within: float | None) -> Iterator[str]:
    """Yield lines with the memory of each variant of the job, and whether the job or a variant fits."""
    cpu = any(row.process for row in rows.values())
    yield f"  GiB: base + trained + activations{' + process' * cpu} = peak"
    for name, row in rows.items():
        sizes = (row.base, row.trained, row.activations, *((row.process,) if cpu else ()))
        parts = " + ".join(f"{size / GIB:6.2f}" for size in sizes)
        yield f"  {parts} = {row.peak / GIB:6.2f}  {name}"
    if not cpu:
        yield "Counted without a GPU: what its driver and kernels keep for themselves (0.5 to 1 GiB) comes on top."
    elif not has_native_bf16():
        yield "This processor emulates bfloat16, which takes twice as long or more, so bf16 is not proposed."
    if within is None:
        return
    fitting = next((name for name, row in rows.items() if row.peak <= within * GIB), None)
    if fitting == "as the job is":
        yield f"It fits into {within:g} GiB."
    elif fitting is None:
        yield f"Nothing that is named here makes it fit into {within:g} GiB; use a smaller model, image or max_length."
    else:
        sets = " ".join(f"--set {one}" for one in fitting.split())
        yield f"It does not fit into {within:g} GiB. With this it does: {sets}"
