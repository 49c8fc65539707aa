"""Instruction data: a folder with training.jsonl (or train.jsonl), validation.jsonl and test.jsonl, one record per line.

A record is {"instruction": ..., "input": ..., "output": ...}, where the instruction may be missing, or has another form of
record_forms.py. All records of a file have one form. Optional keys are "outputs", a list of references instead of "output";
"final_answer", the text that exact match compares with; "labels", the answers to choose from; and "patient", as in a list of
pictures. Keys that would change what a record says are refused (record_forms.MEANINGS); others are ignored.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from consilium.core.errors import DataError
from consilium.core.schema import MOST_CLASSES
from consilium.data.datalist import SPLITS, DataList, read_datalist
from consilium.data.patients import pseudonym, read_identifier
from consilium.data.record_forms import EXAMPLE, FORMS, Chat, chat_of
from consilium.data.safe_open import check_line, is_encodable, parse_json, text_lines

FILES = {
    "training": ("training.jsonl", "train.jsonl"),
    "validation": ("validation.jsonl", "val.jsonl"),
    "test": ("test.jsonl",),
}
"""File names of each split. The first one that exists is read."""
MOST_RECORDS = 2 * 10**6
"""Records of one file, over five times MetaMathQA."""
MOST_TEXTS = {"outputs": 256, "labels": MOST_CLASSES}
"""Texts in a key of one record, because an answer is compared with each of them. E2E has up to 46 references."""
WITH_INPUT = (
    "Below is a task, and a text that belongs to it. Write an answer that does what the task asks.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = "Below is a task. Write an answer that does what it asks.\n\n### Instruction:\n{instruction}\n\n### Response:\n"


@dataclass(frozen=True)
class Text:
    """One record. `name`: its file and line. `outputs`: its references, of which the first is trained on.

    `rejected`: the worse answer of a preference record. `image`: the picture, for a task with pictures. `patient`: a pseudonym,
    "" if unknown. In a conversation, `instruction` is the last question, `history` has the earlier (question, answer) pairs,
    and `learns_history` says whether the earlier answers are learned.
    """

    name: str
    instruction: str
    input: str
    outputs: tuple[str, ...]
    final_answer: str | None = None
    labels: tuple[str, ...] = ()
    image: Path | None = None
    patient: str = ""
    system: str = ""
    history: tuple[tuple[str, str], ...] = ()
    learns_history: bool = True
    rejected: str = ""

    @property
    def label(self) -> str:
        """The class of a record, for classification: its answer."""
        return self.outputs[0].strip()

    @property
    def prompt_without_template(self) -> str:
        """All words before the answer, without the template around them."""
        earlier = (part for pair in self.history for part in pair)
        return "\n".join(part for part in (self.system, *earlier, self.instruction, self.input) if part)

    @property
    def prompt(self) -> str:
        """The prompt in the default template. An input without an instruction takes the instruction's place."""
        if self.system or self.history:
            return self.prompt_without_template
        if not self.instruction or not self.input:
            return WITHOUT_INPUT.format(instruction=self.instruction or self.input)
        return WITH_INPUT.format(instruction=self.instruction, input=self.input)


def has_texts(folder: Path) -> bool:
    """Tell whether the folder holds a training split of instruction data."""
    return any((folder / name).is_file() for name in FILES["training"])


def split_files(folder: Path) -> dict[str, Path]:
    """Return the file of each split in a folder of instruction data, without splits that have none."""
    there = ((split, folder / name) for split, names in FILES.items() for name in reversed(names))
    return {split: path for split, path in there if path.is_file()}  # of two files of a split, the first in FILES


def read_site_list(path: Path) -> DataList:
    """Read the list that a site's `datalist` names: a folder or file of records, or a list of pictures. Raises DataError."""
    return read_texts(path) if has_texts(path) or path.suffix == ".jsonl" else read_datalist(path, None)


def read_texts(path: Path, require_pictures: bool = False) -> DataList:
    """Read a site's instruction data: a folder, or its training file. Raises DataError with the file, line and remedy.

    `require_pictures`: every record must have a picture. Texts that lie beside a list of pictures are not read: a site
    that names the list does not offer them, and sets no privacy budget for them.
    """
    folder = path.parent if path.name in FILES["training"] and path.is_file() else path
    if not has_texts(folder):
        raise DataError(f"{path}: holds no training.jsonl or train.jsonl; give a folder with one record a line in it")
    records = {split: tuple(read_records(path, None, require_pictures)) for split, path in split_files(folder).items()}
    return DataList(folder, {split: records.get(split, ()) for split in SPLITS})


