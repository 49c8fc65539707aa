"""A table of pictures: its columns, whose they are, and one line for everything that is not as it must be."""

import json
import re
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from consilium.core.errors import ConfigError, ConsiliumError, DataError
from consilium.data.importers.base import Options
from consilium.data.importers.table import open_table
from tests.conftest import Capture, Patch, refused, run
from tests.data.importing import groups_apart, picture, run_import, splits_of

SMEARS = (("Süd", "1", "burr"), ("Süd", "2", "burr"), ("Süd", "3", "target"), ("b", "1", "target"))
ROWS = [(f"{site}/{smear}-{number}.png", kind, site, smear) for site, smear, kind in SMEARS for number in range(3)]


def table(folder: Path, rows: list[tuple[str, ...]], heading: str = "file,class,site,smear", comma: str = ",") -> Path:
    for name, *_ in rows:
        picture(folder / name)
    path = folder / "manifest.csv"
    path.write_text("\n".join([heading, *(comma.join(row) for row in rows)]), encoding="utf-8-sig")
    return path


def test_sites_classes_and_patients_are_those_of_the_columns(tmp_path: Path) -> None:
    columns = {"image": "file", "label": "class", "patient": "smear"}
    path = table(tmp_path / "raw", ROWS)
    told = run_import("csv", path, tmp_path / "lists", columns=columns, test=0.3, validation=0.0)
    assert told["classes"] == ["burr", "target"]
    # of the two smears of burr one is tested on (0.3 x 2, rounded); of one smear of a class none
    assert told["sites"] == {
        "b": {"training": 3, "validation": 0, "test": 0},
        "sud": {"training": 6, "validation": 0, "test": 3},
    }
    assert told["notes"] == ["Süd -> sud"]
    found = splits_of(tmp_path / "lists", "sud", classes=True)
    assert Counter(Counter((item.label, item.patient) for item in found["training"]).values()) == {3: 2}  # whole smears
    assert {item.label for item in found["test"]} == {"burr"}


def test_published_splits_stay_and_without_sites_there_is_one_list(tmp_path: Path) -> None:
    rows = [("a.png", "x", "Train"), ("b.png", "y", "valid"), ("c.png", "x", "test")]
    path = table(tmp_path / "raw", rows, "image;label;split", ";")
    told = run_import("csv", path, tmp_path / "lists")
    assert told["sites"] == {"manifest": {"training": 1, "validation": 1, "test": 1}}
    assert "share it out with `consilium data partition`" in told["notes"][0]
    assert "names no patients" in told["notes"][1]


def test_file_is_found_by_name_among_many(tmp_path: Path, monkeypatch: Patch) -> None:
    path = table(tmp_path, [("z/a.png", "x")], "image,label")
    path.write_text("image,label\na.png,x\n")
    others = [tmp_path / f"b/{number}.png" for number in range(20_000)]
    monkeypatch.setattr("consilium.data.importers.table.find_files", lambda *how: [*others, tmp_path / "z/a.png"])
    assert [one.image for one in open_table(path, {}).samples("s", Options())] == [tmp_path / "z/a.png"]
    monkeypatch.setattr(
        "consilium.data.importers.table.find_files", lambda *how: [tmp_path / "z/a.png", *others, tmp_path / "a.png"]
    )
    with pytest.raises(DataError, match=r"line 2: image 'a\.png': no such file"):  # two files have the name
        open_table(path, {}).samples("s", Options())


def test_a_file_whose_name_is_in_the_other_form_is_found(tmp_path: Path) -> None:
    path = table(tmp_path, [("ä.png", "x", "s", "1")])
    made = tmp_path / "ä.png"
    made.rename(made.with_name(unicodedata.normalize("NFD", made.name)))
    told = run_import("csv", path, tmp_path / "lists", columns={"image": "file", "label": "class"})
    assert told["sites"]["s"]["training"] == 1


