"""Writer of an importer's samples: sites, splits by patient, data lists. All files appear together, or none does."""

import json
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from consilium.core.errors import DataError
from consilium.core.grouping import group_by_key
from consilium.core.seeding import seed_for
from consilium.core.storage import PUBLIC, clean_up_on_failure, write_atomic
from consilium.data.class_checks import ONE_CLASS
from consilium.data.datalist import SPLITS
from consilium.data.folders import select_sites
from consilium.data.importers.base import DerivedFile, ImportResult, Options, Sample, SourceSample, TextRecord
from consilium.data.patients import canonical_spelling
from consilium.data.safe_open import absolute_path, is_encodable

Sites = dict[str, dict[str, list[Sample]]]
"""Samples by site and split."""
HOLDS = ("import.json", "*/datalist.json", "*/site.yaml", "datalist.json", "*/training.jsonl", "*/train.jsonl")
"""Patterns of files that mark a folder of sites."""


def write_sites(
    reading: ImportResult,
    name: str,
    source: Path,
    dest: Path,
    options: Options,
    add: bool = False,
    may_only_test: bool = False,
) -> dict[str, Any]:
    """Write `dest`/SITE/datalist.json, or JSONL files for texts, and import.json. Return the new record in import.json.

    `add`: the folder may hold sites of earlier imports. `may_only_test`: no site needs training samples. All files are written
    to a hidden folder first, so a failure leaves `dest` as it was. Raises DataError.
    """
    earlier = earlier_imports(dest, add)
    found, dropped = arrange_by_site(reading.samples, name, options)
    if not found or not (earlier or may_only_test or any(splits["training"] for splits in found.values())):
        remedy = "lower --minimum, or --resplit where a site has test samples only, or validation samples only"
        if options.test == 1 and any(isinstance(one, TextRecord) for one in reading.samples):
            remedy = "--test 1 is for pictures; for texts, ask for less"
        raise DataError(f"{source}: no site is left with {options.minimum} samples and one for training; {remedy}")
    if unknown := sorted(options.rename.keys() - found.keys()):
        raise DataError(f"--rename: no site {unknown[0]!r}; there are {', '.join(found)}")
    sites = {options.rename.get(site, site): splits for site, splits in found.items()}
    if len(sites) < len(found):
        raise DataError(f"--rename: two sites would have one name; the sites are {', '.join(found)}")
    classes = _joint_classes(dest, sites, reading.classes, earlier)
    left = [f"left out, too few samples or none to train on: {', '.join(dropped)}"] if dropped else []
    alone = [site for site, splits in sites.items() if not splits["training"]]
    left += [f"test samples only, so their site.yaml says test_only: {', '.join(alone)}"] if alone else []
    summary = {
        "name": name,
        "source": str(source.resolve()),
        "options": asdict(options) | {"only": list(options.only), "mask_patterns": [str(one) for one in options.mask_patterns]},
        "classes": classes,
        "sites": {site: {split: len(items) for split, items in splits.items()} for site, splits in sites.items()},
        "notes": [*reading.notes, *left],
    }
    hidden = dest / f".import-{os.getpid()}"
    with clean_up_on_failure(dest):
        for site, splits in sites.items():
            _write_site(hidden / site, site, splits, classes)
        for site in sites:  # all files were written
            os.rename(hidden / site, dest / site)
        write_atomic(dest / "import.json", json.dumps({"imports": [*earlier, summary]}, indent=1).encode(), PUBLIC)
        hidden.rmdir()
    return summary


def earlier_imports(dest: Path, add: bool) -> list[dict[str, Any]]:
    """Return the records of earlier imports in `dest`. Raises DataError if it holds sites and `add` is not set."""
    if dest.exists() and not dest.is_dir():
        raise DataError(f"{dest}: is a file; give a folder")
    if not any(next(dest.glob(pattern), None) for pattern in HOLDS):
        return []
    if not add:
        other = f"other shares of the same samples: consilium data split {shlex.quote(str(dest))} NEW"
        raise DataError(f"{dest}: holds sites already; give another folder, or --add to have both; {other}")
    try:
        return list(json.loads((dest / "import.json").read_text())["imports"])
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"{dest}: --add: expected an import.json with its imports; found none; give another folder") from None


def _joint_classes(dest: Path, sites: Sites, classes: Any, earlier: list[dict[str, Any]]) -> Any:
    """Return the classes of all sites, including those of earlier imports, because a job has one task.classes.

    If all masks have one class, its values may differ by import. Raises DataError if a site's name is taken, or classes differ.
    """
    if taken := [site for site in sites if (dest / site).exists()]:
        raise DataError(f"{dest}: has a site {taken[0]} already; name the new one otherwise: --rename {taken[0]}=NAME")
    for one in earlier:
        before = one["classes"]
        if isinstance(classes, dict) and isinstance(before, dict) and before.keys() == classes.keys() == {ONE_CLASS}:
            classes = {ONE_CLASS: sorted({*before[ONE_CLASS], *classes[ONE_CLASS]})}
        elif before != classes:
            there, new = json.dumps(before), json.dumps(classes)
            raise DataError(f"{dest}: expected the classes of {one['name']}, {there}; found {new}; give another folder")
    return classes


