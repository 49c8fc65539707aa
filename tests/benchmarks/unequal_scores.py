"""What a run of unequal.py measured: losses, bytes, the server's diagnostics, and drift against a full-rank oracle."""

import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from consilium.config.site import SiteConfig
from consilium.federation.build import Job, build_model, build_site
from consilium.federation.coordinator import Coordinator
from consilium.federation.site import Site
from consilium.messages import HELD_OUT, Payload
from consilium.seeding import seed_for
from consilium.strategies.strategy import SiteResult
from consilium.strategies.unequal.drift import cross_drift, moves, oracle_drift
from consilium.strategies.unequal.layers import shapes
from consilium.strategies.unequal.oracle import whole_update

FILES = {"training": "train.jsonl", "validation": "validation.jsonl"}
LAST = 3
"""Rounds that the held-out loss is the mean of."""


def closing(results: Mapping[str, Mapping[str, float]], counts: Mapping[str, int]) -> dict[str, float]:
    """Return the losses of the closing evaluation, mean over records: of the base, and of what each site received."""
    judged = {name: count for name, count in counts.items() if count and name in results}
    stages = {"pretrained": "pretrained", "received": "global"}
    return {
        name: sum(results[n][f"validation/{stage}/loss"] * c for n, c in judged.items()) / sum(judged.values())
        for name, stage in stages.items()
    }


def held_out(events: Sequence[dict], rounds: int) -> dict[str, float]:
    """Return the loss of sites that were not asked, before the round; mean over the last rounds."""
    name = "validation/global/loss"
    judged = [e for e in events if e["event"] == "held_out" and e["round"] >= rounds - LAST and name in e["metrics"]]
    return {"held-out": statistics.mean(e["metrics"][name] for e in judged)} if judged else {}


def costs(events: Sequence[dict]) -> dict[str, float]:
    """Return kilobytes a site and round, both ways."""
    results = [e["metrics"] for e in events if e["event"] == "result"]
    return {way: statistics.mean(m[f"comm/bytes_{way}"] for m in results) / 1000 for way in ("up", "down")}


def diagnostics(events: Sequence[dict]) -> dict[str, float]:
    """Return the server's diagnostics, mean over rounds (and layers); the energy retained counts from the second round."""
    names = {"drift/cross": "cross", "ranks/information_gain": "gain", "memory/saturation": "saturation"}
    found: dict[str, list[float]] = {}
    for event in events:
        for name, value in event["values"].items() if event["event"] == "diagnostics" else ():
            found.setdefault("energy" if name.startswith("retained") else names.get(name, name), []).append(value)
    return {name: statistics.mean(values) for name, values in found.items()}


# after the last round -------------------------------------------------------------------------------------------------


def after(job: Job, coordinator: Coordinator, sites: Mapping[str, SiteConfig], folder: Path) -> dict[str, float]:
    """Return the loss of the whole update on everybody's validation data, and five sites' drift against the oracle."""
    rows = {layer: job.initial[f"{layer}.lora_A"] for layer in shapes(job.initial)}
    model, state, whole = (
        build_model(job.config, next(iter(sites.values()))),
        coordinator.state,
        whole_update(job.strategy, coordinator.state, rows),
    )

    def site(name: str, where: SiteConfig) -> Site:
        return build_site(job, name, where, folder / "after" / name, lambda event: None, model)

    judge = site("everyone", everyone(sites, folder))
    loss = judge.evaluate("whole", Payload(state.round, HELD_OUT, whole)).metrics["validation/global/loss"]
    drifts = []
    for name in random.Random(seed_for(job.config.training.seed, "drift")).sample(sorted(sites), min(5, len(sites))):
        sent, one = job.strategy.broadcast(state, coordinator.sites[name]), site(name, sites[name])
        kinds = {"method": sent, "oracle": Payload(state.round, 0, whole)}
        own, best = (moves(SiteResult(one.train(kind, p), 1, p, coordinator.sites[name])) for kind, p in kinds.items())
        drifts.append((*oracle_drift(own, best), 1 - cross_drift([own, best])))
    absolute, relative, cosine = (statistics.mean(values) for values in zip(*drifts, strict=True))
    return {"global": loss, "absolute": absolute * job.config.adapter.product_scaling, "relative": relative, "cosine": cosine}


def everyone(sites: Mapping[str, SiteConfig], folder: Path) -> SiteConfig:
    """Return a site with all sites' validation data."""
    pooled = folder / "everyone"
    pooled.mkdir()
    first = next(iter(sites.values()))
    (pooled / FILES["training"]).write_text((first.datalist / FILES["training"]).read_text())
    text = "".join((s.datalist / FILES["validation"]).read_text() for s in sites.values())
    (pooled / FILES["validation"]).write_text(text)
    return first.model_copy(update={"datalist": pooled})
