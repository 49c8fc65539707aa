"""A real federation on loopback for tests: startup kits, processes of their own for every participant, an admin's session.

    with Federation(tmp_path, {"site-1": {}, "site-2": {"share_metrics": True}}) as federation:
        federation.start()                                   # server and sites; returns when all are connected
        job = federation.submit(federation.export(small_config()))
        federation.until(lambda: federation.concluded() >= 1, 60, "round 1")
        federation.kill("server")                            # SIGKILL: the machine is gone; kill_job("site-1"): its job only
        federation.start("server")                           # the same kit once more; waits until the sites are back
        assert federation.wait(job) == "FINISHED:COMPLETED"
        folder = federation.download(job)
        federation.shutdown()                                # by the admin; fails if any process is left

`sites` maps names to what goes into their site.yaml; `bundles` names participants that let jobs bring code ("server" too);
`closed` names participants that run as in a container: the machine read-only but for the kit and a temporary folder, without
capabilities; `make(sites_yml, folder)` makes other kits than ours; with `installed` False no participant has the package;
`admin` is who logs in where nobody else is named (to shut down one must be a project_admin, as ADMIN is). `variables` maps
names to what their environment has besides.
It is what `consilium poc` starts, with a scratch HOME, one thread and this checkout's package; change files under `kit(name)`
before start(). What is killed stays dead. Leaving the context kills what is left.
"""

import json
import os
import signal
import socket
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import yaml
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.fuel.flare_api.api_spec import InternalError, NoConnection
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session
from nvflare.lighter.utils import sign_folders

from consilium.config.job import JobConfig
from consilium.federation.run_folders import STATE
from consilium.flare.job.recipe import export_simulation_job
from consilium.flare.kit import processes
from consilium.flare.kit.local_federation import ADMIN, LEAD, SERVER, LocalFederation
from consilium.flare.kit.provision import provision

__all__ = ["ADMIN", "LEAD", "ROOT", "SERVER", "Federation", "free_port", "listening"]
ROOT = Path(__file__).parents[2]
FLARE_ERRORS = (FLCommunicationError, NoConnection, InternalError)
WALLS = """set -e
mount --make-rprivate /
mount --bind "$2" "$2"
mount --bind "$1" "$1"
mount -o remount,bind,ro /
export TMPDIR="$1"
shift 2
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""
"""What a closed participant's command runs behind; $1 is its temporary folder, $2 its kit. Needs root."""


def free_port() -> int:
    """Return the number of a TCP port on this machine that is free now."""
    with processes.reserve_port() as found:
        return int(found.getsockname()[1])


