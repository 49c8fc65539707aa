"""Where an adapter is in a model, what switches it off, which blocks are left out, the largest size, and parts beside it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from consilium.adapters import adapter_state, bottleneck, dual_rank, lora
from consilium.adapters.kinds import FULL, LORA, BottleneckConfig, DualRankConfig, FullConfig, LoraConfig
from consilium.adapters.names import FEATURE_SHIFT, LOCAL_ADAPTER, MEAN, SHIFT, prepare_linear_layers
from consilium.adapters.registry import ADAPTERS
from consilium.adapters.strategy_modules import FeatureShift, add_parts, feature_point_of, merge_shift, part_shapes
from consilium.adapters.trained_base_parameters import trainable_decoder
from consilium.core.errors import ConfigError
from consilium.models.causal_lm import CAUSAL_LM
from consilium.models.registry import Cut, ModelConfig, ModelKind, TargetSet
from consilium.models.sam import SAM
from consilium.models.sam.network import build_sam


class Two(nn.Module):
    """A linear encoder of 3 features and a head."""

    def __init__(self, encoder_bias: bool = True, head_bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(3, 3, bias=encoder_bias), nn.Linear(3, 2, bias=head_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


BASE = ModelKind(ModelConfig, "classification", lambda *a, **k: Two(), cut=lambda model: Cut(model.encoder, 3, -1))
X = torch.tensor([[1.0, -2.0, 0.5]])


def adapted() -> Two:
    """Return the model with LoRA of rank 2, no number of which is 0."""
    model = Two()
    lora.inject(model, LoraConfig(rank=2, alpha=4.0, targets="encoder"), CAUSAL_LM)
    adapter_state.load(model, {n: torch.full_like(t, 0.25) for n, t in adapter_state.tensors(model).items()})
    return model


def tailed() -> Two:
    """Return the model with a dual-rank adapter of 2 trained ranks."""
    model = Two()
    dual_rank.inject(model, DualRankConfig(kind="dual_rank", rank=2, scaling=2.0, targets="encoder"), CAUSAL_LM)
    return model


def test_defaults_of_the_kinds() -> None:
    plain = {"start": None, "targets": "paper", "dropout": 0.0}
    assert LoraConfig().model_dump() == plain | {"kind": "lora", "rank": 8, "alpha": 8.0, "decoder": "freeze"} | {
        "rslora": False, "dora": False
    }  # fmt: skip
    assert DualRankConfig(kind="dual_rank").model_dump() == plain | {"kind": "dual_rank", "rank": 64, "scaling": 2.0}
    wide = BottleneckConfig(kind="bottleneck").model_dump()
    assert wide == {"kind": "bottleneck", "start": None, "width": None, "decoder": "freeze"}
    assert {name: kind.unequal_ranks for name, kind in ADAPTERS.items()} == {
        "lora": False, "dual_rank": True, "bottleneck": False, "full": False
    }  # fmt: skip
    assert [ADAPTERS[kind].config(kind=kind).product_scaling for kind in ("bottleneck", "full")] == [1.0, 1.0]
    for config in (LoraConfig, DualRankConfig):
        kind = "lora" if config is LoraConfig else "dual_rank"
        config(kind=kind).check_per_sample_gradients()
        with pytest.raises(ValueError, match=r"adapter\.dropout: 0\.1 draws all masks .*; use 0"):
            config(kind=kind, dropout=0.1).check_per_sample_gradients()


def test_a_model_that_trains_whole_is_exported_whole(tmp_path: Path) -> None:
    FULL.export(tmp_path, {"whole.encoder.bias": torch.ones(3)}, FullConfig(kind="full"), BASE, "two")
    assert load_file(tmp_path / "model.safetensors")["whole.encoder.bias"].tolist() == [1, 1, 1]


def test_the_largest_adapter_has_2_to_the_29_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter_state.check_size(2**29)
    with pytest.raises(ConfigError, match="536,870,913 numbers to train, over 536,870,912"):
        adapter_state.check_size(2**29 + 1)
    sam, width = build_sam("tiny", None, 64, 2), BottleneckConfig(kind="bottleneck", width=4)
    plain, dual = LoraConfig(rank=2, targets="encoder"), DualRankConfig(kind="dual_rank", rank=2, targets="encoder")
    found = bottleneck.shapes(sam, width, SAM)
    sizes = {  # by hand: rank 2 of 3 x 3 is 2 (3 + 3); the whole model has 9 + 3 + 6 + 2
        12: (lambda: lora.shapes(Two(), plain, CAUSAL_LM), lambda: dual_rank.shapes(Two(), dual, CAUSAL_LM)),
        20: (lambda: FULL.shapes(Two(), FullConfig(kind="full"), BASE),),
        sum(torch.zeros(shape).numel() for shape in found.values()): (lambda: bottleneck.shapes(sam, width, SAM),),
    }
    for most, calls in sizes.items():
        for call in calls:
            monkeypatch.setattr(adapter_state, "LARGEST", most)
            call()
            monkeypatch.setattr(adapter_state, "LARGEST", most - 1)
            with pytest.raises(ConfigError, match="numbers to train"):
                call()


def test_first_values_are_drawn_for_what_maps_down_and_0_for_the_rest() -> None:
    down, up = ("e.lora_A", "e.local_A", "b.down.weight"), ("e.lora_B", "e.local_B", "b.up.weight")
    others = ("head.weight", "base.b.down.weight", "whole.e.lora_A")
    drawn = [name for name in (*down, *up, *others) if adapter_state.initial_tensor(name, (2, 3), 0).any()]
    assert drawn == ["e.lora_A", "e.local_A", "b.down.weight"]
    assert not adapter_state.initial_tensor("b.down.bias", (2,), 0).any()


def test_disabled_within_disabled_ends_with_the_outer_one_and_trains_are_as_before() -> None:
    tails = tailed()
    adapter_state.load(tails, {n: torch.full_like(t, 0.25) for n, t in adapter_state.tensors(tails).items()})
    for model in (adapted(), tails):
        base, before, states = Two(), model(X), adapter_state.tensors(model)
        states["encoder.lora_A"].requires_grad_(False)
        trains = {n: p.requires_grad for n, p in model.named_parameters()}
        with adapter_state.disable_adapter(model):
            assert not model(X).any()  # its head is 0 as well
            with adapter_state.disable_adapter(model):
                pass
            encoded = model.encoder(X)
            torch.testing.assert_close(encoded, base.encoder(X))
        assert torch.equal(model(X), before)
        assert trains == {n: p.requires_grad for n, p in model.named_parameters()}
        assert {"encoder.lora_B", "head.bias"} <= {n.replace(".default.weight", "") for n, on in trains.items() if on}


def test_modules_that_hold_the_adapter_and_what_switches_a_forward_pass() -> None:
    model, tails = adapted(), tailed()
    assert adapter_state.adapter_modules(tails) == [tails.encoder, tails.head]  # the parameters inside count with their module
    factors = [model.encoder.lora_A["default"], model.encoder.lora_B["default"]]
    assert adapter_state.adapter_modules(model) == [*factors, model.head]
    states = [adapter_state.forward_settings(model)]
    lora.scale(model, LoraConfig(), 0.5)
    states.append(adapter_state.forward_settings(model))
    adapter_state.leave_out(model, {"encoder"})
    states.append(adapter_state.forward_settings(model))
    with adapter_state.disable_adapter(model):
        states.append(adapter_state.forward_settings(model))
    left = frozenset({"encoder"})
    assert states == [(None, (False, 2.0)), (None, (False, 0.5)), (left, (False, 0.5)), (left, (True, 0.5))]


def test_a_part_of_an_adapter_is_overwritten_and_the_rest_stays() -> None:
    model = adapted()
    adapter_state.overwrite(model, {"encoder.lora_A": torch.ones(2, 3)})
    found = adapter_state.values(model)
    assert found["encoder.lora_A"].eq(1).all()
    assert found["encoder.lora_B"].eq(0.25).all()
    model.encoder.lora_B["default"].weight.data.zero_()
    assert found["encoder.lora_B"].eq(0.25).all()  # copies
    sam = build_sam("tiny", None, 64, 2)
    bottleneck.inject(sam, BottleneckConfig(kind="bottleneck", width=4, decoder="keep"), SAM)
    name = "base.mask_decoder.iou_token.weight"
    parameter, before = adapter_state.tensors(sam)[name], adapter_state.tensors(sam)[name].detach().clone()
    adapter_state.overwrite(sam, {name: torch.ones_like(before)})
    assert torch.equal(parameter, before + 1)  # a change of the base


def test_modules_left_out_return_their_input_also_after_they_are_replaced() -> None:
    model, base = Two(), Two()
    adapter_state.leave_out(model, {"encoder"})
    assert adapter_state.left_out_modules(model) == ["encoder"]
    assert torch.equal(model(X), base.head(X))
    adapter_state.replace(model, "encoder", nn.Linear(3, 3))
    adapter_state.leave_out(model, {"encoder"})
    assert torch.equal(model(X), base.head(X))
    adapter_state.replace(model, "encoder", base.encoder)
    adapter_state.leave_out(model, set())
    assert (adapter_state.left_out_modules(model), torch.equal(model(X), base(X))) == ([], True)


def test_a_merged_layer_is_no_longer_known_as_adapted() -> None:
    model = tailed()
    given = {"encoder.lora_A": torch.ones(1, 3), "encoder.lora_B": torch.ones(3, 1), "encoder.tail_A": torch.ones(2, 3)}
    given |= {"encoder.tail_B": torch.ones(3, 2), "encoder.gate": torch.tensor([0.5])}
    adapter_state.load(model, given | {"head.weight": torch.ones(2, 3), "head.bias": torch.zeros(2)})
    assert len(adapter_state.modules_of(model, dual_rank.DualRank)) == 1
    before = model(X)
    dual_rank.merge(model)
    assert adapter_state.modules_of(model, dual_rank.DualRank) == []
    torch.testing.assert_close(model.encoder.weight, Two().encoder.weight + 4)  # 2 (1 + 0.5 * 2)
    torch.testing.assert_close(model(X), before)


def test_a_parameter_shared_with_another_module_is_found() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "cabd"})
    assert adapter_state.shared_weight(model, "abcd") is None
    model["b"].weight = model["d"].weight = model["a"].weight
    assert adapter_state.shared_weight(model, ["c"]) is None  # what others share is theirs
    assert adapter_state.shared_weight(model, ["c", "a"]) == ("a", "b")
    assert adapter_state.shared_weight(model, ["d"]) == ("d", "a")
    inside = nn.ModuleDict({"a": nn.ModuleDict({"x": nn.Linear(2, 2), "y": nn.Linear(2, 2)})})
    inside["a"]["x"].weight = inside["a"]["y"].weight
    assert adapter_state.shared_weight(inside, ["a"]) is None  # within the layer


def test_models_that_an_adapter_does_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match="has no linear layers to adapt; use kind full"):
        prepare_linear_layers(nn.Conv2d(1, 1, 1), TargetSet(".*"))
    with pytest.raises(ConfigError, match=r"'other' matches no linear layer of the model; use a full regex"):
        prepare_linear_layers(Two(), TargetSet("other"))
    with pytest.raises(ConfigError, match=r"adapter\.decoder: 'share': the model has no mask decoder; use freeze"):
        trainable_decoder(Two(), LoraConfig(decoder="share"))
    assert trainable_decoder(Two(), LoraConfig(decoder="freeze")) == []


def test_parts_add_a_twin_of_each_factor_and_two_vectors_of_the_features() -> None:
    found = part_shapes({LOCAL_ADAPTER, FEATURE_SHIFT}, {"e.lora_A": (2, 3), "head.weight": (2, 3)}, Two(), BASE)
    assert found == {"e.local_A": (2, 3), SHIFT: (3,), MEAN: (3,)}


def test_a_shift_moves_its_axis_and_means_run_over_all_positions() -> None:
    part = FeatureShift(2, 1)
    part.shift.data = torch.tensor([1.0, 10.0])
    maps = torch.arange(24.0).view(2, 2, 2, 3)  # channel 0: 0 to 5 and 12 to 17; channel 1: 6 to 11 and 18 to 23
    moved = part(maps) - maps
    assert (moved[:, 0].unique().tolist(), moved[:, 1].unique().tolist()) == ([1.0], [10.0])
    assert part.batch_mean().tolist() == [8.5, 14.5]
    part.eval()(maps + 1)
    assert part.batch_mean().tolist() == [8.5, 14.5]  # of training
    part.enabled = False
    assert torch.equal(part(maps), maps)


@pytest.mark.parametrize(("encoder_bias", "head_bias"), [(True, True), (False, True), (True, False), (False, False)])
def test_a_shift_is_merged_into_the_nearest_bias(encoder_bias: bool, head_bias: bool) -> None:
    model: Any = Two(encoder_bias, head_bias)
    merge_shift(model, BASE)  # nothing to merge
    biases = [layer.bias.detach().clone() for layer in (model.encoder, model.head) if layer.bias is not None]
    adapter_state.freeze_base(model, [])
    assert adapter_state.tensors(model).keys() == {"head.weight", "head.bias"} - ({"head.bias"} if not head_bias else set())
    add_parts({FEATURE_SHIFT}, model, LORA, LoraConfig(), BASE)
    assert {"feature_shift.shift", "feature_shift.mean"} <= adapter_state.tensors(model).keys()
    model.feature_shift.shift.data = torch.tensor([1.0, 2.0, 3.0])
    wanted = model(X)
    if not encoder_bias and not head_bias:
        with pytest.raises(ConfigError, match="the model has no bias there; use --format peft"):
            merge_shift(model, BASE)
        return
    merge_shift(model, BASE)
    torch.testing.assert_close(model(X), wanted)
    assert not hasattr(model, "feature_shift")
    after = [layer.bias for layer in (model.encoder, model.head) if layer.bias is not None]
    assert [torch.equal(a, b) for a, b in zip(after, biases, strict=True)] == [False] + [True] * (len(biases) - 1)


def test_a_model_without_a_point_between_encoder_and_head_is_named() -> None:
    for kind in (ModelKind(ModelConfig, "classification", Two), ModelKind(ModelConfig, "x", Two, cut=lambda m: m.nowhere)):
        with pytest.raises(ConfigError, match="model: Two has no single point where its encoder ends"):
            feature_point_of(Two(), kind)
    assert feature_point_of(model := Two(), BASE).module is model.encoder
