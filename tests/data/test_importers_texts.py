"""Importers of texts on tiny sets as their publishers ship them, with what such folders really hold besides."""

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from consilium.core.errors import ConfigError, DataError
from consilium.data.check import check_texts
from consilium.data.datalist import SPLITS
from consilium.data.importers.base import Options
from consilium.data.importers.registry import import_set
from consilium.data.text import Text, read_texts
from tests.conftest import run
from tests.data.writing import NO_TEXTS, REAL_TEXTS, write


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
    with pytest.raises(
        DataError, match=r"train\.jsonl:2: expected question \(str\), answer \(str\); found question \(str\), solu"
    ):
        import_set("gsm8k", tmp_path, tmp_path / "out")
    write(tmp_path, "train.jsonl", {"question": "a", "answer": "b"})
    with pytest.raises(DataError, match=r"train\.jsonl: record 1: expected an answer with its result behind ####; found 'b'"):
        import_set("gsm8k", tmp_path, tmp_path / "out")
    write(tmp_path, "train.jsonl", "{")
    with pytest.raises(DataError, match=r"train\.jsonl:1: not valid JSON"):
        import_set("gsm8k", tmp_path, tmp_path / "out")
    write(tmp_path, "train.jsonl", {"question": "a \ud800", "answer": "b #### 1"})
    write(tmp_path, "test.jsonl", {"question": "c", "answer": "b #### 1"})
    with pytest.raises(DataError, match=r"half a character"):
        import_set("gsm8k", tmp_path, tmp_path / "out")
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(
        DataError, match=r"expected train\.jsonl and test\.jsonl with question and answer.*; found test\.jsonl$"
    ):
        import_set("gsm8k", tmp_path, tmp_path / "out")
    for copy in ("a", "b"):
        write(tmp_path / copy, "train.jsonl", {"question": "a", "answer": "b #### 1"})
    with pytest.raises(DataError, match=r"expected one train\.jsonl; found .*a/train\.jsonl and .*b/train\.jsonl"):
        import_set("gsm8k", tmp_path, tmp_path / "out")
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
    with pytest.raises(DataError, match=r"0000001_1\.xml: expected XML of QAPairs; found otherwise"):
        import_set("medquad", source, tmp_path / "bad")
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
    with pytest.raises(DataError, match=r"alpaca_data\.json: expected a list of records; found a dict"):
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
    with pytest.raises(DataError, match=r"devset\.csv: expected the columns mr and ref; found MR, text"):
        import_set("e2e", tmp_path, tmp_path / "bad")
    (tmp_path / "devset.csv").write_text("mr,ref\n" + "a" * 200_000 + ",b\n")
    with pytest.raises(DataError, match=r"devset\.csv:\d+: expected rows of CSV; found otherwise"):
        import_set("e2e", tmp_path, tmp_path / "bad")


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


def test_piqa_letters_are_its_solutions(tmp_path: Path) -> None:
    data = tmp_path / "physicaliqa-train-dev"
    write(data, "train.jsonl", *({"goal": f"Goal {i // 2}", "sol1": f"do {i}", "sol2": f"not {i}"} for i in range(20)))
    (data / "train-labels.lst").write_text("0\n1\n" * 10)
    write(data, "dev.jsonl", {"goal": "Boil", "sol1": "Freeze", "sol2": "Heat"})
    (data / "dev-labels.lst").write_text("1")
    write(data, "tests.jsonl", {"goal": "no labels", "sol1": "a", "sol2": "b"})
    found = texts("piqa", tmp_path, tmp_path / "out")
    assert [len(found[split]) for split in SPLITS] == [18, 2, 1]
    (tested,) = found["test"]
    assert (tested.input, tested.outputs, tested.labels) == ("Boil\nA. Freeze\nB. Heat", ("B",), ("A", "B"))
    assert Counter(text.outputs[0] for text in found["training"]) == {"A": 9, "B": 9}
    assert len({text.input.splitlines()[0] for text in found["validation"]}) == 1
    (data / "train-labels.lst").write_text("0\n1\n" * 9)
    with pytest.raises(
        DataError, match=r"train-labels\.lst: expected 20 labels, as many as train\.jsonl has records; found 18"
    ):
        import_set("piqa", tmp_path, tmp_path / "bad")
    (data / "train-labels.lst").write_text("0\n2\n" * 10)
    with pytest.raises(DataError, match=r"train\.jsonl: record 2: 'Goal 0': expected a label from 0 to 1; found '2'"):
        import_set("piqa", tmp_path, tmp_path / "bad")
    (data / "train-labels.lst").unlink()
    with pytest.raises(DataError, match=r"train\.jsonl: expected train-labels\.lst beside it; found none; complete the set"):
        import_set("piqa", tmp_path, tmp_path / "bad")


