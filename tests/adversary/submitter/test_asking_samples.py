"""A submitter who asks about the samples by what a job says: whatever they hold, a private job's answers are the same.

Two sites differ in one sample, and in what a field of job.yaml asks of it. Without privacy the odd one is refused, which is the
question; with privacy, or statistics, nobody is told. `CASES` and `ASKS_NOTHING` have every field of every task: their union is
the claim.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nibabel
import numpy as np
import pytest
import tifffile
from PIL import Image

from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConsiliumError, DataError
from consilium.core.messages import Kind, Payload, SiteInfo
from consilium.core.schema import Section
from consilium.federation.job_assembly import build_task
from consilium.models.causal_lm.network import load_tokenizer
from consilium.runtime.worker_pool import simulated_sites
from consilium.tasks.registry import TASKS
from tests.conftest import assembled, small_cells, small_config, small_text
from tests.models.classes import SIDE, SPEAKING, make

SITE = {"unit": "site", "epsilon": 3, "clip": 0.5}
RECORD = {"unit": "record", "noise_multiplier": 1.0}
PATIENT = {"unit": "patient", "epsilon": 8}
ONLY = {"statistics": {"only": True}}
TRAINING = 3
Entries = dict[str, list[dict[str, Any]]]


# what a site has ------------------------------------------------------------------------------------------------------


def noise(*shape: int, kind: Any = np.uint8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 250, shape).astype(kind)


def pictures(folder: Path, label: object = "mask") -> Entries:
    """Write pictures, and masks of 0, 1 and 2; or give all this class."""
    found: Entries = {}
    for split, count in (("training", TRAINING), ("validation", 1), ("test", 1)):
        for number in range(count):
            name, mask = f"{split}{number}", np.zeros((40, 40), np.uint8)
            mask[:20], mask[:8] = 1, 2
            Image.fromarray(noise(40, 40, 3)).save(folder / f"{name}.png")
            Image.fromarray(mask).save(folder / f"{name}-mask.png")
            entry = {"image": f"{name}.png", "label": f"{name}-mask.png" if label == "mask" else label}
            found.setdefault(split, []).append(entry | {"patient": f"P{number}"})
    return found


def volume(folder: Path, values: np.ndarray, labels: np.ndarray | None = None, shift: float = 0.0) -> dict[str, Any]:
    """Write a volume and its mask, which lies so many millimetres beside it; return their entry."""
    moved = np.eye(4)
    moved[0, 3] = shift
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), folder / "odd.nii.gz")
    mask = np.ones(values.shape, np.uint8) if labels is None else labels
    nibabel.save(nibabel.Nifti1Image(mask, moved), folder / "odd-mask.nii.gz")
    return {"image": "odd.nii.gz", "label": "odd-mask.nii.gz", "patient": "P0"}


def tiff(folder: Path, values: np.ndarray, levels: int = 1, **how: Any) -> dict[str, Any]:
    with tifffile.TiffWriter(folder / "odd.tif") as file:
        for level in range(levels):
            kind = {"subfiletype": int(level > 0), "metadata": None}
            file.write(values[:: 2**level, :: 2**level], **kind, **how)
    last = [side // 2 ** (levels - 1) for side in values.shape[:2]]
    Image.fromarray(np.ones(last, np.uint8)).save(folder / "odd-mask.png")
    return {"image": "odd.tif", "label": "odd-mask.png", "patient": "P0"}


def texts(folder: Path, odd: dict[str, Any]) -> Path:
    """Write a record in every split that has what is asked for, and in each an odd one too."""
    for number in range(TRAINING + 1):
        Image.fromarray(noise(SIDE, SIDE, 3)).save(folder / f"{number}.png")
    usual = {"instruction": "What is seen?", "output": "The answer is soon. #### 7"}
    rows = [usual | {"image": f"{number}.png", "patient": f"P{number}"} for number in range(TRAINING + 1)]
    for split, count in (("training", TRAINING), ("validation", 1), ("test", 1)):
        records = [*rows[:count], rows[count] | odd]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


# what is asked --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A question: fields of job.yaml, what the usual and the odd site have, and the private jobs that may ask it.

    `loud`: without privacy the odd one is an error; `settings` of the site.
    """

    fields: tuple[str, ...]
    task: dict[str, Any]
    usual: Callable[[Path], Any]
    odd: Callable[[Path], Any]
    loud: bool = True
    units: tuple[dict[str, Any], ...] = (SITE, RECORD)
    model: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    strategy: Any = "fedit"


