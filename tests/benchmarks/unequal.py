"""FedHera and its peers at sites with unequal machines, on real text, one command: a line of JSON per run and a Markdown table.

    python -m tests.benchmarks.unequal e2e TEXT/e2e --model WEIGHTS --profiles uniform skewed -o e2e.jsonl
    python -m tests.benchmarks.unequal e2e TEXT/e2e --model WEIGHTS --methods variants --seeds 0 1 -o e2e.jsonl
    python -m tests.benchmarks.unequal medquad TEXT/medquad --model WEIGHTS --sample 0.33 --held-out 1 -o medquad.jsonl
    python -m tests.benchmarks.unequal --table e2e.jsonl

TEXT: instruction data (JSONL). e2e and gsm8k are shared out over --sites by Dirichlet(beta) over a property of the records: the
restaurant's name, the number of solution steps; medquad has a folder per source, each a site. --model: a `transformers` folder;
without it the tiny LM that ships. Tiers are the paper's (train, download) over --shrink. Runs that the output has already are
not repeated.

held-out: loss of sites that were not asked, before the round, mean over the last three rounds. received: loss of what each site
gets at the end, at its own ranks. global: loss of the server's whole update, at full rank. These two on all sites' validation
data, mean over records. Drift: five sites train once more after the last round, as the method would have it and at full rank
from the whole update (the oracle); absolute and relative are Eq. 14 and 15 of the paper.
"""

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.data.partition import share_out
from consilium.errors import ConsiliumError
from consilium.federation.build import assemble_job
from consilium.federation.engine import simulate
from consilium.models.causal_lm.network import TINY_FOLDER
from tests.benchmarks.unequal_scores import FILES, after, closing, costs, diagnostics, held_out

