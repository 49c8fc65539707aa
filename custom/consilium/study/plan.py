"""All that is checked before the first cell runs: every job, every site, its data and its checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from consilium.config.code import code_of
from consilium.config.job import JobConfig
from consilium.config.site import Given, SiteConfig, find_site
from consilium.federation.build import assemble_job
from consilium.federation.participants import site_names
from consilium.study.content import Contents
from consilium.study.mistakes import Mistakes
from consilium.study.study import Cell


@dataclass(frozen=True)
class Planned:
    """A cell that can run. `data`: what tells its sites' data and checkpoints from others; `code`: see `code_of`.

    `whole`: the same of all samples, whichever of them a seed draws with `data.most_training`.
    `again`: a cell that is done runs anew where its code has changed.
    """

    cell: Cell
    given: Given
    names: tuple[str, ...]
    data: str
    code: str = ""
    whole: str = ""
    again: bool = False

    def sites(self) -> dict[str, SiteConfig]:
        """Return the sites' configurations."""
        return {name: find_site(name, self.given) for name in self.names}


class Planner:
    """Checks cells, each job and each data set once. `workspace` keeps what was found of the data; `again`: see Planned."""

    def __init__(self, given: Given, workspace: Path, again: bool = False) -> None:
        self.given, self.contents, self.again = given, Contents(workspace), again
        self._assembled: set[str] = set()
        self._data: dict[str, str] = {}

    def plan(self, cells: list[Cell]) -> list[Planned]:
        """Return the cells as they can run. Raises ConfigError with every mistake, by axis value."""
        mistakes, found = Mistakes([cell.labels for cell in cells]), list[Planned]()
        for cell in cells:
            with mistakes.of(cell.labels):
                found.append(self._planned(cell))
        mistakes.tell()
        self.contents.save()
        return found

    def _planned(self, cell: Cell) -> Planned:
        config = cell.load()
        self._assemble(cell, config)
        data = self.given.data / cell.data if self.given.data and cell.data else self.given.data
        planned = Planned(cell, Given(data, self.given.checkpoints), tuple(site_names(cell.sites, data)), "")
        sites, undrawn = planned.sites(), config.data.model_copy(update={"most_training": None})
        whole = self._digest(config.model_copy(update={"data": undrawn}), sites)
        return replace(planned, data=self._digest(config, sites), whole=whole, code=code_of(config), again=self.again)

    def _assemble(self, cell: Cell, config: JobConfig) -> None:
        """Raise ConfigError where parts of a job do not fit together; a seed makes no difference to that."""
        unseeded = config.model_copy(update={"training": config.training.model_copy(update={"seed": 0})})
        if unseeded.digest not in self._assembled:
            assemble_job(config, cell.base)
            self._assembled.add(unseeded.digest)

    def _digest(self, config: JobConfig, sites: Mapping[str, SiteConfig]) -> str:
        drawn = config.training.seed if config.data.most_training else ""  # which samples are read depends on it
        parts = [
            str(drawn),
            config.task.model_dump_json(),
            config.model.model_dump_json(),
            config.data.model_dump_json(),
            str(config.privacy),
        ]
        key = json.dumps([*parts, {name: site.model_dump_json() for name, site in sites.items()}])
        if key not in self._data:
            self._data[key] = self.contents.digest(config, sites)
        return self._data[key]
