"""The objects that a client's trainer, evaluator and model store share: job, model, task, data, folder and observer."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.adapters.names import LOCAL_ADAPTER
from consilium.client.data_parallel import DataParallelGroup
from consilium.config.job import JobConfig
from consilium.config.site import CapacityConfig
from consilium.core.messages import SKIPPED, Observer, Payload, Tensors
from consilium.core.seeding import seed_for
from consilium.data.check_samples import FileWatch
from consilium.data.datalist import DataList
from consilium.federation.saved_model import load_except_missing_blocks
from consilium.privacy.plan import Plan
from consilium.report.tracking import FOLDER, SiteEvents
from consilium.strategies.strategy import Strategy, scaling_multiplier
from consilium.tasks.base import Task


@dataclass
class ClientContext:
    """The shared objects of one client in one job. `folder` is its private folder for this job.

    Under a record- or patient-level `plan` training is DP-SGD; `noise_seed` makes its noise repeatable, and so not private.
    `limits`: the client's capacity, for algorithms with unequal ranks. `checkpoint`: the path of the base weights, None for
    weights of the package. `data`: the samples, for statistics and patients. `ranks`: the client's other devices. `watch`: the
    files that a round reads. `shares_scores`: whether model cards may show the client's scores. `backward`: computes the
    gradients of a loss. `before_saving`: called when a round's training has ended, before its result is stored.
    """

    name: str
    config: JobConfig
    strategy: Strategy
    model: nn.Module
    task: Task
    folder: Path
    observer: Observer
    plan: Plan | None = None
    noise_seed: int | None = None
    limits: CapacityConfig = field(default_factory=CapacityConfig)
    checkpoint: Path | None = None
    data: DataList | None = None
    ranks: DataParallelGroup | None = None
    watch: FileWatch | None = None
    shares_scores: bool = True
    should_stop: Callable[[], None] = lambda: None
    backward: Callable[[Tensor], None] = Tensor.backward
    before_saving: Callable[[], None] = lambda: None
    events: SiteEvents = field(init=False)

    def __post_init__(self) -> None:
        self.events = SiteEvents(self.folder / FOLDER, self.config.training.rounds, self.report_undrawn)

    def report_undrawn(self, reason: str) -> None:
        """Report a picture or a curve that could not be drawn."""
        self.observer({"event": "undrawn", "site": self.name, "reason": reason})

    def seed(self, what: str, payload: Payload, number: int = 0) -> int:
        """Return the seed for the purpose `what` in a phase. `number` counts several uses of the same purpose, from 0."""
        return seed_for(self.config.training.seed, what, payload.round, payload.phase, self.name, *[number] * bool(number))

    def load_values(self, values: Tensors) -> set[str]:
        """Load `values` into the model. Return the blocks that the model skips, because their tensors are not in `values`."""
        return load_except_missing_blocks(self.model, self.strategy, values, self.name)

    def load_payload(self, own: Tensors, payload: Payload) -> Tensors:
        """Combine a payload with the client's `own` tensors, load the result into the model, and return its tensors."""
        start = self.strategy.receive(own, payload)
        self.load_values(start)
        self.set_scaling(scaling_multiplier(self.strategy, payload))
        self.set_local_share(0.0)
        return start

    def values(self, names: Collection[str]) -> Tensors:
        """Return the current values of the adapter tensors `names`, in the model's order."""
        return {name: tensor for name, tensor in adapter_state.values(self.model).items() if name in names}

    def set_scaling(self, factor: float) -> None:
        """Multiply the adapter's part of the forward pass by `factor`, if the adapter's kind supports that."""
        if (scale := self.config.adapter_kind.scale) is not None:
            scale(self.model, self.config.adapter, factor)

    def set_local_share(self, share: float | Tensor, cut_global: bool = False) -> None:
        """Set the share of the local adapter in the forward pass, if the strategy has one; see `AdapterKind`."""
        mix = self.config.adapter_kind.mix
        if LOCAL_ADAPTER in self.strategy.traits.parts and mix is not None:
            mix(self.model, self.config.adapter, share, cut_global)

    def skipped_samples_metric(self) -> dict[str, float]:
        """Return the number of skipped samples as a metric, {} for 0 or for a task that skips none."""
        count = getattr(self.task, "skipped", 0)
        return {SKIPPED: float(count)} if count else {}
