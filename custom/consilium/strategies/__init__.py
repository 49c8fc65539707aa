"""Registry of algorithms: one file each; a new one adds its class here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from consilium.errors import ConfigError
from consilium.schema import describe, nearest
from consilium.strategies.centralized import Centralized
from consilium.strategies.deer import DEeR
from consilium.strategies.dp_dylora import DPDyLoRA
from consilium.strategies.fedhello import FedHeLLo
from consilium.strategies.fedhera import FedHera
from consilium.strategies.fedhl import FedHL
from consilium.strategies.fedhomolora import FedHomoLoRA
from consilium.strategies.fediat import FedIAT
from consilium.strategies.fedit import FedIT
from consilium.strategies.fedprox import FedProx
from consilium.strategies.fedsa_lora import FedSALoRA
from consilium.strategies.fedsca import FedSCA
from consilium.strategies.ffa_lora import FFALoRA
from consilium.strategies.flexlora import FlexLoRA
from consilium.strategies.flora import FLoRA
from consilium.strategies.hetlora import HetLoRA
from consilium.strategies.local_only import LocalOnly
from consilium.strategies.lora_fair import LoraFair
from consilium.strategies.strategy import Strategy

_EQUAL = (FedIT, FFALoRA, FedSALoRA, FedIAT, DEeR, DPDyLoRA, FedSCA, FedProx, LoraFair, LocalOnly, Centralized)
_UNEQUAL = (FedHera, FedHomoLoRA, FlexLoRA, FedHL, FLoRA, HetLoRA, FedHeLLo)
STRATEGIES: dict[str, type[Strategy]] = {cls.name: cls for cls in _EQUAL + _UNEQUAL}


def build_strategy(options: Mapping[str, Any], source: Path | str = "job.yaml") -> Strategy:
    """Return the strategy that a job's `strategy:` section describes. Raises ConfigError, naming `source` and field."""
    name = options.get("name")
    if not isinstance(name, str) or name not in STRATEGIES:
        known = f"expected one of {', '.join(sorted(STRATEGIES))}{nearest(name, STRATEGIES)}"
        raise ConfigError(f"{source}: strategy.name: {name!r}: {known}")
    cls = STRATEGIES[name]
    try:
        return TypeAdapter(cls).validate_python({k: v for k, v in options.items() if k != "name"})
    except ValidationError as error:
        raise ConfigError(describe(error, source, "strategy.", list(cls.__dataclass_fields__))) from None
