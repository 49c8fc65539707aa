"""The sites of a simulation, in this process or distributed over worker processes."""

import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

import torch

from consilium.client.build import build_guard, build_site
from consilium.client.client import Client, perform
from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig, check_simulated_plugins
from consilium.core.child_process import ChildProcess, exit_with_parent, receive, send_by_value
from consilium.core.errors import ConsiliumError, Reason
from consilium.core.messages import Hello, Kind, Observer, Payload, Tensors, loading_event
from consilium.core.schema import validate
from consilium.federation.job_assembly import Job, build_model
from consilium.privacy.guard.guard import Guard
from consilium.privacy.secagg.certificates import FOLDER as IDENTITIES, read_simulated_identity
from consilium.privacy.secagg.terms import Message
from consilium.training.joint_forward import copy_sharing_base
from consilium.training.loop import Stopped

# simulated site --------------------------------------------------------------------------------------------------------
# In a simulation a site is called through its guard, as FLARE calls an executor through its filters.


@dataclass(frozen=True)
class SimulatedSite:
    """A site with the guard that checks all its tasks and answers."""

    site: Client
    guard: Guard

    def prepare_ask(self, kind: Kind, run: str, message: Payload | Message | None = None) -> Callable[[], Any]:
        """Return a function that asks this site and returns its answer."""
        return partial(self.ask, kind, run, message)

    def ask(self, kind: Kind, run: str, message: Payload | Message | None = None) -> Any:
        """Return the site's answer after its guard. `message`: a payload, or a message of secure aggregation.

        As in a federation, the guard records a ConsiliumError, and in a private job stores and charges it, see Guard.refuse.
        Any other error is a fault in code: it ends the simulation, and nothing is stored.
        """
        payload = message if message is None or isinstance(message, Payload) else Payload(-1, -1, {}, masking=message)
        try:
            task = self.guard.authorize(kind, run, payload)
            answer = self.guard.answer(task, perform(task, lambda: self.site))
        except Stopped:
            raise
        except ConsiliumError as error:
            reply = self.guard.refuse(error.reason)
            if isinstance(reply, Reason):
                error.reason = reply
                raise
            self.guard.observer({"event": "warning", "text": f"{self.guard.name}: {error}"})
            _, answer = reply
        # the pooled site uses the guard of one of its sites, so the name is replaced
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
    """Return the sites of one process. They share the frozen base; each has a folder in `folder`. Raises ConsiliumError.

    `former`: the run whose models a cross-site job scores. `together`: each site has its own copy of the adapter tensors.
    """
    observer(loading_event(job.config.model.title))
    model, keys, made = build_model(job.config, next(iter(sites.values()))), folder.parent / IDENTITIES, {}
    for name, site in sites.items():
        check_simulated_plugins(job.config, site, name)
        own = folder / name
        home = former / "sites" / name if former and (former / "sites" / name).is_dir() else own
        data = load_site_data(job.config, name, site, home, own)
        identity = read_simulated_identity(keys, name, site.secure_aggregation) if job.config.secure_aggregation else None
        guard = build_guard(job, name, site, own, own, observer, simulated=True, data=data, identity=identity)
        client = build_site(job, name, site, home, observer, copy_sharing_base(model) if together else model, data=data)
        guard.ready = client.prepare_round
        made[name] = SimulatedSite(client, guard)
    return made


# worker pool -----------------------------------------------------------------------------------------------------------


class WorkerSetup(NamedTuple):
    """The data from which a worker builds its sites, see simulated_sites: job settings, initial tensors and site settings."""

    settings: dict[str, Any]
    initial: Tensors
    sites: dict[str, SiteConfig]
    folder: Path
    former: Path | None


class _Gone(Exception):
    """A worker process has ended unexpectedly. This is not the error of one site, so the simulation ends."""


