"""FedHera and its peers at sites with unequal machines, on real text, one command: a Markdown table, and a line per run.

    python -m tests.benchmarks.unequal e2e TEXT/e2e --model WEIGHTS --profiles uniform skewed --betas 0.5 -o e2e.jsonl
    python -m tests.benchmarks.unequal e2e TEXT/e2e --model WEIGHTS --methods gates --seeds 0 1 -o gates.jsonl
    python -m tests.benchmarks.unequal medquad TEXT/medquad --model WEIGHTS --sample 0.34 -o medquad.jsonl
    python -m tests.benchmarks.unequal --table e2e.jsonl

TEXT: instruction data (JSONL). e2e and gsm8k are shared out over --sites by Dirichlet(beta) over a property of the records, the
restaurant's name and the number of solution steps; medquad is a folder per source, each a site. --model: a `transformers` folder;
without it the tiny LM that ships. Tiers are the paper's (train, download) over --shrink. Runs already in the output are not
repeated.

held-out: loss of sites that were not asked, before the round, mean over the last three rounds. received: what each site gets at the
end, by its own ranks. global: the server's whole update at full rank. Both on all sites' validation data, mean over records. Drift:
five sites train once more after the last round, as the method would have it and at full rank from the whole update (the oracle).
"""

import argparse
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from consilium import lowrank
from consilium.assemble import Job, assemble_job, build_model, build_site
from consilium.config import JobConfig, SiteConfig
from consilium.coordinator import Coordinator
from consilium.data.partition import share_out
from consilium.exact import ExactServer, global_updates
from consilium.ranks import cross_drift, factors, moves, oracle_drift, others, pair, shapes
from consilium.seeding import seed_for
from consilium.simulate import simulate
from consilium.site import Site
from consilium.strategy import HELD_OUT, Payload, ServerState, Upload

METHODS: dict[str, dict[str, Any]] = {
    "FedHomoLoRA": {"name": "fedhomolora"},
    "FlexLoRA": {"name": "flexlora"},
    "FedHL": {"name": "fedhl"},
    "FLoRA": {"name": "flora"},
    "HetLoRA": {"name": "hetlora"},
    "FedHeLLo": {"name": "fedhello"},
    "FedHera": {"name": "fedhera"},
}
GATES: dict[str, dict[str, Any]] = {
    f"FedHera, {what}": {"name": "fedhera", **options}
    for what, options in {
        "gate paper, product": {"gate": "paper", "score": "product"},
        "gate paper, residual": {"gate": "paper", "score": "residual"},
        "gate neutral, product": {"gate": "neutral", "score": "product"},
        "gate neutral, residual": {"gate": "neutral", "score": "residual"},
        "gate open": {"gate": "open"},
        "standard aggregation": {"aggregation": "standard"},
        "literal allocation": {"allocation": "literal"},
        "even allocation": {"allocation": "even"},
    }.items()
}
TIERS = {"low": (4, 32), "medium": (8, 48), "high": (16, 64)}
LAST = 3
"""Rounds that the held-out loss is the mean of."""
COLUMNS = ("held-out", "received", "global", "up", "down", "cross", "gain", "saturation", "energy", "absolute", "relative", "cosine")


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
        found = {p.parent.name: {s: lines(p.with_name(f), "") for s, f in FILES.items()} for p in wanted.text.glob("*/train.jsonl")}
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


FILES = {"training": "train.jsonl", "validation": "validation.jsonl"}


def lines(path: Path, data: str) -> list[Record]:
    """Return the records of a JSONL file."""
    return [Record(line, label(data, json.loads(line))) for line in path.read_text().splitlines() if line.strip()]


def label(data: str, record: Mapping[str, Any]) -> str:
    """Return the property by which a record is shared out."""
    if data == "e2e":
        return re.search(r"name\[([^\]]*)\]", record["input"])[1]
    return str(record["output"].count("\n"))


# one run --------------------------------------------------------------------------------------------------------------


def config(row: Row, wanted: argparse.Namespace) -> JobConfig:
    """Return the job of a row."""
    tiers = {name: {"train": t / wanted.shrink, "download": d / wanted.shrink} for name, (t, d) in TIERS.items()}
    strategy = (METHODS | GATES)[row.method] | {"tiers": tiers, "profile": row.profile, "seed": row.seed}
    if strategy["name"] == "fedhello":
        strategy["rank"] = max(1, int(8 / wanted.shrink))  # the paper's default rank, shrunk as all others
    model: dict[str, Any] = {"name": "causal_lm", "variant": "tiny", "max_length": wanted.length}
    if wanted.model:
        layout = json.loads((wanted.model / "config.json").read_text())
        model |= {"variant": "folder", "checkpoint": "${SITE}", "config": layout}
    training = {"rounds": wanted.rounds, "local_steps": wanted.steps, "batch_size": wanted.batch, "seed": row.seed}
    training |= {"optimizer": "adamw", "lr": wanted.lr, "schedule": "cosine", "precision": "fp32"}
    adapter = {"kind": "dual_rank", "rank": 64, "scaling": 2.0, "targets": wanted.targets}
    federation = {"sample": wanted.sample, "held_out": wanted.held_out, "min_sites": 1}
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


