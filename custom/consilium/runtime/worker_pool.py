"""The sites of a simulation: in this process, or dealt out over worker processes."""

import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple, Self

from consilium.client.build import build_guard, build_site
from consilium.client.client import Client, perform
from consilium.client.site_data import site_data
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig, check_packages
from consilium.core.child_process import ChildProcess, exit_with_parent, receive, send_by_value
from consilium.core.errors import ConsiliumError, Reason
from consilium.core.messages import Hello, Kind, Observer, Payload, Tensors, loading
from consilium.core.schema import validate
from consilium.federation.job import Job, build_model
from consilium.privacy.guard.guard import Guard
from consilium.privacy.secagg.simulated import FOLDER as IDENTITIES
from consilium.privacy.secagg.simulated import read_simulated_identity
from consilium.privacy.secagg.terms import Message
from consilium.training.joint_forward import copy_sharing_base

# simulated site --------------------------------------------------------------------------------------------------------
# A site of a simulation behind its guard, as FLARE puts an executor behind its filters.


@dataclass(frozen=True)
class SimulatedSite:
    """A site and the guard at its door."""

    site: Client
    guard: Guard

    def begin(self, kind: Kind, run: str, message: Payload | Message | None = None) -> Callable[[], Any]:
        """Return a function that asks this site and returns its answer."""
        return partial(self.ask, kind, run, message)

    def ask(self, kind: Kind, run: str, message: Payload | Message | None = None) -> Any:
        """Return the site's answer, as its guard lets it leave. `message`: a payload, or a question of secure aggregation."""
        payload = message if message is None or isinstance(message, Payload) else Payload(-1, -1, {}, masking=message)
        task = self.guard.authorize(kind, run, payload)
        answer = self.guard.answer(task, perform(task, lambda: self.site))
        # a pooled site has the guard of one of its sites
        return Hello(**answer | {"name": self.site.name}) if kind is Kind.HELLO else answer

    def close(self) -> None:
        """See Client."""
        self.site.close()


def simulated_sites(
    job: Job,
    sites: Mapping[str, SiteConfig],
    folder: Path,
    observer: Observer,
    former: Path | None = None,
    together: bool = False,
) -> dict[str, SimulatedSite]:
    """Return the sites of one process, which share the frozen base; `folder` gets a folder for each. Raises ConsiliumError.

    `former`: the run whose models a cross-site job scores. `together`: each site gets an adapter of its own beside the base.
    """
    observer(loading(job.config.model.title))
    model, keys, made = build_model(job.config, next(iter(sites.values()))), folder.parent / IDENTITIES, {}
    for name, site in sites.items():
        check_packages(job.config, site, name)
        own = folder / name
        home = former / "sites" / name if former and (former / "sites" / name).is_dir() else own
        data = site_data(job.config, name, site, home, own)
        identity = read_simulated_identity(keys, name, site.secure_aggregation) if job.config.secure_aggregation else None
        guard = build_guard(job, name, site, own, own, observer, simulated=True, data=data, identity=identity)
        own_model = copy_sharing_base(model) if together else model
        client = build_site(job, name, site, home, observer, own_model, data=data)
        guard.ready = client.begin
        made[name] = SimulatedSite(client, guard)
    return made


# worker pool -----------------------------------------------------------------------------------------------------------


class WorkerSetup(NamedTuple):
    """What a worker needs to make its sites, see simulated_sites: settings, initial tensors, and its sites."""

    number: int
    settings: dict[str, Any]
    initial: Tensors
    sites: dict[str, SiteConfig]
    folder: Path
    former: Path | None


class Question(NamedTuple):
    """A question to a site: the arguments of SimulatedSite.ask."""

    site: str
    kind: Kind
    run: str
    message: Payload | Message | None


class Failed(NamedTuple):
    """Why a site gave no answer: one line for an expected error, a traceback (and no reason) for any other."""

    text: str
    reason: Reason | None


class _Gone(Exception):
    """A worker process has ended. That is not a site's fault, so it ends the simulation."""


class Worker(ChildProcess):
    """A process with its sites, and the questions that wait for it."""

    def __init__(self) -> None:
        super().__init__(work, threads=1)
        self.waiting, self.busy = deque[Question](), False

    def ask(self, question: Question) -> None:
        """Send a question once the one before is answered: a worker that sends does not receive."""
        self.waiting.append(question)
        self.next()

    def next(self) -> None:
        """Send the next question, unless one is open."""
        if self.waiting and not self.busy:
            self.busy = True
            with suppress(OSError):  # the worker has ended, which `_take` reports
                send_by_value(self.pipe, self.waiting.popleft())


