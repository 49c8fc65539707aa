"""The same work by five ways: bare PyTorch + PEFT, ours in one process and on FLARE, plain FLARE, and Flower.

    python -m tests.benchmarks.peers --weights stories260K --texts e2e -o peers.md

WEIGHTS: a transformers folder of a Llama; TEXTS: a folder with train.jsonl ("input", "output"). LoRA of rank 8 on q, k, v; four
sites, five rounds of ten steps of eight samples, one thread each, the same validations, and at the end scores on test texts and
answers to three prompts a site by three models. Each way begins with a new process.
`total` is from its start to its end, `start-up` to the first round, `a round` the mean of the five; `processor` the seconds of
all its processes; memory the most that they had together, resident set sizes summed, and with what they share counted once
(proportional set size). Flower gets an environment of its own, made by pip; a line says so
where it cannot be had.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.peer.work import ANSWERS

SITES, ROUNDS, STEPS, BATCH, SAMPLES, SCORED = 4, 5, 10, 8, 400, 32
PROMPT = "{instruction} = "
WAYS = {
    "bare": "bare PyTorch + PEFT loop",
    "inprocess": "Consilium in process",
    "flare": "Consilium, FLARE engine",
    "plain_flare": "plain FLARE, Client API + PEFT",
    "flower": "Flower",
}
CLOSE = 1e-4
"""How far losses may be apart that should be the same."""
MARK = "PEERS_RUN"


def lay_out(folder: Path, weights: Path, texts: Path) -> None:
    """Write the sites' data, our job, and what the others need to do the same: first values, and who is in which batch."""
    lines = (texts / "train.jsonl").read_text().splitlines()
    names = [f"site-{number}" for number in range(1, SITES + 1)]
    rows = iter(lines)
    for name in names:
        (folder / "data" / name).mkdir(parents=True)
        for split, count in (("training", SAMPLES), ("validation", SCORED), ("test", SCORED)):
            (folder / "data" / name / f"{split}.jsonl").write_text("\n".join(next(rows) for _ in range(count)) + "\n")
    _write_job(folder, weights)
    orders = {name: [_orders(number, name) for number in range(ROUNDS)] for name in names}
    training = {"rounds": ROUNDS, "batch_size": BATCH, "lr": 1e-3}
    work = {"weights": str(weights), "prompt": PROMPT, "training": training, "orders": orders}
    (folder / "work.json").write_text(json.dumps(work))


def _write_job(folder: Path, weights: Path) -> None:
    import yaml
    from safetensors.torch import save_file

    from consilium.config.job import load_job
    from consilium.federation.job_assembly import assemble_job

    shape = json.loads((weights / "config.json").read_text())
    job = {
        "name": "peers",
        "strategy": "fedit",
        "model": {"name": "causal_lm", "variant": "folder", "checkpoint": str(weights), "config": shape},
        "adapter": {"rank": 8, "alpha": 8, "targets": "qkv"},
        "task": {"name": "language", "prompt": PROMPT},
        "training": {"rounds": ROUNDS, "local_steps": STEPS, "batch_size": BATCH, "lr": 1e-3, "seed": 0},
        "federation": {"min_sites": SITES},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    initial = assemble_job(load_job(folder / "job.yaml")).initial
    save_file({f"base_model.model.{name}.default.weight": one for name, one in initial.items()}, folder / "initial.safetensors")


def _orders(number: int, site: str) -> list[list[int]]:
    """Return the samples of every batch of a round at a site, as our loop draws them."""
    import torch

    from consilium.core.seeding import seed_for

    seed = seed_for(seed_for(0, "train", number, 0, site), "epoch", 0)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[start : start + BATCH] for start in range(0, STEPS * BATCH, BATCH)]


def command(way: str, folder: Path, python: Path) -> list[str]:
    """Return what a user of this way types."""
    if way in ("inprocess", "flare"):
        consilium = str(Path(sys.executable).with_name("consilium"))
        return [
            consilium, "simulate", str(folder / "job.yaml"), "--engine", way,
            "--data", str(folder / "data"), "--workspace", str(folder / "run"),
        ]  # fmt: skip
    return [str(python if way == "flower" else sys.executable), "-m", f"tests.benchmarks.peer.{way}", str(folder)]


