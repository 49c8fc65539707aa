"""A training step of a site that downloads more ranks than it trains, against one that does not: time and memory.

    python -m tests.benchmarks.client_step [--rank 8 --factors 1 4 8 --repeats 9]

A random Llama (hidden 1024, 4 layers, vocabulary 2048), q, k, v adapted, batches of 4 x 256 tokens, AdamW, one thread. Every
way has a model of its own with equal weights; they take turns, one step each, so that what else the machine does falls on all.
Time: medians of the processor's seconds, and of the ratios to the first way's step in the same turn. Memory: what lives between
steps, to the byte, and what a step adds at its peak, by the profiler.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from consilium.adapters import adapter_state, dual_rank
from consilium.adapters.kinds import DualRankConfig
from consilium.models.causal_lm import CAUSAL_LM
from consilium.models.causal_lm.network import build_causal_lm
from consilium.strategies.unequal_ranks import prefix_and_tail

SHAPE = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
}


@dataclass
class Way:
    """A model that trains `rank` of `total` ranks, its optimizer and the times of its steps in seconds."""

    rank: int
    total: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    times: list[float] = field(default_factory=list)

    def step(self, ids: Tensor) -> None:
        """Take one step on (N, T) tokens."""
        self.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def timed(self, ids: Tensor) -> None:
        """Take one step and keep its time."""
        began = time.process_time()
        self.step(ids)
        self.times.append(time.process_time() - began)

    def held(self) -> dict[str, int]:
        """Return bytes between steps: weights, adapter, gradients (while there are any) and optimizer."""
        tensors = adapter_state.tensors(self.model)
        trained = sum(_bytes(t) for t in tensors.values() if isinstance(t, nn.Parameter))
        own = {id(t) for t in tensors.values()}
        moments = sum(_bytes(v) for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor))
        weights = sum(_bytes(p) for p in self.model.parameters() if id(p) not in own)
        return {"weights": weights, "adapter": sum(map(_bytes, tensors.values())), "gradients": trained, "optimizer": moments}

    def peak(self, ids: Tensor) -> int:
        """Return the bytes that a step adds at its peak to what lives between steps."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
            self.step(ids)
        events = [e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]
        total = highest = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            total += event.nbytes()
            highest = max(highest, total)
        return highest


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def way(rank: int, total: int) -> Way:
    """Return a model that trains `rank` of `total` ranks of q, k and v."""
    torch.manual_seed(0)
    model = build_causal_lm("folder", None, SHAPE, weights=False)
    dual_rank.inject(model, DualRankConfig(kind="dual_rank", rank=rank, scaling=2.0, targets="qkv"), CAUSAL_LM)
    values: dict[str, Tensor] = {}
    for name in [n.removesuffix(".lora_A") for n in adapter_state.tensors(model) if n.endswith(".lora_A")]:
        product = (torch.randn(SHAPE["hidden_size"], total) / 1000, torch.randn(total, SHAPE["hidden_size"]) / 32)
        values |= prefix_and_tail(name, product, rank, 0.5)
    adapter_state.load(model, values)
    trained = [t for t in adapter_state.tensors(model).values() if isinstance(t, nn.Parameter)]
    return Way(rank, total, model.train(), torch.optim.AdamW(trained, lr=1e-4))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=8, help="ranks that train")
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 4, 8], help="downloaded over trained; 1 is coupled")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    ways = [way(wanted.rank, wanted.rank * factor) for factor in wanted.factors]
    ids = torch.randint(3, SHAPE["vocab_size"], (wanted.batch, wanted.length), generator=torch.Generator().manual_seed(0))
    for one in ways:
        one.step(ids)
    for _ in range(wanted.repeats):
        for one in ways:
            one.timed(ids)
    report(ways, ids)


def report(ways: list[Way], ids: Tensor) -> None:
    """Print a line per way, ratios to the first."""
    print("| ranks trained / downloaded | step, s | ratio | gradients + optimizer, bytes | adapter, bytes | peak, MB | ratio |")
    print("|---" * 7 + "|")
    lowest: float | None = None
    for one in ways:
        held = one.held()
        seconds, most = statistics.median(one.times), held["weights"] + held["adapter"] + held["optimizer"] + one.peak(ids)
        lowest = lowest or most
        ratio = statistics.median(mine / coupled for mine, coupled in zip(one.times, ways[0].times, strict=True))
        state = f"{held['gradients'] + held['optimizer']:,} | {held['adapter']:,}"
        cells = f"{seconds:.3f} | {ratio:.3f} | {state} | {most / 1e6:.1f} | {most / lowest:.3f}"
        print(f"| {one.rank} / {one.total} | {cells} |")


if __name__ == "__main__":
    main()
