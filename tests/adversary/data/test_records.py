"""Instruction data that are other than records, a line each."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from consilium.core.errors import DataError
from consilium.data.text import read_texts
from consilium.tasks.language.answers import answer_label, canonical_answer, final_answer
from consilium.tasks.language.text_scores import corpus_scores, record_scores
from tests.adversary.data.lists import SECONDS, one_line

GOOD = {"instruction": "a", "input": "b", "output": "c"}


def refused(folder: Path, content: bytes) -> str:
    (folder / "training.jsonl").write_bytes(content)
    began = time.monotonic()
    with pytest.raises(DataError) as caught:
        read_texts(folder)
    assert time.monotonic() - began < SECONDS
    assert "training.jsonl" in str(caught.value)
    return one_line(str(caught.value))


@pytest.mark.parametrize("key", ["instruction", "input", "output", "final_answer", "outputs", "labels"])
def test_half_a_character(key: str, tmp_path: Path) -> None:
    """A lone surrogate, which no tokenizer takes and no terminal shows, is refused with its line."""
    value: Any = ["\ud800"] if key in ("outputs", "labels") else "x\udfff"
    text = refused(tmp_path, json.dumps(GOOD).encode() + b"\n" + json.dumps(GOOD | {key: value}).encode())
    assert "training.jsonl:2: has half a character" in text


def test_a_line_of_ten_million_characters(tmp_path: Path) -> None:
    """A record that no model could read is refused before anything is made of it."""
    assert "at most 1,048,576" in refused(tmp_path, json.dumps(GOOD | {"input": "x" * 10**7}).encode())


def test_a_million_levels(tmp_path: Path) -> None:
    """A record nested a million deep is refused, not recursed into."""
    assert ":1: not valid JSON (nested too deep)" in refused(tmp_path, b"[" * 10**6)


def test_a_lone_byte_order_mark(tmp_path: Path) -> None:
    """A file that has a byte order mark and no more has no records; one before the first record is read over."""
    (tmp_path / "training.jsonl").write_bytes(b"\xef\xbb\xbf")
    assert read_texts(tmp_path).splits["training"] == ()
    (tmp_path / "training.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert len(read_texts(tmp_path).splits["training"]) == 1


NO_RECORDS = (
    *(b"\xff\xfe", b"null", b"5", b"[]", b"{}", b'"text"', b"NaN", bytes(99)),
    b'{"input": "a", "output": NaN}',
    b'{"input": "a", "outputs": [1]}',
    b'{"input": "a", "output": "b", "labels": {"a": 1}}',
    b'{"input": "a", "output": "b", "labels": [' + b"1," * 10**5 + b"1]}",
)


@pytest.mark.parametrize("line", NO_RECORDS, ids=lambda line: repr(line[:40]))
def test_a_line_that_is_no_record(line: bytes, tmp_path: Path) -> None:
    """Wrong types, NaN, bytes that are not text: refused with file and remedy."""
    refused(tmp_path, json.dumps(GOOD).encode() + b"\n" + line)


def test_a_pipe_of_records(tmp_path: Path) -> None:
    """A pipe in a file's place is not waited for."""
    os.mkfifo(tmp_path / "training.jsonl")
    with pytest.raises(DataError, match=r"holds no training\.jsonl"):
        read_texts(tmp_path)
    os.mkfifo(tmp_path / "test.jsonl")
    (tmp_path / "train.jsonl").write_text(json.dumps(GOOD))
    assert read_texts(tmp_path).splits["test"] == ()


@pytest.mark.parametrize("key", ["outputs", "labels"])
def test_too_many_references_or_labels(key: str, tmp_path: Path) -> None:
    """Each is compared with an answer on its own: 200,000 in one record would take an hour."""
    assert f"{key}: 257 texts, at most 256 are allowed" in refused(tmp_path, json.dumps(GOOD | {key: ["a"] * 257}).encode())


@pytest.mark.parametrize("seen", [final_answer, canonical_answer, lambda text: answer_label(text, ["A", "yes"])])
def test_a_million_groups_of_digits(seen: Callable[[str], str | None]) -> None:
    """A number with a group of two digits at its end was read to that end from each of its groups."""
    began = time.process_time()
    seen("1" + ",23" * 340_000)
    assert time.process_time() - began < SECONDS


def test_a_reference_of_a_million_characters() -> None:
    """ROUGE-L's table and METEOR's alignment are quadratic. The words that count are the first ones."""
    answer, reference = "cd " * 255 + "ab", "ab " * 340_000
    began = time.process_time()
    each = record_scores([answer], [[reference]])
    corpus_scores([answer], [[reference]])
    assert time.process_time() - began < SECONDS
    assert 0 < each["rouge_l"][0] < 0.01