class WorkerPool:
    """The workers of one simulation. As a context manager it leaves no process behind, however the block ends.

    Raises ConsiliumError where a worker has ended by itself.
    """

    def __init__(
        self,
        job: Job,
        sites: Mapping[str, SiteConfig],
        folder: Path,
        count: int,
        observer: Observer,
        former: Path | None = None,
    ) -> None:
        self.observer, self.answers = observer, dict[str | int, Any]()
        names = list(sites)
        self.workers = [Worker() for _ in range(min(count, len(names)))]
        self.of = {name: self.workers[place % len(self.workers)] for place, name in enumerate(names)}
        for number, worker in enumerate(self.workers):
            dealt = {name: _placed(sites[name], number) for name in names if self.of[name] is worker}
            setup = WorkerSetup(number, job.config.model_dump(mode="json"), job.initial, dealt, folder, former)
            with suppress(OSError):
                send_by_value(worker.pipe, setup)
            worker.busy = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:
            if error[0] is None:
                with suppress(OSError):
                    send_by_value(worker.pipe, None)  # its files are closed then
                    worker.process.join(5)
            worker.process.terminate()
        for worker in self.workers:
            worker.end()
        if isinstance(error[1], _Gone):
            raise ConsiliumError(str(error[1])) from None

    def sites(self) -> dict[str, "RemoteSite"]:
        """Return the sites once all are ready. Raises ConsiliumError where one cannot be made."""
        for number, _ in enumerate(self.workers):
            self._take(number)
        return {name: RemoteSite(name, self) for name in self.of}

    def ask(self, question: Question) -> Callable[[], Any]:
        """Ask a site. Return a function that waits for the answer, and raises ConsiliumError as the site would."""
        self.of[question.site].ask(question)
        return lambda: self._take(question.site)

    def _take(self, who: str | int) -> Any:
        while who not in self.answers:
            pipes = {worker.pipe: worker for worker in self.workers}
            for pipe in connection.wait(list(pipes)):
                self._receive(pipes[pipe])  # type: ignore[index]
        found = self.answers.pop(who)
        if isinstance(found, Failed):
            raise ConsiliumError(found.text, found.reason) if found.reason else RuntimeError(found.text)
        return found

    def _receive(self, worker: Worker) -> None:
        try:
            who, answer = receive(worker.pipe)
        except (EOFError, OSError):
            raise _Gone(f"--workers: {worker.end()} `--resume` goes on from the last finished round") from None
        if who is None:
            self.observer(answer)
            return
        self.answers[who] = answer
        worker.busy = False
        worker.next()


class RemoteSite(NamedTuple):
    """A site in a worker, see SimulatedSite."""

    name: str
    pool: WorkerPool

    def begin(self, kind: Kind, run: str, message: Payload | Message | None = None) -> Callable[[], Any]:
        """Ask at once; return a function that waits for the answer."""
        return self.pool.ask(Question(self.name, kind, run, message))

    def close(self) -> None:
        """Do nothing: the worker closes its sites' files."""


def _placed(site: SiteConfig, number: int) -> SiteConfig:
    """Return the site, placed on its worker's GPU where there are several and the site names no device."""
    from torch.cuda import device_count

    if site.main_device != "auto" or (gpus := device_count()) < 2:
        return site
    return site.model_copy(update={"device": f"cuda:{number % gpus}"})


# in the process -------------------------------------------------------------------------------------------------------


def work(pipe: connection.Connection) -> None:
    """Make the sites, then answer questions until there are no more."""
    exit_with_parent()
    setup: WorkerSetup = receive(pipe)

    def tell(event: Mapping[str, Any]) -> None:
        send_by_value(pipe, (None, dict(event)))

    members: dict[str, SimulatedSite] = {}
    with suppress(EOFError, OSError):
        send_by_value(pipe, (setup.number, _tried(lambda: members.update(_make_sites(setup, tell)))))
        while (question := receive(pipe)) is not None:
            site, *words = question
            send_by_value(pipe, (site, _tried(lambda: members[site].ask(*words))))  # noqa: B023 - called at once
    for member in members.values():
        member.close()


def _make_sites(setup: WorkerSetup, tell: Observer) -> dict[str, SimulatedSite]:
    config = validate(JobConfig, setup.settings, Path("job.yaml"), None)  # plug-ins too: it is the researcher's machine
    return simulated_sites(Job(config, setup.initial), setup.sites, setup.folder, tell, setup.former)


def _tried(do: Callable[[], Any]) -> Any:
    try:
        return do()
    except ConsiliumError as error:
        return Failed(str(error), error.reason)
    except Exception:
        return Failed(traceback.format_exc(), None)
