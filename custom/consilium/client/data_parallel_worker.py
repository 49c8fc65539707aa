"""The other ranks of a site with several devices: child processes that compute on their share of every batch.

data_parallel.py is the side of rank 0. The messages between both sides are defined here.
"""

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

from consilium.adapters import adapter_state
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.child_process import exit_with_parent, receive, send_by_value
from consilium.core.errors import ConsiliumError, Reason
from consilium.core.messages import Tensors
from consilium.core.schema import validate
from consilium.data.datalist import DataList
from consilium.federation.job_assembly import build_model, build_task
from consilium.federation.saved_model import load_except_missing_blocks
from consilium.report.private_logging import route_data_logs
from consilium.tasks.base import Batch, Task
from consilium.training.device import autocast, pick_device
from consilium.training.sharding import join_block_gather, make_device_mesh, shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others. A rank that has died is detected at once, but a slow computation may take long."""
LOOPBACK = "127.0.0.1"
"""The address at which the ranks listen, so that their data never leave the machine."""
LONGEST = 1000
"""The largest number of characters of a failure's line. It may name a list and a file with long paths."""


class RankSetup(NamedTuple):
    """The settings from which another rank builds its model and task.

    `settings`: of the job; `packages`: of its plug-ins; `data`: the training samples, already checked by rank 0. The rank opens
    no sample: its data arrive as shares of batches. `place`: the folder of the file through which ranks find each other.
    """

    settings: dict[str, Any]
    packages: frozenset[str]
    site: SiteConfig
    data: DataList
    place: Path
    rank: int
    size: int


class Phase(NamedTuple):
    """The start of a phase's training: the adapter's `values`, the names of the `trained` tensors, the adapter's scaling."""

    values: Tensors
    trained: frozenset[str]
    scaling: float


class BlockRequest(NamedTuple):
    """A request from rank 0 for all parts of one block of a sharded base, by the block's number."""

    block: int


class Share(NamedTuple):
    """A rank's share of a batch: its samples ({} for none), `weight` (its fraction of the batch), and the seed of dropout."""

    batch: Batch
    weight: float
    seed: int


def loss_and_gradients(task: Task, model: nn.Module, share: Share, trained: Sequence[Tensor]) -> Tensor:
    """Return (1 + n,) float32 on the CPU: the share's weighted loss, then its gradient for the n trained numbers."""
    if not share.batch:
        return torch.zeros(1 + sum(sizes(trained)))
    with torch.enable_grad():
        loss = task.loss(model, share.batch) * share.weight
        gradients = torch.autograd.grad(loss, trained, allow_unused=True) if loss.requires_grad else [None] * len(trained)
    filled = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, trained, strict=True)]
    return torch.cat([loss.detach().float().cpu().view(1), flatten_tensors(filled)])


def select_tensors(model: nn.Module, names: Set[str]) -> list[Tensor]:
    """Return the model's adapter tensors with these names, not copied, in the model's order."""
    return [one for name, one in adapter_state.tensors(model).items() if name in names]


