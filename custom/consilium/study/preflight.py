"""Checks before the first cell of a study runs: each job, each site, its data and its checkpoint; and the FLOPs of a study.

The checks also compute digests of the data, by which a finished cell is recognized later.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import TypeAdapter

from consilium.client.site_data import load_site_data
from consilium.config.code_digest import strategy_code_digest
from consilium.config.job import JobConfig
from consilium.config.site import Given, SiteConfig, find_site
from consilium.core.errors import ConfigError, UnfitError
from consilium.core.grouping import group_by_key
from consilium.core.storage import file_hash, make_private_folder, write_atomic
from consilium.data.datalist import DataList
from consilium.data.volumes import drop_caches
from consilium.estimates.compute import Samples, Work, flops_per_sample, generated_samples, run_flops
from consilium.federation.job_assembly import assemble_job, checkpoint_of
from consilium.federation.site_names import site_names
from consilium.study.definition import Cell, GridErrors, Study
from consilium.study.records import save_flops
from consilium.tasks.registry import TASKS

# data digest -----------------------------------------------------------------------------------------------------------
# Digests of the sites' data and checkpoints by content, in any folder. A cell's results depend on them and on its job.

_PLACES = {"datalist", "datasets", "checkpoints", "state", "device", "threads", "workers", "cache"}
"""Settings of a site that never change results, such as paths and the number of threads."""

MOST_MASKS = 3
"""Images of a site's split whose masks are read before the first cell, at most."""


class DataDigests:
    """Digests of sites' data by content. The `workspace` stores each file's digest, so only changed files are read again."""

    def __init__(self, workspace: Path) -> None:
        self._path = workspace / "hashes.json"
        try:
            self._known = TypeAdapter(dict[str, str]).validate_json(self._path.read_bytes(), strict=True)
        except (OSError, ValueError):  # missing or damaged, so all files are read again
            self._known = {}

    def digest(self, config: JobConfig, sites: Mapping[str, SiteConfig]) -> str:
        """Return a digest of the sites' settings, data and checkpoints.

        Raises ConsiliumError, also for labels of no class of the job, as far as `_check_some_labels` reads them, and if all
        sites have data of their own and none has a sample to be scored on.
        """
        parts, scored = [], False
        for name, site in sites.items():
            settings = site.model_dump(mode="json", exclude=_PLACES)
            checkpoint = checkpoint_of(config.model, site)
            found = [self._path_digest(checkpoint)] if checkpoint else []
            _, own = site.dataset(config.data.dataset, name)
            if own is None and config.data.phantoms is not None:  # generated data follow from the job
                parts.append((name, [settings, found]))
                scored = True
                continue
            with TemporaryDirectory(
                dir=make_private_folder(self._path.parent)
            ) as folder:  # private, for decoded patients' pictures
                data = load_site_data(config, name, site, Path(folder))
            _check_some_labels(config, data)
            scored |= any(data.splits[split] for split in ("validation", "test"))
            labels = own.model_dump(mode="json", exclude={"datalist"}) if own else {}
            files = {data.path: None} if data.path.exists() else {}  # each file once, in the order of the list
            for item in (item for split in data.splits.values() for item in split):
                files |= {path: None for part in ("image", "label") if isinstance(path := getattr(item, part, None), Path)}
            parts.append((name, [settings, found, labels, [self._path_digest(path) for path in files]]))
        if not scored:
            raise ConfigError(
                "data: no site has validation or test samples, so nothing would be scored; split them first: "
                "`consilium data import own` or `consilium data split`"
            )
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def save(self) -> None:
        """Store the digests of files in the workspace."""
        write_atomic(self._path, json.dumps(self._known).encode())

    def _path_digest(self, path: Path) -> str:
        """Return the digest of a file, or of all files in a folder that are not hidden and not in a hidden folder."""
        if not path.is_dir():
            return self._file_digest(path)
        names = sorted(one.relative_to(path).as_posix() for one in path.rglob("*") if one.is_file())
        names = [name for name in names if "/." not in f"/{name}"]
        return hashlib.sha256("".join(f"{name} {self._file_digest(path / name)}\n" for name in names).encode()).hexdigest()

    def _file_digest(self, path: Path) -> str:
        """Return the digest of a file; the stored one if path, size and times are unchanged. Raises ConfigError."""
        try:
            stat = path.stat()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of an existing file") from None
        key = f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
        if key not in self._known:
            self._known[key] = file_hash(path)
        return self._known[key]


