"""Scores of a page: the headline table with its intervals, and what the figures of curves and models are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from consilium.messages import SKIPPED, SPLITS, TRAIN_LOSS, MetricKey, Stage
from consilium.report.means import BY_N, INTERVAL, MEAN, Results, cell, mean_cell, number
from consilium.report.page.record import Curve, Record
from consilium.tasks.registry import COUNT, HIGH, LOW, Scores

MEANT = {
    Stage.PRETRAINED: "the frozen model, not adapted",
    Stage.GLOBAL: "what the server sends in the end, with what a site keeps of its own",
    Stage.PERSONALIZED: "each site's own, as its last training left it",
}
"""What each model is, in words."""


@dataclass(frozen=True)
class Table:
    """A table of texts: the first column names a row; `sums`: how many of the last rows are means or sums."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    sums: int = 0
    notes: Sequence[str] = ()


def headline(results: Results, scores: Scores, title: str, beside: bool = False) -> Table | None:
    """Return the closing table: the leading score of each model with its interval; `beside`: the global one's other scores."""
    keys = [key for metrics in results.values() for name in metrics if (key := MetricKey.parse(name))]
    if not keys:
        return None
    split = split_of(results)
    reported = {key.metric for key in keys}
    columns = _beside(split, scores, reported) if beside else _columns(split, scores, reported, results)
    if not columns:
        return None
    rows = [[site, *(cell(results[site], column) for column in columns)] for site in sorted(results)]
    sums = [which for which in (MEAN, BY_N) if len(results) > 1 and (which == MEAN or COUNT in columns.values())]
    rows += [[which, *(mean_cell(results, column, which == BY_N) for column in columns)] for which in sums]
    caption = f"{title}, {split} split{scores.remark}"
    caption = f"{caption}, other scores of the global model" if beside else caption
    return Table(caption, ["site", *columns.values()], rows, len(sums), _notes(results, split, columns))


def split_of(results: Results) -> str:
    """Return what was scored: test where any site has it."""
    keys = {key.split for metrics in results.values() for name in metrics if (key := MetricKey.parse(name))}
    return next((split for split in reversed(SPLITS) if split in keys), SPLITS[0])


def _columns(split: str, scores: Scores, reported: set[str], results: Results) -> dict[str, str]:
    leading, names = scores.lead(reported), {name for one in results.values() for name in one}
    found = {str(MetricKey(split, Stage.GLOBAL, COUNT)): COUNT} if COUNT in reported else {}
    for stage in Stage:
        key = MetricKey(split, stage, leading)
        if str(key) in names:
            found[str(key)] = f"{scores.heading(leading)} {stage}"
            found |= {f"{key}{INTERVAL}": "95 %"} if f"{key}{LOW}" in names else {}
    return found


def _beside(split: str, scores: Scores, reported: set[str]) -> dict[str, str]:
    wanted = [one for one in scores.beside if one in reported - {scores.lead(reported)}]
    return {str(MetricKey(split, Stage.GLOBAL, one)): scores.heading(one) for one in wanted}


def _notes(results: Results, split: str, columns: Mapping[str, str]) -> list[str]:
    notes = []
    if COUNT in columns.values():
        notes.append("n: how many a site scored, and its weight in the mean by n.")
    if "95 %" in columns.values():
        notes.append("95 %: bootstrap over a site's patients (volumes, images or records, where no patient is known).")
    if without := [site for site in sorted(results) if not any(name.startswith(f"{split}/") for name in results[site])]:
        notes.append(f"No {split} split, so not scored here: {', '.join(without)}.")
    if skipped := [f"{site} {one[SKIPPED]:.0f}" for site, one in sorted(results.items()) if one.get(SKIPPED)]:
        notes.append(f"Samples left out because they cannot be read: {', '.join(skipped)}.")
    return notes


def of_models(results: Results, metric: str) -> list[tuple[str, dict[Stage, tuple[float, float | None, float | None]]]]:
    """Return, by site, the score of each model with its interval."""
    split, found = split_of(results), []
    for site in sorted(results):
        keys = {stage: str(MetricKey(split, stage, metric)) for stage in Stage}
        one = results[site]
        found.append((site, {s: (one[key], one.get(key + LOW), one.get(key + HIGH)) for s, key in keys.items() if key in one}))
    return found


def gains(results: Results, metric: str, label: str) -> str:
    """Return in a sentence what adapting changed, on the mean of the sites; "" where that is not known."""
    keys = {stage: str(MetricKey(split_of(results), stage, metric)) for stage in Stage}
    rows = [one for one in results.values() if keys[Stage.PRETRAINED] in one and keys[Stage.GLOBAL] in one]
    if not rows:
        return ""
    means = {stage: sum(one[key] for one in rows) / len(rows) for stage, key in keys.items() if all(key in one for one in rows)}
    whose = f", mean of {len(rows)} sites" if len(rows) > 1 else ""
    return f"{label}{whose}: {', '.join(f'{number(mean)} {stage}' for stage, mean in means.items())}."


def losses(record: Record) -> dict[str, Curve]:
    """Return the training loss by site and rounds done."""
    return record.curves(TRAIN_LOSS, after=True)
