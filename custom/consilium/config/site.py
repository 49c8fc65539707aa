"""site.yaml: what belongs to a hospital, not to a job."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlparse

from pydantic import Field, field_validator, model_validator

from consilium.config.data import DatasetConfig, DatasetName, LabelMap, Mapped, check_apart, choose
from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy, SitePartnersConfig
from consilium.config.sections import MIN_CELL_COUNT
from consilium.core.errors import ConfigError, Reason, RefusedError
from consilium.core.registry import NO_PLUGINS, Plugins, normal
from consilium.core.schema import Positive, Seconds, Section, read_yaml, validate
from consilium.data.folders import has_classes, split_of
from consilium.data.settings import NiftiAffine
from consilium.data.site_names import folder_of
from consilium.data.text import has_texts

# capacity --------------------------------------------------------------------------------------------------------------
# The ranks that a site's machine allows, for algorithms with unequal ranks: the `capacity:` section of site.yaml.


class CapacityConfig(Section):
    """Either ranks per adapted layer on average (`train`, `download`), or limits from which a short probe finds them."""

    train: Annotated[Positive | None, Field(description="ranks it can train")] = None
    download: Annotated[Positive | None, Field(description="ranks it can download")] = None
    step_seconds: Annotated[
        Annotated[Seconds, Field(gt=0)] | None, Field(description="`step_seconds`, the longest a training step may take")
    ] = None
    memory_bytes: Annotated[
        Annotated[float, Field(gt=0, le=2**60)] | None, Field(description="`memory_bytes`, the most that training may hold")
    ] = None
    download_bytes: Annotated[
        Annotated[float, Field(gt=0, le=2**60)] | None,
        Field(
            description="`download_bytes` in a round. What is not given does not limit; with nothing given the job decides"
            " (its tiers)"
        ),
    ] = None

    @property
    def given(self) -> bool:
        """Whether any field is set."""
        return any(value is not None for value in self.model_dump().values())

    @model_validator(mode="after")
    def _check_one_of(self) -> Self:
        for ranks, limits in (("train", ("step_seconds", "memory_bytes")), ("download", ("download_bytes",))):
            for limit in limits:
                if getattr(self, ranks) is not None and getattr(self, limit) is not None:
                    raise ValueError(f"{ranks} and {limit} both say how much; give one of them")
        return self


# site ------------------------------------------------------------------------------------------------------------------

PATHS = ("datalist", "checkpoints", "state")
DeviceName = Annotated[str, Field(pattern=r"^(cpu|cuda:\d+)$")]
PackageName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", max_length=100)]


class CacheConfig(Section):
    """Decoded, resized samples on the site's disk, readable by the site's own user only.

    They are made again from what the data list names whenever they are missing.
    """

    folder: Annotated[
        Path | None,
        Field(
            description="they get a folder of their own in it; by default in the site's state, and in a simulation in its "
            "workspace, until it ends"
        ),
    ] = None
    gigabytes: Annotated[
        float, Field(ge=0, le=1e6, description="beyond so many, those go first that were used longest ago; 0 keeps none")
    ] = 20.0


class TrackingConfig(Section):
    """Where the server hands a run's numbers, settings and shared files to, while it goes on and at its end."""

    mlflow: Annotated[
        str, Field(description="an MLflow server (http or https), or a folder (file:///PATH). Needs the extra `mlflow`")
    ]

    @field_validator("mlflow")
    @classmethod
    def _address(cls, value: str) -> str:
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


RETENTION = "after so many days in which a run writes nothing, `consilium forget --expired` deletes what the site keeps of it"