def measure(way: str, laid_out: Path, python: Path) -> dict[str, Any]:
    """Run one way on a copy of what is laid out; return its numbers and losses. Raises CalledProcessError."""
    import shutil

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "work"
        shutil.copytree(laid_out, folder)
        mark = uuid.uuid4().hex
        root = Path(__file__).parents[2]
        paths = os.pathsep.join([str(root), str(root / "custom"), os.environ.get("PYTHONPATH", "")])
        own = {MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PEER_FOLDER": str(folder)}
        log, load = Path(place) / "log", os.getloadavg()[0]
        with open(log, "w") as output, watched(mark) as seen:
            began = time.time()
            run = subprocess.run(command(way, folder, python), env=os.environ | own, stdout=output, stderr=output, cwd=place)
            ended = time.time()
        if run.returncode or not any((folder / name).is_file() for name in ("marks.jsonl", "run/results.json")):
            raise ConnectionAbortedError(f"{way}: exit code {run.returncode}\n{log.read_text()[-3000:]}")
        first, last, losses = outcome(way, folder)
        answers = written(way, folder)
    times = {"total": ended - began, "start-up": first - began, "a round": (last - first) / ROUNDS}
    return {**times, **seen, "load": load, "losses": losses, "answers": answers}


@contextmanager
def watched(mark: str) -> Iterator[dict[str, float]]:
    """Yield what holds memory, number and processor time of the processes that inherit `mark`, when the block has ended."""
    found: dict[str, float] = {"processor": 0.0, "MB": 0.0, "shared once": 0.0, "processes": 0.0}
    ours: dict[int, psutil.Process | None] = {}
    used: dict[int, float] = {}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.3):
            sizes, shared_once = [], 0
            for pid in psutil.pids():
                try:
                    if pid not in ours:
                        one = psutil.Process(pid)
                        ours[pid] = one if one.environ().get(MARK) == mark else None
                    if (known := ours[pid]) is not None:
                        size = known.memory_full_info()
                        sizes.append(size.rss)
                        shared_once += size.pss
                        used[pid] = sum(known.cpu_times()[:2])
                except psutil.Error:
                    continue
            if sum(sizes) > found["MB"] * 1e6:
                found["MB"], found["processes"] = sum(sizes) / 1e6, len(sizes)
            found["shared once"] = max(found["shared once"], shared_once / 1e6)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        found["processor"] = sum(used.values())


