"""Speed, memory and bytes, as ratios within one run: `python -m tests.benchmarks.bench [NAME ...]`.

Pairs are measured in turn (A B A B ...) and the median of the pairwise ratios is printed, so a drifting machine matters little.
"""

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from nvflare.fuel.utils import fobs
from torch import nn

from consilium.adapters import adapter_state, lora
from consilium.adapters.kinds import LoraConfig
from consilium.config.job import load_job
from consilium.config.site import SiteConfig
from consilium.core.messages import SiteInfo
from consilium.federation.job_assembly import assemble_job
from consilium.flare.job import wire
from consilium.flare.job.recipe import export_simulation_job
from consilium.flare.job.simulator import Simulator
from consilium.models.sam import SAM
from consilium.models.sam.attention import FusedImageAttention, use_fused
from consilium.models.sam.network import build_sam
from consilium.privacy.discrete_gaussian import discrete_gaussian
from consilium.privacy.mechanism import geometry, privatized_coordinates
from consilium.privacy.secagg.arithmetic import UNIT
from consilium.report.run_files import payload_bytes
from consilium.runtime.engine import simulate
from consilium.strategies.fediat import FedIAT
from consilium.strategies.fedsca import mixture_weights, similarities
from consilium.strategies.strategy import LocalStep
from tests.benchmarks.job_steps import peak_resident_bytes

Normal = Callable[[tuple[int, ...]], torch.Tensor]
"""Draws standard normals (shape), float64."""
JOBS = Path(__file__).parents[2] / "jobs"


def median_ratio(first: Callable[[], object], second: Callable[[], object], pairs: int) -> float:
    """Return the median over pairs of time(first) / time(second), after one uncounted pair."""
    ratios = []
    for number in range(pairs + 1):
        times = []
        for call in (first, second):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        if number:
            ratios.append(times[0] / times[1])
    return statistics.median(ratios)


def _step(model: nn.Module, images: torch.Tensor, sor: FedIAT) -> Callable[[], None]:
    params = adapter_state.tensors(model)
    anchors, memory = {n: p.detach() + 0.01 for n, p in params.items()}, {}
    optimizer = torch.optim.Adam(params.values())

    def step() -> None:
        penalty = sor.penalty(LocalStep(params, anchors, memory))
        loss = model(images).square().mean() + (0.0 if penalty is None else penalty)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _random_sam(variant: str, size: int, attention: str = "fused") -> nn.Module:
    torch.manual_seed(0)
    model = build_sam(variant, None, size, 2, attention=attention, weights=False)
    lora.inject(model, LoraConfig(rank=8, alpha=8, targets="paper"), SAM)
    return model.train()


def sor() -> None:
    """Step time with SOR over step time without."""
    for variant, size, batch, pairs in (("tiny", 128, 4, 40), ("vit_b", 256, 1, 8)):
        model, images = _random_sam(variant, size), torch.rand(batch, 3, size, size) * 255
        ratio = median_ratio(_step(model, images, FedIAT()), _step(model, images, FedIAT(sor_weight=0.0)), pairs)
        print(f"step time with / without SOR, {variant} at {size}, batch {batch}: {ratio:.3f}")


def attention() -> None:
    """Forward and backward of one vit_b global attention, fused over original, time and peak memory."""
    for grid in (16, 64):
        modules = []
        for kind in ("fused", "original"):
            model = _random_sam("vit_b", 16 * grid, kind)
            modules.append(model.image_encoder.blocks[2].attn)
        x = torch.randn(1, grid, grid, 768)
        calls = [partial(_forward_backward, module, x) for module in modules]
        print(f"attention fused / original, {grid} x {grid} tokens, time: {median_ratio(*calls, 3 if grid > 16 else 15):.2f}")
    peaks = [_peak_of("attention-memory", kind) for kind in ("fused", "original")]
    print(f"one global attention, 64 x 64 tokens, added peak memory: {peaks[0]:.0f} MiB fused, {peaks[1]:.0f} MiB original")


def _forward_backward(module: nn.Module, x: torch.Tensor) -> None:
    module(x.clone().requires_grad_()).sum().backward()


def memory() -> None:
    """Peak memory a vit_b training step at 512 adds, batch 1."""
    kinds = ("fused", "original", "fused-checkpointing")
    peaks = {kind: _peak_of("step-memory", kind) for kind in kinds}
    print("vit_b step at 512, batch 1, added peak memory: " + ", ".join(f"{k} {v:.0f} MiB" for k, v in peaks.items()))


def wire_bytes() -> None:
    """Bytes FLARE's serializer makes of an update over the parameters' own bytes."""
    wire.register()
    for name in ("quickstart", "fundus_fediat", "fundus_fedit"):
        job = assemble_job(load_job(JOBS / name))
        payload = job.strategy.payload(job.strategy.initialize(job.initial), SiteInfo("a", 1, joined=True))
        sent = len(fobs.dumps(wire.encode(payload, "run", update=True, packed=True)))
        print(f"bytes on the wire / parameters' own, {name}: {sent / payload_bytes(payload.tensors):.3f} ({sent:,} bytes)")


def engines() -> None:
    """Seconds a round of the quickstart takes in each engine: (time of 5 rounds - time of 1) / 4."""
    found = {}
    for engine in ("inprocess", "flare"):
        times = [_run(engine, rounds) for rounds in (1, 5)]
        found[engine] = (times[1] - times[0]) / 4
        print(f"{engine}: {found[engine]:.2f} s a round, {times[0] - found[engine]:.1f} s to start, evaluate and stop")
    print(f"FLARE's simulator / in-process, per round: {found['flare'] / found['inprocess']:.2f}")