@pytest.mark.parametrize(
    ("heading", "rows", "columns", "error", "message"),
    [
        (
            "file,kind",
            [("a.png", "x"), ("b.png", "x"), ("c.png", "y"), ("d.png", "y")],
            {},
            ConfigError,
            "no column 'label'; there are file, kind; write --column label=kind$",
        ),
        ("image,label", [("a.png", "x")], {"site": "s"}, ConfigError, "no column 's'; there are image, label"),
        ("image,label", [("a.png", "x")], {"lable": "s"}, ConfigError, "'lable': expected one of .*did you mean 'label'"),
        ("image,label", [], {}, DataError, "has no line below its headings"),
        ("image,label", [("a.png", "")], {}, DataError, "column 'label' is empty; give a line per picture"),
        ("image,label,split", [("a.png", "x", "dev")], {}, DataError, "line 2: split 'dev' is none of training, validation"),
        (
            "image,label",
            [("a.png", "G3/G4")],
            {},
            DataError,
            "class 'G3/G4': a class has 1 to 64 printable characters and no /",
        ),
        ("image,label", [("a.png", "x"), ("a.png", "y")], {}, DataError, "line 3: image 'a.png' is that of line 2; keep one"),
        (
            "image,label",
            [("a.png", "x"), ("../raw/a.png", "y")],
            {},
            DataError,
            "line 3: image '../raw/a.png' is that of line 2",
        ),
    ],
)
def test_one_line_for_what_is_wrong(
    heading: str, rows: list[tuple[str, ...]], columns: dict[str, str], error: type, message: str, tmp_path: Path
) -> None:
    path = table(tmp_path / "raw", rows or [("a.png", "x")], heading)
    if not rows:
        path.write_text(heading)
    refused(message, run_import, "csv", path, tmp_path / "lists", columns=columns, error=error)
    assert not (tmp_path / "lists").exists()


def test_what_is_no_table(tmp_path: Path) -> None:
    path = table(tmp_path, [("a.png", "x")], "image,label")
    (tmp_path / "a.png").unlink()
    for text, message in (
        (path.read_bytes(), "line 2: image 'a.png': no such file; paths start at the table's folder"),
        ("image,label\nä,x".encode("latin-1"), "not UTF-8 in or behind line 1.*; save it as CSV in UTF-8"),
        (b"image,label\n" + b"x" * 1_100_000, "manifest.csv:2: a record has at most 1,048,576 characters; cut it up"),
    ):
        path.write_bytes(text)
        refused(message, run_import, "csv", path, tmp_path / "lists", error=ConsiliumError)
    refused("no such file; expected a CSV file with a picture a line", run_import, "csv", tmp_path, tmp_path / "lists")
    with pytest.raises(ConfigError, match="--column: own does not take it; leave it out"):
        run_import("own", tmp_path, tmp_path / "lists", columns={"image": "x"})


