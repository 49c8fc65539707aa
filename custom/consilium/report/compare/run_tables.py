"""Tables of a comparison for what is no score: costs, diagnostics such as drift, and settings and samples for an appendix."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from consilium.config.privacy import MOST_WEIGHT
from consilium.core.messages import Stage
from consilium.core.sanitize import first_names_text
from consilium.report.compare import MARK, MOST_LISTED
from consilium.report.compare.comparability import UNNAMED, Group
from consilium.report.compare.score_statistics import GroupScores, diagnostic_series, mean
from consilium.report.live_view import early_stop_text
from consilium.report.run_record import RunRecord, finite_score
from consilium.report.tables import Column, Table, columns, only_true, significant_text
from consilium.strategies.strategy import Role
from consilium.tasks.registry import COUNT

FEWEST_PAIRS = 10
"""Fewest runs of a method for a rank correlation. Fewer runs say little."""
MOST_DIAGNOSTICS = 8
"""Diagnostics of one group in the table, at most. Larger groups, such as one per layer, are only in a run's own picture."""
SECTIONS = ("strategy.", "model.", "adapter.", "task.", "training.", "federation.", "privacy.", "data.")
"""Sections of job.yaml with settings of a method."""
COMMON = (
    "model.name", "model.variant", "model.checkpoint", "model.image_size", "model.dtype", "adapter.kind", "adapter.rank",
    "adapter.alpha", "adapter.width", "adapter.targets", "adapter.decoder", "task.name", "task.loss", "task.balance",
    "task.augment",
    "training.rounds", "training.local_epochs", "training.local_steps", "training.batch_size", "training.accumulate",
    "training.optimizer", "training.lr", "training.schedule", "training.weight_decay", "training.momentum",
    "training.optimizer_state", "training.precision", "federation.fraction_train", "federation.weighting",
    "privacy.unit", "privacy.epsilon", "data.most_training",
)  # fmt: skip
"""Settings that the table shows if all methods have the same value, by field of job.yaml."""
MOST_FIELDS = 24
"""Fields of one method in the table, at most."""


def cost_table(group: Group) -> Table:
    """Return the table of costs, with a row per method: trained set, rounds, bytes, seconds and epsilon.

    Bytes and seconds are means over seeds, the epsilon is the largest.
    """
    heads = [
        Column("method", right=False),
        Column("trained set", 1, False),
        Column("parameters", 2),
        Column("shared", 2),
        Column("rounds", 3),
        Column("steps"),
        Column("MiB"),
        Column("seconds", 1),
        Column("epsilon"),
    ]
    rows, sets, early = [], set(), list[str]()
    for method in group.methods:
        if not (runs := group.runs_of(method)):
            continue
        first, counts, pooled = runs[0], runs[0].parameter_counts, runs[0].is_pooled
        every = "-" if counts is None else f"{counts[Role.SHARED] + counts[Role.LOCAL]:,}"
        sets.add((trained_set(first), every))
        rounds = str(first.settings["training.rounds"])
        if any(run.early_end for run in runs):
            rounds = f"{_range_text({run.rounds_before_final_evaluation for run in runs})} of {rounds}"
        epsilons = [run.epsilon for run in runs if run.epsilon is not None]
        epsilon = "none" if not first.is_private else "not known"  # a private run may not tell it, which is not "none"
        if first.is_private and len(epsilons) == len(runs):
            epsilon = f"{max(epsilons):.4g} ({first.settings['privacy.unit']})"
        sent = _known_mean_text([None if run.bytes is None else run.bytes / 2**20 for run in runs], 2)
        rows.append(
            [
                method,
                trained_set(first) + (", pooled data" if pooled else ""),
                every,
                "-" if counts is None or pooled else f"{counts[Role.SHARED]:,}",
                rounds,
                _known_mean_text(steps_of(runs), 0),
                "the data" if pooled else sent,
                _known_mean_text([run.training_seconds for run in runs], 1),
                epsilon,
            ]
        )
    for (method, seed), run in group.runs.items():
        early += [f"{method}, seed {seed}: {early_stop_text(run.early_end)}"] if run.early_end else []
    (unequal_steps, rounds_advice), few = compare_steps(group), _fewer_pooled_samples_lines(group)
    advice = [*rounds_advice, *(["set training.local_steps of pooled data to the sites' sum"] if few else [])]
    notes = {
        "parameters: how many train at a site; shared: how many of them are sent; steps: a site's optimizer steps, mean over "
        "sites; MiB: tensors up and down in training, all sites, with the parameters that each site receives when it joins, "
        "even if none are shared; seconds: the sites' training, summed; epsilon none: without privacy": True,
        "the methods do not all train the same parameters, as the numbers show": len(sets) > 1,
        **dict.fromkeys([*unequal_steps, *few], True),
        f"{MARK} without runs that have not all of it on record": any(c.endswith(MARK) for row in rows for c in row[1:]),
        **dict.fromkeys(early[:MOST_LISTED], True),
        f"and {len(early) - MOST_LISTED} more that ended early": len(early) > MOST_LISTED,
    }
    return Table(group.with_group_name("Costs"), heads, rows, only_true(notes), advice=advice)


