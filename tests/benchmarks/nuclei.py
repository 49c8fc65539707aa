"""Every strategy on real images, one command: writes a Markdown table with mean and spread per site.

    python -m tests.benchmarks.nuclei DATA --seeds 0 1 2 --rounds 8 -o tests/benchmarks/nuclei.md

DATA holds one folder per site with a datalist.json (Decathlon layout). Same budget for all: rounds, steps, batch, optimizer.
"""

import argparse
import json
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.federation.build import assemble_job
from consilium.federation.engine import simulate

ROWS: dict[str, dict] = {
    "local_only": {"name": "local_only"},
    "centralized": {"name": "centralized"},
    "fedit": {"name": "fedit"},
    "ffa_lora": {"name": "ffa_lora"},
    "fedsa_lora": {"name": "fedsa_lora"},
    **{f"fediat {s}": {"name": "fediat", "sharing": s, "sor_weight": 0.0} for s in ("M1", "M2", "M3", "M4")},
    **{f"fediat {s} + SOR": {"name": "fediat", "sharing": s, "sor_weight": 1e-4} for s in ("M1", "M2", "M3", "M4")},
}


BOTTLENECK_ROWS: dict[str, dict] = {
    "local_only, bottleneck": {"name": "local_only"},
    "FedFMS": {"name": "fedsca", "low": 0, "mixture": "mean", "pull": 0.0},
    "FedProx": {"name": "fedprox"},
    "LAT, L = 1": {"name": "fedsca", "low": 1, "mixture": "mean", "pull": 0.0},
    "LAT, L = 4": {"name": "fedsca", "low": 4, "mixture": "mean", "pull": 0.0},
    "SGCA, all": {"name": "fedsca", "low": 0, "pull": 0.0},
    "FedSCA, L = 1": {"name": "fedsca", "low": 1},
    "FedSCA, L = 4": {"name": "fedsca", "low": 4},
    "FedSCA, all": {"name": "fedsca", "low": 0},
    "FedSCA, L = 4, alpha 3": {"name": "fedsca", "low": 4, "alpha": 3.0},
}
"""FedSCA's comparison, on bottleneck adapters."""


def config(row: str, seed: int, rounds: int, steps: int, lr: float) -> JobConfig:
    """Return the job of one row."""
    lora = row in ROWS
    return JobConfig.model_validate(
        {
            "name": "nuclei",
            "strategy": (ROWS if lora else BOTTLENECK_ROWS)[row],
            "model": {"name": "sam", "variant": "tiny", "image_size": 128},
            "adapter": {"rank": 8, "alpha": 8, "targets": "paper"} if lora else {"kind": "bottleneck"},
            "task": {"classes": ["nucleus"]},
            "training": {"rounds": rounds, "local_steps": steps, "batch_size": 4, "optimizer": "adam", "lr": lr, "seed": seed},
        }
    )


def run(data: Path, row: str, seed: int, rounds: int, steps: int, lr: float) -> dict[str, dict[str, float]]:
    """Return the final metrics per site of one run."""
    sites = {p.parent.name: SiteConfig(datalist=p) for p in sorted(data.glob("*/datalist.json"))}
    if row == "centralized":
        steps *= len(sites)  # the pooled site does the steps of all sites
    with tempfile.TemporaryDirectory() as workspace:
        job = assemble_job(config(row, seed, rounds, steps, lr))
        simulate(job, sites, Path(workspace), lambda event: None)
        return json.loads((Path(workspace) / "results.json").read_text())


def table(results: dict[str, list[dict[str, dict[str, float]]]], stage: str) -> list[str]:
    """Return Markdown rows: mean and standard deviation over the seeds, per site and over sites."""
    sites = sorted(next(iter(results.values()))[0])
    lines = ["| strategy | " + " | ".join(sites) + " | mean of sites |", "|---" * (len(sites) + 2) + "|"]
    for name, runs in results.items():
        cells = [[run[site].get(f"test/{stage}/dice") for run in runs] for site in sites]
        if any(value is None for cell in cells for value in cell):
            continue  # a pooled run has no personalized models
        cells.append([statistics.mean(values) for values in zip(*cells, strict=True)])
        lines.append(f"| {name} | " + " | ".join(_cell(values) for values in cells) + " |")
    return lines


def _cell(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def main() -> None:
    """Run all rows and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), help="default: the LoRA rows; fedsca: its comparison")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, each on one thread")
    parser.add_argument("-o", "--output", type=Path, required=True)
    wanted = parser.parse_args()
    if wanted.rows == ["fedsca"]:
        wanted.rows = ["fedsa_lora", *BOTTLENECK_ROWS]
    todo = [(seed, name) for seed in wanted.seeds for name in wanted.rows]
    results: dict[str, list] = {}
    with ProcessPoolExecutor(wanted.processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        futures = [pool.submit(run, wanted.data, n, s, wanted.rounds, wanted.steps, wanted.lr) for s, n in todo]
        for (seed, name), future in zip(todo, futures, strict=True):
            found = future.result()
            results.setdefault(name, []).append(found)
            mean = statistics.mean(site["test/global/dice"] for site in found.values())
            print(f"seed {seed}  {name}: mean test Dice {mean:.3f}", flush=True)
            _write(wanted, results)


def _write(wanted: argparse.Namespace, results: dict[str, list]) -> None:
    base = {"base (not adapted)": next(iter(results.values()))[:1]}
    budget = f"{wanted.rounds} rounds of {wanted.steps} steps of batch 4, Adam {wanted.lr:g}, rank 8, targets `paper`"
    seeds = f"{max(map(len, results.values()))} seed(s): mean ± standard deviation"
    lines = [f"{budget}; {seeds}; test Dice.", "", "Base:", "", *table(base, "pretrained"), ""]
    lines += ["The federation's result (aggregate + own local factors):", "", *table(results, "global"), ""]
    lines += [
        "Each site's own model as its last training left it:",
        "",
        *table(results, "personalized"),
        "",
    ]
    wanted.output.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
