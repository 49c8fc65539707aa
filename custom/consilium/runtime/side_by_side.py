"""Trains several sites of one process side by side, with one forward and backward pass over all their batches.

Each site runs its usual code in a thread. A thread stops where it calls its model or needs a loss's gradients. When all threads
have stopped, those with the same kind of request continue together: one forward pass over their batches, or one backward pass
over their losses. Only one thread runs at a time, in a fixed order, and each has its own state of PyTorch's random generators.
So a run is repeatable.

The sites of a group store their results only after all have trained. Otherwise a resumed run would train a smaller group. On
many processors the rows of a matrix product depend on the number of rows, so the results would differ.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from consilium.client.client import Client
from consilium.core.errors import STOPS
from consilium.core.messages import Observer
from consilium.federation.job_assembly import Job
from consilium.training.joint_forward import (
    Call,
    check_joint_outputs,
    check_random_state_unchanged,
    forward_together,
    part_run_for_all_sites,
    random_state,
    set_random_state,
)
from consilium.training.loop import Stopped


@dataclass(frozen=True)
class _Forward:
    """A site's request for the output of its model, with the thread's modes of PyTorch (gradients, autocast)."""

    call: Call
    gradients: bool
    autocast: tuple[bool, torch.dtype]
    device: torch.device

    @contextmanager
    def use_thread_modes(self) -> Iterator[None]:
        """Within the context, use the modes of the site's thread, because PyTorch's modes are per thread."""
        wanted, dtype = self.autocast
        with torch.set_grad_enabled(self.gradients), torch.autocast(self.device.type, dtype, enabled=wanted):
            yield


SAVE = "save"
"""A site's request to store its result; granted when all sites of the group have trained."""
_Request = _Forward | Tensor | str
"""What a site's thread waits for: the output of its model, the gradients of a loss, or SAVE."""
LAST = (sys.maxsize, 0)
"""The `progress_key` of sites that have trained."""


def why_one_by_one(job: Job) -> str:
    """Return why the sites of a job cannot train side by side; "" if the job's settings allow it."""
    config, traits = job.config, job.strategy.traits
    hindrances = {
        "privacy: takes a gradient of each record": config.dpsgd is not None,
        f"strategy {job.strategy.name!r} trains in one place": traits.pools_data,
        f"strategy {job.strategy.name!r} leaves out other blocks of the base at each site": traits.skips_blocks,
        f"strategy {job.strategy.name!r} looks into each site's model": bool(traits.parts),
        f"strategy {job.strategy.name!r} reads gradients before it trains": traits.probe_fraction > 0,
        "task.learn is preference, which also runs the base": getattr(config.task, "learn", "") == "preference",
        "training.compile is true": config.training.compile,
        "the model's positions depend on pictures": config.model.name == "vision_language",
        "training.gradient_checkpointing runs blocks again in the backward pass": config.training.gradient_checkpointing,
        "model.dtype stores the base in few bits": getattr(config.model, "dtype", "") in ("nf4", "int8"),
    }
    return next((why for why, holds in hindrances.items() if holds), "")


def one_by_one_event(why: str) -> dict[str, str]:
    """Return the warning event for a run whose sites train one by one although `--together` was given."""
    return {"event": "warning", "text": f"--together: sites are trained one by one, as {why}"}