class WorkerPool:
    """The workers of one simulation. The context manager ends all processes, also after an error.

    A thread per worker sends its questions one after another, because a worker does not receive while it sends. Raises
    ConsiliumError if a worker has ended unexpectedly.
    """

    def __init__(
        self, job: Job, sites: Mapping[str, SiteConfig], folder: Path, count: int, observer: Observer, former: Path | None
    ) -> None:
        self.observer, self._events = observer, SimpleQueue[Any]()
        self._answered, self._number = set[Future[Any]](), dict[Future[Any], int]()
        names = list(sites)
        self._workers = [ChildProcess(worker_main, threads=1) for _ in range(min(count, len(names)))]
        self._threads = [ThreadPoolExecutor(1) for _ in self._workers]
        self._place = {name: place % len(self._workers) for place, name in enumerate(names)}
        gpus = torch.cuda.device_count() if any(site.main_device == "auto" for site in sites.values()) else 0
        for number, worker in enumerate(self._workers):
            dealt = {name: sites[name] for name in names if self._place[name] == number}
            if gpus > 1:  # a site that names no device gets a GPU by its worker's number
                own = {"device": f"cuda:{number % gpus}"}
                dealt |= {n: site.model_copy(update=own) for n, site in dealt.items() if site.main_device == "auto"}
            setup = WorkerSetup(job.config.model_dump(mode="json"), job.initial, dealt, folder, former)
            with suppress(OSError):  # the worker has ended, which `_await` reports
                send_by_value(worker.pipe, setup)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            if error[0] is None:
                with suppress(OSError):
                    send_by_value(worker.pipe, None)  # the worker then closes its files and ends
                    worker.process.join(5)
            worker.process.terminate()
        for worker, thread in zip(self._workers, self._threads, strict=True):
            worker.end()
            thread.shutdown(wait=False, cancel_futures=True)
        if isinstance(error[1], _Gone):
            raise ConsiliumError(str(error[1])) from None

    def wait_for_sites(self) -> dict[str, "RemoteSite"]:
        """Wait until all sites are built, and return them. Raises ConsiliumError if a site cannot be built."""
        for future in [self._submit(number, self._answer_of, number) for number, _ in enumerate(self._threads)]:
            self._await(future)
        return {name: RemoteSite(name, self) for name in self._place}

    def ask(self, site: str, *question: Any) -> Callable[[], Any]:
        """Send a site a question: the arguments of SimulatedSite.ask.

        Return a function that waits for the answer and raises the site's ConsiliumError.
        """
        number = self._place[site]
        return partial(self._await, self._submit(number, self._exchange, number, (site, *question)))

    def _submit(self, number: int, do: Callable[..., Any], *words: Any) -> Future[Any]:
        """Let a worker's thread call `do`. Its end is an event like those of the sites."""
        future = self._threads[number].submit(do, *words)
        self._number[future] = number
        future.add_done_callback(self._events.put)
        return future

    def _exchange(self, number: int, question: tuple[Any, ...]) -> Any:
        send_by_value(self._workers[number].pipe, question)
        return self._answer_of(number)

    def _answer_of(self, number: int) -> Any:
        while True:
            is_event, found = receive(self._workers[number].pipe)
            if not is_event:
                return found
            self._events.put(found)

    def _await(self, future: Future[Any]) -> Any:
        """Return a worker's answer. Meanwhile, pass on the events of all workers, in this thread.

        Raises _Gone as soon as any worker has ended.
        """
        while future not in self._answered:
            event = self._events.get()
            if not isinstance(event, Future):
                self.observer(event)
                continue
            self._answered.add(event)
            if isinstance(event.exception(), (EOFError, OSError)):
                ended = self._workers[self._number[event]].end()
                raise _Gone(f"--workers: {ended} `--resume` goes on from the last finished round")
        self._answered.discard(future)
        del self._number[future]
        found = future.result()
        if isinstance(found, Exception):
            raise found
        return found


class RemoteSite(NamedTuple):
    """A site in a worker process, with the methods of SimulatedSite."""

    name: str
    pool: WorkerPool

    def prepare_ask(self, kind: Kind, run: str, message: Payload | Message | None = None) -> Callable[[], Any]:
        """Send the question at once and return a function that waits for the answer."""
        return self.pool.ask(self.name, kind, run, message)

    def close(self) -> None:
        """Do nothing: the worker closes its sites' files."""


# in the process -------------------------------------------------------------------------------------------------------


def worker_main(pipe: connection.Connection) -> None:
    """Run in a worker process: build the sites, then answer questions until None is received."""
    exit_with_parent()
    members: dict[str, SimulatedSite] = {}

    def observe(event: Mapping[str, Any]) -> None:
        send_by_value(pipe, (True, dict(event)))

    def make_sites(setup: WorkerSetup) -> None:
        # None: all installed plug-ins are allowed, because this is the researcher's own machine
        config = validate(JobConfig, setup.settings, Path("job.yaml"), None)
        members.update(simulated_sites(Job(config, setup.initial), setup.sites, setup.folder, observe, setup.former))

    def answer(do: Callable[..., Any], *words: Any) -> None:
        found: Any
        try:
            found = do(*words)
        except ConsiliumError as error:
            found = error
        except Exception:
            found = RuntimeError(traceback.format_exc())
        send_by_value(pipe, (False, found))

    with suppress(EOFError, OSError):
        answer(make_sites, receive(pipe))
        while (question := receive(pipe)) is not None:
            site, *words = question
            answer(members[site].ask, *words)
    for member in members.values():
        member.close()
