"""Texts answered in words or numbers: GSM8K, MetaMathQA, MedQuAD, Alpaca and E2E NLG, as their publishers ship them."""

import csv
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from consilium.core.errors import DataError
from consilium.data.importers.base import Importer, Line, Options, Reading, files, slug, wrong_layout
from consilium.data.importers.lines import REMEDY, find, joined, read_lines, read_list
from consilium.data.safe_open import check_file, text_lines

GSM8K_LAYOUT = "train.jsonl and test.jsonl with question and answer, the result behind ####"
METAMATH_LAYOUT = "MetaMathQA-395K.json, a list of records with query, response, type and original_question"
MEDQUAD_LAYOUT = "folders such as 1_CancerGov_QA or 9_CDC_QA with *.xml of QAPairs"
ALPACA_LAYOUT = "alpaca_data.json, a list of records with instruction, input and output"
E2E_LAYOUT = "trainset.csv, devset.csv and testset_w_refs.csv with the columns mr and ref"
RESULT = "The answer is:"
E2E_FILES = {
    "training": ("trainset.csv", None),
    "validation": ("devset.csv", "validation"),
    "test": ("testset_w_refs.csv", "test"),
}


def read_gsm8k(source: Path, options: Options) -> Reading:
    """Read GSM8K (Cobbe et al.): the published test split stays; the calculator's notes <<...>> are taken out of answers."""
    lines = []
    for name, split in (("train.jsonl", None), ("test.jsonl", "test")):
        path = find(source, [name], GSM8K_LAYOUT)
        for index, raw in enumerate(read_lines(path, {"question": str, "answer": str})):
            lines.append(Line("gsm8k", f"{name}:{index}", _gsm8k(f"{path}: record {index + 1}", raw), split))
    return Reading(joined(lines), None)


def _gsm8k(where: str, raw: dict[str, Any]) -> dict[str, Any]:
    steps, mark, result = raw["answer"].rpartition("####")
    if not mark or not result.strip():
        raise DataError(f"{where}: expected an answer with its result behind ####; found {raw['answer'][-80:]!r}; {REMEDY}")
    output = re.sub(r"<<[^<>]*>>", "", steps) + f"#### {result.strip()}"
    return _task(raw["question"], output) | {"final_answer": result.strip().replace(",", "")}


def read_metamath(source: Path, options: Options) -> Reading:
    """Read MetaMathQA (Yu et al.): no published split; all that was made of one original question stays together.

    The end of a response, "The answer is: X", becomes "#### X", which is what exact match reads. `type` is kept.
    """
    fields = {"query": str, "response": str, "type": str, "original_question": str}
    raws = read_list(find(source, ["MetaMathQA-395K.json", "MetaMathQA.json"], METAMATH_LAYOUT), fields)
    told = [raw for raw in raws if raw["response"].rpartition(RESULT)[2].strip() and RESULT in raw["response"]]
    lines = [Line("metamathqa", raw["original_question"], _metamath(raw)) for raw in told]
    left = [f"{len(raws) - len(told)} records without {RESULT!r} are left out"] if len(told) < len(raws) else []
    return Reading(joined(lines), None, left)


def _metamath(raw: dict[str, Any]) -> dict[str, Any]:
    steps, _, result = raw["response"].rpartition(RESULT)
    result = result.strip()
    output = f"{steps.rstrip().removesuffix(f'#### {result}').rstrip()}\n#### {result}".lstrip()
    return _task(raw["query"], output) | {"final_answer": result, "type": raw["type"]}


def read_medquad(source: Path, options: Options) -> Reading:
    """Read MedQuAD (Ben Abacha and Demner-Fushman): a site per source; all questions of one page stay together.

    Empty answers are left out: three sources keep theirs back for their copyright. `type` and `focus` are kept.
    """
    lines: list[Line] = []
    empty: Counter[str] = Counter()
    for path in files(source, [".xml"]):
        if found := re.fullmatch(r"\d+_(.+?)_QA(_XML)?", path.parent.name, re.IGNORECASE):
            site = slug(found[1])
            records = list(_medquad(path))
            lines += [Line(site, f"{path.parent.name}/{path.name}", one) for one in records if one["output"]]
            empty[site] += sum(not one["output"] for one in records)
    if not lines:
        raise wrong_layout(source, MEDQUAD_LAYOUT)
    parts = ", ".join(f"{count} of {site}" for site, count in sorted(empty.items()) if count)
    return Reading(joined(lines), None, [f"empty answers are left out: {parts}"] if parts else [])


