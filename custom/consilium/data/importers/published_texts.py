"""Importers of published text sets, in the files that their publishers ship. Most sets are declarations of one reader, TextSet.

The test sets of BoolQ, PIQA, HellaSwag, WinoGrande and MedMCQA have no labels. Here, their labelled development set is the test
split, and validation is cut from the training set.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from consilium.core.errors import DataError
from consilium.core.grouping import group_by_key
from consilium.data.folders import slug
from consilium.data.importers.base import (
    GIVE,
    MOST_PAGE,
    Importer,
    ImportResult,
    Options,
    TextRecord,
    find_files,
    numbered_csv_rows,
    read_xml,
    wrong_layout,
)
from consilium.data.patients import first_linked
from consilium.data.safe_open import check_line, parse_json, read_text, text_lines

RESULT = "The answer is:"
SIZES = ("xl", "l", "m", "s", "xs", "debiased")
"""Sizes of WinoGrande's training set."""
MMLU_SUBJECTS = (
    "anatomy", "clinical_knowledge", "college_biology", "college_medicine", "medical_genetics", "professional_medicine",
)  # fmt: skip
"""MMLU's medical subjects in MultiMedQA (Singhal et al., "Large language models encode clinical knowledge", 2023)."""
MMLU_SPLITS = {"dev": "training", "val": "validation", "test": "test"}
PUBMEDQA = ["yes", "no", "maybe"]
Record = dict[str, Any]
Convert = Callable[[str, Record, str], tuple[str, Record] | None]
"""A function of (where, raw record, label) that returns (group, record), or None for a record without an answer.

Without a group (""), the record is a group of its own.
"""


@dataclass(frozen=True)
class TextSet:
    """A published set of texts that becomes one site.

    `parts`: per file, its possible names, of which the first that exists is read, and its split. {size} in a name stands for
    --size, one of `sizes`; a last name "" means that the file may be missing. `fields`: keys and types of a record. `labels`:
    the labels are in NAME-labels.lst beside NAME.jsonl. `columns`: the columns of a CSV file without headings, which is named
    SUBJECT_PART.csv. `is_lines`: a .json file has a record per line. `merges_references`: test records of one group become one,
    with all their outputs. `test_ids`: a file with the answers of the test split by group; it may be missing. `unanswered`:
    what the records that are left out lack, for a note.
    """

    site: str
    layout: str
    parts: tuple[tuple[tuple[str, ...], str | None], ...]
    fields: Mapping[str, type]
    convert: Convert
    labels: bool = False
    columns: tuple[str, ...] = ()
    is_lines: bool = False
    merges_references: bool = False
    test_ids: str = ""
    unanswered: str = ""
    notes: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()

    def read(self, source: Path, options: Options) -> ImportResult:
        """Read all files of the set below the source. Raises DataError."""
        lines, notes, left = list[TextRecord](), list(self.notes), 0
        size = options.size or next(iter(self.sizes), "")
        for names, split in self.parts:
            path = find_file(source, [name.format(size=size) for name in names])
            if path is None and names[-1]:
                raise wrong_layout(source, self.layout)
            raws = self._raw_records(path) if path else []
            labels = [""] * len(raws)
            if path and self.labels:
                beside = path.with_name(f"{path.stem}-labels.lst")
                if not beside.is_file():
                    raise DataError(f"{path}: expected {beside.name} beside it; found none; complete the set")
                labels = read_text(beside, GIVE).split()
                if len(labels) != len(raws):
                    count = f"{len(raws)} labels, as many as {path.name} has records"
                    raise DataError(f"{beside}: expected {count}; found {len(labels)}; {GIVE}")
            for number, ((where, raw), label) in enumerate(zip(raws, labels, strict=True)):
                if path and (found := self.convert(where, raw, label)):
                    lines.append(TextRecord(self.site, found[0] or f"{path.name}:{number}", found[1], split))
                else:
                    left += 1
        if left:
            notes.append(f"{left} records without {self.unanswered} are left out")
        if self.test_ids and (truth := find_file(source, [self.test_ids])):
            tests, known = parse_json(str(truth), read_text(truth, GIVE), GIVE), {one.group: one.record for one in lines}
            if not isinstance(tests, dict):
                raise DataError(f"{truth}: expected a map of answers by record; found a {type(tests).__name__}; {GIVE}")
            for group, answer in tests.items():
                if group not in known or known[group]["output"] != answer:
                    raise DataError(
                        f"{truth}: expected the answer of record {group} in the other file; found {repr(answer)[:40]}; give "
                        "both files of one release"
                    )
            lines = [replace(one, split="test") if one.group in tests else one for one in lines]
        elif self.test_ids:
            notes.append(f"there is no {self.test_ids}: the test split is not the publisher's")
        if self.merges_references:  # the test records of a group become one, whose `outputs` are all their outputs
            by_group = group_by_key((one.group, one) for one in lines if one.split == "test")
            lines = [one for one in lines if one.split != "test"]
            for own in by_group.values():
                record = {key: value for key, value in own[0].record.items() if key != "output"}
                lines.append(replace(own[0], record=record | {"outputs": [one.record["output"] for one in own]}))
        return ImportResult(merge_groups_by_prompt(lines), None, notes)

    def _raw_records(self, path: Path) -> list[tuple[str, Record]]:
        """Return (where, record) of a file: CSV, a JSON list or map (its keys become `id`), or JSON lines. Raises DataError."""
        found: list[tuple[str, Any]]
        if path.suffix.lower() == ".csv":
            rows = numbered_csv_rows(path)
            heads = self.columns or (rows.pop(0)[1] if rows else ())
            if bad := next(((number, len(row)) for number, row in rows if len(row) != len(heads)), None):
                raise DataError(f"{path}:{bad[0]}: expected the {len(heads)} cells {', '.join(heads)}; found {bad[1]}; {GIVE}")
            own = {"subject": path.stem.rpartition("_")[0]} if self.columns else {}
            found = [
                (f"{path}:{number}", dict(zip(heads, row, strict=True)) | own | {"row": f"{path.name}:{number}"})
                for number, row in rows
            ]
        elif path.suffix.lower() == ".json" and not self.is_lines:
            raw = parse_json(str(path), read_text(path, GIVE), GIVE)
            if isinstance(raw, dict):
                raw = [one | {"id": key} if isinstance(one, dict) else one for key, one in raw.items()]
            found = [(f"{path}: record {number}", one) for number, one in enumerate(raw if isinstance(raw, list) else [raw], 1)]
        else:
            found = []
            for number, line in enumerate(text_lines(path, GIVE), start=1):
                if line.strip():
                    check_line(where := f"{path}:{number}", line)
                    found.append((where, parse_json(where, line, GIVE)))
        for where, one in found:
            if not (isinstance(one, dict) and all(isinstance(one.get(key), kind) for key, kind in self.fields.items())):
                expected = ", ".join(f"{key} ({kind.__name__})" for key, kind in self.fields.items())
                seen = [f"{key} ({type(value).__name__})" for key, value in one.items()] if isinstance(one, dict) else []
                raise DataError(f"{where}: expected {expected}; found {', '.join(seen)[:200] or type(one).__name__}; {GIVE}")
        return found


