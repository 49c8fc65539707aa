"""Instruction data: a folder with training.jsonl (or train.jsonl), validation.jsonl and test.jsonl, one record a line.

A record is {"instruction": ..., "input": ..., "output": ...}, or without an instruction. Optional: "outputs", a list of
references instead of "output"; "final_answer", what exact match compares with; "labels", the record's own answers to choose
from. Other keys are left alone.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium.data.datalist import SPLITS, DataList
from consilium.errors import DataError

FILES = {
    "training": ("training.jsonl", "train.jsonl"),
    "validation": ("validation.jsonl", "val.jsonl"),
    "test": ("test.jsonl",),
}
"""File names of each split; the first that is there counts."""
WITH_INPUT = (
    "Below is a task, and a text that belongs to it. Write an answer that does what the task asks.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = "Below is a task. Write an answer that does what it asks.\n\n### Instruction:\n{instruction}\n\n### Response:\n"


@dataclass(frozen=True)
class Text:
    """One record; `name` is its file and line. `outputs` are its references, the first of which is trained on."""

    name: str
    instruction: str
    input: str
    outputs: tuple[str, ...]
    final_answer: str | None = None
    labels: tuple[str, ...] = ()

    @property
    def prompt(self) -> str:
        """What the model reads before it answers; an input without an instruction is the instruction."""
        if not self.instruction or not self.input:
            return WITHOUT_INPUT.format(instruction=self.instruction or self.input)
        return WITH_INPUT.format(instruction=self.instruction, input=self.input)


def has_texts(folder: Path) -> bool:
    """Tell whether the folder holds a training split of instruction data."""
    return any((folder / name).is_file() for name in FILES["training"])


def read_texts(path: Path) -> DataList:
    """Read a site's instruction data: a folder, or its training file. Raises DataError, naming file, line and remedy."""
    folder = path if path.is_dir() else path.parent
    if not has_texts(folder):
        raise DataError(f"{path}: holds no training.jsonl or train.jsonl; give a folder with one record a line in it")
    found = {split: [f for n in FILES[split] if (f := folder / n).is_file()] for split in SPLITS}
    return DataList(folder, {split: tuple(_records(files[0])) if files else () for split, files in found.items()})


def _records(path: Path) -> Iterator[Text]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); give a JSONL file in UTF-8") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _record(f"{path}:{number}", path.name, number, line)


def _record(where: str, file: str, number: int, line: str) -> Text:
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON ({error}); write one record a line") from None
    if not isinstance(raw, dict) or not (raw.get("instruction") or raw.get("input")):
        raise DataError(
            f'{where}: has neither "instruction" nor "input"; write {{"instruction": ..., "input": ..., "output": ...}}'
        )
    outputs = raw["outputs"] if "outputs" in raw else [raw["output"]] if "output" in raw else []
    parts = [raw.get("instruction", ""), raw.get("input", ""), *_texts(where, "outputs", outputs)]
    if not outputs or not all(isinstance(part, str) for part in parts):
        raise DataError(f'{where}: needs an "output" text (or "outputs", a list); instruction and input are texts too')
    final, labels = raw.get("final_answer"), _texts(where, "labels", raw.get("labels", []))
    return Text(f"{file}:{number}", parts[0], parts[1], tuple(parts[2:]), None if final is None else str(final), labels)


def _texts(where: str, key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise DataError(f'{where}: {key}: {value!r} is not a list of texts; write ["a", "b"]')
    return tuple(value)
