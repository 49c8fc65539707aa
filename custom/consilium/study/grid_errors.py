"""Errors of the cells of a grid: each is told once for all cells that share it, by the axis values they have in common."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from consilium.errors import ConfigError, ConsiliumError

Labels = Mapping[str, str]


class GridErrors:
    """Errors of some cells of a grid `labels`."""

    def __init__(self, labels: list[dict[str, str]]) -> None:
        self._all = labels
        self._found: dict[str, list[Labels]] = {}

    @contextmanager
    def of(self, labels: Labels) -> Iterator[None]:
        """Keep the ConsiliumError of the block as errors of the cell with these labels, a line each."""
        try:
            yield
        except ConsiliumError as error:
            for line in str(error).splitlines():
                self._found.setdefault(line, []).append(labels)

    def raise_if_any(self) -> None:
        """Raise ConfigError with a line per error, if there is any."""
        if self._found:
            raise ConfigError("\n".join(f"{describe(having, self._all)}: {line}" for line, having in self._found.items()))


def describe(having: list[Labels], everyone: list[dict[str, str]]) -> str:
    """Return which cells of `everyone` are meant: by the values that they alone share, else the first and how many more."""
    if len(having) == len(everyone) > 1:
        return "all cells"
    shared = {a: v for a, v in having[0].items() if all(one[a] == v for one in having)}
    told = {a: v for a, v in shared.items() if any(one[a] != v for one in everyone)}
    if sum(told.items() <= one.items() for one in everyone) == len(having):
        return " ".join(f"{axis}={value}" for axis, value in told.items()) or "the only cell"
    first = " ".join(f"{axis}={value}" for axis, value in having[0].items())
    return f"{first} and {len(having) - 1} more"
