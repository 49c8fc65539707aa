"""A systemd unit for a startup kit: sandboxed, as the user who owns the kit, with its state to write and its data to read."""

import json
import pwd
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlparse

from consilium.config.site import SiteConfig, load_site
from consilium.core.errors import ConfigError
from consilium.flare.kit.local_folder import kit_name, kit_role

T = TypeVar("T")
UNITS = Path("/etc/systemd/system")
HOMES = tuple(map(Path, ("/home", "/root", "/run/user")))
TEMPORARY = tuple(map(Path, ("/tmp", "/var/tmp")))
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_PARTICIPANT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_PLAIN = re.compile(r"[^\x00-\x1f\x7f]+")
CLOSED = """\
NoNewPrivileges=yes
CapabilityBoundingSet={capability}
AmbientCapabilities={capability}
ProtectSystem=strict
ProtectHome={homes}
PrivateTmp=yes
{devices}
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
ProtectProc=invisible
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
LockPersonality=yes
RemoveIPC=yes
KeyringMode=private
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
UMask=0077
"""
"""What a participant never needs is shut. MemoryDenyWriteExecute is left out: torch compiles kernels as it runs."""
NO_DEVICES = "PrivateDevices=yes"
GPUS = "DevicePolicy=closed\nDeviceAllow=char-nvidia* rw\nDeviceAllow=char-nvidia-uvm rw\nDeviceAllow=char-nvidia-caps rw"
UNIT = """\
# Written by `consilium service install`. Changes of site.yaml's folders need a new one.
[Unit]
Description={description}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=600
StartLimitBurst=5

[Service]
Type=exec
User={user}
Group={group}
Environment={path}
ExecStart={start}
Restart=on-failure
RestartSec=15
TimeoutStopSec=60
SyslogIdentifier={identifier}
TasksMax=4096
LimitNOFILE=65536
LimitCORE=0
{closed}ReadWritePaths={written}
{read}
[Install]
WantedBy=multi-user.target
"""


def unit(kit: Path) -> str:
    """Return the unit of a site's or server's kit, for this very installation of the package. Raises ConfigError.

    It runs as the owner of the kit's folder, and not as root. All folders that site.yaml names must be there.
    """
    kit = kit.resolve()
    name, user, group = _name(kit), *_owner(kit)
    settings = kit / "local" / "site.yaml"
    site = load_site(settings) if settings.is_file() else SiteConfig()
    written = list(dict.fromkeys([kit, *_written(kit, site)]))
    read = [path for path in dict.fromkeys(_read(site)) if path not in written]
    python = Path(sys.prefix)
    every = [python, *written, *read]
    if missing := [path for path in every if not path.exists()]:
        raise ConfigError(f"{missing[0]}: is not there, and a unit cannot name it; make it, or change site.yaml")
    if hidden := [path for path in every if any(path.is_relative_to(place) for place in TEMPORARY)]:
        raise ConfigError(f"{hidden[0]}: the service has a /tmp of its own and would not see it; move it")
    path = quoted(f"PATH={python / 'bin'}:{SYSTEM_PATH}")
    start = " ".join(quoted(word).replace("$", "$$") for word in ("/bin/bash", kit / "startup" / "sub_start.sh", "--once"))
    return UNIT.format(
        description=f"Consilium ({name})",
        identifier=f"consilium-{name}",
        user=user,
        group=group,
        path=path,
        start=start,
        closed=_closed(kit, site, any(one.is_relative_to(home) for one in every for home in HOMES)),
        written=" ".join(quoted(one) for one in written),
        read=f"ReadOnlyPaths={' '.join(quoted(one) for one in read)}\n" if read else "",
    )


def file_name(kit: Path) -> str:
    """Return what the kit's unit is called."""
    return f"consilium-{_name(kit)}.service"


def quoted(word: object) -> str:
    """Return a word as systemd reads it back whole. Raises ConfigError for what no line can hold."""
    text = str(word)
    if not _PLAIN.fullmatch(text) or not text.isprintable():
        raise ConfigError(f"{text!r}: a path in a unit has no line ends and no control characters; rename the folder")
    return '"{}"'.format(text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%"))


def _name(kit: Path) -> str:
    """Return the participant's name, as a file and a line of a unit may hold it: who made the certificate chose it."""
    if not _PARTICIPANT.fullmatch(name := kit_name(kit)):
        raise ConfigError(f"{kit}: its certificate is of {name!r}, which is no participant's name; ask the hub for another kit")
    return name


def _owner(kit: Path) -> tuple[str, str]:
    """Return the kit's user and group, as numbers if they have no names."""
    found = kit.stat()
    if found.st_uid == 0:
        raise ConfigError(f"{kit}: belongs to root, and the service runs as its owner; chown -R USER {kit}")
    own = (kit / "startup", kit / "local", *(kit / "startup").glob("*.key"))
    if strange := [path for path in own if path.stat().st_uid != found.st_uid]:
        raise ConfigError(f"{strange[0]}: does not belong to the kit's owner; chown -R {found.st_uid} {kit}")
    try:
        return pwd.getpwuid(found.st_uid).pw_name, str(found.st_gid)
    except KeyError:
        return str(found.st_uid), str(found.st_gid)


def _written(kit: Path, site: SiteConfig) -> Iterator[Path]:
    """Yield the folders that a participant writes beside its kit."""
    if site.state is not None:
        yield site.state
    if site.privacy.ledger is not None:
        yield site.privacy.ledger.parent
    if site.cache.folder is not None:
        yield site.cache.folder
    if site.tracking is not None and site.tracking.mlflow.startswith("file:"):
        yield Path(unquote(urlparse(site.tracking.mlflow).path))
    if kit_role(kit) == "server":
        yield from _said(kit / "local" / "resources.json", _stores)


def _read(site: SiteConfig) -> Iterator[Path]:
    """Yield what a site reads and never writes: lists with what lies beside them, and checkpoints."""
    lists = [one for one in (site.datalist, *(d.datalist for d in site.datasets.values())) if one is not None]
    yield from (one if one.is_dir() else one.parent for one in lists)
    if site.checkpoints is not None:
        yield site.checkpoints


def _closed(kit: Path, site: SiteConfig, at_home: bool) -> str:
    low = kit_role(kit) == "server" and _said(kit / "startup" / "fed_server.json", _port) < 1024
    cpu = site.main_device == "cpu" or kit_role(kit) == "server"
    return CLOSED.format(
        capability="CAP_NET_BIND_SERVICE" if low else "",
        homes="read-only" if at_home else "yes",
        devices=NO_DEVICES if cpu else GPUS,
    )


def _said(path: Path, look: Callable[[dict[str, Any]], T]) -> T:
    """Return what `look` finds in a JSON file of the kit. Raises ConfigError if it is not there."""
    try:
        return look(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        remedy = "ask the hub for the kit, or run `consilium provision SITES_YML --local KIT`"
        raise ConfigError(f"{path}: is not as a server's ({error!r}); {remedy}") from None


def _stores(resources: dict[str, Any]) -> list[Path]:
    """Return the folders in which a server keeps jobs and snapshots."""
    jobs = [one["args"]["uri_root"] for one in resources["components"] if one["id"] == "job_manager"]
    snapshots = resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"]
    return list(dict.fromkeys(Path(one).parent for one in [*jobs, snapshots]))


def _port(settings: dict[str, Any]) -> int:
    return int(settings["servers"][0]["service"]["target"].rpartition(":")[2])
