"""What methods cost, as a table: what trains, rounds, bytes, seconds and epsilon."""

from collections.abc import Sequence

from consilium.report.compare.groups import Group
from consilium.report.compare.runs import Run
from consilium.report.compare.sheet import MARK, Column, Sheet, titled
from consilium.report.compare.table import mean
from consilium.report.progress import ending
from consilium.strategies.strategy import Role

MOST_EARLY = 20
"""Runs that ended early which a note names each; the others are counted."""


def cost_sheet(group: Group) -> Sheet:
    """Return a row per method: what trains, rounds, bytes, seconds and epsilon, as means over seeds."""
    columns = [Column("method", right=False), Column("trained set", 1, False), Column("parameters", 2), Column("shared", 2)]
    columns += [Column("rounds", 3), Column("MiB"), Column("seconds", 1), Column("epsilon")]
    finished = {method: [run for (name, _), run in group.runs.items() if name == method] for method in group.methods}
    finished = {method: runs for method, runs in finished.items() if runs}
    rows = [_cost_row(method, runs) for method, runs in finished.items()]
    notes = [
        "parameters: how many train at a site; shared: how many of them travel; MiB: tensors up and down in training, all sites"
    ]
    notes[0] += "; seconds: the sites' training, summed; epsilon: none is not private"
    if len({(_adapted(runs[0]), row[2]) for runs, row in zip(finished.values(), rows, strict=True)}) > 1:
        notes.append("the methods do not all train the same set of parameters")
    if any(cell.endswith(MARK) for row in rows for cell in row[1:]):
        notes.append(f"{MARK} without runs that have not all of it on record")
    return Sheet(titled(group, "What it costs"), columns, rows, notes + _early(group))


def _cost_row(method: str, runs: Sequence[Run]) -> list[str]:
    first, counts = runs[0], runs[0].trained
    epsilons = [run.epsilon for run in runs if run.epsilon is not None]
    return [
        method,
        trained_set(first),
        "-" if counts is None else f"{counts[Role.SHARED] + counts[Role.LOCAL]:,}",
        "-" if counts is None or first.pooled else f"{counts[Role.SHARED]:,}",
        _rounds(runs),
        "the data" if first.pooled else _mean([None if run.bytes is None else run.bytes / 2**20 for run in runs], 2),
        _mean([run.seconds for run in runs], 1),
        _epsilon(runs, epsilons),
    ]


def _mean(values: Sequence[float | None], digits: int) -> str:
    """Return the mean of those that are on record, with MARK where some are not."""
    known = [value for value in values if value is not None]
    return f"{mean(known):,.{digits}f}{MARK if len(known) < len(values) else ''}" if known else "-"


def _epsilon(runs: Sequence[Run], known: Sequence[float]) -> str:
    """Return the largest epsilon with its unit; one that a private run should have told and has not is no "none"."""
    if not runs[0].private:
        return "none"
    return "not known" if len(known) < len(runs) else f"{max(known):.4g} ({runs[0].settings['privacy.unit']})"


def _rounds(runs: Sequence[Run]) -> str:
    """Return how many rounds the runs had, and of how many where one has ended early."""
    most = runs[0].settings["training.rounds"]
    had = sorted({run.ended["round"] if run.ended else most for run in runs})
    early = any(run.ended for run in runs)
    return f"{'–'.join(map(str, dict.fromkeys((had[0], had[-1]))))} of {most}" if early else str(most)


def _early(group: Group) -> list[str]:
    """Return a line of each run that has ended early; of the first MOST_EARLY."""
    found = [f"{method}, seed {seed}: {ending(run.ended)}" for (method, seed), run in group.runs.items() if run.ended]
    return found[:MOST_EARLY] + ([f"and {len(found) - MOST_EARLY} more that ended early"] if len(found) > MOST_EARLY else [])


def trained_set(run: Run) -> str:
    """Return what a method trains, and whether on pooled data."""
    return _adapted(run) + (", pooled data" if run.pooled else "")


def _adapted(run: Run) -> str:
    """Return the kind of adapter, where it sits, and a decoder that trains."""
    found = {k.partition(".")[2]: v for k, v in run.settings.items() if k.startswith("adapter.")}
    parts = [str(found["kind"])]
    parts += [f"{name} {found[name]}" for name in ("rank", "width", "targets") if found.get(name) is not None]
    decoder = found.get("decoder")
    told = f"decoder {decoder}" if isinstance(decoder, str) else "decoder" if decoder is True else ""
    parts += [told] if told and decoder != "freeze" else []  # a frozen one does not train, and some models have none
    return ", ".join(parts)
