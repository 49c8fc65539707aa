"""Whatever stands in a list or in records, reading and checking them ends within seconds, in a report or in one error."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from hypothesis import strategies as st

from consilium.core.errors import ConfigError, DataError
from consilium.data.check import check_datalist, check_texts
from tests.adversary.data.lists import picture
from tests.adversary.fuzzing import attack, fuzzed

TEXT = st.text(st.characters(), max_size=20)  # surrogates too
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, st.just(10**400))
JSON = st.recursive(
    PLAIN, lambda below: st.one_of(st.lists(below, max_size=3), st.dictionaries(TEXT, below, max_size=3)), max_leaves=8
)
FILES = (
    "a.png",
    "bad.png",
    "cut.png",
    "pipe.png",
    "folder.png",
    "v.nii",
    "v.nii.gz",
    "cut.nii.gz",
    "../a.png",
    "/dev/zero",
    "/etc/passwd",
)
PATHS = st.one_of(st.sampled_from(FILES), TEXT)
NUMBERS = st.one_of(st.integers(-1, 4), st.floats(), st.just("1"), st.none(), JSON)
ENTRY = st.fixed_dictionaries({"image": PATHS}, optional={"label": st.one_of(PATHS, NUMBERS), "slice": NUMBERS, "fold": JSON})
ENTRIES = st.one_of(st.lists(st.one_of(ENTRY, ENTRY, PATHS, JSON), max_size=4), JSON)
LIST = st.fixed_dictionaries(
    {"training": ENTRIES}, optional={"validation": ENTRIES, "test": ENTRIES, "train": JSON, "name": JSON}
)
WORDS = st.one_of(TEXT, JSON)
MANY = st.lists(WORDS, max_size=3)
RECORD = st.fixed_dictionaries(
    {"instruction": WORDS, "output": WORDS},
    optional={
        "input": WORDS,
        "outputs": st.lists(WORDS, max_size=3),
        "labels": st.lists(WORDS, max_size=3),
        "final_answer": WORDS,
    },
)
RECORDS = st.lists(st.one_of(RECORD, RECORD, JSON), max_size=4)
DAMAGE = st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=4)), max_size=2)
CLASSES = st.sampled_from([None, ["a", "b"], {"a": [1], "b": [2, 3]}])


def damaged(data: bytes, places: list[tuple[float, bytes]]) -> bytes:
    """Return the bytes with others written over some of them."""
    for where, piece in places:
        at = int(where * len(data))
        data = data[:at] + piece + data[at + len(piece) :]
    return data


def survives(check: Callable[[], Any]) -> None:
    """Let it end, or refuse with a remedy."""
    try:
        report = check()
    except (DataError, ConfigError) as error:
        assert "; " in str(error)  # noqa: PT017 - a remedy
    else:
        json.dumps(report.to_dict())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that has one of each."""
    folder = tmp_path_factory.mktemp("lists") / "site"
    folder.mkdir()
    for path in (folder / "a.png", folder.parent / "a.png"):
        picture(path)
    (folder / "bad.png").write_bytes(b"no picture")
    (folder / "cut.png").write_bytes((folder / "a.png").read_bytes()[:45])
    (folder / "folder.png").mkdir()
    os.mkfifo(folder / "pipe.png")
    for name in ("v.nii", "v.nii.gz"):
        nibabel.save(nibabel.Nifti1Image(np.arange(48, dtype=np.int16).reshape(4, 4, 3), np.eye(4)), folder / name)
    (folder / "cut.nii.gz").write_bytes((folder / "v.nii.gz").read_bytes()[:60])
    return folder


@fuzzed
def test_any_list(cases: int, place: Path) -> None:
    """Lists of all shapes, of good and bad files, and with bytes written over."""

    def body(raw: Any, places: list[tuple[float, bytes]], classes: Any) -> None:
        (place / "datalist.json").write_bytes(damaged(json.dumps(raw).encode(), places))
        survives(lambda: check_datalist(place / "datalist.json", classes))

    attack(cases, body, raw=st.one_of(LIST, LIST, JSON), places=DAMAGE, classes=CLASSES)


@fuzzed
def test_any_records(cases: int, place: Path) -> None:
    """Records of all shapes, and with bytes written over."""

    def body(training: list[Any], test: list[Any], places: list[tuple[float, bytes]]) -> None:
        for name, records in (("training", training), ("test", test)):
            lines = "".join(f"{json.dumps(one)}\n" for one in records)
            (place / f"{name}.jsonl").write_bytes(damaged(lines.encode(), places))
        survives(lambda: check_texts(place))

    attack(cases, body, training=RECORDS, test=RECORDS, places=DAMAGE)
