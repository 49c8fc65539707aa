"""Find a site's folder of records and its ledger, given its site.yaml or its startup kit."""

from pathlib import Path
from typing import NamedTuple

from consilium.config.site import SiteConfig, load_site
from consilium.federation.run_folders import STATE


class SiteRecords(NamedTuple):
    """A site's settings, its folder of records, and the file of its ledger."""

    site: SiteConfig
    root: Path
    ledger: Path


def is_site(where: Path) -> bool:
    """Tell whether a path is a site.yaml or a startup kit that has one."""
    return where.suffix in (".yaml", ".yml") or (where / "local" / "site.yaml").is_file()


def find_site_records(where: Path) -> SiteRecords:
    """Return the records of the site whose site.yaml or startup kit is `where`. Raises ConfigError."""
    settings = where / "local" / "site.yaml" if where.is_dir() else where
    site = load_site(settings)
    root = site.state or settings.parent.parent / STATE  # in the kit, beside FLARE's folders of jobs
    return SiteRecords(site, root, site.privacy.ledger_in(root))
