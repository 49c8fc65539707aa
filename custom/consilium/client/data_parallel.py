"""Data-parallel training on several devices of one site: each rank (a process) has the model and takes a part of each batch.

Rank 0 is the site's own process. It alone has the guard, the optimizer, the strategy and the site's files of the run, and it
alone communicates with a server. The other ranks are its child processes. They receive parts of batches and the adapter's
values from rank 0. All gradients are summed by an all-reduce (gloo, over 127.0.0.1). A loss is a mean over samples. So the
parts' losses, weighted by their numbers of samples, give the gradient of the whole batch, up to the order of float32 sums. This
is the algorithm of PyTorch's DistributedDataParallel (Li et al., "PyTorch Distributed", VLDB 2020), not its class: the
optimizer is on one rank. For an adapter, sending its values costs as much as sending gradients back.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from consilium.client.data_parallel_worker import (
    BlockRequest,
    Phase,
    RankSetup,
    Share,
    as_failure,
    flatten_tensors,
    join_device_mesh,
    join_process_group,
    loss_and_gradients,
    rendezvous_store,
    run_rank,
    select_tensors,
    sizes,
    sum_or_broadcast,
)
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.child_process import ChildProcess, exit_reason, receive, send_by_value
from consilium.core.errors import ConsiliumError, Reason
from consilium.core.messages import Tensors
from consilium.core.seeding import seed_for
from consilium.core.storage import make_private_folder
from consilium.data.datalist import DataList, Loading
from consilium.federation.job_assembly import build_model
from consilium.models.low_precision import QUANTIZED
from consilium.tasks.base import Batch, Task
from consilium.training.device import pick_device
from consilium.training.sharding import leave_world, register_gather_hooks, shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FAILURE_WAIT = 1.0
"""Seconds to wait for what a rank has to say of a failure, and for its end."""


class DataParallelGroup:
    """The other ranks of a site, one per further device.

    They start before the first training. If one fails, all end and start again before the next training. With a sharded base
    they start with the first task, because rank 0 alone then does not have the whole base. `data`: the site's samples, of which
    the ranks get the training samples; `folder`: has the file through which the ranks find each other.
    """

    def __init__(self, config: JobConfig, site: SiteConfig, data: DataList, folder: Path) -> None:
        self.config, self.site, self.data, self.folder = config, site, training_only(data), folder
        self.children, self.place, self.count, self.together = list[ChildProcess](), folder, 0, False
        self.sharded, self.device = site.base == "sharded", pick_device(site.main_device)
        self._group: ProcessGroup | None = None
        self._split: nn.Module | None = None

    @contextmanager
    def model_on_all_ranks(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield the model for a task. A sharded base is distributed over the ranks first, and read again after a rank failed.

        Raises ConsiliumError if a rank has failed.
        """
        if not self.sharded:
            yield model
            return
        with self.end_on_error(harmless=ConsiliumError):
            if not self.children:
                model = build_model(self.config, self.site) if model is self._split else model
                with self.end_on_error():
                    self._launch(model)
            yield model

    def start_joint_task(self, task: Task, values: Tensors, trained: set[str], scaling: float) -> "JointTask":
        """Return the task whose loss and gradient all ranks compute together. Raises ConsiliumError if a rank fails."""
        self.start_ranks()
        self.count = 0  # the ranks' dropout depends on it, and must not depend on earlier rounds of this process
        with self.end_on_error():
            for child in self.children:
                send_by_value(child.pipe, Phase(values, frozenset(trained), scaling))
        return JointTask(task, self, trained)

    def start_ranks(self) -> None:
        """Start the other ranks, unless they are running. If a rank fails, end all ranks and raise ConsiliumError."""
        with self.end_on_error():
            if not self.children:
                self._launch(None)

    @contextmanager
    def end_on_error(
        self,
        failures: tuple[type[Exception], ...] = (OSError, EOFError, RuntimeError),
        harmless: type[Exception] | tuple[()] = (),
    ) -> Iterator[None]:
        """End all ranks if an error occurs in the block, unless it is `harmless`.

        An error among `failures` may be of another rank; it becomes a ConsiliumError that names the rank.
        """
        try:
            yield
        except harmless:
            raise
        except failures as error:
            raise self.end_after_failure(error) from error
        except BaseException:
            self.end()
            raise

    def _launch(self, model: nn.Module | None) -> None:
        """Start all other ranks. `model`: a model to shard, of which this rank keeps its part; None for a replicated base."""
        size = self.site.device_count
        self.place = Path(tempfile.mkdtemp(prefix="ranks-", dir=make_private_folder(self.folder)))
        store = rendezvous_store(self.place, size)
        self.children.extend(
            ChildProcess(run_rank, self.site.threads or torch.get_num_threads()) for _ in self.site.devices[1:]
        )
        packages, settings = frozenset(self.config.packages), self.config.model_dump(mode="json")
        for rank, child in enumerate(self.children, start=1):
            own = self.site.model_copy(update={"devices": self.site.devices[rank : rank + 1]})
            send_by_value(child.pipe, RankSetup(settings, packages, own, self.data, self.place, rank, size))
        self._wait_until_ready(self.children)
        self._group = join_process_group(store, 0, size)
        if model is not None:
            self._split = model
            register_gather_hooks(
                shard(model, join_device_mesh(store, 0, size, self.site), self.device), self._request_block_parts
            )
        for some in [[child] for child in self.children] if self.sharded else [self.children]:
            for child in some:
                send_by_value(child.pipe, None)  # it may read the base model
            self._wait_until_ready(some)

    def _request_block_parts(self, block: int) -> None:
        """Ask the other ranks for their parts of a block, unless all ranks are computing the block together.

        Raises ConsiliumError in a forward pass with gradients, which all ranks would have to compute together.
        """
        if self.together:
            return
        if torch.is_grad_enabled():
            raise ConsiliumError(
                "site.yaml: base: 'sharded': "
                "this job wants gradients outside of its steps, which one device alone computes; use replicated",
                Reason.POLICY,
            )
        for child in self.children:
            send_by_value(child.pipe, BlockRequest(block))

    def share_out_batch(self, batch: Batch) -> Share:
        """Send the other ranks their shares of a batch, and return the share of this rank."""
        self.count += 1
        size, ranks, shares = len(next(iter(batch.values()))), len(self.children) + 1, list[Share]()
        for rank in range(ranks):  # rank 0 gets the last samples, so it has samples if any rank has
            begin, end = size * (ranks - rank - 1) // ranks, size * (ranks - rank) // ranks
            samples: Batch = {}
            if end > begin or self.sharded:  # with a sharded base every rank must run every block: one sample of weight 0
                samples = {key: value[begin : max(end, begin + 1)] for key, value in batch.items()}
            shares.append(Share(samples, (end - begin) / size, seed_for(torch.initial_seed(), "rank", self.count, rank)))
        own, *others = shares
        for child, one in zip(self.children, others, strict=True):
            send_by_value(child.pipe, one._replace(batch={key: value.clone() for key, value in one.batch.items()}))
        return own

    @property
    def group(self) -> "ProcessGroup":
        """The process group of all ranks."""
        assert self._group is not None  # `start_joint_task` has created it
        return self._group

    def _wait_until_ready(self, children: list[ChildProcess]) -> None:
        """Wait until ranks are ready. Raises ConsiliumError for a reported failure, OSError or EOFError for an ended rank."""
        for child in children:
            if found := receive(child.pipe):
                raise self.end_after_failure(found, child)

    def end_after_failure(self, error: Exception, child: ChildProcess | None = None) -> ConsiliumError:
        """End all ranks; return the site's error. `child`: the rank that reported `error`, by default one that has failed."""
        if child is None:
            error, child = next(((found, one) for one in self.children if (found := _failure_of(one))), (error, None))
        rank = self.children.index(child) + 1 if child else 0
        who = f"rank {rank} on {self.site.devices[rank]}: " if child else ""
        self.end()
        return rank_error(who, error if isinstance(error, ConsiliumError) else as_failure(error))

    def end(self) -> None:
        """End all other ranks."""
        for child in self.children:
            child.process.kill()
        for child in self.children:
            child.end()
        if self.children:
            shutil.rmtree(self.place, ignore_errors=True)
        self.children, self._group = [], None
        if self.sharded:
            leave_world()