def flatten_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return all numbers of the tensors as one vector, (n,) float32 on the CPU."""
    return torch.cat([one.detach().float().cpu().reshape(-1) for one in tensors] or [torch.zeros(0)])


def sizes(tensors: Sequence[Tensor]) -> list[int]:
    """Return the number of elements of each tensor."""
    return [one.numel() for one in tensors]


def as_failure(error: Exception) -> ConsiliumError:
    """Return the failure of a rank for rank 0, which logs it like its own errors (flare/job/private_log.py).

    Of an unexpected error FLARE logs only the type, because its text may name data. Its traceback is a note.
    """
    line = " ".join(str(error).split())[:LONGEST] or type(error).__name__
    if isinstance(error, ConsiliumError):
        return ConsiliumError(line, Reason.TRAINING, error.told)
    found = ConsiliumError(line, Reason.TRAINING, type(error).__name__)
    found.add_note("".join(traceback.format_exception(error)))
    return found


def rendezvous_store(place: Path, size: int) -> "Store":
    """Return the store through which the ranks find each other: a file in the folder `place`."""
    from torch.distributed import FileStore

    return FileStore(str(place / "store"), size)


def join_process_group(store: "Store", rank: int, size: int, patience: timedelta = PATIENCE) -> "ProcessGroup":
    """Wait for all ranks of a site and return their process group.

    It listens on LOOPBACK. torch's own setup would listen at the address of the machine's host name.
    """
    from torch.distributed import PrefixStore, ProcessGroupGloo

    gloo: Any = ProcessGroupGloo  # its type stubs lack the options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    options._timeout = patience
    made: ProcessGroup = gloo(PrefixStore("site", store), rank, size, options)
    return made


def join_device_mesh(store: "Store", rank: int, size: int, site: SiteConfig) -> "DeviceMesh":
    """Wait for all ranks and return the device mesh over which a sharded base is distributed; see sharding.py."""
    from torch.distributed import PrefixStore

    return make_device_mesh(
        PrefixStore("world", store), rank, size, pick_device(site.main_device), join_process_group, PATIENCE
    )


def sum_or_broadcast(group: "ProcessGroup", numbers: Tensor, summed: bool) -> Tensor:
    """Return, at every rank, the sum of all ranks' `numbers` if `summed`, otherwise the `numbers` of rank 0.

    Raises RuntimeError if a rank has ended.
    """
    (group.allreduce([numbers]) if summed else group.broadcast(numbers, 0)).wait()
    return numbers


def run_rank(pipe: connection.Connection) -> None:
    """Run a rank: build model and task, then process messages until rank 0 has ended. The main function of a child process."""
    exit_with_parent()
    route_data_logs(logging.NullHandler())  # rank 0 logs the same lines
    with suppress(EOFError, OSError):
        setup: RankSetup = receive(pipe)
        try:
            site = setup.site
            config = validate(JobConfig, setup.settings, Path("job.yaml"), setup.packages)
            task = build_task(config, setup.data, site)
            send_by_value(pipe, None)
            store = rendezvous_store(setup.place, setup.size)
            group, mesh = join_process_group(store, setup.rank, setup.size), None
            if site.base == "sharded":
                mesh = join_device_mesh(store, setup.rank, setup.size, site)
            receive(pipe)  # None: with a sharded base one rank reads after the other, so the machine holds one base at a time
            model = build_model(config, site)
            blocks = shard(model, mesh, pick_device(site.main_device)) if mesh else []
            send_by_value(pipe, None)
        except Exception as error:
            send_by_value(pipe, as_failure(error))
            return
        process_messages(pipe, model, task, config, group, blocks)


def process_messages(
    pipe: connection.Connection,
    model: nn.Module,
    task: Task,
    config: JobConfig,
    group: "ProcessGroup",
    blocks: list["FSDPModule"],
) -> None:
    """Process messages from rank 0 until this rank fails. Raises EOFError or OSError if rank 0 has ended."""
    trained = list[Tensor]()
    while True:
        what: Phase | Share | BlockRequest = receive(pipe)
        try:
            match what:
                case Phase():
                    trained = _load_phase(model, what, config)
                case BlockRequest():
                    join_block_gather(blocks[what.block])
                case Share():
                    _compute_share(model, task, what, trained, config.training.precision, group)
        except Exception as error:
            send_by_value(pipe, as_failure(error))
            return


def _load_phase(model: nn.Module, phase: Phase, config: JobConfig) -> list[Tensor]:
    """Load the start of a phase's training into the model; return the tensors that train."""
    load_except_missing_blocks(model, config.strategy, phase.values, "a rank")
    for name, one in adapter_state.tensors(model).items():
        if one.is_leaf:  # frozen ranks are views of a buffer
            one.requires_grad_(name in phase.trained)
    if (scale := config.adapter_kind.scale) is not None:
        scale(model, config.adapter, phase.scaling)
    model.train()
    return select_tensors(model, phase.trained)


def _compute_share(
    model: nn.Module, task: Task, share: Share, trained: list[Tensor], precision: str, group: "ProcessGroup"
) -> None:
    values = sum_or_broadcast(group, flatten_tensors(trained), summed=False)
    with torch.no_grad():
        for one, part in zip(trained, values.split(sizes(trained)), strict=True):
            one.copy_(part.view_as(one))
    torch.manual_seed(share.seed)
    with autocast(next(model.parameters()).device, precision):
        found = loss_and_gradients(task, model, share, trained)
    sum_or_broadcast(group, found, summed=True)
