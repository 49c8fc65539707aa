"""An adapter as files for others: LoRA as a PEFT folder, which plain PEFT loads onto the base model; bottlenecks their own."""

from pathlib import Path

from consilium.adapters import bottleneck, dual_rank, lora
from consilium.config.job import JobConfig
from consilium.messages import Tensors


def export(folder: Path, params: Tensors, config: JobConfig) -> None:
    """Write a whole adapter of a job into `folder`."""
    wanted, base = config.adapter, f"{config.model.name}-{config.model.variant}"
    if wanted.kind == "bottleneck":
        bottleneck.save(folder, params, base)
    elif wanted.kind == "dual_rank":
        dual_rank.save_peft(folder, params, wanted.scaling, base)
    else:
        lora.save_peft(folder, params, wanted.rank, wanted.alpha, wanted.targets, base)