def steps_of(runs: Sequence[RunRecord]) -> list[float | None]:
    """Return a site's optimizer steps over each run; None if they are not on record."""
    return [run.steps[-1] if run.steps else None for run in runs]


def compare_steps(group: Group) -> tuple[list[str], list[str]]:
    """Return a line with the methods' steps at a site, and a line of advice with the rounds that make them equal.

    Both lists are empty if all methods make equally many steps. Runs on pooled data are left out, because
    `_fewer_pooled_samples_lines` compares them. There is no advice for runs that ended early.
    """
    runs = {m: group.runs_of(m) for m in group.methods if group.runs_of(m) and not group.runs_of(m)[0].is_pooled}
    made = {m: n for m, some in runs.items() if (n := mean([one for one in steps_of(some) if one is not None]))}
    if len(set(made.values())) < 2:
        return [], []
    most, early = max(made.values()), {m for m, some in runs.items() if any(run.early_end for run in some)}
    rounds = {m: runs[m][0].rounds_before_final_evaluation * most / n for m, n in made.items() if n < most and m not in early}
    remedy = first_names_text([f"{m}: {count:.0f}" for m, count in rounds.items() if count.is_integer()], 8)
    said = first_names_text([f"{m} {n:,.0f}" for m, n in made.items()], 8)
    advice = [f"for equal steps set training.rounds: {remedy}"] if remedy else []
    return [f"the methods do not make the same number of steps at a site: {said}"], advice


def _fewer_pooled_samples_lines(group: Group) -> list[str]:
    """Return a line per method on pooled data that sees fewer samples per round than all sites of another method together."""
    pooled, apart = dict[str, tuple[float, str]](), [(0.0, "")]
    for method in group.methods:
        for run in group.runs_of(method)[:1]:
            steps, batch = float(run.config.training.local_steps or 0), run.config.training.batch_size
            steps *= 1 if run.is_pooled else len(run.sites) * run.config.federation.fraction_train
            seen = (steps * batch, f"{steps:.0f} steps of batch {batch}")  # 0 samples are unknown: a job without local_steps
            if run.is_pooled:
                pooled[method] = seen
            else:
                apart.append(seen)
    most, said = max(apart)
    return [
        f"{method}: pooled data train {own} a round, the sites together {said}: no upper bound"
        for method, (seen, own) in pooled.items()
        if 0 < seen < most
    ]


def _known_mean_text(values: Sequence[float | None], digits: int) -> str:
    """Return the mean of the known values as a text, with MARK if some are unknown; "-" if all are."""
    there = [value for value in values if value is not None]
    return f"{mean(there):,.{digits}f}{MARK if len(there) < len(values) else ''}" if there else "-"


def trained_set(run: RunRecord) -> str:
    """Return the kind and settings of the adapter, and of the decoder if it trains."""
    found = {k.partition(".")[2]: v for k, v in run.settings.items() if k.startswith("adapter.")}
    parts = [
        str(found["kind"]),
        *(f"{name} {found[name]}" for name in ("rank", "width", "targets") if found.get(name) is not None),
    ]
    decoder = found.get("decoder")
    if isinstance(decoder, str) and decoder != "freeze":
        parts.append(f"decoder {decoder}")
    return ", ".join([*parts, *["decoder"] * (decoder is True)])


# diagnostics -----------------------------------------------------------------------------------------------------------


def diagnostics_table(scores: GroupScores) -> list[Table]:
    """Return a table with a row per method and diagnostic: first, last and mean value over the rounds. [] for none."""
    rows = []
    for method in scores.methods:
        runs = scores.group.runs_of(method)
        for what in _diagnostic_names(runs):
            values = diagnostic_series(runs, what)
            ends = (mean([one[place] for one in values]) for place in (0, -1))
            rows.append([method, what, *map(significant_text, [*ends, mean([math.fsum(one) / len(one) for one in values])])])
    names = [Column("method", right=False), Column("diagnostic", right=False)]
    heads = [*names, Column("first", 1), Column("last", 1), Column("mean")]
    title = scores.group.with_group_name("Measured by the runs themselves")
    notes = ["means over seeds", *correlate_diagnostics_with_score(scores)]
    return [Table(title, heads, rows, notes, appendix=True)] if rows else []


