"""The schema of site.yaml, which holds a hospital's own settings, and the search for a site's settings."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlparse

from pydantic import Field, field_validator, model_validator

from consilium.config.data import DatasetConfig, DatasetName, LabelMap, Mapped, check_shared_files, choose_dataset
from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy, SitePartnersConfig
from consilium.config.run_sections import MIN_CELL_COUNT
from consilium.core.errors import ConfigError, Reason, RefusedError, raise_first
from consilium.core.registry import NO_PLUGINS, Plugins, normalize_name
from consilium.core.schema import Positive, Seconds, Section, read_yaml, validate
from consilium.data.folders import folder_of, has_classes, split_of
from consilium.data.settings import NiftiAffine
from consilium.data.text import has_texts

# capacity --------------------------------------------------------------------------------------------------------------
# The ranks that a site's machine allows, for algorithms with unequal ranks: the `capacity:` section of site.yaml.


class CapacityConfig(Section):
    """Either average ranks per adapted layer (`train`, `download`), or limits from which a short probe finds the ranks."""

    train: Annotated[Positive | None, Field(description="average ranks per layer that the site can train")] = None
    download: Annotated[Positive | None, Field(description="average ranks per layer that the site can download")] = None
    step_seconds: Annotated[
        Annotated[Seconds, Field(gt=0)] | None, Field(description="the longest time of a training step in seconds")
    ] = None
    memory_bytes: Annotated[
        Annotated[float, Field(gt=0, le=2**60)] | None, Field(description="the most memory that training may use, in bytes")
    ] = None
    download_bytes: Annotated[
        Annotated[float, Field(gt=0, le=2**60)] | None,
        Field(
            description="the most bytes that the site downloads per round. A field that is not set does not limit; if none "
            "is set, the job's tiers decide"
        ),
    ] = None

    @property
    def has_limits(self) -> bool:
        """Whether any field is set."""
        return any(value is not None for value in self.model_dump().values())

    @model_validator(mode="after")
    def _check_one_of(self) -> Self:
        pairs = (("train", "step_seconds"), ("train", "memory_bytes"), ("download", "download_bytes"))
        given = {f"{ranks} and {limit} both say how much; give one of them": (ranks, limit) for ranks, limit in pairs}
        raise_first({text: all(getattr(self, one) is not None for one in pair) for text, pair in given.items()}, ValueError)
        return self


# site ------------------------------------------------------------------------------------------------------------------

PATHS = ("datalist", "checkpoints", "state")


class CacheConfig(Section):
    """A cache of decoded, resized samples on the site's disk, readable by the site's own user only.

    Missing samples are decoded again from the files of the data list.
    """

    folder: Annotated[
        Path | None,
        Field(
            description="the cache gets a subfolder in this folder; by default in the site's `state`, in a simulation in its "
            "workspace until it ends"
        ),
    ] = None
    gigabytes: Annotated[
        float,
        Field(ge=0, le=1e6, description="the largest size; the least recently used samples are deleted first; 0: no cache"),
    ] = 20.0


class TrackingConfig(Section):
    """Where the server sends a run's numbers, settings and shared files, during the run and at its end."""

    mlflow: Annotated[
        str, Field(description="an MLflow server (http or https), or a folder (file:///PATH). Needs the extra `mlflow`")
    ]

    @field_validator("mlflow")
    @classmethod
    def _check_address(cls, value: str) -> str:
        found = urlparse(value)
        # ConfigError, not ValueError, whose message would have the value in it, and so a password
        if not ((found.scheme in ("http", "https") and found.hostname) or (found.scheme == "file" and found.path != "")):
            raise ConfigError(
                "tracking: mlflow: this is not an address of MLflow; write http://HOST:PORT, https://HOST or file:///PATH"
            )
        if found.scheme != "file" and ("@" in value or found.query or found.fragment):  # logs would show what is in it
            raise ConfigError(
                "tracking: mlflow: an address holds no password; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return value


class SiteConfig(Section):
    """A hospital's own settings, which no job can change. Relative paths start at the file's folder."""

    datalist: Annotated[
        Path | None,
        Field(
            description="the data list: a file, a folder with one subfolder per class, or a folder of JSONL lists; a relative "
            "path starts at this file's folder"
        ),
    ] = None
    datasets: Annotated[
        dict[DatasetName, DatasetConfig],
        Field(max_length=256, description="several data sets by name, instead of `datalist`; a job names one (`data.dataset`)"),
    ] = Field(default_factory=dict)
    labels: Annotated[
        LabelMap | None, Field(description="the label map for `datalist`, as `labels` in an entry of `datasets`, see there")
    ] = None
    annotated: Annotated[
        Mapped | None, Field(description="the annotated classes of `datalist`, as `annotated` in an entry of `datasets`")
    ] = None
    nifti_affine: Annotated[
        NiftiAffine | None,
        Field(
            description="which affine positions the voxels of NIfTI files whose sform and qform disagree; without it such "
            "files are refused"
        ),
    ] = None
    checkpoints: Annotated[Path | None, Field(description="the folder that replaces `${SITE}` in `model.checkpoint`")] = None
    state: Annotated[
        Path | None,
        Field(
            description="the folder for private state, privacy ledger and records; back it up. A simulation uses its "
            "workspace instead: set `privacy.ledger` to count several simulations in one ledger"
        ),
    ] = None
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$", description="auto, cpu, cuda, cuda:1 or mps")] = (
        "auto"
    )
    devices: Annotated[
        tuple[Annotated[str, Field(pattern=r"^(cpu|cuda:\d+)$")], ...],
        Field(
            max_length=64,
            description="GPUs by number, such as [0, 1], that split every training batch, instead of `device`; all other work "
            "runs on the first. Not for privacy by records or patients",
        ),
    ] = ()
    base: Annotated[
        Literal["replicated", "sharded"],
        Field(
            description="`sharded`: each of several `devices` holds a part of every frozen block, for a base too large for one "
            "device"
        ),
    ] = "replicated"
    threads: Annotated[Annotated[int, Field(ge=1, le=1024)] | None, Field(description="CPU threads for training")] = None
    cache: Annotated[CacheConfig, Field(description="the cache of decoded samples")] = CacheConfig()
    workers: Annotated[
        Annotated[int, Field(ge=0, le=256)] | None,
        Field(
            description="threads that read samples ahead of training, 0 for none; by default PyTorch's number of threads, at "
            "most 8"
        ),
    ] = None
    bad_samples: Annotated[
        Literal["refuse", "skip"],
        Field(
            description="for a sample that cannot be read: `refuse` ends the job at this site, `skip` leaves the sample out "
            "and counts it in the result"
        ),
    ] = "refuse"
    test_only: Annotated[
        bool,
        Field(
            description="the site never trains, even if its lists have training samples; the run's last global model is "
            "scored on its test split. The server is informed; neither data nor jobs change this"
        ),
    ] = False
    share_metrics: Annotated[
        bool | None,
        Field(
            description="whether the site sends scores with its update; by default only in jobs without a `privacy:` "
            "section, because no noise protects scores"
        ),
    ] = None
    share_statistics: Annotated[
        bool | None,
        Field(
            description="whether the site sends counts of its data to a job that asks for them; by default only if the site "
            "has no privacy policy and the job no `privacy:` section"
        ),
    ] = None
    share_personalized: Annotated[
        bool,
        Field(
            description="whether the site sends its own model to a job with `cross_site.personalized`, to be scored at "
            "the other sites; never with `privacy:`"
        ),
    ] = False
    statistics_minimum: Annotated[
        int, Field(ge=MIN_CELL_COUNT, le=100_000, description="the fewest patients in a count; a job may require more")
    ] = 10
    health: Annotated[
        Literal["share"] | None,
        Field(
            description="`share`: the hub sees free disk, memory and GPU memory, whether the data lists can be read and when "
            "that was checked, and the code of the last refusal; no counts or names of data. A change takes effect within a "
            "minute"
        ),
    ] = None
    approve: Annotated[
        Literal["digest"] | None,
        Field(description="`digest`: only jobs that the site's administrator has approved run here, see `consilium approve`"),
    ] = None
    plugins: Annotated[
        Annotated[
            tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", max_length=100)], ...],
            Field(max_length=64),
        ]
        | None,
        Field(
            description="installed packages whose strategies, models, tasks and adapters jobs may name here; entry points of "
            "other packages are not read. By default none, in a simulation all"
        ),
    ] = None
    capacity: Annotated[
        CapacityConfig,
        Field(description="how much this site can train and download, for algorithms with unequal ranks"),
    ] = CapacityConfig()
    privacy: Annotated[HospitalPrivacyPolicy, Field(description="this hospital's privacy policy")] = HospitalPrivacyPolicy()
    secure_aggregation: Annotated[SitePartnersConfig, Field(description="this hospital's conditions for jobs with masks")] = (
        SitePartnersConfig()
    )
    tracking: Annotated[
        TrackingConfig | None,
        Field(description="in a server's site.yaml only; a job cannot name where a server sends numbers"),
    ] = None
    retention_days: Annotated[
        Annotated[int, Field(ge=1, le=36500)] | None,
        Field(
            description="`consilium forget --expired` deletes a run's files at the site after this many days without a write"
        ),
    ] = None

    @model_validator(mode="after")
    def _check_one_form(self) -> Self:
        problems = {
            "datalist is the short form of a site with one data set; give it or datasets": (
                self.datasets and self.datalist is not None
            ),
            "labels and annotated here are of `datalist`; write them in the entries of datasets": (
                self.datasets and not self.labels is self.annotated is None
            ),
        }
        raise_first(problems, ValueError)
        return self

    @field_validator("devices", mode="before")
    @classmethod
    def _name_gpus(cls, value: Any) -> Any:
        """Return `devices` with each number replaced by the name of that GPU, such as cuda:0."""
        return [f"cuda:{one}" if type(one) is int else one for one in value] if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        gpus, kinds = [one for one in self.devices if one != "cpu"], {one.partition(":")[0] for one in self.devices}
        sharded = self.base == "sharded"
        problems = {
            "device is for one; give it or devices": self.devices and self.device != "auto",
            "devices: a GPU is there twice; name each once": len(gpus) > len(set(gpus)),
            "base: 'sharded' is for several devices; name them in `devices`, or leave it out": (
                sharded and self.device_count < 2
            ),
            "base: 'sharded' lies on GPUs or on CPUs, not on both; name either in `devices`": sharded and len(kinds) > 1,
        }
        raise_first(problems, ValueError)
        return self

    @property
    def device_count(self) -> int:
        """The number of devices that split a batch."""
        return max(len(self.devices), 1)

    @property
    def main_device(self) -> str:
        """The device of the site's own process."""
        return self.devices[0] if self.devices else self.device

    def dataset(self, wanted: str | None, who: str) -> tuple[str | None, DatasetConfig | None]:
        """Return (name, data set) of the data set that a job uses, see config.data.choose_dataset. Raises RefusedError."""
        name, found = choose_dataset(self.datasets, self.dataset_of_list(self.datalist) if self.datalist else None, wanted, who)
        return name, found and self._with_default_affine(found)

    def dataset_of_list(self, datalist: Path) -> DatasetConfig:
        """Return a data list without a name as a data set, with the site's label map."""
        return self._with_default_affine(DatasetConfig(datalist=datalist, labels=self.labels, annotated=self.annotated))

    def named_datasets(self) -> dict[str, DatasetConfig]:
        """Return the data sets by name, with the site's `nifti_affine` as default."""
        return {name: self._with_default_affine(one) for name, one in self.datasets.items()}

    def _with_default_affine(self, one: DatasetConfig) -> DatasetConfig:
        return one.model_copy(update={"nifti_affine": one.nifti_affine or self.nifti_affine})


