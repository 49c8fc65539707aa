"""Another rank of a site with several devices: a process that takes its share of every batch; ddp.py is the site's side."""

import logging
import traceback
from collections.abc import Sequence, Set
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from consilium.adapters import layers
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.child_process import exit_with_parent, receive, send
from consilium.core.errors import ConsiliumError
from consilium.core.messages import Tensors
from consilium.core.schema import validate
from consilium.data.datalist import DataList
from consilium.federation.job import build_model, build_task
from consilium.federation.saved_model import load_values
from consilium.report.private_logging import log_only_to
from consilium.tasks.base import Batch, Task
from consilium.training.device import autocast, pick_device
from consilium.training.sharding import hand_over, shard, world

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others: one that has died is known at once, one that computes is not."""
LOOPBACK = "127.0.0.1"
"""Where the ranks listen: nothing they exchange leaves the machine."""
LONGEST = 1000
"""Characters of a line: it may name a list and a file, whose paths are long."""


class Failed(NamedTuple):
    """Why a rank failed, for the site, which logs it as it logs its own errors (flare/job/private_log.py).

    `line`: the reason; `told`: what FLARE's logs say instead, see ConsiliumError; `trace`: an unexpected error's traceback.
    """

    line: str
    told: str = ""
    trace: str = ""


class RankSetup(NamedTuple):
    """What another rank makes its model and its task of; `place`: the folder where ranks meet.

    `data`: the training samples, which its site has looked at. It opens none of them: all it computes on comes in shares.
    """

    settings: dict[str, Any]
    packages: frozenset[str]
    site: SiteConfig
    data: DataList
    place: Path
    rank: int
    size: int


class Phase(NamedTuple):
    """The model as a phase's training starts from it: values as sites keep them, what trains, and the adapter's factor."""

    values: Tensors
    trained: frozenset[str]
    scaling: float


class ReadBase(NamedTuple):
    """Permission to read the base.

    With a sharded base the ranks read one after the other, so that a host holds one whole base at a time.
    """


class BlockRequest(NamedTuple):
    """The number of a block of a sharded base of which rank 0 needs all parts."""

    block: int


class Share(NamedTuple):
    """A rank's part of a batch, {} where there is none for it, its part of the whole, and the seed of its dropout."""

    batch: Batch
    weight: float
    seed: int


def loss_and_gradients(task: Task, model: nn.Module, share: Share, trained: Sequence[Tensor]) -> Tensor:
    """Return (1 + n,) float32 on the CPU: the share's weighted loss, then its gradient.

    The gradient is that with respect to the n trained numbers.
    """
    if not share.batch:
        return torch.zeros(1 + sum(sizes(trained)))
    with torch.enable_grad():
        loss = task.loss(model, share.batch) * share.weight
        gradients = torch.autograd.grad(loss, trained, allow_unused=True) if loss.requires_grad else [None] * len(trained)
    filled = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, trained, strict=True)]
    return torch.cat([loss.detach().float().cpu().view(1), flat(filled)])


def named(model: nn.Module, names: Set[str]) -> list[Tensor]:
    """Return the model's live adapter tensors of these names, in its own order."""
    return [one for name, one in layers.tensors(model).items() if name in names]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return all numbers in a row, (n,) float32 on the CPU."""
    return torch.cat([one.detach().float().cpu().reshape(-1) for one in tensors] or [torch.zeros(0)])


def sizes(tensors: Sequence[Tensor]) -> list[int]:
    """Return how many numbers each has."""
    return [one.numel() for one in tensors]


def as_failure(error: Exception) -> Failed:
    """Return an error as a rank reports it. The text of an unexpected error may name data: `told` is its type."""
    line = " ".join(str(error).split())[:LONGEST] or type(error).__name__
    if isinstance(error, ConsiliumError):
        return Failed(line, error.told)
    return Failed(line, type(error).__name__, "".join(traceback.format_exception(error)))


def store_of(place: Path, size: int) -> "Store":
    """Return the file in a folder by which the ranks find each other."""
    from torch.distributed import FileStore

    return FileStore(str(place / "store"), size)


def meet(store: "Store", rank: int, size: int, patience: timedelta = PATIENCE) -> "ProcessGroup":
    """Return the group of a site's ranks once all are there; torch's own would listen at the address of the machine's name."""
    from torch.distributed import PrefixStore, ProcessGroupGloo

    gloo: Any = ProcessGroupGloo  # whose stubs lack its options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    options._timeout = patience
    made: ProcessGroup = gloo(PrefixStore("site", store), rank, size, options)
    return made


