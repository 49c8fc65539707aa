"""Tables of the messages that left a site and of their tensors, for a site's page and for `consilium audit`."""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from consilium.core.sanitize import shown
from consilium.privacy.audit_log import FILE
from consilium.report.tables import Table, columns, only_true, size_text, timestamp_text
from consilium.report.untrusted_files import Number, as_finite_float

MOST_ROWS = 500
"""Messages and tensors that are listed, at most. Further messages are counted in a note."""


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


def message_and_tensor_tables(record: Mapping[str, Any], run: str, strict: bool = False) -> tuple[Table, Table | None]:
    """Return a table of the messages in an audit record, see audit_log.py, and one of their tensors, None without tensors.

    `run`: the end of both titles. A message of a form that no guard writes is counted in a note; if `strict`, it raises
    ValueError.
    """
    messages, unread = list[_Message](), 0
    for one in record["messages"]:
        try:
            messages.append(_Message.model_validate(one))
        except (ValidationError, OverflowError):
            if strict:
                raise
            unread += 1
    seen: dict[tuple[str, str, str], list[float]] = {}
    for name, tensor in (pair for message in messages for pair in message.tensors.items()):
        key = (shown(name, 160), "x".join(map(str, tensor.shape)), shown(tensor.dtype, 20))
        seen.setdefault(key, []).append(tensor.norm)
    rows = [[*key, str(len(v)), f"{min(v):.4g} to {max(v):.4g}"] for key, v in sorted(seen.items())][:MOST_ROWS]
    heads = columns("tensor", "shape", "type", "times", "norm")
    tensors = Table(f"Tensors that left, as sent{run}", heads, rows) if rows else None
    rows = []
    for one in messages[:MOST_ROWS]:
        epsilon, there = as_finite_float(one.privacy.get("epsilon")), one.tensors.values()
        norm = "" if one.masked or not there else f"{math.sqrt(sum(tensor.norm**2 for tensor in there)):.4g}"
        said = [
            f"{shown(key, 60)} {value:.4g}" if isinstance(value, float) else shown(f"{key} {value}", 90)
            for key, value in (one.values | one.scalars | one.metrics).items()
        ]
        more = f" and {len(said) - 6} more" if len(said) > 6 else ""
        asked = "" if one.round is None or one.round < 0 else f"{one.round + 1}"
        row = [
            "-" if one.time is None else timestamp_text(one.time),
            shown(one.kind, 40),
            asked + (f", phase {one.phase + 1}" if asked and one.phase else ""),
            str(len(there)),
            size_text(sum(tensor.bytes for tensor in there)),
        ]
        told = shown(one.reason or one.what or one.step) or ", ".join(said[:6]) + more
        hidden = f"masked; read by nobody alone; threshold {one.masked.threshold} of {one.masked.asked}" if one.masked else ""
        row += [norm, "" if epsilon is None else f"{epsilon:.4g}", "; ".join(part for part in (hidden, told) if part)]
        rows.append(row)
    left = len(messages) - len(rows)
    notes = {
        f"{left} more messages are in {FILE}.": left > 0,
        f"{unread} messages are not as we write them; see consilium audit.": unread,
    }
    heads = columns("time", "message", "round", "tensors", "bytes", "norm", "epsilon so far", "beside them")
    return Table(f"Messages that left this site{run}", heads, rows, only_true(notes)), tensors
