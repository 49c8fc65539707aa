"""Instruction data: a folder with training.jsonl (or train.jsonl), validation.jsonl and test.jsonl, one record per line.

All records of a file have one of the forms on the Hugging Face Hub and in TRL:

Alpaca:      {"instruction": ..., "input": ..., "output": ..., "system": ...}, where the instruction may be missing
messages:    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}, or "conversations"
completion:  {"prompt": ..., "completion": ...}, both texts or both lists of messages
question:    {"question": ..., "answer": ...}
chosen:      {"prompt": ..., "chosen": ..., "rejected": ...}, all texts or all lists of messages, which may hold the prompt
text:        {"text": ..., "label": ...}, the label a name or a number; in a record of another form, these two keys are ignored

Optional keys are "outputs", a list of references instead of "output"; "final_answer", the text that exact match compares with;
"labels", the answers to choose from; and "patient", as in a list of pictures. Keys that would change what a record says are
refused (MEANINGS); others are ignored.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from consilium.core.errors import DataError
from consilium.core.sanitize import shown
from consilium.core.schema import MOST_CLASSES
from consilium.data.datalist import SPLITS, DataList, read_datalist
from consilium.data.patients import pseudonym, read_identifier
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
FORMS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt", "completion"),
    "question": ("question", "answer"),
    "instruction": ("instruction", "input", "output", "outputs"),
    "chosen": ("chosen", "rejected"),
    "text": ("text", "label"),
}
"""The keys of each form, by the form's name."""
MEANINGS = frozenset(
    {
        "answers", "audio", "audios", "chat_template", "chat_template_kwargs", "choices", "context", "contexts",
        "conversation", "document", "documents", "function_call", "functions", "history", "images", "options", "query",
        "reasoning", "reasoning_content", "response", "responses", "suffix", "system_prompt", "target", "targets", "thinking",
        "tool_calls", "tools", "video", "videos", "weight",
    }
)  # fmt: skip
"""Keys of no form here that would change the question of a record or the words that are learned. They are refused."""
KEYS = MEANINGS | {"system", *(key for name, keys in FORMS.items() for key in keys if name != "text")}
"""All keys with a meaning, in the spelling that is read."""
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "developer": "system"}
"""ShareGPT's and OpenAI's names of roles."""
MOST_TURNS = 256
EXAMPLE = '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'
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
        return "\n".join(
            part
            for part in (self.system, *(part for pair in self.history for part in pair), self.instruction, self.input)
            if part
        )

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


def other_formats(folder: Path) -> str:
    """Return the start of a remedy that names a training file of another format, as training.parquet; "" if there is none.

    The file is in the folder, or in one of its subfolders.
    """
    paths = (path for pattern in ("[!.]*", "[!.]*/[!.]*") for path in folder.glob(pattern))
    named = (path for path in paths if re.match(r"train(ing)?\b", path.name) and path.name not in FILES["training"])
    found = min((path for path in named if path.is_file()), default=None)
    return f"{shown(found.relative_to(folder), 120)!r} is not read: write its records as training.jsonl, or " if found else ""


def split_files(folder: Path) -> dict[str, Path]:
    """Return the file of each split in a folder of instruction data, without splits that have none."""
    # of two files of a split, the first in FILES
    return {s: path for s, names in FILES.items() for name in reversed(names) if (path := folder / name).is_file()}


def read_site_list(path: Path) -> DataList:
    """Read the list that a site's `datalist` names: a folder or file of records, or a list of pictures. Raises DataError."""
    return read_texts(path) if has_texts(path) or path.suffix == ".jsonl" else read_datalist(path, None)


def read_texts(path: Path, require_pictures: bool = False, bad: list[DataError] | None = None) -> DataList:
    """Read a site's instruction data: a folder, or its training file. Raises DataError with the file, line and remedy.

    `require_pictures`: every record must have a picture. Texts that lie beside a list of pictures are not read: a site
    that names the list does not offer them, and sets no privacy budget for them. `bad`: see `read_records`.
    """
    folder = path.parent if path.name in FILES["training"] and path.is_file() else path
    if not has_texts(folder):
        raise DataError(
            f"{path}: holds no training.jsonl or train.jsonl; {other_formats(folder)}give a folder with one record a line in it"
        )
    records = {split: tuple(read_records(path, bad, require_pictures)) for split, path in split_files(folder).items()}
    return DataList(folder, {split: records.get(split, ()) for split in SPLITS})