def record_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and text of every line that is not blank. Raises DataError for more than MOST_RECORDS."""
    records = 0
    for number, line in enumerate(text_lines(path, "give a JSONL file in UTF-8"), start=1):
        if line.strip():
            if (records := records + 1) > MOST_RECORDS:
                raise DataError(f"{path}: holds more than {MOST_RECORDS:,} records; share them out among several files")
            yield number, line


def read_records(path: Path, bad: list[DataError] | None, require_pictures: bool = False) -> Iterator[Text]:
    """Yield the records of a file. Raises DataError for an unusable line, or adds the error to `bad` and goes on.

    With `bad`, records need no answer. With `require_pictures`, every record needs a picture, whose relative path starts at
    the file's folder.
    """
    first = None
    for number, line in record_lines(path):
        where = f"{path}:{number}"
        try:
            check_line(where, line)
            raw = parse_json(where, line, "write one record a line")
            record, form = _parse_record_and_form(where, f"{path.name}:{number}", raw, needs_answer=bad is None)
            first = first or (form, number)
            if form != first[0]:
                raise DataError(
                    f"{where}: a record with {form!r}, where line {first[1]} has {first[0]!r}; write one form in a file"
                )
            if require_pictures and record.history:  # the record does not say which turn the picture belongs to
                raise DataError(f"{where}: a conversation of several turns beside a picture; write one question and its answer")
            named = raw.get("image")
            if require_pictures and (not isinstance(named, str) or not named or "\0" in named):
                raise DataError(f'{where}: needs an "image", the path of its picture; a relative one starts at {path.parent}')
            yield replace(record, image=path.parent / named) if require_pictures else record
        except DataError as error:
            if bad is None:
                raise
            bad.append(error)


def _parse_record_and_form(where: str, name: str, read: Any, needs_answer: bool) -> tuple[Text, str]:
    """Return a line's record and its form. `needs_answer`: the record needs an answer. A null value counts as absent."""
    raw = {key: value for key, value in read.items() if value is not None} if isinstance(read, dict) else {}
    chat = chat_of(where, raw)
    if isinstance(read, dict) and "text" in read and (chat is None or (chat.form == "text" and not chat.instruction)):
        raise DataError(f"{where}: text: an empty text; write its words, or leave the record out")
    if chat is None or not (chat.instruction or chat.input):
        raise DataError(
            f'{where}: has neither "instruction" nor "input"; write {{"instruction": ..., "input": ..., "output": ...}}, '
            f"or {EXAMPLE}"
        )
    keys = FORMS[chat.form]
    instruction, given, system = (
        _check_text(where, key, value)
        for key, value in ((keys[0], chat.instruction), ("input", chat.input), ("system", chat.system))
    )
    outputs = _read_outputs(where, raw, chat) if needs_answer else ("",)
    labels, value = _check_texts(where, "labels", raw.get("labels", [])), raw.get("final_answer")
    if isinstance(value, bool) or not isinstance(value, str | int | float | None) or value in (inf, -inf) or value != value:
        raise DataError(f"{where}: final_answer: {repr(value)[:80]} is neither text nor a number; write it as a text")
    final = None if value is None else str(value)
    earlier = (part for pair in chat.history for part in pair)
    if not all(
        is_encodable(part)
        for part in (instruction, given, system, *earlier, *outputs, *labels, final or "", chat.rejected or "")
    ):
        raise DataError(f"{where}: has half a character in it (a surrogate, as \\ud800); write the whole one")
    patient = pseudonym(read_identifier(where, raw, "patient"))
    learns, rejected = chat.learns_history, chat.rejected or ""
    return Text(
        name, instruction, given, outputs, final, labels, None, patient, system, chat.history, learns, rejected
    ), chat.form


def _read_outputs(where: str, raw: dict[str, Any], chat: Chat) -> tuple[str, ...]:
    """Return a record's answers. Raises DataError if they are missing, or empty in a record that is not an Alpaca record."""
    key = FORMS[chat.form][-1]
    if chat.form == "instruction":
        if "outputs" in raw and (found := _check_texts(where, "outputs", raw["outputs"])):
            return found
        if "output" not in raw:
            raise DataError(f'{where}: needs an "output"; write its answer there, or several as "outputs": ["a", "b"]')
        return (_check_text(where, "output", raw["output"]),)
    if chat.answer is None and len(FORMS[chat.form]) == 1:
        raise DataError(f"{where}: {key}: ends with the user's turn; end it with the assistant's, which is learned")
    if chat.answer is None:
        raise DataError(f'{where}: needs a "{key}"; write the answer there')
    answer = _check_text(where, key, chat.answer)
    if not answer.strip():
        raise DataError(f"{where}: {key}: an empty answer; write its words, or leave the record out")
    return (answer,)


def _check_text(where: str, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {key}: {repr(value)[:80]} is not a text; write it in quotes")
    return value


def _check_texts(where: str, key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise DataError(f'{where}: {key}: {repr(value)[:80]} is not a list of texts; write ["a", "b"]')
    if len(value) > MOST_TEXTS[key]:
        raise DataError(f"{where}: {key}: {len(value):,} texts, at most {MOST_TEXTS[key]:,} are allowed; leave some out")
    return tuple(value)