def allowed_plugins(site: SiteConfig, simulated: bool = False) -> Plugins:
    """Return the plug-in packages whose kinds a job may name at this site; None means all."""
    return (None if simulated else NO_PLUGINS) if site.plugins is None else frozenset(site.plugins)


def check_simulated_plugins(config: JobConfig, site: SiteConfig, name: str) -> None:
    """Raise RefusedError if a simulated job uses a plug-in package that the site's `plugins` does not list."""
    allowed = allowed_plugins(site, simulated=True)
    known = {normalize_name(package) for package in allowed or ()}
    if allowed is not None and (extra := [package for package in config.packages if normalize_name(package) not in known]):
        raise RefusedError(
            f"{name}: package {extra[0]!r} is not among `plugins` of site.yaml; list it there, or take the job without it",
            Reason.POLICY,
        )


def plugins_allowed_by_kit(local: Path, simulated: bool = False) -> Plugins:
    """Return the plug-in packages that the site.yaml in a kit's folder `local` allows. Raises ConfigError."""
    path = local / "site.yaml"
    return allowed_plugins(load_site(path) if path.is_file() else SiteConfig(), simulated)


def load_site(path: Path) -> SiteConfig:
    """Return the validated settings from a site.yaml, with relative paths resolved against its folder. Raises ConfigError."""
    found = read_yaml(path)
    return _validate_settings({} if found is None else found, path)  # another value, such as [] or "", is no empty site.yaml


