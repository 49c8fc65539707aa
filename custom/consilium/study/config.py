"""A study's file: a base job, axes of named overrides, what is left out and why, and the published numbers."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from consilium.core.sanitize import shown
from consilium.core.schema import Section, nearest

MOST_CELLS = 10_000
MOST = 1e300
"""Of a printed number; an integer may be too large for a float."""


def _labelled(raw: Any) -> Any:
    """Return an axis with texts as names: numbers as written, and {FIELD: [values]} as a name for each value."""
    if not isinstance(raw, Mapping):
        return raw
    if len(raw) == 1 and isinstance(values := next(iter(raw.values())), list):
        pairs = [(_label(value), {next(iter(raw)): value}) for value in values]
    else:
        pairs = [(_label(name), {} if value is None else value) for name, value in raw.items()]
    counts = Counter(name for name, _ in pairs)  # 1 and "1" are two keys and one name
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"{twice[0]!r} is there twice; keep one, or give it another name")
    return dict(pairs)


def _label(name: Any) -> str:
    if isinstance(name, bool) or not isinstance(name, str | int | float):
        raise ValueError(f"a name that is text or a number, not {name!r}; put it in quotes, or name the values one by one")
    return str(name)


def _or(words: str) -> WrapValidator:
    """Return what tells in words which texts a pattern takes."""

    def check(raw: Any, inner: ValidatorFunctionWrapHandler) -> Any:
        try:
            return inner(raw)
        except ValidationError:
            raise ValueError(words) from None

    return WrapValidator(check)


LABEL = "a name of 1 to 40 printable characters without = and , and /, with no blank at an end"
AXIS = "a name of 1 to 40 small letters a to z, digits and _, with a letter first"
Label = Annotated[
    str, Field(pattern=r"^[^=,/\p{C}\p{Z}]([^=,/\p{C}\p{Zl}\p{Zp}]*[^=,/\p{C}\p{Z}])?$", max_length=40), _or(LABEL)
]
AxisName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=40), _or(AXIS)]
Overrides = dict[str, Any]
Axis = Annotated[dict[Label, Overrides], Field(min_length=1, max_length=1000), BeforeValidator(_labelled)]
Labels = Annotated[list[Label], BeforeValidator(lambda raw: [_label(x) for x in (raw if isinstance(raw, list) else [raw])])]
Choice = dict[AxisName, Labels]


def _row(raw: Any) -> Any:
    """Return a row as it is. Raises ValueError for a value that is neither text nor a finite number: true would count as 1."""
    for name, value in raw.items() if isinstance(raw, Mapping) else ():
        if not isinstance(name, str) or not (isinstance(value, str) or _finite(value)):
            raise ValueError(f"names with texts and finite numbers, as in {{dice: 0.5}}; {name!r} has {shown(value, 60)}")
        if name == "site" and not isinstance(value, str):
            raise ValueError(f"the name of a site as text; put {value} in quotes")
    return raw


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST


Row = Annotated[dict[str, str | int | float], BeforeValidator(_row)]


def _floor(raw: dict[str, str | int | float]) -> dict[str, str | int | float]:
    """Return a floor as it is. Raises ValueError unless it has words and numbers."""
    metrics = [value for name, value in raw.items() if name != "about"]
    if raw and (not isinstance(raw.get("about"), str) or not metrics or any(isinstance(one, str) for one in metrics)):
        raise ValueError("metrics with numbers and `about` with words, as in {accuracy: 0.31, about: the background}")
    return raw


class Exclusion(Section):
    """Cells that are left out, by their values on some axes."""

    when: Annotated[Choice, Field(min_length=1)]
    reason: str


class SizeConfig(Section):
    """A smaller version: `set` comes after the axes' overrides, `only` some values stay on an axis."""

    set: Overrides = Field(default_factory=dict)
    only: Choice = Field(default_factory=dict)


class CountsConfig(Section):
    """How large the data are that a study needs: how many sites, and samples of all sites together."""

    sites: Annotated[int, Field(ge=1, le=10_000)]
    training: Annotated[int, Field(ge=1)]
    validation: Annotated[int, Field(ge=0)] = 0
    test: Annotated[int, Field(ge=0)] = 0


class StudyConfig(Section):
    """A whole study. Overrides are job fields with dots, as `--set` takes them, and three names more.

    `sites`: who takes part, as `simulate --sites` takes it; `folder`: a folder in `--data` instead of all of it.
    `counts`: for an estimate of what it takes; in an override where the data differ by cell.
    """

    about: str
    table: str = ""
    needs: str = ""
    counts: CountsConfig | None = None
    base: Path
    set: Overrides = Field(default_factory=dict)
    axes: Annotated[dict[AxisName, Axis], Field(min_length=1, max_length=8)]
    exclude: list[Exclusion] = Field(default_factory=list)
    published: list[Row] = Field(default_factory=list)
    floor: Annotated[Row, AfterValidator(_floor)] = Field(default_factory=dict)
    smoke: SizeConfig | None = None
    small: SizeConfig | None = None

    @property
    def named_axes(self) -> list[str]:
        """Axes that name what is compared: not those of seeds alone, over which scores are means."""
        return [axis for axis, values in self.axes.items() if any(set(one) != {"training.seed"} for one in values.values())]

    @model_validator(mode="after")
    def _knows_its_values(self) -> Self:
        for where, chosen in [
            *(("exclude", one.when) for one in self.exclude),
            *((name, size.only) for name, size in (("smoke", self.smoke), ("small", self.small)) if size),
        ]:
            self.check_choice(where, chosen)
        for row in self.published:
            self.check_choice("published", {k: [str(v)] for k, v in row.items() if k in self.axes})
        self._check_names()
        return self

    def _check_names(self) -> None:
        """Raise ValueError for a name that means two things in `published`, a site or a score of one seed, or nothing."""
        if "site" in self.axes:
            raise ValueError("axes: 'site' says in `published` which hospital's score it is; give the axis another name")
        seeds = self.axes.keys() - self.named_axes
        if wrong := next((axis for row in self.published for axis in row if axis in seeds), None):
            raise ValueError(
                f"published: {wrong!r} is an axis of seeds, and what is compared are means over them; leave it out"
            )
        if empty := next((row for row in self.published if not any(k not in self.axes and k != "site" for k in row)), None):
            raise ValueError(f"published: {empty}: has no number; give one, or take the row out")
        for name, value in (pair for row in self.published for pair in row.items()):
            if isinstance(value, str) and name not in {*self.axes, "site"}:
                what = f"published: {name}: {value!r}: no axis is called so{nearest(name, self.axes)}, and a score is a number"
                raise ValueError(f"{what}; write one such as 0.5, without quotes")

    def check_choice(self, where: str, chosen: Mapping[str, list[str]]) -> None:
        """Raise ValueError unless all axes and values are the study's."""
        for axis, values in chosen.items():
            if axis not in self.axes:
                raise ValueError(f"{where}: no axis {axis!r}; there are {', '.join(self.axes)}{nearest(axis, self.axes)}")
            if wrong := [value for value in values if value not in self.axes[axis]]:
                known = f"it has {', '.join(self.axes[axis])}{nearest(wrong[0], self.axes[axis])}"
                raise ValueError(f"{where}: no value {wrong[0]!r} on axis {axis!r}; {known}")