class SiteConfig(Section):
    """A site's own site.yaml: what belongs to the hospital, not to the job. Relative paths start at the file's folder."""

    datalist: Annotated[
        Path | None,
        Field(
            description="the data list, a folder per class or a folder of JSONL lists; a relative path starts at this "
            "file's folder"
        ),
    ] = None
    datasets: Annotated[
        dict[DatasetName, DatasetConfig],
        Field(max_length=256, description="several data sets by name, instead of `datalist`; a job names one (`data.dataset`)"),
    ] = Field(default_factory=dict)
    labels: Annotated[
        LabelMap | None, Field(description="of the one data set `datalist`: as `labels` of an entry of `datasets`, see there")
    ] = None
    annotated: Annotated[
        Mapped | None, Field(description="of the one data set `datalist`: as `annotated` of an entry of `datasets`")
    ] = None
    nifti_affine: Annotated[
        NiftiAffine | None,
        Field(
            description="where the voxels of NIfTI files lie whose sform and qform disagree; without it such files are refused"
        ),
    ] = None
    checkpoints: Annotated[Path | None, Field(description="the folder that `${SITE}` in `model.checkpoint` stands for")] = None
    state: Annotated[
        Path | None,
        Field(
            description="the folder for private state, ledger and records; back it up. A simulation keeps them in its "
            "workspace and does not use it: set `privacy.ledger` to add runs up"
        ),
    ] = None
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$", description="auto, cpu, cuda, cuda:1 or mps")] = (
        "auto"
    )
    devices: Annotated[
        tuple[DeviceName, ...],
        Field(
            max_length=64,
            description="GPUs by number that share every batch of training, such as [0, 1], instead of `device`; the first"
            " also does all the rest. Not for privacy by records or patients",
        ),
    ] = ()
    base: Annotated[
        Literal["replicated", "sharded"],
        Field(
            description="`sharded`: each of several `devices` keeps a part of every frozen block, for a base too large for one"
        ),
    ] = "replicated"
    threads: Annotated[Annotated[int, Field(ge=1, le=1024)] | None, Field(description="CPU threads for training")] = None
    cache: Annotated[CacheConfig, Field(description="where decoded samples are kept, and how many")] = CacheConfig()
    workers: Annotated[
        Annotated[int, Field(ge=0, le=256)] | None,
        Field(
            description="threads that read samples ahead of training, 0 for none; by default as many as torch uses, at most 8"
        ),
    ] = None
    bad_samples: Annotated[
        Literal["refuse", "skip"],
        Field(
            description="what a sample that cannot be read does: `refuse` ends the job here, `skip` leaves the sample out "
            "and counts it in the result"
        ),
    ] = "refuse"
    test_only: Annotated[
        bool,
        Field(
            description="the site never trains, whatever its lists hold; the run's last global model is scored on its test"
            " split. The server is told; neither data nor jobs change it"
        ),
    ] = False
    share_metrics: Annotated[
        bool | None,
        Field(
            description="whether scores leave the site beside the update; by default only in jobs without a `privacy:` "
            "section, because no noise protects them"
        ),
    ] = None
    share_statistics: Annotated[
        bool | None,
        Field(
            description="whether counts of the data leave for a job that asks; by default only where the site has no "
            "privacy policy and the job no `privacy:` section"
        ),
    ] = None
    share_personalized: Annotated[
        bool,
        Field(
            description="whether this site's own model leaves it for a job with `cross_site.personalized`, to be scored at"
            " the other sites; never under `privacy:`"
        ),
    ] = False
    statistics_minimum: Annotated[
        int, Field(ge=MIN_CELL_COUNT, le=100_000, description="the fewest patients in a count; a job may ask for more")
    ] = 10
    health: Annotated[
        Literal["share"] | None,
        Field(
            description="`health: share` lets the hub see free disk, memory and GPU memory, whether the data lists can be read"
            " and when that was tried, and the code of the last refusal; nothing counts or names data. Counts within a minute"
        ),
    ] = None
    approve: Annotated[
        Literal["digest"] | None,
        Field(description="`approve: digest`: only jobs that its administrator has approved run here, see `consilium approve`"),
    ] = None
    plugins: Annotated[
        Annotated[tuple[PackageName, ...], Field(max_length=64)] | None,
        Field(
            description="installed packages whose strategies, models, tasks and adapters jobs may name here; of any other "
            "package nothing is looked at. Without the list none are, in a simulation all"
        ),
    ] = None
    capacity: Annotated[
        CapacityConfig,
        Field(description="`capacity` tells algorithms with unequal ranks how much this site can train and download"),
    ] = CapacityConfig()
    privacy: Annotated[HospitalPrivacyPolicy, Field(description="what this hospital lets jobs do")] = HospitalPrivacyPolicy()
    secure_aggregation: Annotated[SitePartnersConfig, Field(description="what this hospital asks of jobs with masks")] = (
        SitePartnersConfig()
    )
    tracking: Annotated[
        TrackingConfig | None,
        Field(description="in a server's site.yaml only; a job cannot name a place where a server sends numbers"),
    ] = None
    retention_days: Annotated[
        Annotated[int, Field(ge=1, le=36500)] | None,
        Field(
            description="after so many days in which a run writes nothing, `consilium forget --expired` deletes what the "
            "site keeps of it"
        ),
    ] = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.datasets and self.datalist is not None:
            raise ValueError("datalist is the short form of a site with one data set; give it or datasets")
        if self.datasets and not self.labels is self.annotated is None:
            raise ValueError("labels and annotated here are of `datalist`; write them in the entries of datasets")
        return self

    @field_validator("devices", mode="before")
    @classmethod
    def _numbered(cls, value: Any) -> Any:
        """Turn a number into the name of the GPU of that number."""
        return [f"cuda:{one}" if type(one) is int else one for one in value] if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.devices and self.device != "auto":
            raise ValueError("device is for one; give it or devices")
        if len(gpus := [one for one in self.devices if one != "cpu"]) > len(set(gpus)):
            raise ValueError("devices: a GPU is there twice; name each once")
        if self.base == "sharded" and self.device_count < 2:
            raise ValueError("base: 'sharded' is for several devices; name them in `devices`, or leave it out")
        if self.base == "sharded" and len({one.partition(":")[0] for one in self.devices}) > 1:
            raise ValueError("base: 'sharded' lies on GPUs or on CPUs, not on both; name either in `devices`")
        return self

    @property
    def device_count(self) -> int:
        """The number of devices that share a batch."""
        return max(len(self.devices), 1)

    @property
    def main_device(self) -> str:
        """The device of the site's own process."""
        return self.devices[0] if self.devices else self.device

    def dataset(self, wanted: str | None, who: str) -> tuple[str | None, DatasetConfig | None]:
        """Return the data set that a job gets, see datasets.choose. Raises RefusedError."""
        name, found = choose(self.datasets, self.of_list(self.datalist) if self.datalist else None, wanted, who)
        return name, found and self._placed(found)

    def of_list(self, datalist: Path) -> DatasetConfig:
        """Return a list without a name as a data set."""
        return self._placed(DatasetConfig(datalist=datalist, labels=self.labels, annotated=self.annotated))

    def named_datasets(self) -> dict[str, DatasetConfig]:
        """Return the data sets by name, each as a job gets it."""
        return {name: self._placed(one) for name, one in self.datasets.items()}

    def _placed(self, one: DatasetConfig) -> DatasetConfig:
        return one.model_copy(update={"nifti_affine": one.nifti_affine or self.nifti_affine})


