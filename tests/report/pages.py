"""A run's folder by hand, and a reader of pages, for the tests of `consilium report`."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from consilium.report.predictions import CASES, FOLDER, case_file_name
from tests.conftest import small_config

STAGES = ("pretrained", "global", "personalized")
SITES = ("north", "south")


def scores(split: str, value: float, **more: float) -> dict[str, float]:
    """Return Dice of the three models, 0.1 apart, with n and ends of an interval."""
    found = {f"{split}/{stage}/dice": value + place / 10 for place, stage in enumerate(STAGES)}
    ends = {
        f"{split}/{stage}/dice{end}": found[f"{split}/{stage}/dice"] + by
        for stage in STAGES
        for end, by in (("_low", -0.05), ("_high", 0.05))
    }
    return found | ends | {f"{split}/{stage}/n": 3.0 for stage in STAGES} | more


def make_run(folder: Path, rounds: int = 2, simulated: bool = True, **changes: Any) -> Path:
    """Write the folder of a finished run of two sites, as RunLog and the sites would, with a job's `changes`."""
    folder.mkdir(parents=True)
    raw = small_config("fedit", rounds=rounds).model_dump(mode="json") | changes
    (folder / "job.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    (folder / "versions.json").write_text(json.dumps({"consilium": "0.0", "torch": "2"}))
    lines: list[dict[str, Any]] = [{"event": "joined", "site": site, "round": 0, "ledger": ""} for site in SITES]
    for round in range(rounds):
        lines.append({"event": "started", "round": round, "phase": 0, "sites": list(SITES)})
        for site in SITES:
            metrics = {"validation/global/dice": 0.5 + 0.1 * round, "train/loss": 1.0 - 0.2 * round, "train/seconds": 2.0}
            metrics |= {"comm/bytes_up": 1024.0, "comm/bytes_down": 2048.0}
            lines.append({"event": "result", "site": site, "round": round, "phase": 0, "weight": 1, "metrics": metrics})
        lines.append({"event": "concluded", "round": round, "phase": 0, "sites": list(SITES)})
    results = {site: scores("test", 0.5 + place / 10) for place, site in enumerate(SITES)}
    lines += [{"event": "final", "site": site, "round": rounds, "metrics": results[site]} for site in SITES]
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"time": 1.7e9 + i} | x) + "\n" for i, x in enumerate(lines)))
    (folder / "results.json").write_text(json.dumps(results))
    if simulated:
        (folder / "simulation.json").write_text("{}")
    for site in SITES:
        make_cases(folder / "sites" / site, site, results[site], raw["task"])
    return folder


def make_cases(folder: Path, site: str, metrics: dict[str, float], task: dict[str, Any]) -> None:
    """Write what a site keeps: three units, of which the first is the best, and a picture of each for every model."""
    (folder / FOLDER).mkdir(parents=True)
    cases = [{"which": which, "unit": unit, "said": {}} for unit, which in enumerate(("best", "median", "worst"))]
    found = {"form": 1, "site": site, "job": "small", "task": task, "metrics": metrics, "privacy": None}
    found |= {
        "score": "Dice",
        "lower": False,
        "by": "personalized",
        "units": ["a.png", "b.png", "c.png"],
        "classes": ["disc", "cup"],
    }
    found |= {"values": {stage: [0.9, 0.6, None] for stage in STAGES}, "cases": cases, "pictures": []}
    (folder / CASES).write_text(json.dumps(found))
    for case in cases:
        for what in ("picture", "reference", *STAGES):
            Image.new("RGB", (16, 16), (200, 40, 40)).save(folder / FOLDER / case_file_name(case["which"], what), "JPEG")


class Page(HTMLParser):
    """A page taken apart: `tags` with their attributes in order, and all text outside of styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.source, self.text, self._style = text, "", False
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self._style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._style = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._style else data

    def of(self, *names: str) -> list[dict[str, str]]:
        """Return the attributes of every tag of these names."""
        return [attributes for tag, attributes in self.tags if tag in names]