def closing(results: Mapping[str, Mapping[str, float]], counts: Mapping[str, int]) -> dict[str, float]:
    """Return the losses of the closing evaluation, mean over records."""
    judged = {name: count for name, count in counts.items() if count and name in results}
    stages = ("base", "received")
    return {
        stage: sum(results[n][f"validation/{stage}/loss"] * c for n, c in judged.items()) / sum(judged.values())
        for stage in stages
    }


def held_out(events: Sequence[dict], rounds: int) -> dict[str, float]:
    """Return the loss of sites that were not asked, before the round; mean over the last rounds."""
    name = "validation/received/loss"
    judged = [e for e in events if e["event"] == "held_out" and e["round"] >= rounds - LAST and name in e["metrics"]]
    return {"held-out": statistics.mean(e["metrics"][name] for e in judged)} if judged else {}


def costs(events: Sequence[dict]) -> dict[str, float]:
    """Return kilobytes a site and round, both ways."""
    results = [e["metrics"] for e in events if e["event"] == "result"]
    return {way: statistics.mean(m[f"comm/bytes_{way}"] for m in results) / 1000 for way in ("up", "down")}


def diagnostics(events: Sequence[dict]) -> dict[str, float]:
    """Return the server's diagnostics, mean over rounds (and layers); the energy retained counts from the second round."""
    names = {"drift/cross": "cross", "ranks/information_gain": "gain", "memory/saturation": "saturation"}
    found: dict[str, list[float]] = {}
    for event in events:
        for name, value in event["values"].items() if event["event"] == "diagnostics" else ():
            found.setdefault("energy" if name.startswith("retained") else names.get(name, name), []).append(value)
    return {name: statistics.mean(values) for name, values in found.items()}


# after the last round -------------------------------------------------------------------------------------------------


def after(job: Job, coordinator: Coordinator, sites: Mapping[str, SiteConfig], folder: Path) -> dict[str, float]:
    """Return the loss of the whole update on everybody's validation data, and five sites' drift against the oracle."""
    model, state, whole = build_model(job.config, next(iter(sites.values()))), coordinator.state, full(job, coordinator.state)

    def site(name: str, where: SiteConfig) -> Site:
        return build_site(job, name, where, folder / "after" / name, lambda event: None, model)

    judge = site("everyone", everyone(sites, folder))
    loss = judge.evaluate("whole", Payload(state.round, HELD_OUT, whole)).metrics["validation/received/loss"]
    drifts = []
    for name in random.Random(seed_for(job.config.training.seed, "drift")).sample(sorted(sites), min(5, len(sites))):
        sent, one = job.strategy.broadcast(state, coordinator.sites[name]), site(name, sites[name])
        kinds = {"method": sent, "oracle": Payload(state.round, 0, whole)}
        own, best = (moves(Upload(one.train(kind, p), 1, p, coordinator.sites[name])) for kind, p in kinds.items())
        drifts.append((*oracle_drift(own, best), 1 - cross_drift([own, best])))
    absolute, relative, cosine = (statistics.mean(values) for values in zip(*drifts, strict=True))
    return {"global": loss, "absolute": absolute * job.config.adapter.scaling, "relative": relative, "cosine": cosine}


def full(job: Job, state: ServerState) -> dict[str, torch.Tensor]:
    """Return the server's whole update as factors of full rank, all of them to train."""
    tensors = dict(others(state.shared))
    for layer, (out, into) in shapes(job.initial).items():
        if isinstance(job.strategy, ExactServer):
            update = global_updates(state)[layer]
        else:
            update = lowrank.Update(*factors(state.shared, layer))
        rank = min(out, into)
        product = lowrank.refactor(lowrank.spectrum(update, rank), rank, 1.0, job.initial[f"{layer}.lora_A"])
        tensors |= pair(layer, product)
    return tensors


def everyone(sites: Mapping[str, SiteConfig], folder: Path) -> SiteConfig:
    """Return a site with all sites' validation data."""
    pooled = folder / "everyone"
    pooled.mkdir()
    first = next(iter(sites.values()))
    (pooled / FILES["training"]).write_text((first.datalist / FILES["training"]).read_text())
    text = "".join((s.datalist / FILES["validation"]).read_text() for s in sites.values())
    (pooled / FILES["validation"]).write_text(text)
    return first.model_copy(update={"datalist": pooled})


# tables ---------------------------------------------------------------------------------------------------------------


def table(path: Path) -> list[str]:
    """Return Markdown: a line per method, profile and beta, mean over seeds; the losses with their standard deviation."""
    groups: dict[tuple, list[dict[str, float]]] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        groups.setdefault((entry["profile"], entry["beta"], entry["method"]), []).append(entry["found"])
    rows = [f"| method | profile | beta | seeds | {' | '.join(COLUMNS)} |", "|---" * (4 + len(COLUMNS)) + "|"]
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
    named = {"all": list(METHODS), "gates": list(GATES)}
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
    names = ["all", "gates", *METHODS, *GATES]
    parser.add_argument("--methods", nargs="+", default=["all"], choices=names, help="all: every method; gates: FedHera's variants")
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
        found = run(row, wanted)
        entry = asdict(row) | {"row": list(asdict(row).values()), "found": found}
        with wanted.output.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(row, {name: round(value, 3) for name, value in found.items()}, flush=True)
    print("\n".join(table(wanted.table or wanted.output)))


if __name__ == "__main__":
    main()
