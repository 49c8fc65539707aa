"""A study that is changed after it ran: which cells are its own, and what still counts."""

import csv
import hashlib
import io
import json
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from consilium import strategies as package
from consilium.config.code_digest import strategy_code_digest
from consilium.config.site import Given
from consilium.core.errors import ConfigError
from consilium.report.run_record import LIST, cell_folder, orphaned_cells, save_cells, study_cells
from consilium.study.definition import Cell, Study, load
from consilium.study.preflight import Planned, Planner
from consilium.study.records import CellRecord, current_record
from consilium.study.runner import is_finished, run_cell, running_record as begun_record, swap_stored_run
from tests.conftest import run
from tests.recipes.conftest import write_distribution
from tests.report.pages import Page
from tests.report.runs import make
from tests.study.conftest import MakeStudy

strategies = Path(package.__file__).parent
SEEDS = {"training.seed": [0, 1]}
RATES = {"A": {"training.lr": 0.5}, "B": {"training.lr": 0.25}}


def begun(study: Study) -> Study:
    """Return a study as `study run` leaves it that was told to keep its cells."""
    save_cells(study.workspace, {cell.id: cell.labels for cell in study.cells()})
    return study


def done(cell: Cell, score: float, **more: Any) -> None:
    """Let a cell have run, with its labels as they are."""
    make(cell.folder, {"s": score}, seed=cell.load().training.seed, training=cell.load().training.model_dump())
    CellRecord("done", labels=cell.labels, overrides=tuple(cell.overrides), place=cell.place, folder="", **more).save(
        cell.folder
    )


