"""The findings of a check of a data list: counts, problems, warnings, and a verdict on training."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from consilium.core.sanitize import count_with_noun
from consilium.data.datalist import SPLITS, DataList, Item, Lost
from consilium.data.settings import Value

NAMED = 10
"""The most samples per kind that a terminal shows. The written report names all."""
PATIENT = "patient in two {}"
"""The kind of the mark that holds the patient, see Trace."""
WORTHLESS = frozenset(
    {
        "duplicate between splits", "volume in two splits", "study in two splits", "patient in two splits",
        "mask is the image itself", "empty answer",
    }
)  # fmt: skip
"""Problems that let training run but make its scores worthless. All others stop it."""
NO_TRAINING = "no training samples"
FEW = 5
"""A split of fewer samples is reported as small."""
TEST_ALONE = "no training samples: with test_only: true in its site.yaml such a site tests, else it is refused"


@dataclass(frozen=True)
class Trace:
    """Marks by which a sample is recognised in another place: another split, or another site.

    `place`: the sample's split, or its site. `marks`: (kind, key) pairs that no other place may share, the strongest first.
    `hash`: an appearance hash of 256 bits, None if it would say nothing, as for a constant picture. `training`: whether the
    sample is trained on.
    """

    place: str
    name: str
    marks: tuple[tuple[str, str], ...]
    hash: bytes | None = None
    training: bool = True


@dataclass
class Findings:
    """All findings about one list. `problems` stop training or make its scores worthless; `warnings` may be harmless.

    `problems` and `warnings` map a kind to one line per sample. `shown`: the sample of such a line, for pictures in the report.
    `bad`: by split, the number of entries that training cannot read. `planes`: by split, the number of planes of volumes and
    tiles of slides. `lengths`: the number of text records by their length in tokens.
    """

    path: str
    samples: dict[str, int]
    sizes: Counter[str] = field(default_factory=Counter)
    label_values: Counter[Value] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    images_of_class: dict[str, Counter[str]] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=dict)
    warnings: dict[str, list[str]] = field(default_factory=dict)
    planes: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    shown: dict[str, Item] = field(default_factory=dict)
    traces: list[Trace] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path, data: DataList, bad: Sequence[Lost] = ()) -> Self:
        """Return the findings before any sample is opened: the number of samples, unusable entries, empty and small splits.

        It is a problem if there are neither training nor test samples. `bad`: the entries that `data` does not have.
        """
        unusable = Counter(split for split, _ in bad)
        found = cls(str(path), {split: len(data.splits[split]) + unusable[split] for split in SPLITS}, bad=unusable)
        for _, error in bad:
            found.add_problem(error.kind, str(error).removeprefix(f"{path}: "))
        if not found.samples["training"]:
            add, what = (found.add_warning, TEST_ALONE) if found.samples["test"] else (found.add_problem, NO_TRAINING)
            add(what, found.path)
        for split, count in ((split, found.samples[split]) for split in SPLITS if split != "training"):
            if not count:
                found.add_warning("empty split", split)
            elif count < FEW:
                found.add_warning("small split", f"{split}: {count_with_noun(count, 'sample')}; its scores will say little")
        return found

    def add_problem(self, kind: str, line: str, item: Item | None = None) -> None:
        """Add a problem of this kind. `item`: the sample, to show its picture in the report."""
        self._add(self.problems, kind, line, item)

    def add_warning(self, kind: str, line: str, item: Item | None = None) -> None:
        """Add a warning of this kind. `item`: the sample, to show its picture in the report."""
        self._add(self.warnings, kind, line, item)

    def _add(self, where: dict[str, list[str]], kind: str, line: str, item: Item | None) -> None:
        where.setdefault(kind, []).append(line)
        if item is not None and len(where[kind]) <= NAMED:
            self.shown[line] = item

    @property
    def verdict_lines(self) -> list[str]:
        """Lines that say what training would do with this list."""
        stops = [kind for kind in self.problems if kind not in WORTHLESS]
        said = []
        if stops:
            said.append(f"training would stop at these problems: {', '.join(stops)}; fix them first")
        if self.bad and NO_TRAINING not in stops:
            parts = ", ".join(f"{self.bad[split]} of {self.samples[split]} {split}" for split in SPLITS if self.bad[split])
            end = "" if self.samples["training"] > self.bad["training"] else ", and stop, for no training sample is left"
            said.append(f"with bad_samples: skip in site.yaml it would leave out {parts} samples{end}")
        if worthless := [kind for kind in self.problems if kind in WORTHLESS]:
            said.append(f"these do not stop training, but make its scores worthless: {', '.join(worthless)}")
        warned = f", {count_with_noun(len(self.warnings), 'kind')} of warnings" if self.warnings else ""
        return said or [f"no problems{warned}"]

    def to_dict(self, named: int | None = NAMED) -> dict[str, Any]:
        """Return the findings as plain JSON values, with the first `named` lines per kind, or all lines for None."""
        return {
            "path": self.path,
            "samples": self.samples,
            "planes": dict(self.planes),
            "sizes": dict(self.sizes),
            "images_with_label_value": {
                str(value): self.label_values[value]
                for value in sorted(self.label_values, key=lambda one: (isinstance(one, str), one))
            },
            "images_of_class": {name: dict(by_split) for name, by_split in sorted(self.images_of_class.items())},
            "problems": {kind: {"count": len(lines), "first": lines[:named]} for kind, lines in self.problems.items()},
            "warnings": {kind: {"count": len(lines), "first": lines[:named]} for kind, lines in self.warnings.items()},
            "unusable": dict(self.bad),
            "verdict": self.verdict_lines,
        }
