"""Look at instruction data before anyone trains on it: counts, empty answers, lengths, records that two splits share."""

import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from consilium.data.check_report import PATIENT, Findings, Trace
from consilium.data.datalist import SPLITS
from consilium.data.duplicates import find_alike, find_copies
from consilium.data.text import Text, read_texts


def check_texts(path: Path, length_of: Callable[[Text], int] | None = None, max_length: int = 0) -> Findings:
    """Read every record and report; with `length_of` also lengths in a job's tokens, and which exceed `max_length`.

    Equal prompts, or one patient, in two splits leak the test into training and are problems. Raises DataError where a file
    cannot be read.
    """
    data = read_texts(path)
    report = Findings.of(path, data)
    for split in SPLITS:
        for text in data.splits[split]:
            _check(report, text, length_of, max_length)
            key = hashlib.blake2b(text.prompt.encode(), digest_size=16).hexdigest()
            marks = (("duplicate between {}", key), *([(PATIENT, text.patient)] if text.patient else []))
            report.traces.append(Trace(split, text.name, marks, training=split == "training"))
    find_copies(report)
    find_alike(report)
    within: Counter[str] = Counter(line.partition(":")[0] for line in report.warnings.pop("duplicate", []))
    for split, count in within.items():
        report.warn("prompt more than once in a split", f"{split}: {count} of {report.samples[split]}")
    return report


def _check(report: Findings, text: Text, length_of: Callable[[Text], int] | None, max_length: int) -> None:
    if not all(output.strip() for output in text.outputs):
        report.problem("empty answer", text.name)
    if length_of is None:
        return
    length = length_of(text)
    report.sizes[f"up to {max(16, 1 << (length - 1).bit_length())} tokens"] += 1
    if length > max_length:
        report.warn(f"longer than {max_length} tokens", f"{text.name}: {length}")