def _medquad(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the questions of a page, with runs of blanks as one. Raises DataError."""
    check_file(path, REMEDY)
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ValueError, LookupError, ElementTree.ParseError) as error:  # LookupError: an encoding nobody knows
        raise DataError(f"{path}: expected XML of QAPairs; found otherwise ({error}); {REMEDY}") from None
    focus = _words(root.find("Focus"))
    for pair in root.iter("QAPair"):
        question = pair.find("Question")
        if asked := _words(question):
            kind = question.attrib.get("qtype", "") if question is not None else ""
            yield _task(asked, _words(pair.find("Answer"))) | {"type": kind, "focus": focus}


def _words(element: ElementTree.Element | None) -> str:
    return "" if element is None else " ".join("".join(element.itertext()).split())


def read_alpaca(source: Path, options: Options) -> Reading:
    """Read Alpaca (Taori et al.): no published split; records without an output are left out."""
    path = find(source, ["alpaca_data.json", "alpaca_data_cleaned.json"], ALPACA_LAYOUT)
    raws = read_list(path, {"instruction": str, "input": str, "output": str})
    lines = [Line("alpaca", str(i), _task(r["instruction"], r["output"], r["input"])) for i, r in enumerate(raws)]
    told = [line for line in lines if line.record["output"].strip() and line.record["instruction"].strip()]
    left = [f"{len(lines) - len(told)} records without an output are left out"] if len(told) < len(lines) else []
    return Reading(joined(told), None, left)


def read_e2e(source: Path, options: Options) -> Reading:
    """Read E2E NLG (Novikova et al.): its three splits; in the test split all references of one input are one record.

    `name`, the first attribute of every input, is kept as a key.
    """
    lines = []
    for name, split in E2E_FILES.values():
        rows = _e2e_rows(find(source, [name], E2E_LAYOUT))
        lines += [Line("e2e", mr, record, split) for mr, record in (_merged(rows) if split == "test" else _e2e(rows))]
    return Reading(joined(lines), None)


def _e2e_rows(path: Path) -> list[tuple[str, str]]:
    """Return (mr, ref) of every row. Raises DataError."""
    reader = csv.DictReader(text_lines(path, REMEDY, newline=""))
    try:
        heads, rows = reader.fieldnames or [], list(reader)
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: expected rows of CSV; found otherwise ({error}); {REMEDY}") from None
    if not {"mr", "ref"} <= set(heads):
        raise DataError(f"{path}: expected the columns mr and ref; found {', '.join(heads)[:200] or 'none'}")
    return [(row["mr"], row["ref"]) for row in rows if row["mr"] and row["ref"]]


def _e2e(rows: list[tuple[str, str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for mr, ref in rows:
        yield mr, _described(mr) | {"output": ref}


def _merged(rows: list[tuple[str, str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    references: dict[str, list[str]] = {}
    for mr, ref in rows:
        references.setdefault(mr, []).append(ref)
    for mr, refs in references.items():
        yield mr, _described(mr) | {"outputs": refs}


def _described(mr: str) -> dict[str, Any]:
    first = re.match(r"[^\[\]]*\[([^\]]*)\]", mr)
    return {"instruction": "Describe this restaurant in a sentence or two.", "input": mr, "name": first[1] if first else ""}


def _task(instruction: str, output: str, text: str = "") -> dict[str, Any]:
    return {"instruction": instruction, "input": text, "output": output}


SETS = {
    "gsm8k": Importer(GSM8K_LAYOUT, read_gsm8k),
    "metamathqa": Importer(METAMATH_LAYOUT, read_metamath),
    "medquad": Importer(MEDQUAD_LAYOUT, read_medquad),
    "alpaca": Importer(ALPACA_LAYOUT, read_alpaca),
    "e2e": Importer(E2E_LAYOUT, read_e2e),
}
