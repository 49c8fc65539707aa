"""Which runs compare, which repeat another, and what a method is called."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from consilium.core.errors import ConfigError
from consilium.core.messages import Stage
from consilium.core.storage import save_state
from consilium.report.compare.comparability import MissingRun, check_one_tokenizer, group_comparable
from consilium.report.compare.score_statistics import ranks, scores_of
from consilium.report.run_record import RunRecord, read_finished_run
from tests.conftest import small_cells, small_text
from tests.report.runs import PRIVATE, Scores, change, group_of, make, read, study_runs


def test_methods_are_named_by_the_settings_in_which_they_differ(tmp_path: Path) -> None:
    a = make(tmp_path / "a", {"s": 0.5}, {"name": "fedprox", "mu": 0.1})
    b = make(tmp_path / "b", {"s": 0.5}, {"name": "fedprox", "mu": 1})
    c = make(tmp_path / "c", {"s": 0.5}, "fedit", adapter={"kind": "lora", "rank": 2, "alpha": 4})
    assert group_of(a, b, c).methods == ["fedprox, rank 4, mu 0.1", "fedprox, rank 4, mu 1", "fedit, rank 2"] or group_of(
        a, b, c
    ).methods == ["fedprox, mu 0.1, rank 4", "fedprox, mu 1, rank 4", "fedit, rank 2"]


def test_an_optional_section_makes_another_method(tmp_path: Path) -> None:
    plain, stepped = make(tmp_path / "a", {"s": 0.5}), make(tmp_path / "b", {"s": 0.9}, server={"optimizer": "momentum"})
    masked = make(tmp_path / "c", {"s": 0.7}, secure_aggregation={})
    group = group_of(plain, stepped, masked)
    assert len(set(group.methods)) == 3
    assert group.left == ()
    assert group.methods[0] == "fedit"
    assert "optimizer momentum" in group.methods[1]
    assert group.methods[2] == "fedit, colluders 1"


def test_the_same_job_twice_counts_once_and_is_named(tmp_path: Path) -> None:
    group = group_of(make(tmp_path / "a", {"s": 0.5}), make(tmp_path / "b", {"s": 0.9}))
    assert scores_of(group, Stage.GLOBAL, "accuracy").means("fedit") == [0.5]
    assert group.left == ("b: repeats a (same settings and seed), so it is not counted",)


@pytest.mark.parametrize(
    ("scores", "more", "reason"),
    [
        ({"s": 0.5}, {"n": 11}, "samples scored 11, in a 10"),
        ({"s": 0.5, "t": 0.5}, {}, "other sites than in a: t"),
        ({"s": 0.5}, {"task": {"name": "classification", "classes": ["x", "y"]}}, 'task.classes is ["x", "y"]'),
        ({"s": 0.5}, {"data": {"dataset": "other"}}, "data.dataset is other"),
    ],
)
def test_runs_that_do_not_compare_are_named_with_the_reason(tmp_path: Path, scores: Scores, more: Any, reason: str) -> None:
    a = make(tmp_path / "a", {"s": 0.5})
    b = make(tmp_path / "b", scores, "ffa_lora", n=more.pop("n", 10))
    config = yaml.safe_load((b / "job.yaml").read_text())
    (b / "job.yaml").write_text(yaml.safe_dump(config | more))
    groups, why = group_comparable(read(a, b))
    assert [group.methods for group in groups] == [["fedit"], ["ffa_lora"]]
    assert len(why) == 1
    assert why[0].startswith("b: ")
    assert reason in why[0]


def test_other_test_images_show_in_what_the_frozen_model_scores(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", {"s": 0.5}), make(tmp_path / "b", {"s": 0.5}, seed=1)
    change(b, "s", test__pretrained__accuracy=0.3)
    assert "another test split at s: the pretrained model's accuracy 0.3, in a 0.2" in group_comparable(read(a, b))[1][0]


def test_runs_on_other_data_do_not_compare_though_the_frozen_model_scores_alike(tmp_path: Path) -> None:
    runs = read(*(make(tmp_path / name, {"a": 0.5, "b": 0.6}, seed=seed) for seed, name in enumerate("xyz")))
    told = [replace(one, content={"a": "1", "b": b}) for one, b in zip(runs[:2], "23", strict=True)]
    groups, why = group_comparable([*told, runs[2]])
    assert [[run.name for run in group.runs.values()] for group in groups] == [["x", "z"], ["y"]]  # of z nobody knows
    assert why == ["y: its data at b are not those of x"]
    (tmp_path / "x" / "simulation.json").write_text('{"content": {"a": "1"}}')
    assert read_finished_run(tmp_path / "x").content == {"a": "1"}


def test_runs_from_other_frozen_weights_are_two_methods_wherever_the_files_lie(tmp_path: Path) -> None:
    def with_base(name: str, path: str, sha256: str, seed: int) -> Path:
        model = {"name": "clip", "variant": "tiny", "image_size": 64, "checkpoint": path}
        folder = make(tmp_path / name, {"a": 0.5}, seed=seed, model=model)
        save_state(folder / "server" / "state.safetensors", {}, {"checkpoint": sha256})
        return folder

    first = with_base("x", "/one/vit.safetensors", "a" * 64, 0)
    runs = read(first, with_base("y", "/two/vit.bin", "a" * 64, 1), with_base("z", "/one/vit.safetensors", "b" * 64, 0))
    groups, why = group_comparable(runs)
    assert (len(groups), why, groups[0].left) == (1, [], ())
    assert [*groups[0].runs] == [
        ("fedit, checkpoint vit.safetensors aaaaaaaa", "0"),
        ("fedit, checkpoint vit.safetensors aaaaaaaa", "1"),
        ("fedit, checkpoint vit.safetensors bbbbbbbb", "0"),
    ]


def test_a_run_without_its_servers_state_is_the_method_of_its_checkpoint(tmp_path: Path) -> None:
    model = {"name": "clip", "variant": "tiny", "image_size": 64, "checkpoint": "/one/vit.safetensors"}
    folders = [make(tmp_path / str(seed), {"a": 0.5}, seed=seed, model=model) for seed in range(2)]
    save_state(folders[0] / "server" / "state.safetensors", {}, {"checkpoint": "a" * 64})
    assert group_of(*folders).methods == ["fedit"]


def test_settings_that_differ_in_a_late_digit_are_two_methods(tmp_path: Path) -> None:
    training = small_cells("fedit").model_dump()["training"]
    rates = (0.003, 0.0030000003)
    folders = [make(tmp_path / str(rate), {"a": 0.5}, training=training | {"lr": rate}) for rate in rates]
    group = group_of(*folders)
    assert (group.methods, group.left) == (["fedit, lr 0.003", "fedit, lr 0.0030000003"], ())


def of_data(run: RunRecord, content: str, folder: str = "", **settings: Any) -> RunRecord:
    return replace(run, data=(folder, content), settings={**run.settings, **settings})


def test_cells_of_a_study_that_read_other_files_do_not_compare(tmp_path: Path) -> None:
    first, second = read(make(tmp_path / "a", {"s": 0.5}), make(tmp_path / "b", {"s": 0.6}, seed=1))
    few = {"data.most_training": 3}

    def why(one: RunRecord, other: RunRecord) -> list[str]:
        return group_comparable([one, other])[1]

    assert why(of_data(first, "old"), of_data(second, "new"))[0].startswith(
        "b: its sites' data or settings are not those of a;"
    )
    assert why(of_data(first, "old"), of_data(second, "old")) == []
    assert why(of_data(first, "old", "one"), of_data(second, "new", "two")) == []  # an axis of folders
    assert why(of_data(first, "all"), of_data(second, "3", **few)) == []  # an axis of images a site
    assert why(of_data(first, "3 of 0", **few), of_data(second, "3 of 1", **few)) == []  # each seed draws its own
    assert why(of_data(first, ""), of_data(second, "new")) == []  # a run of before there was such a record
    drawn = of_data(first, "3 of 0", **few), of_data(second, "3 of 1", **few)
    kept, renewed = (replace(one, whole=whole) for one, whole in zip(drawn, ("old set", "new set"), strict=True))
    assert why(kept, renewed)[0].startswith("b: its sites' data or settings are not those of a;")
    assert why(replace(drawn[0], whole="old set"), replace(drawn[1], whole="old set")) == []
    assert why(kept, drawn[1]) == []  # one of before it was noted
    assert why(kept, replace(of_data(second, "all"), whole="new set")) != []  # some of the old set against all of the new


def test_a_private_run_with_the_same_seed_is_a_repeat_too(tmp_path: Path) -> None:
    folders = [make(tmp_path / name, {"s": score}, privacy=PRIVATE) for name, score in (("a", 0.5), ("b", 0.7))]
    group = group_of(*folders)
    assert [run.name for run in group.runs.values()] == ["a"]
    assert group.left == ("b: repeats a (same settings and seed), so it is not counted",)


def test_a_study_names_methods_and_data_by_its_axes(tmp_path: Path) -> None:
    gone = [MissingRun({"method": "FLORA", "data": "hard", "rank": "4"}, 0, "failed: no memory")]
    groups, _ = group_comparable(study_runs(tmp_path), gone)
    assert {group.name: group.methods for group in groups} == {
        "easy": ["FEDIT", "FFA_LORA"],
        "hard": ["FEDIT", "FFA_LORA", "FLORA"],
    }
    table = scores_of(groups[1], Stage.GLOBAL, "accuracy")
    assert table.missing == {("FLORA", "0", "s"): "failed: no memory"}
    assert table.means("FLORA") == []
    assert ranks(table)[0] == {"FEDIT": 2.0, "FFA_LORA": 1.0}


def test_a_failed_cell_is_called_as_the_runs_of_its_labels_are(tmp_path: Path) -> None:
    runs = [read_finished_run(make(tmp_path / d, {"s": 0.5}, n=n), d, {"data": d}) for d, n in (("easy", 10), ("hard", 20))]
    groups, _ = group_comparable(runs, [MissingRun({"data": "hard"}, 1, "failed: no memory")])
    assert [(group.name, group.methods) for group in groups] == [("easy", ["fedit"]), ("hard", ["fedit"])]
    assert groups[1].absent == {("fedit", "1"): "failed: no memory"}


@pytest.mark.parametrize(
    ("evaluate", "other", "reason"),
    [
        ("loss", {"model.max_length": 32}, "b: model.max_length is 32, in a 128"),
        ("loss", {"model.checkpoint": "/models/other"}, "b: model.checkpoint is other, in a None"),
        ("exact", {"model.max_length": 32}, ""),
    ],
)
def test_losses_over_other_tokens_do_not_compare(evaluate: str, other: dict[str, Any], reason: str, tmp_path: Path) -> None:
    job, runs = small_text().model_dump(), []
    job["task"]["evaluate"] = evaluate
    for name, more in {"a": {}, "b": other}.items():
        folder = make(tmp_path / name, {"s": 0.5}, **{key: job[key] for key in ("model", "adapter", "task", "data")})
        (folder / "results.json").write_text(json.dumps({"s": {f"test/global/{evaluate}": 0.5, "test/global/n": 5.0}}))
        found = read_finished_run(folder, name)
        runs.append(replace(found, settings={**found.settings, **more}))
    groups, why = group_comparable(runs)
    assert why == ([reason] if reason else [])
    check_one_tokenizer(groups, "exact")
    if evaluate == "exact":
        with pytest.raises(ConfigError, match=r"^--metric: 'perplexity' counts tokens, and a and b cut texts"):
            check_one_tokenizer(groups, "perplexity")
    else:
        check_one_tokenizer(groups, "loss")
