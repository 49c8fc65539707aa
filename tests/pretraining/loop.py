"""What the three pre-trainings share: the loop, and the options of their commands."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def fit(model: M, loss_at: Callable[[int], Tensor], steps: int, lr: float, average: bool) -> M:
    """Train `model` by AdamW on `loss_at(step)`, the learning rate rising and falling once; print a line every 50 steps.

    Return it, or with `average` the moving average of its weights.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    kept = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.995))
    began = time.monotonic()
    for step in range(steps):
        loss = loss_at(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if average:
            kept.update_parameters(model)
        if step % 50 == 49:
            print(f"step {step + 1}/{steps}  loss {loss.item():.3f}  {time.monotonic() - began:.0f} s", flush=True)
    return cast(M, kept.module) if average else model


def options(about: str | None, output: Path, steps: int, batch: int, lr: float) -> argparse.Namespace:
    """Return what the command line says: steps, batch, lr, seed and output, with these defaults."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=output)
    return parser.parse_args()
