"""Measures of finished cells, in tables beside RESULTS.md: one row per cell and measure, so that more seeds can be added.

A measure is one of these:

- a score from results.json: the mean over the sites, or one site's score (`test/global/dice at NAME`);
- a diagnostic of the last round;
- `seconds` of the cell;
- `first 2 ranks`: the share of the energy of FedHera's W_g in its first two ranks, mean over layers, at the end of the run;
- `own group`: of the weight that FedSCA's matrix gives other sites, the share of the site's own group. Sites alternate between
  two groups;
- `noise / signal` of a private run, from its plan: the expected norm of the noise over the largest possible norm of the mean of
  clipped contributions. For DP-SGD it is of one noisy step, mean over the sites; at site level it is of one release.
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
from consilium.study.definition import Cell
from consilium.study.records import current_record
from tests.benchmarks.spectrum import RANKS, global_update, shares

FOLDER = Path(__file__).parent / "measured"
MEASURE, VALUE, SECONDS = "measure", "value", "seconds"
Rows = dict[tuple[tuple[str, str], ...], float]
"""Values by labels and measure. Each label is a pair (heading, text)."""


def first_two_ranks(cell: Cell) -> float:
    """Return the share of the energy of FedHera's W_g in its first two ranks, mean over layers."""
    mean_of_layers, _, _ = shares(global_update(cell.folder))[RANKS.index(2)]
    return mean_of_layers


def own_group(cell: Cell) -> float:
    """Return the share of a site's own group in the weight that FedSCA's matrix gives other sites."""
    state, _ = load_state(cell.folder / "server" / "state.safetensors")
    others = state[f"matrices/{MATRIX}"].clone().fill_diagonal_(0)
    same = torch.arange(len(others)) % 2 == torch.arange(len(others))[:, None] % 2
    return float((others * same).sum() / others.sum())


def noise_over_signal(cell: Cell) -> float:
    """Return the expected norm of the noise over the largest possible norm of the signal; 0 without privacy."""
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
    """Return the ratio of a sum's noise variance to the variance that the plan counts. More sites may add noise."""
    return sites / plan.shares if plan.is_distributed_dpsgd else 1.0


def drawn(plan: Plan, units: int) -> float:
    """Return how many records or patients a step draws on average from `units` of them."""
    divisor = getattr(plan.config, "divisor", None)
    return divisor if plan.is_distributed_dpsgd and divisor else plan.event.sample_rate * units


NOISE = "noise / signal"
OF_THE_STATE = {"first 2 ranks": first_two_ranks, "own group": own_group, NOISE: noise_over_signal}


def measured(cell: Cell, measure: str) -> float:
    """Return a measure of a finished cell. Raises KeyError if the cell does not have it."""
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
        raise KeyError(f"{cell.display_name}: measured no {measure!r}")
    return float(values[-1])


def collected(cells: Iterable[Cell], wanted: dict[str, list[dict[str, str]]]) -> Rows:
    """Return the wanted measures of finished cells and every cell's seconds. `wanted`: by measure, the labels of its cells."""
    found: Rows = {}
    for cell in cells:
        record = current_record(cell.folder)
        if record.state != "done":
            continue
        fit = [name for name, places in wanted.items() if any(one.items() <= cell.labels.items() for one in places)]
        values = {name: measured(cell, name) for name in fit} | {SECONDS: round(record.seconds, 1)}
        found |= {(*cell.labels.items(), (MEASURE, name)): value for name, value in values.items()}
    return found


def read(study: str, folder: Path = FOLDER) -> Rows:
    """Return the stored measures of a study; empty if it has no table."""
    path = folder / f"{study}.csv"
    rows = csv.DictReader(io.StringIO(path.read_text())) if path.exists() else []
    return {tuple((name, text) for name, text in row.items() if name != VALUE): float(row[VALUE]) for row in rows}


def keep(study: str, rows: Rows, folder: Path = FOLDER) -> None:
    """Store rows of a study. They replace rows of the same cell and measure; other rows stay."""
    whole = read(study, folder) | rows
    file = io.StringIO()
    writer = csv.DictWriter(file, [*(name for name, _ in next(iter(whole))), VALUE], lineterminator="\n")
    writer.writeheader()
    writer.writerows(dict(key) | {VALUE: f"{value:.6g}"} for key, value in sorted(whole.items()))
    folder.mkdir(exist_ok=True)
    (folder / f"{study}.csv").write_text(file.getvalue())
