"""The table of a comparison's costs: what trains, rounds, steps, bytes, seconds and epsilon; and notes where these differ."""

from collections.abc import Sequence

from consilium.core.sanitize import first_names_text
from consilium.report.compare import MARK, MOST_LISTED
from consilium.report.compare.comparability import Group
from consilium.report.compare.score_statistics import mean
from consilium.report.live_view import early_stop_text
from consilium.report.run_record import RunRecord
from consilium.report.tables import Column, Table, only_true
from consilium.strategies.strategy import Role


def cost_table(group: Group) -> Table:
    """Return the table of costs, with a row per method: trained set, rounds, bytes, seconds and epsilon.

    Bytes and seconds are means over seeds, the epsilon is the largest.
    """
    columns = [
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
    rows, sets = [], set()
    for method in (method for method in group.methods if group.runs_of(method)):
        runs = group.runs_of(method)
        first, counts, most = runs[0], runs[0].parameter_counts, runs[0].settings["training.rounds"]
        every = "-" if counts is None else f"{counts[Role.SHARED] + counts[Role.LOCAL]:,}"
        shared = "-" if counts is None or first.is_pooled else f"{counts[Role.SHARED]:,}"
        had = sorted({run.rounds_before_final_evaluation for run in runs})
        rounds = (
            f"{'–'.join(map(str, dict.fromkeys((had[0], had[-1]))))} of {most}" if any(run.early_end for run in runs) else most
        )
        sent = _known_mean_text([None if run.bytes is None else run.bytes / 2**20 for run in runs], 2)
        epsilons = [run.epsilon for run in runs if run.epsilon is not None]
        epsilon = "none" if not first.is_private else "not known"  # a private run may not tell it, which is not "none"
        if first.is_private and len(epsilons) == len(runs):
            epsilon = f"{max(epsilons):.4g} ({first.settings['privacy.unit']})"
        adapted = trained_set(first)
        sets.add((adapted, every))
        cells = [
            adapted + (", pooled data" if first.is_pooled else ""),
            every,
            shared,
            str(rounds),
            _known_mean_text(steps_of(runs), 0),
            "the data" if first.is_pooled else sent,
            _known_mean_text([run.seconds for run in runs], 1),
            epsilon,
        ]
        rows.append([method, *cells])
    notes = ["parameters: how many train at a site; shared: how many of them are sent; steps: a site's optimizer steps, "
             "mean over sites; MiB: tensors up and down in training, all sites, "
             "with the parameters that each site receives when it joins, even if none are shared; "
             "seconds: the sites' training, summed; epsilon: none is not private"]  # fmt: skip
    marked = any(cell.endswith(MARK) for row in rows for cell in row[1:])
    early = [
        f"{method}, seed {seed}: {early_stop_text(run.early_end)}"
        for (method, seed), run in group.runs.items()
        if run.early_end
    ]
    notes += only_true(
        {"the methods do not all train the same set of parameters": len(sets) > 1}
        | dict.fromkeys(unequal_steps(group), True)
        | {f"{MARK} without runs that have not all of it on record": marked}
        | dict.fromkeys(early[:MOST_LISTED], True)
        | {f"and {len(early) - MOST_LISTED} more that ended early": len(early) > MOST_LISTED}
    )
    return Table(group.with_group_name("Costs"), columns, rows, notes)


def steps_of(runs: Sequence[RunRecord]) -> list[float | None]:
    """Return a site's optimizer steps over each run; None if they are not on record."""
    return [run.steps[-1] if run.steps else None for run in runs]


def unequal_steps(group: Group) -> list[str]:
    """Return [] if all methods make equally many steps at a site, else a line with their steps, and one with the remedy.

    Runs on pooled data are left out, because they have no sites. There is no remedy for runs that ended early.
    """
    runs = {m: group.runs_of(m) for m in group.methods if group.runs_of(m) and not group.runs_of(m)[0].is_pooled}
    made = {m: n for m, some in runs.items() if (n := mean([one for one in steps_of(some) if one is not None]))}
    if len(set(made.values())) < 2:
        return []
    most, early = max(made.values()), {m for m, some in runs.items() if any(run.early_end for run in some)}
    rounds = {m: runs[m][0].rounds_before_final_evaluation * most / n for m, n in made.items() if n < most and m not in early}
    remedy = first_names_text([f"{m}: {count:.0f}" for m, count in rounds.items() if count.is_integer()], 8)
    said = first_names_text([f"{m} {n:,.0f}" for m, n in made.items()], 8)
    return [f"the methods do not make the same number of steps at a site: {said}"] + (
        [f"for equal steps set training.rounds: {remedy}"] if remedy else []
    )


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