def changed(classes: object = "mask", all_of: bool = False, **entry: Any) -> Callable[[Path], Entries]:
    """Return what writes pictures of which one, or all of the training split, has another `entry`; None takes a key out."""

    def write(folder: Path) -> Entries:
        found = pictures(folder, classes)
        for split, entries in found.items():
            for one in entries if all_of and split == "training" else entries[:1]:
                one |= entry
                for key in [key for key, value in entry.items() if value is None]:
                    del one[key]
        return found

    return write


def added(make_one: Callable[[Path], dict[str, Any]], label: object = "mask") -> Callable[[Path], Entries]:
    """Return what writes pictures and one sample more to train on."""

    def write(folder: Path) -> Entries:
        found = pictures(folder, label)
        one = make_one(folder)
        found["training"].append(one | ({} if label == "mask" else {"label": label}))
        return found

    return write


def record(**odd: Any) -> Callable[[Path], Path]:
    return lambda folder: texts(folder, odd)


def cut(**settings: Any) -> dict[str, Any]:
    return {"name": "segmentation", "classes": {"disc": [1, 2], "cup": [2]}} | settings


def sort(**settings: Any) -> dict[str, Any]:
    return {"name": "classification", "classes": ["round", "spiky"]} | settings


def preferred(**answers: str) -> Callable[[Path], Path]:
    """Return what writes records of prompts with these answers."""

    def write(folder: Path) -> Path:
        for split, count in (("training", TRAINING + 1), ("validation", 2), ("test", 2)):
            rows = [{"prompt": f"What is seen in {number}?", "patient": f"P{number}"} | answers for number in range(count)]
            (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return folder

    return write


def write_on(name: str = "language", **settings: Any) -> dict[str, Any]:
    return {"name": name, "labels": ["urgent", "soon", "later"], "max_new_tokens": 4} | settings


USUAL, ROUND = changed(), changed("round")
WINDOW = {"center": 100, "width": 200}
MAPPED = {"labels": {"round": ["round"], "odd": ["of another job"]}}
CASES = {
    "a class of masks": Case(
        ("segmentation.classes",), {"classes": {"disc": [1, 2]}}, USUAL, changed(label="validation0-mask.png"), loud=False
    ),
    "annotated classes": Case(("segmentation.classes",), cut(), changed(annotated=["cup"]), changed(annotated=["lesion"])),
    "a mask at all": Case(("segmentation.name",), cut(), USUAL, changed(label=None)),
    "a mask at all, none anywhere": Case(("segmentation.name",), cut(), USUAL, changed(label=None, all_of=True)),
    "a mask, not a class": Case(("segmentation.name",), cut(), USUAL, changed(label=1)),
    "a mask's grid": Case(
        ("segmentation.resample_masks",), cut(window=WINDOW),
        added(lambda f: volume(f, noise(16, 16, 3))), added(lambda f: volume(f, noise(16, 16, 3), shift=5.0)),
    ),
    "a site's labels for masks": Case(
        ("segmentation.classes",), cut(), changed(annotated=["disc"], all_of=True), USUAL,
        settings={"labels": {1: ["disc"], 2: ["disc"]}},
    ),
    "planes without a mask": Case(
        ("segmentation.slices",), cut(slices={"empty": "drop"}),
        added(lambda f: volume(f, noise(16, 16, 3))),
        added(lambda f: volume(f, noise(16, 16, 3)) | {"label": "training0-mask.png"}), units=(SITE,),
    ),
    "tiles without a mask": Case(
        ("segmentation.tiles",), cut(tiles={"size": 64, "empty": "drop"}),
        added(lambda f: tiff(f, noise(80, 80, 3))), added(lambda f: tiff(f, noise(80, 80, 3)) | {"label": None}), units=(SITE,),
    ),
    "levels": Case(
        ("segmentation.tiles", "classification.tiles"), sort(tiles={"size": 64, "level": 1}),
        added(lambda f: tiff(f, noise(128, 128, 3), 2, tile=(16, 16), compression="zlib"), "round"),
        added(lambda f: tiff(f, noise(128, 128, 3), tile=(16, 16), compression="zlib"), "round"),
    ),
    "how many tiles": Case(
        ("segmentation.tiles",), cut(tiles={"size": 16, "stride": 8}),
        added(lambda f: tiff(f, noise(16, 16, 3))), added(lambda f: tiff(f, noise(400, 400, 3))), units=(SITE,),
    ),
    "how tiles are stored": Case(
        ("segmentation.tiles",), cut(tiles={"size": 64}), added(lambda f: tiff(f, noise(40, 40, 3))),
        added(lambda f: tiff(f, noise(40, 40, 3), tile=(192, 192))),
    ),
    "a tile of the list's own": Case(
        ("segmentation.tiles",), cut(tiles={"size": 64, "level": 1}),
        added(lambda f: tiff(f, noise(128, 128, 3), 2, tile=(16, 16), compression="zlib") | {"tile": [0, 0, 32, 32]}),
        added(lambda f: tiff(f, noise(128, 128, 3), 2, tile=(16, 16), compression="zlib") | {"tile": [80, 80, 32, 32]}),
    ),
    "too large for one": Case(
        ("segmentation.tiles",), cut(), added(lambda f: tiff(f, noise(16, 16, 3))), added(lambda f: tiff(f, noise(200, 200, 3)))
    ),
    "several pages": Case(
        ("classification.tiles",), sort(),
        added(lambda f: tiff(f, noise(16, 16, 3)), "round"),
        added(lambda f: tiff(f, noise(3, 16, 16), photometric="minisblack"), "round"),
    ),
    "windows of files": Case(
        ("segmentation.window",), cut(),
        added(lambda f: volume(f, noise(16, 16, 3))), added(lambda f: volume(f, noise(16, 16, 3, kind=np.int16))), loud=False,
    ),
    "smaller than a crop": Case(
        ("segmentation.crop",), cut(crop=32), USUAL, changed(image="small.png", label="small-mask.png"), loud=False
    ),
    "a class": Case(("classification.classes",), sort(), ROUND, changed("round", label="other")),
    "a number of a class": Case(("classification.classes",), sort(), ROUND, changed("round", label=7)),
    "a class at all": Case(("classification.name",), sort(), ROUND, changed("round", label=None)),
    "no class anywhere": Case(("classification.classes",), sort(), ROUND, changed("round", all_of=True, label="other")),
    "no class to look at": Case(
        ("classification.classes",), sort(), ROUND, changed("round", all_of=True, label="other"),
        units=(SITE,), strategy="fedala",
    ),
    "no class to weigh": Case(
        ("classification.balance",), sort(balance="prior"), ROUND, changed("round", all_of=True, label="other"), units=(SITE,)
    ),
    "a site's labels for classes": Case(
        ("classification.classes",), sort(), ROUND, changed("round", label="odd"), settings=MAPPED
    ),
    "classes of a patient": Case(
        ("classification.scores",), sort(scores={"per": "patient"}), ROUND,
        lambda f: (e := ROUND(f)) | {"test": [*e["test"], {"image": "test0.png", "label": "spiky", "patient": "P0"}]},
    ),
    "patients": Case(
        (), sort(), lambda f: (e := ROUND(f)) | {"training": [*e["training"], e["training"][0]]},
        lambda f: (e := ROUND(f)) | {"training": [*e["training"], e["training"][0] | {"patient": ""}]},
        loud=False, units=(PATIENT,),
    ),
    "a label": Case(
        ("language.evaluate", "language.labels"), write_on(evaluate="label"), record(), record(output="schizophrenia")
    ),
    "a final answer": Case(("language.evaluate",), write_on(evaluate="exact"), record(), record(output="none")),
    "which of two answers is better": Case(
        ("language.learn", "language.beta"), write_on(learn="preference"),
        preferred(chosen="Soon.", rejected="Never."), preferred(completion="Soon."),
    ),
    "a label of a report": Case(
        ("report.evaluate", "report.labels"), write_on("report", evaluate="label"),
        record(), record(output="schizophrenia"), units=(SITE,),
    ),
    "a record's length": Case((), write_on(), record(), record(instruction="long " * 300), loud=False),
    "a report's length": Case((), write_on("report"), record(), record(output="long " * 300), units=(SITE,), loud=False),
    "a picture's words": Case(
        ("report.name",), write_on("report"), record(), record(instruction="a \ufffc mark"), units=(SITE,), loud=False
    ),
    "a picture's words in a chat": Case(
        ("report.prompt",), write_on("report", prompt="chat"), record(), record(output="\ufffc"), units=(SITE,), loud=False
    ),
    "a picture of a report": Case(("report.window",), write_on("report"), record(), record(image="large.png"), units=(SITE,)),
}  # fmt: skip
ALWAYS = ("a mask at all", "levels", "a class", "a label", "a picture of a report")
"""One question of each kind, which every run of the suite has; the others are slow."""
ASKS_NOTHING = {
    "segmentation": {"prompt", "augment", "loss", "scores", "resize"},
    "classification": {"augment", "slices", "window", "resize", "crop", "resample_masks"},  # as for segmentation
    "language": {"name", "prompt", "packed", "bucketed", "max_new_tokens", "extraction"},
    "report": {"learn", "beta", "packed", "bucketed", "max_new_tokens", "extraction", "resize"},
}
"""Fields that change what is computed of a sample, and have nothing that a sample could lack."""


def test_every_field_of_every_task_is_asked_about() -> None:
    asked = {name for case in CASES.values() for name in case.fields}
    free = {f"{task}.{name}" for task, names in ASKS_NOTHING.items() for name in names}
    fields = {f"{task}.{name}" for task in ("segmentation", "classification", "language", "report") for name in of(task)}
    assert (asked | free, asked & free) == (fields, set())


def of(task: str) -> set[str]:
    config: type[Section] = TASKS[task].config
    return set(config.model_fields)


# who is told ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a model of a report job, by its folder, which has a tokenizer that chats."""
    made = make(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl", SPEAKING["qwen2_5_vl"])
    tokenizer = load_tokenizer("tiny", None)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer.save_pretrained(made.folder)
    section = {"name": "vision_language", "variant": "folder", "checkpoint": str(made.folder), "config": made.config}
    return section | {"image_size": SIDE, "max_length": 64}


@pytest.fixture
def small_limits(tmp_path: Path) -> Iterator[None]:
    """Have pictures too large that take no time to write."""
    Image.fromarray(noise(20, 20, 3)).save(tmp_path / "small.png")
    with patch("consilium.data.safe_open.MOST_PIXELS", 180 * 180), patch("consilium.data.slides.MOST_TILES", 100):
        yield


def job(case: Case, seeing: dict[str, Any], **sections: Any) -> JobConfig:
    name = case.task.get("name", "segmentation")
    small = {"segmentation": small_config, "classification": small_cells}.get(name, small_text)
    raw = small(case.strategy, local_steps=1, rounds=2).model_dump() | {"data": {}, "task": case.task} | sections
    raw["model"] = (seeing if name == "report" else raw["model"]) | case.model
    return JobConfig.model_validate(raw)


def site(write: Callable[[Path], Any], folder: Path, settings: dict[str, Any], **more: Any) -> SiteConfig:
    folder.mkdir()
    for name, side in (("small.png", 20), ("large.png", 200)):
        Image.fromarray(noise(side, side)).save(folder / name)
        Image.fromarray(np.ones((side, side), np.uint8)).save(folder / name.replace(".", "-mask."))
    made = write(folder)
    if not isinstance(made, Path):
        (made_of := folder / "list.json").write_text(json.dumps(made))
        made = made_of
    own = {"datasets": {"ward": {"datalist": made} | settings}} if settings else {"datalist": made}
    return SiteConfig.model_validate(own | more)


def told(config: JobConfig, own: SiteConfig, folder: Path) -> list[object]:
    """Return what a site says to a hello, and the word, or None for an update, or statistics, that it gives first."""
    made, found = assembled(config), list[object]()
    try:
        (member,) = simulated_sites(made, {"site-1": own}, folder, lambda event: None).values()
        hello = member.ask(Kind.HELLO, "run-1")
        found += [hello.num_samples, hello.joined, hello.capacity]
        if config.trains:
            sent = made.strategy.payload(made.strategy.initialize(made.initial), SiteInfo("site-1", 1))
            for round in (0, 1):
                member.ask(Kind.TRAIN, "run-1", Payload(round, 0, sent.tensors))
        else:
            member.ask(Kind.STATISTICS, "run-1")
    except ConsiliumError as error:
        found.append(error.reason)
    return found


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("bad", ["refuse", pytest.param("skip", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_what_samples_hold_decides_no_answer_of_a_private_job(
    name: str, bad: str, seeing: dict[str, Any], tmp_path: Path
) -> None:
    case = CASES[name]
    own = [site(case.usual, tmp_path / "usual", case.settings), site(case.odd, tmp_path / "odd", case.settings)]
    skip = [one.model_copy(update={"bad_samples": bad}) for one in own]
    plain = job(case, seeing)
    for one, loud in zip(own, (False, case.loud), strict=True):
        try:
            build_task(plain, load_site_data(plain, "site-1", one, tmp_path / "plain"), one)
        except DataError:
            assert loud  # so this is a question, and who sends jobs without privacy is told what is wrong
        else:
            assert not loud
    for number, section in enumerate([*({"privacy": unit} for unit in case.units), ONLY]):
        answers = [told(job(case, seeing, **section), one, tmp_path / f"run{number}{i}") for i, one in enumerate(skip)]
        assert answers[0] == answers[1]
        assert len(answers[0]) == 3  # a hello, and an answer
