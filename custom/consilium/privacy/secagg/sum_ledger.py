"""A site's ledger of sums, sums.jsonl: the sets of hospitals with which its data were summed without noise, over all runs.

The file is beside the privacy ledger and outlasts every run. Its rule is under `differencing` below. Before the masked update
of a new set leaves, the set is checked and its line is written to disk in one locked step, so two concurrent runs cannot both
pass. A line counts even if the sum was never opened, because the hospital cannot know whether the server opened it.

Lines are chained by SHA-256, as in audit.jsonl, and the line of every update in audit.jsonl names its line here. A file that is
lost, cut or edited stops all jobs with masks and without noise until the administrator accepts it (ledger.py). The hospitals
in lost lines are then read from the records of what left. So are the sums of a former version, which had no ledger of sums. The
data of these sums are not known, so they count for every data set.

All sums over the same data count together, whatever model, layers, adapter, ranks or values they train. The reason is that one
layer's gradient can be computed from another's (the gradient of a LoRA's B holds it times a known matrix, the gradient of a
bottleneck's bias is that of the layer before). A different name does not prove that two models are independent. Two data sets
are the same if they have the same name in the privacy ledger, or the same path of the list; all generated data are one data
set. Any combination of sums must contain at least as many hospitals as the threshold of the new sum. If an earlier sum had a
larger threshold, that one applies, limited to the number of hospitals in the new sum.

All sums over one hospital's data must use the same weights rule. Two sums of the same hospitals that differ only in
`federation.max_weight` differ by a multiple of the largest hospital's update. The weights of a former version's sums are not
known, so they are assumed to equal those of the new sum.

Hospitals are identified by their names. Against the issuer of certificates, only `partners` in site.yaml protects.
"""

import getpass
import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeGuard

from consilium.core.errors import ConfigError, Reason, RefusedError
from consilium.core.sanitize import first_names_text
from consilium.core.schema import SMALLEST_NOISE
from consilium.core.storage import file_lock, refuse_if_unwritable
from consilium.privacy.ledger import audit_log

# differencing ----------------------------------------------------------------------------------------------------------
# Differencing: what a server learns by combining sums over several sets of hospitals, if training is repeatable and no noise is
# added.
#
# Let x_i be the weighted update of hospital i. It is the same vector in every sum, because training repeats bit for bit. Write
# the sets U_1 to U_k as vectors of 0 and 1. From the sums over these sets a server can compute sum_j c_j U_j for any numbers
# c_j, and no other linear combination. For example, the sum over {1, 2, 3, 4} minus the sum over {1, 2, 3} is hospital 4's
# update.
#
# The rule. A new set W is accepted if every combination W + sum_j c_j U_j has at least `least` hospitals with a coefficient
# other than 0. W is also accepted if it is itself a combination of earlier sets, because then it reveals nothing new. By
# induction, every combination of accepted sums is 0 or has `least` hospitals: the last set in it that adds something new was
# accepted with that property. With `least` = threshold, c colluders leave threshold - c honest hospitals, as in a single sum. A
# difference of only threshold - c hospitals would not be enough: {1, 2, 3} and {1, 2, 4} differ in 3 and 4, and a colluding 4
# subtracts its own part.
#
# Checking pairs is not enough. Let A to D be two hospitals each. Of A+B+x, A+C+x, D+B+x and D+C+x+y any two differ in four or
# more hospitals. But the first minus the second minus the third plus the fourth is hospital y. So the rule checks all
# combinations.
#
# Limits of the rule:
# - It counts hospitals, not how much weight each has in a combination.
# - It checks the sets in which one hospital took part, because it knows no others. Two sums either share an honest hospital,
#   which remembers both, or they share none, and their difference holds all honest hospitals of both. Three sums can fail:
#   {1, 2, 3}, {3, 4, 5} and {1, 2, 4, 5} give twice hospital 3's update, and no hospital is in all three.
# - It compares sets, not values. If only one hospital's data change between two sums of the same hospitals, the difference
#   reveals that change. A hospital whose updates left without masks counts as a colluder.
# - It does not limit what one sum of many hospitals reveals about one of them, or what a model made from many sums reveals.
# Over many runs only noise protects.

