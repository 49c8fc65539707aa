"""FRLoRA against a server that writes every round into dense weights (numpy, float64), and on a real model."""

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file

from consilium.adapters import adapter_state
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.federation.job_assembly import assemble_job, build_model
from consilium.models.sam.network import build_sam
from consilium.runtime.engine import simulate
from consilium.server.aggregation import RoundAggregate
from consilium.server.run_start import server_start
from consilium.strategies.frlora import FRLoRA, principal_factors
from consilium.strategies.strategy import ServerState
from tests.conftest import small_config
from tests.strategies.scripted import update_of

LAYER, OUT, INTO, RANK, SCALE = "model.layers.0.q_proj", 12, 10, 2, 0.5
A, B = f"{LAYER}.lora_A", f"{LAYER}.lora_B"
ROUNDS = [{"a": 1, "b": 3}, {"a": 1}, {"a": 1, "b": 3, "late": 2}, {"b": 3, "late": 2}]
"""Who answers, with what weight: b misses a round, late comes late."""


def weights() -> Tensors:
    return {LAYER: torch.randn(OUT, INTO, generator=torch.Generator().manual_seed(0))}


def begin() -> tuple[FRLoRA, ServerState]:
    strategy = FRLoRA()
    plain = {A: torch.randn(RANK, INTO), B: torch.zeros(OUT, RANK), "head.weight": torch.zeros(3, 4)}
    return strategy, strategy.initialize(strategy.start(plain, weights(), SCALE))


def forward(tensors: Tensors) -> np.ndarray:
    """Return the layer's whole weights at a site: base plus what its adapter adds."""
    found = weights()[LAYER].double() + SCALE * (tensors[B].double() @ tensors[A].double())
    return (found + SCALE * (tensors[f"{LAYER}.tail_B"].double() @ tensors[f"{LAYER}.tail_A"].double())).numpy()


def trained(start: Tensors, round: int, site: str) -> Tensors:
    generator = torch.Generator().manual_seed(100 * round + ord(site[0]))
    moved = {
        n: t + 0.2 * torch.randn(t.shape, generator=generator) for n, t in start.items() if "tail" not in n and "gate" not in n
    }
    return start | moved


def test_the_start_is_the_best_approximation_and_the_model_is_its_base() -> None:
    b, a = principal_factors(weights()[LAYER], RANK, SCALE)
    u, s, vt = np.linalg.svd(weights()[LAYER].double().numpy())
    np.testing.assert_allclose(SCALE * (b @ a).numpy(), (u[:, :RANK] * s[:RANK]) @ vt[:RANK], atol=1e-5)
    np.testing.assert_allclose((b.T @ b).numpy(), (a @ a.T).numpy(), atol=1e-4)  # half the values in each factor
    for sign in (1, -1):  # whatever the solver's signs
        left = principal_factors(sign * weights()[LAYER], OUT - 2, SCALE)[0]
        assert (left.gather(0, left.abs().argmax(0, keepdim=True)) > 0).all()
    strategy, state = begin()
    start = strategy.receive({}, strategy.payload(state, SiteInfo("a", 1)))
    np.testing.assert_allclose(forward(start), weights()[LAYER].double().numpy(), atol=1e-6)


def test_every_round_goes_into_the_weights_once_and_reaches_everybody() -> None:
    strategy, state = begin()
    b0, a0 = (state.shared[n].double().numpy() for n in (B, A))
    residual = weights()[LAYER].double().numpy() - SCALE * b0 @ a0
    head, widths = np.zeros((3, 4)), []
    for round, sites in enumerate(ROUNDS):
        aggregate, ends = RoundAggregate(strategy), {}
        for site, weight in sites.items():
            info = SiteInfo(site, weight, joined=round > 0)
            sent = strategy.payload(state, info)
            start = strategy.receive({A: torch.ones(RANK, INTO)}, sent)  # of its own it keeps nothing
            ends[site] = trained(start, round, site)
            aggregate.add(info, update_of(strategy, start, ends[site], sent), weight, sent)
        state = strategy.aggregate(state, aggregate.take())
        total = sum(sites.values())
        mean = {n: sum(w * ends[s][n].double().numpy() for s, w in sites.items()) / total for n in (A, B, "head.weight")}
        evaluated = residual + SCALE * mean[B] @ mean[A]
        residual, head = residual + SCALE * (mean[B] @ mean[A] - b0 @ a0), mean["head.weight"]
        for info in (SiteInfo("b", 1, joined=True), SiteInfo("new", 1)):
            for payload in (strategy.payload(state, info), strategy.final(state, info)):
                received = strategy.receive({}, payload)
                np.testing.assert_allclose(forward(received), evaluated, atol=2e-5)
                np.testing.assert_allclose(received["head.weight"].numpy(), head, atol=1e-6)
        widths.append(len(received[f"{LAYER}.tail_A"]))
        assert torch.equal(state.shared[B], torch.from_numpy(b0).float())
    assert widths == [4, INTO, INTO, INTO]  # r more a round, one matrix from where (out + in) k reaches out * in
    assert strategy.download_numbers(state, info) == RANK * (OUT + INTO) + 12 + OUT * INTO


