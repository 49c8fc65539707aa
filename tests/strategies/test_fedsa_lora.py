"""FedSA-LoRA on bottleneck adapters: the down-projection is averaged, the rest stays at its site."""

import numpy as np
import pytest
import torch

from consilium.core.errors import ConfigError
from consilium.core.messages import SiteInfo
from consilium.server.aggregation import RoundAggregate
from consilium.strategies.fedsa_lora import FedSALoRA
from consilium.strategies.strategy import Role
from tests.strategies.scripted import update_of

BLOCK = "image_encoder.blocks.0.adapter_mlp"
DOWN, UP = f"{BLOCK}.down.weight", f"{BLOCK}.up.weight"
LOCAL = (UP, f"{BLOCK}.up.bias", "base.mask_decoder.iou_token.weight", "head.bias")


def test_roles() -> None:
    strategy = FedSALoRA()
    assert {strategy.role(n, 0, 0) for n in (DOWN, f"{BLOCK}.down.bias", "x.lora_A")} == {Role.SHARED}
    assert {strategy.role(n, 0, 0) for n in (*LOCAL, "x.lora_B")} == {Role.LOCAL}
    with pytest.raises(ConfigError, match="cannot place adapter tensor 'whole"):
        strategy.role("whole.image_encoder.pos_embed", 0, 0)


def test_two_sites_get_one_down_projection_and_keep_their_own_up() -> None:
    """Against numpy: sum_k p_k M_d,k with p = (3, 1) / 4; a site that returns has its own M_u beside it."""
    strategy, draw = FedSALoRA(), np.random.default_rng(0)
    ends = {name: {DOWN: draw.normal(size=(2, 3)), UP: draw.normal(size=(3, 2))} for name in ("a", "b")}
    start = {DOWN: torch.zeros(2, 3), UP: torch.zeros(3, 2)}
    state, aggregate = strategy.initialize(start), RoundAggregate(strategy)
    trained = {name: {n: torch.tensor(v, dtype=torch.float32) for n, v in end.items()} for name, end in ends.items()}
    for name, weight in (("a", 3), ("b", 1)):
        site = SiteInfo(name, weight)
        sent = strategy.payload(state, site)
        update = update_of(strategy, start, trained[name], sent)
        assert update.tensors.keys() == {DOWN}
        aggregate.add(site, update, weight, sent)
    after = strategy.aggregate(state, aggregate.take())
    again = strategy.receive(trained["b"], strategy.payload(after, SiteInfo("b", 1, joined=True)))
    assert strategy.initialize(start | {LOCAL[2]: torch.zeros(1)}).initial.keys() == {UP}  # changes of the base start at 0
    assert np.allclose(again[DOWN].numpy(), 0.75 * ends["a"][DOWN] + 0.25 * ends["b"][DOWN], atol=1e-6)
    assert torch.equal(again[UP], trained["b"][UP])
