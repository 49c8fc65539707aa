"""Importers of published text sets, in the files that their publishers ship. Most sets are declarations of one reader, TextSet.

The test sets of BoolQ, PIQA, HellaSwag, WinoGrande and MedMCQA have no labels. Here, their labelled development set is the test
split, and validation is cut from the training set.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from consilium.core.errors import DataError
from consilium.core.grouping import group_by_key
from consilium.data.folders import slug
from consilium.data.importers.base import (
    GIVE,
    Importer,
    ImportResult,
    Options,
    TextRecord,
    csv_rows_if_complete,
    find_files,
    numbered_csv_rows,
    wrong_layout,
)
from consilium.data.importers.xml_files import read_xml
from consilium.data.patients import first_linked
from consilium.data.safe_open import MOST_CHARACTERS, check_line, parse_json, read_text, text_lines

RESULT = "The answer is:"
SIZES = ("xl", "l", "m", "s", "xs", "debiased")
"""Sizes of WinoGrande's training set."""
DEVELOPMENT = "the publisher's development set is the test split, because the test set has no labels"
Record = dict[str, Any]
Convert = Callable[[str, Record, str], tuple[str, Record] | None]
"""A function of (where, raw record, label) that returns (group, record), or None for a record without an answer."""


@dataclass(frozen=True)
class TextSet:
    """A published set of texts that becomes one site.

    `parts`: per file, its possible names, of which the first that exists is read, and its split. {size} in a name stands for
    --size; a last name "" means that the file may be missing. `fields`: keys and types of a record. `labels`: the labels are in
    NAME-labels.lst beside NAME.jsonl. `unanswered`: what the records that are left out lack, for a note.
    """

    site: str
    layout: str
    parts: tuple[tuple[tuple[str, ...], str | None], ...]
    fields: Mapping[str, type]
    convert: Convert
    labels: bool = False
    unanswered: str = ""
    notes: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()

    def read(self, source: Path, options: Options) -> ImportResult:
        """Read all files of the set below the source. Raises DataError."""
        lines: list[TextRecord] = []
        total = 0
        for names, split in self.parts:
            size = options.size or next(iter(self.sizes), "")
            named = [name.format(size=size) for name in names if name]
            if not names[-1] and not any(path.name.lower() in map(str.lower, named) for path in find_files(source, [""])):
                continue
            path = find_file(source, named, self.layout)
            raws = _read_records(path, self.fields)
            labels = [""] * len(raws)
            if self.labels:
                beside = path.with_name(f"{path.stem}-labels.lst")
                if not beside.is_file():
                    raise DataError(f"{path}: expected {beside.name} beside it; found none; complete the set")
                labels = read_text(beside, GIVE).split()
                if len(labels) != len(raws):
                    raise DataError(
                        f"{beside}: expected {len(raws)} labels, as many as {path.name} has records; found {len(labels)}; "
                        f"{GIVE}"
                    )
            total += len(raws)
            for number, (raw, label) in enumerate(zip(raws, labels, strict=True), start=1):
                if found := self.convert(f"{path}: record {number}", raw, label):
                    group, record = found
                    lines.append(TextRecord(self.site, group or f"{path.name}:{number - 1}", record, split))
        left = total - len(lines)
        more = [f"{left} records without {self.unanswered} are left out"] if left else []
        return ImportResult(merge_groups_by_prompt(lines), None, [*self.notes, *more])


def find_file(source: Path, names: Sequence[str], layout: str) -> Path:
    """Return the file with the first of `names` that exists, in any case, at any depth. Raises DataError for none or two."""
    for name in names:
        found = [path for path in find_files(source, [name.lower()]) if path.name.lower() == name.lower()]
        least = min((len(path.parts) for path in found), default=0)
        highest = [path for path in found if len(path.parts) == least]
        if len(highest) > 1:
            raise DataError(f"{source}: expected one {name}; found {highest[0]} and {highest[1]}; give the folder of one")
        if highest:
            return highest[0]
    raise wrong_layout(source, layout)