def outcome(way: str, folder: Path) -> tuple[float, float, dict[str, float]]:
    """Return when the first round began, when the last one ended, and losses by round, site and model."""
    if way in ("inprocess", "flare"):
        return _ours(folder / "run")
    lines = [json.loads(line) for line in (folder / "marks.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if line["what"] == "round"]
    losses: dict[str, float] = {}
    for number, line in enumerate(rounds):
        place = line.get("round", number)
        losses |= {f"{place} {s} {name}": value for s, one in line["losses"].items() for name, value in one.items()}
    for line in lines:
        if line["what"] == "end":
            losses |= {f"end {s} {name}": value for s, one in line["losses"].items() for name, value in one.items()}
    first = min(line["at"] for line in lines if line["what"] == "begin")
    return first, max(line["at"] for line in rounds), losses


def _ours(run: Path) -> tuple[float, float, dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = {event: [one["time"] for one in lines if one["event"] == event] for event in ("started", "concluded")}
    names = {"validation/global/loss": "global", "validation/personalized/loss": "personalized", "train/loss": "train"}
    losses = {
        f"{line['round']} {line['site']} {names[name]}": value
        for line in lines if line["event"] == "result" for name, value in line["metrics"].items() if name in names
    }  # fmt: skip
    for site, metrics in json.loads((run / "results.json").read_text()).items():
        losses |= {
            f"end {site} {name.split('/')[1]}": value
            for name, value in metrics.items() if name.startswith("test/") and name.endswith("/loss")
        }  # fmt: skip
    return min(times["started"]), max(times["concluded"]), losses


def written(way: str, folder: Path) -> dict[str, list[str]]:
    """Return what each site's models wrote at the end to three test prompts, by site and model."""
    if way not in ("inprocess", "flare"):
        files = {path.stem.removeprefix(ANSWERS): path for path in folder.glob(f"{ANSWERS}*.json")}
        return {f"{s} {name}": said for s, path in files.items() for name, said in json.loads(path.read_text()).items()}
    found: dict[str, list[str]] = {}
    for path in (folder / "run" / "sites").glob("*/cases.json"):
        for case in json.loads(path.read_text())["cases"]:
            for name, said in case["said"].items():
                found.setdefault(f"{path.parent.name} {name.split('/')[-1]}", []).append(said)
    return found


def flower(place: Path) -> Path | None:
    """Return the Python of an environment with Flower, beside this one's torch and PEFT; None where it cannot be made."""
    python = place / "bin" / "python"
    if not python.is_file():
        venv.create(place, with_pip=True)
        made = subprocess.run([python, "-m", "pip", "install", "-q", "flwr[simulation]"], capture_output=True, text=True)
        if made.returncode:
            print(f"no Flower: {made.stderr.strip().splitlines()[-1]}")
            return None
        packages = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        (place / packages / "zz_peers.pth").write_text(f"{Path(sys.executable).parent.parent / packages}\n")
    return python


def wire_bytes(folder: Path) -> dict[str, int]:
    """Return the bytes of a site's update as FLARE serializes it: ours, plain FLARE's, and its parameters' own."""
    from nvflare.app_common.abstract.fl_model import FLModel
    from nvflare.app_common.utils.fl_model_utils import FLModelUtils
    from nvflare.fuel.utils import fobs
    from safetensors.torch import load_file

    from consilium.core.messages import Payload
    from consilium.flare.job import wire

    wire.register()
    values = load_file(folder / "initial.safetensors")
    names = {n: n.removeprefix("base_model.model.").removesuffix(".default.weight") for n in values}
    metrics = {f"validation/{stage}/{name}": 1.0 for stage in ("global", "personalized") for name in ("loss", "perplexity")}
    ours = Payload(0, 0, {names[n]: t for n, t in values.items()}, metrics=metrics)
    plain = FLModelUtils.to_shareable(FLModel(params=values, metrics=metrics))
    return {
        "flare": len(fobs.dumps(wire.encode(ours, "", update=True, packed=True))),
        "plain_flare": len(fobs.dumps(plain)),
        "raw": sum(t.numel() * t.element_size() for t in values.values()),
    }


def table(found: Mapping[str, list[dict[str, Any]]], sizes: Mapping[str, int]) -> list[str]:
    """Return Markdown rows: every run's seconds, and the memory and the processes of the first."""
    heads = [
        "",
        "total s",
        "start-up s",
        "s a round",
        "processor s",
        "MB together (processes)",
        "MB, shared once",
        "bytes up a site",
        "load before",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for way, runs in found.items():
        numbers = [" / ".join(f"{one[key]:.1f}" for one in runs) for key in ("total", "start-up", "a round", "processor")]
        memory = f"{statistics.median(one['MB'] for one in runs):,.0f} ({runs[0]['processes']:.0f})"
        once = f"{statistics.median(one['shared once'] for one in runs):,.0f}"
        size, load = f"{sizes[way]:,}" if way in sizes else "-", " / ".join(f"{one['load']:.1f}" for one in runs)
        lines.append("| " + " | ".join([WAYS[way], *numbers, memory, once, size, load]) + " |")
    return [*lines, "", f"Raw bytes of an update: {sizes['raw']:,}.", "", *_apart(found)]


def _apart(found: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """Return how far each way's losses are from those of the bare loop."""
    if "bare" not in found:
        return []
    true, said = found["bare"][0]["losses"], []
    for way, runs in found.items():
        missing = true.keys() ^ runs[0]["losses"].keys()
        most = max((abs(value - runs[0]["losses"].get(name, 1e9)) for name, value in true.items()), default=0.0)
        verdict = f"{len(missing)} are not in both" if missing else f"at most {most:.1e} apart"
        same = sum(runs[0]["answers"].get(name) == said for name, said in found["bare"][0]["answers"].items())
        verdict += f"; answers equal of {same} of {len(found['bare'][0]['answers'])} models"
        said.append(
            f"- {WAYS[way]}: {len(true)} losses of rounds and ends, {verdict}" + ("" if most <= CLOSE else ": **not equal**")
        )
    return said


def main() -> None:
    """Run every way in turn, so many times, and write the table after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--flower", type=Path, default=Path(tempfile.gettempdir()) / "peers-flower", help="its environment")
    parser.add_argument("-o", "--output", type=Path, required=True)
    wanted = parser.parse_args()
    python = flower(wanted.flower.resolve()) if "flower" in wanted.ways else None
    ways = [way for way in wanted.ways if way != "flower" or python]
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as place:
        lay_out(Path(place), wanted.weights.resolve(), wanted.texts.resolve())
        sizes = wire_bytes(Path(place))
        for _ in range(wanted.runs):
            for way in ways:
                found.setdefault(way, []).append(measure(way, Path(place), python or Path()))
                print(way, {k: round(v, 2) for k, v in found[way][-1].items() if k not in ("losses", "answers")}, flush=True)
                wanted.output.write_text("\n".join([*table(found, sizes), ""]))


if __name__ == "__main__":
    main()
