"""What single measures make of a step, as ratios of the processor's seconds: medians of turns within one run, one thread.

    python -m tests.benchmarks.steps [--turns 9]

The tiny models that ship. Packing: 16 records of 8 to 128 tokens, most of them short. Embeddings: the tiny SAM at 128 pixels,
LoRA in the mask decoder, training without augmentation. Adam: 64 tensors of 8 x 768.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from consilium.adapters import adapter_state
from consilium.client.evaluator import enable_embedding_cache
from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig, TrainingConfig
from consilium.config.site import CacheConfig, SiteConfig
from consilium.federation.job_assembly import build_model, build_task
from consilium.tasks.language.losses import mean_loss
from consilium.training.loop import make_optimizer
from tests.conftest import small_config, small_text
from tests.tasks.test_packing import records

Step = Callable[[], object]


def ratio(new: Step, old: Step, turns: int) -> float:
    """Return the median over turns of one step's seconds over another's."""
    found = []
    for turn in range(turns + 1):
        seconds = []
        for step in (new, old):
            began = time.process_time()
            step()
            seconds.append(time.process_time() - began)
        found += [seconds[0] / seconds[1]] if turn else []
    return statistics.median(found)


def adam() -> tuple[Step, Step]:
    """Return a fused step and PyTorch's default one."""
    parameters = [nn.Parameter(torch.randn(8, 768)) for _ in range(64)]
    for parameter in parameters:
        parameter.grad = torch.randn(8, 768)
    fused, default = make_optimizer(parameters, TrainingConfig(rounds=1)), torch.optim.Adam(parameters, lr=1e-4)
    return fused.step, default.step


def packing() -> tuple[Step, Step]:
    """Return a step on packed and on padded records."""
    model = build_model(small_text("fedit"), SiteConfig()).train()
    batch = records([128, 96, 64, 40, 32, 24, 24, 16, 16, 16, 12, 12, 8, 8, 8, 8])
    return lambda: mean_loss(model, batch, True).backward(), lambda: mean_loss(model, batch).backward()


def embeddings(folder: Path) -> tuple[Step, Step]:
    """Return a step with embeddings from the disk, and one that encodes."""
    raw = small_config("fedit").model_dump()
    raw["model"]["image_size"], raw["task"]["augment"] = 128, False
    raw["adapter"] = {"rank": 4, "targets": r"mask_decoder\.transformer\..*\.(q_proj|v_proj)"}
    config, site = JobConfig.model_validate(raw), SiteConfig(cache=CacheConfig(folder=folder), workers=0)
    model = build_model(config, site).train()
    known, plain = (build_task(config, load_site_data(config, "site-1", site, folder), site) for _ in range(2))
    enable_embedding_cache(config, model, known)
    batch = plain.batch([0, 1, 2, 3], 0)
    assert all(tensor.requires_grad for tensor in adapter_state.tensors(model).values())
    return lambda: known.loss(model, batch).backward(), lambda: plain.loss(model, batch).backward()


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(f"fused Adam / default Adam, the optimizer's step alone: {ratio(*adam(), turns):.2f}")
        print(f"packed / padded, forward and back: {ratio(*packing(), turns):.2f}")
        print(f"embeddings kept / encoded, forward and back: {ratio(*embeddings(Path(folder)), turns):.2f}")


if __name__ == "__main__":
    main()
