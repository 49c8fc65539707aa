"""DEeR's comparison under differential privacy on real images, one command: writes a Markdown table.

    python -m tests.benchmarks.private rbc12 DATA --epsilons 1 3 6 --rounds 20 -o private.md
    python -m tests.benchmarks.private nuclei DATA --epsilons 1 6 -o private_nuclei.md

DATA: for rbc12 a folder per class with train/ and test/; it is shared out over 12 sites by Dirichlet(beta). For nuclei one
folder per site with a datalist.json; each is box-prompted segmentation at a site of its own.

Two calibrations. `ours`: the guard's joint clip and the exact accountant at delta 1e-5 over all releases, noise at the site
(local) or at the server (central). `paper`: sigma from Opacus at a *sample* rate batch / all samples and delta 1/K, clip and
noise per tensor, the noise shared out over sites: what the published numbers are made with. Its rows carry the epsilon the
paper would print, and beside it the one it really is.
"""

import argparse
import json
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from opacus.accountants.utils import get_noise_multiplier

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.data.partition import partition
from consilium.errors import ConsiliumError
from consilium.federation.build import assemble_job
from consilium.federation.engine import simulate
from consilium.privacy.plan import make_plan
from consilium.strategies.strategy import Role

METHODS: dict[str, dict[str, Any]] = {
    "LoRA": {"name": "fedit"},
    "FFA-LoRA": {"name": "ffa_lora"},
    "DP-DyLoRA": {"name": "dp_dylora"},
    "DEeR": {"name": "deer"},
    "DEeR, no regulator": {"name": "deer", "regulator": False},
    "DEeR, rebalanced": {"name": "deer", "rebalance": True},
    "DEeR 75%": {"name": "deer", "schedule": "75%"},
    "DEeR 50%": {"name": "deer", "schedule": "50%"},
}
SITES = 12


@dataclass(frozen=True)
class Row:
    """One run. `epsilon` None: no privacy; `calibration`: ours local, ours central or paper."""

    method: str
    epsilon: float | None
    calibration: str
    rank: int
    beta: float
    seed: int


def base(task: str, row: Row, wanted: argparse.Namespace) -> dict[str, Any]:
    """Return a job without its privacy section."""
    if task == "rbc12":
        classes = sorted(p.name for p in (wanted.data / "train").iterdir() if p.name not in wanted.exclude)
        model, kind = {"name": "clip", "variant": "tiny", "image_size": 64}, {"name": "classification", "classes": classes}
    else:
        model, kind = {"name": "sam", "variant": "tiny", "image_size": 128}, {"classes": ["nucleus"], "prompt": "box"}
    kind["augment"] = False  # half the time of so small a model
    training = {"rounds": wanted.rounds, "local_steps": wanted.steps, "batch_size": wanted.batch, "seed": row.seed}
    training |= {"optimizer": wanted.optimizer, "lr": wanted.lr}
    adapter = {"rank": row.rank, "alpha": row.rank, "targets": wanted.targets}
    common = {"name": "private", "strategy": METHODS[row.method], "model": model, "adapter": adapter, "task": kind}
    return common | {"training": training, "federation": {"weighting": "uniform", "min_sites": 2}}


def privacy(raw: dict[str, Any], row: Row, sites: int, samples: int, wanted: argparse.Namespace) -> dict[str, Any] | None:
    """Return the privacy section of a row."""
    if row.epsilon is None:
        return None
    if row.calibration != "paper":
        trust = row.calibration.removeprefix("ours ")
        return {"unit": "site", "epsilon": row.epsilon, "delta": 1e-5, "clip": wanted.clip, "trust": trust}
    job = assemble_job(JobConfig.model_validate(raw))
    tensors = len(job.strategy.names(job.initial, Role.SHARED, 0, 0))
    rate, steps = min(1.0, wanted.batch * sites / samples), wanted.rounds * wanted.steps
    sigma = get_noise_multiplier(
        target_epsilon=row.epsilon, target_delta=1 / sites, sample_rate=rate, steps=steps, accountant="rdp"
    )
    # per tensor: clip C and noise sigma C / sqrt K each; jointly that is a clip of C sqrt L and a multiplier of sigma / sqrt L
    joint = {"noise_multiplier": sigma / tensors**0.5, "clip": wanted.clip * tensors**0.5}
    return {"unit": "site", "delta": 1e-5, "trust": "central"} | joint  # the law of the sum of K shares


def run(task: str, row: Row, wanted: argparse.Namespace) -> dict[str, float]:
    """Return a row's test scores, noise and honest epsilon."""
    with tempfile.TemporaryDirectory() as workspace:
        folder = wanted.data
        if task == "rbc12":
            folder = Path(workspace) / "data"
            partition(wanted.data, folder, SITES, row.beta, row.seed, 10, wanted.exclude)
            _test_once(folder)
        lists = sorted(folder.glob("*/datalist.json"))
        samples = sum(len(json.loads(p.read_text())["training"]) for p in lists)
        raw = base(task, row, wanted)
        raw["federation"]["min_sites"] = len(lists) if row.calibration == "paper" else 2
        config = JobConfig.model_validate(raw | {"privacy": privacy(raw, row, len(lists), samples, wanted)})
        events: list[dict[str, Any]] = []
        sites = {p.parent.name: SiteConfig(datalist=p) for p in lists}
        job = assemble_job(config)
        try:
            simulate(job, sites, Path(workspace) / "run", events.append)
        except ConsiliumError:  # noise so large that losses are not finite any more
            return _claim(job)
        results = json.loads((Path(workspace) / "run" / "results.json").read_text())
        return _scores(task, results, events) | _claim(job)


