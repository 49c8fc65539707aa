"""A CSV of texts and their classes: what it becomes, and what is wrong with one."""

import json
from pathlib import Path

import pytest

from consilium.core.errors import ConfigError, ConsiliumError, DataError
from consilium.data.check import check_texts
from consilium.data.datalist import SPLITS
from consilium.data.importers.base import Options
from consilium.data.text import read_texts
from tests.conftest import refused
from tests.data.importing import import_set


def table(path: Path, *rows: str, head: str = "text;label;site;patient;split") -> Path:
    path.write_text("\n".join([head, *rows]), encoding="utf-8")
    return path


def test_reports_by_site_keep_a_patient_in_one_split_and_their_lines(tmp_path: Path) -> None:
    rows = [f'"Film {i}.\nNo ""fluid"".";{"normal" if i % 3 else "effusion"};Klinik {i % 2};p{i // 4};' for i in range(40)]
    found = import_set("csv-text", table(tmp_path / "a.csv", *rows, ";normal;x;;", "no label;;x;;"), tmp_path / "out")
    assert found["classes"] == ["effusion", "normal"]
    renamed = ["Klinik 0 -> klinik-0", "Klinik 1 -> klinik-1"]
    assert found["notes"] == ["2 of 42 lines without text or label are left out", *renamed]
    for site in ("klinik-0", "klinik-1"):
        assert check_texts(tmp_path / "out" / site).problems == {}
        splits = read_texts(tmp_path / "out" / site).splits
        assert sum(len(splits[split]) for split in SPLITS) == 20
        first = splits["training"][0]
        assert first.prompt_without_template.endswith('.\nNo "fluid".')
        assert first.label in ("effusion", "normal")
        assert first.patient
    lines = [json.loads(line) for line in (tmp_path / "out/klinik-0/training.jsonl").read_text().splitlines()]
    assert all(line.keys() == {"text", "label", "patient"} for line in lines)


def test_sites_are_chosen_and_renamed_by_their_names_in_the_table(tmp_path: Path) -> None:
    source = table(tmp_path / "a.csv", *(f"t{i};{'ab'[i % 2]};{'Klinik Süd' if i % 3 else 'Nord'};;" for i in range(30)))
    found = import_set("csv-text", source, tmp_path / "a", Options(rename={"Klinik Süd": "sued"}))
    assert list(found["sites"]) == ["Nord", "sued"]
    assert list(import_set("csv-text", source, tmp_path / "b", Options(only=("Klinik Süd",)))["sites"]) == ["klinik-sud"]


def test_pooled_patients_of_two_sites_stay_two(tmp_path: Path) -> None:
    source = table(tmp_path / "a.csv", *(f"t{i};{'ab'[i % 3 % 2]};{'AB'[i % 2]};p{i // 4};" for i in range(60)))
    import_set("csv-text", source, tmp_path / "out", Options(sites=1))
    assert check_texts(tmp_path / "out/csv-text").problems == {}
    splits = read_texts(tmp_path / "out/csv-text").splits
    assert len({text.patient for texts in splits.values() for text in texts}) == 30


def test_equal_texts_stay_with_their_patients_and_are_counted(tmp_path: Path) -> None:
    """Merged into one group, the normal reports of all patients would be in one split."""
    rows = [f"{'No findings.' if i < 20 else f'Fluid {i}.'};{'ab'[i // 20]};A;p{i};" for i in range(40)]
    found = import_set("csv-text", table(tmp_path / "a.csv", *rows), tmp_path / "out")
    assert any(note.startswith("19 texts are there before;") for note in found["notes"])
    splits = read_texts(tmp_path / "out/A").splits
    assert {"a", "b"} == {text.label for text in splits["training"]}
    assert len(splits["training"]) < 40


def test_text_may_be_as_long_as_a_line(tmp_path: Path) -> None:
    source = table(tmp_path / "a.csv", *(f"{i}{'x' * 200_000},{'ab'[i % 2]}" for i in range(4)), head="text,label")
    assert sum(import_set("csv-text", source, tmp_path / "out")["sites"]["a"].values()) == 4


def test_published_splits_stay_and_columns_may_have_other_names(tmp_path: Path) -> None:
    rows = [f"report {i},{i % 2},{split}" for split in ("train", "valid", "test") for i in range(4)]
    source = table(
        tmp_path / "b.csv", *(f"{split} {row}" for split, row in zip("abc" * 4, rows, strict=True)), head="Befund,Klasse,split"
    )
    found = import_set("csv-text", source, tmp_path / "out", Options(columns={"text": "Befund", "label": "Klasse"}))
    assert found["sites"] == {"b": {"training": 4, "validation": 4, "test": 4}}
    assert found["classes"] == ["0", "1"]
    assert "consilium data partition" in found["notes"][0]


@pytest.mark.parametrize(
    ("head", "row", "columns", "message"),
    [
        ("report,label", "a,b", {}, r"--column: .*no column 'text'; there are report, label; write --column text=NAME"),
        ("text,label", "a,b", {"text": "words"}, r"no column 'words'; there are text, label; write --column text=NAME"),
        ("text,label", "a,b", {"image": "text"}, r"--column: 'image': expected one of text, label, site, patient, split"),
        ("text,label", ",b", {}, r"no line has a text and a label; give a line per text"),
        ("text,label,split", "a,b,fold1", {}, r"line 2: split 'fold1' is none of training, validation, test; write one"),
        ("text,label,patient", "a,b,p\u200b1", {}, r"line 2: patient has U\+200B ZERO WIDTH SPACE"),
        ("text,label", "a,b,c", {}, r"line 2: more cells than the 2 headings"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_read_is_one_line(
    head: str, row: str, columns: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises((DataError, ConfigError), match=message) as found:
        import_set("csv-text", table(tmp_path / "c.csv", row, head=head), tmp_path / "out", Options(columns=columns))
    assert isinstance(found.value, ConsiliumError)
    assert "\n" not in str(found.value)
    assert not (tmp_path / "out").exists()


def test_doubtful_labels_are_told_and_one_for_each_text_is_refused(tmp_path: Path) -> None:
    labels = ("Normal", "normal", "n/a", "fracture")
    rows = [f"report {i},{labels[i % 4]}" for i in range(12)]
    found = import_set("csv-text", table(tmp_path / "a.csv", *rows, head="text,label"), tmp_path / "out")
    assert any("'Normal' (3) and 'normal' (3)" in note for note in found["notes"])
    assert any("'n/a' (3)" in note for note in found["notes"])
    source = table(tmp_path / "b.csv", *(f"report {i},note {i}" for i in range(12)), head="text,label")
    refused(r"column 'label' has as many classes as samples", import_set, "csv-text", source, tmp_path / "other")
