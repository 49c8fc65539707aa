"""Instruction data: a folder with training.jsonl (or train.jsonl), validation.jsonl and test.jsonl, one record a line.

A record is {"instruction": ..., "input": ..., "output": ...}, or without an instruction. Optional: "outputs", a list of
references instead of "output"; "final_answer", what exact match compares with; "labels", the record's own answers to choose
from; "patient", as in a list of pictures. Other keys are ignored.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from consilium.core.errors import DataError
from consilium.core.schema import MOST_CLASSES
from consilium.data.datalist import SPLITS, DataList
from consilium.data.identifiers import identifier, pseudonym
from consilium.data.safe_open import check_line, is_encodable, parse_json, text_lines

FILES = {
    "training": ("training.jsonl", "train.jsonl"),
    "validation": ("validation.jsonl", "val.jsonl"),
    "test": ("test.jsonl",),
}
"""File names of each split; the first that is there counts."""
MOST_RECORDS = 2 * 10**6
"""Of one file: over five times MetaMathQA."""
MOST_TEXTS = {"outputs": 256, "labels": MOST_CLASSES}
"""Of one record: an answer is compared with each of them. E2E has up to 46 references."""
WITH_INPUT = (
    "Below is a task, and a text that belongs to it. Write an answer that does what the task asks.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = "Below is a task. Write an answer that does what it asks.\n\n### Instruction:\n{instruction}\n\n### Response:\n"


@dataclass(frozen=True)
class Text:
    """One record; `name` is its file and line. `outputs` are its references, the first of which is trained on.

    `image`: its picture, for a task with pictures. `patient`: a pseudonym, "" where unknown.
    """

    name: str
    instruction: str
    input: str
    outputs: tuple[str, ...]
    final_answer: str | None = None
    labels: tuple[str, ...] = ()
    image: Path | None = None
    patient: str = ""

    @property
    def prompt_words(self) -> str:
        """Instruction and input, without the template around them."""
        return "\n".join(part for part in (self.instruction, self.input) if part)

    @property
    def prompt(self) -> str:
        """The prompt in the default template; an input without an instruction is the instruction."""
        if not self.instruction or not self.input:
            return WITHOUT_INPUT.format(instruction=self.instruction or self.input)
        return WITH_INPUT.format(instruction=self.instruction, input=self.input)


def has_texts(folder: Path) -> bool:
    """Tell whether the folder holds a training split of instruction data."""
    return any((folder / name).is_file() for name in FILES["training"])


def read_texts(path: Path, pictures: bool = False) -> DataList:
    """Read a site's instruction data: a folder, or its training file. Raises DataError, naming file, line and remedy.

    With `pictures` every record needs one. Nothing but what `path` names is read: texts beside a site's list of pictures are
    not on offer, and have no budget.
    """
    folder = path.parent if path.name in FILES["training"] and path.is_file() else path
    if not has_texts(folder):
        raise DataError(f"{path}: holds no training.jsonl or train.jsonl; give a folder with one record a line in it")
    found = {split: [f for n in FILES[split] if (f := folder / n).is_file()] for split in SPLITS}
    return DataList(folder, {split: tuple(_records(files[0], pictures)) if files else () for split, files in found.items()})


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of every line that holds a record. Raises DataError for more than MOST_RECORDS."""
    records = 0
    for number, line in enumerate(text_lines(path, "give a JSONL file in UTF-8"), start=1):
        if line.strip():
            if (records := records + 1) > MOST_RECORDS:
                raise DataError(f"{path}: holds more than {MOST_RECORDS:,} records; share them out among several files")
            yield number, line


def _records(path: Path, pictures: bool) -> Iterator[Text]:
    for number, line in _lines(path):
        record = _record(f"{path}:{number}", path.name, number, line)
        yield replace(record, image=_picture(f"{path}:{number}", path.parent, line)) if pictures else record


def _picture(where: str, folder: Path, line: str) -> Path:
    """Return the picture of a record; a relative path starts at the folder of its file."""
    named = _parse(where, line).get("image")
    if not isinstance(named, str) or not named or "\0" in named:
        raise DataError(f'{where}: needs an "image", the path of its picture; a relative one starts at {folder}')
    return folder / named


def read_records(path: Path, bad: list[DataError], pictures: bool = False) -> Iterator[Text]:
    """Yield the records of a file that need no answer; why a line cannot be used goes into `bad`. Raises DataError.

    With `pictures` every record needs one.
    """
    for number, line in _lines(path):
        try:
            record, where = _record(f"{path}:{number}", path.name, number, line, answered=False), f"{path}:{number}"
            yield replace(record, image=_picture(where, path.parent, line)) if pictures else record
        except DataError as error:
            bad.append(error)


def _record(where: str, file: str, number: int, line: str, answered: bool = True) -> Text:
    """Return a line's record; a key whose value is null counts as absent. One that is not `answered` needs no output."""
    read = _parse(where, line)
    raw = {key: value for key, value in read.items() if value is not None} if isinstance(read, dict) else {}
    instruction, given = (_text(where, key, raw.get(key, "")) for key in ("instruction", "input"))
    if not instruction and not given:
        raise DataError(
            f'{where}: has neither "instruction" nor "input"; write {{"instruction": ..., "input": ..., "output": ...}}'
        )
    outputs = _outputs(where, raw) if answered else ("",)
    labels, final = _texts(where, "labels", raw.get("labels", [])), _final(where, raw.get("final_answer"))
    if not all(is_encodable(part) for part in (instruction, given, *outputs, *labels, final or "")):
        raise DataError(f"{where}: has half a character in it (a surrogate, as \\ud800); write the whole one")
    patient = pseudonym(identifier(where, raw, "patient"))
    return Text(f"{file}:{number}", instruction, given, outputs, final, labels, patient=patient)


def _outputs(where: str, raw: dict[str, Any]) -> tuple[str, ...]:
    if "outputs" in raw and (found := _texts(where, "outputs", raw["outputs"])):
        return found
    if "output" not in raw:
        raise DataError(f'{where}: needs an "output"; write its answer there, or several as "outputs": ["a", "b"]')
    return (_text(where, "output", raw["output"]),)


def _final(where: str, value: Any) -> str | None:
    """Return a final answer as text."""
    endless = isinstance(value, float) and not isfinite(value)
    if endless or isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise DataError(f"{where}: final_answer: {repr(value)[:80]} is neither text nor a number; write it as a text")
    return None if value is None else str(value)


def _parse(where: str, line: str) -> Any:
    check_line(where, line)
    return parse_json(where, line, "write one record a line")


def _text(where: str, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {key}: {repr(value)[:80]} is no text; write it in quotes")
    return value


def _texts(where: str, key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise DataError(f'{where}: {key}: {repr(value)[:80]} is not a list of texts; write ["a", "b"]')
    if len(value) > MOST_TEXTS[key]:
        raise DataError(f"{where}: {key}: {len(value):,} texts, at most {MOST_TEXTS[key]:,} are; leave some out")
    return tuple(value)
