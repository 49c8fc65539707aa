"""Samples that are in two places: two splits of a list, or two sites. There they leak the test into the training."""

from collections.abc import Iterable, Iterator

import numpy as np

from consilium.data.check_report import PATIENT, Findings, Trace
from consilium.data.identifiers import ALIKE, alike

NEAR = 12
"""Bits of 256 by which two pictures that look alike differ at most."""
_BLOCK = 512
_FAR = 999


def find_copies(report: Findings) -> None:
    """Report what two splits share as problems, what looks alike in two splits and what one split has twice as warnings."""
    told: set[int] = set()
    seen: dict[tuple[str, str], Trace] = {}
    for index, trace in enumerate(report.traces):
        if shared := _shared(trace, seen):
            kind, first = shared
            report.problem(kind.format("splits"), _line(trace, first))
            told.add(index)
        elif (first := seen.get(trace.marks[0], trace)) is not trace:
            report.warn("duplicate", _line(trace, first))
        for mark in trace.marks:
            seen.setdefault(mark, trace)
    for trace, like in _alike([trace for index, trace in enumerate(report.traces) if index not in told]):
        report.warn("looks alike in two splits", _line(trace, like))


def find_alike(report: Findings) -> None:
    """Warn of patients whose identifiers are nearly equal, by a sample of each: they may be one person."""
    first: dict[str, str] = {}
    for trace in report.traces:
        for kind, key in trace.marks:
            if kind == PATIENT:
                first.setdefault(key, f"{trace.place}: {trace.name}")
    for group in alike(first):
        report.warn(ALIKE, " ~ ".join(first[key] for key in group))


def shared_by_sites(reports: Iterable[tuple[str, Findings]]) -> dict[str, list[str]]:
    """Return what two sites share, by kind: a sample that one of them trains on, a patient, a study, a picture alike."""
    traces = [Trace(name, f"{t.place}: {t.name}", t.marks, t.hash, t.training) for name, one in reports for t in one.traces]
    found: dict[str, list[str]] = {}
    seen: dict[tuple[str, str], Trace] = {}
    left = []
    for trace in sorted(traces, key=lambda t: not t.training):  # what nobody trains on may be shared: a common test
        if shared := _shared(trace, seen):
            found.setdefault(shared[0].format("sites"), []).append(_line(trace, shared[1]))
        else:
            left.append(trace)
        for mark in trace.marks if trace.training else ():
            seen.setdefault(mark, trace)
    for trace, like in _alike(left):
        found.setdefault("looks alike at two sites", []).append(_line(trace, like))
    return found


def _shared(trace: Trace, seen: dict[tuple[str, str], Trace]) -> tuple[str, Trace] | None:
    """Return the strongest thing that another place has too, and who there has it."""
    return next(((m[0], seen[m]) for m in trace.marks if m in seen and seen[m].place != trace.place), None)


def _line(trace: Trace, other: Trace) -> str:
    return f"{trace.place}: {trace.name} = {other.place}: {other.name}"


def _alike(traces: list[Trace]) -> Iterator[tuple[Trace, Trace]]:
    """Yield pictures with the one that is most like them among those before, in other places, where one of them trains."""
    known = [trace for trace in traces if trace.hash is not None]
    hashes = np.frombuffer(b"".join(trace.hash or b"" for trace in known), np.uint64).reshape(len(known), 4)
    groups = {name: number for number, name in enumerate(dict.fromkeys(trace.place for trace in known))}
    places = np.array([groups[trace.place] for trace in known])
    training = np.array([trace.training for trace in known])
    for start in range(0, len(known), _BLOCK):
        part = slice(start, start + _BLOCK)
        apart = np.zeros((len(hashes[part]), start + len(hashes[part])), np.uint16)
        for word in range(4):
            apart += np.bitwise_count(hashes[part, word, None] ^ hashes[: start + _BLOCK, word])
        rows, before = np.arange(len(known))[part, None], np.arange(apart.shape[1])
        apart[(places[rows] == places[before]) | ~(training[rows] | training[before]) | (before > rows)] = _FAR
        for row in np.flatnonzero(apart.min(1, initial=_FAR) <= NEAR):
            yield known[start + row], known[int(apart[row].argmin())]