def record_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and text of every line that is not blank. Raises DataError for more than MOST_RECORDS."""
    records = 0
    for number, line in enumerate(text_lines(path, "give a JSONL file in UTF-8"), start=1):
        if line.strip():
            if (records := records + 1) > MOST_RECORDS:
                raise DataError(f"{path}: holds more than {MOST_RECORDS:,} records; share them out among several files")
            yield number, line


def read_records(
    path: Path, bad: list[DataError] | None, require_pictures: bool = False, needs_answer: bool = True
) -> Iterator[Text]:
    """Yield the records of a file. Raises DataError for an unusable line, or adds the error to `bad` and goes on.

    With `require_pictures`, every record needs a picture, whose relative path starts at the file's folder.
    """
    first = None
    for number, line in record_lines(path):
        where = f"{path}:{number}"
        try:
            check_line(where, line)
            raw = parse_json(where, line, "write one record a line")
            record, form = _parse_record(where, f"{path.name}:{number}", raw, needs_answer)
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


def _parse_record(where: str, name: str, read: Any, needs_answer: bool) -> tuple[Text, str]:
    """Return a line's record and its form. `needs_answer`: the record needs an answer. A null value counts as absent."""
    if not isinstance(read, dict):
        raise DataError(f"{where}: expected a record in braces, found {type(read).__name__}; write one record a line")
    raw = {key: value for key, value in read.items() if value is not None}
    form = _form_of(where, raw)
    # the texts and the answer are checked below; `outputs` is empty without an answer
    if not form:
        text = Text("", "", "", ())
    elif form in ("messages", "conversations"):
        text = _from_messages(where, form, _read_messages(where, form, raw[form]))
    elif form == "chosen":
        text = _from_preference(where, raw)
    elif form == "prompt":
        text = _from_completion(where, raw, "completion")
    elif form == "instruction":
        text = Text("", raw.get("instruction", ""), raw.get("input", ""), (), system=raw.get("system", ""))
    else:
        question, answer = FORMS[form][0], raw.get(FORMS[form][1])
        answer = str(answer) if form == "text" and type(answer) is int else answer
        text = Text("", raw.get(question, ""), "", () if answer is None else (answer,), system=raw.get("system", ""))
    if not (form and (text.instruction or text.input)):
        if form in ("", "text") and "text" in read:
            raise DataError(f"{where}: text: an empty text; write its words, or leave the record out")
        raise DataError(
            f'{where}: has neither "instruction" nor "input"; write {{"instruction": ..., "input": ..., "output": ...}}, '
            f"or {EXAMPLE}"
        )
    for key, value in ((FORMS[form][0], text.instruction), ("input", text.input), ("system", text.system)):
        _check_text(where, key, value)
    outputs = _read_outputs(where, raw, form, text.outputs) if needs_answer else ("",)
    labels, final = _check_texts(where, "labels", raw.get("labels", [])), raw.get("final_answer")
    if isinstance(final, bool) or not isinstance(final, str | int | float | None) or final in (inf, -inf) or final != final:
        raise DataError(f"{where}: final_answer: {repr(final)[:80]} is neither text nor a number; write it as a text")
    patient = pseudonym(read_identifier(where, raw, "patient"))
    final = None if final is None else str(final)
    text = replace(text, name=name, outputs=outputs, final_answer=final, labels=labels, patient=patient)
    if not all(map(is_encodable, (text.prompt_without_template, *outputs, *labels, final or "", text.rejected))):
        raise DataError(f"{where}: has half a character in it (a surrogate, as \\ud800); write the whole one")
    return text, form


