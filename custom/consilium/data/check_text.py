"""Look at instruction data before anyone trains on it: counts, empty answers, lengths, records that two splits share."""

from collections import Counter
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from consilium.data.check import Findings
from consilium.data.datalist import SPLITS, DataList
from consilium.data.text import Text, read_texts


def check_texts(path: Path, tokenizer: PreTrainedTokenizerBase | None = None, max_length: int = 0) -> Findings:
    """Read every record and report; with a tokenizer also lengths in tokens, and which exceed `max_length`.

    Equal prompts in two splits leak the test into training and are problems. Raises DataError where a file cannot be read.
    """
    data = read_texts(path)
    report = Findings.of(path, data)
    for split in SPLITS:
        for text in data.splits[split]:
            _check(report, text, tokenizer, max_length)
    _check_duplicates(report, data)
    return report


def _check(report: Findings, text: Text, tokenizer: PreTrainedTokenizerBase | None, max_length: int) -> None:
    if not all(output.strip() for output in text.outputs):
        report.problems.setdefault("empty answer", []).append(text.name)
    if tokenizer is None:
        return
    length = sum(
        len(tokenizer(part, add_special_tokens=False, verbose=False).input_ids) for part in (text.prompt, text.outputs[0])
    )
    report.sizes[f"up to {max(16, 1 << (length - 1).bit_length())} tokens"] += 1
    if length >= max_length:  # one more, the end token
        report.warnings.setdefault(f"longer than {max_length} tokens", []).append(f"{text.name}: {length + 1}")


def _check_duplicates(report: Findings, data: DataList) -> None:
    seen: dict[str, tuple[str, str]] = {}
    within: Counter[str] = Counter()
    for split in SPLITS:
        for text in data.splits[split]:
            other, first = seen.setdefault(text.prompt, (split, text.name))
            if other != split:
                report.problems.setdefault("duplicate between splits", []).append(f"{text.name} = {first}")
            elif first != text.name:
                within[split] += 1
    for split, count in within.items():
        report.warnings.setdefault("prompt more than once in a split", []).append(f"{split}: {count}")
