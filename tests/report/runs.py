"""Folders of finished runs, made by hand, for the tests of comparisons."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from consilium.core.messages import Stage
from consilium.report.compare.comparability import Group, group_comparable
from consilium.report.compare.score_statistics import GroupScores, scores_of
from consilium.report.run_record import RunRecord, read_finished_run
from tests.conftest import small_cells

Scores = Mapping[str, float]


PRIVATE = {"unit": "site", "epsilon": 8.0, "clip": 1.0}


def make(folder: Path, scores: Scores, strategy: Any = "fedit", seed: int = 0, n: int = 10, **more: Any) -> Path:
    """Write a run folder as a run leaves it: accuracy by site, of `n` samples each, a pretrained model of 0.2."""
    config = small_cells(strategy, seed=seed).model_dump() | more
    if "data" not in more:
        config["data"] = {"phantoms": None, "dataset": None}  # real data: the same with every seed
    metrics = {
        site: {
            "test/global/accuracy": value,
            "test/global/n": float(n),
            "test/pretrained/accuracy": 0.2,
            "test/pretrained/n": n,
        }
        for site, value in scores.items()
    }
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(config))
    (folder / "results.json").write_text(json.dumps(metrics))
    lines = [{"event": "joined", "site": site, "round": 0} for site in scores]
    lines += [result(site, round, 0.1 * round) for round in range(3) for site in scores]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def result(site: str, round: int, score: float) -> dict[str, Any]:
    metrics = {"validation/global/accuracy": score, "comm/bytes_up": 100.0, "comm/bytes_down": 50.0, "train/seconds": 2.0}
    return {"event": "result", "site": site, "round": round, "phase": 0, "metrics": metrics}


def change(folder: Path, site: str, **values: float) -> None:
    """Change closing metrics of a run, by names with _ for /."""
    path = folder / "results.json"
    results = json.loads(path.read_text())
    results[site] |= {key.replace("__", "/"): value for key, value in values.items()}
    path.write_text(json.dumps(results))


def read(*folders: Path) -> list[RunRecord]:
    return [read_finished_run(folder, folder.name) for folder in folders]


def group_of(*folders: Path) -> Group:
    groups, why = group_comparable(read(*folders))
    assert why == []
    return groups[0]


def accuracy(*folders: Path) -> GroupScores:
    return scores_of(group_of(*folders), Stage.GLOBAL, "accuracy")


def made(folder: Path, scores: Mapping[str, Sequence[Sequence[float]]]) -> list[Path]:
    """Write runs of strategies: scores by seed and site."""
    return [
        make(folder / f"{name}-{seed}", {f"s{i}": v for i, v in enumerate(values)}, name, seed)
        for name, seeds in scores.items()
        for seed, values in enumerate(seeds)
    ]


def note_in(folder: Path, *events: dict[str, Any]) -> Path:
    """Put lines at the start of a run's record."""
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + path.read_text())
    return folder


def noted(run: Path, values: Sequence[float]) -> Path:
    """Let a run have measured a drift in each round."""
    lines = [{"event": "diagnostics", "round": r, "phase": 0, "values": {"drift/cross": v}} for r, v in enumerate(values)]
    path = run / "metrics.jsonl"
    path.write_text(path.read_text() + "".join(json.dumps(line) + "\n" for line in lines))
    return run


def study_runs(folder: Path) -> list[RunRecord]:
    """Return two methods of a study in two data sets."""
    return [
        read_finished_run(
            make(folder / f"{m}-{d}", {"s": v}, m, n=n), f"{m}-{d}", {"method": m.upper(), "data": d, "rank": "4"}
        )
        for (m, v), (d, n) in itertools.product({"fedit": 0.5, "ffa_lora": 0.6}.items(), {"easy": 10, "hard": 20}.items())
    ]