class SideBySide:
    """Runs the work of up to `most` sites at a time. If sites must run one by one, `observer` receives one warning."""

    def __init__(self, sites: Mapping[str, Client], most: int, observer: Observer) -> None:
        self._most, self._observer = most, observer
        self._checked, self._refused, self._told = set[object](), False, False
        self._running: dict[int | None, _Worker] = {}
        for site in sites.values():
            part = part_run_for_all_sites(site.context.model)
            vars(part)["forward"] = partial(self._forward, site.context.model, part, part.forward)
            site.context.backward = self._backward
            site.context.before_saving = self._before_saving

    def run(self, work: Mapping[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
        """Do each site's work. Return by site a function that returns the result or raises the error of its work."""
        names, done = list(work), dict[str, Callable[[], Any]]()
        for start in range(0, len(names), self._most):
            workers = [_Worker(name, work[name]) for name in names[start : start + self._most]]
            self._run_together(workers)
            done |= {worker.name: worker.outcome.result for worker in workers}
        return done

    def _run_together(self, workers: Sequence["_Worker"]) -> None:
        """Run the workers in turns. Those with the same kind of request continue in one joint pass."""
        for worker in workers:
            worker.thread.start()
        self._running = {worker.thread.ident: worker for worker in workers}
        try:
            for worker in workers:
                worker.run_until_request()
            while waiting := [worker for worker in workers if worker.request is not None]:
                earliest = min(worker.progress_key for worker in waiting)
                group = [worker for worker in waiting if worker.progress_key == earliest]
                self._answer(group)
                for worker in group:
                    worker.run_until_request()
        finally:
            for worker in workers:
                worker.stop()
            self._running = {}

    def _answer(self, group: Sequence["_Worker"]) -> None:
        """Answer the requests of sites that are equally far (`_Worker.progress_key`)."""
        if group[0].progress_key == LAST:
            for worker in group:
                worker.may_save, worker.answer = True, _run(lambda: None)
            return
        losses = [worker.request for worker in group if isinstance(worker.request, Tensor)]
        if losses:
            answer = _run(lambda: torch.autograd.backward(losses))
            for worker in group:
                worker.answer = answer
            return
        alike: dict[object, list[_Worker]] = {}
        for worker in group:
            request = worker.request
            assert isinstance(request, _Forward)
            if (watched := request.call.has_hooks) and request.gradients:
                self._warn_once("each site's model is looked into, as adapters and algorithms with hooks do")
            key: object = id(worker) if self._refused or watched else (request.call.key, request.autocast)
            alike.setdefault(key, []).append(worker)
        for key, workers in alike.items():
            if len(workers) == 1 or not self._answer_jointly(key, workers):
                for worker in workers:
                    worker.answer_alone()

    def _answer_jointly(self, key: object, workers: Sequence["_Worker"]) -> bool:
        """Answer the requests by one joint pass and return True.

        If that is not possible, return False with all states unchanged; later requests are then answered one by one.
        """
        requests = [worker.request for worker in workers if isinstance(worker.request, _Forward)]
        calls = [request.call for request in requests]
        before = random_state()
        try:
            if key not in self._checked:
                with requests[0].use_thread_modes():
                    check_joint_outputs(calls)
                self._checked.add(key)
            with requests[0].use_thread_modes():
                outputs = forward_together(calls)
            check_random_state_unchanged(before)
        except STOPS:
            raise
        except Exception as error:  # an error that a site also raises alone becomes that site's error
            self._refused = True
            self._warn_once(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {str(error)[:200]}")
            set_random_state(before)
            return False
        for worker, output in zip(workers, outputs, strict=True):
            worker.answer.set_result(output)
        return True

    def _warn_once(self, why: str) -> None:
        if not self._told:
            self._told = True
            self._observer(one_by_one_event(why))

    def _forward(self, model: nn.Module, part: nn.Module, run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        worker = self._running.get(threading.get_ident())
        if worker is None:
            return run(*arguments, **options)
        device = next(model.parameters()).device
        modes = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        return worker.submit_and_wait(
            _Forward(Call(model, part, run, arguments, options), torch.is_grad_enabled(), modes, device)
        )

    def _backward(self, loss: Tensor) -> None:
        worker = self._running.get(threading.get_ident())
        if worker is None:
            loss.backward()
        else:
            worker.submit_and_wait(loss)

    def _before_saving(self) -> None:
        if worker := self._running.get(threading.get_ident()):
            worker.submit_and_wait(SAVE)


class _Worker:
    """One site's thread. `run_until_request` lets it run, while the others wait, until its next request or its end."""

    def __init__(self, name: str, work: Callable[[], Any]) -> None:
        self.name = name
        self.request: _Request | None = None
        self.may_save = False
        self._stop: BaseException | None = None
        self.answer, self.outcome = Future[Any](), Future[Any]()
        self._work, self._backward_passes, self._random, self._stopping, self._ended = work, 0, random_state(), False, False
        self._turn_granted, self._turn_ended = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def progress_key(self) -> tuple[int, int]:
        """How far the site is: its finished backward passes, and its request: 0 for a score, 1 for a loss, 2 for gradients.

        The sites that are least far continue first, so that sites with more batches to score stay in step with the others.
        """
        if isinstance(self.request, str):
            return LAST
        return self._backward_passes, int(self.request.gradients) if isinstance(self.request, _Forward) else 2

    def run_until_request(self) -> None:
        """Let the site run until its next request or its end. Raises the error that ended it if this must end the run."""
        self.request = None
        set_random_state(self._random)
        self._turn_granted.release()
        self._turn_ended.acquire()
        if self._stop is not None and not self._stopping:
            raise self._stop

    def stop(self) -> None:
        """End the thread, also if it waits for an answer."""
        self._stopping = True
        while not self._ended:
            self.run_until_request()
        self.thread.join()

    def answer_alone(self) -> None:
        """Answer the request with the site's own model."""
        request = self.request
        assert isinstance(request, _Forward)
        set_random_state(self._random)
        with request.use_thread_modes():
            self.answer = _run(request.call.run_alone)
        self._random = random_state()

    def submit_and_wait(self, request: _Request) -> Any:
        """End the turn of this thread, the site's own, and return the answer at its next turn. Raises Stopped at the run's end.

        After the end was asked for, a site that `may_save` still writes its state.
        """
        self._random, self.request, self.answer = random_state(), request, Future()
        self._turn_ended.release()
        self._turn_granted.acquire()
        if self._stopping and not self.may_save:
            raise Stopped("the run was stopped")
        self._backward_passes += isinstance(request, Tensor)
        return self.answer.result()

    def _run(self) -> None:
        self._turn_granted.acquire()
        if not self._stopping:
            self.outcome = _run(self._work)
            error = self.outcome.exception()
            self._stop = error if isinstance(error, STOPS) else None
        self._ended = True
        self._turn_ended.release()


def _run(work: Callable[[], Any]) -> Future[Any]:
    """Call `work` now. Return its result or error as a future."""
    done = Future[Any]()
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
    return done
