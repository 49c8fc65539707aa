"""Share instruction data out among sites: evenly, in uneven sizes, or unevenly by a key of the records.

The rule is that of partition.py, with the values of the key for classes; without a key all records are one class, so that
sites differ in size alone. Instead of a key, `kinds` may say what each text is (clusters). Records are copied as they stand.
The test split is one file that all sites have. With `local`, a site's share of training and validation is cut 0.8 / 0.1 / 0.1
at the site (FedHera, Appendix C.3), and the source's own test split is common_test.jsonl beside the sites.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from consilium.core.errors import DataError
from consilium.core.seeding import seed_for
from consilium.core.storage import PUBLIC, write_atomic
from consilium.data.datalist import SPLITS, DataList
from consilium.data.partition import SHARED_OUT, check_asked, share_out, write_summary
from consilium.data.patients import together
from consilium.data.safe_open import text_lines
from consilium.data.text import FILES, Text, read_texts

Kinds = Callable[[Sequence[str]], list[str]]
"""Says of each text what kind it is."""
COMMON = "common_test.jsonl"
ALL = "records"
"""The class of every record where no key is named."""
MOST_VALUES = 1000
"""Of a key: more are names rather than kinds, and make no picture."""


@dataclass(frozen=True)
class Record:
    """A line of a JSONL file, the value of the key that sites are made uneven by, and whose it is, "" where nobody knows."""

    line: str
    label: str
    patient: str = ""


def partition_texts(
    source: Path,
    folder: Path,
    sites: int,
    beta: float | None,
    seed: int,
    minimum: int,
    by: str = "",
    exclude: Sequence[str] = (),
    kinds: Kinds | None = None,
    local: bool = False,
) -> dict[str, Any]:
    """Write `folder`/site-K/{training,validation,test}.jsonl, partition.json and partition.png.

    `beta` None: even shares. Returns partition.json's content. Raises DataError for records without the key, an unknown value
    to leave out, too few records, or a folder that has sites already.
    """
    splits, values = _read(source, by, exclude, kinds)
    names = check_asked(source, folder, len(splits["training"]), sites, minimum)
    found = share_out(splits, values, names, beta, seed, minimum)
    if local:
        whole = {name: [*mine["training"], *mine["validation"]] for name, mine in found.items()}
        found = {name: _cut(mine, seed_for(seed, "local", name)) for name, mine in whole.items()}
    for name in names:
        for split in SPLITS:
            _write(folder, name, split, [record.line for record in found[name][split]], not local)
    if local and splits[SHARED_OUT]:
        write_atomic(folder / COMMON, "\n".join([*(record.line for record in splits[SHARED_OUT]), ""]).encode(), PUBLIC)
    by = by or ("clusters" if kinds else "")
    asked = {
        "sites": sites,
        "beta": beta,
        "seed": seed,
        "minimum": minimum,
        "by": by,
        "excluded": list(exclude),
        "local": local,
    }
    return write_summary(source, folder, asked, values, found)


def _cut(records: list[Record], seed: int) -> dict[str, list[Record]]:
    """Return a site's patients, shuffled, as its splits: a tenth each to validate and to test, at least one of three.

    A record that names nobody is one of its own.
    """
    patients = together(records)
    order = [patients[i] for i in np.random.default_rng(seed).permutation(len(patients))]
    part = max(round(0.1 * len(order)), 1) if len(order) >= 3 else 0
    cut = {"training": order[2 * part :], "validation": order[:part], "test": order[part : 2 * part]}
    return {split: list(chain(*mine)) for split, mine in cut.items()}


def _write(folder: Path, name: str, split: str, lines: list[str], shared: bool) -> None:
    """Write one split of a site; of equal files, which the test splits are, there is one on the disk where it can link."""
    path, first = folder / name / f"{split}.jsonl", folder / "site-1" / f"{split}.jsonl"
    if shared and split == SHARED_OUT and first.is_file():
        try:
            os.link(first, path)
        except OSError:  # a file system without links
            shutil.copyfile(first, path)
    elif lines:
        write_atomic(path, "\n".join([*lines, ""]).encode(), PUBLIC)


def _read(source: Path, by: str, exclude: Sequence[str], kinds: Kinds | None) -> tuple[dict[str, list[Record]], list[str]]:
    """Return the records by split and the values of the key, sorted. Raises DataError."""
    data = read_texts(source)  # whatever is wrong with a record is said now
    folder = data.path
    paths = {split: next((f for name in FILES[split] if (f := folder / name).is_file()), None) for split in SPLITS}
    splits = {split: _records(path, data.splits[split], by) if path else [] for split, path in paths.items()}
    if kinds:
        splits = _of_kinds(splits, data, kinds)
    values = sorted({record.label for records in splits.values() for record in records})
    if len(values) > MOST_VALUES:
        raise DataError(f"{source}: --by {by}: {len(values):,} values, at most {MOST_VALUES:,} are kinds; name another key")
    if unknown := [value for value in exclude if value not in values]:
        raise DataError(f"{source}: --exclude: no value {unknown[0]!r}; there are {', '.join(values)[:300]}")
    kept = {split: [record for record in records if record.label not in exclude] for split, records in splits.items()}
    return kept, [value for value in values if value not in exclude]


def _of_kinds(splits: dict[str, list[Record]], data: DataList, kinds: Kinds) -> dict[str, list[Record]]:
    """Return the records with the kinds of their texts; all splits are told apart together."""
    texts = [text.prompt_words for split in SPLITS for text in data.splits[split]]
    found = iter(kinds(texts))
    return {split: [replace(record, label=next(found)) for record in splits[split]] for split in SPLITS}


def _records(path: Path, texts: Sequence[Text], by: str) -> list[Record]:
    lines = enumerate(text_lines(path, "give a JSONL file in UTF-8"), start=1)
    told = ((f"{path}:{number}", line.removesuffix("\n")) for number, line in lines if line.strip())
    return [Record(line, _value(where, line, by), text.patient) for (where, line), text in zip(told, texts, strict=True)]


def _value(where: str, line: str, by: str) -> str:
    if not by:
        return ALL
    record = json.loads(line)
    value = record.get(by)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{where}: --by {by}: expected a text or a number there; found the keys {', '.join(record)[:200]}")
    return str(value)
