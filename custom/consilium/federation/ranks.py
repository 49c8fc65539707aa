"""Several devices at one site: processes that each hold the model, take a share of every batch and add up the gradients.

Rank 0 is the site itself. It alone has the guard, the optimizer, the strategy and the site's files of the run; it alone speaks
to a server. The others are its children. They get shares of batches and the adapter's values from it, and all gradients meet
in an all-reduce (gloo, over 127.0.0.1). A loss is a mean over samples, so shares weighted by their samples make the gradient of
the whole batch, up to the order of float32 sums. That is PyTorch's DistributedDataParallel (Li et al., "PyTorch Distributed",
VLDB 2020) with the optimizer at one rank: for an adapter, sending its values costs what sending gradients back would.
"""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.errors import ConsiliumError, Reason
from consilium.federation.processes import Child, receive, send
from consilium.federation.rank import Begin, Phase, Share, flat, found_by, meet, named, reduced, sizes, work
from consilium.messages import Tensors
from consilium.seeding import seed_for
from consilium.storage import private_folder
from consilium.tasks.base import Batch, Task

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Ranks:
    """A site's other devices. They start with the first training, and after one of them has failed with the next."""

    def __init__(self, config: JobConfig, name: str, site: SiteConfig, folder: Path, root: Path | None) -> None:
        self.config, self.name, self.site, self.folder, self.root = config, name, site, folder, root
        self.children, self.place, self.count = list[Child](), folder, 0
        self._group: ProcessGroup | None = None

    def joined(self, task: Task, values: Tensors, trained: set[str], scaling: float) -> "JointTask":
        """Return the task whose loss, and its gradient, all devices compute together. Raises ConsiliumError."""
        try:
            if not self.children:
                self._start()
            for child in self.children:
                send(child.pipe, Phase(values, frozenset(trained), scaling))
        except (OSError, EOFError, RuntimeError) as error:
            raise self.failed(error) from None
        except BaseException:
            self.end()
            raise
        return JointTask(task, self, trained)

    def _start(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="ranks-", dir=private_folder(self.folder)))
        packages, settings = frozenset(self.config.packages), self.config.model_dump(mode="json")
        for rank, device in enumerate(self.site.devices[1:], start=1):
            self.children.append(child := Child(work, self.site.threads or torch.get_num_threads()))
            own = self.site.model_copy(update={"devices": (device,)})
            size = len(self.site.devices)
            send(child.pipe, Begin(settings, packages, self.name, own, self.folder, self.root, self.place, rank, size))
        for child in self.children:
            if said := receive(child.pipe):
                raise OSError(said)
        self._group = meet(self.place, 0, len(self.site.devices))

    def share(self, batch: Batch) -> Share:
        """Hand the other ranks their shares of a batch, and return one's own."""
        self.count += 1
        size, total, ranks = len(next(iter(batch.values()))), float(len(next(iter(batch.values())))), len(self.children) + 1
        ends = [size * (rank + 1) // ranks for rank in range(ranks)][::-1]  # rank 0 has samples if any other has
        begins = [*ends[1:], 0]
        shares = [
            Share(
                {key: value[begin:end] for key, value in batch.items()} if end > begin else {},
                (end - begin) / total,
                seed_for(torch.initial_seed(), "rank", self.count, rank),
            )
            for rank, (begin, end) in enumerate(zip(begins, ends, strict=True))
        ]
        for child, one in zip(self.children, shares[1:], strict=True):
            send(child.pipe, one._replace(batch={key: value.clone() for key, value in one.batch.items()}))
        return shares[0]

    @property
    def group(self) -> "ProcessGroup":
        """What the ranks meet in."""
        assert self._group is not None  # as `joined` has made it
        return self._group

    def failed(self, error: Exception) -> ConsiliumError:
        """End all ranks; return why, with what the one that failed first has said."""
        told = [_said(child) for child in self.children]
        self.end()
        for rank, why in enumerate(told, start=1):
            if why:
                return ConsiliumError(f"site.yaml: devices: rank {rank} on {self.site.devices[rank]}: {why}", Reason.TRAINING)
        return ConsiliumError(f"site.yaml: devices: {' '.join(str(error).split())[:200]}", Reason.TRAINING)

    def end(self) -> None:
        """End all other ranks."""
        for child in self.children:
            child.process.kill()
        for child in self.children:
            child.end()
        if self.children:
            shutil.rmtree(self.place, ignore_errors=True)
        self.children, self._group = [], None


def _said(child: Child) -> str:
    """Return why a rank failed, "" if it did not; the others wait for it, and say nothing."""
    with suppress(EOFError, OSError):
        while child.pipe.poll(1):
            if said := receive(child.pipe):
                return str(said)
    child.process.join(1)
    code = child.process.exitcode
    return "" if code is None else f"its process ended (exit code {code}); was there memory enough?"


def ranks_of(config: JobConfig, name: str, site: SiteConfig, folder: Path, root: Path | None) -> Ranks | None:
    """Return the other devices of a site that has several, None for one.

    Raises ConsiliumError for a job whose training is more than a batch's mean loss.
    """
    if len(site.devices) < 2:
        return None
    what = ""
    if config.privacy is not None and config.privacy.unit == "record":
        what = "privacy.unit record clips every record's gradient, which one device does"
    elif config.strategy.parts:
        what = f"strategy {config.strategy.name!r} trains more beside the adapter, which one device does"
    if what:
        raise ConsiliumError(f"site.yaml: devices: {what}; give one device for this job", Reason.POLICY)
    return Ranks(config, name, site, folder, root)


class JointTask:
    """A task whose training loss is that of the whole batch, each device having computed its share."""

    def __init__(self, task: Task, ranks: Ranks, trained: set[str]) -> None:
        self.task, self.ranks, self.trained = task, ranks, trained

    def __getattr__(self, name: str) -> Any:
        """Return what is the task's own."""
        return getattr(self.task, name)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the batch's mean loss; its gradients are there already, and backward hands them on. Raises ConsiliumError."""
        trained = named(model, self.trained)
        try:
            own = self.ranks.share(batch)
            found: Tensor = _Joint.apply(self, model, own, *trained)
        except (OSError, EOFError) as error:
            raise self.ranks.failed(error) from None
        except BaseException:
            self.ranks.end()
            raise
        return found

    def reduced(self, numbers: Tensor, found: bool) -> Tensor:
        """See rank.py. Raises OSError where a rank is gone."""
        try:
            return reduced(self.ranks.group, numbers, found)
        except RuntimeError as error:
            raise OSError(str(error)) from None


class _Joint(torch.autograd.Function):
    """Of the trained parameters, the loss that all ranks find together."""

    @staticmethod
    def forward(ctx: Any, joint: JointTask, model: nn.Module, own: Share, *trained: Tensor) -> Tensor:
        """Return the mean loss of the whole batch, and keep its gradients."""
        joint.reduced(flat(trained), found=False)
        total = joint.reduced(found_by(joint.task, model, own, trained), found=True)
        ctx.gradients = [part.view_as(one).to(one) for part, one in zip(total[1:].split(sizes(trained)), trained, strict=True)]
        return total[0].to(next(model.parameters()).device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of the trained parameters."""
        return (None, None, None, *(gradient * one for one in ctx.gradients))
