"""A site's ledger of sums: with which hospitals its data were summed without noise, over all runs, in sums.jsonl.

It lies beside the privacy ledger and outlives every run, see `differencing` below for its rule. A line is written and
flushed to disk before the masked update of a new set leaves, in one step with the check, so two runs at once cannot both pass.
Whether the sum was opened later does not matter: a server may have opened it.

Lines are chained by SHA-256, as those of audit.jsonl are, and every update's line there names one of them. A file that is lost,
cut or edited stops all jobs with masks and without noise until the administrator has accepted that (ledger.py). Which
hospitals lost lines named is then taken from the records of what left. So are sums that a former version made, which kept no
ledger of them. Their data are not known: they count for all.

Sums count together where they are of the same data, whatever model, layers, adapter, ranks or values they train: one layer's
gradient can be read in another's (a LoRA's B holds it times a known matrix, a bottleneck's bias is that of the layer before),
and names tell little. Data are the same by the name that the privacy ledger has for them, or by their list's path; all
generated data are one. What sums show together must hold the threshold of the new one, or of an earlier one where that is
larger, up to as many hospitals as the new sum has.

All sums of one hospital's data must weigh updates alike: two sums of the same hospitals that differ in `federation.max_weight`
alone differ by a multiple of the largest hospital's update. Of sums of a former version the weights are not known; they are
taken to be those of the new sum.

Names of hospitals stand for hospitals: `partners` of site.yaml are what holds against whoever issues certificates.
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
from consilium.core.schema import SMALLEST_NOISE
from consilium.core.storage import file_lock, room_for
from consilium.privacy.ledger import audit

# differencing ----------------------------------------------------------------------------------------------------------
# Differencing: what sums of several sets of hospitals show together, where training repeats and no noise is added.
#
# Let x_i be hospital i's weighted update, the same vector in every sum: training repeats bit for bit. A server with the sums
# over the sets U_1 to U_k, written as vectors of 0 and 1, can make of them sum_j c_j U_j for any numbers c_j, and nothing else
# that is linear. So it reads a sum over U_4 = {1, 2, 3, 4} less one over {1, 2, 3} as hospital 4's update.
#
# The rule. A new set W is let in where every W + sum_j c_j U_j holds at least `least` hospitals (numbers that are not 0), or
# where W itself is such a combination of earlier sets, so that it shows nothing new. By induction over the sets, every
# combination of sums that were let in is 0 or holds `least` hospitals: the last set in it that adds anything was let in with
# that property. With `least` = threshold, c colluders among them leave threshold - c honest ones, as they do in one sum. A
# difference of threshold - c hospitals would not do: {1, 2, 3} and {1, 2, 4} differ in 3 and 4, and a colluding 4 takes its own
# part off.
#
# Pairs are not enough: of A+B+x, A+C+x, D+B+x and D+C+x+y, where A to D are two hospitals each, any two differ in four or more,
# and the first less the second less the third plus the fourth is hospital y. The rule looks at all combinations.
#
# What the rule does not give:
# - It counts hospitals, not how much each weighs in a combination.
# - It looks at the sets that one hospital was in, because it knows no others. Any two sums share a hospital that remembers
#   both, or no honest one, and then their difference holds all the honest ones of each. For three sums that fails: {1, 2, 3},
#   {3, 4, 5} and {1, 2, 4, 5} give twice hospital 3's update, and no hospital is in all of them.
# - It compares sets, not values. Where only one hospital's data change between two sums of the same hospitals, their difference
#   shows that change. A hospital whose updates left without masks counts as one that colludes.
# - It says nothing of what one sum of many hospitals tells of one of them, or of a model that many sums have made.
# Over many runs only noise protects.

MOST_STEPS = 20_000
"""Combinations that are looked at, a few seconds. The search grows with the number of sets that overlap."""
Sites = frozenset[str]
Row = list[Fraction]


class UndecidedError(Exception):
    """So many sets overlap that what they show together was not found in MOST_STEPS."""


def smallest_shown(summed: Sites, known: Collection[Sites], least: int) -> Sites | None:
    """Return the fewest hospitals that the new sum shows together with known ones, None where these are `least` or more.

    None also where the new sum follows from the known ones. Hospitals that are in the same sets count together: a combination
    has one number for all of them. Raises UndecidedError.
    """
    sets = [summed, *known]
    kinds = Counter(tuple(name in one for one in sets) for name in sorted(frozenset[str]().union(*sets)))
    order = sorted(kinds, key=lambda kind: (-kinds[kind], kind))  # the largest first: they leave the fewest ways
    basis, new = list[Row](), [Fraction(kind[0]) for kind in order]
    for number in range(1, len(sets)):
        row = _reduced([Fraction(kind[number]) for kind in order], basis)
        basis += [row] if any(row) else []
    if not any(_reduced(new, basis)):
        return None
    try:
        found = _Search([kinds[kind] for kind in order], least).run(new, basis)
    except RecursionError:  # a frame for each kind of hospital
        raise UndecidedError from None
    if found is None:
        return None
    shown = {kind for kind, number in zip(order, found, strict=True) if number}
    return frozenset(name for name in frozenset[str]().union(*sets) if tuple(name in one for one in sets) in shown)


def _reduced(row: Row, basis: list[Row]) -> Row:
    """Return a row less what of it the rows of a basis make; all 0 where they make it whole."""
    for one in basis:
        row = _without(row, one, next(place for place, number in enumerate(one) if number))
    return row


def _without(row: Row, other: Row, place: int) -> Row:
    """Return a row less as much of another as makes its number at a place 0."""
    if not row[place]:
        return row
    factor = row[place] / other[place]
    return [a - factor * b for a, b in zip(row, other, strict=True)]


class _Search:
    """Finds the lightest `new` + combination of rows by deciding place after place: 0 there, or paid for by its weight.

    A lightest one is among those that are found: where a row is left, it can make one more place 0, which is no heavier.
    """

    def __init__(self, weights: list[int], least: int) -> None:
        self.weights, self.best, self.steps = weights, least, 0
        self.found: Row | None = None

    def run(self, new: Row, rows: list[Row]) -> Row | None:
        """Return a combination lighter than `least`, the lightest, None without one."""
        self._look(0, 0, new, rows)
        return self.found

    def _look(self, place: int, weight: int, new: Row, rows: list[Row]) -> None:
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
            self._look(place + 1, heavier if new[place] else weight, new, rows)
            return
        others = [_without(row, pivot, place) for row in rows if row is not pivot]
        self._look(place + 1, weight, _without(new, pivot, place), others)
        self._look(place + 1, heavier, new, rows)


# sum ledger ------------------------------------------------------------------------------------------------------------

FILE = "sums.jsonl"
SUM, ALLOWED, ACCEPTED = "sum", "allowed", "accepted"
"""Kinds of lines: a set of hospitals that was summed, one that an administrator allows, lost lines that one has accepted."""
SEAL = "sums"
"""Field of audit.jsonl: the seal of the line in sums.jsonl for the update's sum."""
GENERATED = "generated data"
SHOWN = 5
"""Hospitals that a message names."""