def _check_some_labels(config: JobConfig, data: DataList) -> None:
    """Check one sample of each class that a site's list names, and the masks of MOST_MASKS images of each split.

    A cell checks all samples when it begins, which takes long. Here a wrong `task.classes` is found before the first cell.
    Of a volume or slide, the plane or tile in the middle is checked. Raises DataError.
    """
    if (look := TASKS[config.task.name].look) is None:
        return
    groups = group_by_key(
        ((split, item.image) if isinstance(item.label, Path) else str(item.label), (split, item))
        for split, items in data.splits.items()
        for item in items
    )
    masks = Counter[str]()
    for group in groups.values():
        split, item = group[len(group) // 2]
        masks[split] += isinstance(item.label, Path)
        if isinstance(item.label, Path) and masks[split] > MOST_MASKS:
            continue
        try:
            look(config.task, item)
        except UnfitError:
            if not data.loading.ignore_unfit:
                raise


# plan ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A cell that passed all checks and can run.

    `given`: the folders of data and checkpoints. `source`: `--data`, in which the folder of its data lies. `names`: its sites.
    `data`: a digest of the samples and checkpoints that it reads. `whole`: the same digest over all samples, also those that a
    seed leaves out by `data.most_training`. `code`: a digest of the strategy's code, see `strategy_code_digest`. `rerun`:
    whether to run a finished cell again if its code has changed.
    """

    cell: Cell
    given: Given
    names: tuple[str, ...]
    data: str
    code: str = ""
    whole: str = ""
    rerun: bool = False
    source: Path | None = None

    def sites(self) -> dict[str, SiteConfig]:
        """Return each site's configuration."""
        return {name: find_site(name, self.given) for name in self.names}


class Planner:
    """Checks cells, each job and each data set only once. `workspace`: stores digests of files. `rerun`: see Planned."""

    def __init__(self, given: Given, workspace: Path, rerun: bool = False) -> None:
        self.given, self.digests, self.rerun = given, DataDigests(workspace), rerun
        self._assembled: set[str] = set()
        self._data: dict[str, str] = {}

    def plan(self, cells: list[Cell]) -> list[Planned]:
        """Return the cells, ready to run. Raises ConfigError with the errors of all cells."""
        errors, found = GridErrors([cell.labels for cell in cells]), list[Planned]()
        for cell in cells:
            with errors.collect_errors(cell.labels):
                config = cell.load()
                unseeded = config.model_copy(update={"training": config.training.model_copy(update={"seed": 0})}).digest
                if unseeded not in self._assembled:
                    assemble_job(
                        config, cell.base
                    )  # raises ConfigError if the job's parts do not fit together; the seed does not matter
                    self._assembled.add(unseeded)
                data = self.given.data / cell.data if self.given.data and cell.data else self.given.data
                planned = Planned(cell, Given(data, self.given.checkpoints), tuple(site_names(cell.sites, data)), "")
                sites, undrawn = planned.sites(), config.data.model_copy(update={"most_training": None})
                whole = self._digest(config.model_copy(update={"data": undrawn}), sites)
                found.append(
                    replace(
                        planned,
                        data=self._digest(config, sites),
                        whole=whole,
                        code=strategy_code_digest(config),
                        rerun=self.rerun,
                        source=self.given.data,
                    )
                )
        drop_caches()
        errors.raise_if_any()
        self.digests.save()
        return found

    def _digest(self, config: JobConfig, sites: Mapping[str, SiteConfig]) -> str:
        """Return the digest of the data that a job reads at these sites, computed once per data set."""
        drawn = config.training.seed if config.data.most_training else ""  # the seed decides which samples are read
        sections = [one.model_dump_json() for one in (config.task, config.model, config.data)]
        parts = [str(drawn), *sections, str(config.privacy), {name: site.model_dump_json() for name, site in sites.items()}]
        key = json.dumps(parts)
        if key not in self._data:
            self._data[key] = self.digests.digest(config, sites)
        return self._data[key]


# FLOPs ------------------------------------------------------------------------------------------------------------------


def count_and_cache_flops(study: Study) -> float | None:
    """Count, cache and return the FLOPs of a whole study; None if the size of a cell's data is unknown.

    Jobs that differ only in rounds, seeds or noise are counted with one model, built without weights.
    """
    known: dict[str, Work] = {}
    total = 0.0
    for cell in study.cells():
        config = cell.load()
        given = Samples(**cell.counts.model_dump()) if cell.counts and not study.size else None
        if (samples := generated_samples(config, len(site_names(cell.sites, None))) or given) is None:
            save_flops(study, None)
            return None
        job = assemble_job(config, cell.base)
        said = config.model_dump(mode="json", include={"model", "adapter", "task", "strategy"})
        key = json.dumps([said, config.training.gradient_checkpointing])
        if key not in known:
            known[key] = flops_per_sample(job)
        total += run_flops(job, known[key], samples)
    save_flops(study, total)
    return total
