"""`consilium data check`: open every sample of a data list, a folder per class, or a folder of texts, and report."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from consilium.core.errors import DataError, UnfitError
from consilium.core.grouping import group_by_key
from consilium.data.check_report import PATIENT, Findings, Trace
from consilium.data.check_samples import Classes, SampleReport, check_sample, map_by_file
from consilium.data.class_checks import (
    OF_NO_CLASS,
    UNDECLARED,
    classes_for,
    doubtful_name_findings,
    one_line_yaml,
    undeclared_label_values,
    undeclared_remedy,
)
from consilium.data.datalist import SPLITS, DataList, Item, Lost, read_datalist, with_challenge_splits
from consilium.data.pairs import MOST_VALUES
from consilium.data.patients import ALIKE, similar_patient_lines
from consilium.data.settings import DEFAULTS, PictureSettings
from consilium.data.text import Text, read_texts

NEAR = 12
"""Two pictures look alike if their 256-bit hashes differ in at most this many bits."""
_FAR = 999


def check_datalist(
    path: Path,
    classes: Classes = None,
    settings: PictureSettings = DEFAULTS,
    prepare_list: Callable[[DataList], DataList] | None = None,
    size: int = 0,
) -> Findings:
    """Open each image and mask of a list once and return the findings.

    `classes`: the job's classes; a label that belongs to none of them is then a problem. They also say whether labels are masks
    or class names. Without them, each label is taken as it looks. `prepare_list`: turns the list into the one that the job
    uses; the default is `with_challenge_splits`. `size`: pixels of the model's side; structures that are too small for it are
    warnings. Raises DataError if the list itself cannot be read.
    """
    bad: list[Lost] = []
    data = read_datalist(path, None if classes is None else not isinstance(classes, dict), bad)
    data = prepare_list(data) if prepare_list else with_challenge_splits(data)
    report = Findings.of(path, data, bad)
    for kind, line in data.notes:
        report.add_warning(kind, line)
    entries = [(split, item) for split in SPLITS for item in data.splits[split]]
    folder = path if path.is_dir() else path.parent
    reports = map_by_file([item for _, item in entries], lambda item: check_sample(item, settings, classes, size))
    for (split, item), found in zip(entries, reports, strict=True):
        image = item.image.relative_to(folder) if item.image.is_relative_to(folder) else item.image
        _add_sample(report, split, item, f"{image}{item.name_suffix}", found, classes)
        for one, count in found.vanished_classes.items():
            what = f"{split}: nothing of {one} is left at the model's {size} pixels; raise model.image_size, or set task.tiles"
            parts = f": {count} of {found.planes} planes or tiles" if found.planes > 1 else ""
            report.add_warning(what, f"{image}{item.name_suffix}{parts}", item)
    for number, name in enumerate(classes or ()):
        spellings = [name] if isinstance(classes, Mapping) else [name, str(number)]
        counts = sum((report.images_of_class.get(one, Counter()) for one in spellings), Counter[str]())
        lacking = [split for split in SPLITS if report.samples[split] and not counts[split]] if counts else []
        if not counts:
            report.add_warning("class of the job that no sample shows", name)
        for split in lacking:
            report.add_warning("class of the job that a split lacks", f"{split}: {name}")
    for kind, line in doubtful_name_findings(Counter(str(item.label) for _, item in entries if isinstance(item.label, str))):
        report.add_warning(kind, line)
    report_shared(report)
    return report


def _add_sample(report: Findings, split: str, item: Item, sample_name: str, found: SampleReport, classes: Classes) -> None:
    """Add the report of one sample to the findings of its list."""
    name = f"{split}: {sample_name}"
    if found.stop is not None:
        report.bad[split] += 1
        said = str(found.stop)
        if found.stop.kind == UNDECLARED and item.label_map is None:  # one proposal for all masks of all sites follows
            said = said.partition(OF_NO_CLASS)[0] + OF_NO_CLASS
        report.add_problem(found.stop.kind, f"{name}: {said}", item if found.size else None)
    elif item.label is None:
        report.bad[split] += 1
        report.add_problem("no class" if isinstance(classes, list | tuple) else "no mask", name, item)
    for add, told in ((report.add_problem, found.problems), (report.add_warning, found.warnings)):
        for kind, why in told:
            add(kind, f"{name}: {why}" if why else name, item)
    if found.size:
        report.sizes[found.size] += 1
    report.planes[split] += found.planes
    report.label_values.update(found.values)
    for one in found.classes:
        report.images_of_class.setdefault(one, Counter())[split] += 1
    report.traces.append(Trace(split, sample_name, found.marks, found.hash, split == "training"))


def check_texts(
    path: Path,
    length_of: Callable[[Text, str], int] | None = None,
    max_length: int = 0,
    class_of: Callable[[Text], int] | None = None,
) -> Findings:
    """Read every record of a text data set and return the findings.

    `length_of`: returns the length of a record of a split in the job's tokens, and raises UnfitError for a record that the job
    refuses there; lengths over `max_length` are then reported. `class_of`: raises DataError for a record whose class the job
    does not have. A prompt or a patient in two splits is a problem, because it leaks the test split into training. Raises
    DataError if a file cannot be read.
    """
    bad = list[DataError]()
    data = read_texts(path, bad=bad)
    report = Findings.of(path, data)
    for error in bad:
        report.add_problem("unusable record", str(error).removeprefix(f"{data.path}/"))
    for split, text in [(name, text) for name in SPLITS for text in data.splits[name]]:
        if not all(output.strip() for output in text.outputs):
            report.add_problem("empty answer", text.name)
        if class_of is not None:
            report.images_of_class.setdefault(text.label[:80], Counter())[split] += 1
            try:
                class_of(text)
            except DataError as error:
                report.add_problem("no class of the job", str(error))
        if length_of is not None:
            try:
                length = length_of(text, split)
            except UnfitError as error:
                report.add_problem("refused by the job", str(error))
                continue
            report.lengths[length] += 1
            if length > max_length:
                # a conversation is refused, other records are cut
                note = report.add_problem if text.history else report.add_warning
                note(f"longer than {max_length} tokens", f"{text.name}: {length}")
        key = hashlib.blake2b(text.prompt.encode(), digest_size=16).hexdigest()
        marks = (("duplicate between {}", key), *([(PATIENT, text.patient)] if text.patient else []))
        report.traces.append(Trace(split, text.name, marks, training=split == "training"))
    for length, count in sorted(report.lengths.items()):
        report.sizes[f"up to {max(16, 1 << (length - 1).bit_length())} tokens"] += count
    report_shared(report)
    within: Counter[str] = Counter(line.partition(":")[0] for line in report.warnings.pop("duplicate", []))
    for split, count in within.items():
        report.add_warning("prompt more than once in a split", f"{split}: {count} of {report.samples[split]}")
    return report


# samples in two places: two splits of a list, or two sites --------------------------------------------------------------------


def report_shared(report: Findings) -> None:
    """Report samples that two splits share as problems.

    Warn of pictures that look alike in two splits, of copies within one split, and of patients whose identifiers are nearly
    equal, because they may be one person. Each such patient is shown by one sample.
    """
    for kind, line in _compare_traces(report.traces):
        note = report.add_warning if kind in (_COPY, _LIKE) else report.add_problem
        note(kind.format("splits"), line)
    marks = ((mark, f"{trace.place}: {trace.name}") for trace in report.traces for mark in trace.marks)
    for line in similar_patient_lines((whose, name) for (kind, whose), name in marks if kind == PATIENT):
        report.add_warning(ALIKE, line)


def shared_sample_lines(reports: Iterable[tuple[str, Findings]]) -> dict[str, list[str]]:
    """Return a line for each sample, patient or study that two sites share, and for pictures that look alike, by kind.

    Samples that neither site trains on are left out.
    """
    traces = [Trace(name, f"{t.place}: {t.name}", t.marks, t.hash, t.training) for name, one in reports for t in one.traces]
    # training samples come first: samples that no site trains on may be a common test set
    pairs = _compare_traces(sorted(traces, key=lambda t: not t.training), training=True)
    return group_by_key((kind.format("sites"), line) for kind, line in pairs if kind != _COPY)


def setting_suggestions(reports: Mapping[str, Findings], classes: Classes, max_length: int = 0) -> list[str]:
    """Return lines that say what to write into a job for the data of all sites: values of its classes, and its text length.

    `reports`: the findings by site, without sites whose site.yaml maps labels. `classes`: the job's, None without a job.
    """
    found = []
    values = {name: {value for value in one.label_values if isinstance(value, int) and value} for name, one in reports.items()}
    many = {name: values.pop(name) for name in [name for name, some in values.items() if len(some) >= MOST_VALUES]}
    if isinstance(classes, Mapping):
        found += [
            f"{name}: {undeclared_remedy([some], classes)}"
            for name, some in many.items()
            if UNDECLARED in reports[name].problems
        ]
    every = list(values.values())
    if isinstance(classes, Mapping) and undeclared_label_values(set().union(*every), classes):
        found.append(f"for all masks: {undeclared_remedy(every, classes)}")
    elif classes is None and len({frozenset(one) for one in every if one}) > 1:
        told = "; ".join(f"{name}: {', '.join(map(str, sorted(one)))}" for name, one in values.items() if one)
        found.append(
            f"values of the masks differ by site ({told}); all are in task.classes: {one_line_yaml(classes_for(every))}"
        )
    lengths = sum((one.lengths for one in reports.values()), Counter[int]())
    if lengths and max_length:
        found.append(token_length_advice(lengths, max_length))
    return found


def token_length_advice(lengths: Counter[int], max_length: int) -> str:
    """Return percentiles of texts' lengths in tokens. If some are cut, add the `model.max_length` that keeps texts whole."""
    every = np.sort(np.repeat(list(lengths), list(lengths.values())))
    parts = {share: int(every[math.ceil(len(every) * share / 100) - 1]) for share in (50, 90, 95, 99, 100)}
    told = ", ".join(f"{share} % up to {most}" for share, most in parts.items())
    if not (cut := int((every > max_length).sum())):
        return f"tokens: {told}; none is cut at model.max_length {max_length}"
    most, all_of_them = (8 * math.ceil(parts[share] / 8) for share in (99, 100))
    enough = f"{most} to keep 99 % whole, " if max_length < most < all_of_them else ""
    return (
        f"tokens: {told}; {cut / len(every):.0%} are cut at model.max_length {max_length}; "
        f"write model.max_length: {enough}{all_of_them} to keep all whole"
    )