def _run(engine: str, rounds: int) -> float:
    config = load_job(JOBS / "quickstart", {"training.rounds": rounds})
    sites = [f"site-{i}" for i in (1, 2, 3)]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        if engine == "flare":
            with Simulator(sites) as simulator:
                simulator.run(export_simulation_job(config, Path(folder)), Path(folder), lambda event: None)
        else:
            simulate(assemble_job(config), {n: SiteConfig() for n in sites}, Path(folder), lambda event: None)
        return time.perf_counter() - began


def _peak_of(what: str, kind: str) -> float:
    """Return the MiB that `what` adds to the peak of a fresh process."""
    command = [sys.executable, "-m", "tests.benchmarks.bench", what, kind]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _peak(call: Callable[[], object]) -> None:
    before = peak_resident_bytes()
    call()
    print((peak_resident_bytes() - before) / 2**20)


def _attention_memory(kind: str) -> None:
    model = build_sam("vit_b", None, 1024, 1, attention="original", weights=False)
    module, x = model.image_encoder.blocks[2].attn, torch.randn(1, 64, 64, 768)
    if kind == "fused":
        use_fused(model)
        assert isinstance(module, FusedImageAttention)
    _peak(lambda: module(x.requires_grad_()).sum().backward())


def _step_memory(kind: str) -> None:
    model = _random_sam("vit_b", 512, "original" if kind == "original" else "fused")
    model.use_checkpointing = kind == "fused-checkpointing"
    _peak(_step(model, torch.rand(1, 3, 512, 512) * 255, FedIAT()))


def noise() -> None:
    """Print the time of DEeR's noise for the 36 layers (768 x 768, rank 8) of a ViT-B's q, k, v: the paper's way over ours.

    Paper: xi (768, 768) A^T (A A^T)^-1, xi normal. Ours: Z (768, 8), normal, times (A A^T)^-1/2. Aim: n / (2 r) = 48.
    """
    size, rank = 768, 8
    peers = [torch.randn(rank, size, dtype=torch.float64) for _ in range(36)]

    def paper(normal: Normal) -> list[torch.Tensor]:
        return [normal((size, size)) @ (a.T @ torch.linalg.inv(a @ a.T)) for a in peers]

    def ours(normal: Normal) -> list[torch.Tensor]:
        return [geometry(a, "right", 1.0).restore(normal((size, rank))) for a in peers]

    def exact(shape: tuple[int, ...]) -> torch.Tensor:
        drawn = discrete_gaussian(math.prod(shape), round(1 / UNIT))
        return torch.from_numpy(drawn).double().mul_(UNIT).reshape(shape)

    def of_torch(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64)

    for name, normal in (("exact noise", exact), ("torch's generator", of_torch)):
        ratio = median_ratio(partial(paper, normal), partial(ours, normal), 2)
        print(f"noise of 36 layers of 768 x 768, rank 8, {name}: paper's way / ours {ratio:.0f}")


def simplex() -> None:
    """Print the time of SGCA for N sites: cvxpy, a problem a row as the paper solves it, over ours. Aim: 100 at N = 50."""
    import cvxpy

    for count, pairs in ((6, 5), (50, 3), (500, 1)):
        points, prior = torch.randn(count, 20, dtype=torch.float64), torch.full((count,), 1 / count, dtype=torch.float64)
        similarity = similarities(points, "l2", True)
        rows = min(count, 50)  # of 500 rows fifty are timed and counted ten times
        scale = count / rows

        def solver(
            count: int = count, prior: torch.Tensor = prior, similarity: torch.Tensor = similarity, rows: int = rows
        ) -> None:
            for i in range(rows):
                w = cvxpy.Variable(count)
                cost = cvxpy.sum_squares(w - prior.numpy()) - w @ similarity[i].numpy()
                cvxpy.Problem(cvxpy.Minimize(cost), [w >= 0, cvxpy.sum(w) == 1]).solve()

        ratio = scale * median_ratio(solver, partial(mixture_weights, prior, similarity, 1.0), pairs)
        print(f"SGCA, {count} sites: cvxpy / ours {ratio:.0f}")


def guard() -> None:
    """Print what the guard adds to a step: clip and noise of a whole vit_b update over one forward and backward pass."""
    model = _random_sam("vit_b", 512)
    params = {n: p.detach().clone() for n, p in adapter_state.tensors(model).items()}
    update = {n: torch.randn_like(p) for n, p in params.items() if n.endswith("lora_B")}
    step = _step(model, torch.rand(1, 3, 512, 512) * 255, FedIAT(sor_weight=0.0))

    def release_all() -> None:
        maps = {n: geometry(params[n[:-1] + "A"], "right", 1.0) for n in update}
        privatized_coordinates(update, maps, 1.0, round(1 / UNIT))

    print(f"guard: clip and noise of a vit_b update / one step at 512: {median_ratio(release_all, step, 5):.3f}")


BENCHMARKS = {"sor": sor, "attention": attention, "memory": memory, "wire": wire_bytes, "engines": engines}
BENCHMARKS |= {"noise": noise, "guard": guard, "simplex": simplex}


def main() -> None:
    """Run the benchmarks named, or all."""
    if sys.argv[1:2] == ["attention-memory"]:
        _attention_memory(sys.argv[2])
    elif sys.argv[1:2] == ["step-memory"]:
        _step_memory(sys.argv[2])
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("names", nargs="*", choices=["all", *BENCHMARKS], default="all")
        names = parser.parse_args().names
        for name in BENCHMARKS if "all" in names else names:
            BENCHMARKS[name]()


if __name__ == "__main__":
    main()
