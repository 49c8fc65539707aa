"""Collects the sites' statistics at the server, once before the first round, and writes them side by side."""

from collections.abc import Iterable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from consilium.config.job import JobConfig
from consilium.core.errors import RefusedError
from consilium.core.messages import Observer
from consilium.core.sanitize import shown
from consilium.core.storage import write_atomic, write_json
from consilium.data.datalist import SPLITS
from consilium.data.stats import LENGTHS, OTHERS, SIZES, SPACING, class_cells, grey_bin_names
from consilium.privacy.disclosure_control import AreaShare, Group, SiteStatistics
from consilium.report.tables import Column, Table, terminal_table

FILE = "statistics.json"
SLACK = 0.02
"""The largest amount by which a sum of rounded shares may exceed 1."""


class StatisticsRound:
    """The statistics of one run. `asked`: the sites that are asked. Then come (accept or decline)*, and finish.

    `finish` writes statistics.json and statistics.txt.
    """

    def __init__(self, config: JobConfig, folder: Path, observer: Observer) -> None:
        self.config, self.folder, self.observer = config, folder, observer
        self.found: dict[str, SiteStatistics] = {}
        self.refused: dict[str, str] = {}
        self.asked: set[str] = set()

    @property
    def is_pending(self) -> bool:
        """Whether the job asks for statistics and they are not written yet."""
        # for a cross-site job, the run that it scores has asked already
        return self.config.statistics is not None and self.config.cross_site is None and not (self.folder / FILE).is_file()

    def accept(self, name: str, values: Any) -> None:
        """Store a site's statistics. Raises RefusedError for a site that was not asked, and for invalid values."""
        if name not in self.asked or name in self.found:
            raise RefusedError(f"{name}: was not asked for statistics, or has sent them already")
        found = SiteStatistics.read(values)
        check_site_statistics(self.config, found)
        self.found[name] = found
        self.observer({"event": "statistics", "site": name})

    def decline(self, name: str, reason: str) -> None:
        """Record why a site has no statistics or takes no part. Do nothing once the statistics are written."""
        if self.is_pending and name not in self.found:
            self.refused[name] = reason

    def finish(self) -> None:
        """Write the statistics of all sites as JSON and text."""
        answers = {name: {"refused": why} for name, why in (dict.fromkeys(self.asked, "no answer") | self.refused).items()}
        answers |= {name: one.model_dump(mode="json") for name, one in self.found.items()}
        sites = dict(sorted(answers.items()))
        self.asked = set()
        write_atomic(self.folder / "statistics.txt", statistics_text(self.config.name, sites).encode())
        write_json(self.folder / FILE, {"job": self.config.name, "sites": sites}, indent=1)


def check_site_statistics(config: JobConfig, found: SiteStatistics) -> None:
    """Raise RefusedError unless a site's statistics fit this job: its classes and bins, each once, and no small count."""
    section = config.statistics
    if section is None or found.minimum < section.minimum:
        raise RefusedError("statistics with a smaller minimum than the job's")
    names, single = class_cells(config.task)
    training = found.splits.get("training")
    if found.splits.keys() != set(SPLITS):
        raise RefusedError("statistics without all three splits")
    for split in found.splits.values():
        if split is not None:
            _check_count("samples", split.samples, found.minimum)
            _check_count("patients", split.patients or found.minimum, found.minimum)
            named = {name for group in split.classes for name in group.names}
            told = [name for name in names if name != OTHERS or name in named]  # a former version had no cell OTHERS
            _check_groups(split.classes, told, split.samples if single else None, found.minimum)
            if any(group.samples > split.samples for group in split.classes):
                raise RefusedError("statistics with more samples of a class than there are")
    whole = 0 if training is None else training.samples
    for groups, cells in ((found.sizes, SIZES), (found.spacing, SPACING), (found.lengths, LENGTHS)):
        _check_groups(groups, cells, whole, found.minimum)
    _check_area_shares(found.greys, grey_bin_names(section.bins), 1 + SLACK)
    _check_area_shares(found.areas, names, None)