def mesh_of(store: "Store", rank: int, size: int, site: SiteConfig) -> "DeviceMesh":
    """Return, once all ranks are there, what a sharded base is spread over; see sharding.py."""
    from torch.distributed import PrefixStore

    return world(PrefixStore("world", store), rank, size, pick_device(site.main_device), meet, PATIENCE)


def reduced(group: "ProcessGroup", numbers: Tensor, found: bool) -> Tensor:
    """Return rank 0's `numbers` at all ranks, or the sum over the ranks of what each has `found`. Raises RuntimeError."""
    (group.allreduce([numbers]) if found else group.broadcast(numbers, 0)).wait()
    return numbers


def work(pipe: connection.Connection) -> None:
    """Make model and task, then take shares of batches until there is no rank 0 any more."""
    exit_with_parent()
    log_only_to(logging.NullHandler())  # its site says the same, where such lines belong
    with suppress(EOFError, OSError):
        setup: RankSetup = receive(pipe)
        try:
            worker = _joined(pipe, setup)
            send(pipe, None)
        except Exception as error:
            send(pipe, as_failure(error))
            return
        worker.answer(pipe)


def _joined(pipe: connection.Connection, setup: RankSetup) -> "RankWorker":
    """Meet the others, read the base when it is this rank's turn, and keep its part of it where it is sharded."""
    site = setup.site
    config = validate(JobConfig, setup.settings, Path("job.yaml"), setup.packages)
    task = build_task(config, setup.data, site)
    send(pipe, None)
    store = store_of(setup.place, setup.size)
    group, mesh = meet(store, setup.rank, setup.size), None
    if site.base == "sharded":
        mesh = mesh_of(store, setup.rank, setup.size, site)
    receive(pipe)  # ReadBase
    model = build_model(config, site)
    return RankWorker(model, task, config, group, shard(model, mesh, pick_device(site.main_device)) if mesh else [])


class RankWorker:
    """What another rank has, and does."""

    def __init__(
        self, model: nn.Module, task: Task, config: JobConfig, group: "ProcessGroup", blocks: list["FSDPModule"]
    ) -> None:
        self.model, self.task, self.config, self.group, self.blocks = model, task, config, group, blocks
        self.trained = list[Tensor]()

    def answer(self, pipe: connection.Connection) -> None:
        """Do what rank 0 says, until there is none or this rank has failed."""
        while True:
            what: Phase | Share | BlockRequest = receive(pipe)
            try:
                if isinstance(what, Phase):
                    self.trained = _set(self.model, what, self.config)
                elif isinstance(what, BlockRequest):
                    hand_over(self.blocks[what.block])
                else:
                    _take(self.model, self.task, what, self.trained, self.config.training.precision, self.group)
            except Exception as error:
                send(pipe, as_failure(error))
                return


def _set(model: nn.Module, phase: Phase, config: JobConfig) -> list[Tensor]:
    """Bring the model to where a phase's training starts; return what trains."""
    load_values(model, config.strategy, phase.values, "a rank")
    for name, one in layers.tensors(model).items():
        if one.is_leaf:  # a frozen tail is a view
            one.requires_grad_(name in phase.trained)
    if (scale := config.adapter_kind.scale) is not None:
        scale(model, config.adapter, phase.scaling)
    model.train()
    return named(model, phase.trained)


def _take(model: nn.Module, task: Task, share: Share, trained: list[Tensor], precision: str, group: "ProcessGroup") -> None:
    _write(trained, reduced(group, flat(trained), found=False))
    torch.manual_seed(share.seed)
    with autocast(next(model.parameters()).device, precision):
        found = loss_and_gradients(task, model, share, trained)
    reduced(group, found, found=True)


@torch.no_grad()
def _write(trained: list[Tensor], values: Tensor) -> None:
    for one, part in zip(trained, values.split(sizes(trained)), strict=True):
        one.copy_(part.view_as(one))
