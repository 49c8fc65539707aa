"""The dual-rank adapter: the products it computes, what trains and what does not, ranks that change, a plain LoRA export."""

import copy
import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from consilium.adapters import adapter_state, dual_rank
from consilium.adapters.kinds import DUAL_RANK, LORA, DualRankConfig, LoraConfig
from consilium.core.errors import CheckpointError
from consilium.models.causal_lm import CAUSAL_LM
from consilium.models.causal_lm.network import build_causal_lm

LAYER = "model.layers.0.self_attn.q_proj"
SCALING = 2.0


class Net(nn.Module):
    """One linear layer under a name that the target sets know."""

    def __init__(self, into: int = 7, out: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        linear = nn.Linear(into, out)
        self.model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"self_attn": nn.ModuleDict({"q_proj": linear})})])})

    def forward(self, x: Tensor) -> Tensor:
        return self.model["layers"][0]["self_attn"]["q_proj"](x)


def net(rank: int = 4, **options: int) -> Net:
    model = Net(**options)
    dual_rank.inject(model, DualRankConfig(kind="dual_rank", rank=rank, scaling=SCALING, targets="paper"), CAUSAL_LM)
    return model


def values(rank: int, tail: int, gate: float = 0.3, into: int = 7, out: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank + 10 * tail)
    shapes = {"lora_A": (rank, into), "lora_B": (out, rank)} | ({"tail_A": (tail, into), "tail_B": (out, tail)} if tail else {})
    found = {f"{LAYER}.{n}": torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    return found | ({f"{LAYER}.gate": torch.tensor([gate])} if tail else {})


def dense(model: Net, given: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return W0 x + s (B A x + gate B_tail A_tail x), written out."""
    part = {name.rpartition(".")[2]: tensor for name, tensor in given.items()}
    update = part["lora_B"] @ part["lora_A"]
    if "tail_A" in part:
        update = update + part["gate"] * part["tail_B"] @ part["tail_A"]
    return model.get_submodule(LAYER).base(x) + SCALING * x @ update.T


def rounding(model: Net, given: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return how far two float32 evaluations of `dense` may lie apart, whatever the order of their sums.

    Each rounds at most 7 + 13 + 7 sums and 5 products on the way to a number, by 2^-24 of the sum of absolute values.
    """
    absolute = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in absolute.parameters():
            parameter.abs_()
        return 2 * (7 + 13 + 7 + 5) * 2.0**-24 * dense(absolute, {n: t.abs() for n, t in given.items()}, x.abs())


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in adapter_state.tensors(model).items() if isinstance(p, nn.Parameter)}


@pytest.mark.parametrize(
    ("rank", "tail", "trains"), [(4, 0, "AB"), (2, 3, "AB"), (0, 4, "AB"), (4, 9, "AB"), (2, 3, "A"), (2, 3, "B")]
)
def test_forward_and_gradients_are_those_of_the_formula(rank: int, tail: int, trains: str) -> None:
    model, given = net(), values(rank, tail)
    adapter_state.load(model, given)
    for name, parameter in trained(model).items():
        parameter.requires_grad_(name[-1] in trains)
    x = torch.randn(3, 2, 7, requires_grad=True)
    y = model(x)
    leaves = {n: t.clone().requires_grad_(".lora_" in n and n[-1] in trains) for n, t in given.items()}
    again = x.detach().clone().requires_grad_()
    expected = dense(model, leaves, again)
    assert ((y - expected).abs() <= rounding(model, given, x)).all()
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, again.grad, rtol=1e-4, atol=1e-4)
    for name, parameter in trained(model).items():
        assert (parameter.grad is not None) == (name[-1] in trains)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, leaves[name].grad, rtol=1e-4, atol=1e-4)