def _read_records(path: Path, fields: Mapping[str, type]) -> list[Record]:
    """Return the records of a JSON list or of JSON lines. Raises DataError with the file and the record or line."""
    if path.suffix.lower() == ".json" and not _is_json_lines(path, fields):
        raw = parse_json(str(path), read_text(path, GIVE), GIVE)
        if not isinstance(raw, list):
            raise DataError(f"{path}: expected a list of records; found a {type(raw).__name__}; {GIVE}")
        found = [(f"{path}[{index}]", record) for index, record in enumerate(raw)]
    else:
        found = []
        for number, line in enumerate(text_lines(path, GIVE), start=1):
            if line.strip():
                check_line(where := f"{path}:{number}", line)
                found.append((where, parse_json(where, line, GIVE)))
    for where, one in found:
        if not (isinstance(one, dict) and all(isinstance(one.get(key), kind) for key, kind in fields.items())):
            expected = ", ".join(f"{key} ({kind.__name__})" for key, kind in fields.items())
            there = (
                ", ".join(f"{k} ({type(v).__name__})" for k, v in one.items()) if isinstance(one, dict) else type(one).__name__
            )
            raise DataError(f"{where}: expected {expected}; found {there[:200] or 'nothing'}; {GIVE}")
    return [one for _, one in found]


def _is_json_lines(path: Path, fields: Iterable[str]) -> bool:
    """Tell whether a .json file has one record per line, like MedMCQA's.

    Its first line is then an object, and either further lines follow, or it has all `fields` of a record.
    """
    first, *more = islice((line.strip() for line in text_lines(path, GIVE) if line.strip()), 2) or [""]
    if not (first.startswith("{") and (first.endswith("}") or len(first) > MOST_CHARACTERS)):
        return False
    if more:
        return True
    found = parse_json(f"{path}:1", first, GIVE)
    return isinstance(found, dict) and set(fields) <= found.keys()


def merge_groups_by_prompt(lines: Iterable[TextRecord]) -> list[TextRecord]:
    """Return the records with groups merged that share a prompt at a site, so that a prompt is never in two splits."""
    lines = list(lines)
    keys = [[(x.site, x.group), (x.site, x.record.get("instruction", ""), x.record.get("input", ""))] for x in lines]
    first, least = first_linked(keys), dict[int, str]()
    for line, root in zip(lines, first, strict=True):
        least[root] = min(line.group, least.get(root, line.group))
    return [replace(line, group=least[root]) for line, root in zip(lines, first, strict=True)]


def _make_record(instruction: str, output: str, text: str = "") -> Record:
    return {"instruction": instruction, "input": text, "output": output}


def _choice_record(where: str, task: str, text: str, options: Sequence[Any], label: str, first: int | None) -> Record:
    """Return a multiple-choice record whose answer is a letter. Raises DataError.

    `label`: the number of the right option, counted from `first`; if `first` is None, its letter.
    """
    if odd := [option for option in options if not isinstance(option, str)]:
        raise DataError(f"{where}: {text[:60]!r}: expected options that are texts; found {repr(odd[0])[:60]}; {GIVE}")
    letters = [chr(ord("A") + index) for index in range(len(options))]
    known = letters if first is None else [str(first + index) for index in range(len(options))]
    if label not in known:
        raise DataError(
            f"{where}: {text[:60]!r}: expected a label from {known[0]} to {known[-1]}; found {label[:20]!r}; {GIVE}"
        )
    asked = f"{task} Answer with {', '.join(letters[:-1])} or {letters[-1]}."
    shown = "\n".join(f"{letter}. {option}" for letter, option in zip(letters, options, strict=True))
    return _make_record(asked, letters[known.index(label)], f"{text}\n{shown}") | {"labels": letters}


def choice_converter(
    task: str,
    text: str,
    options: Sequence[str],
    first: int | None,
    label: str = "",
    group: Callable[[Record], str] = lambda raw: "",
    kept: str = "",
) -> Convert:
    """Return the conversion of multiple-choice records.

    `text`: a template of the raw record's keys. `options`: the keys of the options; a single key holds a list, or a map by
    letter. `label`: the key of the answer, "" if labels are in a file of their own. `first`: the number of the first option,
    None if the answer is a letter. `group`: returns a raw record's group. `kept`: a key that the record keeps.
    """

    def convert(where: str, raw: Record, given: str) -> tuple[str, Record]:
        found = raw[options[0]] if len(options) == 1 else [raw.get(key) for key in options]
        if isinstance(found, dict) and list(found) not in (list("ABCD"), list("ABCDE")):
            raise DataError(f"{where}: expected options A to D or E; found {', '.join(found)[:80]}; {GIVE}")
        every = list(found.values()) if isinstance(found, dict) else found
        record = _choice_record(where, task, text.format_map(raw), every, str(raw[label]) if label else given, first)
        return group(raw), record | ({kept: str(raw.get(kept) or "")} if kept else {})

    return convert


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


