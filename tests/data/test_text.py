"""Instruction data: the two prompt forms, optional keys, and errors that name file and line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from consilium.config.site import Given, find_site, is_site_folder
from consilium.core.errors import ConfigError, DataError
from consilium.data.text import read_records, read_texts
from consilium.federation.site_names import site_names
from consilium.tasks.language.answers import canonical_answer
from tests.conftest import refused, run
from tests.data.writing import write


def test_every_split_is_read_and_prompts_have_two_forms(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", {"instruction": "Add.", "input": "1 2", "output": "3", "source": "x"}, "")
    write(tmp_path, "test.jsonl", {"input": "Say a.", "outputs": ["a", "A"], "final_answer": 1, "labels": ["a", "b"]})
    data = read_texts(tmp_path)
    (trained,), (tested,) = data.splits["training"], data.splits["test"]
    assert data.splits["validation"] == ()
    assert trained.prompt.endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n")
    assert tested.prompt.endswith("### Instruction:\nSay a.\n\n### Response:\n")
    assert "### Input" not in tested.prompt
    assert (tested.outputs, tested.final_answer, tested.labels) == (("a", "A"), "1", ("a", "b"))
    assert read_texts(tmp_path / "train.jsonl") == data


def test_a_record_says_whose_it_is_and_only_a_pseudonym_is_kept(tmp_path: Path) -> None:
    of = [
        {"input": str(n), "output": "x"} | ({"patient": who} if who else {}) for n, who in enumerate(["ward", 7, " 7\t", " "])
    ]
    data = read_texts(write(tmp_path, "training.jsonl", *of))
    first, seven, same, nobody = (text.patient for text in data.splits["training"])
    assert seven == same != first
    assert nobody == ""
    assert "ward" not in first  # no letters of a hexadecimal number


def test_line_separators_inside_a_text_do_not_split_a_record(tmp_path: Path) -> None:
    write(tmp_path, "training.jsonl", json.dumps({"input": "a\u2028b", "output": "c"}, ensure_ascii=False))
    assert read_texts(tmp_path).splits["training"][0].input == "a\u2028b"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", r"training\.jsonl:2: not valid JSON"),
        ('{"question": "q", "answer": "a", "answer": "b"}', r"training\.jsonl:2: .*'answer' occurs twice"),
        ({"output": "a"}, r'training\.jsonl:2: has neither "instruction" nor "input"'),
        ({"input": "a"}, r'training\.jsonl:2: needs an "output"'),
        ({"input": "a", "output": None}, r'training\.jsonl:2: needs an "output"; write its answer there'),
        ({"input": "a", "outputs": []}, r'training\.jsonl:2: needs an "output"; write its answer there'),
        ({"input": None, "output": "a"}, r'training\.jsonl:2: has neither "instruction" nor "input"'),
        ({"Question": "a", "Answer": "b"}, r"training\.jsonl:2: 'Answer' is not read; write 'answer', or leave it out"),
        ({"Text": "a", "Label": "b"}, r"training\.jsonl:2: 'Label' is not read; write 'label', or leave it out"),
        ('[{"input": "a", "output": "b"}]', r"training\.jsonl:2: expected a record in braces, found list; write one record"),
        ({"input": 3, "output": "a"}, r"training\.jsonl:2: input: 3 is not a text; write it in quotes"),
        ({"instruction": ["a"], "output": "a"}, r"training\.jsonl:2: instruction: \['a'\] is not a text; write it in quotes"),
        ({"input": "a", "output": 5}, r"training\.jsonl:2: output: 5 is not a text; write it in quotes"),
        ({"input": "a", "output": "a", "final_answer": ["1"]}, r"final_answer: \['1'\] is neither text nor a number"),
        ({"input": "a", "output": "a", "final_answer": True}, "final_answer: True is neither text nor a number"),
        ('{"input": "a", "output": "a", "final_answer": Infinity}', "final_answer: inf is neither text nor a number"),
        ({"input": "a", "outputs": "a"}, "outputs: 'a' is not a list of texts"),
        ({"input": "a", "output": "a", "labels": [1]}, "labels: .* is not a list of texts"),
        ({"input": "a", "output": "a", "patient": {"id": 3}}, "2: patient dict is neither text nor a whole number"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(record: object, message: str, tmp_path: Path) -> None:
    write(tmp_path, "training.jsonl", {"input": "a", "output": "b"}, record)
    refused(message, read_texts, tmp_path)


def test_a_key_whose_value_is_null_counts_as_absent(tmp_path: Path) -> None:
    """As exports of tables write it."""
    absent = {"input": None, "outputs": None, "final_answer": None, "labels": None, "patient": None}
    write(tmp_path, "training.jsonl", {"instruction": "a", "output": "b"}, {"instruction": "a", "output": "b"} | absent)
    one, two = read_texts(tmp_path).splits["training"]
    assert replace(two, name=one.name) == one


def test_a_record_that_needs_no_answer_may_have_any(tmp_path: Path) -> None:
    lines = [{"input": "a"}, {"input": "a", "output": 5}, {"input": "a", "outputs": 5}, {"input": 5, "output": "a"}]
    write(tmp_path, "new.jsonl", *lines)
    bad = list[DataError]()
    assert [one.outputs for one in read_records(tmp_path / "new.jsonl", bad, needs_answer=False)] == [("",)] * 3
    assert [str(one) for one in bad] == [f"{tmp_path / 'new.jsonl'}:4: input: 5 is not a text; write it in quotes"]


@pytest.mark.parametrize("name", ["training.jsonl.gz", "training.json", "train-00000-of-00001.parquet", "train.csv"])
def test_a_training_file_of_another_format_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The formats of data sets on the Hub. The message is the same for a site's folder and for a folder of sites."""
    (tmp_path / "ward").mkdir()
    (tmp_path / "ward" / name).write_bytes(b"")
    said = "is not read: write its records as training.jsonl, or"
    refused(f"holds no training.jsonl or train.jsonl; '{name}' {said} give a folder", read_texts, tmp_path / "ward")
    with pytest.raises(ConfigError, match=f"training.jsonl, site.yaml or classes; 'ward/{name}' {said} `consilium data import"):
        site_names("", tmp_path)
    for folder in (tmp_path, tmp_path / "ward") if name != "train.csv" else ():  # a table has an import of its own
        assert run(monkeypatch, "data", "check", folder) == 2
        assert said in capsys.readouterr().err.replace("\n", " ")


