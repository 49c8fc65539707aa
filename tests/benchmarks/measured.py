"""What finished cells measured, kept in tables beside RESULTS.md: a row per cell and measure, so that more seeds can be added.

A measure is one of results.json (mean over the sites, or one site's: `test/global/dice at NAME`), one of the last round's
diagnostics, `seconds` of the cell, or of the server's last state: `first 2 ranks` (their share of the energy of FedHera's W_g,
mean over layers) and `own group` (of the weight that FedSCA's matrix gives other sites, the share of the site's own group,
where sites take turns in two groups), and
`noise / signal` of a private run, by its plan: of one noisy step of DP-SGD, mean over the sites that take one, or of a release
at site level, the expected norm of the noise over the largest norm that the mean of clipped contributions can have.
"""

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from consilium.core.storage import load_state
from consilium.privacy.plan import Plan, make_plan, noise_to_signal
from consilium.strategies.fedsca import MATRIX
from consilium.study.records import record_of
from consilium.study.study import Cell

FOLDER = Path(__file__).parent / "measured"
MEASURE, VALUE, SECONDS = "measure", "value", "seconds"
Rows = dict[tuple[tuple[str, str], ...], float]
"""A value by labels and measure, each a (heading, text)."""


def first_two_ranks(cell: Cell) -> float:
    """Return which share of the energy of FedHera's W_g its first two ranks hold, mean over layers."""
    state, _ = load_state(cell.folder / "server" / "state.safetensors")
    updates = [tensor for name, tensor in state.items() if name.endswith(".dense")]
    values = [torch.linalg.svdvals(one.double()).square() for one in updates]
    return float(np.mean([float(one[:2].sum() / one.sum()) for one in values]))


def own_group(cell: Cell) -> float:
    """Return which share of the weight that FedSCA's matrix gives other sites goes to the site's own of two groups."""
    state, _ = load_state(cell.folder / "server" / "state.safetensors")
    others = state[f"matrices/{MATRIX}"].clone().fill_diagonal_(0)
    same = torch.arange(len(others)) % 2 == torch.arange(len(others))[:, None] % 2
    return float((others * same).sum() / others.sum())


def noise_over_signal(cell: Cell) -> float:
    """Return the expected norm of the noise over the most that the signal's can be; 0 without privacy."""
    config, events = cell.load(), [json.loads(line) for line in (cell.folder / "metrics.jsonl").read_text().splitlines()]
    dimensions = next(one["shared"] for one in events if one["event"] == "parameters")
    units = [one["weight"] for one in events if one["event"] == "result" and (one["round"], one["phase"]) == (0, 0)]
    plans = [plan for count in units if (plan := make_plan(config, config.strategy, count))]
    if plans and config.dpsgd is None:
        return noise_to_signal(plans[0], dimensions, len(units))
    ratios = [plan.noise_multiplier * (dimensions * of_the_noise(plan, len(units))) ** 0.5 / drawn(plan, count)
              for plan, count in zip(plans, units, strict=True)] if plans else [0.0]  # fmt: skip
    return float(np.mean(ratios))


def of_the_noise(plan: Plan, sites: int) -> float:
    """Return how much more variance a sum carries than the plan counts, where more sites than it counts add their share."""
    return sites / plan.shares if plan.by_step else 1.0


def drawn(plan: Plan, units: int) -> float:
    """Return how many records or patients a step draws on average, of so many."""
    divisor = getattr(plan.config, "divisor", None)
    return divisor if plan.by_step and divisor else plan.event.sample_rate * units


NOISE = "noise / signal"
OF_THE_STATE = {"first 2 ranks": first_two_ranks, "own group": own_group, NOISE: noise_over_signal}


def measured(cell: Cell, measure: str) -> float:
    """Return a finished cell's measure. Raises KeyError for one it has not."""
    if measure in OF_THE_STATE:
        return OF_THE_STATE[measure](cell)
    results = json.loads((cell.folder / "results.json").read_text())
    score, _, place = measure.partition(" at ")
    sites = [results.get(place, {})] if place else results.values()
    scored = [site for site in sites if any(name.startswith("test/") for name in site)]  # others have no test split
    if scored and all(score in site for site in scored):
        return float(np.mean([site[score] for site in scored]))
    events = map(json.loads, (cell.folder / "metrics.jsonl").read_text().splitlines())
    values = [event["values"][measure] for event in events if event["event"] == "diagnostics" and measure in event["values"]]
    if not values:
        raise KeyError(f"{cell.name}: measured no {measure!r}")
    return float(values[-1])


def collected(cells: Iterable[Cell], wanted: dict[str, list[dict[str, str]]]) -> Rows:
    """Return what finished cells measured: each measure of those cells whose labels fit one of its, and all cells' seconds."""
    found: Rows = {}
    for cell in cells:
        record = record_of(cell.folder)
        if record.state != "done":
            continue
        fit = [name for name, places in wanted.items() if any(one.items() <= cell.labels.items() for one in places)]
        values = {name: measured(cell, name) for name in fit} | {SECONDS: round(record.seconds, 1)}
        found |= {(*cell.labels.items(), (MEASURE, name)): value for name, value in values.items()}
    return found


def read(study: str, folder: Path = FOLDER) -> Rows:
    """Return what is kept of a study; nothing where there is no table."""
    path = folder / f"{study}.csv"
    rows = csv.DictReader(io.StringIO(path.read_text())) if path.exists() else []
    return {tuple((name, text) for name, text in row.items() if name != VALUE): float(row[VALUE]) for row in rows}


def keep(study: str, rows: Rows, folder: Path = FOLDER) -> None:
    """Write them over those of the same cell and measure; others stay."""
    whole = read(study, folder) | rows
    file = io.StringIO()
    writer = csv.DictWriter(file, [*(name for name, _ in next(iter(whole))), VALUE], lineterminator="\n")
    writer.writeheader()
    writer.writerows(dict(key) | {VALUE: f"{value:.6g}"} for key, value in sorted(whole.items()))
    folder.mkdir(exist_ok=True)
    (folder / f"{study}.csv").write_text(file.getvalue())