def find_file(source: Path, names: Sequence[str]) -> Path | None:
    """Return the file with the first of `names` that exists, in any case, at any depth, or None. Raises DataError for two."""
    for name in filter(None, names):
        found = [path for path in find_files(source, [name.lower()]) if path.name.lower() == name.lower()]
        least = min((len(path.parts) for path in found), default=0)
        highest = [path for path in found if len(path.parts) == least]
        if len(highest) > 1:
            raise DataError(f"{source}: expected one {name}; found {highest[0]} and {highest[1]}; give the folder of one")
        if highest:
            return highest[0]
    return None


def merge_groups_by_prompt(lines: Sequence[TextRecord]) -> list[TextRecord]:
    """Return the records with groups merged that share a prompt at a site, so that a prompt is never in two splits."""
    keys = [[(x.site, x.group), (x.site, x.record.get("instruction", ""), x.record.get("input", ""))] for x in lines]
    first, least = first_linked(keys), dict[int, str]()
    for line, root in zip(lines, first, strict=True):
        least[root] = min(line.group, least.get(root, line.group))
    return [replace(line, group=least[root]) for line, root in zip(lines, first, strict=True)]


def _make_record(instruction: str, output: str, text: str = "") -> Record:
    return {"instruction": instruction, "input": text, "output": output}