def _form_of(where: str, raw: Mapping[str, Any]) -> str:
    """Return the form of a record, a key of FORMS; "" if it has no key of any form. Raises DataError."""
    present = {key for key, value in raw.items() if value not in ("", [], {})}
    own = present - {"prompt"} if present.intersection(FORMS["chosen"]) else present
    forms = [name for name, keys in FORMS.items() if own.intersection(keys)]
    if len(forms) > 1 and "text" in forms:
        forms.remove("text")
    if len(forms) > 1:
        pair = " and ".join(repr(next(key for key in FORMS[name] if key in own)) for name in forms[:2])
        raise DataError(f"{where}: has {pair}, keys of two forms; leave one of them out")
    known = KEYS if forms else KEYS.union(FORMS["text"])
    if bad := sorted(key for key in present - known if key.strip().lower() in known):
        raise DataError(f"{where}: {bad[0][:80]!r} is not read; write {bad[0].strip().lower()!r}, or leave it out")
    if bad := sorted(MEANINGS & present):
        raise DataError(
            f"{where}: {bad[0]}: {repr(raw[bad[0]])[:80]} would change what is learned and is not read; "
            "put its words into the question or the answer, or leave the key out"
        )
    if forms and forms[0] in ("messages", "conversations") and "system" in present:
        raise DataError(f"{where}: system: beside {forms[0]!r}; write it there as the first message, of role system")
    return forms[0] if forms else ""


def _from_preference(where: str, raw: Mapping[str, Any]) -> Text:
    """Return a record with the better answer in `outputs` and the worse in `rejected`.

    Raises DataError if these answer different prompts.
    """
    both = list[Text]()
    for key in FORMS["chosen"]:
        if "prompt" in raw or not isinstance(raw.get(key), list):
            found = _from_completion(where, {"prompt": "", **raw}, key)
        else:
            found = _from_messages(where, key, _read_messages(where, key, raw[key]))
        if not (found.outputs and isinstance(found.outputs[0], str) and found.outputs[0].strip()):
            what = "is missing" if raw.get(key) is None else f"{repr(raw[key])[:80]} holds no answer"
            raise DataError(f"{where}: {key}: {what}; write the better answer as chosen, the worse one as rejected")
        both.append(replace(found, learns_history=False))
    better, worse = both
    if replace(better, outputs=()) != replace(worse, outputs=()):
        raise DataError(f"{where}: chosen and rejected answer different prompts; write the same turns before both answers")
    if better.outputs == worse.outputs:
        raise DataError(f"{where}: chosen and rejected are the same answer; leave the record out")
    return replace(better, rejected=worse.outputs[0])


def _from_completion(where: str, raw: Mapping[str, Any], key: str) -> Text:
    """Return a record whose prompt is in "prompt" and whose answer is in `key`. Raises DataError."""
    prompt, completion, system = raw.get("prompt", ""), raw.get(key), raw.get("system", "")
    if not isinstance(prompt, list) and not isinstance(completion, list):
        return Text("", prompt, "", () if completion is None else (completion,), system=system)
    if not isinstance(prompt, list) or not isinstance(completion, list | None):
        raise DataError(f"{where}: prompt and {key}: one is a text and one a list of messages; write both alike")
    if system:
        raise DataError(f"{where}: system: beside a list of messages; write it as the first message of prompt, of role system")
    asked = _read_messages(where, "prompt", prompt)
    if not asked or asked[-1][0] != "user":
        raise DataError(f"{where}: prompt: ends with a turn of {asked[-1][0] if asked else 'nobody'}; end it with the user's")
    answer = [] if completion is None else _read_messages(where, key, completion)
    if completion is not None and [role for role, _ in answer] != ["assistant"]:
        raise DataError(
            f"{where}: {key}: has the roles {[role for role, _ in answer]}; write one assistant message, and earlier ones "
            "into prompt"
        )
    return replace(_from_messages(where, "prompt", [*asked, *answer]), learns_history=False)


