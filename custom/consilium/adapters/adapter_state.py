"""The tensors of an adapter of any kind in a model: their names, initial values, reading and writing.

names.py explains the names. Parameters of the base that train too (a mask decoder, or all of them) start at the base's values.
In the model they are parameters; sites and server store and send their changes from the base.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from consilium.adapters.names import HEAD, LOCAL, factor, is_base
from consilium.core.errors import CheckpointError, ConfigError
from consilium.core.seeding import seed_for

LARGEST = 2**29
"""The most numbers in an adapter, 2 GiB. Server and sites hold several sets of that size, and a round transmits one."""
_LOCATIONS, _LEFT_OUT = "adapter_locations", "adapter_left_out"
"""Attributes of a model: its cached `Locations`, and the names of the modules that `leave_out` left out last."""

Found = TypeVar("Found")


def check_size(numbers: int) -> None:
    """Raise ConfigError if an adapter has more than LARGEST `numbers`. It is called before memory is allocated."""
    if numbers > LARGEST:
        raise ConfigError(
            f"adapter: {numbers:,} numbers to train, over {LARGEST:,}; lower rank or width, narrow targets, or use kind lora"
        )


@dataclass(frozen=True)
class Adapted:
    """The record of a model's adapter: the names of all trained tensors, and the original values of trained base parameters."""

    names: Set[str]
    base: dict[str, Tensor]


class Locations(NamedTuple):
    """A cache of where an adapter is in its model.

    `parameters`: (tensor name, module, attribute name). `modules`: (name, AdapterModule). `of_class`: modules by class, for the
    classes that were asked for. Walking a model for them takes longer than a small model's forward pass, and a site asks a
    dozen times per round.
    """

    parameters: list[tuple[str, nn.Module, str]]
    modules: list[tuple[str, "AdapterModule"]]
    of_class: dict[type, list[Any]]


class AdapterModule(nn.Module):
    """Base class of modules that an adapter adds to a model. With all of them disabled the model equals its base."""

    enabled: bool = True

    def frozen_tensors(self) -> dict[str, Tensor]:
        """Return the module's adapter tensors that are not parameters, by their names in the module."""
        return {}

    def allocate_tensors(self, values: Mapping[str, Tensor]) -> None:
        """Allocate tensors for this module's `values`, if its shapes may change. The caller then writes the numbers."""


def freeze_base(model: nn.Module, trained: Iterable[str], base: Iterable[str] = ()) -> None:
    """Freeze `model` except its head, the adapter's parameters `trained` and the base's parameters `base`.

    `trained`: names as in PEFT or in names.py. `base`: names as in names.py, with the prefix `base.` or `whole.`.
    """
    own, of_base = {_short(n) for n in trained} | set(_head(model)), {_base_parameter_name(n): n for n in base}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_short(name) in own or name in of_base)
    kept = {of_base[n]: p.detach().clone() for n, p in model.named_parameters() if n in of_base}
    _store_adapted(model, Adapted(own | kept.keys(), kept))


def add_names(model: nn.Module, names: Iterable[str]) -> None:
    """Add parameters of the model, by name, to its adapter."""
    found = _adapted_record(model)
    _store_adapted(model, Adapted(found.names | set(names), found.base))


