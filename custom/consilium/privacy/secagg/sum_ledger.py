"""A site's ledger of sums, sums.jsonl: the sets of hospitals with which its data were summed without noise, over all runs.

Training is repeatable bit for bit, so the weighted update of a hospital is the same vector in every sum without noise. From
sums over different sets of hospitals a server can compute their differences: the sum over {1, 2, 3, 4} minus the sum over
{1, 2, 3} is hospital 4's update. So a hospital's data are summed with one set of hospitals only. A sum over the same set again
reveals nothing new. Another set is refused, unless the administrator allows it. Sums with noise have no such rule.

The file is beside the privacy ledger and outlasts every run. Before the masked update of a new set leaves, the set is checked
and its line is written to disk in one locked step, so two concurrent runs cannot both pass. A line counts even if the sum was
never opened, because the hospital cannot know whether the server opened it.

Lines are chained by SHA-256, as in audit.jsonl, and the line of every update in audit.jsonl names its line here. A file that is
lost, cut or edited stops all jobs with masks and without noise until the administrator accepts it (ledger.py). The hospitals
and the weights rule in lost lines are then read from the records of what left. The data of these sums are not known, so they
count for every data set.

All sums over the same data count together, whatever model, layers, adapter, ranks or values they train. The reason is that one
layer's gradient can be computed from another's (the gradient of a LoRA's B holds it times a known matrix, the gradient of a
bottleneck's bias is that of the layer before). A different name does not prove that two models are independent. Two data sets
are the same if they have the same name in the privacy ledger, or the same path of the list; all generated data are one data
set.

All sums over one hospital's data must use the same weights rule. Two sums of the same hospitals that differ only in
`federation.max_weight` differ by a multiple of the largest hospital's update. An administrator who allows another set does not
allow another weights rule: with one colluding hospital, the two changes together would reveal a hospital that is in both sets.
The rule has to be allowed by its name.

Limits of the rule:
- It compares sets, not values. If only one hospital's data change between two sums of the same hospitals, the difference
  reveals that change. A hospital whose updates left without masks counts as a colluder.
- It does not limit what one sum of many hospitals reveals about one of them, or what a model made from many sums reveals.
Over many runs only noise protects. Hospitals are identified by their names. Against the issuer of certificates, only `partners`
in site.yaml protects.
"""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

from consilium.core.errors import ConfigError, Reason, RefusedError
from consilium.core.sanitize import first_names_text
from consilium.core.storage import file_lock, make_private_folder, refuse_if_unwritable
from consilium.privacy import audit_log

FILE = "sums.jsonl"
SUM, ALLOWED, ACCEPTED = "sum", "allowed", "accepted"
"""Kinds of lines: a set that was summed, a set that an administrator allows, lost lines that an administrator accepted.

A line of an allowed set has `weights` if the administrator also allows this weights rule for the set.
"""
UNIFORM = "uniform"
"""The weights rule by which every hospital weighs 1."""
SEAL = "sums"
"""The field of audit.jsonl with the seal of the line in sums.jsonl for the update's sum."""
GENERATED = "generated data"