def correlate_diagnostics_with_score(scores: GroupScores) -> list[str]:
    """Return a line per diagnostic with Spearman's rho between its mean and the final score, over the runs of a method.

    The mean is over the rounds. Methods are never joined, because a difference between them is not one of the diagnostic.
    There is no line for fewer than FEWEST_PAIRS runs of a method, or if the diagnostic or the score does not vary.
    """
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for (method, seed), run in scores.group.runs.items():
        found = [scores.cells[method, seed, site] for site in scores.averaged_sites if (method, seed, site) in scores.cells]
        for what in _diagnostic_names([run]) if len(found) == len(scores.averaged_sites) > 0 else []:
            (values,) = diagnostic_series([run], what)
            pairs.setdefault((method, what), []).append((math.fsum(values) / len(values), math.fsum(found) / len(found)))
    lines = []
    for (method, what), one in sorted(pairs.items()):
        sides = list(zip(*one, strict=True))
        if len(one) >= FEWEST_PAIRS and all(len(set(side)) > 1 for side in sides):
            from scipy.stats import spearmanr

            rho = float(spearmanr(*sides).statistic)
            lines.append(f"over the {len(one)} runs of {method}, {what} and the final score: Spearman's rho {rho:+.2f}")
    return lines


def _diagnostic_names(runs: Sequence[RunRecord]) -> list[str]:
    """Return the names of the runs' diagnostics, without groups of more than MOST_DIAGNOSTICS."""
    names = {name for run in runs for values in run.diagnostics.values() for name in values}
    groups = Counter(name.rpartition("/")[0] for name in names)
    return sorted(name for name in names if groups[name.rpartition("/")[0]] <= MOST_DIAGNOSTICS)


# settings and samples --------------------------------------------------------------------------------------------------


def settings_tables(groups: Sequence[Group], about: str = "") -> list[Table]:
    """Return for each group the tables of common settings, of settings that differ, and of samples. `about`: the study's."""
    found = []
    for group in groups:
        firsts = {method: runs[0].settings for method in group.methods if (runs := group.runs_of(method))}
        fields = dict.fromkeys(k for one in firsts.values() for k in one if k.startswith(SECTIONS) and k not in UNNAMED)
        differing = [key for key in fields if len({_value_text(one.get(key)) for one in firsts.values()}) > 1]
        first, note = group.first.settings, "fields as in job.yaml"
        rows = [[key, _value_text(first[key])] for key in COMMON if first.get(key) is not None and key not in differing]
        heads, notes = [Column("setting", right=False), Column("value", right=False)], [note, f"the study: {about}"]
        title = group.with_group_name("Settings common to all methods")
        found.append(Table(title, heads, rows, notes if about else [note], appendix=True))
        if differing:
            told = {m: [f"{k} {_value_text(one[k])}" for k in differing if one.get(k) is not None] for m, one in firsts.items()}
            heads = [Column("method", right=False), Column("settings", right=False)]
            title = group.with_group_name("Settings that differ by method")
            own = [[method, first_names_text(texts, MOST_FIELDS)] for method, texts in told.items()]
            found.append(Table(title, heads, own, [note], appendix=True))
        found.append(_samples(group))
    return found


def _value_text(value: Any) -> str:
    """Return a setting's value as a text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _samples(group: Group) -> Table:
    """Return the table of samples, with a row per site. A number is a range if runs have different ones."""
    runs, split = list(group.runs.values()), group.first.split or "test"
    rows = []
    for site in sorted(frozenset[str]().union(*(run.sites for run in runs))):
        scored = {int(n) for run in runs for stage in Stage if (n := finite_score(run.score(site, stage, COUNT))) is not None}
        trained = {n for run in runs if (n := training_samples(run, site))}
        # of generated data the job tells it; content is a digest for real data, and has no entry in a run of startup kits
        told = (run.settings.get("data.phantoms.validation") for run in runs if run.content.get(site) == "")
        validated = {n for n in told if isinstance(n, int) and n}
        rows.append([site, *map(_range_text, [trained, *([validated] if split != "validation" else []), scored])])
    heads = columns("site", "training", *(["validation"] if split != "validation" else []), split)
    equal = any(row[1] == "-" for row in rows)
    notes = {
        f"training: as the sites reported; {split}: samples that were scored": True,
        "training -: not known, because updates have equal weights or a site did not train": equal,
        "validation -: not on record; known for generated data only": split != "validation" and any(r[2] == "-" for r in rows),
    }
    return Table(group.with_group_name("Samples by site"), heads, rows, only_true(notes), appendix=True)


def training_samples(run: RunRecord, site: str) -> int:
    """Return a site's number of training samples, which is its weight in the mean; 0 if the weight is not that number."""
    if run.config.weighting != "samples":
        return 0
    most = max([line["weight"] for line in run.lines_of("result") if line["site"] == site and line.get("weight")], default=0)
    return int(most) if most < (run.config.federation.max_weight or MOST_WEIGHT) else 0


def _range_text(values: set[int]) -> str:
    """Return numbers as one number or a range; "-" for none."""
    return "–".join(f"{n:,}" for n in dict.fromkeys((min(values), max(values)))) if values else "-"