def training_only(data: DataList) -> DataList:
    """Return a list with only the training samples, for the other ranks. They get shares of batches and open no data file."""
    training = {split: items if split == "training" else () for split, items in data.splits.items()}
    return replace(data, splits=training, loading=Loading(prechecked=True, ignore_unfit=data.loading.ignore_unfit))


def rank_error(who: str, failure: ConsiliumError) -> ConsiliumError:
    """Return the site's error for a failed rank. `who`: the rank, for the message."""
    where = f"site.yaml: devices: {who}"
    found = ConsiliumError(f"{where}{failure}", Reason.TRAINING, failure.told and f"{where}{failure.told}")
    for note in getattr(failure, "__notes__", ()):
        found.add_note(note)
    return found


def _failure_of(child: ChildProcess) -> ConsiliumError | None:
    """Return why a rank failed, None if it did not fail. The other ranks only wait, and report nothing."""
    with suppress(EOFError, OSError):
        while child.pipe.poll(FAILURE_WAIT):
            if isinstance(found := receive(child.pipe), ConsiliumError):
                return found
    child.process.join(FAILURE_WAIT)
    code = child.process.exitcode
    return None if code is None else ConsiliumError(exit_reason(code))


class JointTask:
    """A task whose training loss is computed by all ranks together, each on its share of the batch."""

    def __init__(self, task: Task, ranks: DataParallelGroup, trained: set[str]) -> None:
        self.task, self.ranks, self.trained = task, ranks, trained

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped task."""
        return getattr(self.task, name)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the batch's mean loss. Its gradients are already computed; backward() only returns them.

        Raises ConsiliumError if a rank fails.
        """
        trained = select_tensors(model, self.trained)
        failures: tuple[type[Exception], ...] = (OSError, EOFError)
        if self.ranks.sharded:  # a block's parts are missing if a rank has ended
            failures = (*failures, RuntimeError)
        self.ranks.together = True
        try:
            with self.ranks.end_on_error(failures):
                found: Tensor = _AllRanksLoss.apply(self, model, self.ranks.share_out_batch(batch), *trained)
        finally:
            self.ranks.together = False
        return found

    def reduce_or_broadcast(self, numbers: Tensor, summed: bool) -> Tensor:
        """See `sum_or_broadcast` in data_parallel_worker.py. Raises OSError if a rank has ended."""
        try:
            return sum_or_broadcast(self.ranks.group, numbers, summed)
        except RuntimeError as error:
            raise OSError(str(error)) from None


