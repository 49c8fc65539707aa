"""How fast a job trains on this machine: `python -m tests.benchmarks.job_steps JOB [--data SITE] [--steps N] [--turns N]`.

Our step is measured beside the same model in a bare loop, in one run, as ratios.

The ways take short turns, each second time in reverse order, so that what else the machine does falls on all of them. A ratio
is the median over turns, with the interval of 95 % that their order gives it. On a CPU there are ratios of its own time
too, of which waiting for other programs is not part.

`job`: the loop as in a round, with its data. `ready`: the same on batches that lie ready. `bare`: a plain PyTorch loop over
these, on a model of its own with adapters by PEFT (our `inject` calls it), PyTorch's default optimizer, and the task's loss, or
of a language model `transformers`' own; it encodes every picture. `original`: as `ready`, with the attention of the model's
publishers, where ours differs.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.client.evaluator import enable_embedding_cache
from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig, load_job
from consilium.config.site import SiteConfig, read_site_folder
from consilium.core.errors import ConfigError
from consilium.estimates.compute import MemoryTracker, flops_per_sample, step_flops
from consilium.federation.job_assembly import Job, assemble_job, build_model, build_task
from consilium.tasks.base import Batch, Task
from consilium.training.device import autocast, peak_memory, pick_device
from consilium.training.loop import prefetched_batches, train

PEAKS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "A10": 125, "L4": 121, "RTX 4090": 165}
"""Dense bfloat16 TFLOP/s of NVIDIA's data sheets, by a part of the device's name; the first that fits counts."""


def peak_resident_bytes() -> int:
    """Return the peak of this process's resident memory (Linux). getrusage would count the parent's before exec."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


@dataclass
class PreloadedTask:
    """A task whose batches lie ready: every call is handed the next of them."""

    task: Task
    batches: Sequence[Batch]
    num_samples: int
    _next: int = 0

    def batch(self, indices: Sequence[int], seed: int) -> Batch:
        """Return the next batch, whatever is asked for."""
        self._next += 1
        return self.batches[self._next % len(self.batches)]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the task's."""
        return self.task.loss(model, batch)


@dataclass
class Way:
    """One way to take steps: `run` takes so many of them."""

    name: str
    run: Callable[[int], None]
    model: nn.Module
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peak_bytes: float = 0.0

    def timed(self, steps: int, device: torch.device) -> None:
        """Take steps and note the seconds of one, by the clock and of the CPU."""
        with peak_memory(device) as peak:
            began, busy = time.perf_counter(), time.process_time()
            self.run(steps)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self.seconds.append((time.perf_counter() - began) / steps)
            self.cpu.append((time.process_time() - busy) / steps)
        self.peak_bytes = max(self.peak_bytes, peak.get("peak_bytes", 0.0))

    def weighed(self) -> None:
        """Take a step on a CPU and note the most bytes that the model and the step's tensors took."""
        storages = [one.untyped_storage() for one in (*self.model.parameters(), *self.model.buffers())]
        held = {storage._cdata: storage.nbytes() for storage in storages}
        with MemoryTracker(held.keys()) as live:
            self.run(1)
        self.peak_bytes = float(sum(held.values()) + live.most)


