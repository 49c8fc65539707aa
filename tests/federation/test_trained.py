"""Parts of the base that train: against plain loops over whole parameters, resumed, exported, kept and counted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from consilium.adapters import adapter_state
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.seeding import seed_for
from consilium.core.storage import load_state
from consilium.data.datalist import read_datalist
from consilium.data.synthetic.phantoms import make_phantoms
from consilium.federation.job_assembly import Job, assemble_job, build_model, build_task
from consilium.models.unet.network import build_unet
from consilium.runtime.engine import simulate
from consilium.training.loop import prefetched_batches
from tests.conftest import small_config

UNET = {"name": "unet", "variant": "resunet", "image_size": 32, "width": 2}
SIZES = {"site-1": 4, "site-2": 2}
Values = dict[str, torch.Tensor]


def quiet(event: Mapping[str, Any]) -> None:
    """See nothing."""


def whole_job(strategy: dict[str, Any], **changed: Any) -> Job:
    """Return a job of SGD, whose steps are as large as the gradients: what is left out shows."""
    training = {"optimizer": "sgd", "lr": 0.05, "batch_size": 2, "rounds": 2}
    raw = small_config(strategy, **training).model_dump() | {"adapter": {"kind": "full"}, "model": UNET} | changed
    return assemble_job(JobConfig.model_validate(raw | {"data": {}}))


def sites(folder: Path, size: int) -> dict[str, SiteConfig]:
    """Return two sites of unequal size."""
    made = {n: make_phantoms(folder / n, "fundus", n, 1, count, 0, 0, size, 0.5, 0.5) for n, count in SIZES.items()}
    return {name: SiteConfig(datalist=path) for name, path in made.items()}


def changes(folder: Path) -> Values:
    return {n.removeprefix("shared/"): t for n, t in load_state(folder / "server/state.safetensors")[0].items()}


def local(job: Job, model: torch.nn.Module, start: Values, name: str, site: SiteConfig, round: int, mu: float) -> Values:
    """Return all that trains, as whole parameters, after one epoch of SGD on the loss plus mu / 2 |w - start|^2."""
    config, live = job.config, dict(model.named_parameters())
    assert site.datalist is not None
    task = build_task(config, read_datalist(site.datalist, False))
    seed = seed_for(config.training.seed, "train", round, 0, name)
    model.train()
    with torch.no_grad():
        for key, value in start.items():
            live[key].copy_(value)
    for batch in prefetched_batches(task, config.training, seed, config.training.steps_per_round(task.num_samples)):
        distance = sum((live[key] - value).square().sum() for key, value in start.items())
        loss = task.loss(model, batch) + mu / 2 * distance
        gradients = torch.autograd.grad(loss, [live[key] for key in start], allow_unused=True)
        with torch.no_grad():
            for key, gradient in zip(start, gradients, strict=True):
                live[key] -= config.training.lr * (0 if gradient is None else gradient)
    return {key: live[key].detach().clone() for key in start}


def plain_loop(job: Job, at: dict[str, SiteConfig], mu: float) -> Values:
    """Return what federated averaging of whole parameters by samples comes to, with no word of changes."""
    model = build_model(job.config, SiteConfig())
    adapter_state.load(model, job.initial)
    shared = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    for round in range(job.config.training.rounds):
        ends = {name: local(job, model, shared, name, site, round, mu) for name, site in at.items()}
        total = sum(SIZES.values())
        shared = {n: torch.stack([ends[s][n].double() * SIZES[s] / total for s in ends]).sum(0).float() for n in shared}
    return shared


SAM = {"name": "sam", "variant": "tiny", "image_size": 64}
CASES = {
    "FedProx-F": ({"name": "fedprox", "mu": 3.0}, {"kind": "full"}, UNET, 3.0),
    "FedFMS": ({"name": "fedit"}, {"kind": "bottleneck", "width": 2, "decoder": "share"}, SAM, 0.0),
    "FedProx on LoRA and decoder": (
        {"name": "fedprox", "mu": 3.0},
        {"kind": "lora", "rank": 2, "targets": "encoder-qkv", "decoder": "share"},
        SAM,
        3.0,
    ),
}


@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.slow] * (one == "FedFMS")) for one in CASES])
def test_averages_equal_a_plain_loop_over_whole_parameters(case: str, tmp_path: Path) -> None:
    strategy, adapter, base, mu = CASES[case]
    job, at = whole_job(strategy, adapter=adapter, model=base), sites(tmp_path / "data", base["image_size"])
    simulate(job, at, tmp_path / "run", quiet)
    model = build_model(job.config, SiteConfig())
    found, wanted = dict(model.named_parameters()), plain_loop(job, at, mu)
    adapter_state.load(model, job.initial)
    start = {name: parameter.detach().clone() for name, parameter in found.items()}
    adapter_state.load(model, changes(tmp_path / "run"))
    assert max(float((wanted[name] - start[name]).abs().max()) for name in wanted) > 1e-3
    for name, tensor in wanted.items():
        assert torch.allclose(found[name].detach(), tensor, atol=2e-6, rtol=1e-4), name


def test_a_run_that_breaks_resumes_to_the_bit(tmp_path: Path) -> None:
    job, at = whole_job({"name": "fedit"}), sites(tmp_path / "data", 32)

    def crash(event: Mapping[str, Any]) -> None:
        if event["event"] == "step" and event["round"] == 1 and event["site"] == "site-2":
            raise KeyboardInterrupt

    simulate(job, at, tmp_path / "whole", quiet)
    with pytest.raises(KeyboardInterrupt):
        simulate(job, at, tmp_path / "broken", crash)
    simulate(job, at, tmp_path / "broken", quiet, resume=True)
    one, other = changes(tmp_path / "whole"), changes(tmp_path / "broken")
    assert one.keys() == other.keys() == job.initial.keys()
    assert all(torch.equal(one[n], other[n]) for n in one)
    _check_exports(job, tmp_path / "whole")


def _check_exports(job: Job, run: Path) -> None:
    """A site's file is the model; the server, which has no base, writes changes, named so."""
    model, moved = build_unet("resunet", 2, 2, 0, None), changes(run)
    theirs, ours = (
        load_file(run / "sites/site-1/adapters/global/model.safetensors"),
        load_file(run / "adapters/global/model.safetensors"),
    )
    start = dict(model.named_parameters())
    assert theirs.keys() == start.keys()
    assert all(torch.equal(theirs[n], start[n].detach() + moved[f"whole.{n}"]) for n in theirs)
    assert all(torch.equal(ours[f"{n}.change"], moved[f"whole.{n}"]) for n in theirs)
    again = build_unet("resunet", 2, 2, 5, run / "sites/site-1/adapters/global/model.safetensors")
    assert all(torch.equal(p, theirs[n]) for n, p in again.named_parameters())
