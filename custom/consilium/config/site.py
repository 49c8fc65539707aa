"""site.yaml: what belongs to a hospital, not to a job."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from consilium.config.capacity import CapacityConfig
from consilium.config.privacy import PolicyConfig
from consilium.data.folders import SPLIT_FOLDERS, has_classes
from consilium.data.text import has_texts
from consilium.errors import ConfigError
from consilium.schema import Section, read_yaml, validate


class SiteConfig(Section):
    """A site's own site.yaml: what belongs to the hospital, not to the job. Relative paths start at the file's folder.

    `share_metrics`: whether scores leave the site beside the update; by default only in jobs without a `privacy:` section,
    because no noise protects them. `capacity` tells algorithms with unequal ranks how much this site can train and download.
    `approve: digest`: only jobs that its administrator has approved run here, see `consilium approve`.
    """

    datalist: Path | None = None
    checkpoints: Path | None = None
    state: Path | None = None
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$")] = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    share_metrics: bool | None = None
    approve: Literal["digest"] | None = None
    capacity: CapacityConfig = CapacityConfig()
    privacy: PolicyConfig = PolicyConfig()


def load_site(path: Path) -> SiteConfig:
    """Read and validate a site.yaml; relative paths are resolved against its folder. Raises ConfigError."""
    site = validate(SiteConfig, read_yaml(path) or {}, path)
    paths = {k: path.parent / v for k in ("datalist", "checkpoints", "state") if (v := getattr(site, k)) is not None}
    if site.privacy.ledger is not None:
        paths["privacy"] = site.privacy.model_copy(update={"ledger": path.parent / site.privacy.ledger})
    return site.model_copy(update=paths)


def find_site(name: str, kit_local: Path | None = None) -> SiteConfig:
    """Return the site's configuration: CONSILIUM_DATA/<name>/ (simulation), else the kit's local/site.yaml, else defaults.

    See read_site_folder for the simulation folder. CONSILIUM_CHECKPOINTS fills a missing checkpoint folder. Raises
    ConfigError if CONSILIUM_DATA is set and holds nothing for this site.
    """
    site = _find_site(name, kit_local)
    shared = os.environ.get("CONSILIUM_CHECKPOINTS")
    return site if site.checkpoints or not shared else site.model_copy(update={"checkpoints": Path(shared)})


def _find_site(name: str, kit_local: Path | None) -> SiteConfig:
    if data := os.environ.get("CONSILIUM_DATA"):
        if found := read_site_folder(Path(data) / name):
            return found
        remedy = f"neither site.yaml nor datalist.json for site {name}, nor training.jsonl, nor a folder per class; make one"
        raise ConfigError(f"{Path(data) / name}: {remedy}")
    if kit_local and (kit_local / "site.yaml").is_file():
        return load_site(kit_local / "site.yaml")
    return SiteConfig()


def is_site_folder(folder: Path) -> bool:
    """Tell whether a folder is one site's, see read_site_folder; the split of a picture set (train/CLASS) is none."""
    own = any((folder / name).is_file() for name in ("site.yaml", "datalist.json"))
    return own or has_texts(folder) or (folder.name not in SPLIT_FOLDERS and has_classes(folder))


def read_site_folder(folder: Path) -> SiteConfig | None:
    """Return what one site's folder says: its site.yaml, datalist.json, JSONL lists or folders per class, else None."""
    if (folder / "site.yaml").is_file():
        return load_site(folder / "site.yaml")
    if (folder / "datalist.json").is_file():
        return SiteConfig(datalist=folder / "datalist.json")
    return SiteConfig(datalist=folder) if has_texts(folder) or has_classes(folder) else None