def _choice(
    where: str,
    raw: Record,
    label: str,
    *,
    options: Sequence[str],
    first: int | None,
    task: str = "Which answer is right?",
    text: str = "{question}",
    key: str = "",
    group: Callable[[Record], str] = lambda raw: "",
    kept: str = "",
) -> tuple[str, Record]:
    """Convert a multiple-choice record. Its answer becomes a letter. Raises DataError.

    `text`: a template of the raw record's keys. `options`: the keys of the options; a single key holds a list, or a map by
    letter. `first`: the number of the first option, None if the answer is a letter. `key`: the key of the answer, "" if it is
    `label`. `group`: returns a raw record's group. `kept`: a key that the record keeps.
    """
    found = raw[options[0]] if len(options) == 1 else [raw[name] for name in options]
    if isinstance(found, dict):
        if list(found) not in (list("ABCD"), list("ABCDE")):
            raise DataError(f"{where}: expected options A to D or E; found {', '.join(found)[:80]}; {GIVE}")
        found = list(found.values())
    shown = text.format_map(raw)
    where = f"{where}: {shown[:60]!r}"
    if odd := [option for option in found if not isinstance(option, str)]:
        raise DataError(f"{where}: expected options that are texts; found {repr(odd[0])[:60]}; {GIVE}")
    letters = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(found)])
    if not 2 <= len(found) == len(letters):
        raise DataError(f"{where}: expected 2 to 26 options; found {len(found)}; {GIVE}")
    known = letters if first is None else [str(first + index) for index in range(len(found))]
    answer = str(raw[key]).strip() if key else label
    if answer not in known:
        raise DataError(f"{where}: expected a label from {known[0]} to {known[-1]}; found {answer[:20]!r}; {GIVE}")
    asked = f"{task} Answer with {', '.join(letters[:-1])} or {letters[-1]}."
    listed = "\n".join(f"{letter}. {option}" for letter, option in zip(letters, found, strict=True))
    record = _make_record(asked, letters[known.index(answer)], f"{shown}\n{listed}") | {"labels": letters}
    return group(raw), record | ({kept: str(raw.get(kept) or "")} if kept else {})


def _gsm8k(where: str, raw: Record, label: str) -> tuple[str, Record]:
    """Convert a record of GSM8K: calculator notes <<...>> are removed, and `final_answer` is the text after ####."""
    steps, mark, result = raw["answer"].rpartition("####")
    if not mark or not result.strip():
        raise DataError(f"{where}: expected an answer with its result behind ####; found {raw['answer'][-80:]!r}; {GIVE}")
    output = re.sub(r"<<[^<>]*>>", "", steps) + f"#### {result.strip()}"
    return "", _make_record(raw["question"], output) | {"final_answer": result.strip().replace(",", "")}


def _metamath(where: str, raw: Record, label: str) -> tuple[str, Record] | None:
    """Convert a record of MetaMathQA: "The answer is: X" becomes "#### X", which exact match reads.

    Variants of one question are one group.
    """
    steps, mark, result = raw["response"].rpartition(RESULT)
    if not mark or not (result := result.strip()):
        return None
    output = f"{steps.rstrip().removesuffix(f'#### {result}').rstrip()}\n#### {result}".lstrip()
    return raw["original_question"], _make_record(raw["query"], output) | {"final_answer": result, "type": raw["type"]}


def _alpaca(where: str, raw: Record, label: str) -> tuple[str, Record] | None:
    answered = raw["output"].strip() and raw["instruction"].strip()
    return ("", _make_record(raw["instruction"], raw["output"], raw["input"])) if answered else None


def _e2e(where: str, raw: Record, label: str) -> tuple[str, Record] | None:
    """Convert a record of E2E NLG. `name` is the first attribute of the input."""
    if not (raw["mr"] and raw["ref"]):
        return None
    first = re.match(r"[^\[\]]*\[([^\]]*)\]", raw["mr"])
    asked = {"instruction": "Describe this restaurant in a sentence or two.", "input": raw["mr"]}
    return raw["mr"], asked | {"name": first[1] if first else "", "output": raw["ref"]}


def _boolq(where: str, raw: Record, label: str) -> tuple[str, Record]:
    """Convert a record of BoolQ. Questions about one page are one group."""
    record = _make_record(
        "Read the passage and answer the question about it with True or False.",
        str(raw["answer"]),
        f"{raw['passage']}\n\nQuestion: {raw['question']}?",
    )
    return str(raw.get("title") or raw["passage"]), record | {"labels": ["True", "False"]}


def _pubmedqa(where: str, raw: Record, label: str) -> tuple[str, Record]:
    if raw["final_decision"] not in PUBMEDQA or not all(isinstance(one, str) for one in raw["CONTEXTS"]):
        raise DataError(f"{where}: expected CONTEXTS of texts and a final_decision of yes, no or maybe; found others; {GIVE}")
    asked = "Read the abstract and answer the question about it with yes, no or maybe."
    text = "\n".join([*raw["CONTEXTS"], "", f"Question: {raw['QUESTION']}"])
    return raw["id"], _make_record(asked, raw["final_decision"], text) | {"labels": PUBMEDQA}


