"""Which cells a study has, what each job is, and what is refused before anything runs."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from consilium.config.site import Given
from consilium.core.errors import ConfigError
from consilium.study.definition import Cell, load, pick
from consilium.study.preflight import Planner
from tests.study.conftest import MakeStudy

METHODS = {"FedIT": None, "FFA": {"strategy": "ffa_lora"}}
SEEDS = {"training.seed": [1, 2]}


def cells_of(path: Path, **options: Any) -> list[Cell]:
    return load(path, **options).cells()


def test_cells_are_all_values_of_all_axes_as_jobs(study_file: MakeStudy, tmp_path: Path) -> None:
    found = cells_of(study_file(axes={"method": METHODS, "rank": {8: {"adapter.rank": 8, "adapter.alpha": 8}}, "seed": SEEDS}))
    assert [cell.labels for cell in found] == [
        {"method": method, "rank": "8", "seed": seed} for method in ("FedIT", "FFA") for seed in ("1", "2")
    ]
    assert found[3].overrides == ['strategy="ffa_lora"', "adapter.rank=8", "adapter.alpha=8", "training.seed=2"]
    job = found[3].load()
    assert (job.strategy.name, job.adapter.rank, job.training.seed, found[3].sites) == ("ffa_lora", 8, 2, "2")  # type: ignore[attr-defined]
    assert len({cell.folder for cell in found}) == 4
    assert found[0].folder == Path("runs/studies/tiny/cells") / found[0].id


def test_the_later_override_of_a_field_counts_and_comes_last(study_file: MakeStudy) -> None:
    """`set`, then the axes in order, then the smaller size: a section set there is not half of what an axis said."""
    path = study_file(
        set={"training.lr": 0.5, "model": {"name": "sam", "variant": "tiny", "image_size": 64}},
        axes={"side": {"128": {"model.image_size": 128}}},
        smoke={"set": {"model": {"name": "sam", "variant": "tiny", "image_size": 32}, "training.lr": 0.25}},
    )
    (full,), (smoke,) = cells_of(path), cells_of(path, size="smoke")
    assert (full.load().model.image_side, full.load().training.lr) == (128, 0.5)
    assert (smoke.load().model.image_side, smoke.load().training.lr) == (32, 0.25)
    assert smoke.folder.parts[:3] == ("runs", "studies", "tiny-smoke")


def test_cells_say_how_large_their_own_data_are(study_file: MakeStudy) -> None:
    """It is not a field of the job: equal jobs stay one cell, however large their data are said to be."""
    four = {"sites": 4, "training": 40}
    by_number = {"4": {"training.lr": 0.1, "counts": four}, "all": {"training.lr": 0.2}}
    told = cells_of(study_file(counts={"sites": 9, "training": 90}, axes={"clients": by_number}))
    assert [(cell.counts.sites, cell.counts.training) for cell in told if cell.counts] == [(4, 40), (9, 90)]
    silent = cells_of(study_file(axes={"clients": {"4": {"training.lr": 0.1}, "all": {"training.lr": 0.2}}}))
    assert [cell.id for cell in told] == [cell.id for cell in silent]
    assert silent[0].counts is None
    with pytest.raises(ConfigError, match=r"counts.*sites"):
        cells_of(study_file(axes={"clients": {"none": {"counts": {"sites": 0, "training": 1}}}}))


def test_what_is_left_out_says_why(study_file: MakeStudy) -> None:
    study = load(
        study_file(axes={"method": METHODS, "seed": SEEDS}, exclude=[{"when": {"method": "FFA", "seed": 2}, "reason": "no"}])
    )
    assert [cell.display_name for cell in study.cells()] == ["method=FedIT seed=1", "method=FedIT seed=2", "method=FFA seed=1"]
    assert study.excluded() == [({"method": "FFA", "seed": "2"}, "no")]


def test_only_takes_a_union_on_an_axis_and_all_axes_together(study_file: MakeStudy) -> None:
    study = load(study_file(axes={"method": METHODS, "seed": {"training.seed": [1, 2, 3]}}))
    found = pick(study, ["seed=1", "seed=3", "method=FFA"])
    assert [cell.display_name for cell in found] == ["method=FFA seed=1", "method=FFA seed=3"]
    with pytest.raises(ConfigError, match=r"--only: no axis 'sed'; there are method, seed \(did you mean 'seed'\?\)"):
        pick(study, ["sed=1"])
    with pytest.raises(ConfigError, match="--only: no value '4' on axis 'seed'; it has 1, 2, 3"):
        pick(study, ["seed=4"])
    with pytest.raises(ConfigError, match="'seed' is not AXIS=VALUE"):
        pick(study, ["seed"])


def test_a_changed_study_changes_only_the_cells_it_changed(study_file: MakeStudy) -> None:
    before = {cell.display_name: cell.id for cell in cells_of(study_file(axes={"method": METHODS}))}
    path = study_file(about="other words", axes={"method": METHODS | {"FFA": {"strategy": "ffa_lora", "training.lr": 0.125}}})
    after = {cell.display_name: cell.id for cell in cells_of(path)}
    assert before["method=FedIT"] == after["method=FedIT"]
    assert before["method=FFA"] != after["method=FFA"]
    longer = cells_of(study_file(set={"sites": 2, "training.rounds": 9}, axes={"method": METHODS}))
    more = cells_of(study_file(set={"sites": 3}, axes={"method": METHODS}))
    assert len({before["method=FedIT"], longer[0].id, more[0].id}) == 3


def test_a_cell_does_not_run_as_a_job_that_its_base_became_since(study_file: MakeStudy, tmp_path: Path) -> None:
    (cell,) = cells_of(study_file(axes={"seed": {"training.seed": [1]}}))
    assert cell.load().training.seed == 1
    base = tmp_path / "base" / "job.yaml"
    base.write_text(base.read_text().replace("local_steps: 1", "local_steps: 2"))
    with pytest.raises(ConfigError, match=r"base/job\.yaml: has changed since the study was read; run its command again"):
        cell.load()


def test_all_mistakes_are_told_at_once_by_axis_value(study_file: MakeStudy) -> None:
    path = study_file(
        axes={
            "method": METHODS | {"typo": {"strategy": "fedlt"}},
            "seed": SEEDS,
            "rank": {"4": {}, "0": {"adapter.rank": 0, "adapter.alpha": 4}},
        }
    )
    with pytest.raises(ConfigError) as told:
        cells_of(path)
    lines = str(told.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["rank=0", "method=typo"]
    assert "adapter.rank: 0: expected" in lines[0]
    assert "'fedlt'" in lines[1]
    assert "did you mean 'fedit'" in lines[1]
    assert all(f": {path}: " in line for line in lines)  # who wrote the value


def test_parts_that_do_not_fit_together_are_told_before_the_first_cell(study_file: MakeStudy, tmp_path: Path) -> None:
    study = load(study_file(axes={"method": METHODS | {"FLoRA": {"strategy": "fedsca"}}, "seed": SEEDS}))
    with pytest.raises(ConfigError, match=r"^method=FLoRA: .*"):
        Planner(Given(), tmp_path / "w").plan(study.cells())
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"axes": {"method": {"a": {}, "b": {"strategy": "fedit"}}}}, "method=a and method=b are the same job"),
        ({"axes": {"method": METHODS}, "exclude": [{"when": {"method": "X"}, "reason": "y"}]}, "no value 'X' on axis 'method'"),
        ({"axes": {"method": METHODS}, "smoke": {"only": {"metod": ["X"]}}}, "smoke: no axis 'metod'"),
        ({"axes": {"method": METHODS}, "published": [{"method": "Fedit", "dice": 0.5}]}, "did you mean 'FedIT'"),
        ({"axes": {"method": METHODS}, "published": [{"method": "FedIT", "dise": 0.5}]}, "(did you mean 'dice'?)"),
        ({"axes": {"method": METHODS}, "floor": {"dise": 0.5, "about": "x"}}, "floor: 'dise' is not a score of these cells"),
        (
            {"axes": {"method": METHODS}, "floor": {"dice": 0.5}},
            "floor: {'dice': 0.5}: expected metrics with numbers and `about`",
        ),
        ({"axes": {"method": METHODS}, "floor": {"dice": "0.5", "about": "x"}}, "expected metrics with numbers and `about`"),
        (
            {"axes": {"method": METHODS}, "published": [{"metod": "FedIT", "dice": 0.5}]},
            "published: metod: 'FedIT': no axis is called so (did you mean 'method'?)",
        ),
        ({"axes": {"method": METHODS}, "published": [{"dice": "0.5"}]}, "write one such as 0.5, without quotes"),
        *(
            ({"axes": {"method": METHODS}, "published": [{"dice": value}]}, "expected a text or a finite number, such as 0.5")
            for value in (True, math.nan, 10**400, None)
        ),
        ({"axes": {"method": METHODS}, "floor": {"dice": math.inf, "about": "x"}}, "expected a text or a finite number"),
        ({"axes": {"method": METHODS}, "published": [{"dice": 0, 5: None}]}, "5: None: expected a text"),
        ({"axes": {"method": METHODS}, "published": [{"dice": 0.5, "site": 1}]}, "'site' is not a score of these cells"),
        (
            {"axes": {"method": METHODS, "lr": {"training.lr": [0.1, 0.5]}}, "published": [{"methd": 5, "dice": 0.5}]},
            "'methd' is not a score of these cells",
        ),
        ({"axes": {"site": METHODS}}, "axes: 'site' is reserved: in `published` it names a hospital"),
        (
            {"axes": {"method": METHODS, "seed": SEEDS}, "published": [{"method": "FFA", "seed": 1, "dice": 0.5}]},
            "published: 'seed' is an axis of seeds, and published numbers are compared with means over seeds; leave it out",
        ),
        (
            {
                "axes": {"method": METHODS, "seed": SEEDS, "lr": {"training.lr": [0.5, 0.25]}},
                "published": [{"method": "FFA", "dice": 0.5}],
            },
            "published: method=FFA dice=0.5: fits several cells; say lr too",
        ),
        (
            {
                "axes": {"method": METHODS, "lr": {"training.lr": [0.5]}},
                "published": [
                    {"method": "FFA", "lr": 0.5, "site": "a", "dice": 0.5},
                    {"method": "FFA", "iou": 0.5, "dice": 0.75},
                    {"method": "FFA", "lr": 0.5, "dice": 0.5},
                ],
            },
            "published: method=FFA lr=0.5 dice=0.5: another row has 'dice' of the same cells; keep one of them",
        ),
        (
            {"axes": {"method": METHODS}, "published": [{"method": "FFA", "site": "site-1"}]},
            "published: {'method': 'FFA', 'site': 'site-1'}: has no number; give one, or take the row out",
        ),
        ({"axes": {"method": METHODS}, "set": {"sites": [1]}}, "sites: [1]: expected a number or text"),
        ({"axes": {"method": METHODS}, "set": {"sites": True}}, "sites: True: expected a number or text"),
        ({"axes": {"gate": {True: {}, False: {}}}}, "text or a number, not True; put it in quotes"),
        ({"axes": {"method": METHODS}, "base": "nowhere"}, "no job.yaml there"),
        ({"axes": {}}, "axes"),
        ({"axes": {"My axis": METHODS}}, "'My axis': expected a name of 1 to 40 small letters a to z, digits and _, with"),
        ({"axes": {"method": {"a/b": {}}}}, "'a/b': expected a name of 1 to 40 printable characters without = and , and /"),
        ({"axes": {"method": {"a" * 41: {}}}}, "expected a name of 1 to 40 printable characters without = and , and /"),
        ({"axes": {"method": METHODS}, "sed": 1}, "sed: unknown field"),
        # counted before they are made
        ({"axes": {f"axis_{i}": {"training.seed": list(range(1000))} for i in range(8)}}, f"axes: {1000**8} cells, over 10000"),
        *(
            ({"axes": {"seed": axis}}, f"'{name}' is there twice")
            for axis, name in (
                ({1: {"training.seed": 1}, "1": {"training.seed": 3}}, "1"),
                ({"training.seed": [1, "1"]}, "1"),
                ({"training.seed": [0, 0, 1]}, "0"),
            )
        ),
    ],
)
def test_what_a_study_may_not_say(sections: dict[str, Any], message: str, study_file: MakeStudy) -> None:
    with pytest.raises(ConfigError) as told:
        cells_of(study_file(**sections))
    assert message in str(told.value)


def test_a_size_that_a_study_lacks_and_a_study_that_is_not_there(study_file: MakeStudy) -> None:
    with pytest.raises(ConfigError, match="smoke: the study has no such section"):
        load(study_file(axes={"method": METHODS}), "smoke")
    with pytest.raises(ConfigError, match=r"nowhere: no such study; give a file, or a name in jobs/studies \(such as "):
        load(Path("nowhere"))


@pytest.mark.parametrize(
    ("study", "more", "first"),
    [
        ("quickstart_cells", {"task.scores.f1": "present"}, "0b73b1c93a4df583"),  # the defaults when their cells were run
        ("iat_table2", {"task.scores.grid": "resized"}, "8e34790da03320bf"),
    ],
)
def test_an_upgrade_runs_no_finished_cell_again(study: str, more: dict[str, str], first: str, tmp_path: Path) -> None:
    """A cell is known by its whole job: a new field leaves its default out of it (`exclude_if`), or days of a GPU run anew."""
    source = Path(__file__).parents[2] / "jobs/studies" / f"{study}.yaml"
    said = yaml.safe_load(source.read_text())
    said |= {"base": str((source.parent / said["base"]).resolve()), "set": said.get("set", {}) | more}
    (tmp_path / source.name).write_text(yaml.safe_dump(said, sort_keys=False))
    assert load(tmp_path / source.name).cells()[0].id == first


def test_a_study_of_ours_is_found_by_its_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [cell.labels for cell in load("quickstart", "smoke").cells()]
    monkeypatch.chdir(tmp_path)
    found = load("quickstart", "smoke")
    assert [cell.labels for cell in found.cells()] == names
    assert found.workspace == Path("runs/studies/quickstart-smoke")
    (tmp_path / "jobs/studies").mkdir(parents=True)  # one's own repository comes first
    with pytest.raises(ConfigError, match=r"no such study; give a file, or a name in jobs/studies \(none is here\)"):
        load("quickstart", "smoke")