MOST_STEPS = 20_000
"""The largest number of search steps (a few seconds). The search grows with the number of overlapping sets."""
Sites = frozenset[str]
Row = list[Fraction]


class UndecidedError(Exception):
    """So many sets overlap that the search did not finish in MOST_STEPS steps."""


def smallest_revealed_set(summed: Sites, known: Collection[Sites], least: int) -> Sites | None:
    """Return the smallest set of hospitals that the new sum `summed` reveals in combination with `known` sums.

    Return None if that set has `least` or more hospitals, or if the new sum is a combination of the known ones. Hospitals that
    are in the same sets are treated as one, because they have the same coefficient. Raises UndecidedError.
    """
    sets = [summed, *known]
    kinds = Counter(tuple(name in one for one in sets) for name in sorted(frozenset[str]().union(*sets)))
    order = sorted(kinds, key=lambda kind: (-kinds[kind], kind))  # the largest first, to prune the search early
    basis, new = list[Row](), [Fraction(kind[0]) for kind in order]
    for number in range(1, len(sets)):
        row = _reduce([Fraction(kind[number]) for kind in order], basis)
        basis += [row] if any(row) else []
    if not any(_reduce(new, basis)):
        return None
    try:
        found = _Search([kinds[kind] for kind in order], least).run(new, basis)
    except RecursionError:  # the search uses one frame per kind of hospital
        raise UndecidedError from None
    if found is None:
        return None
    shown = {kind for kind, number in zip(order, found, strict=True) if number}
    return frozenset(name for name in frozenset[str]().union(*sets) if tuple(name in one for one in sets) in shown)


def _reduce(row: Row, basis: list[Row]) -> Row:
    """Return `row` reduced by the rows of `basis`; all 0 if it is a combination of them."""
    for one in basis:
        row = _eliminate(row, one, next(place for place, number in enumerate(one) if number))
    return row


def _eliminate(row: Row, other: Row, place: int) -> Row:
    """Return `row` minus the multiple of `other` that makes its number at index `place` 0."""
    if not row[place]:
        return row
    factor = row[place] / other[place]
    return [a - factor * b for a, b in zip(row, other, strict=True)]


class _Search:
    """Finds the combination `new` + rows with the least weight: the sum of the `weights` of its numbers that are not 0.

    The search decides index after index whether the number is made 0 by a row, or its weight is added. A combination with the
    least weight is always found, because a row that is left can make one more number 0, which never adds weight.
    """

    def __init__(self, weights: list[int], least: int) -> None:
        self.weights, self.best, self.steps = weights, least, 0
        self.found: Row | None = None

    def run(self, new: Row, rows: list[Row]) -> Row | None:
        """Return the combination with the least weight, None if that is `least` or more."""
        self._decide_place(0, 0, new, rows)
        return self.found

    def _decide_place(self, place: int, weight: int, new: Row, rows: list[Row]) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise UndecidedError
        if weight >= self.best:
            return
        if place == len(new):
            self.best, self.found = weight, new
            return
        heavier = weight + self.weights[place]
        pivot = next((row for row in rows if row[place]), None)
        if pivot is None:
            self._decide_place(place + 1, heavier if new[place] else weight, new, rows)
            return
        others = [_eliminate(row, pivot, place) for row in rows if row is not pivot]
        self._decide_place(place + 1, weight, _eliminate(new, pivot, place), others)
        self._decide_place(place + 1, heavier, new, rows)


# sum ledger ------------------------------------------------------------------------------------------------------------

FILE = "sums.jsonl"
SUM, ALLOWED, ACCEPTED = "sum", "allowed", "accepted"
"""Kinds of lines: a set that was summed, a set that an administrator allows, lost lines that an administrator accepted."""
SEAL = "sums"
"""The field of audit.jsonl with the seal of the line in sums.jsonl for the update's sum."""
GENERATED = "generated data"
SHOWN = 5
"""The largest number of hospitals that a message names."""