_COPY, _LIKE = "duplicate", "looks alike in two {}"
"""Kinds of pairs that share no mark between two places: a copy in one place, and pictures that look alike in two."""


def _compare_traces(traces: Iterable[Trace], training: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (kind, line) for pairs of samples that share a mark, then for pictures that look alike.

    The kind is that of the strongest mark that a trace of another split or site shares. If none does, it is _COPY for a copy in
    the same split or site. `training`: marks are compared with training samples only.
    """
    seen: dict[tuple[str, str], Trace] = {}
    left, pairs = [], list[tuple[str, Trace, Trace]]()
    for trace in traces:
        if shared := next((m for m in trace.marks if m in seen and seen[m].place != trace.place), None):
            pairs.append((shared[0], trace, seen[shared]))
        else:
            left.append(trace)
            if trace.marks[0] in seen:
                pairs.append((_COPY, trace, seen[trace.marks[0]]))
        if trace.training or not training:
            seen |= {mark: trace for mark in trace.marks if mark not in seen}
    # each picture is paired with the earlier one of another place that looks most like it, if one of the two is trained on
    known = [trace for trace in left if trace.hash is not None]
    hashes = np.frombuffer(b"".join(trace.hash or b"" for trace in known), np.uint64).reshape(len(known), 4)
    groups = {name: number for number, name in enumerate(dict.fromkeys(trace.place for trace in known))}
    places = np.array([groups[trace.place] for trace in known])
    trained = np.array([trace.training for trace in known])
    for number, trace in enumerate(known):
        comparable = (places[:number] != places[number]) & (trained[:number] | trace.training)
        apart = np.where(comparable, np.bitwise_count(hashes[:number] ^ hashes[number]).sum(1), _FAR)
        if apart.min(initial=_FAR) <= NEAR:
            pairs.append((_LIKE, trace, known[int(apart.argmin())]))
    yield from ((kind, f"{one.place}: {one.name} = {other.place}: {other.name}") for kind, one, other in pairs)
