"""Pictures that are asked about together: as if each were asked alone, and none pays for another."""

import csv
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, DataError
from consilium.data.datalist import DataList
from consilium.use import predict as predicting, predictor
from consilium.use.model import TrainedModel
from consilium.use.predict import Outcome, OutputOptions, predict
from consilium.use.predictor import Prediction, Predictor, Prompts, answer_inputs, find_inputs
from tests.conftest import run, small_text
from tests.models.folders import config_of, save_folder
from tests.tasks.test_conversations import CHATS, NO_PLACE, REFUSING, speaking
from tests.use.handing import CELLS, FUNDUS, HERE, trained
from tests.use.test_export import kept
from tests.use.test_predict import noise


def opened(config: JobConfig) -> TrainedModel:
    """Return a model whose adapter says something; where it came from is not asked."""
    return TrainedModel(config, trained(config).eval(), Path(), None, None, HERE)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def fundus() -> TrainedModel:
    return opened(FUNDUS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return five pictures of different sizes, a broken one among them, and a volume of three planes in their midst."""
    found = tmp_path_factory.mktemp("in")
    for number, size in enumerate([(40, 30, 3), (64, 64, 3), (33, 90, 3), (70, 20, 3), (50, 51, 3)]):
        Image.fromarray(noise(size, number)).save(found / f"{number}.png")
    (found / "0b.png").write_bytes(b"\x89PNG")
    nibabel.save(nibabel.Nifti1Image(noise((40, 30, 3)).astype(np.int16), np.eye(4)), found / "3b.nii")
    return found


@contextmanager
def calls(model: Any) -> Iterator[list[int]]:
    """Yield how many pictures each call of the model has."""
    sizes: list[int] = []
    handle = model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    yield sizes
    handle.remove()


def predicted(model: TrainedModel, folder: Path, out: Path, batch: int, prompts: Prompts | None = None) -> Outcome:
    inputs = find_inputs(folder, False, out)
    return predict(Predictor(model, batch, prompts), inputs, OutputOptions(out, probabilities=True), lambda one: None)


def pages(path: Path) -> np.ndarray:
    """Return the pages of a TIFF, or the voxels of a volume."""
    if path.suffix != ".tif":
        return np.asarray(nibabel.load(path).dataobj)
    with Image.open(path) as file:
        return np.stack([np.asarray(file) for page in range(file.n_frames) if file.seek(page) is None])


def test_pictures_together_get_the_masks_that_each_gets_alone(fundus: TrainedModel, folder: Path, tmp_path: Path) -> None:
    with calls(fundus.model) as sizes:
        alone, together = (predicted(fundus, folder, tmp_path / str(batch), batch) for batch in (1, 3))
    assert sizes == [1] * 8 + [1, 3, 3, 1]  # 0, the broken picture, 1 2 3, the volume's planes, 4
    assert alone == together
    assert together.written == ["0.png", "1.png", "2.png", "3.png", "3b.nii", "4.png"]
    ((bad, why),) = together.bad
    assert bad == "0b.png"
    assert "0b.png" in why
    for one in sorted((tmp_path / "1").iterdir()):
        other = tmp_path / "3" / one.name
        if "probabilities" in one.name:
            assert pages(one) == pytest.approx(pages(other), abs=1e-5)
        else:
            assert one.read_bytes() == other.read_bytes()
    assert all(pages(path).std() > 0 for path in (tmp_path / "3").glob("*_probabilities.tif"))


@pytest.fixture(scope="module")
def cells() -> TrainedModel:
    return opened(CELLS)


def test_no_name_is_a_formula_in_the_table(cells: TrainedModel, tmp_path: Path) -> None:
    task = CELLS.task.model_dump() | {"classes": ["=1+1", "+b", "-c", "@d", "=HYPERLINK(0)"]}
    model = replace(cells, config=JobConfig.model_validate(CELLS.model_dump() | {"task": task, "data": {}}))
    Image.fromarray(noise((40, 30, 3))).save(tmp_path / "=2.png")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    found = predicted(model, tmp_path, tmp_path / "out", 1)
    assert [name for name, why in found.bad] == ["gone.png"]
    with open(tmp_path / "out/classes.csv", newline="") as file:
        heading, row = csv.reader(file)
    assert (row[0], row[2][:1], row[2][1:] in task["classes"]) == ("'=2.png", "'", True)
    assert all(name[:2] == "p(" for name in heading[4:])


def test_classes_together_are_those_of_each_alone(cells: TrainedModel, folder: Path, tmp_path: Path) -> None:
    model = cells
    with calls(model.model) as sizes:
        found = [predicted(model, folder, tmp_path / str(batch), batch) for batch in (1, 4)]
    assert sizes == [1] * 8 + [1, 3, 3, 1]
    assert found[0] == found[1]
    lines = [(tmp_path / batch / "classes.csv").read_text().splitlines() for batch in ("1", "4")]
    for one, other in zip(*lines, strict=True):
        assert one.split(",")[:3] == other.split(",")[:3]
        if not one.startswith("image"):
            numbers = [[float(value) for value in line.split(",")[3:]] for line in (one, other)]
            assert numbers[0] == pytest.approx(numbers[1], abs=2e-6)  # six digits are written


def test_a_classified_volume_keeps_the_pictures_of_one_call(cells: TrainedModel, tmp_path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(noise((40, 30, 6)).astype(np.int16), np.eye(4)), tmp_path / "a.nii")
    alive = list[int]()
    handle = cells.model.register_forward_pre_hook(
        lambda *_: alive.append(sum(type(one) is Prediction for one in gc.get_objects()))
    )
    predicted(cells, tmp_path, tmp_path / "out", 1)
    handle.remove()
    assert len(alive) == 6
    assert max(alive) - alive[0] <= 2  # a plane's raw answer, and its classes


def test_prompts_of_different_number_go_into_one_call(folder: Path, tmp_path: Path) -> None:
    raw = FUNDUS.model_dump()
    model = opened(JobConfig.model_validate(raw | {"task": raw["task"] | {"prompt": "box"}}))
    prompts = {(name, None, "disc"): (2.0, 3.0, 18.0, 25.0) for name in ("0.png", "1.png", "3.png")}
    prompts |= {("1.png", None, "cup"): (5.0, 5.0, 20.0, 20.0), ("4.png", None, "cup"): (51.0, 3.0, 60.0, 9.0)}
    with calls(model.model) as sizes:
        alone, together = (predicted(model, folder, tmp_path / str(batch), batch, prompts) for batch in (1, 8))
    assert sizes == [1, 1, 1, 1, 1, 1]
    assert alone == together
    assert together.written == ["0.png", "1.png", "3.png"]  # no box names 2.png, and 4.png's lies outside
    for name in ("0", "1", "3"):
        found = [pages(tmp_path / batch / f"{name}_probabilities.tif") for batch in ("1", "8")]
        assert found[0] == pytest.approx(found[1], abs=1e-5)
        assert found[1][1].any() == (name == "1")  # where no box is of the cup, it was not asked for


def test_an_answer_that_is_no_number_costs_its_picture_alone(fundus: TrainedModel, folder: Path, tmp_path: Path) -> None:
    def spoil(model: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
        calls.append(len(logits))
        if calls == [1, 3]:
            logits[1, 0, 0, 0] = float("nan")
        return logits

    calls = list[int]()

    handle = fundus.model.register_forward_hook(spoil)
    found = predicted(fundus, folder, tmp_path, 4)
    handle.remove()
    assert found.written == ["0.png", "1.png", "3.png", "3b.nii", "4.png"]
    assert [name for name, why in found.bad] == ["0b.png", "2.png"]
    assert "the model answers with NaN or Inf" in found.bad[1][1]


def test_no_more_waits_than_the_batch_and_the_memory_allow(
    fundus: TrainedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [one for one in find_inputs(folder, False, folder / "out") if one.name[1:] == ".png"]
    monkeypatch.setattr(predictor, "MOST_PIXELS", 64 * 64 + 40 * 30)
    with calls(fundus.model) as sizes:
        found = [(one.name, [part.image.shape for part in parts]) for one, parts in answer_inputs(Predictor(fundus, 8), inputs)]
    assert sizes == [2, 2, 1]
    assert found[2] == ("2.png", [(33, 90, 3)])
    given = iter(inputs)
    next(answer_inputs(Predictor(fundus, 2), given))  # type: ignore[arg-type]
    assert next(given).name == "3.png"  # of a folder without end no more is read


def test_too_many_for_the_memory_name_the_option(fundus: TrainedModel, folder: Path, tmp_path: Path) -> None:
    def fail(model: Any, args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    handle = fundus.model.register_forward_pre_hook(fail)
    with pytest.raises(ConfigError, match=r"^--batch: 1: do not fit into the memory of cpu; give a smaller number"):
        predicted(fundus, folder, tmp_path, 3)
    handle.remove()


def test_a_device_that_is_not_here_names_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    folder = kept(tmp_path / "kept", FUNDUS)
    for device, said in (("cuda:7", "the last CUDA device here is cuda:1"), ("cuda:256", "cuda:1")):
        assert run(monkeypatch, "predict", folder, tmp_path, "-o", tmp_path / "out", "--device", device) == 2
        told = capsys.readouterr().err
        assert f"--device: {device!r}: " in told
        assert said in told
        assert "site.yaml" not in told


def test_records_are_answered_as_each_alone_in_files_of_their_names(tmp_path: Path) -> None:
    model, given = opened(small_text()), tmp_path / "in"
    given.mkdir()
    for number, count in enumerate((2, 1, 3, 5, 0)):
        lines = [json.dumps({"input": f"Ward {number}, patient {n}, fever."}) + "\n" for n in range(count)]
        (given / f"{number}.jsonl").write_text("".join(lines))
    (given / "1b.jsonl").write_text('{"input": "a"}\nno record\n{"input": "\\ud800"}\n')
    (given / "2b.jsonl").write_bytes(b"\xff")
    sizes, generate = list[int](), model.model.generate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.model, "generate", lambda **given: sizes.append(len(given["input_ids"])) or generate(**given))
        found = [
            predict(
                Predictor(model, batch),
                find_inputs(given, True, tmp_path),
                OutputOptions(tmp_path / str(batch)),
                lambda one: None,
            )
            for batch in (1, 4)
        ]
    assert sizes == [1] * 12 + [2, 1, 1, 3, 4, 1]  # a call has records of one file
    assert found[0] == found[1]
    assert found[1].written == ["0.jsonl", "1.jsonl", "1b.jsonl", "2.jsonl", "3.jsonl", "4.jsonl"]
    assert [name for name, why in found[1].bad] == ["1b.jsonl", "1b.jsonl", "2b.jsonl"]
    for name in found[1].written:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "4" / name).read_bytes()
    said = [json.loads(line) for line in (tmp_path / "4/3.jsonl").read_text().splitlines()]
    assert [(row["record"], row["input"]) for row in said][4] == ("3.jsonl:5", "Ward 3, patient 4, fever.")


def test_a_model_of_preferences_answers_records_with_one_answer_two_or_none(tmp_path: Path) -> None:
    """As the same model does that learned answers."""
    (tmp_path / "a.jsonl").write_text('{"instruction": "Fever?"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "Fever?", "chosen": "Rest.", "rejected": "Run."}\n')
    (tmp_path / "c.jsonl").write_text('{"prompt": "Fever?", "completion": "Rest."}\n')
    said, model = list[Any](), opened(small_text())
    for learn in ("answer", "preference"):
        task = {"name": "language", "learn": learn, "max_new_tokens": 8}
        own = replace(model, config=JobConfig.model_validate(small_text().model_dump() | {"task": task}))
        for one in find_inputs(tmp_path, True, tmp_path / "out"):
            (row,) = predicting.answers(own, one, 8)
            assert isinstance(row, dict)
            said.append((row["instruction"], row["answer"]))
    assert len(said) == 6
    assert set(said) == {("Fever?", said[0][1])}


@pytest.mark.parametrize(("prompt", "told"), NO_PLACE.items())
def test_a_record_that_the_prompt_has_no_place_for_costs_no_other(prompt: str, told: dict[int, str], tmp_path: Path) -> None:
    tokenizer = speaking(REFUSING)
    base = save_folder(tmp_path / "base", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(base)
    raw = small_text().model_dump()
    raw["model"] |= {"variant": "folder", "checkpoint": str(base), "config": config_of(base)}
    raw["task"] = {"name": "language", "prompt": prompt, "max_new_tokens": 4}
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(record) + "\n" for record in CHATS))
    wanted, model = OutputOptions(tmp_path / "out"), opened(JobConfig.model_validate(raw))
    inputs = find_inputs(tmp_path / "new.jsonl", True, tmp_path / "out")
    found = predict(Predictor(model, 4), inputs, wanted, lambda one: None)
    for (_, why), (number, reason) in zip(found.bad, told.items(), strict=True):
        assert f"new.jsonl:{number}: " in why
        assert reason in why
    said = [json.loads(line)["record"] for line in (tmp_path / "out/new.jsonl").read_text().splitlines()]
    assert said == [f"new.jsonl:{number}" for number in (1, 2, 3, 4) if number not in told]


def test_a_record_that_cannot_be_used_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task refuses its data as a whole, at the start; which record it was is found by halves."""
    for name, words in {"a": ["fever", "bad", "cough"], "b": ["bad"], "c": ["pain"]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"input": word}) + "\n" for word in words))

    def build(config: JobConfig, data: DataList, own: SiteConfig) -> Any:
        asked = data.splits["training"]
        if bad := [text.name for text in asked if text.input == "bad"]:
            raise DataError(f"{bad[0]}: cannot be used")
        return SimpleNamespace(predict=lambda *given: [text.input.upper() for text in asked])

    monkeypatch.setattr(predicting, "build_task", build)
    model = TrainedModel(small_text(), nn.Linear(1, 1), Path(), None, None, HERE)  # type: ignore[arg-type]
    inputs = find_inputs(tmp_path, True, tmp_path / "out")
    found = [(one.name, list(predicting.answers(model, one, 8))) for one in inputs]
    said = [(name, [str(one) if isinstance(one, DataError) else one["answer"] for one in answers]) for name, answers in found]
    assert said == [
        ("a.jsonl", ["FEVER", "a.jsonl:2: cannot be used", "COUGH"]),
        ("b.jsonl", ["b.jsonl:1: cannot be used"]),
        ("c.jsonl", ["PAIN"]),
    ]