def allowed_plugins(site: SiteConfig, simulated: bool = False) -> Plugins:
    """Return the packages whose kinds a job may name at this site."""
    return (None if simulated else NO_PLUGINS) if site.plugins is None else frozenset(site.plugins)


def check_packages(config: JobConfig, site: SiteConfig, name: str) -> None:
    """Raise RefusedError where a job of this process names a kind of a package that the site, in a simulation, leaves out."""
    allowed = allowed_plugins(site, simulated=True)
    known = {normal(package) for package in allowed or ()}
    if allowed is not None and (extra := [package for package in config.packages if normal(package) not in known]):
        what = f"package {extra[0]!r} is not among `plugins` of site.yaml; list it there, or take the job without it"
        raise RefusedError(f"{name}: {what}", Reason.POLICY)


def kit_plugins(local: Path, simulated: bool = False) -> Plugins:
    """Return the packages whose kinds a job may name, by the site.yaml in a kit's folder `local`. Raises ConfigError."""
    path = local / "site.yaml"
    return allowed_plugins(load_site(path) if path.is_file() else SiteConfig(), simulated)


def load_site(path: Path) -> SiteConfig:
    """Read and validate a site.yaml; relative paths are resolved against its folder. Raises ConfigError."""
    site = validate(SiteConfig, read_yaml(path) or {}, path)
    paths: dict[str, Any] = {k: path.parent / v for k in PATHS if (v := getattr(site, k)) is not None}
    if site.cache.folder is not None:
        paths["cache"] = site.cache.model_copy(update={"folder": path.parent / site.cache.folder})
    paths["datasets"] = {n: d.model_copy(update={"datalist": path.parent / d.datalist}) for n, d in site.datasets.items()}
    if site.privacy.dataset is None:  # else all data sets are one in the ledger
        check_apart(path, paths["datasets"])
    if site.privacy.ledger is not None:
        paths["privacy"] = site.privacy.model_copy(update={"ledger": path.parent / site.privacy.ledger})
    return site.model_copy(update=paths)