@dataclass(frozen=True)
class PastSum:
    """A sum without noise: its hospitals, and its `least`, see `differencing` above.

    `weights`: the rule by which updates were weighed. `data` and `weights` are None where they are not known.
    """

    sites: frozenset[str]
    data: frozenset[str] | None
    least: int
    weights: str | None = None


class SumLedger:
    """The ledger of sums in `records`, as a job sees it whose `data` have these names. `weights`: its rule of weights."""

    def __init__(self, records: Path, data: Iterable[str], job: str = "", weights: str = "uniform") -> None:
        self.records, self.path = records, records / FILE
        self.data, self.job, self.weights = frozenset(data), job, weights
        self._last = ""
        self._unlisted: list[PastSum] | None = None

    def check(self, sites: Iterable[str], least: int) -> None:
        """Raise RefusedError where a sum over these hospitals, with earlier ones, would show fewer than `least` of them."""
        with _locked(self.path):
            self._check(frozenset(sites), least, self._read())

    def add(self, sites: Iterable[str], least: int, run: str) -> str:
        """Write down a sum that a masked update is about to join; return the seal of the line that stands for it.

        A set that is there already for these data gets no second line. Raises RefusedError as `check`.
        """
        new = frozenset(sites)
        with _locked(self.path):
            lines = self._read()
            self._check(new, least, lines)
            if (known := next((line for line in lines if self._covers(line, new, least)), None)) is not None:
                return str(known["seal"])
            said = {"sites": sorted(new), "data": sorted(self.data), "least": least, "weights": self.weights}
            audit.AuditLog(self.path).add({"kind": SUM, **said, "job": self.job, "run": run}, again=True)
            return str(self._read()[-1]["seal"])

    def _read(self) -> list[dict[str, Any]]:
        """Return all lines. Raises RefusedError where the file is damaged, or lacks what this process saw in it."""
        lines = read(self.path)
        if self._last and self._last not in {line["seal"] for line in lines}:
            raise _lost(self.path, "lacks lines that it had a moment ago")
        self._last = lines[-1]["seal"] if lines else ""
        return lines

    def _covers(self, line: Mapping[str, Any], sites: frozenset[str], least: int) -> bool:
        """Tell whether a line says of a sum over these hospitals all that a new one would."""
        same = line["kind"] == SUM and frozenset(line["sites"]) == sites and line["weights"] == self.weights
        return same and line["least"] >= least and self.data <= set(line["data"])

    def _check(self, new: frozenset[str], least: int, lines: list[dict[str, Any]]) -> None:
        if any(line["kind"] == ALLOWED and frozenset(line["sites"]) == new for line in lines):
            return
        if self._unlisted is None:
            self._unlisted = unlisted(self.records)
        past = [*_sums(lines), *self._unlisted]
        past = [one for one in past if one.data is None or one.data & self.data]
        if other := next((one for one in past if one.weights not in (None, self.weights)), None):
            raise _refused(
                f"weighs by {self.weights!r}, an earlier one by {other.weights!r}, which shows the hospital that weighs most",
                new,
                "weigh as before (federation.weighting, federation.max_weight)",
            )
        needed = max([least, *(min(one.least, len(new)) for one in past)])
        try:
            shown = smallest_shown(new, {one.sites for one in past}, needed)
        except UndecidedError:
            raise _refused(f"overlaps with {len(past)} earlier ones, too many to work out what they show", new) from None
        if shown is not None:
            held = f"less earlier ones shows {_join_sites(shown)} alone, and at least {needed} must be in all that is shown"
            raise _refused(held, new)