def read_medquad(source: Path, options: Options) -> ImportResult:
    """Read MedQuAD (Ben Abacha and Demner-Fushman 2019): a site per source. All questions about one page are one group.

    Records without an answer are left out; three sources withhold answers for copyright. Records keep `type` and `focus`.
    Raises DataError.
    """
    lines, empty = list[TextRecord](), Counter[str]()
    for path in find_files(source, [".xml"]):
        if not (found := re.fullmatch(r"\d+_(.+?)_QA(_XML)?", path.parent.name, re.IGNORECASE)):
            continue
        root = read_xml(path, "XML of QAPairs", MOST_PAGE)
        site, focus = slug(found[1]), _element_text(root.find("Focus"))
        for pair in root.iterfind("QAPairs/QAPair"):
            question = pair.find("Question")
            asked, answer = _element_text(question), _element_text(pair.find("Answer"))
            empty[site] += bool(asked) and not answer
            if question is not None and asked and answer:
                record = _make_record(asked, answer) | {"type": question.attrib.get("qtype", ""), "focus": focus}
                lines.append(TextRecord(site, f"{path.parent.name}/{path.name}", record))
    parts = ", ".join(f"{count} of {site}" for site, count in sorted(empty.items()) if count)
    return ImportResult(merge_groups_by_prompt(lines), None, [f"empty answers are left out: {parts}"] if parts else [])


def _element_text(element: ElementTree.Element | None) -> str:
    """Return the text of an element, "" for None. Runs of blanks become one blank."""
    return "" if element is None else " ".join("".join(element.itertext()).split())


