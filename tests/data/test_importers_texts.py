"""Importers of texts on tiny sets as their publishers ship them, with what such folders really hold besides."""

import csv
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from consilium.core.errors import ConfigError, DataError
from consilium.data.check import check_texts
from consilium.data.datalist import SPLITS
from consilium.data.importers.base import Options
from consilium.data.text import Text, read_texts
from tests.conftest import refused
from tests.data.importing import import_set
from tests.data.writing import write


def texts(name: str, source: Path, dest: Path, **options: Any) -> dict[str, tuple[Text, ...]]:
    """Import a set without sites, check its records, and return them by split."""
    summary = import_set(name, source, dest, Options(**options))
    assert check_texts(dest / name).problems == {}
    found = read_texts(dest / name).splits
    assert summary["sites"][name] == {split: len(found[split]) for split in SPLITS}
    return found


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def litter(folder: Path) -> None:
    """Leave what macOS and publishers leave."""
    (folder / "__MACOSX").mkdir(parents=True)
    for name in ("._train.jsonl", "__MACOSX/train.jsonl", "README.md", "train_socratic.jsonl"):
        (folder / name).write_text("no record")


def test_gsm8k_has_its_final_answer_and_no_calculator(tmp_path: Path) -> None:
    data = tmp_path / "grade-school-math/grade_school_math/data"
    litter(data)
    solved = "Half of 2,400 is 2400/2=<<2400/2=1200>>1200.\n#### 1,200"
    write(data, "train.jsonl", *({"question": f"Q{i}?", "answer": solved} for i in range(20)))
    write(data, "test.jsonl", *({"question": f"T{i}?", "answer": "So -3.\n#### -3"} for i in range(4)))
    found = texts("gsm8k", tmp_path, tmp_path / "out")
    assert [len(found[split]) for split in SPLITS] == [18, 2, 4]
    assert found["training"][0].outputs == ("Half of 2,400 is 2400/2=1200.\n#### 1,200",)
    assert {t.final_answer for t in found["training"]} == {"1200"}
    assert {t.instruction for t in found["test"]} == {"T0?", "T1?", "T2?", "T3?"}
    assert {t.final_answer for t in found["test"]} == {"-3"}


def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", {"question": "a", "answer": "b #### 1"}, {"question": "a", "solution": "b"})
    asked = import_set, "gsm8k", tmp_path, tmp_path / "out"
    refused(r"train\.jsonl:2: expected question \(str\), answer \(str\); found question \(str\), solu", *asked)
    write(tmp_path, "train.jsonl", {"question": "a", "answer": "b"})
    refused(r"train\.jsonl:1: expected an answer with its result behind ####; found 'b'", *asked)
    write(tmp_path, "train.jsonl", "{")
    refused(r"train\.jsonl:1: not valid JSON", *asked)
    write(tmp_path, "train.jsonl", {"question": "a \ud800", "answer": "b #### 1"})
    write(tmp_path, "test.jsonl", {"question": "c", "answer": "b #### 1"})
    refused(r"half a character", *asked)
    (tmp_path / "train.jsonl").unlink()
    refused(r"expected train\.jsonl and test\.jsonl with question and answer.*; found test\.jsonl$", *asked)
    for copy in ("a", "b"):
        write(tmp_path / copy, "train.jsonl", {"question": "a", "answer": "b #### 1"})
    refused(r"expected one train\.jsonl; found .*a/train\.jsonl and .*b/train\.jsonl", *asked)
    assert not (tmp_path / "out").exists()