def test_the_tail_has_no_gradient_no_optimizer_state_and_keeps_every_bit() -> None:
    model, given = net(), values(2, 6)
    adapter_state.load(model, given)
    parameters = trained(model)
    assert sorted(parameters) == [f"{LAYER}.lora_A", f"{LAYER}.lora_B"]
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        model(torch.randn(4, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values() if t.dim())
    assert state == 2 * 4 * 2 * (7 + 5)  # two moments of 4 bytes for each of r_train (in + out) numbers
    live = adapter_state.tensors(model)
    assert all(torch.equal(live[n], t) for n, t in given.items() if "tail" in n or "gate" in n)
    assert not torch.equal(live[f"{LAYER}.lora_A"], given[f"{LAYER}.lora_A"])
    torch.testing.assert_close(model(torch.ones(1, 7)), dense(model, dict(live), torch.ones(1, 7)))


def test_what_the_backward_pass_keeps_does_not_grow_with_the_tail() -> None:
    def kept(tail: int) -> int:
        model, sizes = net(into=64, out=64), {}
        adapter_state.load(model, values(2, tail, into=64, out=64))
        own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own and tensor.dim() > 1:  # the weights of the ranks are one short vector
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(torch.randn(50, 64))
        return sum(sizes.values())

    assert kept(30) == kept(0)


def test_ranks_change_with_what_is_loaded_and_one_site_leaves_nothing_to_the_next() -> None:
    model, x = net(), torch.randn(2, 7)
    for rank, tail in ((4, 0), (1, 3), (0, 2), (3, 0)):
        given = values(rank, tail)
        adapter_state.load(model, given)
        fresh = net()
        adapter_state.load(fresh, given)
        assert adapter_state.tensors(model).keys() == given.keys()
        assert torch.equal(model(x), fresh(x))
    with adapter_state.disable_adapter(model):
        assert torch.equal(model(x), model.get_submodule(LAYER).base(x))


def test_moving_the_model_keeps_prefix_and_tail_in_one_piece() -> None:
    model = net()
    adapter_state.load(model, values(2, 3))
    before = model(torch.ones(1, 7))
    model.double().float()
    with torch.no_grad():
        trained(model)[f"{LAYER}.lora_B"].zero_()
    given = values(2, 3) | {f"{LAYER}.lora_B": torch.zeros(5, 2)}
    torch.testing.assert_close(model(torch.ones(1, 7)), dense(model, given, torch.ones(1, 7)))
    assert not torch.allclose(model(torch.ones(1, 7)), before)


@pytest.mark.parametrize(
    "wrong",
    [
        {f"{LAYER}.lora_A": torch.zeros(2, 8)},
        {f"{LAYER}.lora_B": torch.zeros(5, 3)},
        {f"{LAYER}.tail_A": torch.zeros(3, 7)},
        {f"{LAYER}.else": torch.zeros(1)},
    ],
)
def test_tensors_that_do_not_fit_are_refused(wrong: dict[str, Tensor]) -> None:
    with pytest.raises(CheckpointError, match="do not fit a layer that takes lora_A \\(r, 7\\) and lora_B \\(5, r\\)"):
        adapter_state.load(net(), values(2, 0) | wrong)


def test_dropout_is_of_the_prefix_alone_and_of_training_alone() -> None:
    """With a probability of 1 nothing passes the prefix."""
    model, x = Net(), torch.ones(2, 7)
    object.__setattr__(config := DualRankConfig(kind="dual_rank", rank=4, scaling=SCALING), "dropout", 1.0)
    dual_rank.inject(model, config, CAUSAL_LM)
    for rank, tail in ((2, 3), (2, 0)):
        given = values(rank, tail)
        adapter_state.load(model, given)
        torch.testing.assert_close(model.eval()(x), dense(model, given, x))
        given[f"{LAYER}.lora_A"] = torch.zeros(rank, 7)
        torch.testing.assert_close(model.train()(x), dense(model, given, x))
    plain = net()
    adapter_state.load(plain, values(2, 3))
    assert torch.equal(plain.train()(x), plain.eval()(x))


def test_a_prefix_under_dropout_has_the_gradients_of_what_passes() -> None:
    model, given, x = net(), values(2, 3), torch.randn(3, 7)
    adapter_state.load(model, given)
    model.get_submodule(LAYER).dropout.p = 0.5
    torch.manual_seed(1)
    model.train()(x).square().sum().backward()
    torch.manual_seed(1)
    passed = torch.nn.functional.dropout(x, 0.5)
    leaves = {n: t.clone().requires_grad_(".lora_" in n) for n, t in given.items()}
    part = {n.rpartition(".")[2]: t for n, t in leaves.items()}
    tail = x @ (part["gate"] * part["tail_B"] @ part["tail_A"]).T
    y = model.get_submodule(LAYER).base(x) + SCALING * (tail + passed @ (part["lora_B"] @ part["lora_A"]).T)
    y.square().sum().backward()
    for name, parameter in trained(model).items():
        torch.testing.assert_close(parameter.grad, leaves[name].grad, rtol=1e-4, atol=1e-4)


def test_a_rank_over_a_layers_size_is_its_size_and_only_factors_are_in_a_state_dict() -> None:
    found = dual_rank.shapes(Net(), DualRankConfig(kind="dual_rank", rank=9), CAUSAL_LM)
    assert found == {f"{LAYER}.lora_A": (5, 7), f"{LAYER}.lora_B": (5, 5)}
    assert {name.removeprefix(f"{LAYER}.") for name in net().state_dict()} == {"lora_A", "lora_B", "base.weight", "base.bias"}


def test_bf16_autocast_computes_in_bf16_and_trains_in_float32() -> None:
    model, given = net(), values(2, 3)
    adapter_state.load(model, given)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(torch.ones(3, 7))
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.float(), dense(model, given, torch.ones(3, 7)), rtol=0.05, atol=0.2)
    y.float().sum().backward()
    assert all(p.grad.dtype is torch.float32 for p in trained(model).values())