METHODS: dict[str, dict[str, Any]] = {
    "FedHomoLoRA": {"name": "fedhomolora"},
    "FlexLoRA": {"name": "flexlora"},
    "FedHL": {"name": "fedhl"},
    "FLoRA": {"name": "flora"},
    "HetLoRA": {"name": "hetlora"},
    "FedHeLLo": {"name": "fedhello"},
    "FedHera": {"name": "fedhera"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    f"FedHera, {what}": {"name": "fedhera", **options}
    for what, options in {
        "gate neutral": {"gate": "neutral"},
        "gate open": {"gate": "open"},
        "residual score": {"score": "residual"},
        "gate neutral, residual score": {"gate": "neutral", "score": "residual"},
        "literal aggregation": {"aggregation": "literal"},
        "replacing aggregation": {"aggregation": "replace"},
        "raw energy": {"energy": "raw"},
        "random allocation": {"allocation": "random"},
        "literal allocation": {"allocation": "literal"},
        "even allocation": {"allocation": "even"},
    }.items()
}
TIERS = {"low": (4, 32), "medium": (8, 48), "high": (16, 64)}
COLUMNS = {
    "held-out": "held-out",
    "received": "received",
    "global": "global",
    "up": "kB up",
    "down": "kB down",
    "cross": "cross drift",
    "gain": "information gain",
    "saturation": "memory saturation",
    "energy": "energy retained",
    "absolute": "drift, absolute",
    "relative": "relative",
    "cosine": "cosine",
}
"""What a run measured, and its heading."""


@dataclass(frozen=True)
class Row:
    """One run."""

    method: str
    profile: str
    beta: float | None
    seed: int


@dataclass(frozen=True)
class Record:
    """A line of JSON and the class by which it is shared out."""

    line: str
    label: str


# data -----------------------------------------------------------------------------------------------------------------


def spread(wanted: argparse.Namespace, row: Row, folder: Path) -> dict[str, SiteConfig]:
    """Write every site's lists below `folder` and return the sites."""
    if wanted.data == "medquad":
        found = {
            p.parent.name: {s: lines(p.with_name(f), "") for s, f in FILES.items()} for p in wanted.text.glob("*/train.jsonl")
        }
    else:
        splits = {split: lines(wanted.text / file, wanted.data) for split, file in FILES.items()}
        names = [f"site-{i:03d}" for i in range(1, wanted.sites + 1)]
        labels = sorted({record.label for record in splits["training"]})
        found = share_out(splits | {"test": []}, labels, names, row.beta, row.seed, 8)
    for name, splits in sorted(found.items()):
        (folder / name).mkdir(parents=True)
        for split, file in FILES.items():
            kept = splits[split] if split == "training" else splits[split][: wanted.validation]
            (folder / name / file).write_text("".join(f"{record.line}\n" for record in kept))
    return {name: SiteConfig(datalist=folder / name, checkpoints=wanted.model) for name in sorted(found)}


def lines(path: Path, data: str) -> list[Record]:
    """Return the records of a JSONL file."""
    return [Record(line, label(data, json.loads(line))) for line in path.read_text().split("\n") if line.strip()]


def label(data: str, record: Mapping[str, Any]) -> str:
    """Return the property by which a record is shared out."""
    if data == "e2e":
        return re.search(r"name\[([^\]]*)\]", record["input"])[1]
    return str(record["output"].count("\n"))


# one run --------------------------------------------------------------------------------------------------------------


def config(row: Row, wanted: argparse.Namespace) -> JobConfig:
    """Return the job of a row."""
    tiers = {name: {"train": t / wanted.shrink, "download": d / wanted.shrink} for name, (t, d) in TIERS.items()}
    strategy = (METHODS | VARIANTS)[row.method] | {"tiers": tiers, "profile": row.profile, "seed": row.seed}
    if strategy["name"] == "fedhello":
        strategy["rank"] = max(1, int(8 / wanted.shrink))  # the paper's default rank, shrunk as all others
    model: dict[str, Any] = {"name": "causal_lm", "variant": "tiny", "max_length": wanted.length}
    layout = json.loads(((wanted.model or TINY_FOLDER) / "config.json").read_text())
    if wanted.model:
        model |= {"variant": "folder", "checkpoint": "${SITE}", "config": layout}
    training = {"rounds": wanted.rounds, "local_steps": wanted.steps, "batch_size": wanted.batch, "seed": row.seed}
    training |= {"optimizer": "adamw", "lr": wanted.lr, "schedule": "cosine", "precision": "fp32"}
    adapter = {"kind": "dual_rank", "rank": layout["hidden_size"], "scaling": 2.0, "targets": wanted.targets}
    federation = {"fraction_train": wanted.sample, "fraction_evaluate": wanted.held_out, "min_sites": 1}
    common = {"name": "unequal", "strategy": strategy, "model": model, "adapter": adapter, "task": {"name": "language"}}
    return JobConfig.model_validate(common | {"training": training, "federation": federation})


def run(row: Row, wanted: argparse.Namespace) -> dict[str, float]:
    """Return what a row measured."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as workspace:
        folder = Path(workspace)
        sites, job = spread(wanted, row, folder / "data"), assemble_job(config(row, wanted))
        coordinator = simulate(job, sites, folder / "run", lambda event: None)
        counts = {name: len((s.datalist / FILES["validation"]).read_text().splitlines()) for name, s in sites.items()}
        results = json.loads((folder / "run/results.json").read_text())
        events = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        found = closing(results, counts) | held_out(events, wanted.rounds) | costs(events) | diagnostics(events)
        found |= after(job, coordinator, sites, folder)
    return found | {"seconds": time.monotonic() - began}


def attempt(row: Row, wanted: argparse.Namespace) -> dict[str, float]:
    """Return what a row measured, nothing if its loss did not stay finite."""
    try:
        return run(row, wanted)
    except ConsiliumError as error:
        print(row, error, flush=True)
        return {}


# tables ---------------------------------------------------------------------------------------------------------------


def table(path: Path) -> list[str]:
    """Return Markdown: a line per method, profile and beta, mean over seeds; the losses with their standard deviation."""
    groups: dict[tuple, list[dict[str, float]]] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        groups.setdefault((entry["profile"], entry["beta"], entry["method"]), []).append(entry["found"])
    rows = [f"| method | profile | beta | seeds | {' | '.join(COLUMNS.values())} |", "|---" * (4 + len(COLUMNS)) + "|"]
    for (profile, beta, method), runs in groups.items():
        cells = [cell(runs, name) for name in COLUMNS]
        rows.append(f"| {method} | {profile} | {'-' if beta is None else f'{beta:g}'} | {len(runs)} | {' | '.join(cells)} |")
    return rows


def cell(runs: Sequence[Mapping[str, float]], name: str) -> str:
    """Return a cell of the table."""
    values = [run[name] for run in runs if name in run]
    if not values:
        return "-"
    digits = {"up": 1, "down": 1, "gain": 2, "saturation": 2, "cosine": 2, "cross": 2}.get(name, 3)
    losses = ("held-out", "received", "global")
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 and name in losses else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def rows(wanted: argparse.Namespace) -> Iterator[Row]:
    """Yield every run asked for that is not in the output yet."""
    done = {tuple(json.loads(line)["row"]) for line in wanted.output.read_text().splitlines()} if wanted.output.exists() else ()
    named = {"all": list(METHODS), "variants": ["FedHera", *VARIANTS]}
    methods = [method for one in wanted.methods for method in named.get(one, [one])]
    betas = [None] if wanted.data == "medquad" else wanted.betas
    for seed in wanted.seeds:
        for beta in betas:
            for row in (Row(method, profile, beta, seed) for profile in wanted.profiles for method in methods):
                if tuple(asdict(row).values()) not in done:
                    yield row


def arguments() -> argparse.Namespace:
    """Return the command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", choices=("e2e", "gsm8k", "medquad"))
    parser.add_argument("text", nargs="?", type=Path)
    parser.add_argument("--model", type=Path, help="a transformers folder; default: the tiny LM")
    names = ["all", "variants", *METHODS, *VARIANTS]
    help = "all: every method; variants: FedHera and its options"
    parser.add_argument("--methods", nargs="+", default=["all"], choices=names, help=help)
    parser.add_argument("--profiles", nargs="+", default=["skewed"])
    parser.add_argument("--betas", type=float, nargs="+", default=[0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--sites", type=int, default=100)
    parser.add_argument("--sample", type=float, default=0.1)
    parser.add_argument("--held-out", type=float, default=0.15)
    parser.add_argument("--validation", type=int, default=4, help="records of a site at most")
    parser.add_argument("--shrink", type=float, default=4)
    parser.add_argument("--targets", default="paper")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--length", type=int, default=160)
    parser.add_argument("-o", "--output", type=Path, default=Path("unequal.jsonl"))
    parser.add_argument("--table", type=Path, help="write the table of these runs, and run nothing")
    return parser.parse_args()


def main() -> None:
    """Run all rows, a line each as they end, then print the table."""
    wanted = arguments()
    torch.set_num_threads(1)
    for row in rows(wanted) if wanted.table is None else ():
        found = attempt(row, wanted)
        entry = asdict(row) | {"row": list(asdict(row).values()), "found": found}
        with wanted.output.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(row, {name: round(value, 3) for name, value in found.items()}, flush=True)
    print("\n".join(table(wanted.table or wanted.output)))


if __name__ == "__main__":
    main()
