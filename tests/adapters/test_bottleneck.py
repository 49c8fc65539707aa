"""Bottleneck adapters: identity at the start, order and count, what trains, base and decoder restored."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from consilium.adapters import adapter_state, bottleneck
from consilium.adapters.kinds import BottleneckConfig
from consilium.adapters.names import bottleneck_count, bottleneck_position
from consilium.adapters.registry import Decoder
from consilium.core.errors import ConfigError
from consilium.models.clip.network import build_clip
from consilium.models.sam import SAM
from consilium.models.sam.network import build_sam
from tests.conftest import initial

DECODERS: tuple[Decoder, ...] = ("freeze", "keep", "share")


def decoder_parameters(model: torch.nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters() if name.startswith("mask_decoder.")}


def tiny(decoder: Decoder = "freeze", width: int | None = 4) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    model, images = build_sam("tiny", None, 64, 2), torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 255
    model.requires_grad_(decoder == "keep")  # torch multiplies by frozen weights in another way, with other bits under AVX2
    with torch.no_grad():
        before = model(images)
    bottleneck.inject(model, BottleneckConfig(kind="bottleneck", width=width, decoder=decoder), SAM)
    return model, images, before


@pytest.mark.parametrize("decoder", ["freeze", "keep"])
def test_the_model_is_its_base_at_the_start_and_where_the_adapter_is_disabled(decoder: Decoder) -> None:
    """A decoder that trains is the base's own there."""
    model, images, before = tiny(decoder)
    adapter_state.load(model, initial(model, 0) | adapter_state.initial_base_changes(model))
    with torch.no_grad():
        assert torch.equal(model(images), before)
        for parameter in adapter_state.tensors(model).values():
            parameter.add_(0.01)
        moved = model(images)
        with adapter_state.disable_adapter(model):
            assert torch.equal(model(images), before)
        assert torch.equal(model(images), moved)
    assert not torch.allclose(moved, before, atol=1e-2)


def test_a_model_without_an_adapter_is_refused_until_it_has_one() -> None:
    model = build_sam("tiny", None, 64, 2)
    with pytest.raises(ConfigError, match="has no adapter; inject one first"):
        adapter_state.tensors(model)
    bottleneck.inject(model, BottleneckConfig(kind="bottleneck", width=4, decoder="freeze"), SAM)
    assert adapter_state.tensors(model)
    with pytest.raises(ConfigError, match=r"adapter\.kind: 'bottleneck' needs"):
        bottleneck.inject(build_clip("tiny", None, 64, 2), BottleneckConfig(kind="bottleneck", width=None), SAM)


@pytest.mark.parametrize("place", bottleneck.PLACES)
def test_every_adapter_acts(place: str) -> None:
    model, images, before = tiny()
    adapter_state.load(model, initial(model, 0))
    with torch.no_grad():
        adapter_state.tensors(model)[f"image_encoder.blocks.3.{place}.up.bias"].fill_(0.5)
        assert not torch.allclose(model(images), before, atol=1e-3)


def test_the_formula_of_one_adapter() -> None:
    module, x = bottleneck.Bottleneck(3, 2, skip=True), torch.randn(4, 3)
    hidden = torch.nn.functional.gelu(x @ module.down.weight.T + module.down.bias)
    assert torch.allclose(module(x), x + hidden @ module.up.weight.T + module.up.bias, atol=1e-6)
    module.skip = False
    assert torch.allclose(module(x), 0.5 * (hidden @ module.up.weight.T + module.up.bias), atol=1e-6)


def test_positions_count_from_the_input_and_vit_b_has_36() -> None:
    with torch.device("meta"):
        model = build_sam("vit_b", None, 1024, 1, weights=False)
        bottleneck.inject(model, BottleneckConfig(kind="bottleneck", width=None), SAM)
    names = list(adapter_state.tensors(model))
    assert bottleneck_count(names) == 36
    assert bottleneck_position("image_encoder.blocks.0.adapter_attention.down.weight") == 0
    assert bottleneck_position("image_encoder.blocks.2.adapter_output.up.bias") == 8
    assert bottleneck_position("image_encoder.blocks.2.attn.qkv.weight") is None
    sizes: dict[int, int] = {}
    for name, parameter in adapter_state.tensors(model).items():
        where = bottleneck_position(name)
        sizes[where] = sizes.get(where, 0) + parameter.numel()
    assert set(sizes.values()) == {768 * 192 * 2 + 192 + 768}


def test_only_adapters_train_and_a_decoder_where_it_may() -> None:
    for decoder in DECODERS:
        model, _, _ = tiny(decoder)
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert trained == {n.removeprefix("base.") for n in adapter_state.tensors(model)}
        assert {n for n in trained if "adapter_" not in n} == (decoder_parameters(model) if decoder != "freeze" else set())


def test_a_change_of_the_base_is_what_was_added_to_its_parameter() -> None:
    model, _, _ = tiny(decoder="share")
    parameter = dict(model.named_parameters())["mask_decoder.iou_token.weight"]
    before, change = parameter.detach().clone(), {"base.mask_decoder.iou_token.weight": torch.full((1, 64), 0.25)}
    adapter_state.load(model, initial(model, 0) | adapter_state.initial_base_changes(model) | change)
    assert torch.equal(parameter, before + 0.25)
    torch.testing.assert_close(adapter_state.values(model)["base.mask_decoder.iou_token.weight"], torch.full((1, 64), 0.25))
    assert torch.equal(adapter_state.base_plus_changes(model, change)["mask_decoder.iou_token.weight"], before + 0.25)


def test_export_holds_every_tensor(tmp_path: Path) -> None:
    model, _, _ = tiny()
    values = {n: p.detach() for n, p in adapter_state.tensors(model).items()}
    bottleneck.export(tmp_path, values, BottleneckConfig(kind="bottleneck"), SAM, "sam-tiny")
    saved = load_file(tmp_path / "adapter.safetensors")
    assert all(torch.equal(saved[n], t) for n, t in values.items())
    about = {"kind": "bottleneck", "base": "sam-tiny", "adapters": 12, "places": list(bottleneck.PLACES), "parallel_scale": 0.5}
    assert json.loads((tmp_path / "adapter.json").read_text()) == about