def arrange_by_site(samples: Sequence[Sample], name: str, options: Options) -> tuple[Sites, list[str]]:
    """Return the samples by site and split, and the sites left out: with too few samples, or with none to train on.

    A site that has test pictures only stays, and only tests. Raises DataError for an unknown site in `only`,
    or more sites than patients.
    """
    samples = [
        replace(one, group=canonical_spelling(one.group)) if getattr(one, "is_patient", False) else one for one in samples
    ]
    samples = [replace(one, split=None) for one in samples] if options.resplit else samples
    if options.only:
        asked = select_sites({sample.site for sample in samples}, options.only, {})
        samples = [sample for sample in samples if sample.site in asked]
    samples = deal_out_patients(samples, name, options) if options.sites else samples
    found: Sites = {}
    dropped = []
    for site, mine in sorted(group_by_key((sample.site, sample) for sample in samples).items()):
        splits = split_site(mine, site, options)
        enough = sum(map(len, splits.values())) >= options.minimum
        if enough and (splits["training"] or not (splits["validation"] or isinstance(mine[0], TextRecord))):
            found[site] = splits
        else:
            dropped.append(site)
    return found, dropped


def deal_out_patients(samples: Sequence[Sample], name: str, options: Options) -> list[Sample]:
    """Return the samples with all patients dealt out to `options.sites` sites, separately for each published split.

    `name`: the name of the site if there is one. Raises DataError for more sites than patients.
    """
    names = [f"site-{i}" for i in range(1, options.sites + 1)] if options.sites > 1 else [name]
    owner: dict[tuple[str, str], str] = {}
    for split in sorted({sample.split or "" for sample in samples}):
        keys = sorted({(s.site, s.group) for s in samples if (s.split or "") == split} - owner.keys())
        order = np.random.default_rng(seed_for(options.seed, "import", "pool", split)).permutation(len(keys))
        owner |= {keys[index]: names[turn % len(names)] for turn, index in enumerate(order)}
    if len(owner) < len(names):
        raise DataError(f"--sites: {len(names)} sites need as many patients; the set has {len(owner)}")
    found = list[Sample]()
    for sample in samples:  # its group and files get the old site's name as a prefix, so that no names collide
        more: dict[str, Any] = {"site": owner[sample.site, sample.group], "group": f"{sample.site}/{sample.group}"}
        for key in ("image", "label"):
            if isinstance(part := getattr(sample, key, None), DerivedFile):
                more[key] = replace(part, name=f"{sample.site}-{part.name}")
        if isinstance(sample, TextRecord) and "patient" in sample.record:
            more["record"] = sample.record | {"patient": more["group"]}
        found.append(replace(sample, **more))
    return found


def split_site(samples: Sequence[Sample], site: str, options: Options) -> dict[str, list[Sample]]:
    """Return one site's samples by split. The publisher's splits stay; missing ones are cut from the rest by group.

    Groups are cut class by class, so that every split has all classes. A group of several classes counts under its most
    frequent one.
    """
    given = {sample.split for sample in samples}
    shares = {s: 0.0 if s in given else share for s, share in (("test", options.test), ("validation", options.validation))}
    shares |= {"test": 1.0} if options.test == 1 else {}
    labels = group_by_key(
        (s.group, s.label if isinstance(s, SourceSample) and isinstance(s.label, str) else "")
        for s in [s for s in samples if s.split is None]
    )
    # of equally frequent classes, the first by name
    strata = group_by_key((Counter(sorted(own)).most_common(1)[0][0], group) for group, own in sorted(labels.items()))
    chosen: dict[str, str] = {}
    for stratum, groups in strata.items():
        order = np.random.default_rng(seed_for(options.seed, "import", site, stratum)).permutation(len(groups))
        names: list[str] = []
        least = 0 if options.test == 1 else 1
        for split, share in shares.items():  # shares are rounded, and training gets at least one group unless all are tested
            names += [split] * min(int(share * len(groups) + 0.5), max(len(groups) - least - len(names), 0))
        names += ["training"] * (len(groups) - len(names))
        chosen |= {groups[index]: split for index, split in zip(order, names, strict=True)}
    found: dict[str, list[Sample]] = {split: [] for split in SPLITS}
    for sample in samples:
        found[sample.split or chosen[sample.group]].append(sample)
    return found


def _write_site(folder: Path, site: str, splits: dict[str, list[Sample]], classes: Any) -> None:
    """Write the data list of a site, its derived files and its site.yaml, or the JSONL files of texts. Raises DataError."""
    entries: dict[str, list[dict[str, Any]]] = {split: [] for split in splits}
    for split, samples in splits.items():
        records = [one.record for one in samples if isinstance(one, TextRecord)]
        if records:
            write_records(folder / f"{split}.jsonl", records)
        for one in (sample for sample in samples if isinstance(sample, SourceSample)):
            entry: dict[str, Any] = {"image": _write_part(folder, one.image), "label": _write_part(folder, one.label)}
            entry |= {} if one.slice is None else {"slice": one.slice}
            entries[split].append(entry | ({"patient": one.group} if one.is_patient else {}))
    if any(entries.values()):
        write_atomic(
            folder / "datalist.json", json.dumps({"name": site, "labels": classes, **entries}, indent=1).encode(), PUBLIC
        )
        if not entries["training"]:
            write_atomic(folder / "site.yaml", b"datalist: datalist.json\ntest_only: true\n", PUBLIC)


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write a JSONL file. Raises DataError for a text that cannot be encoded."""
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    if broken := next((line for line in lines if not is_encodable(line)), None):
        raise DataError(
            f"{path.name}: a record has half a character in it (a surrogate): {ascii(broken)[:160]}; mend the source"
        )
    write_atomic(path, "\n".join([*lines, ""]).encode(), PUBLIC)


def _write_part(folder: Path, part: Path | DerivedFile | str) -> str:
    """Return the value of an entry: its class, the absolute path of an original, or the relative path of a derived file.

    A derived file is written below `folder` at its first use.
    """
    if not isinstance(part, DerivedFile):
        return part if isinstance(part, str) else str(absolute_path(part))
    relative = f"{part.folder}/{part.name}"
    if not (folder / relative).exists():
        write_atomic(folder / relative, part.make(), PUBLIC)
    return relative
