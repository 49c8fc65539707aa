"""IAT's splits and SOR: a hand-worked case, double-precision autograd, zeros, gradients on the shared factor only."""

import pytest
import torch
from torch import Tensor

from consilium.core.errors import ConfigError
from consilium.strategies.fediat import FedIAT, Sharing, squared_cosine
from consilium.strategies.fedsa_lora import FedSALoRA
from consilium.strategies.strategy import LocalStep, Role

ENC, DEC = "image_encoder.blocks.0.attn.qkv", "mask_decoder.transformer.layers.0.self_attn.q_proj"


def tensor(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def factors(layer: str, out: int = 5, rank: int = 2, inner: int = 3, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((rank, inner), (out, rank)))
    return {f"{layer}.lora_A": a, f"{layer}.lora_B": b}


def live(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.clone().requires_grad_() for n, t in values.items()}


@pytest.mark.parametrize(
    ("split", "encoder", "decoder"), [("M1", "A", "A"), ("M2", "B", "B"), ("M3", "A", "B"), ("M4", "B", "A")]
)
def test_splits_share_the_factors_that_the_paper_s_figure_5_compares(split: Sharing, encoder: str, decoder: str) -> None:
    strategy = FedIAT(sharing=split)
    for layer, shared in ((ENC, encoder), (DEC, decoder)):
        for which in "AB":
            expected = Role.SHARED if which == shared else Role.LOCAL
            assert strategy.role(f"{layer}.lora_{which}", 4, 0) is expected


def test_m1_is_fedsa_and_m4_shares_b_of_an_encoder_by_transformers_too() -> None:
    names = [f"{layer}.lora_{f}" for layer in (ENC, DEC) for f in "AB"]
    assert all(FedIAT(sharing="M1").role(n, 0, 0) is FedSALoRA().role(n, 0, 0) for n in names)
    by_transformers = {f: FedIAT().role(f"vision_encoder.layers.0.attn.qkv.lora_{f}", 0, 0) for f in "AB"}
    assert by_transformers == {"A": Role.LOCAL, "B": Role.SHARED}


@pytest.mark.parametrize("name", ["prompt_encoder.x.lora_A", "my_mask_decoder.x.lora_B", "image_encoder.neck.weight"])
def test_a_tensor_that_is_neither_encoder_nor_decoder_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot place adapter tensor"):
        FedIAT().role(name, 0, 0)


@pytest.mark.parametrize(("layer", "shared", "private"), [(ENC, "B", "A"), (DEC, "A", "B")])
def test_hand_worked_2x2_encoder_case_and_the_decoders_mirror(layer: str, shared: str, private: str) -> None:
    """B0 = I, B - B0 = [[1, 0], [0, 0]]: P_sh = [[1, 0], [0, 0]]. A0 = I, A - A0 = [[2, 0], [2, 0]], delta = 0.1 of it,
    P_lo = A0 delta^T = [[.2, .2], [0, 0]]. <P, Q> = .2, norms 1 and .2 sqrt 2: cosine 1/sqrt 2, squared 1/2.
    """
    anchors = {f"{layer}.lora_{f}": torch.eye(2).double() for f in "AB"}
    moved, drifted, gradient = tensor([[2, 0], [0, 1]]), tensor([[3, 0], [2, 1]]), tensor([[0, 0], [1, 0]])
    if layer == DEC:
        drifted, gradient = drifted.T, gradient.T
    params = live({f"{layer}.lora_{private}": drifted, f"{layer}.lora_{shared}": moved})
    loss = FedIAT(sor_weight=1.0, eps=1e-12).penalty(LocalStep(params, anchors, {}))
    assert loss.item() == pytest.approx(0.5, abs=1e-7)
    loss.backward()
    assert params[f"{layer}.lora_{private}"].grad is None
    # f = (p11 + p12)^2 / (2 |P|^2) at P = [[1, 0], [0, 0]]: only d/dp12 = 1 remains; dP = dB^T, so it stands at B[1, 0]
    assert torch.allclose(params[f"{layer}.lora_{shared}"].grad, gradient, atol=1e-6)


def plain_sor(
    layer: str, params: dict[str, Tensor], anchors: dict[str, Tensor], drift: Tensor, eps: float, relative: bool
) -> Tensor:
    """Return Eq. 7-8 for one layer, written out as printed, eps in units of the squared norms of both factors if relative."""
    a, b, a0, b0 = params[f"{layer}.lora_A"], params[f"{layer}.lora_B"], anchors[f"{layer}.lora_A"], anchors[f"{layer}.lora_B"]
    sh, lo = ((b - b0).T @ b0, a0 @ drift.T) if layer == ENC else ((a - a0) @ a0.T, b0.T @ drift)
    floor = eps * a0.norm() ** 2 * b0.norm() ** 2 if relative else eps
    return ((sh * lo.detach()).sum() / (sh.norm() * lo.norm() + floor)) ** 2


@pytest.mark.parametrize("scale", ["relative", "absolute"])
def test_value_and_gradient_equal_the_printed_formula_over_three_steps(scale: str) -> None:
    strategy, memory = FedIAT(sor_weight=0.3, ema=0.7, eps=1e-2, eps_scale=scale), {}
    anchors = factors(ENC, seed=1) | factors(DEC, out=4, inner=4, seed=2)
    drift = {ENC: 0.0, DEC: 0.0}
    for number in range(3):
        draw = torch.Generator().manual_seed(number)
        moved = {n: t + 0.1 * torch.randn(t.shape, generator=draw).double() for n, t in anchors.items()}
        ours, theirs = live(moved), live(moved)
        expected = 0.0
        for layer, private in ((ENC, "A"), (DEC, "B")):
            name = f"{layer}.lora_{private}"
            drift[layer] = 0.7 * drift[layer] + 0.3 * (moved[name] - anchors[name])
            expected = expected + 0.3 * plain_sor(layer, theirs, anchors, drift[layer], 1e-2, scale == "relative")
        loss = strategy.penalty(LocalStep(ours, anchors, memory))
        assert torch.allclose(loss, expected, rtol=1e-12)
        loss.backward()
        expected.backward()
        for name in (f"{ENC}.lora_B", f"{DEC}.lora_A"):
            assert torch.allclose(ours[name].grad, theirs[name].grad, rtol=1e-9, atol=1e-14)
        assert ours[f"{ENC}.lora_A"].grad is None
        assert ours[f"{DEC}.lora_B"].grad is None


@pytest.mark.parametrize("zero_b", [False, True], ids=["B = B0", "B0 = 0"])
def test_zero_and_finite_at_the_start(zero_b: bool) -> None:
    anchors = factors(ENC) | factors(DEC, out=4, inner=4)
    if zero_b:
        anchors |= {n: torch.zeros_like(t) for n, t in anchors.items() if n.endswith("lora_B")}
    params, memory = live(anchors), {}
    for _ in range(2):
        loss = FedIAT(sor_weight=1.0).penalty(LocalStep(params, anchors, memory))
        loss.backward()
    assert loss.item() == 0.0
    shared = [params[f"{ENC}.lora_B"], params[f"{DEC}.lora_A"]]
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in shared)


