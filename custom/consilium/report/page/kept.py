"""What a hospital keeps of a run: what left it, from its audit.jsonl, and its privacy ledger."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from consilium.config.site import load_site
from consilium.errors import ConfigError, RefusedError
from consilium.privacy.audit import FILE, read
from consilium.privacy.composition import VOID
from consilium.privacy.ledger import Ledger, summary
from consilium.report.clean import shown
from consilium.report.page.files import MOST_BYTES, folders, is_folder, number
from consilium.report.page.scores import Table
from consilium.report.page.traffic import size, stamp

MOST_ROWS = 500
LEDGER = "ledger.sqlite"
HIGHEST = "no bound (its jobs are of a finer unit, or without noise)"


def audits(folder: Path) -> list[Path]:
    """Return a site's records of what left it, one for each run that its folder has known; none by way of a link."""
    found = [place / FILE for place in [folder, *folders(folder)]]
    return [path for path in found if path.is_file() and not path.is_symlink()]


def audit(path: Path) -> tuple[Mapping[str, Any] | None, str]:
    """Return what a site's record says of what left it, and why that is not known."""
    if path.stat().st_size > MOST_BYTES:
        return None, f"{path} has more than {MOST_BYTES // 1024**2} MiB; see consilium audit."
    try:
        found = read(path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None, f"{path} cannot be read as a record; see consilium audit."
    return found | {"messages": [message for message in found["messages"] if isinstance(message, dict)]}, ""


def messages(found: Mapping[str, Any], run: str) -> Table:
    """Return a row per message that left the site."""
    rows = [_row(message) for message in found["messages"][:MOST_ROWS]]
    more = len(found["messages"]) - len(rows)
    notes = [f"{more} more messages are in {FILE}."] if more > 0 else []
    columns = ["time", "message", "round", "tensors", "bytes", "norm", "epsilon so far", "beside them"]
    return Table(f"Messages that left this site, run {run}", columns, rows, 0, notes)


def _row(message: Mapping[str, Any]) -> list[str]:
    tensors = _tensors(message)
    epsilon = number(_dict(message.get("privacy")).get("epsilon"))
    norm = sum((number(one.get("norm")) or 0.0) ** 2 for one in tensors.values()) ** 0.5
    round, phase = (number(message.get(name)) for name in ("round", "phase"))
    when = number(message.get("time"))
    return [
        "-" if when is None else stamp(when),
        shown(message.get("kind", "-"), 40),
        "" if round is None or round < 0 else f"{round + 1:.0f}" + (f", phase {phase + 1:.0f}" if phase else ""),
        str(len(tensors)),
        size(sum(number(one.get("bytes")) or 0.0 for one in tensors.values())),
        f"{norm:.4g}" if tensors else "",
        "" if epsilon is None else f"{epsilon:.4g}",
        _beside(message),
    ]


def _dict(raw: Any) -> dict[str, Any]:
    return raw if isinstance(raw, dict) else {}


def _tensors(message: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: one for name, one in _dict(message.get("tensors")).items() if isinstance(one, dict)}


def _beside(message: Mapping[str, Any]) -> str:
    if message.get("reason"):
        return shown(message["reason"], 300)
    said = {key: value for part in ("values", "scalars", "metrics") for key, value in _dict(message.get(part)).items()}
    told = [
        f"{shown(key, 60)} {value:.4g}" if isinstance(value, float) else shown(f"{key} {value}", 90)
        for key, value in said.items()
    ]
    return ", ".join(told[:6]) + (f" and {len(told) - 6} more" if len(told) > 6 else "")


def tensors(found: Mapping[str, Any], run: str) -> Table | None:
    """Return a row per tensor that ever left, with how often, and the range of its norm as sent."""
    seen: dict[tuple[str, str, str], list[float]] = {}
    for message in found["messages"]:
        for name, one in _tensors(message).items():
            shape = "x".join(str(side) for side in one.get("shape", []) if isinstance(side, int))
            seen.setdefault((shown(name, 160), shape, shown(one.get("dtype", ""), 20)), []).append(
                number(one.get("norm")) or 0.0
            )
    rows = [[*key, str(len(v)), f"{min(v):.4g} to {max(v):.4g}"] for key, v in sorted(seen.items())][:MOST_ROWS]
    return Table(f"Tensors that left, as sent, run {run}", ["tensor", "shape", "type", "times", "norm"], rows) if rows else None


def ledger_of(folder: Path) -> Path | None:
    """Return a site's ledger: in its folder in a simulation, in a kit beside the runs; None where there is none."""
    folder = folder.absolute()
    places = (folder, folder.parent.parent, folder.parent.parent.parent.parent)  # STATE/runs/RUN, STATE/runs/RUN/sites/NAME
    kits = [
        place
        for place, runs in zip(places[1:], (folder.parent, folder.parent.parent.parent), strict=True)
        if runs.name == "runs"
    ]
    found = [place / LEDGER for place in (folder, *kits) if is_folder(place)]
    found += [path for place in kits if (path := _elsewhere(place)) is not None]
    return next((path for path in found if path.is_file() and not path.is_symlink()), None)


def _elsewhere(state: Path) -> Path | None:
    """Return where a kit's site.yaml has put the ledger; None where it says nothing, or is none."""
    path = state.parent / "local" / "site.yaml"
    try:
        return load_site(path).privacy.ledger if path.is_file() and not path.is_symlink() else None
    except ConfigError:
        return None


def ledger(path: Path) -> tuple[Table | None, str]:
    """Return what all jobs together cost each data set of this site, and why that is not known."""
    try:
        rows = [_ledger_row(one) for one in summary(Ledger(path))]
    except RefusedError as error:
        return None, shown(error, 600)
    columns = [
        "data set",
        "jobs",
        "releases",
        "void rows",
        "adjacency",
        "trust",
        "epsilon of a record",
        "epsilon of a patient",
        "epsilon of the site",
    ]
    return Table("What all jobs together cost, at delta 1e-05", columns, rows), ""


def _ledger_row(one: Mapping[str, Any]) -> list[str]:
    spent = [one["epsilon"][unit]["1e-05"] for unit in ("record", "patient", "site")]
    texts = [f"{value:.4g}" if number(value) is not None else HIGHEST for value in spent]
    named: Sequence[str] = (
        one["dataset"],
        ", ".join(one["jobs"]),
        str(one["releases"]),
        f"{one['void']}: {VOID}" if one["void"] else "0",
        one["adjacency"],
        ", ".join(one["trust"]),
    )
    return [*(shown(text, 300) for text in named), *texts]