_DEVELOPMENT_TESTS = partial(
    TextSet, notes=("the publisher's development set is the test split, because the test set has no labels",)
)
_MEDQA = partial(_choice, options=("options",), first=None, key="answer_idx")
TEXT_SETS = (
    TextSet(  # Cobbe et al. (2021)
        "gsm8k", "train.jsonl and test.jsonl with question and answer, the result behind ####",
        ((("train.jsonl",), None), (("test.jsonl",), "test")),
        {"question": str, "answer": str}, _gsm8k,
    ),
    TextSet(  # Yu et al. (2023)
        "metamathqa", "MetaMathQA-395K.json, a list of records with query, response, type and original_question",
        ((("MetaMathQA-395K.json", "MetaMathQA.json"), None),),
        {"query": str, "response": str, "type": str, "original_question": str}, _metamath, unanswered=repr(RESULT),
    ),
    TextSet(  # Taori et al. (2023)
        "alpaca", "alpaca_data.json, a list of records with instruction, input and output",
        ((("alpaca_data.json", "alpaca_data_cleaned.json"), None),),
        {"instruction": str, "input": str, "output": str}, _alpaca, unanswered="an output",
    ),
    _DEVELOPMENT_TESTS(  # Clark et al. (2019)
        "boolq", "train.jsonl and dev.jsonl with question, passage and answer (true or false)",
        ((("train.jsonl",), None), (("dev.jsonl",), "test")),
        {"question": str, "passage": str, "answer": bool}, _boolq,
    ),
    _DEVELOPMENT_TESTS(  # Bisk et al. (2020)
        "piqa",
        "train.jsonl and valid.jsonl (or dev.jsonl) with goal, sol1 and sol2, and train-labels.lst and valid-labels.lst",
        ((("train.jsonl",), None), (("valid.jsonl", "dev.jsonl"), "test")),
        {"goal": str, "sol1": str, "sol2": str},
        partial(
            _choice, task="Which solution reaches the goal?", text="{goal}", options=("sol1", "sol2"), first=0,
            group=itemgetter("goal"),
        ),
        labels=True,
    ),
    _DEVELOPMENT_TESTS(  # Zellers et al. (2019)
        "hellaswag", "hellaswag_train.jsonl and hellaswag_val.jsonl with ctx, endings and label",
        ((("hellaswag_train.jsonl",), None), (("hellaswag_val.jsonl",), "test")),
        {"ctx": str, "endings": list, "label": int, "activity_label": str},
        partial(
            _choice, task="How does the text go on?", text="{activity_label}: {ctx}", options=("endings",), first=0,
            key="label", group=lambda raw: str(raw.get("source_id") or ""), kept="activity_label",  # a video or an article
        ),
    ),
    _DEVELOPMENT_TESTS(  # Sakaguchi et al. (2020)
        "winogrande", "train_xl.jsonl (or another --size) with train_xl-labels.lst, and dev.jsonl with dev-labels.lst",
        ((("train_{size}.jsonl",), None), (("dev.jsonl",), "test")),
        {"qID": str, "sentence": str, "option1": str, "option2": str},
        partial(
            _choice, task="Which option belongs in the gap, marked _?", text="{sentence}", options=("option1", "option2"),
            first=1, group=lambda raw: re.sub(r"-[12]$", "", raw["qID"]),  # the two sentences of a pair
        ),
        labels=True, sizes=SIZES,
    ),
    _DEVELOPMENT_TESTS(  # Pal et al. (2022)
        "medmcqa", "train.json and dev.json, a record a line with question, opa to opd and cop (1 to 4)",
        ((("train.json",), None), (("dev.json",), "test")),
        {"question": str, "opa": str, "opb": str, "opc": str, "opd": str, "cop": int},
        partial(_choice, options=("opa", "opb", "opc", "opd"), first=1, key="cop", kept="subject_name"), is_lines=True,
    ),
    TextSet(  # Jin et al. (2021), four options
        "medqa", "phrases_no_exclude_train.jsonl, _dev.jsonl and _test.jsonl of US/4_options",
        (
            (("phrases_no_exclude_train.jsonl",), None),
            (("phrases_no_exclude_dev.jsonl", ""), "validation"),
            (("phrases_no_exclude_test.jsonl",), "test"),
        ),
        {"question": str, "options": dict, "answer_idx": str}, _MEDQA,
    ),
    TextSet(  # Jin et al. (2021), five options
        "medqa-5", "train.jsonl, dev.jsonl and test.jsonl of US with question, options and answer_idx",
        ((("train.jsonl",), None), (("dev.jsonl", ""), "validation"), (("test.jsonl",), "test")),
        {"question": str, "options": dict, "answer_idx": str}, _MEDQA,
    ),
    TextSet(  # Arias-Duart et al. (2025)
        "careqa", "CareQA_en.json (or --size es), a list of records with question, op1 to op4 and cop (1 to 4)",
        ((("CareQA_{size}.json",), None),),
        {"question": str, "op1": str, "op2": str, "op3": str, "op4": str, "cop": int},
        partial(_choice, options=("op1", "op2", "op3", "op4"), first=1, key="cop", kept="category"),
        sizes=("en", "es"),
        notes=("the publisher has a test set alone: write --test 0.98 --validation 0.01 to score nearly all of it",),
    ),
    TextSet(  # Novikova et al. (2017)
        "e2e", "trainset.csv, devset.csv and testset_w_refs.csv with the columns mr and ref",
        ((("trainset.csv",), None), (("devset.csv",), "validation"), (("testset_w_refs.csv",), "test")),
        {"mr": str, "ref": str}, _e2e, merges_references=True, unanswered="a text",
    ),
    TextSet(  # Jin et al. (2019), the labelled part
        "pubmedqa",
        "ori_pqal.json, a map of records with QUESTION, CONTEXTS and final_decision, and test_ground_truth.json",
        ((("ori_pqal.json",), None),), {"id": str, "QUESTION": str, "CONTEXTS": list, "final_decision": str}, _pubmedqa,
        test_ids="test_ground_truth.json",
    ),
    TextSet(  # Hendrycks et al. (2021), the medical subjects
        "mmlu-medical", "dev, val and test with SUBJECT_dev.csv, SUBJECT_val.csv and SUBJECT_test.csv, as anatomy_test.csv",
        tuple(((f"{one}_{part}.csv",), split) for one in MMLU_SUBJECTS for part, split in MMLU_SPLITS.items()),
        {"question": str, "answer": str},
        partial(_choice, options=("A", "B", "C", "D"), first=None, key="answer", kept="subject", group=itemgetter("row")),
        columns=("question", "A", "B", "C", "D", "answer"),
        notes=("the publisher's five development questions of each subject are the training split",),
    ),
)  # fmt: skip
SETS = {one.site: Importer(one.layout, one.read, sizes=one.sizes) for one in TEXT_SETS} | {
    "medquad": Importer("folders such as 1_CancerGov_QA or 9_CDC_QA with *.xml of QAPairs", read_medquad),
}