def test_a_changed_study_is_reported_and_used_by_its_present_cells(
    study_file: MakeStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    w = tmp_path / "w"
    before = begun(load(study_file(axes={"method": RATES, "seed": SEEDS}), workspace=w))
    for cell, score in zip(before.cells(), (0.125, 0.125, 0.375, 0.375), strict=True):
        done(cell, score)
    changed = RATES | {"A": {"training.lr": 0.75}}
    after = begun(load(study_file(axes={"method": changed, "seed": SEEDS}), workspace=w))
    for cell in after.cells()[:2]:
        done(cell, 0.625)
    old, new = before.cells()[0], after.cells()[0]
    assert old.labels == new.labels
    assert cell_folder(w / "method=A,seed=0") == new.folder
    assert run(monkeypatch, "compare", after.path, "--workspace", w, "-o", w / "report.html") == 0
    page = (w / "report.html").read_text()
    assert "Comparison of 4 finished runs" in page
    assert "mean over sites: A 0.625; B 0.375." in page
    assert "repeats" not in page
    capsys.readouterr()
    assert run(monkeypatch, "study", "show", after.path, "--workspace", w) == 0
    said = capsys.readouterr().out
    folders = sorted(cell.folder for cell in before.cells()[:2])
    assert f"2 cells of an earlier form of this study: {folders[0]}, {folders[1]}" in said


def test_a_workspace_that_does_not_say_names_both_runs_of_one_name(study_file: MakeStudy, tmp_path: Path) -> None:
    (old,) = load(study_file(axes={"method": {"A": RATES["A"]}}), workspace=tmp_path / "w").cells()
    (new,) = load(study_file(axes={"method": {"A": RATES["B"]}}), workspace=tmp_path / "w").cells()
    done(old, 0.25)
    done(new, 0.75)
    first, second = sorted((old.id, new.id))
    told = f"method=A is the name of cells/{first} and cells/{second}; give the folder of one"
    with pytest.raises(ConfigError, match=told):
        cell_folder(tmp_path / "w/method=A")
    shutil.rmtree(old.folder)
    assert cell_folder(tmp_path / "w/method=A") == new.folder


def test_show_and_compare_name_the_cell_and_the_folder(
    study_file: MakeStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = study_file(axes={"method": RATES})
    assert run(monkeypatch, "compare", path, "--workspace", tmp_path / "w") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"in {tmp_path / 'w' / 'cells'} (of --workspace) no cell is done" in said


def test_cells_are_called_as_the_study_calls_them_now_and_in_its_order(study_file: MakeStudy, tmp_path: Path) -> None:
    first = begun(load(study_file(axes={"method": RATES}), workspace=tmp_path / "w"))
    for cell in first.cells():
        done(cell, 0.5)
    begun(load(study_file(axes={"rate": {"quarter": RATES["B"], "half": RATES["A"]}}), workspace=tmp_path / "w"))
    assert [cell.name for cell in study_cells(tmp_path / "w")] == ["rate=quarter", "rate=half"]


def test_a_damaged_list_of_cells_is_as_none(study_file: MakeStudy, tmp_path: Path) -> None:
    study = begun(load(study_file(axes={"method": RATES}), workspace=tmp_path / "w"))
    for cell in study.cells():
        done(cell, 0.5)
    (left,) = orphaned_cells(study.workspace, [study.cells()[0].id])
    assert left == study.cells()[1].folder
    for damaged in ("{", "[]", '{"a": 3}', '{"a": {"b": 1}}'):
        (study.workspace / LIST).write_text(damaged)
        assert {cell.name for cell in study_cells(study.workspace)} == {"method=A", "method=B"}


def test_a_run_keeps_all_cells_of_its_study(study_file: MakeStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, w = study_file(axes={"method": RATES, "draw": SEEDS}), tmp_path / "w"
    monkeypatch.setattr("consilium.cli.study.run_study", lambda cells, *_: {one.cell.id: CellRecord("done") for one in cells})
    assert run(monkeypatch, "study", "run", path, "--workspace", w, "--only", "method=A") == 0
    cells = {cell.id: cell.labels for cell in load(path, workspace=w).cells()}
    assert json.loads((w / LIST).read_text()) == cells
    assert len(cells) == 4


def test_a_study_that_did_not_run_says_how_and_a_run_of_it_is_compared_by_its_values(
    study_file: MakeStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = study_file(axes={"method": RATES}, set={"data": {}}, smoke={"set": {"training.rounds": 2}})
    path, w = path.rename(path.with_name("my study.yaml")), tmp_path / "my w"
    assert run(monkeypatch, "compare", path, "--smoke", "--workspace", w) == 2
    command = f"consilium study run '{path}' --smoke --workspace '{w}' --data FOLDER"
    assert capsys.readouterr().err.endswith(f"no cell is done; run it: {command}\n")
    begun(load(path, workspace=w))
    for cell, score in zip(load(path, workspace=w).cells(), (0.25, 0.75), strict=True):
        done(cell, score)
    assert run(monkeypatch, "compare", w / "method=A", w / "method=B", "--format", "csv") == 0
    rows = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert [row["value"] for row in rows if (row["model"], row["metric"]) == ("global", "accuracy")] == ["0.25", "0.75"]
    assert run(monkeypatch, "compare", w / "method=C") == 2
    assert "one of: method=A, method=B" in capsys.readouterr().err


def test_compare_without_the_option_of_a_size_names_it(
    study_file: MakeStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = study_file(axes={"method": RATES}, small={"set": {"training.rounds": 2}})
    done(load(path, "small").cells()[0], 0.5)
    assert run(monkeypatch, "compare", path) == 2
    assert capsys.readouterr().err.endswith("; for the runs of --small add --small\n")
    assert run(monkeypatch, "compare", path, "--small") == 0


PLUGIN = """from dataclasses import dataclass
from typing import ClassVar
from consilium.strategies.fedit import FedIT

@dataclass(frozen=True)
class Mine(FedIT):
    name: ClassVar[str] = "mine"
"""


def test_cells_done_by_other_code_stay_are_named_and_run_anew_only_if_asked(
    study_file: MakeStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_distribution(tmp_path / "packages", "changing_strategy", PLUGIN, "strategies", "mine", "Mine")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    path, w = study_file(axes={"method": {"FedIT": None, "mine": {"strategy": "mine"}}}), tmp_path / "w"
    study = load(path, workspace=w)

    def planned(rerun: bool = False) -> tuple[Planned, Planned]:
        built_in, own = Planner(Given(), w, rerun).plan(study.cells())
        return built_in, own

    first = planned()
    for one in first:
        done(one.cell, 0.5, data=one.data, code=one.code)
    assert [is_finished(one) for one in planned(rerun=True)] == [True, True]
    source = tmp_path / "packages/changing_strategy.py"
    source.write_text(PLUGIN + "    mu: float = 0.5\n")
    assert [is_finished(one) for one in planned()] == [True, True]
    assert [is_finished(one) for one in planned(rerun=True)] == [True, False]
    told = "1 cell done by code that has changed since: method=mine; `consilium study run --again` runs them anew"
    for words in (["show", path], ["run", path]):
        assert run(monkeypatch, "study", *words, "--workspace", w) == 0
        assert told in " ".join(capsys.readouterr().out.split())
    assert run(monkeypatch, "study", "show", path, "--workspace", w, "--format", "json") == 0
    assert [cell["outdated"] for cell in json.loads(capsys.readouterr().out)["cells"]] == [False, True]
    own = planned(rerun=True)[1]
    swap_stored_run(own)
    assert (begun_record(own).state, begun_record(own).code, own.code != first[1].code) == ("running", own.code, True)
    aside = w / "set-aside" / f"{own.cell.id}-{own.data}-{first[1].code}"
    assert (aside / "results.json").is_file()
    source.write_text(PLUGIN)
    done(own.cell, 0.75, data=own.data, code=own.code)
    assert run_cell(planned(rerun=True)[1], print).seconds == 0  # done as it is, and not run again
    assert current_record(own.cell.folder).code == first[1].code
    assert json.loads((own.cell.folder / "results.json").read_text())["s"]["test/global/accuracy"] == 0.5  # it came back
    (w / "set-aside" / f"{own.cell.id}-{own.data}-{first[1].code}").mkdir()
    source.write_text(PLUGIN + "    mu: float = 0.25\n")
    CellRecord("done", data=own.data, code=first[1].code).save(own.cell.folder)
    swap_stored_run(planned(rerun=True)[1])  # the place is taken: both are kept
    assert (w / "set-aside" / f"{own.cell.id}-{own.data}-{first[1].code}-former" / "results.json").is_file()
    record = current_record(first[0].cell.folder)
    assert not replace(record, code="").is_outdated("any")  # of a version that noted none


class Gone(BaseException):
    """What ends a process."""


@pytest.mark.parametrize(("end", "state"), [(ZeroDivisionError, "failed"), (Gone, "interrupted")])
def test_a_part_by_other_code_is_set_aside_and_begins_anew_unasked(
    end: type[BaseException],
    state: str,
    study_file: MakeStudy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, w = study_file(axes={"seed": {"training.seed": [3]}}), tmp_path / "w"

    def planned(code: str) -> Planned:
        for place in ("consilium.config.code_digest.strategy_code_digest", "consilium.study.preflight.strategy_code_digest"):
            monkeypatch.setattr(place, lambda config: code)
        return Planner(Given(), w).plan(load(path, workspace=w).cells())[0]

    def simulate(planned: Planned, observer: object) -> None:
        with (planned.cell.folder / "metrics.jsonl").open("a") as log:
            log.write(planned.code)
        raise end

    monkeypatch.setattr("consilium.study.runner.simulate_cell", simulate)
    first = planned("old")
    for _ in range(2):  # by the same code it goes on
        with suppress(Gone):
            run_cell(first, print)
    assert (current_record(first.cell.folder).state, (w / "set-aside").exists()) == (state, False)
    planned("new")
    told = "1 cell begun by code that has changed since: seed=3; `consilium study run` sets that aside and begins anew"
    assert run(monkeypatch, "study", "show", path, "--workspace", w) == 0
    assert told in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr("consilium.cli.study.run_study", lambda cells, *_: {one.cell.id: run_cell(one, print) for one in cells})
    with suppress(Gone):
        assert run(monkeypatch, "study", "run", path, "--workspace", w) == 1
    assert told in " ".join(capsys.readouterr().out.split())
    assert (w / "set-aside" / f"{first.cell.id}-{first.data}-old" / "metrics.jsonl").read_text() == "oldold"
    assert (first.cell.folder / "metrics.jsonl").read_text() == current_record(first.cell.folder).code == "new"


def test_the_code_of_an_algorithm_is_its_files_and_those_of_its_bases_alone(study_file: MakeStudy, tmp_path: Path) -> None:
    axes = {"method": {"FedIT": None, "FedProx": {"strategy": "fedprox"}, "small": {"strategy": "fedprox", "training.lr": 1}}}
    average, prox, other = (
        strategy_code_digest(cell.load()) for cell in load(study_file(axes=axes), workspace=tmp_path).cells()
    )
    assert average != prox == other
    names = ("fedit", "fedprox", "strategy")
    files = {f"consilium.strategies.{name}": (strategies / f"{name}.py").read_bytes() for name in names}
    wanted = b"\0".join(name.encode() + text for name, text in files.items())
    assert prox == hashlib.sha256(wanted).hexdigest()[:16]


def test_an_axis_of_seeds_of_any_name_is_no_method_on_the_page(
    study_file: MakeStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Means over two seeds by method: 0.25 and 0.75. A name is text, a failed cell is named, and no patient is shown."""
    axes = {"method": RATES | {"<script>": {"training.lr": 0.125}}, "draw": SEEDS}
    study = load(study_file(axes=axes), workspace=tmp_path / "w")
    for cell, score in zip(study.cells(), (0.125, 0.375, 0.625, 0.875), strict=False):
        done(cell, score)
    CellRecord("failed", "no memory").save(study.cells()[4].folder)
    assert run(monkeypatch, "compare", study.path, "--workspace", tmp_path / "w", "-o", tmp_path / "study.html") == 0
    page = Page((tmp_path / "study.html").read_text())
    assert "mean over sites: A 0.250; B 0.750." in page.source
    assert "Comparison of 4 finished runs" in page.text
    for told in ("<script>", "failed: no memory"):
        assert told in page.text
    assert page.of("script", "img") == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