def _boolq(where: str, raw: Record, label: str) -> tuple[str, Record]:
    """Convert a record of BoolQ. Questions about one page are one group."""
    task = "Read the passage and answer the question about it with True or False."
    record = _make_record(task, str(raw["answer"]), f"{raw['passage']}\n\nQuestion: {raw['question']}?")
    return str(raw.get("title") or raw["passage"]), record | {"labels": ["True", "False"]}


# medical multiple choice -----------------------------------------------------------------------------------------------

MEDICAL = "Which answer is right?"
MMLU_SUBJECTS = (
    "anatomy", "clinical_knowledge", "college_biology", "college_medicine", "medical_genetics", "professional_medicine",
)  # fmt: skip
"""MMLU's medical subjects in MultiMedQA (Singhal et al., "Large language models encode clinical knowledge", 2023)."""
MMLU_SPLITS = {"dev": "training", "val": "validation", "test": "test"}
FEW = "the publisher's five development questions of each subject are the training split"
_ASKED = partial(choice_converter, MEDICAL, "{question}")
PUBMEDQA = ("yes", "no", "maybe")
TRUTH = "test_ground_truth.json"
"""PubMedQA's file with the answers of its test split, by PubMed number."""


def read_pubmedqa(source: Path, options: Options) -> ImportResult:
    """Read the labelled part of PubMedQA (Jin et al. 2019). Raises DataError.

    The records that test_ground_truth.json names are the test split. Without this file, a test split is cut as for other sets.
    """
    path, tests = find_file(source, ["ori_pqal.json"], PUBMEDQA_LAYOUT), dict[str, Any]()
    raws = _read_map(path)
    if find_files(source, [TRUTH]):
        tests = _read_map(truth := find_file(source, [TRUTH], PUBMEDQA_LAYOUT))
        for number, answer in tests.items():
            own = raws.get(number)
            if not (isinstance(own, dict) and own.get("final_decision") == answer):
                raise DataError(
                    f"{truth}: expected the final_decision of {number} in {path.name}; found {repr(answer)[:40]}; "
                    "give both files of one release"
                )
    lines = list[TextRecord]()
    for number, raw in raws.items():
        where = f"{path}: {number}"
        fits = isinstance(raw, dict) and isinstance(raw.get("QUESTION"), str) and isinstance(raw.get("CONTEXTS"), list)
        if not (fits and all(isinstance(one, str) for one in raw["CONTEXTS"]) and raw.get("final_decision") in PUBMEDQA):
            raise DataError(
                f"{where}: expected QUESTION, CONTEXTS and a final_decision of yes, no or maybe; found {repr(raw)[:120]}; "
                f"{GIVE}"
            )
        asked = "Read the abstract and answer the question about it with yes, no or maybe."
        text = "\n".join([*raw["CONTEXTS"], "", f"Question: {raw['QUESTION']}"])
        record = _make_record(asked, raw["final_decision"], text) | {"labels": list(PUBMEDQA)}
        lines.append(TextRecord("pubmedqa", number, record, "test" if number in tests else None))
    notes = [] if tests else ["there is no test_ground_truth.json: the test split is not the publisher's"]
    return ImportResult(merge_groups_by_prompt(lines), None, notes)


def _read_map(path: Path) -> Record:
    found = parse_json(str(path), read_text(path, GIVE), GIVE)
    if not isinstance(found, dict):
        raise DataError(f"{path}: expected a map by PubMed number; found a {type(found).__name__}; {GIVE}")
    return found