@dataclass(frozen=True)
class Bench:
    """What was measured. `units`: samples, or tokens, of a step; `flops` of a step; `peak_tflops` None where nobody knows."""

    device: str
    ways: tuple[Way, ...]
    unit: str
    units: float
    flops: int
    peak_tflops: float | None
    on_processor: bool = False

    def seconds(self, name: str) -> float:
        """Return the median seconds of a step."""
        return statistics.median(next(way for way in self.ways if way.name == name).seconds)

    def ratio(self, name: str, to: str) -> float:
        """Return the median over turns of one way's seconds over another's."""
        return statistics.median(self._ratios(name, to, "seconds"))

    def intervals(self, clock: str) -> dict[str, tuple[float, float, float]]:
        """Return every way's ratio to the bare loop by a clock, "seconds" or "cpu": median, and its interval's ends."""
        found = {way.name: self._ratios(way.name, "bare", clock) for way in self.ways if way.name != "bare"}
        return {f"{name}/bare": (statistics.median(some), *interval(some)) for name, some in found.items()}

    def _ratios(self, name: str, to: str, clock: str) -> list[float]:
        one, other = (getattr(next(way for way in self.ways if way.name == wanted), clock) for wanted in (name, to))
        return [a / b for a, b in zip(one, other, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        ways = {way.name: {"seconds": way.seconds, "peak_bytes": way.peak_bytes} for way in self.ways}
        tflops = self.flops / self.seconds("job") / 1e12
        share = None if self.peak_tflops is None else tflops / self.peak_tflops
        ratios = {name: found[0] for name, found in self.intervals("seconds").items()}
        waits = max(1 - 1 / self.ratio("job", "ready"), 0.0)
        return {
            "device": self.device, "ways": ways, "ratios": ratios, "intervals": self.intervals("seconds"),
            "processor": self.intervals("cpu") if self.on_processor else {}, "data_wait": waits, "unit": self.unit,
            "per_second": self.units / self.seconds("job"), "tflops": tflops, "share_of_peak": share,
        }  # fmt: skip


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the interval in which the median lies with 95 %, of the values' order alone; of under six, all.

    That the k-th smallest of n is over the median has the odds of under k heads in n throws of a coin.
    """
    ordered, count = sorted(values), len(values)
    tails = itertools.accumulate(math.comb(count, heads) for heads in range(count))
    out = sum(1 for tail in tails if 2 * tail <= 0.05 * 2**count)
    first = max(out - 1, 0)
    return ordered[first], ordered[count - 1 - first]


def bench(
    config: JobConfig, site: SiteConfig, folder: Any, steps: int, turns: int, say: Callable[[str], None] = lambda line: None
) -> Bench:
    """Measure `turns` turns of `steps` steps each way, after some that do not count. Raises what a site's start raises.

    `say` gets a line for each measurement, when it is done.
    Raises ConfigError under DP-SGD, whose steps a bare loop does not have.
    """
    if config.dpsgd is not None:
        raise ConfigError(f"privacy.unit: {config.dpsgd.unit!r}: no bare loop takes private steps; remove the section for this")
    job = assemble_job(config)
    data, device = load_site_data(config, "site-1", site, folder), pick_device(site.device)
    task = build_task(config, data, site)
    ways = _ways(job, site, task, build_task(config, data, site), steps)
    for way in ways:
        say(f"warming up {way.name}")
        way.run(steps)
        if device.type == "cpu" and not config.training.compile:
            way.weighed()
    for turn in range(turns):
        for way in ways[:: 1 if turn % 2 else -1]:
            way.timed(steps, device)
            say(f"turn {turn + 1}/{turns}  {way.name}: {way.seconds[-1]:.3f} s a step")
    unit, units = _units(task, config, steps)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device}, {torch.get_num_threads()} threads"
    peak = next((float(tflops) for part, tflops in PEAKS.items() if device.type == "cuda" and part in name), None)
    return Bench(name, tuple(ways), unit, units, step_flops(job, flops_per_sample(job)), peak, device.type == "cpu")


def _ways(job: Job, site: SiteConfig, task: Task, plain: Task, steps: int) -> list[Way]:
    config, (model, params) = job.config, loaded(job, site)
    batches = _batches(task, config, steps)
    ready: Any = PreloadedTask(task, batches, task.num_samples)
    enable_embedding_cache(config, model, task)
    ways = [
        Way("job", lambda count: take_steps(model, task, params, config, count), model),
        Way("ready", lambda count: take_steps(model, ready, params, config, count), model),
        _bare(config, loaded(job, site), PreloadedTask(plain, batches, task.num_samples)),
    ]
    if getattr(config.model, "attention", "") == "fused":
        other = replace(
            job, config=config.model_copy(update={"model": config.model.model_copy(update={"attention": "original"})})
        )
        slow, own = loaded(other, site)
        ways.append(Way("original", lambda count: take_steps(slow, ready, own, config, count), slow))
    return ways


def loaded(job: Job, site: SiteConfig) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the site's model and its adapter's tensors."""
    model = build_model(job.config, site)
    if not job.config.adapter_kind.unequal_ranks:
        adapter_state.load(model, job.initial)
    return model, adapter_state.tensors(model)


def _batches(task: Task, config: JobConfig, steps: int) -> list[Batch]:
    made = prefetched_batches(task, config.training, 0, steps * config.training.accumulate)
    found = list(made)
    made.close()
    return found


def _units(task: Task, config: JobConfig, steps: int) -> tuple[str, float]:
    """Return what a step's work is counted in, and how many of it a step has in the mean."""
    batches = _batches(task, config, steps)
    if "attention_mask" in batches[0]:
        return "tokens", sum(float(batch["attention_mask"].sum()) for batch in batches) / steps
    return "samples", sum(len(next(iter(batch.values()))) for batch in batches) / steps


def take_steps(model: nn.Module, task: Any, params: dict[str, Tensor], config: JobConfig, steps: int) -> None:
    """Train as a round does."""
    training = config.training.model_copy(update={"local_steps": steps})
    trained = {name for name, tensor in params.items() if isinstance(tensor, nn.Parameter)}
    train(model, task, params, trained, training, 0, lambda step: None, lambda done: None)


def _bare(config: JobConfig, loaded: tuple[nn.Module, dict[str, Tensor]], task: Any) -> Way:
    (model, params), training = loaded, config.training
    options = {"lr": training.lr, "weight_decay": training.weight_decay}
    if training.optimizer == "sgd":
        options["momentum"] = training.momentum
    own = [tensor for tensor in params.values() if isinstance(tensor, nn.Parameter)]
    made: Any = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[training.optimizer]
    device = own[0].device

    def loss_of(batch: Batch) -> Tensor:
        if config.task.name != "language":
            return task.loss(model, batch)
        moved = {name: values.to(device) for name, values in batch.items()}
        found: Tensor = model(**moved, use_cache=False).loss
        return found

    def run(steps: int) -> None:
        optimizer = made(own, **options)
        model.train()
        for _ in range(steps):
            for _ in range(training.accumulate):
                with autocast(device, training.precision):
                    loss = loss_of(task.batch((), 0)) / training.accumulate
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()

    return Way("bare", run, model)


def progress(line: str) -> None:
    """Print a line on standard error at once; the figures go to standard output."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Measure a job's steps here and print the figures as JSON, with a line of progress for each measurement."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--data", type=Path, help="a site's folder; without it the job's generated data")
    parser.add_argument("--checkpoints", type=Path, help="the folder of the job's model folder")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of a turn")
    parser.add_argument("--turns", type=int, default=15, help="turns; ratios are their medians")
    given = parser.parse_args()
    site = (read_site_folder(given.data) if given.data else None) or SiteConfig()
    one: dict[str, Any] = {"device": given.device, "devices": (), "base": "replicated"}  # a bare loop has one device
    if given.checkpoints:
        one["checkpoints"] = given.checkpoints
    with tempfile.TemporaryDirectory() as folder:
        found = bench(load_job(given.job), site.model_copy(update=one), Path(folder), given.steps, given.turns, progress)
    print(json.dumps(found.to_dict(), indent=1))


if __name__ == "__main__":
    main()