def read(path: Path) -> list[dict[str, Any]]:
    """Return every line of a ledger of sums with its seal, oldest first. Raises RefusedError for a file that was altered."""
    found, before = list[dict[str, Any]](), ""
    try:
        texts = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    except (OSError, ValueError):
        raise _lost(path, "cannot be read") from None
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict) or line.get("previous") != before or not _is_line(line):
            raise _lost(path, f"was altered in line {number}")
        before = hashlib.sha256(text.encode()).hexdigest()
        found.append(line | {"seal": before})
    return found


def _is_line(line: Mapping[str, Any]) -> bool:
    lists = {SUM: ("sites", "data"), ALLOWED: ("sites",), ACCEPTED: ("lost",)}.get(str(line.get("kind")))
    texts = lists is not None and all(_is_texts(line.get(name)) for name in lists)
    return texts and (line["kind"] != SUM or (type(line.get("least")) is int and isinstance(line.get("weights"), str)))


def _is_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def check_whole(records: Path) -> int:
    """Return how many lines the ledger of sums has.

    Raises RefusedError if it is damaged, or if a record of what left names a line that is neither there nor accepted as lost.
    """
    lines = read(records / FILE)
    for path, seal in lost(records, lines):
        raise _lost(records / FILE, f"lacks what {path} names ({seal[:16]})")
    return len(lines)


def lost(records: Path, lines: list[dict[str, Any]]) -> Iterator[tuple[Path, str]]:
    """Yield every seal that a record under `records` names and no line has or accepts as lost, with the record."""
    known = {line["seal"] for line in lines} | {seal for line in lines if line["kind"] == ACCEPTED for seal in line["lost"]}
    for path in sorted(records.rglob(audit.FILE)):
        yield from ((path, seal) for line in audit.lines(path) if (seal := line.get(SEAL)) is not None and seal not in known)


def unlisted(records: Path) -> list[PastSum]:
    """Return the sums in records of what left that the ledger lacks: of a former version, or of lost lines."""
    known = {line["seal"] for line in read(records / FILE)}
    return [one for path in sorted(records.rglob(audit.FILE)) for one in _unlisted(audit.lines(path), known)]


