"""Share a classification set out among sites with uneven labels (Hsu et al., arXiv 1909.06335; Li et al., arXiv 2102.02079).

The rule. For every class, shares over the sites are drawn from Dirichlet(beta, ..., beta); its samples, shuffled, are cut at
these shares. Training and validation samples are cut at the same shares; so a site's validation looks like its training.
Then, while a site has fewer than `minimum` training samples, it takes a random one from the site that has most. The test split
is not cut: every site gets all of it, so that all are judged by one measure. Same set, numbers and seed, same partition.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.random import Generator

from consilium.data.datalist import SPLITS, Item, read_datalist
from consilium.errors import DataError
from consilium.seeding import seed_for

Sites = dict[str, dict[str, list[Item]]]
"""Samples by site and split."""


def partition(
    source: Path, folder: Path, sites: int, beta: float, seed: int, minimum: int, exclude: Sequence[str] = ()
) -> dict[str, Any]:
    """Write `folder`/site-K/datalist.json (absolute paths, nothing is copied), partition.json and partition.png.

    Returns partition.json's content: the arguments, the classes, and counts by split, site and class. Raises DataError for a
    source without classes, an unknown class to leave out, too few samples, or a folder that has sites already.
    """
    if (folder / "partition.json").exists() or any(folder.glob("site-*")):
        raise DataError(f"{folder}: holds sites already; give another folder")
    splits, classes = _read(source, exclude)
    names = [f"site-{i}" for i in range(1, sites + 1)]
    if len(splits["training"]) < sites * minimum:
        count = len(splits["training"])
        raise DataError(f"{source}: {count} training samples are too few for {sites} sites of {minimum}; ask for less")
    found = share_out(splits, classes, names, beta, seed, minimum)
    for name in names:
        _write_list(folder / name / "datalist.json", name, classes, found[name])
    summary = {"source": str(source.resolve()), "sites": sites, "beta": beta, "seed": seed, "minimum": minimum}
    summary |= {"excluded": list(exclude), "classes": classes}
    summary |= {split: {name: _counts(found[name][split], classes) for name in names} for split in SPLITS}
    (folder / "partition.json").write_text(json.dumps(summary, indent=1))
    plot(summary).savefig(folder / "partition.png", dpi=120)
    return summary


def share_out(
    splits: dict[str, list[Item]], classes: Sequence[str], names: Sequence[str], beta: float, seed: int, minimum: int
) -> Sites:
    """Return who gets which samples by the rule above; needs at least `minimum` training samples per site."""
    rng = np.random.default_rng(seed_for(seed, "partition"))
    found: Sites = {name: {"training": [], "validation": [], "test": list(splits["test"])} for name in names}
    for label in classes:
        shares = rng.dirichlet([beta] * len(names))
        for split in ("training", "validation"):
            mine = [item for item in splits[split] if str(item.label) == label]
            cuts = np.rint(np.cumsum(shares)[:-1] * len(mine)).astype(int)
            for name, part in zip(names, np.split(rng.permutation(len(mine)), cuts), strict=True):
                found[name][split] += [mine[i] for i in part]
    _top_up([found[name]["training"] for name in names], minimum, rng)
    return found


def _top_up(training: list[list[Item]], minimum: int, rng: Generator) -> None:
    """Move samples, in place, from the largest sites to those under the minimum."""
    while len(poor := min(training, key=len)) < minimum:
        rich = max(training, key=len)
        poor.append(rich.pop(int(rng.integers(len(rich)))))


def plot(summary: dict[str, Any]) -> Figure:
    """Return the training samples of every site as stacked bars, a colour per class."""
    classes, training = summary["classes"], summary["training"]
    figure = Figure(figsize=(9, 1.6 + 0.32 * len(training)), layout="constrained")
    axes, left = figure.subplots(), np.zeros(len(training))
    colors = colormaps["tab10" if len(classes) <= 10 else "tab20"]
    for index, label in enumerate(classes):
        widths = np.array([counts[label] for counts in training.values()])
        axes.barh(list(training), widths, left=left, label=label, color=colors(index % colors.N), edgecolor="white", lw=0.5)
        left = left + widths
    axes.invert_yaxis()
    axes.set_xlabel("training samples")
    axes.set_title(
        f"Dirichlet({summary['beta']:g}) of {len(classes)} classes over {len(training)} sites, seed {summary['seed']}"
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False)
    return figure


def _read(source: Path, exclude: Sequence[str]) -> tuple[dict[str, list[Item]], list[str]]:
    """Return the samples by split and the classes left, sorted (numbers by size)."""
    data = read_datalist(source, classes=True)
    labels = {item.label for items in data.splits.values() for item in items}
    if None in labels:
        raise DataError(f"{source}: has samples without a class; give every one a label")
    known = [str(label) for label in sorted(labels, key=lambda v: (isinstance(v, str), v))]
    if unknown := [name for name in exclude if name not in known]:
        raise DataError(f"{source}: --exclude: no class {unknown[0]!r}; there are {', '.join(known)}")
    kept = {s: [item for item in items if str(item.label) not in exclude] for s, items in data.splits.items()}
    return kept, [name for name in known if name not in exclude]


def _write_list(path: Path, name: str, classes: list[str], splits: dict[str, list[Item]]) -> None:
    path.parent.mkdir(parents=True)
    entries = {split: [_entry(item) for item in items] for split, items in splits.items()}
    path.write_text(json.dumps({"name": name, "labels": dict(enumerate(classes)), **entries}, indent=1))


def _entry(item: Item) -> dict[str, Any]:
    plane = {} if item.slice is None else {"slice": item.slice}
    return {"image": str(item.image.resolve()), "label": item.label} | plane


def _counts(items: list[Item], classes: list[str]) -> dict[str, int]:
    found = Counter(str(item.label) for item in items)
    return {label: found[label] for label in classes}