def _check_count(what: str, count: int, minimum: int) -> None:
    if count < minimum:
        raise RefusedError(f"statistics with a number of {what} under its own minimum")


def _check_groups(groups: Iterable[Group], cells: Iterable[str], whole: int | None, minimum: int) -> None:
    """Raise RefusedError unless the groups have the cells in order.

    With `whole`, all cells must be there and the samples must add up to it. With None, some cells may be there, one per group.
    """
    groups, cells = list(groups), list(cells)
    _check_names([group.names for group in groups], cells, whole is not None)
    for group in groups:
        if group.samples or len(group.names) > 1:
            _check_count("samples", group.samples, minimum)
    if groups and whole is not None and sum(group.samples for group in groups) != whole:
        raise RefusedError("statistics whose cells do not add up to the samples there are")


def _check_area_shares(portions: Iterable[AreaShare], cells: Iterable[str], most: float | None) -> None:
    portions = list(portions)
    _check_names([portion.names for portion in portions], list(cells), most is not None)
    if most is not None and sum(portion.share for portion in portions) > most:
        raise RefusedError("statistics with shares of more than the whole")


def _check_names(groups: list[tuple[str, ...]], cells: list[str], whole: bool) -> None:
    named = [name for group in groups for name in group]
    expected = cells if whole and groups else [name for name in cells if name in named]
    if named != expected or (not whole and any(len(group) > 1 for group in groups)):
        raise RefusedError("statistics with other cells than the job has")


# table ------------------------------------------------------------------------------------------------------------------

WIDTH = 80
Answers = Mapping[str, Mapping[str, Any]]
"""By site its statistics, see privacy/disclosure_control.py, or {"refused": why}."""


def statistics_text(job: str, sites: Answers) -> str:
    """Return a table as plain text of at most 80 columns: per site a row for each statistic, the numbers of samples first."""
    rows = [
        [name if number == 0 else "", *pair] for name, told in sites.items() for number, pair in enumerate(_rows_of_site(told))
    ]
    table = Table(f"{job}: the sites' data", [Column(one, right=False) for one in ("site", "what", "counts")], rows)
    Console(file=(file := StringIO()), width=WIDTH, force_terminal=False, color_system=None).print(terminal_table(table, WIDTH))
    return file.getvalue()


def _rows_of_site(site_answer: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (statistic, its counts in words) for one site, or its refusal."""
    if "refused" in site_answer:
        yield "refuses", str(site_answer["refused"])
        return
    counts = []
    for split, one in site_answer["splits"].items():
        of = f" of {one['patients']} patients" if one and one["patients"] is not None else ""
        counts.append(f"{split} {one['samples']}{of}" if one else f"{split} under {site_answer['minimum']} patients")
    yield "samples", ", ".join(counts)
    training = site_answer["splits"]["training"] or {"classes": []}
    areas = {part["names"][0]: f" ({part['share']:.1%} of a picture)" for part in site_answer["areas"]}
    groups = {"classes": training["classes"]} | {what: site_answer[what] for what in ("sizes", "spacing", "lengths")}
    for what, cells in groups.items():
        texts = []
        for one in cells:
            if one["samples"] or what == "classes":
                names = [shown(name, 64) for name in one["names"]]  # of merged cells; from four on, the first and the last
                joined = " + ".join(names) if len(names) < 4 else f"{names[0]} ... {names[-1]}"
                area = areas.get(one["names"][0], "") if what == "classes" else ""
                texts.append(f"{joined}: {one['samples']}{area}")
        if texts:
            yield what, ", ".join(texts)
    if site_answer["greys"]:
        yield "greys", ", ".join(f"{share:g} % at {quantile_cells(site_answer['greys'], share / 100)}" for share in (5, 50, 95))


def quantile_cells(portions: list[Mapping[str, Any]], quantile: float) -> str:
    """Return the name of the cell, or cells, in which the cumulative share reaches `quantile` (0 to 1)."""
    total = 0.0
    for portion in portions:
        total += portion["share"]
        if total >= quantile - 1e-9:
            break
    first, last = portion["names"][0], portion["names"][-1]
    return first if first == last else f"{first.split()[0]} to {last.split()[-1]}"
