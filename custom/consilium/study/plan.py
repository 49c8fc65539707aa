"""All that is checked before the first cell runs: every job, every site, its data and its checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from consilium.config.code_digest import code_of
from consilium.config.job import JobConfig
from consilium.config.site import Given, SiteConfig, find_site
from consilium.federation.job import assemble_job
from consilium.federation.sites import site_names
from consilium.study.data_digest import DataDigests
from consilium.study.study import Cell, GridErrors


@dataclass(frozen=True)
class Planned:
    """A cell that can run. `data`: a digest of the samples and checkpoints that it reads; `code`: see `code_of`.

    `whole`: the same of all samples, whichever of them a seed draws with `data.most_training`.
    `rerun`: a cell that is done runs anew where its code has changed.
    """

    cell: Cell
    given: Given
    names: tuple[str, ...]
    data: str
    code: str = ""
    whole: str = ""
    rerun: bool = False

    def sites(self) -> dict[str, SiteConfig]:
        """Return the sites' configurations."""
        return {name: find_site(name, self.given) for name in self.names}


class Planner:
    """Checks cells, each job and each data set once. `workspace` keeps digests of the data; `rerun`: see Planned."""

    def __init__(self, given: Given, workspace: Path, rerun: bool = False) -> None:
        self.given, self.digests, self.rerun = given, DataDigests(workspace), rerun
        self._assembled: set[str] = set()
        self._data: dict[str, str] = {}

    def plan(self, cells: list[Cell]) -> list[Planned]:
        """Return the cells as they can run. Raises ConfigError with every error, by axis value."""
        errors, found = GridErrors([cell.labels for cell in cells]), list[Planned]()
        for cell in cells:
            with errors.of(cell.labels):
                found.append(self._planned(cell))
        errors.raise_if_any()
        self.digests.save()
        return found

    def _planned(self, cell: Cell) -> Planned:
        config = cell.load()
        unseeded = config.model_copy(update={"training": config.training.model_copy(update={"seed": 0})}).digest
        if unseeded not in self._assembled:
            assemble_job(config, cell.base)  # raises ConfigError where parts do not fit together, whatever the seed
            self._assembled.add(unseeded)
        data = self.given.data / cell.data if self.given.data and cell.data else self.given.data
        planned = Planned(cell, Given(data, self.given.checkpoints), tuple(site_names(cell.sites, data)), "")
        sites, undrawn = planned.sites(), config.data.model_copy(update={"most_training": None})
        whole = self._digest(config.model_copy(update={"data": undrawn}), sites)
        return replace(planned, data=self._digest(config, sites), whole=whole, code=code_of(config), rerun=self.rerun)

    def _digest(self, config: JobConfig, sites: Mapping[str, SiteConfig]) -> str:
        drawn = config.training.seed if config.data.most_training else ""  # which samples are read depends on it
        sections = [one.model_dump_json() for one in (config.task, config.model, config.data)]
        parts = [str(drawn), *sections, str(config.privacy), {name: site.model_dump_json() for name, site in sites.items()}]
        key = json.dumps(parts)
        if key not in self._data:
            self._data[key] = self.digests.digest(config, sites)
        return self._data[key]