def test_hellaswag_letters_are_its_endings(tmp_path: Path) -> None:
    def raw(number: int, label: int) -> dict[str, Any]:
        endings = [f"{letter}{number}." for letter in "wxyz"]
        made = {"ind": number, "activity_label": "Rowing", "ctx": f"They {number}", "endings": endings, "label": label}
        return made | {"source_id": f"activitynet~v_{number // 2}"}

    write(tmp_path, "hellaswag_train.jsonl", *(raw(i, i % 4) for i in range(20)))
    write(tmp_path, "hellaswag_val.jsonl", raw(50, 2))
    write(tmp_path, "hellaswag_test.jsonl", {"ind": 1, "ctx": "hidden"})
    found = texts("hellaswag", tmp_path, tmp_path / "out")
    assert [len(found[split]) for split in SPLITS] == [18, 2, 1]
    (tested,) = found["test"]
    assert tested.input == "Rowing: They 50\nA. w50.\nB. x50.\nC. y50.\nD. z50."
    assert (tested.outputs, tested.labels) == (("C",), ("A", "B", "C", "D"))
    assert tested.instruction.endswith("Answer with A, B, C or D.")
    assert records(tmp_path / "out/hellaswag/test.jsonl")[0]["activity_label"] == "Rowing"
    videos = {int(t.input.splitlines()[0].split()[2]) // 2 for t in found["validation"]}
    assert len(videos) == 1


def test_winogrande_by_size_keeps_twins_together(tmp_path: Path) -> None:
    data = tmp_path / "winogrande_1.1"
    for size, count in (("xl", 40), ("s", 20)):
        twins = (
            {"qID": f"3QX{i // 2}-{i % 2 + 1}", "sentence": f"{i} _ ran", "option1": "Al", "option2": "Bo"}
            for i in range(count)
        )
        write(data, f"train_{size}.jsonl", *twins)
        (data / f"train_{size}-labels.lst").write_text("1\n2\n" * (count // 2))
    write(data, "dev.jsonl", {"qID": "4-1", "sentence": "So _ fell", "option1": "Cy", "option2": "Di", "answer": "2"})
    (data / "dev-labels.lst").write_text("2\n")
    found = texts("winogrande", tmp_path, tmp_path / "s", size="s")
    assert [len(found[split]) for split in SPLITS] == [18, 2, 1]
    (tested,) = found["test"]
    assert (tested.input, tested.outputs) == ("So _ fell\nA. Cy\nB. Di", ("B",))
    assert len({int(t.input.split()[0]) // 2 for t in found["validation"]}) == 1
    assert sum(len(split) for split in texts("winogrande", tmp_path, tmp_path / "xl").values()) == 41
    with pytest.raises(ConfigError, match=r"--size: 'xxl': expected one of xl, l, m, s, xs, debiased"):
        import_set("winogrande", tmp_path, tmp_path / "bad", Options(size="xxl"))


MULTIPLE = {"question": "Which vitamin?", "opa": "A1", "opb": "B1", "opc": "C1", "opd": "D1"}


def test_medmcqa_counts_from_one_in_lines_of_a_json_file(tmp_path: Path) -> None:
    raws = [MULTIPLE | {"question": f"Q{i}", "cop": i % 4 + 1, "exp": None, "subject_name": "Dental"} for i in range(20)]
    write(tmp_path, "train.json", *raws)
    write(tmp_path, "dev.json", MULTIPLE | {"cop": 2, "subject_name": "Anatomy", "choice_type": "single"})
    write(tmp_path, "test.json", MULTIPLE)
    found = texts("medmcqa", tmp_path, tmp_path / "out")
    assert [len(found[split]) for split in SPLITS] == [18, 2, 1]
    (tested,) = found["test"]
    assert (tested.input, tested.outputs) == ("Which vitamin?\nA. A1\nB. B1\nC. C1\nD. D1", ("B",))
    assert Counter(t.outputs[0] for split in SPLITS[:2] for t in found[split]) == dict.fromkeys("ABCD", 5)
    assert records(tmp_path / "out/medmcqa/test.jsonl")[0]["subject_name"] == "Anatomy"
    write(tmp_path, "dev.json", MULTIPLE | {"cop": 0})  # as a hub's copy counts
    with pytest.raises(DataError, match=r"dev\.json: record 1: 'Which vitamin\?': expected a label from 1 to 4; found '0'"):
        import_set("medmcqa", tmp_path, tmp_path / "bad")


@pytest.mark.parametrize(("name", "prefix", "letters"), [("medqa", "phrases_no_exclude_", "ABCD"), ("medqa-5", "", "ABCDE")])
def test_medqa_by_options_with_and_without_development_questions(tmp_path: Path, name: str, prefix: str, letters: str) -> None:
    raw = {"options": {letter: f"drug {letter}" for letter in letters}, "answer": "drug D", "answer_idx": "D"}
    for split, count in (("train", 9), ("dev", 2), ("test", 3)):
        questions = [raw | {"question": f"{split} {i}?", "meta_info": "step1"} for i in range(count)]
        write(tmp_path / "US", f"{prefix}{split}.jsonl", *questions)
    found = texts(name, tmp_path, tmp_path / "out")
    assert [len(found[split]) for split in SPLITS] == [9, 2, 3]
    assert (found["test"][0].outputs, found["test"][0].labels) == (("D",), tuple(letters))
    assert found["test"][0].input.splitlines()[4] == "D. drug D"
    (tmp_path / f"US/{prefix}dev.jsonl").unlink()
    assert [len(split) for split in texts(name, tmp_path, tmp_path / "cut").values()] == [8, 1, 3]
    write(tmp_path / "US", f"{prefix}test.jsonl", raw | {"question": "q", "answer_idx": "F"})
    with pytest.raises(DataError, match=r"test\.jsonl: record 1: 'q': expected a label from A to [DE]; found 'F'"):
        import_set(name, tmp_path, tmp_path / "bad")
    write(tmp_path / "US", f"{prefix}test.jsonl", raw | {"question": "q", "options": {}})
    with pytest.raises(DataError, match=r"record 1: expected options A to D or E"):
        import_set(name, tmp_path, tmp_path / "bad")


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
        with pytest.raises(DataError, match=r"ori_pqal\.json: (1: )?expected .*; found .*; give the publisher's file"):
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
    with pytest.raises(DataError, match=r"anatomy_test\.csv:3: expected question, A, B, C, D and the letter; found 5 cells"):
        import_set("mmlu-medical", tmp_path, tmp_path / "bad")
    (tmp_path / "data/test/anatomy_test.csv").write_text('"Two\nlines, and ""one"" mark",a,"b,c",c,d,A\n')
    tested = texts("mmlu-medical", tmp_path, tmp_path / "lines")["test"]
    assert 'Two\nlines, and "one" mark\nA. a\nB. b,c\nC. c\nD. d' in {text.input for text in tested}


def test_careqa_by_language_is_cut_by_shares(tmp_path: Path) -> None:
    raw = {"exam_id": 29, "op1": "a", "op2": "b", "op3": "c", "op4": "d", "cop": 4, "year": "2024", "category": "Nursing"}
    for language in ("en", "es"):
        raws = [raw | {"question": f"{language} {i}", "unique_id": str(i)} for i in range(10)]
        (tmp_path / f"CareQA_{language}.json").write_text(json.dumps(raws))
    found = texts("careqa", tmp_path, tmp_path / "out", test=0.8, validation=0.1)
    assert [len(found[split]) for split in SPLITS] == [1, 1, 8]
    assert found["test"][0].outputs == ("D",)
    spanish = texts("careqa", tmp_path, tmp_path / "es", size="es")
    assert all(text.input.startswith("es ") for split in SPLITS for text in spanish[split])


def test_texts_can_be_pooled_cut_anew_and_stand_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "set", "train.jsonl", *({"question": f"Q{i}", "answer": "#### 1"} for i in range(16)))
    write(source, "test.jsonl", *({"question": f"T{i}", "answer": "#### 1"} for i in range(4)))
    dest = tmp_path / "out"
    assert run(monkeypatch, "data", "import", "gsm8k", source, dest, "--resplit", "--test", 0.5, "--validation", 0) == 0
    shown = capsys.readouterr().out
    assert "JSONL files per site" in shown
    assert "task.classes" not in shown
    assert sorted(p.name for p in (dest / "gsm8k").iterdir()) == ["test.jsonl", "training.jsonl"]
    assert len(records(dest / "gsm8k/test.jsonl")) == 10
    assert any(one["instruction"].startswith("T") for one in records(dest / "gsm8k/training.jsonl"))
    found = import_set("gsm8k", source, dest, Options(sites=2), add=True)
    assert [sum(counts.values()) for counts in found["sites"].values()] == [10, 10]
    assert sorted(p.name for p in dest.iterdir()) == ["gsm8k", "import.json", "site-1", "site-2"]
    with pytest.raises(DataError, match="holds sites already"):
        import_set("gsm8k", source, dest)


@pytest.mark.skipif(not REAL_TEXTS, reason=NO_TEXTS)
def test_real_e2e_texts_go_through_the_publishers_files_unchanged(tmp_path: Path) -> None:
    """The real records, written as the publisher's CSV, come back as the same inputs and references."""
    rows = {}
    for split, name in (("train", "trainset"), ("validation", "devset"), ("test", "testset_w_refs")):
        real = records(Path(REAL_TEXTS) / f"e2e/{split}.jsonl")
        rows[split] = [(one["input"], ref) for one in real for ref in one.get("outputs", [one.get("output")])]
        sheet(tmp_path / f"set/{name}.csv", rows[split])
    import_set("e2e", tmp_path / "set", tmp_path / "out")
    found = read_texts(tmp_path / "out/e2e").splits
    assert [(t.input, t.outputs[0]) for t in found["training"]] == rows["train"]
    assert [(t.input, t.outputs[0]) for t in found["validation"]] == rows["validation"]
    tested = records(Path(REAL_TEXTS) / "e2e/test.jsonl")
    assert [(t.input, t.outputs) for t in found["test"]] == [(one["input"], tuple(one["outputs"])) for one in tested]


def medmcqa(number: int, **keys: Any) -> dict[str, Any]:
    return {"question": f"Q{number}?", "opa": "a", "opb": "b", "opc": "c", "opd": "d", "cop": 1} | keys


@pytest.mark.parametrize("first", [{"question": "a", "opa": "b"}, medmcqa(1, exp="x" * 1_100_000)])
def test_a_bad_first_line_is_named_in_lines_of_json(first: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, "train.json", first, medmcqa(2))
    write(tmp_path, "dev.json", medmcqa(3))
    with pytest.raises(DataError, match=r"train\.json:1: (expected question|over 1,048,576 characters)"):
        import_set("medmcqa", tmp_path, tmp_path / "out")


def test_options_and_abstracts_that_are_no_texts_are_refused(tmp_path: Path) -> None:
    raw = {"question": "Q?", "options": {"A": None, "B": "b", "C": "c", "D": "d"}, "answer_idx": "B"}
    for name in ("train", "test"):
        write(tmp_path, f"phrases_no_exclude_{name}.jsonl", raw)
    with pytest.raises(DataError, match="expected options that are texts; found None"):
        import_set("medqa", tmp_path, tmp_path / "out")
    (tmp_path / "ori_pqal.json").write_text(json.dumps({"1": {"QUESTION": "q", "CONTEXTS": [None], "final_decision": "no"}}))
    with pytest.raises(DataError, match=r"ori_pqal\.json: 1: expected QUESTION, CONTEXTS"):
        import_set("pubmedqa", tmp_path, tmp_path / "out")


@pytest.mark.parametrize("truth", [{"9": "yes"}, {"1": "yes"}])
def test_answers_of_another_release_are_refused(truth: dict[str, str], tmp_path: Path) -> None:
    raws = {str(n): {"QUESTION": f"q{n}", "CONTEXTS": ["c"], "final_decision": "no"} for n in range(5)}
    (tmp_path / "ori_pqal.json").write_text(json.dumps(raws))
    (tmp_path / "test_ground_truth.json").write_text(json.dumps(truth))
    with pytest.raises(DataError, match=r"test_ground_truth\.json: expected the final_decision of .*; found 'yes'"):
        import_set("pubmedqa", tmp_path, tmp_path / "out")