def _validate_settings(raw: Any, path: Path) -> SiteConfig:
    """Return the validated settings of `raw`, the parsed site.yaml `path`, as `load_site` does."""
    site = validate(SiteConfig, raw, path)
    paths: dict[str, Any] = {k: path.parent / v for k in PATHS if (v := getattr(site, k)) is not None}
    if site.cache.folder is not None:
        paths["cache"] = site.cache.model_copy(update={"folder": path.parent / site.cache.folder})
    paths["datasets"] = {n: d.model_copy(update={"datalist": path.parent / d.datalist}) for n, d in site.datasets.items()}
    if site.privacy.dataset is None:  # otherwise the ledger has one entry for all data sets
        check_shared_files(path, paths["datasets"])
    if site.privacy.ledger is not None:
        paths["privacy"] = site.privacy.model_copy(update={"ledger": path.parent / site.privacy.ledger})
    return site.model_copy(update=paths)


def load_kit_site(path: Path) -> SiteConfig:
    """Return the settings from the site.yaml of a kit. Raises ConfigError if it is missing or says nothing.

    The file holds the site's policies, so its loss must not leave the site without any. A server could make FLARE delete it:
    FLARE deletes any folder that a server names as a job's. A full disk may leave it empty.
    """
    raw = read_yaml(path) if path.is_file() else None  # once, because the file may be lost or emptied at any time
    if raw is None:
        what = "empty" if path.is_file() else "missing"
        raise ConfigError(f"{path}: {what}; restore it, write your settings, or write `{{}}` to have none", Reason.POLICY)
    return _validate_settings(raw, path)


