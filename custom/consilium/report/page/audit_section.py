"""What a hospital keeps of a run: the messages that left it, from its audit.jsonl, and its privacy ledger."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from consilium.config.site import load_site
from consilium.core.errors import ConfigError, RefusedError
from consilium.core.sanitize import shown
from consilium.privacy.accounting.composition import VOID
from consilium.privacy.ledger.audit import FILE, read
from consilium.privacy.ledger.ledger import Ledger, summary
from consilium.report.metrics_file import Number
from consilium.report.page.words import size, stamp
from consilium.report.plain_files import MOST_BYTES, finite, is_folder, subfolders
from consilium.report.tables import Table, columns

MOST_ROWS = 500
LEDGER = "ledger.sqlite"
NO_BOUND = "no bound (its jobs are of a finer unit, or without noise)"


class _Tensor(BaseModel):
    shape: list[int] = []
    dtype: str = ""
    bytes: Number = 0.0
    norm: Number = 0.0


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
    reason: str = ""


def audits(folder: Path) -> list[dict[str, Any]]:
    """Return, for each run that a site's folder has known, its messages as tables, and whether the record was altered."""
    found: list[dict[str, Any]] = []
    for path in [place / FILE for place in [folder, *subfolders(folder)]]:
        if not path.is_file() or path.is_symlink():
            continue
        if path.stat().st_size > MOST_BYTES:
            found.append({"record": None, "why": f"{path} has more than {MOST_BYTES // 1024**2} MiB; see consilium audit."})
            continue
        try:
            record = read(path)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            found.append({"record": None, "why": f"{path} cannot be read as a record; see consilium audit."})
            continue
        messages, unread = list[_Message](), 0
        for one in record["messages"]:
            try:
                messages.append(_Message.model_validate(one))
            except (ValidationError, OverflowError):
                unread += 1
        run = shown(path.parent.name, 80)
        found.append({"record": record, "messages": _messages(messages, unread, run), "tensors": _tensors(messages, run)})
    return found


def _messages(messages: Sequence[_Message], unread: int, run: str) -> Table:
    """Return a row per message that left the site."""
    rows = []
    for one in messages[:MOST_ROWS]:
        epsilon, there = finite(one.privacy.get("epsilon")), one.tensors.values()
        said = [
            f"{shown(key, 60)} {value:.4g}" if isinstance(value, float) else shown(f"{key} {value}", 90)
            for key, value in (one.values | one.scalars | one.metrics).items()
        ]
        more = f" and {len(said) - 6} more" if len(said) > 6 else ""
        asked = "" if one.round is None or one.round < 0 else f"{one.round + 1}"
        row = ["-" if one.time is None else stamp(one.time), shown(one.kind, 40)]
        row.append(asked + (f", phase {one.phase + 1}" if asked and one.phase else ""))
        row += [str(len(there)), size(sum(tensor.bytes for tensor in there))]
        row.append(f"{sum(tensor.norm**2 for tensor in there) ** 0.5:.4g}" if there else "")
        rows.append([*row, "" if epsilon is None else f"{epsilon:.4g}", shown(one.reason) or ", ".join(said[:6]) + more])
    left = len(messages) - len(rows)
    notes = [f"{left} more messages are in {FILE}."] if left > 0 else []
    notes += [f"{unread} messages are not as we write them; see consilium audit."] if unread else []
    heads = columns("time", "message", "round", "tensors", "bytes", "norm", "epsilon so far", "beside them")
    return Table(f"Messages that left this site, run {run}", heads, rows, notes)


def _tensors(messages: Sequence[_Message], run: str) -> Table | None:
    """Return a row per tensor that ever left, with how often, and the range of its norm as sent."""
    seen: dict[tuple[str, str, str], list[float]] = {}
    for name, one in (pair for message in messages for pair in message.tensors.items()):
        seen.setdefault((shown(name, 160), "x".join(map(str, one.shape)), shown(one.dtype, 20)), []).append(one.norm)
    rows = [[*key, str(len(v)), f"{min(v):.4g} to {max(v):.4g}"] for key, v in sorted(seen.items())][:MOST_ROWS]
    heads = columns("tensor", "shape", "type", "times", "norm")
    return Table(f"Tensors that left, as sent, run {run}", heads, rows) if rows else None


def ledger_of(folder: Path) -> Path | None:
    """Return a site's ledger: in its folder in a simulation, in a kit beside the runs or where its site.yaml has it."""
    folder = folder.absolute()
    # STATE/runs/RUN and STATE/runs/RUN/sites/NAME
    kits = [runs.parent for runs in (folder.parent, folder.parent.parent.parent) if runs.name == "runs"]
    found = [place / LEDGER for place in (folder, *kits) if is_folder(place)]
    for settings in (kit.parent / "local" / "site.yaml" for kit in kits):
        try:
            own = load_site(settings).privacy.ledger if settings.is_file() and not settings.is_symlink() else None
        except ConfigError:
            own = None
        found += [own] if own is not None else []
    return next((path for path in found if path.is_file() and not path.is_symlink()), None)


def ledger(path: Path | None) -> tuple[Table | None, str]:
    """Return what all jobs together cost each data set of this site, or None and why that is unknown."""
    if path is None:
        return None, "There is no ledger here: no private job has run, or it is kept elsewhere."
    try:
        entries: list[Mapping[str, Any]] = list(summary(Ledger(path)))
    except RefusedError as error:
        return None, shown(error, 600)
    rows = []
    for one in entries:
        spent = [one["epsilon"][unit]["1e-05"] for unit in ("record", "patient", "site")]
        row = [one["dataset"], ", ".join(one["jobs"]), str(one["releases"])]
        row += [f"{one['void']}: {VOID}" if one["void"] else "0", one["adjacency"], ", ".join(one["trust"])]
        rows.append([*row, *(NO_BOUND if finite(value) is None else f"{value:.4g}" for value in spent)])
    heads = ["data set", "jobs", "releases", "void rows", "adjacency", "trust"]
    heads += [f"epsilon of {unit}" for unit in ("a record", "a patient", "the site")]
    return Table("What all jobs together cost, at delta 1e-05", columns(*heads), rows), ""