def _unlisted(lines: list[dict[str, Any]], known: set[str]) -> Iterator[PastSum]:
    """Yield such sums of one run's record; one with noise has none.

    A former version wrote no seal of a sum, and named its hospitals as `survivors`. A run may have lines of both.
    """
    if any(_has_noise(line["privacy"]) for line in lines if isinstance(line.get("privacy"), dict)):
        return
    least = max((one for line in lines if type(one := _masked(line).get("threshold")) is int), default=0)
    sealed = [line for line in lines if SEAL in line]
    listed = {frozenset(sites) for line in sealed if line[SEAL] in known and _is_texts(sites := _masked(line).get("sites"))}
    named = [_masked(line).get("sites") for line in sealed if line[SEAL] not in known]
    named += [line.get("survivors") for line in lines]
    for sites in named:
        if _is_texts(sites) and sites and frozenset(sites) not in listed:
            yield PastSum(frozenset(sites), None, least)


def _has_noise(private: Mapping[str, Any]) -> bool:
    """Tell whether a release's privacy, as its record has it, is noise that a masked sum comes to the server with."""
    if private.get("trust") == "central" or private.get("calibration") == "paper":
        return False
    spend = private.get("spend")
    multiplier = private.get("noise_multiplier", spend.get("noise_multiplier") if isinstance(spend, dict) else None)
    return isinstance(multiplier, int | float) and multiplier >= SMALLEST_NOISE


def _masked(line: Mapping[str, Any]) -> Mapping[str, Any]:
    found = line.get("masked")
    return found if isinstance(found, dict) else {}


def _sums(lines: list[dict[str, Any]]) -> list[PastSum]:
    return [
        PastSum(frozenset(line["sites"]), frozenset(line["data"]), line["least"], line["weights"])
        for line in lines
        if line["kind"] == SUM
    ]


def allow(records: Path, sites: Iterable[str], reason: str) -> dict[str, Any]:
    """Let sums over these hospitals pass from now on, whatever earlier ones show with them, and put that on record.

    Returns what was recorded. Raises ConfigError for too few names, RefusedError for a ledger of sums that is not whole.
    """
    if len(named := sorted(set(sites))) < 2 or not all(named):
        raise ConfigError(f"--allow: {','.join(named)!r}: name all hospitals of the sum, with commas between them")
    check_whole(records)
    said = {"kind": ALLOWED, "sites": named, "reason": reason, "by": getpass.getuser()}
    with _locked(records / FILE):
        audit.AuditLog(records / FILE).add(said, again=True)
    audit.AuditLog(records / audit.FILE).add(said | {"kind": "sum allowed"}, again=True)
    return said


def accept(records: Path, stamp: str) -> dict[str, Any]:
    """Let the ledger of sums count as it stands; return the seals that it has lost, and where a damaged file was put.

    Of a damaged file the sums that can be read are written anew. Sets that an administrator had allowed in it lose that. What
    else the lost lines said of hospitals is read from the records of what left.
    """
    path, aside = records / FILE, None
    with _locked(path):
        try:
            lines = read(path)
        except RefusedError:
            aside = path.rename(path.with_name(f"{FILE}.{stamp}"))
            for line in _readable(aside):
                audit.AuditLog(path).add(line, again=True)
            lines = read(path)
        if gone := sorted({seal for _, seal in lost(records, lines)}):
            audit.AuditLog(path).add({"kind": ACCEPTED, "lost": gone}, again=True)
    return {"lost_sums": gone, "sums_set_aside": str(aside) if aside else None}


def _readable(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the sums of a damaged file, without their place in its chain."""
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and line.get("kind") == SUM and _is_line(line):
            yield {name: value for name, value in line.items() if name != "previous"}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time check and write; the file's own lock is its writer's, see audit.py."""
    with room_for(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = file_lock(path.with_name(f".{path.name}.lock"))
    with lock:
        yield


def _join_sites(sites: frozenset[str]) -> str:
    more = len(sites) - SHOWN
    return ", ".join(sorted(sites)[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _refused(what: str, sites: frozenset[str], first: str = "ask the hospitals of an earlier sum") -> RefusedError:
    """Return the refusal of a sum, with its remedies; `first`: the one that needs no administrator."""
    names = shlex.quote(",".join(sorted(sites)))
    remedy = f"{first}, or add noise (privacy.unit: site), or let the administrator run: "
    remedy += f"consilium privacy sums KIT --allow {names} --reason TEXT"
    return RefusedError(
        f"secure aggregation without noise: a sum over {_join_sites(sites)} {what}; nothing was sent; {remedy}", Reason.SUMS
    )


def _lost(path: Path, what: str) -> RefusedError:
    remedy = "restore the file from a backup, or run `consilium privacy accept` to go on with what is left"
    return RefusedError(f"{path}: the ledger of sums {what}; nothing was sent; {remedy}", Reason.LEDGER)