def _store_adapted(model: nn.Module, adapted: Adapted) -> None:
    object.__setattr__(model, "adapter", adapted)
    vars(model).pop(_LOCATIONS, None)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's live adapter tensors by name: trained parameters, and buffers such as a dual-rank tail.

    For trained parameters of the base these are the parameters, as an optimizer needs them, not their changes.
    """
    locations = _locations(model)
    found: dict[str, Tensor] = {name: getattr(module, own) for name, module, own in locations.parameters}
    for name, part in locations.modules:
        found |= {f"{name}.{own}": tensor for own, tensor in part.frozen_tensors().items()}
    return found


def _adapted_record(model: nn.Module) -> Adapted:
    """Return the record that `freeze_base` stored. Raises ConfigError without one."""
    found = vars(model).get("adapter")
    if not isinstance(found, Adapted):
        raise ConfigError(f"{type(model).__name__}: has no adapter; inject one first")
    return found


def _locations(model: nn.Module) -> Locations:
    """Return the cached locations of the adapter. The cache is renewed after names are added or a module is replaced."""
    adapted, found = _adapted_record(model), vars(model).get(_LOCATIONS)
    if not isinstance(found, Locations):
        of_base, seen, found = {_base_parameter_name(n): n for n in adapted.base}, set[nn.Parameter](), Locations([], [], {})
        for name, module in model.named_modules():
            if isinstance(module, AdapterModule):
                found.modules.append((name, module))
            for own, parameter in module.named_parameters(name, recurse=False):
                called = of_base.get(own, _short(own))
                if called in adapted.names and parameter not in seen:
                    found.parameters.append((called, module, own.rpartition(".")[2]))
                seen.add(parameter)
        object.__setattr__(model, _LOCATIONS, found)
    return found


def modules_of(model: nn.Module, kind: type[Found]) -> list[Found]:
    """Return the model's modules of a class."""
    known = _locations(model).of_class
    if kind not in known:
        known[kind] = [module for module in model.modules() if isinstance(module, kind)]
    return cast(list[Found], known[kind])


def adapter_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold adapter tensors. An AdapterModule stands for all modules inside it."""
    locations = _locations(model)
    whole = [part for _, part in locations.modules]
    inside = {inner for part in whole for inner in part.modules()}
    return list(dict.fromkeys([*whole, *(module for _, module, _ in locations.parameters if module not in inside)]))


def forward_settings(model: nn.Module) -> tuple[object, ...]:
    """Return the settings that change a forward pass beside tensors: disabled layers, scalings, modules left out."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    of_layers = [(one.disable_adapters, *getattr(one, "scaling", {}).values()) for one in modules_of(model, BaseTunerLayer)]
    return vars(model).get(_LEFT_OUT), *of_layers


def original_base_values(model: nn.Module) -> list[Tensor]:
    """Return the original values of the base's trained parameters."""
    return list(_adapted_record(model).base.values())


