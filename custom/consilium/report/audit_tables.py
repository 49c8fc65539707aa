"""Tables of what left a site: messages, tensors and the values beside them. For its page and `consilium audit`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from pydantic import BaseModel, ValidationError

from consilium.core.grouping import group_by_key
from consilium.core.sanitize import first_names_text, shown
from consilium.privacy.accounting import VOID
from consilium.privacy.audit_log import FILE, is_void
from consilium.report.tables import Column, Table, columns, only_true, size_text, timestamp_text
from consilium.report.untrusted_files import Number, as_finite_float

MOST_ROWS = 500
"""Most rows of a table. The others are counted in a note."""


class _Tensor(BaseModel):
    shape: list[int] = []
    dtype: str = ""
    bytes: Number = 0.0
    norm: Number = 0.0


class _Masked(BaseModel):
    threshold: int
    asked: int


class _Message(BaseModel):
    time: Number | None = None
    kind: str = "-"
    round: int | None = None
    phase: int | None = None
    tensors: dict[str, _Tensor] = {}
    values: dict[str, Any] = {}
    scalars: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    privacy: dict[str, Any] = {}
    masked: _Masked | None = None
    reason: str = ""
    what: str = ""
    step: str = ""

    @property
    def beside(self) -> dict[str, Any]:
        """What the message has beside tensors, by name."""
        return self.values | self.scalars | self.metrics


def record_tables(record: Mapping[str, Any], run: str, strict: bool = False) -> list[Table]:
    """Return the tables of an audit record, see audit_log.py: its messages, their tensors, and the values beside these.

    A table of tensors or values without rows is left out. `run`: the end of all titles. A message of a form that no guard
    writes is counted in a note; if `strict`, it raises ValueError.
    """
    messages, unread = list[_Message](), 0
    for one in record["messages"]:
        try:
            messages.append(_Message.model_validate(one))
        except (ValidationError, OverflowError):
            if strict:
                raise
            unread += 1
    wrong = {f"{unread} messages are not as we write them; see consilium audit.": unread}
    heads = columns("time", "message", "round", "tensors", "bytes", "norm", "epsilon so far", "beside them")
    overview = _first_rows(f"Messages that left this site{run}", heads, map(_message_row, messages), len(messages), wrong)
    norms = group_by_key(
        ((shown(name, 160), "x".join(map(str, tensor.shape)), shown(tensor.dtype, 20)), tensor.norm)
        for message in messages
        for name, tensor in message.tensors.items()
    )
    values = group_by_key((shown(name, 160), value) for message in messages for name, value in message.beside.items())
    rows = ([*key, str(len(v)), f"{min(v):.4g} to {max(v):.4g}"] for key, v in sorted(norms.items()))
    heads = columns("tensor", "shape", "type", "times", "norm")
    tensors = _first_rows(f"Tensors that left, as sent{run}", heads, rows, len(norms))
    rows = ([name, str(len(v)), _range_or_words(v)] for name, v in sorted(values.items()))
    beside = _first_rows(f"Values that left beside tensors{run}", columns("what", "times", "values"), rows, len(values))
    return [overview, *(table for table in (tensors, beside) if table.rows)]


def _first_rows(
    title: str, heads: list[Column], rows: Iterable[list[str]], count: int, notes: Mapping[str, object] = {}
) -> Table:
    """Return a table of the first MOST_ROWS of `count` rows, with a note on the others, and those of `notes` that hold."""
    more = {f"{count - MOST_ROWS} more are in {FILE}.": count > MOST_ROWS}
    return Table(title, heads, list(islice(rows, MOST_ROWS)), only_true({**more, **notes}))


def _message_row(one: _Message) -> list[str]:
    """Return a message's row: the reason of a refusal, or else its first six values, and how many more there are."""
    epsilon, there = as_finite_float(one.privacy.get("epsilon")), one.tensors.values()
    norm = "" if one.masked or not there else f"{math.sqrt(sum(tensor.norm**2 for tensor in there)):.4g}"
    said = [
        f"{shown(key, 60)} {value:.4g}" if isinstance(value, float) else shown(f"{key} {value}", 90)
        for key, value in one.beside.items()
    ]
    more = f" and {len(said) - 6} more" if len(said) > 6 else ""
    told = shown(one.reason or one.what or one.step) or ", ".join(said[:6]) + more
    hidden = f"masked; read by nobody alone; threshold {one.masked.threshold} of {one.masked.asked}" if one.masked else ""
    asked = "" if one.round is None or one.round < 0 else f"{one.round + 1}"
    return [
        "-" if one.time is None else timestamp_text(one.time),
        shown(one.kind, 40),
        asked + (f", phase {one.phase + 1}" if asked and one.phase else ""),
        str(len(there)),
        size_text(sum(tensor.bytes for tensor in there)),
        norm,
        "" if epsilon is None else f"{epsilon:.4g}",
        "; ".join(part for part in (hidden, told) if part),
    ]


def _range_or_words(values: Sequence[Any]) -> str:
    """Return the smallest and the largest if all are numbers; else the different texts, at most ten."""
    if all(as_finite_float(value) is not None for value in values):
        ends = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in (min(values), max(values))]
        return " to ".join(dict.fromkeys(ends))
    return first_names_text(list(dict.fromkeys(shown(value, 90) or "nothing" for value in values)), 10)


def privacy_texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what a record's messages have cost so far, or why nothing; then `privacy_warnings`.

    Raises KeyError, TypeError or ValueError for a message of a form that no guard writes.
    """
    if private := [one["privacy"] for one in messages if one.get("privacy")]:
        last = private[-1]
        named = f"{last['unit']} level, {last['adjacency']}, trust {last['trust']}"
        noise = f"clip {last['clip']:g}, noise multiplier {last['noise_multiplier']:.4g}"
        spent = f"epsilon {last['epsilon']:.4g} at delta {last['delta']:g} so far in this run"
        return [f"privacy: {spent} ({named}; {noise})", *privacy_warnings(messages)]
    left = [one for one in messages if one.get("tensors")]
    if not left:
        return ["privacy: no update and no model left"]
    if not all("masked" in one for one in left):
        return ["privacy: none; updates left as trained"]
    sets = sorted({tuple(sites) for one in left if (sites := one["masked"].get("sites"))})
    named = "; summed with: " + " / ".join(", ".join(one) for one in sets) if sets else ""
    why = "which hide within this run; over many runs only noise protects"
    return [f"privacy: no noise; updates left under masks, {why}{named}"]


def privacy_warnings(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return warnings on a run's messages without a valid promise of privacy."""
    private = [one["privacy"] for one in messages if one.get("privacy")]
    seeded, void = sum(bool(one.get("seeded")) for one in private), sum(map(is_void, private))
    warnings = {
        f"NOT PRIVATE: the noise of {seeded} messages came from a seed (noise_seed in site.yaml)": seeded,
        f"{void} messages are {VOID}": void,
    }
    return only_true(warnings)
