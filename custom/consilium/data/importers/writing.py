"""From an importer's samples to data lists: sites, splits by patient, and files that appear all together or not at all."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from consilium.data.datalist import SPLITS
from consilium.data.importers.base import Found, Made, Options, Reading
from consilium.errors import DataError
from consilium.seeding import seed_for
from consilium.storage import PUBLIC, write_atomic

Sites = dict[str, dict[str, list[Found]]]
"""Samples by site and split."""


def write_sites(reading: Reading, name: str, source: Path, dest: Path, options: Options) -> dict[str, Any]:
    """Write `dest`/SITE/datalist.json and import.json; returns import.json's content.

    Everything is written beside its place first, so a failure leaves `dest` as it was. Raises DataError.
    """
    check_free(dest)
    sites, dropped = arrange(reading.samples, name, options)
    if not sites:
        raise DataError(f"{source}: no site is left with {options.minimum} samples and one for training; lower --minimum")
    summary = _summary(reading, sites, dropped, name, source, options)
    hidden, is_new = dest / f".import-{os.getpid()}", not dest.exists()
    try:
        for site, splits in sites.items():
            _write_site(hidden / site, site, splits, summary["classes"])
        for site in sites:
            os.rename(hidden / site, dest / site)
    except BaseException:
        shutil.rmtree(dest if is_new else hidden, ignore_errors=True)
        raise
    hidden.rmdir()
    write_atomic(dest / "import.json", json.dumps(summary, indent=1).encode(), PUBLIC)
    return summary


def check_free(dest: Path) -> None:
    """Raise DataError if the folder holds sites, or is no folder."""
    if dest.exists() and not dest.is_dir():
        raise DataError(f"{dest}: is a file; give a folder")
    if any(next(dest.glob(pattern), None) for pattern in ("import.json", "*/datalist.json", "*/site.yaml", "datalist.json")):
        raise DataError(f"{dest}: holds sites already; give another folder")


def arrange(samples: Sequence[Found], name: str, options: Options) -> tuple[Sites, list[str]]:
    """Return the samples by site and split, and the sites left out for having too few or none to train on."""
    samples = pool(samples, name, options) if options.sites else samples
    found: Sites = {}
    dropped = []
    for site in sorted({sample.site for sample in samples}):
        splits = split_site([sample for sample in samples if sample.site == site], site, options)
        enough = sum(map(len, splits.values())) >= options.minimum
        if enough and splits["training"]:
            found[site] = splits
        else:
            dropped.append(site)
    return found, dropped


def pool(samples: Sequence[Found], name: str, options: Options) -> list[Found]:
    """Deal all patients out to `options.sites` sites, those of every published split in turn.

    Raises DataError for more sites than patients.
    """
    names = [f"site-{i}" for i in range(1, options.sites + 1)] if options.sites > 1 else [name]
    owner: dict[tuple[str, str], str] = {}
    for split in sorted({sample.split or "" for sample in samples}):
        keys = sorted({(s.site, s.group) for s in samples if (s.split or "") == split} - owner.keys())
        order = np.random.default_rng(seed_for(options.seed, "import", "pool", split)).permutation(len(keys))
        owner |= {keys[index]: names[turn % len(names)] for turn, index in enumerate(order)}
    if len(owner) < len(names):
        raise DataError(f"--sites: {len(names)} sites need as many patients; the set has {len(owner)}")
    return [_moved(sample, owner[sample.site, sample.group]) for sample in samples]


def _moved(sample: Found, site: str) -> Found:
    """Return the sample at another site; what it names keeps its old site's name in front, so that nothing meets."""

    def named(part: Path | Made) -> Path | Made:
        return replace(part, name=f"{sample.site}-{part.name}") if isinstance(part, Made) else part

    image, label = named(sample.image), sample.label if isinstance(sample.label, str) else named(sample.label)
    return replace(sample, site=site, group=f"{sample.site}/{sample.group}", image=image, label=label)


def split_site(samples: Sequence[Found], site: str, options: Options) -> dict[str, list[Found]]:
    """Return one site's samples by split: the publisher's splits stay, shares of the rest fill the missing ones by group.

    Samples with a class are cut class by class, so that every split has all of them.
    """
    given = {sample.split for sample in samples}
    shares = {s: 0.0 if s in given else share for s, share in (("test", options.test), ("validation", options.validation))}
    chosen: dict[tuple[str, str], str] = {}
    for stratum in sorted({_stratum(sample) for sample in samples}):
        groups = sorted({s.group for s in samples if s.split is None and _stratum(s) == stratum})
        order = np.random.default_rng(seed_for(options.seed, "import", site, stratum)).permutation(len(groups))
        chosen |= {(stratum, groups[index]): split for index, split in zip(order, _cut(len(groups), shares), strict=True)}
    found: dict[str, list[Found]] = {split: [] for split in SPLITS}
    for sample in samples:
        found[sample.split or chosen[_stratum(sample), sample.group]].append(sample)
    return found


def _stratum(sample: Found) -> str:
    return sample.label if isinstance(sample.label, str) else ""


def _cut(count: int, shares: dict[str, float]) -> Iterable[str]:
    """Return a split for each of `count` groups: rounded shares, but always one group for training."""
    names: list[str] = []
    for split, share in shares.items():
        names += [split] * min(int(share * count + 0.5), max(count - 1 - len(names), 0))
    return names + ["training"] * (count - len(names))


def _summary(reading: Reading, sites: Sites, dropped: list[str], name: str, source: Path, options: Options) -> dict[str, Any]:
    counts = {site: {split: len(items) for split, items in splits.items()} for site, splits in sites.items()}
    left = [f"left out, too few samples or none to train on: {', '.join(dropped)}"] if dropped else []
    found = {"name": name, "source": str(source.resolve()), "options": asdict(options), "classes": reading.classes}
    return found | {"sites": counts, "notes": [*reading.notes, *left]}


def _write_site(folder: Path, site: str, splits: dict[str, list[Found]], classes: Any) -> None:
    done: Counter[str] = Counter()
    entries = {split: [_entry(folder, sample, done) for sample in samples] for split, samples in splits.items()}
    text = json.dumps({"name": site, "labels": classes, **entries}, indent=1)
    write_atomic(folder / "datalist.json", text.encode(), PUBLIC)


def _entry(folder: Path, sample: Found, done: Counter[str]) -> dict[str, Any]:
    plane = {} if sample.slice is None else {"slice": sample.slice}
    return {"image": _place(folder, sample.image, done), "label": _place(folder, sample.label, done)} | plane


def _place(folder: Path, part: Path | Made | str, done: Counter[str]) -> str:
    """Return what the list says: a class, an original's absolute path, or the path of a file written here, once."""
    if not isinstance(part, Made):
        return part if isinstance(part, str) else str(part.resolve())
    relative = f"{part.folder}/{part.name}"
    if not done[relative]:
        write_atomic(folder / relative, part.make(), PUBLIC)
    done[relative] += 1
    return relative