def test_zero_gradient_when_only_the_private_factor_stands_still() -> None:
    anchors = factors(ENC)
    params = live({n: t + (0.1 if n.endswith("B") else 0.0) for n, t in anchors.items()})
    FedIAT(sor_weight=1.0).penalty(LocalStep(params, anchors, {})).backward()
    assert torch.equal(params[f"{ENC}.lora_B"].grad, torch.zeros(5, 2, dtype=torch.float64))


def test_equal_layers_add_up_and_other_shapes_are_grouped_apart() -> None:
    layers = [f"image_encoder.blocks.{i}.attn.qkv" for i in range(3)]
    anchors = {n: t for layer in layers for n, t in factors(layer, seed=1).items()} | factors(DEC, out=7, inner=3, seed=4)
    params = {n: t + 0.1 * torch.arange(t.numel()).double().reshape(t.shape) for n, t in anchors.items()}
    whole = FedIAT(sor_weight=1.0).penalty(LocalStep(params, anchors, {}))

    def part(layer: str) -> Tensor:
        own = {n: t for n, t in params.items() if n.startswith(layer)}
        return FedIAT(sor_weight=1.0).penalty(LocalStep(own, anchors, {}))

    assert torch.allclose(whole, 3 * part(layers[0]) + part(DEC))


def test_weight_zero_switches_sor_off() -> None:
    assert FedIAT(sor_weight=0.0).penalty(LocalStep({}, {}, {})) is None


def test_a_relative_epsilon_does_not_see_the_scale_of_the_factors() -> None:
    """Factors and moves a thousand times smaller: the same value; an absolute epsilon mutes it (Eq. 8 with norms of 1e-13)."""
    anchors = factors(ENC, seed=1)
    moved = {
        n: t + 1e-3 * torch.randn(t.shape, generator=torch.Generator().manual_seed(7)).double() for n, t in anchors.items()
    }
    found = {}
    for scale in ("relative", "absolute"):
        strategy = FedIAT(sor_weight=1.0, eps_scale=scale)
        both = [({n: t * c for n, t in moved.items()}, {n: t * c for n, t in anchors.items()}) for c in (1.0, 1e-3)]
        found[scale] = [float(strategy.penalty(LocalStep(params, start, {}))) for params, start in both]
    assert found["relative"][0] == pytest.approx(found["relative"][1], rel=1e-6)
    assert found["absolute"][1] < 1e-3 * found["absolute"][0]


def test_gradient_of_the_squared_cosine_by_finite_differences() -> None:
    shared = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    local = torch.randn(3, 2, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda s: squared_cosine(s, local, 1e-8), (shared,))