def test_a_tail_that_takes_as_many_numbers_as_the_layer_becomes_one_matrix() -> None:
    """A layer of 4 x 4 at rank 1: two ranks of 4 + 4 numbers after the first round."""
    for size, parts in ((4, {f"{LAYER}.tail_whole"}), (5, {f"{LAYER}.{part}" for part in ("tail_A", "tail_B", "gate")})):
        state = FRLoRA().initialize({A: torch.ones(1, size), B: torch.ones(size, 1)})
        moved = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in state.shared.items()}
        assert FRLoRA().aggregate(state, moved).matrices.keys() == parts


def small(**sections: object) -> JobConfig:
    raw = small_config("frlora", rounds=2, lr=1e-2, local_steps=2, validate={"stages": []}).model_dump()
    raw["data"]["phantoms"] |= {"training": 2, "validation": 0, "test": 1}
    return JobConfig.model_validate(raw | sections)


def test_the_export_is_the_model_in_plain_peft_and_the_server_resumes_it(tmp_path: Path) -> None:
    """Fused qkv from split q and v, tails of several rounds: base + PEFT folder = what the sites evaluated."""
    config = small(adapter={"rank": 4, "alpha": 8, "targets": "qv"})
    job = assemble_job(config)
    done = simulate(job, {f"site-{i}": SiteConfig() for i in (1, 2)}, tmp_path, lambda event: None)
    folders = [tmp_path / "adapters/global", tmp_path / "sites/site-1/adapters/global"]
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert all(torch.equal(ours[n], t) for n, t in theirs.items())
    model = build_model(config, SiteConfig())
    adapter_state.load(model, job.strategy.receive({}, job.strategy.final(done.state, SiteInfo("x", 1))))
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 255
    with torch.no_grad():
        expected, base = model(images), build_sam("tiny", None, 64, 2)(images)
        plain = peft.PeftModel.from_pretrained(build_sam("tiny", None, 64, 2), str(folders[0])).eval()(images)
    torch.testing.assert_close(plain, expected, rtol=1e-3, atol=1e-3)
    assert (expected - base).abs().max() > 0.05  # else the adapter's export would not matter


def test_what_it_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    assert assemble_job(small(privacy={"unit": "record", "epsilon": 3})).initial
    with pytest.raises(ConfigError, match="sends frozen ranks; use lora"):
        assemble_job(small(adapter={"kind": "bottleneck", "width": 4}))
    far = small(model={"name": "sam", "variant": "vit_b", "image_size": 64, "checkpoint": "${SITE}/sam.pth"})
    with pytest.raises(ConfigError, match="needs the server's checkpoint folder"):
        server_start(assemble_job(far), SiteConfig())


def test_the_start_is_of_the_server_s_base_and_no_other_base_may_join() -> None:
    job = assemble_job(small())
    start, checkpoint, _ = server_start(job, SiteConfig())
    assert checkpoint == ""  # the package's own weights
    base = build_sam("tiny", None, 64, 2)
    name = "image_encoder.blocks.0.attn.qkv"
    product = job.config.adapter.product_scaling * start[f"{name}.lora_B"] @ start[f"{name}.lora_A"]
    u, s, vt = np.linalg.svd(base.get_submodule(name).weight.detach().double().numpy())
    np.testing.assert_allclose(product.numpy(), (u[:, :4] * s[:4]) @ vt[:4], atol=1e-4)
    assert Payload(0, 0, start).tensors.keys() == job.initial.keys()
