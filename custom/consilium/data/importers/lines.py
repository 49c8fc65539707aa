"""What the importers of texts share: finding files by name, reading records, keeping equal prompts in one split."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from consilium.core.errors import DataError
from consilium.data.importers.base import Line, files, wrong_layout
from consilium.data.safe_open import check_line, parse_json, read_text, text_lines

Fields = Mapping[str, type]
"""What a record must have: keys, and the types of their values."""
REMEDY = "give the publisher's file"


def find(source: Path, names: Sequence[str], layout: str) -> Path:
    """Return the file of the first name that is there, in any case, at any depth. Raises DataError for none, or for two."""
    for name in names:
        found = [path for path in files(source, [name.lower()]) if path.name.lower() == name.lower()]
        least = min((len(path.parts) for path in found), default=0)
        highest = [path for path in found if len(path.parts) == least]
        if len(highest) > 1:
            raise DataError(f"{source}: expected one {name}; found {highest[0]} and {highest[1]}; give the folder of one")
        if highest:
            return highest[0]
    raise wrong_layout(source, layout)


def read_lines(path: Path, fields: Fields) -> list[dict[str, Any]]:
    """Return the records of a JSONL file. Raises DataError, naming file and line."""
    lines = enumerate(text_lines(path, REMEDY), start=1)
    return [_record(f"{path}:{number}", line, fields) for number, line in lines if line.strip()]


def read_list(path: Path, fields: Fields) -> list[dict[str, Any]]:
    """Return the records of a JSON list. Raises DataError, naming file and record."""
    raw = parse_json(str(path), read_text(path, REMEDY), REMEDY)
    if not isinstance(raw, list):
        raise DataError(f"{path}: expected a list of records; found a {type(raw).__name__}; {REMEDY}")
    return [_checked(f"{path}[{index}]", record, fields) for index, record in enumerate(raw)]


def read_labels(path: Path, count: int) -> list[str]:
    """Return the labels beside NAME.jsonl, in NAME-labels.lst. Raises DataError unless there is one for every record."""
    labels = path.with_name(f"{path.stem}-labels.lst")
    if not labels.is_file():
        raise DataError(f"{path}: expected {labels.name} beside it; found none; complete the set")
    found = read_text(labels, REMEDY).split()
    if len(found) != count:
        raise DataError(f"{labels}: expected {count} labels, as many as {path.name} has records; found {len(found)}; {REMEDY}")
    return found


def _record(where: str, line: str, fields: Fields) -> dict[str, Any]:
    check_line(where, line)
    return _checked(where, parse_json(where, line, REMEDY), fields)


def _checked(where: str, raw: Any, fields: Fields) -> dict[str, Any]:
    if isinstance(raw, dict) and all(isinstance(raw.get(key), kind) for key, kind in fields.items()):
        return raw
    expected = ", ".join(f"{key} ({kind.__name__})" for key, kind in fields.items())
    found = ", ".join(f"{k} ({type(v).__name__})" for k, v in raw.items()) if isinstance(raw, dict) else type(raw).__name__
    raise DataError(f"{where}: expected {expected}; found {found[:200] or 'nothing'}; {REMEDY}")


def joined(lines: Iterable[Line]) -> list[Line]:
    """Return the records, the groups that share a prompt made one: no prompt is ever cut into two splits of a site."""
    lines, parents, first = list(lines), dict[tuple[str, str], tuple[str, str]](), dict[tuple[str, str, str], tuple[str, str]]()

    def root(key: tuple[str, str]) -> tuple[str, str]:
        while (above := parents.setdefault(key, key)) != key:
            parents[key] = parents[above]
            key = above
        return key

    for line in lines:
        mine = (line.site, line.group)
        prompt = (line.site, line.record.get("instruction", ""), line.record.get("input", ""))
        one, other = sorted((root(mine), root(first.setdefault(prompt, mine))))
        parents[other] = one
    return [replace(line, group=root((line.site, line.group))[1]) for line in lines]
