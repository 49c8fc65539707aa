"""The model card beside every saved adapter of a run: its origin, scores, privacy guarantee and limits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from consilium import __version__
from consilium.config.job import JobConfig
from consilium.core.messages import SPLITS, MetricKey, Stage
from consilium.core.sanitize import markdown_cell
from consilium.report.tables import number_text
from consilium.strategies.strategy import label_of
from consilium.tasks.registry import COUNT, HIGH, LOW, TASKS

UNSTATED = (
    "The licence is not stated. Before you pass the model on, write its licence into the first lines. "
    "The base model's licence applies as well."
)
BEST = "-best"
"""Suffix of the folder with the model that was best on validation data."""
FILES = "## Files"
"""Heading of a card's last section, which describes the adapter folder and not the model."""
LIMITS = (
    "Not a medical device. For research; not tested for use on patients.",
    "The scores hold for data like those of the sites that took part. Test it on your own before you rely on it.",
    UNSTATED,
)
ABOUT_FILES = (
    "`job.yaml` is the job that made it. `consilium.safetensors` has all tensors, for Consilium.",
    "The other files have the same for other programs.",
)
Score = tuple[float, float | None, float | None]
"""A score, and the ends of its interval or None."""


@dataclass(frozen=True)
class Card:
    """The facts about a saved model.

    `name`: its folder, such as "personalized-best". `rounds`: the completed rounds when it was saved, of `of_rounds`.
    `base_sha256`: of the base's checkpoint, "" if the package contains the weights. `site`: the site that owns the model, ""
    for the federation's. `sites`, `training`: how many sites and training samples took part, None if not known. `scores`: on
    the split `split`, {} or None if they are not shared; `interval`: how their intervals were computed. `best`: the validation
    score by which the model was chosen. `grid`: whose pixels are scored, "" for tasks without masks.
    """

    name: str
    stage: str
    rounds: int
    of_rounds: int
    job: str
    method: str
    model: str
    adapter: str
    task: str
    base_sha256: str
    version: str = __version__
    site: str = ""
    sites: int | None = None
    training: int | None = None
    split: str = ""
    scores: Mapping[str, Score] | None = None
    interval: str = "95 %, bootstrap"
    best: float | None = None
    privacy: str = ""
    notes: tuple[str, ...] = ()
    grid: str = ""

    @classmethod
    def of(cls, config: JobConfig, name: str, rounds: int, base_sha256: str, **more: Any) -> Self:
        """Return the card of a job's model; `more`: further fields."""
        return cls(
            name, name.removesuffix(BEST), rounds, config.training.rounds, config.title, label_of(config.strategy),
            f"{config.model.name}-{config.model.variant}", config.adapter.kind, config.task.name, base_sha256,
            grid=TASKS[config.task.name].scores(config.task).grid, **more,
        )  # fmt: skip


def scores_of(config: JobConfig, metrics: Mapping[str, float], stage: Stage) -> tuple[str, dict[str, Score]]:
    """Return (split, scores) of the model `stage` from a site's metrics: its last scored split, and the main scores on it."""
    every = [key for name in metrics if (key := MetricKey.parse(name)) and key.stage is stage]
    if not every:
        return "", {}
    split, shown = max((key.split for key in every), key=SPLITS.index), TASKS[config.task.name].scores(config.task)
    found = {key.metric: metrics[str(key)] for key in every if key.split == split}
    named = [shown.leading_name(found), *(name for name in shown.beside if name != COUNT and not name.endswith((LOW, HIGH)))]
    return split, {n: (found[n], found.get(n + LOW), found.get(n + HIGH)) for n in dict.fromkeys(named) if n in found}


def page(card: Card) -> str:
    """Return the card as a Markdown page. Its first lines are the metadata that model hubs read."""
    whose = f"site {markdown_cell(card.site)}" if card.site else "the federation"
    base = (
        f"SHA-256 `{card.base_sha256}`"
        if card.base_sha256
        else f"the weights of the package consilium {markdown_cell(card.version)}"
    )
    which = _WHICH[Stage(card.stage)]
    if card.best is not None:
        which += f"; of all rounds the best on the site's validation data ({number_text(card.best)})"
    rows = [
        ("model of", whose),
        ("which", which),
        ("method", markdown_cell(card.method)),
        ("rounds", f"{card.rounds} of {card.of_rounds}"),
        ("task", markdown_cell(card.task)),
        ("base model", f"{markdown_cell(card.model)}, {base}"),
        ("adapter", markdown_cell(card.adapter)),
        ("sites", "not stated" if card.sites is None else str(card.sites)),
        ("training samples", "not stated" if card.training is None else f"{card.training:,}"),
        ("privacy", markdown_cell(card.privacy) or "no guarantee: the job has no `privacy:` section"),
        ("made by", f"consilium {markdown_cell(card.version)}"),
    ]
    scores = ["No scores: none were shared, or this model was not tested."]
    if card.scores:
        scores = [
            f"Scores on the {card.split} split{f', {card.grid}' if card.grid else ''}:",
            "",
            f"| score | value | {card.interval} |",
            "|---|---|---|",
            *(
                f"| {markdown_cell(name)} | {number_text(value)} | "
                f"{'-' if None in ends else ' to '.join(map(number_text, ends))} |"
                for name, (value, *ends) in card.scores.items()
            ),
        ]
    lines = [
        "---",
        "license: unknown",
        "library_name: consilium",
        f"base_model: {markdown_cell(card.model)}",
        "---",
        "",
        f"# {markdown_cell(card.job)}: {markdown_cell(card.name)}",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
        *scores,
        "",
        "## Limits",
        "",
        *LIMITS,
        *(part for note in card.notes for part in ("", note)),
        "",
        FILES,
        "",
        *ABOUT_FILES,
        "",
    ]
    return "\n".join(lines)


_WHICH = {
    Stage.GLOBAL: "global: what the server sent last, with the site's own parts where it keeps any",
    Stage.PERSONALIZED: "personalized: the site's own model",
}