SIMULATION = "simulation.json"
"""The file in a simulated run's folder that records its sites. Startup kits never have it."""


@dataclass(frozen=True)
class Given:
    """Settings of a simulation for its sites.

    `data`: a folder with one subfolder per site. `checkpoints`: the folder that replaces ${SITE}. `tracking`: for the server.
    """

    data: Path | None = None
    checkpoints: Path | None = None
    tracking: TrackingConfig | None = None


def find_site(name: str, given: Given = Given(), kit_local: Path | None = None, is_kit: bool = False) -> SiteConfig:
    """Return the settings of the site `name`, from the first of these that applies.

    1. If `given.data` is set: the site's subfolder there, see read_site_folder. Raises ConfigError if it has no data.
    2. The site.yaml in the kit's folder `kit_local`.
    3. The defaults.

    `given.checkpoints` applies if these settings name no checkpoint folder. `is_kit`: the site.yaml must be there, see
    `load_kit_site`. Raises ConfigError for `tracking` at a site.
    """
    if given.data is not None:
        found = read_site_folder(folder_of(given.data, name))
        if found is None:
            raise ConfigError(
                f"{given.data / name}: neither site.yaml nor datalist.json for site {name}, nor training.jsonl, nor a folder "
                "per class; make one"
            )
        site = found
    else:
        path = None if kit_local is None else kit_local / "site.yaml"
        load = load_kit_site if is_kit else load_site
        site = load(path) if path is not None and (is_kit or path.is_file()) else SiteConfig()
    if site.tracking:
        raise ConfigError(f"{name}: tracking: only a server tracks runs; move it to the server's site.yaml, or remove it")
    return site if site.checkpoints or not given.checkpoints else site.model_copy(update={"checkpoints": given.checkpoints})


def is_site_folder(folder: Path) -> bool:
    """Return whether a folder holds one site's data, see read_site_folder. A split of a picture set (train/CLASS) does not."""
    return has_site_files(folder) or (split_of(folder.name) is None and has_classes(folder))


def has_site_files(folder: Path) -> bool:
    """Return whether a folder has a site.yaml, a datalist.json or text files."""
    return any((folder / name).is_file() for name in ("site.yaml", "datalist.json")) or has_texts(folder)


def read_site_folder(folder: Path) -> SiteConfig | None:
    """Return the settings from one site's folder, None if it has neither data nor a site.yaml.

    The data are the lists that site.yaml names, else the first of these in the folder: datalist.json, JSONL lists, one
    subfolder per class.
    """
    site = load_site(folder / "site.yaml") if (folder / "site.yaml").is_file() else None
    if site is not None and (site.datalist or site.datasets):
        return site
    if (folder / "datalist.json").is_file():
        return (site or SiteConfig()).model_copy(update={"datalist": folder / "datalist.json"})
    if has_texts(folder) or has_classes(folder):
        return (site or SiteConfig()).model_copy(update={"datalist": folder})
    return site
