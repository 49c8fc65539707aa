"""Why the scores of two runs do not compare: another task, other data, sites or test images."""

import json
from typing import Any

from consilium.messages import Stage
from consilium.report.compare.runs import Run
from consilium.tasks.registry import COUNT

CHECKPOINT = "model.checkpoint"
LEARNING = ("task.augment", "task.balance", "task.learn", "data.most_training", "data.phantoms.training",
            "data.phantoms.validation", "data.phantoms.classes")  # fmt: skip
"""Fields of task and data that change the training and not what is scored."""
READ = ("task.", "data.", CHECKPOINT, "privacy.unit", "privacy.per_patient")
"""Fields by which a site reads other files, or others of its samples."""
SAME = 0.01
"""The frozen model's scores of the same images differ by less, on whatever machine."""


def differs(one: Run, other: Run) -> str | None:
    """Return why two runs' scores do not compare, None where they do."""
    mine, theirs = compared(one), compared(other)
    if mine != theirs:
        key = next(k for k in sorted({*mine, *theirs}) if mine.get(k, "none") != theirs.get(k, "none"))
        return f"{key} is {text_of(theirs.get(key, 'none'))}, in {one.name} {text_of(mine.get(key, 'none'))}"
    if one.split != other.split or one.metric != other.metric:
        return f"scored by {other.metric} on {other.split}, {one.name} by {one.metric} on {one.split}"
    if one.sites != other.sites:
        return f"other sites than in {one.name}: {', '.join(sorted(one.sites ^ other.sites)[:5])} in one of them only"
    if _changed(one, other):
        return f"its sites' data or settings are not those of {one.name}; `consilium study run` runs the older ones again"
    if site := _other_data(one, other):
        return f"its data at {site} are not those of {one.name}"
    return _other_images(one, other)


def _changed(one: Run, other: Run) -> bool:
    """Tell whether two cells of a study that read the same files found other content there."""
    whole = bool(one.whole and other.whole)
    content = (one.whole, other.whole) if whole else (one.data[1], other.data[1])
    return all(content) and content[0] != content[1] and _read(one, whole) == _read(other, whole)


def _other_data(one: Run, other: Run) -> str:
    """Return the first site at which two plain simulations had other data, "" where there is none or nobody knows.

    Cells of a study have their axes for that, and `_changed`.
    """
    if one.labels and other.labels:
        return ""
    both = sorted(one.content.keys() & other.content.keys())
    return next((site for site in both if one.content[site] != other.content[site]), "")


def _read(run: Run, whole: bool) -> list[Any]:
    """Return what decides which content a run of a study reads: where it is equal, other content has been changed since."""
    most = None if whole else run.settings.get("data.most_training")  # which samples these are depends on the seed
    fields = {k: v for k, v in run.settings.items() if k.startswith(READ) and k not in LEARNING}
    return [run.data[0], fields, most, run.seed if most else None]


def compared(run: Run) -> dict[str, Any]:
    """Return the settings that decide what a score is taken of."""
    found = {k: v for k, v in run.settings.items() if k.startswith(("task.", "data.")) and not k.startswith(LEARNING)}
    if run.settings.get("task.scores.grid") == "resized":  # masks are compared at the model's own pixels
        found["model.image_size"] = run.settings.get("model.image_size")
    return found


def _other_images(one: Run, other: Run) -> str | None:
    """Return where two runs were scored on other samples: their number, or what the same frozen model scores, tells."""
    if _generated(one) and one.seed != other.seed:
        return None  # each seed draws its own pictures
    models = [[(k, v) for k, v in run.settings.items() if k.startswith("model.")] for run in (one, other)]
    for site in sorted(one.results.keys() & other.results.keys()):
        for stage, metric in ((Stage.GLOBAL, COUNT), (Stage.PRETRAINED, one.metric), (Stage.PRETRAINED, "loss")):
            a, b = one.score(site, stage, metric), other.score(site, stage, metric)
            if a is None or b is None or (stage is Stage.PRETRAINED and models[0] != models[1]):
                continue
            if abs(a - b) > SAME * max(1.0, abs(a) if metric == "loss" else 1.0):
                what = "samples scored" if metric == COUNT else f"the pretrained model's {metric}"
                return f"another test split at {site}: {what} {b:g}, in {one.name} {a:g}"
    return None


def _generated(run: Run) -> bool:
    return run.settings.get("data.phantoms.kind") is not None


def text_of(value: Any) -> str:
    """Return a setting as tables and messages show it."""
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else repr(value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