@dataclass(frozen=True)
class PastSum:
    """An earlier sum without noise: its hospitals, the names of its `data`, and its `least` (see `differencing` above).

    `weights`: the rule by which updates were weighted. `data` and `weights` are None if not known.
    """

    sites: frozenset[str]
    data: frozenset[str] | None
    least: int
    weights: str | None = None


class SumLedger:
    """The ledger of sums in the folder `records`, used by one job. `data`: names of its data; `weights`: its weights rule."""

    def __init__(self, records: Path, data: Iterable[str], job: str = "", weights: str = "uniform") -> None:
        self.records, self.path = records, records / FILE
        self.data, self.job, self.weights = frozenset(data), job, weights
        self._last = ""
        self._unlisted: list[PastSum] | None = None

    def check(self, sites: Iterable[str], least: int) -> None:
        """Raise RefusedError if a sum over `sites`, combined with earlier sums, would reveal fewer than `least` hospitals."""
        with _lock_ledger(self.path):
            self._check_set(frozenset(sites), least, self._read())

    def add(self, sites: Iterable[str], least: int, run: str) -> str:
        """Record a sum before a masked update leaves for it. Return the seal of its line.

        A set that is already recorded for these data gets no second line. Raises RefusedError as `check` does.
        """
        new = frozenset(sites)
        with _lock_ledger(self.path):
            lines = self._read()
            self._check_set(new, least, lines)
            for line in lines:
                same = line["kind"] == SUM and frozenset(line["sites"]) == new and line["weights"] == self.weights
                if same and line["least"] >= least and self.data <= set(line["data"]):
                    return str(line["seal"])
            said = {"sites": sorted(new), "data": sorted(self.data), "least": least, "weights": self.weights}
            audit_log.AuditLog(self.path).add({"kind": SUM, **said, "job": self.job, "run": run}, again=True)
            return str(self._read()[-1]["seal"])

    def _read(self) -> list[dict[str, Any]]:
        """Return all lines. Raises RefusedError if the file is damaged, or lacks the last line that this process saw."""
        lines = read(self.path)
        if self._last and self._last not in {line["seal"] for line in lines}:
            raise _damaged_ledger(self.path, "lacks lines that it had a moment ago")
        self._last = lines[-1]["seal"] if lines else ""
        return lines

    def _check_set(self, new: frozenset[str], least: int, lines: list[dict[str, Any]]) -> None:
        if any(line["kind"] == ALLOWED and frozenset(line["sites"]) == new for line in lines):
            return
        if self._unlisted is None:
            self._unlisted = find_unlisted_sums(self.records)
        listed = [
            PastSum(frozenset(line["sites"]), frozenset(line["data"]), line["least"], line["weights"])
            for line in lines
            if line["kind"] == SUM
        ]
        past = [one for one in (*listed, *self._unlisted) if one.data is None or one.data & self.data]
        if other := next((one for one in past if one.weights not in (None, self.weights)), None):
            raise _sum_refusal(
                f"weighs by {self.weights!r}, an earlier one by {other.weights!r}, which shows the hospital that weighs most",
                new,
                "weigh as before (federation.weighting, federation.max_weight)",
            )
        needed = max([least, *(min(one.least, len(new)) for one in past)])
        try:
            shown = smallest_revealed_set(new, {one.sites for one in past}, needed)
        except UndecidedError:
            raise _sum_refusal(f"overlaps with {len(past)} earlier ones, too many to work out what they show", new) from None
        if shown is not None:
            raise _sum_refusal(
                f"less earlier ones shows {first_names_text(sorted(shown), SHOWN)} alone, "
                f"and at least {needed} must be in all that is shown",
                new,
            )


def read(path: Path) -> list[dict[str, Any]]:
    """Return all lines of a ledger of sums with their seals, oldest first. Raises RefusedError for an altered file."""
    found, before = list[dict[str, Any]](), ""
    try:
        texts = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    except (OSError, ValueError):
        raise _damaged_ledger(path, "cannot be read") from None
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict) or line.get("previous") != before or not _is_line(line):
            raise _damaged_ledger(path, f"was altered in line {number}")
        before = hashlib.sha256(text.encode()).hexdigest()
        found.append(line | {"seal": before})
    return found