class Federation(LocalFederation):
    """See the module. `folder` receives everything; times are in seconds."""

    def __init__(
        self,
        folder: Path,
        sites: Mapping[str, Mapping[str, Any]],
        bundles: Collection[str] = (),
        make: Callable[[Path, Path], Path] = provision,
        installed: bool = True,
        admin: str = ADMIN,
        closed: Collection[str] = (),
    ) -> None:
        super().__init__(folder, sites, bundles, make)
        self.installed, self.admin, self.closed = installed, admin, closed
        self.variables: dict[str, dict[str, str]] = {}
        self.missing = "no look has ended"
        """Why the last look found server and sites not connected, and how long it took."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in ["server", *self.sites, *self.started]:
            self.kill(name)

    def start(self, *names: str, wait: float = 90) -> None:
        """Start these participants, all by default, and wait until the server has every site that runs."""
        for name in names or ["server", *self.sites]:
            super().start(name, self.environment() | self.variables.get(name, {}), self._walls(name))
        if wait:
            try:
                self.until(self._connected, wait, "server and sites to be connected")
            except AssertionError as error:
                raise AssertionError(f"{error}\nthe last look: {self.missing}") from None

    def reroute(self, name: str, port: int) -> None:
        """Have a site's kit lead to another port of this machine, signed as the hub would. Before its start."""
        path = self.kit(name) / "startup/fed_client.json"
        path.write_text(path.read_text().replace(f":{self.port}", f":{port}"))
        key = json.loads((self.kits.parent / "state/cert.json").read_text())["root_pri_key"]
        signing = load_pem_private_key(key.encode(), None)
        sign_folders(str(self.kit(name) / "startup"), signing, signature_file="signature.json")

    def add(self, name: str) -> None:
        """Add a site to sites.yml and make its kit, beside the others', as the hub does while the federation runs."""
        raw = yaml.safe_load(self.file.read_text())
        raw["sites"].append({"name": name, "org": name.replace("-", "_")})
        self.file.write_text(yaml.safe_dump(raw))
        (made,) = provision(self.file, self.kits.parents[1], [name]).iterdir()  # no other participant's
        made.rename(self.kit(name))
        self.sites.append(name)

    def environment(self) -> dict[str, str]:
        """Return the environment of every process, and of commands a test runs in a participant's place."""
        environment = self.scratch_environment(self.folder)
        if self.installed:
            return environment
        path = f"{_python_without_us(self.folder / 'python')}{os.pathsep}{environment['PATH']}"
        return environment | {"PATH": path, "PYTHONPATH": ""}

    @staticmethod
    def scratch_environment(folder: Path) -> dict[str, str]:
        """Return an environment with this checkout's package, one thread and a home under `folder`."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("CONSILIUM_")}
        (folder / "home").mkdir(exist_ok=True)
        path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
        code = os.pathsep.join([str(ROOT / "custom"), str(ROOT)])
        return kept | {"HOME": str(folder / "home"), "PATH": path, "PYTHONPATH": code, "OMP_NUM_THREADS": "1"}

    def _walls(self, name: str) -> list[str]:
        """Return the words before a closed participant's command: compose.yaml's read_only, cap_drop and security_opt."""
        if name not in self.closed:
            return []
        temporary = self.folder / f"tmp-{name}"
        temporary.mkdir(exist_ok=True)
        return ["unshare", "--mount", "sh", "-c", WALLS, "walls", str(temporary), str(self.kit(name))]

    @contextmanager
    def session(self, user: str = "") -> Iterator[Session]:
        """Log in as a person, by default the federation's `admin`. Raises FLARE's NoConnection if the server is not there."""
        user = user or self.admin
        session = new_secure_session(user, str(self.kit(user)), timeout=10)
        try:
            yield session
        finally:
            session.close()

    def export(self, config: JobConfig) -> Path:
        """Return a config-only job folder."""
        return export_simulation_job(config, self.folder / "jobs" / f"{config.name}-{time.monotonic_ns()}")

    def submit(self, job: Path, user: str = "") -> str:
        """Submit a job folder through FLARE's own API and return its id."""
        with self.session(user) as session:
            return session.submit_job(str(job))

    def wait(self, job: str, timeout: float = 180) -> str:
        """Return a job's final status, such as FINISHED:COMPLETED. FLARE's own function waits by the wall clock."""
        with self.session() as session:
            found = [""]

            def ended() -> bool:
                found[0] = session.get_job_meta(job)["status"]
                return found[0].startswith("FINISHED:")

            self.until(ended, timeout, f"job {job} to end")
        return found[0]

    def meta(self, job: str) -> dict[str, Any]:
        """Return what the server knows of a job."""
        with self.session() as session:
            return session.get_job_meta(job)

    def abort(self, job: str) -> None:
        """Abort a job."""
        with self.session() as session:
            session.abort_job(job)

    def download(self, job: str) -> Path:
        """Return the folder of a finished job's result, as the server hands it out."""
        with self.session() as session:
            return Path(session.download_job_result(job, str(self.folder / "downloads")))

    def server_files(self) -> Path:
        """Return the newest run folder of the server: metrics.jsonl, server/state.safetensors, results.json."""
        return max((self.kit("server") / STATE).rglob("metrics.jsonl"), key=lambda p: p.stat().st_mtime).parent

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """Return the lines of the newest run's metrics.jsonl, of one kind where given; none before there is a run."""
        try:
            lines = (self.server_files() / "metrics.jsonl").read_text().splitlines()
        except (OSError, ValueError):
            return []
        return [event for event in map(json.loads, lines) if kind in ("", event["event"])]

    def concluded(self) -> int:
        """Return how many phases the newest run has concluded."""
        return len(self.events("concluded"))

    def log(self, name: str) -> str:
        """Return all that a participant, its job processes included, has printed or logged."""
        paths = [self.folder / f"{name}.log", *sorted(self.kit(name).rglob("log.txt"))]
        return "\n".join(path.read_text(errors="replace") for path in paths if path.is_file())

    def processes(self, name: str = "", jobs_only: bool = False) -> dict[int, str]:
        """Return pid and command line of the living processes of one participant, or of all."""
        kits = [self.kit(name)] if name else [kit for kit in self.kits.iterdir() if kit.is_dir()]
        return {one.pid: " ".join(one.info["cmdline"]) for kit in kits for one in processes.processes(kit, jobs_only)}

    def kill(self, name: str) -> None:
        """SIGKILL all processes of a participant and wait until they are gone: its machine has lost power."""
        processes.stop([self.kit(name)], signal.SIGKILL)
        if process := self.started.pop(name, None):
            process.wait()

    def kill_job(self, name: str) -> None:
        """SIGKILL the job processes of a participant; the participant itself lives on."""
        assert self.processes(name, jobs_only=True), f"{name} has no job process"
        processes.stop([self.kit(name)], signal.SIGKILL, jobs_only=True)

    def shutdown(self) -> None:
        """Abort what runs, shut all down as an admin does, and fail if a process is left after it."""
        with self.session() as session:
            for job in session.get_system_info().job_info:
                session.abort_job(job.job_id)
        self.until(lambda: not self.processes(jobs_only=True), 60, "the jobs to end")
        with self.session() as session, suppress(NoConnection):  # the server may be gone before it has answered
            session.shutdown("all", timeout=60)
        for process in self.started.values():
            process.wait(60)
        self.started.clear()
        self.until(lambda: not self.processes(), 30, "all processes to end")

    def until(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        """Return when `condition` holds; fail with the end of every log after `timeout` seconds.

        A look may itself take long, so one that began after the time is up decides.
        """
        ends, late = time.monotonic() + timeout, False
        while not condition():
            if late:
                logs = "\n".join(f"--- {n}\n{self.log(n)[-3000:]}" for n in ["server", *self.sites])
                raise AssertionError(f"waited {timeout} s for {what}; living: {self.processes()}\n{logs}")
            time.sleep(0.2)
            late = time.monotonic() > ends

    def _connected(self) -> bool:
        if dead := [name for name, process in self.started.items() if process.poll() is not None]:
            raise AssertionError(f"{dead[0]} has ended:\n{self.log(dead[0])[-3000:]}")
        began, known, why = time.monotonic(), set[str](), ""
        try:
            if listening(self.port):
                with self.session() as session:
                    known = {client.name for client in session.get_system_info().client_info}
            else:
                why = f"nothing accepts connections at port {self.port}"
        except TypeError as error:  # FLARE's own, where a server answers before it has read its certificate
            why = repr(error)
        except FLARE_ERRORS as error:  # a busy server has not answered within FLARE's 5 seconds
            why = repr(error)
        absent = (self.started.keys() & set(self.sites)) - known
        self.missing = f"{why or f'without {sorted(absent)}'} ({time.monotonic() - began:.1f} s)"
        return not why and not absent


def _python_without_us(folder: Path) -> Path:
    """Return the folder of a python3 that has all that this one has, but for the editable installation of consilium."""
    if not folder.exists():
        venv.create(folder, symlinks=True)
        (own,) = folder.glob("lib/*/site-packages")
        (own / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")  # .pth files found by way of a .pth are not read
    return folder / "bin"


def listening(port: int) -> bool:
    """Tell whether something accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
