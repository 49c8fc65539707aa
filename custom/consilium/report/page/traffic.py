"""What went over the wire and how long it took, by site; who was asked, who answered, who was refused and why."""

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from consilium.messages import BYTES_DOWN, BYTES_UP, TRAIN_MEMORY, TRAIN_SECONDS
from consilium.report.clean import shown
from consilium.report.compare.runs import trained_parameters, trained_tensors
from consilium.report.page.record import Record
from consilium.report.page.scores import Table
from consilium.report.progress import when
from consilium.strategies.strategy import Role

MOST_REFUSALS = 200
"""Refusals that are listed; the others are counted."""
MOST_TENSORS = 500


def traffic(record: Record) -> Table | None:
    """Return the bytes of tensors that each site sent and received in training; None before anything did."""
    rows, total = [], Counter[str]()
    for site in record.sites:
        answers = [line["metrics"] for line in record.of("result") if line["site"] == site]
        sums = {name: sum(one.get(name, 0.0) for one in answers) for name in (BYTES_UP, BYTES_DOWN)}
        last = max((one.get(BYTES_UP, 0.0) for one in answers), default=0.0)
        rows.append([site, str(len(answers)), size(sums[BYTES_UP]), size(sums[BYTES_DOWN]), size(last)])
        total.update({"answers": len(answers), **sums})
    if not total["answers"]:
        return None
    rows.append(["all sites", str(total["answers"]), size(total[BYTES_UP]), size(total[BYTES_DOWN]), ""])
    columns = ["site", "updates", "sent", "received", "largest update"]
    return Table("Tensors between sites and server, in training", columns, rows, 1)


def size(count: float) -> str:
    """Return a number of bytes in words."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:,.2f} {unit}"
    return f"{count:,.0f} B"


def parameters(record: Record) -> str:
    """Return in a sentence which of the adapter's parameters travel; "" where the run does not tell."""
    if record.config.strategy.pools_data:
        return "The sites' data were pooled: nothing travelled, and the run is a reference, no federation."
    path = record.folder / "server" / "state.safetensors"
    found = None if path.is_symlink() else trained_parameters(record.config, path)
    if found is None:
        return ""
    shared, local, frozen = (found[role] for role in (Role.SHARED, Role.LOCAL, Role.FROZEN))
    rest = [f"{local:,} stay at their site"] * bool(local) + [f"{frozen:,} do not train"] * bool(frozen)
    return f"{shared:,} of the adapter's parameters travel{''.join(f', {one}' for one in rest)}."


def tensors(record: Record) -> Table | None:
    """Return a row per tensor of the adapter that travels, with how many numbers it has; None where the run does not tell."""
    path = record.folder / "server" / "state.safetensors"
    found = None if path.is_symlink() or record.config.strategy.pools_data else trained_tensors(record.config, path)
    rows = [[name, f"{size:,}"] for name, (role, size) in sorted((found or {}).items()) if role is Role.SHARED]
    more = [f"{len(rows) - MOST_TENSORS} more tensors travel."] if len(rows) > MOST_TENSORS else []
    return Table("Tensors that travel, by name", ["tensor", "numbers"], rows[:MOST_TENSORS], 0, more) if rows else None


def times(record: Record) -> tuple[list[tuple[str, str]], Table | None]:
    """Return how long the run took as pairs of texts, and the time of training at each site."""
    begins = _first(record, "started")
    ends = {line["round"]: line["time"] for line in record.of("concluded") if line["time"] is not None}
    took = [ends[r] - begins[r] for r in sorted(ends) if r in begins and ends[r] >= begins[r]]
    stamps = [line["time"] for line in record.lines if line["time"] is not None]
    facts = [("began", stamp(min(stamps))), ("last record", stamp(max(stamps)))] if stamps else []
    if took:
        middle = f"{duration(statistics.median(took))} (from {duration(min(took))} to {duration(max(took))})"
        facts += [("rounds, summed", duration(sum(took))), ("a round, median", middle)]
    finals = [line["time"] for line in record.of("final") if line["time"] is not None]
    if finals and ends and max(finals) >= max(ends.values()):
        facts.append(("closing evaluation", duration(max(finals) - max(ends.values()))))
    if record.resumed:
        facts.append(
            ("interrupted", f"gone on with {record.resumed} times; a pause is in no round's time but the one it fell into")
        )
    return facts, _training(record)


def _first(record: Record, event: str) -> dict[int, float]:
    found: dict[int, float] = {}
    for line in record.of(event):
        if line["time"] is not None:
            found.setdefault(line["round"], line["time"])
    return found


def _training(record: Record) -> Table | None:
    rows, memory = [], any(TRAIN_MEMORY in line["metrics"] for line in record.of("result"))
    for site in record.sites:
        answers = [line["metrics"] for line in record.of("result") if line["site"] == site]
        seconds = [one[TRAIN_SECONDS] for one in answers if TRAIN_SECONDS in one]
        most = max((one.get(TRAIN_MEMORY, 0.0) for one in answers), default=0.0)
        row = [site, duration(sum(seconds)) if seconds else "-", duration(statistics.median(seconds)) if seconds else "-"]
        rows.append(row + ([size(most) if most else "-"] if memory else []))
    if all(row[1] == "-" for row in rows):
        return None
    return Table("Training at the sites", ["site", "in all", "a round, median", *["GPU memory, most"] * memory], rows)


def stamp(seconds: float) -> str:
    """Return a time in words, in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "an impossible time"


def duration(seconds: float) -> str:
    """Return seconds in words."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def absences(record: Record) -> tuple[Table | None, Sequence[Mapping[str, Any]], int]:
    """Return who was asked and who answered, the refusals (`site`, `when`, `reason`), and how many more there are."""
    asked, answered, counted, refused = (Counter[str]() for _ in range(4))
    for line in record.of("started"):
        asked.update(line["sites"])
    answered.update(line["site"] for line in record.of("result"))
    for line in record.of("concluded"):
        counted.update(line["sites"])
    lines = list(record.of("refused"))
    refused.update(line["site"] for line in lines)
    rows = [
        [
            site,
            str(asked[site]),
            str(answered[site]),
            str(max(asked[site] - answered[site], 0)),
            str(counted[site]),
            str(refused[site]),
        ]
        for site in record.sites
    ]
    columns = ["site", "asked", "answered", "absent", "in the mean", "refused"]
    last = record.ended["round"] if record.ended else record.config.training.rounds
    told = [{"site": x["site"], "when": when(x, last), "reason": shown(x["reason"], 600)} for x in lines]
    return (
        (Table("Phases of training", columns, rows) if rows else None),
        told[:MOST_REFUSALS],
        max(len(told) - MOST_REFUSALS, 0),
    )