def test_the_command_and_a_partition_of_nobodys_pictures(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    path = table(tmp_path / "raw", ROWS)
    words = ["data", "import", "csv", path, tmp_path / "lists", "--column", "image=file", "--column", "label=class"]
    assert run(monkeypatch, *words, "--sites", 1, "--test", 0, "--validation", 0) == 0
    assert "note: Süd -> sud" in capsys.readouterr().out
    share = ["data", "partition", tmp_path / "lists/csv/datalist.json", tmp_path / "out", "--sites", 2, "--minimum", 1, "--iid"]
    assert run(monkeypatch, *share) == 0
    said = "12 of 12 training samples name no patient, so one patient's pictures may be at several sites"
    assert f"note: {said}" in capsys.readouterr().out
    assert said in json.loads((tmp_path / "out/partition.json").read_text())["notes"][0]
    assert run(monkeypatch, "data", "import", "csv", path, tmp_path / "x", "--column", "image") == 2
    assert "--column: 'image': expected FIELD=NAME" in capsys.readouterr().err


HEAD = ["image,label", "a.png,x", "b.png,y"]


def imported(folder: Path, text: str, encoding: str = "utf-8") -> dict[str, Any]:
    """Write a table with the pictures a and b in `img`, import it, and return what import.json says."""
    for name in ("a.png", "b.png", "img/a.png", "img/b.png"):
        picture(folder / name)
    (folder / "t.csv").write_text(text, encoding=encoding, newline="")
    return run_import("csv", folder / "t.csv", folder / "lists", validation=0.0, test=0.0)


@pytest.mark.parametrize(
    "text",
    [
        "sep=;\r\nimage;label\r\na.png;x\r\nb.png;y\r\n",
        "\r\nSEP=|\r\nimage|label\r\na.png|x\r\nb.png|y",
        "sep=,,\n" + "\n".join(HEAD),
        '"sep=\t"\nimage\tlabel\na.png\tx\nb.png\ty\n',
        "Image;LABEL\nimg\\a.png;x\nimg\\b.png;y\n",
        "image;label;\na.png;x;\nb.png;y;\n",
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_tables_of_excel_and_windows_are_read(text: str, encoding: str, tmp_path: Path) -> None:
    told = imported(tmp_path, text, encoding)
    assert told["classes"] == ["x", "y"]
    assert told["sites"]["t"]["training"] == 2


def test_lines_without_a_value_are_left_out_and_told(tmp_path: Path) -> None:
    told = imported(tmp_path, "\n".join([*HEAD, ",,", " , ", ""]))
    assert told["sites"]["t"]["training"] == 2
    assert "t.csv: 2 lines without any value are left out" in told["notes"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a.png,a\nb.png,b\n", "line 1 names a picture, 'a.png', and no columns; put a line of headings before it"),
        ("image,label,Label\na.png,a,b\n", "two columns are called 'label'; rename or delete one"),
        ("sep=,\nimage,label\na.png,x\ngone.png,y\n", "line 4: image 'gone.png': no such file"),
    ],
)
def test_line_of_an_error_is_that_of_an_editor(text: str, why: str, tmp_path: Path) -> None:
    refused(re.escape(why), imported, tmp_path, text)


def test_a_line_with_more_cells_than_headings_is_no_other_site(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2: more cells than the 3 headings; put a cell with a ',' in it into quotes"):
        imported(tmp_path, "image,label,site\na.png,carcinoma, ductal,n\nb.png,y,n\n")
    text = 'image,label,site\na.png,"carcinoma, ductal",n\nb.png,y,n\n'
    assert imported(tmp_path, text)["classes"] == ["carcinoma, ductal", "y"]


def test_columns_of_0_and_1_are_no_classes_beside_a_column_that_may_be(tmp_path: Path) -> None:
    lines = [f"{n}.png,{'xy'[n % 2]},{int(n < 3)},{int(n >= 3)}" for n in range(4)]
    for n in range(4):
        picture(tmp_path / f"{n}.png")
    (tmp_path / "t.csv").write_text("\n".join(["image,kind,is_train,is_test", *lines]))
    with pytest.raises(ConfigError, match="write --column label=kind or --column label=is_train,is_test"):
        run_import("csv", tmp_path / "t.csv", tmp_path / "lists")
    assert run_import("csv", tmp_path / "t.csv", tmp_path / "lists", columns={"label": "kind"})["classes"] == ["x", "y"]


def test_patient_of_two_classes_is_in_one_split(tmp_path: Path) -> None:
    rows = [(f"{who}-{kind}.png", kind, f"p{who}") for who in range(12) for kind in ("benign", "malignant")]
    path = table(tmp_path / "raw", rows, "image,label,patient")
    run_import("csv", path, tmp_path / "lists", validation=0.25, test=0.25)
    found = splits_of(tmp_path / "lists", "manifest", classes=True)
    assert {split: len(items) for split, items in found.items()} == {"training": 12, "validation": 6, "test": 6}
    assert groups_apart(found, lambda item: item.patient)


def test_quoted_headings_may_hold_separators(tmp_path: Path) -> None:
    path = table(
        tmp_path / "raw", [("a.png", "x", "sharp"), ("b.png", "x", "dark")], '"image";"label";"remarks, if any, or none"', ";"
    )
    assert run_import("csv", path, tmp_path / "lists")["classes"] == ["x"]


def test_a_patient_that_looks_like_a_missing_value_is_noted(tmp_path: Path) -> None:
    rows = [(f"{n}.png", "xy"[n % 2], "NA" if n < 4 else f"P{n}") for n in range(8)]
    path = table(tmp_path / "raw", rows, "image,label,patient")
    notes = run_import("csv", path, tmp_path / "lists")["notes"]
    assert any(note.startswith("patient that looks like a missing value: NA: all its samples are one") for note in notes)