def read_mmlu(source: Path, options: Options) -> ImportResult:
    """Read MMLU's medical subjects (Hendrycks et al. 2021): rows of question, A, B, C, D and the letter of the answer.

    Records keep `subject`. Raises DataError.
    """
    lines = list[TextRecord]()
    for subject in MMLU_SUBJECTS:
        for part, split in MMLU_SPLITS.items():
            path = find_file(source, [name := f"{subject}_{part}.csv"], f"{name}, of {MMLU_LAYOUT}")
            for number, row in numbered_csv_rows(path):
                where = f"{path}:{number}"
                if len(row) != 6:
                    raise DataError(f"{where}: expected question, A, B, C, D and the letter; found {len(row)} cells; {GIVE}")
                record = _choice_record(where, MEDICAL, row[0], row[1:5], row[5].strip(), None) | {"subject": subject}
                lines.append(TextRecord("mmlu-medical", f"{path.name}:{number}", record, split))
    return ImportResult(merge_groups_by_prompt(lines), None, [FEW])


def read_medquad(source: Path, options: Options) -> ImportResult:
    """Read MedQuAD (Ben Abacha and Demner-Fushman 2019): a site per source. All questions about one page are one group.

    Records without an answer are left out; three sources withhold answers for copyright. Records keep `type` and `focus`.
    Raises DataError.
    """
    lines: list[TextRecord] = []
    empty: Counter[str] = Counter()
    for path in find_files(source, [".xml"]):
        if not (found := re.fullmatch(r"\d+_(.+?)_QA(_XML)?", path.parent.name, re.IGNORECASE)):
            continue
        root = read_xml(path, "XML of QAPairs", keeps_text=True)
        site, focus = slug(found[1]), _element_text(root.find("Focus"))
        for pair in root.iter("QAPair"):
            question, answer = pair.find("Question"), _element_text(pair.find("Answer"))
            if question is None or not (asked := _element_text(question)):
                continue
            if not answer:
                empty[site] += 1
                continue
            record = _make_record(asked, answer) | {"type": question.attrib.get("qtype", ""), "focus": focus}
            lines.append(TextRecord(site, f"{path.parent.name}/{path.name}", record))
    parts = ", ".join(f"{count} of {site}" for site, count in sorted(empty.items()) if count)
    return ImportResult(merge_groups_by_prompt(lines), None, [f"empty answers are left out: {parts}"] if parts else [])


def _element_text(element: ElementTree.Element | None) -> str:
    """Return the text of an element, "" for None. Runs of blanks become one blank."""
    return "" if element is None else " ".join("".join(element.itertext()).split())


def read_e2e(source: Path, options: Options) -> ImportResult:
    """Read the three splits of E2E NLG (Novikova et al. 2017). In the test split, all references of an input are one record.

    Records have `name`, the first attribute of the input. Raises DataError.
    """
    lines: list[TextRecord] = []
    for name, split in (("trainset.csv", None), ("devset.csv", "validation"), ("testset_w_refs.csv", "test")):
        path = find_file(source, [name], E2E_LAYOUT)
        if not {"mr", "ref"} <= set(heads := next((row for _, row in numbered_csv_rows(path)), [])):
            raise DataError(f"{path}: expected the columns mr and ref; found {', '.join(heads)[:200] or 'none'}")
        rows = [(row["mr"], row["ref"]) for row in csv_rows_if_complete(path) if row["mr"] and row["ref"]]
        merged: list[tuple[str, Record]] = [(mr, {"outputs": refs}) for mr, refs in group_by_key(rows).items()]
        answers = merged if split == "test" else [(mr, {"output": ref}) for mr, ref in rows]
        for mr, answer in answers:
            first = re.match(r"[^\[\]]*\[([^\]]*)\]", mr)
            record = {
                "instruction": "Describe this restaurant in a sentence or two.",
                "input": mr,
                "name": first[1] if first else "",
            }
            lines.append(TextRecord("e2e", mr, record | answer, split))
    return ImportResult(merge_groups_by_prompt(lines), None)