def values(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the adapter's tensors on the CPU, as sites store and send them.

    For trained parameters of the base these are their changes from the base.
    """
    held, base = {name: tensor.detach().cpu() for name, tensor in tensors(model).items()}, _adapted_record(model).base
    return {name: tensor - base[name].cpu() if name in base else tensor.clone() for name, tensor in held.items()}


def initial_base_changes(model: nn.Module) -> dict[str, Tensor]:
    """Return zeros, the changes of the base's trained parameters before training, by name."""
    return {name: torch.zeros_like(tensor, device="cpu") for name, tensor in _adapted_record(model).base.items()}


def base_plus_changes(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values of the base's trained parameters: the base plus the changes in `values`.

    The result's names are those of the base's own parameters. Other tensors in `values` are ignored.
    """
    base = _adapted_record(model).base
    return {_base_parameter_name(name): base[name].cpu() + change.cpu() for name, change in values.items() if name in base}


def load(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy `values` into the model's adapter; for base parameters they are changes.

    Raises CheckpointError unless names and shapes are exactly the model's.
    """
    by_module: dict[str, dict[str, Tensor]] = {}
    for name, tensor in values.items():
        module, _, own = name.rpartition(".")
        by_module.setdefault(module, {})[own] = tensor
    for own, part in _locations(model).modules:
        part.allocate_tensors(by_module.get(own, {}))
    live = tensors(model)
    if wrong := sorted(live.keys() ^ values.keys()):
        raise CheckpointError(f"adapter tensor {wrong[0]!r} is not in both model and state; same job.yaml for both?")
    for name, parameter in live.items():
        if parameter.shape != values[name].shape:
            shapes = f"{tuple(values[name].shape)}, the model needs {tuple(parameter.shape)}"
            raise CheckpointError(f"adapter tensor {name!r} has shape {shapes}; same adapter section for both?")
    overwrite(model, values)


def overwrite(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy `values` into the adapter tensors of the same names and leave all others; for base parameters they are changes."""
    base = _adapted_record(model).base
    _write(tensors(model), {n: base[n].cpu() + value.cpu() if n in base else value for n, value in values.items()})


def head_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the head's parameters; {} without a head."""
    return {name: tuple(parameter.shape) for name, parameter in _head(model).items()}


def initial_tensor(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the initial value of an adapter tensor.

    LoRA's A and a bottleneck's down-projection are Kaiming-uniform (a = sqrt 5), each drawn with its own seed. All other
    tensors are 0, so the adapter changes nothing at the start.
    """
    if is_base(name) or (factor(name) != "A" and not name.endswith((".local_A", ".down.weight"))):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(seed_for(seed, "adapter", name))
    bound = shape[1] ** -0.5  # Kaiming-uniform with a = sqrt 5 is uniform within 1 / sqrt(fan_in)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule `name` of `model` by `module`."""
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)
    vars(model).pop(_LOCATIONS, None)
    vars(model).pop(_LEFT_OUT, None)


def shared_weight(model: nn.Module, adapted: Iterable[str]) -> tuple[str, str] | None:
    """Return the first of the `adapted` layers that shares a parameter with another module, and that module; else None."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(name)
    shared = [names for names in holders.values() if len(names) > 1]
    for layer in dict.fromkeys(adapted):
        for names in shared:
            others = [name for name in names if name != layer and not name.startswith(f"{layer}.")]
            if others and len(others) < len(names):
                return layer, others[0]
    return None


def leave_out(model: nn.Module, blocks: Set[str]) -> None:
    """Make the modules named in `blocks` return their input, and all other modules run as usual."""
    if vars(model).get(_LEFT_OUT) == blocks:
        return  # true in nearly every round; walking the model takes longer than a small model's step
    for name, module in model.named_modules():
        if name in blocks:
            vars(module)["forward"] = _return_input
        elif vars(module).get("forward") is _return_input:
            del vars(module)["forward"]
    object.__setattr__(model, _LEFT_OUT, frozenset(blocks))


def left_out_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that `leave_out` made return their input."""
    return [name for name, module in model.named_modules() if vars(module).get("forward") is _return_input]


def _return_input(hidden: Tensor, *args: object, **options: object) -> Tensor:
    return hidden


@contextmanager
def disable_adapter(model: nn.Module) -> Iterator[None]:
    """Within the context, run the frozen base without its adapter. A head is 0 there, so every class is equally likely.

    Afterwards the adapter, `requires_grad` and layers that an outer context has disabled are as before.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    replaced = {n: torch.zeros_like(p) for n, p in _head(model).items()} | _adapted_record(model).base
    live = tensors(model)
    kept = {name: live[name].detach().clone() for name in replaced}
    with ExitStack() as stack:
        for parameter in model.parameters():  # PEFT sets requires_grad on all factors when it enables a layer again
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
        for module in model.modules():
            if isinstance(module, BaseTunerLayer) and not module.disable_adapters:
                module.enable_adapters(False)
                stack.callback(module.enable_adapters, True)
            elif isinstance(module, AdapterModule) and module.enabled:
                module.enabled = False
                stack.callback(setattr, module, "enabled", True)
        _write(live, replaced)
        stack.callback(_write, live, kept)
        yield


def _write(live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            live[name].copy_(value)


def _base_parameter_name(name: str) -> str:
    """Return the base's own name of the parameter that has the adapter tensor name `name`."""
    return name.partition(".")[2]


def _short(name: str) -> str:
    for own, local in LOCAL.items():
        name = name.replace(f".{own}.local.weight", f".{local}")
    return name.replace(".default.weight", "")


def _head(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if name.startswith(f"{HEAD}.")}