def _read_messages(where: str, key: str, value: Any) -> list[tuple[str, str]]:
    """Return the (role, text) of each message in a list. Raises DataError."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {key}: {repr(value)[:80]} is not a list of messages; write {EXAMPLE}")
    if len(value) > MOST_TURNS:
        raise DataError(f"{where}: {key}: {len(value):,} messages, at most {MOST_TURNS} are possible; split the conversation")
    found = []
    for number, one in enumerate(value):
        place = f"{where}: {key}[{number}]"
        if not isinstance(one, dict):
            raise DataError(f'{place}: {repr(one)[:80]} is not a message; write {{"role": "user", "content": ...}}')
        names = ("from", "value") if "from" in one and "role" not in one else ("role", "content")  # ShareGPT's or OpenAI's
        for name, entry in one.items():
            if name not in names and entry not in (None, "", [], {}):
                raise DataError(
                    f"{place}: {str(name)[:40]}: {repr(entry)[:60]} would change what is learned and is not read; "
                    f"put its words into {names[1]}, or leave the key out"
                )
        role = one.get(names[0])
        role = ROLES.get(role, role) if isinstance(role, str) else role
        if role not in ("system", "user", "assistant"):
            raise DataError(f"{place}: {names[0]}: {repr(role)[:40]} is none of system, user, assistant; write one of them")
        text = one.get(names[1])  # vision-language records have a list of parts; it may hold texts only
        if isinstance(text, list) and text and all(isinstance(part, dict) and part.get("type") == "text" for part in text):
            text = "".join(part["text"] if isinstance(part.get("text"), str) else "" for part in text)
        if isinstance(text, list):
            raise DataError(
                f"{place}: {names[1]}: {repr(text)[:80]} is not a text and has other parts; write a text, and a "
                "picture's path as the record's \"image\" for the task report"
            )
        if not isinstance(text, str):
            raise DataError(f"{place}: {names[1]}: {repr(text)[:80]} is not a text; write it in quotes")
        if role != "system" and not text.strip():
            raise DataError(f"{place}: {names[1]}: an empty {role} turn; write its words, or leave the conversation out")
        found.append((role, text))
    return found


def _from_messages(where: str, form: str, messages: Sequence[tuple[str, str]]) -> Text:
    """Return a conversation as a record. After an optional system message, user and assistant take turns.

    The last answer may be missing. Raises DataError for another order.
    """
    system = messages[0][1] if messages[0][0] == "system" else ""
    turns = messages[1:] if messages[0][0] == "system" else messages
    for number, (role, _) in enumerate(turns):
        if role != ("user", "assistant")[number % 2]:
            at = number + len(messages) - len(turns)
            raise DataError(
                f"{where}: {form}[{at}]: a turn of {role} where the {('user', 'assistant')[number % 2]}'s is expected; "
                "join turns that follow each other, and begin with the user's after at most one system message"
            )
    if not turns:
        raise DataError(f"{where}: {form}: a system message alone; write {EXAMPLE}")
    words = [content for _, content in turns]
    asked = words if len(words) % 2 else words[:-1]
    return Text(
        "",
        asked[-1],
        "",
        tuple(words[len(asked) :]),
        system=system,
        history=tuple(zip(asked[:-1:2], asked[1:-1:2], strict=True)),
    )


def _read_outputs(where: str, raw: Mapping[str, Any], form: str, found: Sequence[Any]) -> tuple[str, ...]:
    """Return a record's answers. Raises DataError if they are missing, or empty in a record that is not an Alpaca record."""
    key = FORMS[form][-1]
    if form == "instruction":
        if "outputs" in raw and (outputs := _check_texts(where, "outputs", raw["outputs"])):
            return outputs
        if "output" not in raw:
            raise DataError(f'{where}: needs an "output"; write its answer there, or several as "outputs": ["a", "b"]')
        return (_check_text(where, "output", raw["output"]),)
    if not found and len(FORMS[form]) == 1:
        raise DataError(f"{where}: {key}: ends with the user's turn; end it with the assistant's, which is learned")
    if not found:
        raise DataError(f'{where}: needs a "{key}"; write the answer there')
    if not _check_text(where, key, found[0]).strip():
        raise DataError(f"{where}: {key}: an empty answer; write its words, or leave the record out")
    return (found[0],)


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
