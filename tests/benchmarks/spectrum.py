"""How much of an update's energy lies in its first ranks, in the finished cells of a study of language models:

    python -m tests.benchmarks.spectrum runs/studies/methods_medquad

Energy is the sum of squared singular values. FedHera's premise is that the first two ranks hold under half of it. There is one
row per seed and update: the mean of the sites' own updates and each site's (local only), FedIT's global adapter, and FedHera's
W_g. Each share is the mean over the adapted layers; the first 2 ranks also have the lowest and the highest layer.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from consilium.config.job import load_run_job
from consilium.core.low_rank_sums import Update, spectra
from consilium.core.storage import load_state
from consilium.study.records import stored_record

RANKS = (1, 2, 4, 8)
A, B = ".lora_A.weight", ".lora_B.weight"


def sum_of(adapters: Sequence[Path]) -> dict[str, Update]:
    """Return the sum of the updates B A in PEFT folders by layer. All have one rank and one scaling, which shares cancel."""
    tensors = [load_file(folder / "adapter_model.safetensors") for folder in adapters]
    layers = sorted(name.removesuffix(A) for name in tensors[0] if name.endswith(A))
    return {
        layer: Update(torch.cat([one[layer + B] for one in tensors], 1), torch.cat([one[layer + A] for one in tensors]))
        for layer in layers
    }


def global_update(folder: Path) -> dict[str, Update]:
    """Return FedHera's W_g by layer, from the server's state."""
    state, found = load_state(folder / "server" / "state.safetensors")[0], dict[str, Update]()
    for name, tensor in state.items():
        layer, _, part = name.rpartition(".")
        if part == "dense":
            found[layer] = Update(tensor[:, :0], tensor[:0], tensor)
        elif part == "left":
            found[layer] = Update(tensor, state[f"{layer}.right"])
    return found


def shares(updates: Mapping[str, Update]) -> list[tuple[float, float, float]]:
    """Return for each of RANKS the share of the energy in the first ranks: mean, lowest and highest of the layers."""
    found = [one.values.square().cumsum(0) / one.energy for one in spectra(updates, max(RANKS)).values()]
    layers = torch.stack(found)[:, [rank - 1 for rank in RANKS]]
    return list(zip(layers.mean(0).tolist(), layers.amin(0).tolist(), layers.amax(0).tolist(), strict=True))


def updates_of(folder: Path) -> Iterator[tuple[str, dict[str, Update]]]:
    """Yield name and update by layer of what a finished cell trained; nothing for other strategies and private jobs."""
    config = load_run_job(folder, None)
    strategy = config.strategy.name if config.privacy is None else ""  # updates with noise are another matter
    if strategy == "local_only":
        sites = sorted(folder.glob("sites/*/adapters/personalized"))
        yield "mean of the sites' own updates", sum_of(sites)
        yield from ((f"{site.parents[1].name} alone", sum_of([site])) for site in sites)
    elif strategy == "fedit":
        yield "FedIT's global adapter", sum_of([folder / "adapters/global"])
    elif strategy == "fedhera":
        yield "FedHera's W_g", global_update(folder)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workspace", type=Path, help="the study's workspace")
    folders = sorted(parser.parse_args().workspace.glob("cells/*/"))
    done = [(stored_record(folder), folder) for folder in folders]
    print("| update | seed | first rank | first 2 ranks | first 4 ranks | first 8 ranks |\n|---|--:|--:|--:|--:|--:|")
    for record, folder in sorted(((r, f) for r, f in done if r.state == "done"), key=lambda one: one[0].place):
        for name, updates in updates_of(folder):
            (one, *_), (two, low, high), (four, *_), (eight, *_) = shares(updates)
            cells = f"{one:.2f} | {two:.2f} ({low:.2f} to {high:.2f}) | {four:.2f} | {eight:.2f}"
            print(f"| {name} | {record.labels['seed']} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
