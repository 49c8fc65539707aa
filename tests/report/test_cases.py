"""What a site keeps of its final evaluation: which units are picked, what is written, and that nothing here costs a score."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from consilium.core.errors import DataError
from consilium.core.messages import Stage
from consilium.report.page.html import plan_statement
from consilium.report.page.site_section import read_cases
from consilium.report.predictions import Closing, draw_outlines, pick
from consilium.tasks.base import Answered, Classified, Segmented, UnitScores

NAN = math.nan


def scored(*values: float, lower: bool = False) -> UnitScores:
    names = tuple(f"{number}.png" for number in range(len(values)))
    return UnitScores("Dice", lower, names, values, tuple(range(len(values))))


@pytest.mark.parametrize(
    ("values", "lower", "wanted"),
    [
        ((0.1, 0.9, 0.5, 0.7, 0.3), False, {"best": 1, "median": 2, "worst": 0}),
        ((0.1, 0.9, 0.5, 0.7, 0.3), True, {"best": 0, "median": 2, "worst": 1}),
        ((NAN, 0.2, 0.4), False, {"best": 2, "worst": 1}),
        ((NAN, 0.2), False, {"best": 1}),
        ((NAN, NAN), False, {}),
        ((), False, {}),
        ((1.0, 1.0, 1.0, 1.0), False, {"best": 0, "median": 2, "worst": 3}),
    ],
)
def test_best_median_and_worst_are_picked_among_what_has_a_score(
    values: tuple[float, ...], lower: bool, wanted: dict[str, int]
) -> None:
    assert pick(scored(*values, lower=lower)) == wanted


class Pretended:
    """A task whose units are scored beforehand, and which shows black pictures."""

    def __init__(self, found: UnitScores | None, shown: Any = None) -> None:
        self.scored, self.asked, self._shown = found, list[list[int]](), shown

    def examples(self, model: object, split: str) -> None:
        return None

    def show(self, model: object, split: str, indices: list[int]) -> Any:
        self.asked.append(list(indices))
        return self._shown(len(indices)) if self._shown else masks(len(indices))


def masks(count: int) -> Segmented:
    found = torch.zeros(count, 1, 8, 8, dtype=torch.bool)
    found[:, :, 2:6, 2:6] = True
    return Segmented(torch.zeros(count, 3, 8, 8, dtype=torch.uint8), found, found, torch.ones(count), ("disc",))


def closing(task: Any, *stages: Stage) -> Closing:
    found = Closing()
    for stage in stages:
        found.collect_predictions(stage, task, SimpleNamespace(), "test")
    return found


def write(found: Closing, folder: Path) -> list[str]:
    return found.write(folder, {"site": "here"}, lambda: None)


def test_all_models_are_shown_on_the_units_that_the_first_one_chose(tmp_path: Path) -> None:
    task = Pretended(scored(0.5, 0.9, 0.1, NAN))
    found = closing(task, Stage.PERSONALIZED)
    task.scored = scored(0.9, 0.1, 0.5, NAN)
    found.collect_predictions(Stage.GLOBAL, task, SimpleNamespace(), "test")
    assert task.asked == [[1, 0, 2]] * 2
    assert write(found, tmp_path) == []
    kept = json.loads((tmp_path / "cases.json").read_text())
    assert kept["by"] == "personalized"
    assert kept["values"] == {"personalized": [0.5, 0.9, 0.1, None], "global": [0.9, 0.1, 0.5, None]}
    assert [(case["which"], case["unit"]) for case in kept["cases"]] == [("best", 1), ("median", 0), ("worst", 2)]
    files = {path.name for path in (tmp_path / "cases").iterdir()}
    assert files == set(kept["pictures"])
    assert files == {
        f"{w}-{s}.jpg" for w in ("best", "median", "worst") for s in ("picture", "reference", "global", "personalized")
    }
    assert {path.stat().st_mode & 0o777 for path in [tmp_path / "cases.json", *(tmp_path / "cases").iterdir()]} == {0o600}


def test_pictures_of_an_evaluation_before_are_gone(tmp_path: Path) -> None:
    write(closing(Pretended(scored(0.5, 0.9, 0.1)), Stage.GLOBAL), tmp_path)
    write(closing(Pretended(scored(0.5)), Stage.GLOBAL), tmp_path)
    assert {path.name.partition("-")[0] for path in (tmp_path / "cases").iterdir()} == {"best"}


def test_what_cannot_be_shown_or_written_is_told_by_its_kind_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(count: int) -> None:
        raise DataError("/ward/Jane Doe/1.png: is cut off")

    found = closing(Pretended(scored(0.5), broken), Stage.GLOBAL)
    assert write(found, tmp_path) == ["cases.json: DataError"]  # an event, which many read
    assert "cases.json: DataError: /ward/Jane Doe/1.png: is cut off" in caplog.text
    assert json.loads((tmp_path / "cases.json").read_text())["values"] == {"global": [0.5]}  # the scores are there all the same
    (tmp_path / "file").write_text("")
    problems = write(closing(Pretended(scored(0.5)), Stage.GLOBAL), tmp_path / "file")
    assert len(problems) == 1
    assert problems[0].startswith("cases.json: ")


def test_a_model_that_was_scored_on_other_units_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = Pretended(scored(0.5, 0.6))
    found = closing(task, Stage.GLOBAL)
    task.scored = scored(0.5)
    found.collect_predictions(Stage.PRETRAINED, task, SimpleNamespace(), "test")
    assert write(found, tmp_path) == ["cases.json: ValueError"]
    assert "the pretrained model was scored on other samples" in caplog.text
    assert list(json.loads((tmp_path / "cases.json").read_text())["values"]) == ["global"]


def test_a_task_that_keeps_no_units_leaves_no_file(tmp_path: Path) -> None:
    assert write(closing(SimpleNamespace(examples=lambda model, split: None), Stage.GLOBAL), tmp_path) == []
    assert write(closing(Pretended(None), Stage.GLOBAL), tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_classes_and_answers_are_told_in_words(tmp_path: Path) -> None:
    def classes(count: int) -> Classified:
        pictures, names = torch.zeros(count, 3, 8, 8, dtype=torch.uint8), ("a", "b", "c", "d", "e", "f")
        return Classified(pictures, torch.tensor([5] * count), torch.tensor([[0.3, 0.25, 0.2, 0.1, 0.1, 0.05]] * count), names)

    write(closing(Pretended(scored(0.05), classes), Stage.GLOBAL), tmp_path / "classes")
    (case,) = json.loads((tmp_path / "classes/cases.json").read_text())["cases"]
    assert case["reference"] == "f"
    assert case["said"]["global"][0] == ["a", 0.3]
    assert case["said"]["global"][-1] == ["f", 0.05]  # the true class too, though five others are likelier
    write(
        closing(Pretended(scored(0.5), lambda n: Answered(("ask",) * n, ("true",) * n, ("said",) * n)), Stage.GLOBAL),
        tmp_path / "t",
    )
    (case,) = json.loads((tmp_path / "t/cases.json").read_text())["cases"]
    assert case == {"which": "best", "unit": 0, "said": {"global": "said"}, "prompt": "ask", "reference": "true"}
    assert not (tmp_path / "t/cases").exists()


def test_a_references_outline_is_white_on_dark_and_dark_on_white() -> None:
    mask = torch.zeros(1, 16, 16, dtype=torch.bool)
    mask[:, 4:12, 4:12] = True
    for ground in (0, 255):
        drawn = draw_outlines(Image.new("RGB", (64, 64), (ground,) * 3), mask).convert("L")
        edge = [drawn.getpixel((x, 32)) for x in range(12, 21)]
        assert max(edge) - min(edge) > 100
        assert {drawn.getpixel((32, 32)), drawn.getpixel((4, 32))} == {ground}


def test_a_loss_of_nan_and_no_bound_on_epsilon_lose_no_cases(tmp_path: Path) -> None:
    about = {"metrics": {"test/global/loss": NAN}, "privacy": {"epsilon": {"1e-05": math.inf}}}
    assert closing(Pretended(scored(0.5)), Stage.GLOBAL).write(tmp_path, about, lambda: None) == []
    found = read_cases(tmp_path)
    assert found is not None
    assert math.isnan(found.metrics["test/global/loss"])
    assert found.privacy is not None
    assert ("epsilon at delta 1e-05", "no bound") in plan_statement(found.privacy)[1]
