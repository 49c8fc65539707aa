"""A sandboxed systemd unit for a startup kit: it runs as the kit's owner, may write its state and read its data."""

import pwd
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

from consilium.config.site import SiteConfig, load_site
from consilium.core.errors import ConfigError
from consilium.flare.kit.certificates import server_address
from consilium.flare.kit.kit_files import kit_name, kit_role, server_folders

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
"""Everything that a participant never needs is closed. MemoryDenyWriteExecute is left out: torch compiles at run time."""
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
    """Return the unit of a site's or server's kit, for this installation of the package. Raises ConfigError.

    The service runs as the owner of the kit's folder, which must not be root. All folders in site.yaml must exist.
    """
    kit = kit.resolve()
    name, user, group = _name(kit), *_owner(kit)
    settings = kit / "local" / "site.yaml"
    site = load_site(settings) if settings.is_file() else SiteConfig()
    jobs, low_port = [], False
    if kit_role(kit) == "server":
        jobs = [one.parent for one in server_folders(kit)]
        low_port = int(server_address(kit).rpartition(":")[2]) < 1024
    written = list(dict.fromkeys([kit, *_written(site), *jobs]))
    read = [path for path in dict.fromkeys(_read(site)) if path not in written]
    python = Path(sys.prefix)
    every = [python, *written, *read]
    if missing := [path for path in every if not path.exists()]:
        raise ConfigError(f"{missing[0]}: is not there, and a unit cannot name it; make it, or change site.yaml")
    if hidden := [path for path in every if any(path.is_relative_to(place) for place in TEMPORARY)]:
        raise ConfigError(f"{hidden[0]}: the service has a /tmp of its own and would not see it; move it")
    closed = CLOSED.format(
        capability="CAP_NET_BIND_SERVICE" if low_port else "",
        homes="read-only" if any(one.is_relative_to(home) for one in every for home in HOMES) else "yes",
        devices=NO_DEVICES if site.main_device == "cpu" or kit_role(kit) == "server" else GPUS,
    )
    start = " ".join(quoted(word).replace("$", "$$") for word in ("/bin/bash", kit / "startup" / "sub_start.sh", "--once"))
    return UNIT.format(
        description=f"Consilium ({name})",
        identifier=f"consilium-{name}",
        user=user,
        group=group,
        path=quoted(f"PATH={python / 'bin'}:{SYSTEM_PATH}"),
        start=start,
        closed=closed,
        written=" ".join(quoted(one) for one in written),
        read=f"ReadOnlyPaths={' '.join(quoted(one) for one in read)}\n" if read else "",
    )


def file_name(kit: Path) -> str:
    """Return the name of the kit's unit."""
    return f"consilium-{_name(kit)}.service"


def quoted(word: object) -> str:
    """Return a word quoted for systemd. Raises ConfigError for one with line ends or control characters."""
    text = str(word)
    if not _PLAIN.fullmatch(text) or not text.isprintable():
        raise ConfigError(f"{text!r}: a path in a unit has no line ends and no control characters; rename the folder")
    return '"{}"'.format(text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%"))


def _name(kit: Path) -> str:
    """Return the participant's name if a file and a unit may hold it. Raises ConfigError: a certificate may have any name."""
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


def _written(site: SiteConfig) -> Iterator[Path]:
    """Yield the folders outside of its kit that a site writes."""
    if site.state is not None:
        yield site.state
    if site.privacy.ledger is not None:
        yield site.privacy.ledger.parent
    if site.cache.folder is not None:
        yield site.cache.folder
    if site.tracking is not None and site.tracking.mlflow.startswith("file:"):
        yield Path(unquote(urlparse(site.tracking.mlflow).path))


def _read(site: SiteConfig) -> Iterator[Path]:
    """Yield the folders that a site only reads: those of its data lists, and its checkpoints."""
    lists = [one for one in (site.datalist, *(d.datalist for d in site.datasets.values())) if one is not None]
    yield from (one if one.is_dir() else one.parent for one in lists)
    if site.checkpoints is not None:
        yield site.checkpoints