def _is_line(line: Mapping[str, Any]) -> bool:
    lists = {SUM: ("sites", "data"), ALLOWED: ("sites",), ACCEPTED: ("lost",)}.get(str(line.get("kind")))
    texts = lists is not None and all(_is_text_list(line.get(name)) for name in lists)
    return texts and (line["kind"] != SUM or (type(line.get("least")) is int and isinstance(line.get("weights"), str)))


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
    for path in sorted(records.rglob(audit_log.FILE)):
        yield from (
            (path, seal) for line in audit_log.lines(path) if (seal := line.get(SEAL)) is not None and seal not in known
        )


def find_unlisted_sums(records: Path) -> list[PastSum]:
    """Return the sums that records of what left name and the ledger lacks: from a former version, or from lost lines.

    A run with noise has no such sums. A former version wrote no seal, and named the hospitals as `survivors`. A run may have
    lines of both versions.
    """
    known, found = {line["seal"] for line in read(records / FILE)}, list[PastSum]()
    for path in sorted(records.rglob(audit_log.FILE)):
        lines = audit_log.lines(path)
        if any(_has_noise(line["privacy"]) for line in lines if isinstance(line.get("privacy"), dict)):
            continue
        least = max((one for line in lines if type(one := _masked_field(line).get("threshold")) is int), default=0)
        sealed = [line for line in lines if SEAL in line]
        listed = {
            frozenset(sites)
            for line in sealed
            if line[SEAL] in known and _is_text_list(sites := _masked_field(line).get("sites"))
        }
        named = [_masked_field(line).get("sites") for line in sealed if line[SEAL] not in known]
        named += [line.get("survivors") for line in lines]
        for sites in named:
            if _is_text_list(sites) and sites and frozenset(sites) not in listed:
                found.append(PastSum(frozenset(sites), None, least))
    return found


def _has_noise(private: Mapping[str, Any]) -> bool:
    """Tell whether, by a release's privacy fields in its record, the masked sum carries noise when it reaches the server."""
    if private.get("trust") == "central" or private.get("calibration") == "paper":
        return False
    spend = private.get("spend")
    multiplier = private.get("noise_multiplier", spend.get("noise_multiplier") if isinstance(spend, dict) else None)
    return isinstance(multiplier, int | float) and multiplier >= SMALLEST_NOISE


def _masked_field(line: Mapping[str, Any]) -> Mapping[str, Any]:
    found = line.get("masked")
    return found if isinstance(found, dict) else {}


def allow(records: Path, sites: Iterable[str], reason: str) -> dict[str, Any]:
    """Allow sums over these hospitals from now on, whatever they reveal with earlier sums, and put that on record.

    Return the values recorded. Raises ConfigError for too few names, and RefusedError for a damaged ledger of sums.
    """
    if len(named := sorted(set(sites))) < 2 or not all(named):
        raise ConfigError(f"--allow: {','.join(named)!r}: name all hospitals of the sum, with commas between them")
    check_and_count_lines(records)
    said = {"kind": ALLOWED, "sites": named, "reason": reason, "by": getpass.getuser()}
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
    with refuse_if_unwritable(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = file_lock(path.with_name(f".{path.name}.lock"))
    with lock:
        yield


def _sum_refusal(what: str, sites: frozenset[str], first: str = "ask the hospitals of an earlier sum") -> RefusedError:
    """Return the refusal of a sum, with its remedies. `first`: the remedy that needs no administrator."""
    return RefusedError(
        f"secure aggregation without noise: a sum over {first_names_text(sorted(sites), SHOWN)} {what}; nothing was sent; "
        f"{first}, or add noise (privacy.unit: site), or let the administrator run: "
        f"consilium privacy sums KIT --allow {shlex.quote(','.join(sorted(sites)))} --reason TEXT",
        Reason.SUMS,
    )


def _damaged_ledger(path: Path, what: str) -> RefusedError:
    return RefusedError(
        f"{path}: the ledger of sums {what}; nothing was sent; "
        "restore the file from a backup, or run `consilium privacy accept` to go on with what is left",
        Reason.LEDGER,
    )
