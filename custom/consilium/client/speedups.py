"""What a site's model and task may do to be quicker, before the first round; results stay what they are."""

from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from torch import nn

from consilium.adapters import layers
from consilium.config.job import JobConfig
from consilium.core.storage import digest
from consilium.models.registry import MODELS
from consilium.tasks.base import Task
from consilium.training.compiled import require_compiler

_identities: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


@runtime_checkable
class Remembers(Protocol):
    """A task that can do without encoding a picture twice."""

    def remember(self, encoder: str) -> None:
        """Encode no picture twice from now on, by the frozen encoder of this name."""
        ...


def speed_up(config: JobConfig, model: nn.Module, task: Task) -> None:
    """See `remember`. Raises ConfigError where the job wants the model compiled and this machine cannot."""
    if config.training.compile:
        require_compiler(next(model.parameters()).device)
    remember(config, model, task)


def remember(config: JobConfig, model: nn.Module, task: Task) -> None:
    """Let the task encode no picture twice where nothing that trains has a say in a picture's embedding.

    Strategies with parts between encoder and head, or a second adapter, look at what passes there, so theirs always runs.
    """
    name = MODELS[config.model.name].encoder
    if not (name and hasattr(model, "embed") and isinstance(task, Remembers)) or config.strategy.traits.parts:
        return  # a SAM from a folder has no separate `embed`
    if not any(one.startswith(f"{name}.") or f".{name}." in one for one in layers.tensors(model)):
        task.remember(f"{_identity(model.get_submodule(name))} {config.model.model_dump_json()}")


def _identity(encoder: nn.Module) -> str:
    """Return the SHA-256 of an encoder's weights, taken once: they are frozen."""
    if encoder not in _identities:
        _identities[encoder] = digest({n: t.detach().cpu() for n, t in encoder.state_dict().items()})
    return _identities[encoder]
