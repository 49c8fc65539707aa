"""The effects of the studies of claims: a difference between two values of an axis, paired by seed, with its 95 % t interval.

    python -m tests.benchmarks.claims claim_iat test/global/dice split=M4 split=M1 --where shift=both

`consilium compare` has the means, the tests and p; it knows neither differences of differences nor diagnostics.
A measure is one of results.json (mean over the sites), one of the last round's diagnostics, or of the server's last state:
`first 2 ranks` (their share of the energy of FedHera's W_g, mean over layers) and `own group` (of the weight that FedSCA's
matrix gives other sites, the share of the site's own group, where sites take turns in two groups).
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from consilium.storage import load_state
from consilium.strategies.fedsca import MATRIX
from consilium.study.cell import record_of
from consilium.study.study import Cell, load


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


OF_THE_STATE = {"first 2 ranks": first_two_ranks, "own group": own_group}


def measured(cell: Cell, measure: str) -> float:
    """Return a finished cell's measure. Raises KeyError for one it has not."""
    if measure in OF_THE_STATE:
        return OF_THE_STATE[measure](cell)
    results = json.loads((cell.folder / "results.json").read_text())
    if all(measure in site for site in results.values()):
        return float(np.mean([site[measure] for site in results.values()]))
    events = map(json.loads, (cell.folder / "metrics.jsonl").read_text().splitlines())
    values = [event["values"] for event in events if event["event"] == "diagnostics"]
    return float([one[measure] for one in values if measure in one][-1])


def by_seed(cells: list[Cell], measure: str, wanted: Mapping[str, str]) -> dict[str, float]:
    """Return the measure by seed of the finished cells with these values on the axes, one for a seed."""
    fit = [cell for cell in cells if wanted.items() <= cell.labels.items() and record_of(cell.folder).state == "done"]
    assert len({cell.labels["seed"] for cell in fit}) == len(fit), f"{dict(wanted)} leaves several cells for a seed"
    return {cell.labels["seed"]: measured(cell, measure) for cell in fit}


def effect(one: Mapping[str, float], other: Mapping[str, float]) -> tuple[float, float, int]:
    """Return the mean difference over the seeds of both, half the width of its 95 % t interval, and the number of seeds."""
    differences = np.array([one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())])
    n = len(differences)
    spread = differences.std(ddof=1) / n**0.5 if n > 1 else float("nan")
    return float(differences.mean()), float(stats.t.ppf(0.975, max(n - 1, 1)) * spread), n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("measure")
    parser.add_argument("one", help="AXIS=VALUE, or several with commas")
    parser.add_argument("other")
    parser.add_argument("--workspace", type=Path, help="of the study, as it ran")
    parser.add_argument("--where", default="", help="AXIS=VALUE of both")
    args = parser.parse_args()
    cells = load(args.study, workspace=args.workspace).cells()
    both = _values(args.where)
    first, second = (by_seed(cells, args.measure, both | _values(text)) for text in (args.one, args.other))
    mean, half, n = effect(first, second)
    print(f"{args.study} {args.measure}, {args.where or 'all'}: {args.one} {np.mean(list(first.values())):.4f}, ", end="")
    print(f"{args.other} {np.mean(list(second.values())):.4f}; difference {mean:+.4f} ± {half:.4f} ({n} seeds)")


def _values(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split(",") if part)


if __name__ == "__main__":
    main()
