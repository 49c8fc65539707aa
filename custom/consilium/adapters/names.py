"""What the names of adapter tensors say. Strategies know these names and no model's."""

from consilium.errors import ConfigError

HEAD = "head"
"""Module name of a classifier's head; no target set may adapt it."""
TAIL = ("tail_A", "tail_B")
GATE = "gate"


def factor(name: str) -> str | None:
    """Return "A" or "B" for a LoRA factor's tensor name, None for any other adapter tensor (a head, a bottleneck)."""
    return {"lora_A": "A", "lora_B": "B"}.get(name.rpartition(".")[2])


def lora_factor(name: str, strategy: str) -> str | None:
    """Return `factor(name)` for a strategy that is about LoRA. Raises ConfigError for another kind of adapter."""
    if ".adapter_" in name or (name.startswith("mask_decoder.") and factor(name) is None):
        raise ConfigError(f"strategy {strategy} cannot place adapter tensor {name!r}; use adapter kind lora")
    return factor(name)