class SumLedger:
    """The ledger of sums in the folder `records`, used by one job. `data`: names of its data; `weights`: its weights rule."""

    def __init__(self, records: Path, data: Iterable[str], job: str = "", weights: str = UNIFORM) -> None:
        self.records, self.path = records, records / FILE
        self.data, self.job, self.weights = frozenset(data), job, weights
        self._last = ""
        self._unlisted: list[tuple[frozenset[str], str]] | None = None

    def check(self, sites: Iterable[str]) -> None:
        """Raise RefusedError if these data were summed before, over other hospitals than `sites` or by another weights rule."""
        with _lock_ledger(self.path):
            self._check_set(frozenset(sites), self._read())

    def add(self, sites: Iterable[str], run: str) -> str:
        """Record a sum before a masked update leaves for it. Return the seal of its line.

        A set that is already recorded for these data gets no second line. Raises RefusedError as `check` does.
        """
        new = frozenset(sites)
        with _lock_ledger(self.path):
            lines = self._read()
            self._check_set(new, lines)
            for line in lines:
                same = line["kind"] == SUM and frozenset(line["sites"]) == new and line["weights"] == self.weights
                if same and self.data <= set(line["data"]):
                    return str(line["seal"])
            said = {"sites": sorted(new), "data": sorted(self.data), "weights": self.weights}
            audit_log.AuditLog(self.path).add({"kind": SUM, **said, "job": self.job, "run": run}, again=True)
            return str(self._read()[-1]["seal"])

    def _read(self) -> list[dict[str, Any]]:
        """Return all lines. Raises RefusedError if the file is damaged, or lacks the last line that this process saw."""
        lines = read(self.path)
        if self._last and self._last not in {line["seal"] for line in lines}:
            raise _damaged_ledger(self.path, "lacks lines that it had a moment ago")
        self._last = lines[-1]["seal"] if lines else ""
        return lines

    def _check_set(self, new: frozenset[str], lines: list[dict[str, Any]]) -> None:
        allowed = {line.get("weights", "") for line in lines if line["kind"] == ALLOWED and frozenset(line["sites"]) == new}
        if self.weights in allowed:
            return
        if self._unlisted is None:  # lost lines; read once, because the records of many runs are long
            known = {line["seal"] for line in lines}
            self._unlisted = [one[2:] for one in _sums_on_record(self.records) if one[1] not in known and one[2]]
        ours = [line for line in lines if line["kind"] == SUM and not self.data.isdisjoint(line["data"])]
        past = [(frozenset(line["sites"]), line["weights"]) for line in ours] + self._unlisted
        if other := next((weights for _, weights in past if weights not in (self.weights, "")), None):
            raise _sum_refusal(
                f"weighs by {self.weights!r}, an earlier one by {other!r}, which shows the hospital that weighs most",
                new,
                "weigh as before (federation.weighting, federation.max_weight)",
                self.weights,
            )
        sets = [sites for sites, _ in past]
        if sets and new not in sets and not allowed:
            apart = first_names_text(sorted(new ^ sets[-1]))
            raise _sum_refusal(f"and an earlier one differ in {apart}, whose updates the difference shows", new)


def read(path: Path) -> list[dict[str, Any]]:
    """Return all lines of a ledger of sums with their seals, oldest first. Raises RefusedError for an altered file."""
    if not path.is_file():
        return []
    try:
        record = audit_log.load_record(path)
    except (OSError, ValueError):
        raise _damaged_ledger(path, "cannot be read") from None
    lines = record["messages"]
    wrong = record["broken_line"] or next((number for number, line in enumerate(lines, start=1) if not _is_line(line)), None)
    if wrong is not None:
        raise _damaged_ledger(path, f"was altered in line {wrong}")
    seals = [*(line["previous"] for line in lines[1:]), record["seal"]]
    return [line | {"seal": seal} for line, seal in zip(lines, seals, strict=True)] if lines else []


def _is_line(line: Mapping[str, Any]) -> bool:
    lists = {SUM: ("sites", "data"), ALLOWED: ("sites",), ACCEPTED: ("lost",)}.get(str(line.get("kind")))
    texts = lists is not None and all(_is_text_list(line.get(name)) for name in lists)
    return texts and isinstance(line.get("weights", None if line["kind"] == SUM else ""), str)