def test_the_export_is_plain_lora_with_a_rank_per_layer(tmp_path: Path) -> None:
    model, ids = build_causal_lm("tiny", None), torch.arange(9)[None]
    config = DualRankConfig(kind="dual_rank", rank=8, scaling=SCALING)
    DUAL_RANK.inject(model, config, CAUSAL_LM)
    generator, state = torch.Generator().manual_seed(0), {}
    for index, (name, tensor) in enumerate(adapter_state.tensors(model).items()):
        layer = name.rpartition(".")[0]
        rank, tail = divmod(hash_of(layer), 3)
        out, into = (len(tensor), None) if name.endswith("B") else (None, tensor.shape[1])
        for part, count in (("lora", rank), ("tail", tail)):
            if part == "lora" or tail:
                shape = (out, count) if out else (count, into)
                state[f"{layer}.{part}_{name[-1]}"] = 0.1 * torch.randn(shape, generator=generator)
        if tail:
            state[f"{layer}.gate"] = torch.tensor([0.5 + index / 100])
    adapter_state.load(model, state)
    assert any(len(t) == 0 for n, t in state.items() if n.endswith("lora_A"))
    DUAL_RANK.export(tmp_path, {n: t.detach() for n, t in adapter_state.tensors(model).items()}, config, CAUSAL_LM, "tiny")
    loaded = peft.PeftModel.from_pretrained(build_causal_lm("tiny", None), tmp_path)
    ours, theirs = model.double()(ids).logits, loaded.double()(ids).logits  # but for norms, and for tail times gate
    torch.testing.assert_close(theirs.float(), ours.float())


def test_plain_lora_with_a_tail_is_exported_as_one_pair_and_a_decoder_apart(tmp_path: Path) -> None:
    assert LORA.tailed
    given = values(2, 3) | {"base.mask_decoder.x.weight": torch.ones(2)}
    LORA.tailed.export(tmp_path, given, LoraConfig(rank=2, alpha=4.0), CAUSAL_LM, "net")
    saved = {n.rpartition(".lora_")[2]: t for n, t in load_file(tmp_path / "adapter_model.safetensors").items()}
    assert torch.equal(saved["A.weight"], torch.cat([given[f"{LAYER}.lora_A"], given[f"{LAYER}.tail_A"]]))
    assert torch.equal(saved["B.weight"], torch.cat([given[f"{LAYER}.lora_B"], 0.3 * given[f"{LAYER}.tail_B"]], 1))
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    assert list(said["rank_pattern"].values()) == [5]
    assert list(said["alpha_pattern"].values()) == [2 * 5]  # alpha / rank of the job is 2
    assert load_file(tmp_path / "decoder.safetensors").keys() == {"base.mask_decoder.x.weight"}


def hash_of(layer: str) -> int:
    """Return 0 to 7 by layer, so that ranks and tails of 0 occur."""
    return sum(map(ord, layer)) % 8