E2E_LAYOUT = "trainset.csv, devset.csv and testset_w_refs.csv with the columns mr and ref"
PUBMEDQA_LAYOUT = "ori_pqal.json, a map of records with QUESTION, CONTEXTS and final_decision, and test_ground_truth.json"
MMLU_LAYOUT = "dev, val and test with SUBJECT_dev.csv, SUBJECT_val.csv and SUBJECT_test.csv, as anatomy_test.csv"
_DEVELOPMENT_TESTS = partial(TextSet, notes=(DEVELOPMENT,))
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
        choice_converter("Which solution reaches the goal?", "{goal}", ("sol1", "sol2"), 0, group=itemgetter("goal")),
        labels=True,
    ),
    _DEVELOPMENT_TESTS(  # Zellers et al. (2019)
        "hellaswag", "hellaswag_train.jsonl and hellaswag_val.jsonl with ctx, endings and label",
        ((("hellaswag_train.jsonl",), None), (("hellaswag_val.jsonl",), "test")),
        {"ctx": str, "endings": list, "label": int, "activity_label": str},
        choice_converter(
            "How does the text go on?", "{activity_label}: {ctx}", ("endings",), 0, "label",
            lambda raw: str(raw.get("source_id") or ""), "activity_label",  # a video or an article
        ),
    ),
    _DEVELOPMENT_TESTS(  # Sakaguchi et al. (2020)
        "winogrande", "train_xl.jsonl (or another --size) with train_xl-labels.lst, and dev.jsonl with dev-labels.lst",
        ((("train_{size}.jsonl",), None), (("dev.jsonl",), "test")),
        {"qID": str, "sentence": str, "option1": str, "option2": str},
        choice_converter(
            "Which option belongs in the gap, marked _?", "{sentence}", ("option1", "option2"), 1,
            group=lambda raw: re.sub(r"-[12]$", "", raw["qID"]),  # the two sentences of a pair
        ),
        labels=True, sizes=SIZES,
    ),
    _DEVELOPMENT_TESTS(  # Pal et al. (2022)
        "medmcqa", "train.json and dev.json, a record a line with question, opa to opd and cop (1 to 4)",
        ((("train.json",), None), (("dev.json",), "test")),
        {"question": str, "opa": str, "opb": str, "opc": str, "opd": str, "cop": int},
        _ASKED(("opa", "opb", "opc", "opd"), 1, "cop", kept="subject_name"),
    ),
    TextSet(  # Jin et al. (2021), four options
        "medqa", "phrases_no_exclude_train.jsonl, _dev.jsonl and _test.jsonl of US/4_options",
        (
            (("phrases_no_exclude_train.jsonl",), None),
            (("phrases_no_exclude_dev.jsonl", ""), "validation"),
            (("phrases_no_exclude_test.jsonl",), "test"),
        ),
        {"question": str, "options": dict, "answer_idx": str}, _ASKED(("options",), None, "answer_idx"),
    ),
    TextSet(  # Jin et al. (2021), five options
        "medqa-5", "train.jsonl, dev.jsonl and test.jsonl of US with question, options and answer_idx",
        ((("train.jsonl",), None), (("dev.jsonl", ""), "validation"), (("test.jsonl",), "test")),
        {"question": str, "options": dict, "answer_idx": str}, _ASKED(("options",), None, "answer_idx"),
    ),
    TextSet(  # Arias-Duart et al. (2025)
        "careqa", "CareQA_en.json (or --size es), a list of records with question, op1 to op4 and cop (1 to 4)",
        ((("CareQA_{size}.json",), None),),
        {"question": str, "op1": str, "op2": str, "op3": str, "op4": str, "cop": int},
        _ASKED(("op1", "op2", "op3", "op4"), 1, "cop", kept="category"), sizes=("en", "es"),
        notes=("the publisher has a test set alone: write --test 0.98 --validation 0.01 to score nearly all of it",),
    ),
)  # fmt: skip
SETS = {one.site: Importer(one.layout, one.read, sizes=one.sizes) for one in TEXT_SETS} | {
    "medquad": Importer("folders such as 1_CancerGov_QA or 9_CDC_QA with *.xml of QAPairs", read_medquad),
    "e2e": Importer(E2E_LAYOUT, read_e2e),
    "pubmedqa": Importer(PUBMEDQA_LAYOUT, read_pubmedqa),
    "mmlu-medical": Importer(MMLU_LAYOUT, read_mmlu),
}
