"""Texts answered by one of a few labels: BoolQ, PIQA, HellaSwag and WinoGrande, as their publishers ship them.

Their test sets come without labels. So the labelled development set is the test split here, and validation is cut from the
training set.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from consilium.core.errors import DataError
from consilium.data.importers.base import Importer, Line, Options, Reading
from consilium.data.importers.lines import REMEDY, find, joined, read_labels, read_lines

SIZES = ("xl", "l", "m", "s", "xs", "debiased")
BOOLQ_LAYOUT = "train.jsonl and dev.jsonl with question, passage and answer (true or false)"
PIQA_LAYOUT = "train.jsonl and valid.jsonl (or dev.jsonl) with goal, sol1 and sol2, and train-labels.lst and valid-labels.lst"
HELLASWAG_LAYOUT = "hellaswag_train.jsonl and hellaswag_val.jsonl with ctx, endings and label"
WINOGRANDE_LAYOUT = "train_xl.jsonl (or another --size) with train_xl-labels.lst, and dev.jsonl with dev-labels.lst"
NOTE = "the publisher's development set is the test split, because the test set has no labels"


def read_boolq(source: Path, options: Options) -> Reading:
    """Read BoolQ (Clark et al.); questions about one page stay together."""
    lines = []
    for name, split in (("train.jsonl", None), ("dev.jsonl", "test")):
        for raw in read_lines(find(source, [name], BOOLQ_LAYOUT), {"question": str, "passage": str, "answer": bool}):
            task = "Read the passage and answer the question about it with True or False."
            text = f"{raw['passage']}\n\nQuestion: {raw['question']}?"
            record = {"instruction": task, "input": text, "output": str(raw["answer"]), "labels": ["True", "False"]}
            lines.append(Line("boolq", str(raw.get("title") or raw["passage"]), record, split))
    return Reading(joined(lines), None, [NOTE])


def read_piqa(source: Path, options: Options) -> Reading:
    """Read PIQA (Bisk et al.); questions about one goal stay together."""
    lines = []
    for names, split in ((["train.jsonl"], None), (["valid.jsonl", "dev.jsonl"], "test")):
        path = find(source, names, PIQA_LAYOUT)
        raws = read_lines(path, {"goal": str, "sol1": str, "sol2": str})
        for raw, label in zip(raws, read_labels(path, len(raws)), strict=True):
            record = _choice(path, "Which solution reaches the goal?", raw["goal"], [raw["sol1"], raw["sol2"]], label, 0)
            lines.append(Line("piqa", raw["goal"], record, split))
    return Reading(joined(lines), None, [NOTE])


def read_hellaswag(source: Path, options: Options) -> Reading:
    """Read HellaSwag (Zellers et al.); what comes from one video or article stays together. `activity_label` is kept."""
    lines = []
    fields = {"ctx": str, "endings": list, "label": int, "activity_label": str}
    for name, split in (("hellaswag_train.jsonl", None), ("hellaswag_val.jsonl", "test")):
        path = find(source, [name], HELLASWAG_LAYOUT)
        for index, raw in enumerate(read_lines(path, fields)):
            text = f"{raw['activity_label']}: {raw['ctx']}"
            record = _choice(path, "How does the text go on?", text, raw["endings"], str(raw["label"]), 0)
            group = str(raw.get("source_id") or f"{name}:{index}")
            lines.append(Line("hellaswag", group, record | {"activity_label": raw["activity_label"]}, split))
    return Reading(joined(lines), None, [NOTE])


def read_winogrande(source: Path, options: Options) -> Reading:
    """Read WinoGrande (Sakaguchi et al.), of whose training sets --size names one; the two of a pair stay together."""
    lines = []
    for name, split in ((f"train_{options.size or SIZES[0]}.jsonl", None), ("dev.jsonl", "test")):
        path = find(source, [name], WINOGRANDE_LAYOUT)
        raws = read_lines(path, {"qID": str, "sentence": str, "option1": str, "option2": str})
        for raw, label in zip(raws, read_labels(path, len(raws)), strict=True):
            task, both = "Which option belongs in the gap, marked _?", [raw["option1"], raw["option2"]]
            group = re.sub(r"-[12]$", "", raw["qID"])
            lines.append(Line("winogrande", group, _choice(path, task, raw["sentence"], both, label, 1), split))
    return Reading(joined(lines), None, [NOTE])


def _choice(path: Path, task: str, text: str, options: Sequence[Any], label: str, first: int) -> dict[str, Any]:
    """Return a record whose answer is a letter; `label` counts the options from `first`. Raises DataError."""
    letters = [chr(ord("A") + index) for index in range(len(options))]
    if label not in map(str, range(first, first + len(letters))):
        last = first + len(letters) - 1
        raise DataError(f"{path}: {text[:60]!r}: expected a label from {first} to {last}; found {label[:20]!r}; {REMEDY}")
    asked = f"{task} Answer with {', '.join(letters[:-1])} or {letters[-1]}."
    shown = "\n".join(f"{letter}. {option}" for letter, option in zip(letters, options, strict=True))
    return {"instruction": asked, "input": f"{text}\n{shown}", "output": letters[int(label) - first], "labels": letters}


SETS = {
    "boolq": Importer(BOOLQ_LAYOUT, read_boolq),
    "piqa": Importer(PIQA_LAYOUT, read_piqa),
    "hellaswag": Importer(HELLASWAG_LAYOUT, read_hellaswag),
    "winogrande": Importer(WINOGRANDE_LAYOUT, read_winogrande, sizes=SIZES),
}
