"""The schema of sites.yml: the server, the hospitals and the people of a deployment, from which startup kits are made."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from consilium.config.site import SiteConfig
from consilium.core.schema import Section, check_unique, read_yaml, validate

Org = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$", description="letters, digits and _")]
SITE_NAME = r"^[A-Za-z0-9_-]{1,64}$"
"""A certificate holds a name of 64 characters at most."""


FLARES_SERVER = "server"


class ServerEntry(Section):
    """The server."""

    name: Annotated[
        str,
        Field(
            max_length=64,
            pattern=r"^[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*$",
            description="the host name under which sites reach the server",
        ),
    ]
    org: Org
    port: Annotated[int, Field(ge=1, le=65535, description="the port for connections of sites and admins")] = 8002
    hosts: Annotated[
        tuple[str, ...], Field(description="further host names and addresses of the server, for its certificate")
    ] = ()
    state: Annotated[
        Path,
        Field(
            description="a private folder at the server for jobs and snapshots (FLARE's own default is under /tmp, "
            "readable by all)"
        ),
    ]
    bundles: Annotated[bool, Field(description="whether jobs may bring code (BYOC)")] = False

    @field_validator("state")
    @classmethod
    def _check_absolute(cls, value: Path) -> Path:
        if not value.is_absolute():
            raise ValueError("an absolute path, such as /srv/consilium: FLARE starts in whatever folder start.sh was called")
        return value


class SiteEntry(Section):
    """One hospital."""

    name: Annotated[str, Field(pattern=SITE_NAME, description="the site's name in all runs, at most 64 characters")]
    org: Org
    gpus: Annotated[int, Field(ge=0, description="the GPUs that FLARE may reserve for jobs that request them")] = 0
    gpu_memory: Annotated[int, Field(ge=0, description="GiB per GPU")] = 0
    bundles: Annotated[bool, Field(description="whether jobs may bring code (BYOC)")] = False
    site: Annotated[
        SiteConfig,
        Field(description="the contents of its site.yaml, with the hospital's own paths; the hospital may edit the file later"),
    ] = SiteConfig()


class AdminEntry(Section):
    """One person. A lead submits jobs, an org_admin manages a hospital's own site, a member may only watch."""

    name: Annotated[
        str,
        Field(
            max_length=64,
            pattern=r"^[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}$",
            description="an address, such as lead@hub.example",
        ),
    ]
    org: Org
    role: Annotated[
        Literal["project_admin", "org_admin", "lead", "member"],
        Field(description="a lead submits jobs, an org_admin manages a hospital's own site, a member may only watch"),
    ]


class DeploymentConfig(Section):
    """A whole deployment."""

    name: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9_-]{1,63}$", description="the deployment's name, also of the folder of its kits")
    ]
    server: Annotated[ServerEntry, Field(description="the one server")]
    sites: Annotated[list[SiteEntry], Field(min_length=1, description="the hospitals")]
    admins: Annotated[list[AdminEntry], Field(min_length=1, description="the people")]
    scheme: Annotated[
        Literal["grpc", "http", "tcp"],
        Field(description="FLARE's transport, always with mutual TLS; http has a limit of 4 MiB per message"),
    ] = "grpc"
    valid_days: Annotated[int, Field(ge=1, description="the number of days for which certificates are valid")] = 360

    @model_validator(mode="after")
    def _check_names_and_bundles(self) -> Self:
        check_unique([entry.name for entry in self.entries()], "name")
        if FLARES_SERVER in (site.name for site in self.sites):
            raise ValueError(f"sites: {FLARES_SERVER!r} is what FLARE calls the server; give the site another name")
        if self.scheme == "http" and (self.server.bundles or any(site.bundles for site in self.sites)):
            raise ValueError("scheme: 'http' cannot carry bundled jobs (4 MiB a message) with bundles: true; use grpc or tcp")
        return self

    def entries(self) -> Iterator[ServerEntry | SiteEntry | AdminEntry]:
        """Yield all participants, the server first."""
        yield self.server
        yield from self.sites
        yield from self.admins


def load_deployment(path: Path) -> DeploymentConfig:
    """Read and validate a sites.yml. Raises ConfigError with one line per problem."""
    return validate(DeploymentConfig, read_yaml(path), path)
