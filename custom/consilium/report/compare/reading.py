"""What a run's files must hold for a comparison to read them: anything else is damage, told in one line."""

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from consilium.errors import ConfigError
from consilium.report.lines import LINES, Numbers, Strict
from consilium.report.progress import Line, read_lines

T = TypeVar("T", bound=BaseModel)
RESULTS = TypeAdapter(dict[str, Numbers])


class Guaranteed(Strict):
    """What is read of privacy.json: epsilon by delta."""

    epsilon: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=dict)


class Simulated(Strict):
    """What is read of simulation.json: what tells each site's data from others."""

    content: dict[str, str] = Field(default_factory=dict)


def read_results(path: Path) -> dict[str, Numbers]:
    """Return the closing metrics by site. Raises ConfigError where they are damaged."""
    try:
        return RESULTS.validate_json(path.read_bytes(), strict=True)
    except ValidationError:
        raise damaged(path) from None


def read_as(kind: type[T], path: Path) -> T:
    """Return a file's JSON. Raises ConfigError where it is damaged."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError:
        raise damaged(path) from None


def read_record(path: Path) -> list[Line]:
    """Return the lines of metrics.jsonl that lines.py knows. Raises ConfigError for one that no run writes."""
    lines = read_lines(path) if path.is_file() else []
    try:
        return [line | LINES[line["event"]].model_validate(line).model_dump() for line in lines if line["event"] in LINES]
    except (ValidationError, OverflowError):
        raise damaged(path) from None


def damaged(path: Path) -> ConfigError:
    """Return what tells of a file that cannot be read; a study's cell runs anew once its folder is gone."""
    return ConfigError(f"{path}: is damaged; delete its folder and run the job anew")