def _test_once(folder: Path) -> None:
    """Leave the common test split to the first site: all sites end with the same model."""
    for path in sorted(folder.glob("*/datalist.json"))[1:]:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"test": []}))


def _scores(task: str, results: dict, events: list) -> dict[str, float]:
    names = ("accuracy", "f1") if task == "rbc12" else ("dice", "iou")
    judged = [r for r in results.values() if f"test/global/{names[0]}" in r]
    found = {n: statistics.mean(r[f"test/global/{n}"] for r in judged) for n in names}
    found |= {f"base {n}": statistics.mean(r[f"test/pretrained/{n}"] for r in judged) for n in names}
    released = [e for e in events if e["event"] == "release"]
    if released and all(e["noise_std"] > 0 for e in released):  # else the server adds the noise, after the site's cosine
        found["cosine"] = statistics.mean(e["cosine"] for e in released)
    if released:
        found["norm"] = statistics.median(e["norm"] for e in released)
    return found


def _claim(job: Any) -> dict[str, float]:
    plan = make_plan(job.config, job.strategy)
    return {} if plan is None else {"sigma": plan.noise_multiplier, "honest": plan.epsilon(delta=1e-5)}


def rows(wanted: argparse.Namespace) -> list[Row]:
    """Return every run asked for."""
    found = []
    for seed in wanted.seeds:
        for rank in wanted.ranks:
            for beta in wanted.betas:
                for method in wanted.methods:
                    found += [] if wanted.private_only else [Row(method, None, "none", rank, beta, seed)]
                    found += [Row(method, e, c, rank, beta, seed) for e in wanted.epsilons for c in wanted.calibrations]
    return found


def write(wanted: argparse.Namespace, found: list[tuple[Row, dict[str, float]]]) -> None:
    """Write the table: mean over seeds, and over every site's test split."""
    first, second = ("accuracy", "f1") if wanted.task == "rbc12" else ("dice", "iou")
    groups: dict[tuple, list[dict[str, float]]] = {}
    for row, scores in found:
        groups.setdefault((row.method, row.epsilon, row.calibration, row.rank, row.beta), []).append(scores)
    lines = [f"| method | rank | beta | privacy | {first} | {second} | sigma | honest epsilon | cosine |", "|---" * 9 + "|"]
    for (method, epsilon, calibration, rank, beta), runs in groups.items():
        label = "none" if epsilon is None else f"epsilon {epsilon:g}, {calibration}"
        cells = [_cell(runs, n, 3) for n in (first, second)] + [_cell(runs, n, 2) for n in ("sigma", "honest", "cosine")]
        lines.append(f"| {method} | {rank} | {beta:g} | {label} | " + " | ".join(cells) + " |")
    base_score = statistics.mean([s[f"base {first}"] for _, s in found if f"base {first}" in s] or [float("nan")])
    settings = f"{wanted.rounds} rounds of {wanted.steps} steps of batch {wanted.batch}, {wanted.optimizer} {wanted.lr:g}, clip"
    head = f"{settings} {wanted.clip:g}, targets {wanted.targets}, seeds {wanted.seeds}; base {first} {base_score:.3f}."
    wanted.output.write_text("\n".join([head, "", *lines, ""]))


def _cell(runs: list[dict[str, float]], name: str, digits: int) -> str:
    values = [r[name] for r in runs if name in r]
    if not values:
        return "diverged" if name in ("accuracy", "dice") else "-"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 and name not in ("sigma", "honest") else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def _quick() -> None:
    """One thread a run; drowned models are full of denormal numbers, which a CPU computes many times slower than zeros."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def main() -> None:
    """Run all rows and write the table after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("rbc12", "nuclei"))
    parser.add_argument("data", type=Path)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--epsilons", type=float, nargs="*", default=[1, 3, 6])
    parser.add_argument("--calibrations", nargs="*", default=["paper", "ours local", "ours central"])
    parser.add_argument("--private-only", action="store_true", help="leave out the rows without privacy")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--betas", type=float, nargs="+", default=[0.1], help="Dirichlet, rbc12 only")
    parser.add_argument("--exclude", nargs="*", default=[], help="classes of rbc12 to leave out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=0.3)
    parser.add_argument("--targets", default="paper")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, each on one thread")
    parser.add_argument("-o", "--output", type=Path, required=True)
    wanted = parser.parse_args()
    todo, found = rows(wanted), []
    with ProcessPoolExecutor(wanted.processes, get_context("spawn"), _quick) as pool:
        futures = [pool.submit(run, wanted.task, row, wanted) for row in todo]
        for row, future in zip(todo, futures, strict=True):
            found.append((row, future.result()))
            print(row, {k: round(v, 3) for k, v in found[-1][1].items()}, flush=True)
            write(wanted, found)


if __name__ == "__main__":
    main()