def test_metamath_keeps_what_one_question_became_together(tmp_path: Path) -> None:
    raws = [
        {
            "query": f"{kind} {i}",
            "response": f"Because.\n#### {i}\nThe answer is: {i}"
            if kind == "GSM_Rephrased"
            else f"So.\nThe answer is: $x={i}$",
            "type": kind,
            "original_question": f"original {i}",
        }
        for i in range(20)
        for kind in ("GSM_Rephrased", "MATH_SV", "GSM_FOBAR")
    ]
    raws.append({"query": "q", "response": "no end", "type": "MATH_SV", "original_question": "o"})
    (tmp_path / "MetaMathQA-395K.json").write_text(json.dumps(raws))
    found = texts("metamathqa", tmp_path, tmp_path / "out")
    assert [len(found[split]) for split in SPLITS] == [42, 6, 12]
    where = {text.instruction: split for split in SPLITS for text in found[split]}
    for i in range(20):
        assert len({where[f"{kind} {i}"] for kind in ("GSM_Rephrased", "MATH_SV", "GSM_FOBAR")}) == 1
    by_prompt = {text.instruction: text for split in SPLITS for text in found[split]}
    assert by_prompt["GSM_Rephrased 7"].outputs == ("Because.\n#### 7",)
    assert by_prompt["GSM_Rephrased 7"].final_answer == "7"
    assert by_prompt["MATH_SV 7"].outputs == ("So.\n#### $x=7$",)
    assert {one["type"] for one in records(tmp_path / "out/metamathqa/training.jsonl")} == {
        "GSM_Rephrased",
        "MATH_SV",
        "GSM_FOBAR",
    }
    notes = json.loads((tmp_path / "out/import.json").read_text())["imports"][0]["notes"]
    assert notes == ["1 records without 'The answer is:' are left out"]