def _is_text_list(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def check_and_count_lines(records: Path) -> int:
    """Return the number of lines in the ledger of sums.

    Raises RefusedError if it is damaged, or if a record of what left names a line that is missing and not accepted as lost.
    """
    lines = read(records / FILE)
    for path, seal in lost_sum_seals(records, lines):
        raise _damaged_ledger(records / FILE, f"lacks what {path} names ({seal[:16]})")
    return len(lines)


def lost_sum_seals(records: Path, lines: list[dict[str, Any]]) -> Iterator[tuple[Path, str]]:
    """Yield (record, seal) for every seal in a record under `records` that no line has or accepts as lost."""
    known = {line["seal"] for line in lines} | {seal for line in lines if line["kind"] == ACCEPTED for seal in line["lost"]}
    yield from ((path, seal) for path, seal, *_ in _sums_on_record(records) if seal not in known)


def _sums_on_record(records: Path) -> Iterator[tuple[Path, str, frozenset[str], str]]:
    """Yield record, seal, hospitals and weights rule of every sum in the records of what left.

    A set that cannot be read is empty, and so is a rule. Records of former versions have no rule.
    """
    for path in sorted(records.rglob(audit_log.FILE)):
        for line in audit_log.lines(path):
            if (seal := line.get(SEAL)) is not None:
                masked = line.get("masked")
                sites, weights = (masked.get("sites"), masked.get("weights")) if isinstance(masked, dict) else (None, None)
                yield (
                    path,
                    seal,
                    frozenset(sites) if _is_text_list(sites) else frozenset(),
                    weights if isinstance(weights, str) else "",
                )


def allow(records: Path, sites: Iterable[str], reason: str, weights: str = "") -> dict[str, Any]:
    """Allow sums over these hospitals from now on, whatever they reveal with earlier sums, and put that on record.

    `weights`: also allow this weights rule; "" allows only the rule of earlier sums. Return the values recorded. Raises
    ConfigError for too few names or an unknown rule, and RefusedError for a damaged ledger of sums.
    """
    if len(named := sorted(set(sites))) < 2 or not all(named):
        raise ConfigError(f"--allow: {','.join(named)!r}: name all hospitals of the sum, with commas between them")
    if weights and weights != UNIFORM and not re.fullmatch(r"samples, at most \d+", weights):
        raise ConfigError(f"--weights: {weights!r}: copy the rule from the refusal, such as 'samples, at most 200'")
    check_and_count_lines(records)
    said = {"kind": ALLOWED, "sites": named, "reason": reason, "by": audit_log.local_user()}
    said |= {"weights": weights} if weights else {}
    with _lock_ledger(records / FILE):
        audit_log.AuditLog(records / FILE).add(said, again=True)
    audit_log.AuditLog(records / audit_log.FILE).add(said | {"kind": "sum allowed"}, again=True)
    return said


def accept_ledger(records: Path, suffix: str) -> dict[str, Any]:
    """Accept the ledger of sums with its present lines. Return the lost seals, and the new path of a damaged file.

    The readable sums of a damaged file are written to a new file. Its sets that an administrator had allowed are no longer
    allowed. The hospitals in lost lines are read from the records of what left.
    """
    path, aside = records / FILE, None
    with _lock_ledger(path):
        try:
            lines = read(path)
        except RefusedError:
            aside = path.rename(path.with_name(f"{FILE}.{suffix}"))
            for line in _readable_sums(aside):
                audit_log.AuditLog(path).add(line, again=True)
            lines = read(path)
        if gone := sorted({seal for _, seal in lost_sum_seals(records, lines)}):
            audit_log.AuditLog(path).add({"kind": ACCEPTED, "lost": gone}, again=True)
    return {"lost_sums": gone, "sums_set_aside": str(aside) if aside else None}


def _readable_sums(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the sums of a damaged file, without the hash of the line before."""
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and line.get("kind") == SUM and _is_line(line):
            yield {name: value for name, value in line.items() if name != "previous"}


@contextmanager
def _lock_ledger(path: Path) -> Iterator[None]:
    """Let one process at a time check and write. The AuditLog that writes the file uses a different lock, see audit_log.py."""
    with refuse_if_unwritable(path), file_lock(make_private_folder(path.parent) / f".{path.name}.lock"):
        yield


def _sum_refusal(
    what: str, sites: frozenset[str], first: str = "ask the hospitals of an earlier sum", weights: str = ""
) -> RefusedError:
    """Return the refusal of a sum, with its remedies.

    `first`: the remedy that needs no administrator; `weights`: the weights rule that the administrator has to allow.
    """
    rule = f" --weights {shlex.quote(weights)}" if weights else ""
    return RefusedError(
        f"secure aggregation without noise: a sum over {first_names_text(sorted(sites))} {what}; nothing was sent; "
        f"{first}, or add noise (privacy.unit: site), or let the administrator run: "
        f"consilium privacy sums KIT --allow {shlex.quote(','.join(sorted(sites)))}{rule} --reason TEXT",
        Reason.SUMS,
    )


def _damaged_ledger(path: Path, what: str) -> RefusedError:
    return RefusedError(
        f"{path}: the ledger of sums {what}; nothing was sent; "
        "restore the file from a backup, or run `consilium privacy accept` to go on with what is left",
        Reason.LEDGER,
    )
