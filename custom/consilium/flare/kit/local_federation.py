"""A federation on this machine: the startup kits and processes of a server and its sites, connected over loopback."""

import errno
import os
import re
import signal
import subprocess
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from consilium.core.errors import ConsiliumError
from consilium.core.storage import make_private_folder, write_atomic
from consilium.flare.kit import processes
from consilium.flare.kit.provision import provision

SERVER, ADMIN, LEAD = "localhost", "admin@hub.example", "lead@hub.example"
LAST_LINES = 3000
"""Characters of a participant's output that an error shows."""
IN_USE = os.strerror(errno.EADDRINUSE)
"""The words in gRPC's log line on a port that it cannot use."""


class LocalFederation:
    """The kits of a server, of `sites` and of two people under `folder`, and the processes started from these kits.

    `sites`: for each site's name, the settings for its site.yaml. `bundles`: names of participants where jobs may bring code;
    "server" stands for the server. `make`: a function that makes the kits of a sites.yml in a folder, and returns their folder.
    """

    def __init__(
        self,
        folder: Path,
        sites: Mapping[str, Mapping[str, Any]],
        bundles: Collection[str] = (),
        make: Callable[[Path, Path], Path] = provision,
    ) -> None:
        self.folder, self.sites, reserved = make_private_folder(folder.resolve()), list(sites), processes.reserve_port()
        self.port = int(reserved.getsockname()[1])
        weakref.finalize(self, reserved.close)  # no other program can take the port before the server starts
        self.file, state = self.folder / "sites.yml", make_private_folder(self.folder / "server-state")
        server = {"name": SERVER, "org": "hub", "port": self.port, "hosts": ["127.0.0.1"], "bundles": "server" in bundles}
        entries = [
            {"name": name, "org": re.sub(r"\W", "_", name, flags=re.ASCII), "bundles": name in bundles, "site": dict(settings)}
            for name, settings in sites.items()
        ]
        people = [{"name": name, "org": "hub", "role": role} for name, role in ((ADMIN, "project_admin"), (LEAD, "lead"))]
        deployment = {"name": "poc", "server": server | {"state": str(state)}, "sites": entries}
        write_atomic(self.file, yaml.safe_dump(deployment | {"admins": people}).encode())
        self.kits = make(self.file, self.folder / "kits")
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def kit(self, name: str) -> Path:
        """Return the startup kit of the server ("server"), a site or a person."""
        return self.kits / (SERVER if name == "server" else name)

    def start(self, name: str, environment: Mapping[str, str], before: Sequence[str] = ()) -> None:
        """Start a participant with `processes.start`. NAME.log in `folder` receives its output."""
        self.started[name] = processes.start(self.kit(name), self.folder / f"{name}.log", environment, before)

    def check_alive(self) -> None:
        """Raise ConsiliumError if a process has ended, with the last part of its output; or if the server's port is taken."""
        for name, process in self.started.items():
            if process.poll() is not None:
                output = (self.folder / f"{name}.log").read_text(errors="replace")[-LAST_LINES:]
                raise ConsiliumError(f"{name} has ended; see {self.folder / f'{name}.log'}: {output}")
        if "server" in self.started:  # FLARE's server logs a taken port, and runs on
            lines = (self.folder / "server.log").read_text(errors="replace").splitlines()
            if any(IN_USE in line and f":{self.port}'" in line for line in lines):
                raise ConsiliumError(f"port {self.port} of this machine is taken by another program; run the command again")

    def stop(self) -> None:
        """End all processes, also those of jobs. A second Ctrl-C does not interrupt this."""
        stop_all(self.kits)
        self.started.clear()


def stop_all(kits: Path) -> bool:
    """End all processes of the kits in a folder; return whether any ran. SIGINT, SIGTERM and SIGHUP do not interrupt this."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        found = [kit for kit in kits.iterdir() if (kit / "startup" / processes.START).is_file()]
        ran = any(processes.processes(kit) for kit in found)
        processes.stop(found)
        return ran
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