def page(path: Path, pairs: list[tuple[str, str, str]]) -> None:
    """Write a page of MedQuAD: questions with their kind and answer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = "".join(
        f'<QAPair pid="{i}"><Question qid="{i}" qtype="{kind}">{question}</Question><Answer>{answer}</Answer></QAPair>'
        for i, (question, kind, answer) in enumerate(pairs)
    )
    path.write_text(
        f'<?xml version="1.0"?>\n<Document id="1" source="X"><Focus>Flu</Focus><QAPairs>{parts}</QAPairs></Document>'
    )


def test_medquads_sources_are_sites_and_empty_answers_are_left_out(tmp_path: Path) -> None:
    source = tmp_path / "MedQuAD-master"
    for i in range(10):
        pairs = [
            (f"What is {i} ?", "information", f"A &amp; B,\n     of {i}."),
            (f"Who has {i} ?", "susceptibility", f"All {i}."),
        ]
        page(source / f"1_CancerGov_QA/{i:07}_1.xml", pairs)
        page(source / f"8_NHLBI_QA_XML/{i:07}.xml", [*pairs, (f"Why {i} ?", "causes", " \n ")])
        page(source / f"11_MPlusDrugs_QA/{i:07}.xml", [(f"What is {i} ?", "usage", "")])
    page(source / "1_CancerGov_QA/0000099.xml", [("What is 3 ?", "information", "Said again.")])
    (source / "1_CancerGov_QA/._0000099.xml").write_text("<")
    (source / "QA-TestSet").mkdir()
    (source / "QA-TestSet/other.xml").write_text("<NLM-QA/>")
    found = import_set("medquad", source, tmp_path / "out")
    assert sorted(found["sites"]) == ["cancergov", "nhlbi"]
    assert sum(found["sites"]["cancergov"].values()) == 21
    assert found["notes"] == ["empty answers are left out: 10 of mplusdrugs, 10 of nhlbi"]
    for site in found["sites"]:
        assert check_texts(tmp_path / "out" / site).problems == {}  # no question in two splits, though two pages ask it
    told = [one for split in SPLITS for one in records(tmp_path / f"out/nhlbi/{split}.jsonl")]
    assert {"instruction": "What is 4 ?", "input": "", "output": "A & B, of 4.", "type": "information", "focus": "Flu"} in told
    pages = {
        split: {one["instruction"].split()[2] for one in records(tmp_path / f"out/nhlbi/{split}.jsonl")} for split in SPLITS
    }
    assert not pages["training"] & pages["test"]
    assert not pages["training"] & pages["validation"]
    (source / "1_CancerGov_QA/0000001_1.xml").write_text("<Document>")
    asked = import_set, "medquad", source, tmp_path / "bad"
    refused(r"0000001_1\.xml: expected XML of QAPairs; found otherwise", *asked)
    (source / "1_CancerGov_QA/0000001_1.xml").write_text('<!DOCTYPE D [<!ENTITY a "b">]><D>&a;</D>')
    refused(r"0000001_1\.xml: .*declares a document type.*; give the publisher's file", *asked)
    (source / "1_CancerGov_QA/0000001_1.xml").write_text("<D>" * 65 + "</D>" * 65)
    refused(r"0000001_1\.xml: .*nested over 64 deep.*; give the publisher's file", *asked)
    (source / "1_CancerGov_QA/0000001_1.xml").write_text("<D>" + " " * 2**22 + "</D>")
    refused(r"0000001_1\.xml: .*; give the publisher's file", *asked)
    with pytest.raises(DataError, match=r"expected folders such as 1_CancerGov_QA .*; found other\.xml"):
        import_set("medquad", source / "QA-TestSet", tmp_path / "bad")


def test_alpaca_leaves_empty_outputs_out(tmp_path: Path) -> None:
    raws = [{"instruction": f"Do {i}.", "input": "x" if i % 2 else "", "output": f"Done {i}."} for i in range(20)]
    (tmp_path / "alpaca_data.json").write_text(json.dumps([*raws, {"instruction": "Draw.", "input": "", "output": ""}]))
    found = texts("alpaca", tmp_path, tmp_path / "out", validation=0.2)
    assert [len(found[split]) for split in SPLITS] == [12, 4, 4]
    assert {(t.instruction, t.input, t.outputs) for split in SPLITS for t in found[split]} == {
        (r["instruction"], r["input"], (r["output"],)) for r in raws
    }
    assert import_set("alpaca", tmp_path, tmp_path / "b")["notes"] == ["1 records without an output are left out"]
    (tmp_path / "alpaca_data.json").write_text(json.dumps({"data": raws}))
    with pytest.raises(DataError, match=r"alpaca_data\.json: record 1: expected instruction \(str\), .*; found list"):
        import_set("alpaca", tmp_path, tmp_path / "bad")


def sheet(path: Path, rows: list[tuple[str, str]], heads: tuple[str, str] = ("mr", "ref")) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([heads, *rows])


def test_e2e_references_of_one_input_become_outputs_of_the_test_split(tmp_path: Path) -> None:
    mill, eagle = "name[The Mill], food[English]", "name[The Eagle], priceRange[less than £20]"
    sheet(tmp_path / "trainset.csv", [(mill, "Food, at\nThe Mill."), (mill, "The Mill."), (eagle, "The Eagle.")])
    sheet(tmp_path / "devset.csv", [("name[Zizzi]", "Zizzi."), ("name[Zizzi]", "It is Zizzi.")])
    sheet(tmp_path / "testset_w_refs.csv", [("name[Cotto]", "One."), ("name[Wok], near[x]", "Wok."), ("name[Cotto]", "Two.")])
    sheet(tmp_path / "testset.csv", [("name[Cotto]", "")])
    found = texts("e2e", tmp_path, tmp_path / "out")
    assert [(t.input, t.outputs) for t in found["training"]] == [
        (mill, ("Food, at\nThe Mill.",)),
        (mill, ("The Mill.",)),
        (eagle, ("The Eagle.",)),
    ]
    assert [t.outputs for t in found["validation"]] == [("Zizzi.",), ("It is Zizzi.",)]
    assert [(t.input, t.outputs) for t in found["test"]] == [
        ("name[Cotto]", ("One.", "Two.")),
        ("name[Wok], near[x]", ("Wok.",)),
    ]
    assert [one["name"] for one in records(tmp_path / "out/e2e/training.jsonl")] == ["The Mill", "The Mill", "The Eagle"]
    sheet(tmp_path / "devset.csv", [("a", "b")], ("MR", "text"))
    with pytest.raises(DataError, match=r"devset\.csv:2: expected mr \(str\), ref \(str\); found MR \(str\), text"):
        import_set("e2e", tmp_path, tmp_path / "bad")
    (tmp_path / "devset.csv").write_text("mr,ref\n" + "a" * 1_100_000 + ",b\n")
    refused(r"devset\.csv:2: a record has at most 1,048,576 characters", import_set, "e2e", tmp_path, tmp_path / "bad")
    (tmp_path / "devset.csv").write_text('mr,ref\n"' + ("a" * 1_000_000 + "\n") * 2 + '",b\n')
    refused(r"devset\.csv:\d+: expected rows of CSV; found otherwise", import_set, "e2e", tmp_path, tmp_path / "bad")


def test_boolq_is_true_or_false_about_a_passage(tmp_path: Path) -> None:
    raws = [
        {"question": f"is it {i}", "title": f"page {i // 2}", "answer": i % 3 == 0, "passage": f"It is {i}."} for i in range(20)
    ]
    write(tmp_path, "train.jsonl", *raws)
    write(tmp_path, "dev.jsonl", {"question": "does it rain", "title": "Rain", "answer": False, "passage": "No."})
    found = texts("boolq", tmp_path, tmp_path / "out")
    assert [len(found[split]) for split in SPLITS] == [18, 2, 1]
    (tested,) = found["test"]
    assert (tested.input, tested.outputs, tested.labels) == ("No.\n\nQuestion: does it rain?", ("False",), ("True", "False"))
    pair = sorted(text.input for text in found["validation"])
    assert int(pair[0].split()[2].rstrip(".")) // 2 == int(pair[1].split()[2].rstrip(".")) // 2


def choices(record: dict[str, Any], numbers: Iterable[int], group: str = "", **label: Any) -> list[dict[str, Any]]:
    """Return a record for each number, which is in its words; two by two they have one `group`, where that key is named."""
    found = []
    for number in numbers:
        own = {key: f"{value} {number}" if isinstance(value, str) else value for key, value in record.items()}
        found.append(own | ({group: record[group].format(number // 2, number % 2 + 1)} if group else {}) | label)
    return found


MULTIPLE = {"question": "Which vitamin?", "opa": "A1", "opb": "B1", "opc": "C1", "opd": "D1", "subject_name": "Dental"}
LETTERS = {letter: f"drug {letter}" for letter in "ABCDE"}
CHOICES: dict[str, tuple[tuple[str, str], dict[str, Any], str, dict[str, Any], str, str]] = {
    "piqa": (("train.jsonl", "dev.jsonl"), {"goal": "Boil {}", "sol1": "Freeze", "sol2": "Heat"}, "goal", {}, "1", "B"),
    "hellaswag": (
        ("hellaswag_train.jsonl", "hellaswag_val.jsonl"),
        {"activity_label": "Rowing", "ctx": "They", "endings": ["w", "x", "y", "z"], "source_id": "v_{}"},
        "source_id", {"label": 2}, "", "C",
    ),
    "winogrande": (
        ("train_xl.jsonl", "dev.jsonl"),
        {"qID": "3QX{}-{}", "sentence": "So _ fell", "option1": "Cy", "option2": "Di"}, "qID", {}, "2", "B",
    ),
    "medmcqa": (("train.json", "dev.json"), MULTIPLE, "", {"cop": 2}, "", "B"),
    "medqa": (
        ("phrases_no_exclude_train.jsonl", "phrases_no_exclude_test.jsonl"),
        {"question": "Which drug?", "options": {letter: LETTERS[letter] for letter in "ABCD"}}, "", {"answer_idx": "D"},
        "", "D",
    ),
    "medqa-5": (("train.jsonl", "test.jsonl"), {"question": "Which?", "options": LETTERS}, "", {"answer_idx": "E"}, "", "E"),
    "careqa": (
        ("CareQA_en.json", ""), {"question": "Q", "op1": "a", "op2": "b", "op3": "c", "op4": "d", "category": "Nursing"},
        "", {"cop": 4}, "", "D",
    ),
}  # fmt: skip
"""Names of the files for training and test, a record, the key of its group, its label there or in a file, and the letter."""
KEPT = {"hellaswag": "activity_label", "medmcqa": "subject_name", "careqa": "category"}


def publish(folder: Path, name: str, count: int = 20, **label: Any) -> None:
    """Write a set as its publisher does."""
    names, record, group, own, label_file, _ = CHOICES[name]
    for file, numbers in zip(names, (range(count), range(count, count + 2)), strict=True):
        if file:
            records = choices(record, numbers, group, **own | label)
            write(folder, file, *([json.dumps(records)] if name == "careqa" else records))
            if label_file:
                (folder / f"{Path(file).stem}-labels.lst").write_text(f"{label_file}\n" * len(numbers))


@pytest.mark.parametrize("name", CHOICES)
def test_options_become_letters_and_groups_stay_together(name: str, tmp_path: Path) -> None:
    names, record, group, _, _, letter = CHOICES[name]
    publish(tmp_path / "set", name)
    found = texts(name, tmp_path / "set", tmp_path / "out")
    assert [len(found[split]) for split in SPLITS] == ([18, 2, 2] if names[1] else [14, 2, 4])
    (tested, *_) = found["test"]
    every = [v for v in record.values() if isinstance(v, list | dict)]
    options = list(every[0].values()) if every and isinstance(every[0], dict) else every[0] if every else None
    shown = [line.partition(". ") for line in tested.input.splitlines()[1:]]
    assert [one[0] for one in shown] == list(tested.labels) == list("ABCDE"[: len(shown)])
    assert tested.outputs == (letter,)
    assert tested.instruction.endswith(f"{', '.join(tested.labels[:-1])} or {tested.labels[-1]}.")
    assert options is None or [one[2] for one in shown] == options
    if group:
        (pair,) = {tuple(sorted(text.input.splitlines()[0] for text in found["validation"]))}
        numbers = [int(re.findall(r"\d+", line)[-1]) for line in pair]
        assert numbers[0] // 2 == numbers[1] // 2
    if name in KEPT:
        assert all(KEPT[name] in one for one in records(tmp_path / f"out/{name}/test.jsonl"))


@pytest.mark.parametrize(
    ("name", "label", "message"),
    [
        ("hellaswag", {"label": 4}, r"hellaswag_train\.jsonl:1: '.*': expected a label from 0 to 3; found '4'"),
        ("medmcqa", {"cop": 0}, r"train\.json:1: .*: expected a label from 1 to 4; found '0'"),
        ("medqa", {"answer_idx": "F"}, "expected a label from A to D; found 'F'"),
        ("hellaswag", {"endings": ["x"] * 27, "label": 0}, "expected 2 to 26 options; found 27"),
        ("medqa", {"options": {}}, "train.jsonl:1: expected options A to D or E"),
        ("medqa", {"options": {"A": None, "B": "b", "C": "c", "D": "d"}}, "expected options that are texts; found None"),
        ("medmcqa", {"exp": "x" * 1_100_000}, r"train\.json:1: a record has at most 1,048,576 characters"),
        ("medmcqa", {"cop": "2"}, r"train\.json:1: expected question"),
    ],
)
def test_a_bad_choice_is_named(name: str, label: dict[str, Any], message: str, tmp_path: Path) -> None:
    publish(tmp_path / "set", name, 2, **label)
    refused(message, import_set, name, tmp_path / "set", tmp_path / "out")


def test_labels_of_their_own_file_must_be_as_many(tmp_path: Path) -> None:
    publish(tmp_path, "piqa")
    (tmp_path / "train-labels.lst").write_text("0\n" * 18)
    asked = import_set, "piqa", tmp_path, tmp_path / "bad"
    refused(r"train-labels\.lst: expected 20 labels, as many as train\.jsonl has records; found 18", *asked)
    (tmp_path / "train-labels.lst").unlink()
    refused(r"train\.jsonl: expected train-labels\.lst beside it; found none; complete the set", *asked)


def test_a_size_names_the_file_of_training(tmp_path: Path) -> None:
    publish(tmp_path, "winogrande")
    write(tmp_path, "train_s.jsonl", *choices(CHOICES["winogrande"][1], range(4), "qID"))
    (tmp_path / "train_s-labels.lst").write_text("1\n" * 4)
    assert sum(len(split) for split in texts("winogrande", tmp_path, tmp_path / "s", size="s").values()) == 6
    with pytest.raises(ConfigError, match=r"--size: 'xxl': expected one of xl, l, m, s, xs, debiased"):
        import_set("winogrande", tmp_path, tmp_path / "bad", Options(size="xxl"))


def test_pubmedqa_is_yes_no_or_maybe_about_an_abstract(tmp_path: Path) -> None:
    raws = {
        str(21645374 + i): {
            "QUESTION": f"Do {i}?", "CONTEXTS": ["One.", f"Two {i}."], "LABELS": ["A", "B"], "MESHES": [], "YEAR": "2011",
            "reasoning_required_pred": "yes", "reasoning_free_pred": "no", "final_decision": ("yes", "no", "maybe")[i % 3],
            "LONG_ANSWER": "Because.",
        }
        for i in range(20)
    }  # fmt: skip
    (tmp_path / "ori_pqal.json").write_text(json.dumps(raws))
    (tmp_path / "test_ground_truth.json").write_text(json.dumps({"21645376": "maybe", "21645377": "yes"}))
    found = texts("pubmedqa", tmp_path, tmp_path / "out")
    assert [len(found[split]) for split in SPLITS] == [16, 2, 2]
    tested = found["test"][0]
    assert (tested.input, tested.outputs) == ("One.\nTwo 2.\n\nQuestion: Do 2?", ("maybe",))
    assert tested.labels == ("yes", "no", "maybe")
    (tmp_path / "test_ground_truth.json").unlink()
    summary = import_set("pubmedqa", tmp_path, tmp_path / "alone")
    assert summary["notes"] == ["there is no test_ground_truth.json: the test split is not the publisher's"]
    for wrong in ({"1": {"QUESTION": "a", "CONTEXTS": [], "final_decision": "perhaps"}}, {"1": "yes"}, ["yes"]):
        (tmp_path / "ori_pqal.json").write_text(json.dumps(wrong))
        with pytest.raises(DataError, match=r"ori_pqal\.json: record 1: expected .*; found .*; give the publisher's file"):
            import_set("pubmedqa", tmp_path, tmp_path / "bad")


def test_mmlu_medical_is_six_subjects_without_headings(tmp_path: Path) -> None:
    subjects = ("anatomy", "clinical_knowledge", "college_biology", "college_medicine", "medical_genetics")
    for subject in (*subjects, "professional_medicine", "virology"):
        for part, count in (("dev", 5), ("val", 1), ("test", 2)):
            rows = (f"{subject} {part} {i},a,b,c,d,C\n" for i in range(count))
            (tmp_path / "data" / part).mkdir(parents=True, exist_ok=True)
            (tmp_path / "data" / part / f"{subject}_{part}.csv").write_text("".join(rows))
    found = texts("mmlu-medical", tmp_path, tmp_path / "out")
    assert [len(found[split]) for split in SPLITS] == [30, 6, 12]
    assert (found["test"][0].input, found["test"][0].outputs) == ("anatomy test 0\nA. a\nB. b\nC. c\nD. d", ("C",))
    (tmp_path / "data/test/anatomy_test.csv").write_text('"Two\nlines, and ""one"" mark",a,"b,c",c,d,A\nq,a,b,c,A\n')
    with pytest.raises(DataError, match=r"anatomy_test\.csv:3: expected the 6 cells question, A, B, C, D, answer; found 5"):
        import_set("mmlu-medical", tmp_path, tmp_path / "bad")
    (tmp_path / "data/test/anatomy_test.csv").write_text('"Two\nlines, and ""one"" mark",a,"b,c",c,d,A\n')
    tested = texts("mmlu-medical", tmp_path, tmp_path / "lines")["test"]
    assert 'Two\nlines, and "one" mark\nA. a\nB. b,c\nC. c\nD. d' in {text.input for text in tested}


@pytest.mark.parametrize("truth", [{"9": "yes"}, {"1": "yes"}, {"9": None}, [["1"]]])
def test_answers_of_another_release_are_refused(truth: Any, tmp_path: Path) -> None:
    raws = {str(n): {"QUESTION": f"q{n}", "CONTEXTS": ["c"], "final_decision": "no"} for n in range(5)}
    (tmp_path / "ori_pqal.json").write_text(json.dumps(raws))
    (tmp_path / "test_ground_truth.json").write_text(json.dumps(truth))
    with pytest.raises(DataError, match=r"test_ground_truth\.json: expected .* record.*; found .*; give "):
        import_set("pubmedqa", tmp_path, tmp_path / "out")
