"""A hospital's folders at the door: what is not a data set is refused with the command that reads it, and the command does."""

import json
from pathlib import Path

import pytest

from consilium.config.site import Given, find_site
from consilium.core.errors import ConsiliumError, DataError
from consilium.data.class_checks import doubtful_name_findings
from consilium.data.importers.base import Options
from consilium.data.pairs import parse
from consilium.federation.site_names import site_names
from tests.conftest import JOBS, Capture, Patch, run
from tests.data.hospitals import command, drawn, hospital, photo, said
from tests.data.importing import import_set


@pytest.mark.parametrize(
    "habit", [("images/{}.png", "masks/{}.png"), ("Bilder/{}.png", "Masken/{}_m.png"), ("{}.png", "{}_seg.png")]
)
@pytest.mark.parametrize("whole", [True, False])
def test_pictures_beside_masks_are_no_classes(
    habit: tuple[str, str], whole: bool, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """`data check` of a site, or of a folder of sites, names the command, which makes what it has no problem with."""
    source = tmp_path / "all of them"
    for site in ("Klinik Süd", "b"):
        hospital(source / site, *habit)
    source = source if whole else source / "b"
    told = said(monkeypatch, capsys, "data", "check", source, codes=(2,))
    assert "pictures beside their masks" in told
    assert run(monkeypatch, *command(told, DEST=tmp_path / "lists")) == 0
    assert "no problems" in said(monkeypatch, capsys, "data", "check", tmp_path / "lists")


@pytest.mark.parametrize("verb", [["data", "stats"], ["data", "split"], ["simulate", JOBS / "quickstart", "--data"]])
def test_every_command_names_the_import(verb: list[object], tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    hospital(tmp_path / "raw" / "a", "images/{}.png", "masks/{}.png")
    more = [tmp_path / "out"] if "split" in verb else ["--rounds", 1] if "simulate" in verb else []
    told = said(monkeypatch, capsys, *verb, tmp_path / "raw", *more, codes=(2,))
    assert run(monkeypatch, *command(told, DEST=tmp_path / "lists")) == 0
    assert (tmp_path / "lists/a/datalist.json").is_file()


def test_a_table_beside_its_pictures_is_named(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    lines = [f"images/{n}.png,{'ab'[n % 2]}" for n in range(8)]
    for line in lines:
        photo(tmp_path / "a" / line.partition(",")[0])
    (tmp_path / "a" / "list.csv").write_text("\n".join(["image,label", *lines]))
    for number in range(4):
        photo(tmp_path / "b" / "ab"[number % 2] / f"{number}.png")
    told = said(monkeypatch, capsys, "data", "check", tmp_path, codes=(2,))
    assert "a holds a table, list.csv" in told
    told = said(monkeypatch, capsys, "data", "check", tmp_path / "a", codes=(2,))
    assert run(monkeypatch, *command(told, DEST=tmp_path / "lists")) == 0
    assert "class a: " in said(monkeypatch, capsys, "data", "check", tmp_path / "lists")
    told = said(monkeypatch, capsys, "data", "check", tmp_path / "a" / "list.csv", codes=(2,))
    assert run(monkeypatch, *command(told, DEST=tmp_path / "more")) == 0


def test_masks_and_classes_get_a_folder_each(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    hospital(tmp_path / "raw" / "a", "images/{}.png", "masks/{}.png")
    hospital(tmp_path / "raw" / "b", "{}.png", "{}_seg.png", (255,))
    for number in range(6):
        photo(tmp_path / "raw" / "c" / ("benign", "malign")[number % 2] / f"{number}.png")
    hospital(tmp_path / "raw" / "d", "pictures/{}.bmp", "by hand/m{}.png", count=12)
    rows = [f"pictures/{n}.bmp,by hand/m{n}.png,P{n // 2}" for n in range(12)]
    (tmp_path / "raw/d/list.csv").write_text("\n".join(["file,mask,patient", *rows]))
    told = said(monkeypatch, capsys, "data", "import", "own", tmp_path / "raw", tmp_path / "lists")
    assert "a job has masks or classes" in told
    assert 'task.classes: {"object": [1, 255]}' in told
    assert 'task.classes: ["benign", "malign"]' in told
    assert sorted(one.parent.name for one in (tmp_path / "lists/segmentation").glob("*/datalist.json")) == ["a", "b", "d"]
    assert json.loads((tmp_path / "lists/classification/c/datalist.json").read_text())["labels"] == ["benign", "malign"]
    assert said(monkeypatch, capsys, "data", "check", tmp_path / "lists").count("no problems") == 4
    one = import_set("own", tmp_path / "raw", tmp_path / "one", Options(only=("c",)))
    assert set(one["sites"]) == {"c"}
    assert (tmp_path / "one/c/datalist.json").is_file()
    with pytest.raises(ConsiliumError, match="--only: no site 'e'"):
        import_set("own", tmp_path / "raw", tmp_path / "two", Options(only=("c", "e")))
    assert not (tmp_path / "two").exists()


def test_what_is_not_read_of_a_folder_of_sites_is_named(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    hospital(tmp_path / "raw" / "a", "images/{}.png", "masks/{}.png")
    (tmp_path / "raw/notes").mkdir()
    for number in range(4):
        photo(tmp_path / "raw/files" / f"{number}.png")
        drawn(tmp_path / "raw/files/drawn" / f"{number}.png", 255)
    rows = [f"files/{number}.png,files/drawn/{number}.png" for number in range(4)]
    (tmp_path / "raw" / "more.csv").write_text("\n".join(["image,label", *rows]))
    told = said(monkeypatch, capsys, "data", "import", "own", tmp_path / "raw", tmp_path / "lists")
    assert "notes: left out, it has neither masks nor classes nor a table" in told
    added = next(part for part in told.split("note: ") if part.startswith("more.csv"))
    told = said(monkeypatch, capsys, *command(added, DEST=tmp_path / "lists"))
    assert 'task.classes: {"object": [1, 255]}' in told
    assert "no problems" in said(monkeypatch, capsys, "data", "check", tmp_path / "lists")


def test_split_takes_a_folder_of_sites(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    for site in ("Klinik Süd", "b"):
        hospital(tmp_path / "raw" / site, "images/{}.png", "masks/{}.png", count=10)
        entries = [{"image": f"images/{n}.png", "label": f"masks/{n}.png"} for n in range(10)]
        (tmp_path / "raw" / site / "datalist.json").write_text(json.dumps({"training": entries}))
    (tmp_path / "raw/b/site.yaml").write_text("datalist: datalist.json\nthreads: 1\n")
    told = said(monkeypatch, capsys, "data", "split", tmp_path / "raw", tmp_path / "cut", "--test", 0.3)
    assert "note: Klinik Süd -> klinik-sud" in told
    assert "note: b: its site.yaml is not copied" in told
    for site in ("klinik-sud", "b"):
        found = json.loads((tmp_path / "cut" / site / "datalist.json").read_text())
        assert [len(found[split]) for split in ("training", "validation", "test")] == [6, 1, 3]
    assert "no problems" in said(monkeypatch, capsys, "data", "check", tmp_path / "cut")
    found = json.loads(said(monkeypatch, capsys, "data", "split", tmp_path / "raw", tmp_path / "again", "--format", "json"))
    assert set(found) == {"klinik-sud", "b"}


def test_a_simulation_takes_folders_whose_names_have_blanks(tmp_path: Path) -> None:
    for site in ("Klinik Süd", "b", "Ärzte"):
        hospital(tmp_path / site, "images/{}.png", "masks/{}.png", count=3)
        entries = [{"image": f"images/{n}.png", "label": f"masks/{n}.png"} for n in range(3)]
        (tmp_path / site / "datalist.json").write_text(json.dumps({"training": entries}))
    assert site_names("", tmp_path) == ["b", "klinik-sud", "Ärzte"]
    assert find_site("klinik-sud", Given(tmp_path)).datalist == tmp_path / "Klinik Süd" / "datalist.json"
    assert find_site("Ärzte", Given(tmp_path)).datalist == tmp_path / "Ärzte" / "datalist.json"


# tables -----------------------------------------------------------------------------------------------------------------------


def table(folder: Path, heading: str, rows: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "list.csv").write_text("\n".join([heading, *rows]))
    return folder / "list.csv"


def test_a_column_of_masks_is_one_of_masks(tmp_path: Path) -> None:
    hospital(tmp_path / "a", "pictures/{}.png", "drawn by hand/x{}.png", count=12)
    rows = [f"pictures/{n}.png,drawn by hand/x{n}.png,P{n // 2},{'NS'[n // 6]}" for n in range(12)]
    for heading in (
        "image,label,patient,site",
        "image,mask,patient,site",
        "file,truth,patient,site",
        "path,drawing,patient,site",
    ):
        told = import_set("csv", table(tmp_path / "a", heading, rows), tmp_path / heading)
        assert told["classes"] == {"object": [1]}
        assert {site: sum(splits.values()) for site, splits in told["sites"].items()} == {"N": 6, "S": 6}
        found = json.loads((tmp_path / heading / "N" / "datalist.json").read_text())
        first = next(one for one in found["training"])
        assert Path(first["label"]).name == f"x{Path(first['image']).name}"


def test_a_mask_that_is_not_there_is_no_class(tmp_path: Path) -> None:
    hospital(tmp_path / "a", "{}.png", "m/{}.png", count=3)
    path = table(tmp_path / "a", "image,label", ["0.png,m/0.png", "1.png,masks/1.png"])
    with pytest.raises(ConsiliumError, match=r"line 3: label 'masks/1\.png': no such file; paths start at the table's folder"):
        import_set("csv", path, tmp_path / "lists")


def test_a_class_for_every_picture_is_refused(tmp_path: Path) -> None:
    rows = [f"{n}.png,id-{n},{'ab'[n % 2]}" for n in range(12)]
    for n in range(12):
        photo(tmp_path / "a" / f"{n}.png")
    path = table(tmp_path / "a", "image,label,kind", rows)
    with pytest.raises(ConsiliumError, match=r"column 'label' has as many classes as samples, 12: .*by --column label=NAME"):
        import_set("csv", path, tmp_path / "lists")
    assert import_set("csv", path, tmp_path / "lists", Options(columns={"label": "kind"}))["classes"] == ["a", "b"]


def test_an_empty_label_is_no_class(tmp_path: Path) -> None:
    for n in range(6):
        photo(tmp_path / "a" / f"{n}.png")
    path = table(tmp_path / "a", "image,label", [f"{n}.png,{'ab'[n % 2] if n < 5 else ' '}" for n in range(6)])
    told = import_set("csv", path, tmp_path / "lists")
    assert told["classes"] == ["a", "b"]
    assert "1 of 6 lines have no label and are left out, the first is line 7" in told["notes"]


@pytest.mark.parametrize(
    ("names", "noted"),
    [
        (("NaN", "a"), {"class that looks like a missing value: 'NaN'"}),
        (("#N/A", "a"), {"class that looks like a missing value: '#N/A'"}),
        (("Benign", "benign "), {"class in two spellings: 'Benign' (1) and 'benign '"}),
        (("in situ", "In-Situ"), {"class in two spellings: 'In-Situ' (1) and 'in situ'"}),
        (("grade_1", "Grade 1"), {"class in two spellings: 'Grade 1' (1) and 'grade_1'"}),
        (("1", "1.0"), {"class in two spellings: '1' (1) and '1.0'"}),
        (("1.0", "1.5"), set()),
        (("HER2-", "HER2+"), set()),
        (("1", "2"), set()),
    ],
)
def test_doubtful_names_of_classes(names: tuple[str, ...], noted: set[str]) -> None:
    assert {
        f"{kind}: {line}".partition(" (1)" + (":" if "missing" in kind else " differ"))[0]
        for kind, line in doubtful_name_findings(dict.fromkeys(names, 1))
    } == noted


def test_two_spellings_of_a_class_are_noted_wherever_classes_are(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    labels = ["Benign", "benign", "malign", "benign", "malign", "None"]
    for n in range(6):
        photo(tmp_path / "a" / f"{n}.png")
        photo(tmp_path / "b" / labels[n] / f"{n}.png")
    path = table(tmp_path / "a", "image,label", [f"{n}.png,{label}" for n, label in enumerate(labels)])
    told = import_set("csv", path, tmp_path / "lists")
    alike, empty = "class in two spellings", "class that looks like a missing value"
    assert any(note.startswith(f"{alike}: 'Benign' (1) and 'benign' (2)") for note in told["notes"])
    assert any(note.startswith(f"{empty}: 'None' (1)") for note in told["notes"])
    for place in (tmp_path / "lists", tmp_path / "b"):
        told_too = said(monkeypatch, capsys, "data", "check", place)
        assert f"1 x {alike}" in told_too
        assert f"1 x {empty}" in told_too


def test_masks_beside_pictures_that_are_not_read_are_no_class(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    drawn(tmp_path / "a" / "masks" / "0.png", 255)
    (tmp_path / "a" / "images").mkdir()
    (tmp_path / "a" / "images" / "0.webp").write_bytes(b"RIFF")
    for words in (("import", "own", tmp_path / "a", tmp_path / "out"), ("check", tmp_path / "a")):
        assert run(monkeypatch, "data", *words) == 2
        assert "masks in masks/, and in images/ .webp, which is not read" in capsys.readouterr().err


@pytest.mark.parametrize(("one", "other"), [("Train", "Test"), ("Training", "Testing"), ("trainset", "test_set")])
def test_folders_of_splits_are_known_in_any_usual_form(one: str, other: str, tmp_path: Path) -> None:
    """Of pictures in classes and of pictures with masks: a published test set is never trained on."""
    for folder in (one, other):
        for name in ("glioma", "none"):
            photo(tmp_path / "classes" / folder / name / f"{folder}.png")
        hospital(tmp_path / "masks" / folder, "images/{}.png", "masks/{}.png")
    for kind in ("classes", "masks"):
        import_set("own", tmp_path / kind, tmp_path / "out" / kind, Options())
        (found,) = (tmp_path / "out" / kind).glob("*/datalist.json")
        listed = json.loads(found.read_text())
        assert all(f"/{one}/" in entry["image"] for entry in [*listed["training"], *listed["validation"]])
        assert listed["test"]
        assert all(f"/{other}/" in entry["image"] for entry in listed["test"])


def test_two_folders_of_masks_are_not_chosen_from_silently(tmp_path: Path) -> None:
    for number in range(3):
        photo(tmp_path / "a" / "images" / f"{number}.png")
        for part in ("masks_cup", "masks_disc"):
            drawn(tmp_path / "a" / part / f"{number}.png", 255)
    with pytest.raises(DataError, match=r"choose: --mask-pattern 'masks_cup/\{\}' or --mask-pattern 'masks_disc/\{\}'"):
        import_set("own", tmp_path / "a", tmp_path / "out", Options())
    import_set("own", tmp_path / "a", tmp_path / "out", Options(mask_patterns=(parse("masks_disc/{}"),)))
    assert "masks_cup" not in (tmp_path / "out" / "a" / "datalist.json").read_text()