def test_a_final_answer_may_be_a_number(tmp_path: Path) -> None:
    """As JSON has them; all are read as one exact number, see the language task."""
    given = ["12", "0.5", "1e-5", "-3"]
    write(tmp_path, "training.jsonl", *[f'{{"input": "a", "output": "b", "final_answer": {one}}}' for one in given])
    found = [canonical_answer(str(text.final_answer)) for text in read_texts(tmp_path).splits["training"]]
    assert found == ["12", "1/2", "1/100000", "-3"]


@pytest.mark.parametrize("name", ["datalist.json", "notes.jsonl", "test.jsonl", "missing"])
def test_texts_beside_what_a_site_names_are_not_read(name: str, tmp_path: Path) -> None:
    write(tmp_path, "training.jsonl", {"input": "a", "output": "b"})
    if name != "missing":
        write(tmp_path, name, {"input": "c", "output": "d"})
    refused("holds no training", read_texts, tmp_path / name)


def test_a_folder_of_a_simulation_may_hold_jsonl_lists(tmp_path: Path) -> None:
    write(tmp_path / "ward", "train.jsonl", {"input": "a", "output": "b"})
    assert is_site_folder(tmp_path / "ward")
    assert find_site("ward", Given(tmp_path)).datalist == tmp_path / "ward"