SIMULATION = "simulation.json"
"""The file beside a simulated run that holds the settings given to its sites; never in a startup kit."""


@dataclass(frozen=True)
class Given:
    """Settings that a simulation gives its sites: a folder with a folder per site, and the checkpoint folder (${SITE}).

    `tracking` is for its server.
    """

    data: Path | None = None
    checkpoints: Path | None = None
    tracking: TrackingConfig | None = None


def find_site(name: str, given: Given = Given(), kit_local: Path | None = None) -> SiteConfig:
    """Return the site's configuration: of a simulation's folder, else the kit's local/site.yaml, else defaults.

    See read_site_folder for the simulation's folder. Raises ConfigError if there is one and it holds nothing for this site.
    """
    site = _find_site(name, given.data, kit_local)
    if site.tracking:
        raise ConfigError(f"{name}: tracking: only a server tracks runs; move it to the server's site.yaml, or remove it")
    return site if site.checkpoints or not given.checkpoints else site.model_copy(update={"checkpoints": given.checkpoints})


def _find_site(name: str, data: Path | None, kit_local: Path | None) -> SiteConfig:
    if data is not None:
        if found := read_site_folder(folder_of(data, name)):
            return found
        remedy = f"neither site.yaml nor datalist.json for site {name}, nor training.jsonl, nor a folder per class; make one"
        raise ConfigError(f"{data / name}: {remedy}")
    if kit_local and (kit_local / "site.yaml").is_file():
        return load_site(kit_local / "site.yaml")
    return SiteConfig()


def is_site_folder(folder: Path) -> bool:
    """Tell whether a folder is one site's, see read_site_folder; the split of a picture set (train/CLASS) is not one."""
    own = any((folder / name).is_file() for name in ("site.yaml", "datalist.json"))
    return own or has_texts(folder) or (split_of(folder.name) is None and has_classes(folder))


def read_site_folder(folder: Path) -> SiteConfig | None:
    """Return what one site's folder says: its site.yaml, datalist.json, JSONL lists or folders per class, else None."""
    if (folder / "site.yaml").is_file():
        return load_site(folder / "site.yaml")
    if (folder / "datalist.json").is_file():
        return SiteConfig(datalist=folder / "datalist.json")
    return SiteConfig(datalist=folder) if has_texts(folder) or has_classes(folder) else None