class _AllRanksLoss(torch.autograd.Function):
    """Autograd function of the trained parameters: the loss that all ranks compute together."""

    @staticmethod
    def forward(ctx: Any, joint: JointTask, model: nn.Module, own: Share, *trained: Tensor) -> Tensor:
        """Return the mean loss of the whole batch, and store its gradients for backward."""
        joint.reduce_or_broadcast(flatten_tensors(trained), summed=False)
        total = joint.reduce_or_broadcast(loss_and_gradients(joint.task, model, own, trained), summed=True)
        ctx.gradients = [part.view_as(one).to(one) for part, one in zip(total[1:].split(sizes(trained)), trained, strict=True)]
        return total[0].to(next(model.parameters()).device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the stored gradients of the trained parameters, times `gradient`."""
        return (None, None, None, *(gradient * one for one in ctx.gradients))


def make_data_parallel_group(
    config: JobConfig, site: SiteConfig, data: DataList | None, folder: Path
) -> DataParallelGroup | None:
    """Return the other ranks of a site with several devices.

    Return None for one device, and for a pooled site, which has no `data`. Raises ConsiliumError for a job whose training
    cannot be split over devices.
    """
    if site.device_count < 2 or data is None:
        return None
    unit, who = config.dpsgd.unit if config.dpsgd else "", f"strategy {config.strategy.name!r}"
    for why, holds in {
        f"privacy.unit {unit} clips the gradient of every {unit}": bool(unit),
        f"{who} trains more beside the adapter": bool(config.strategy.traits.parts),
    }.items():
        if holds:
            what = f"{why}, which one device does; give one device"
            raise ConsiliumError(f"site.yaml: devices: {what} for this job", Reason.POLICY)
    for why, holds in {
        f"model.dtype {config.model.dtype!r} keeps layers in a form of its own": config.model.dtype in QUANTIZED,
        "training.compile makes one program of the model": config.training.compile,
        f"{who} looks at gradients before it trains": config.strategy.traits.probe_fraction > 0,
        "capacity is measured by steps": site.capacity.has_limits and config.strategy.traits.ranks_differ,
    }.items():
        if holds and site.base == "sharded":
            what = f"{why}, which takes the whole base at one device; use replicated"
            raise ConsiliumError(f"site.yaml: base: 'sharded': {what} for this job", Reason.POLICY)
    return DataParallelGroup(config, site, data, folder)
