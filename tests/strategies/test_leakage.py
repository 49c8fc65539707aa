"""Proposition 3.2's two parts: a case by hand, and the printed sums on dense matrices."""

import pytest
import torch

from consilium.strategies.heterogeneity_leakage import LocalUpdate, drift_and_leakage

ENC, DEC = "image_encoder.blocks.0.attn.qkv", "mask_decoder.transformer.layers.0.self_attn.q_proj"


def factors(a: torch.Tensor, b: torch.Tensor, layer: str = ENC) -> dict[str, torch.Tensor]:
    return {f"{layer}.lora_A": a, f"{layer}.lora_B": b}


def scalar(a: float, b: float) -> dict[str, torch.Tensor]:
    return factors(torch.tensor([[a]]), torch.tensor([[b]]))


def test_two_sites_of_single_numbers_by_hand() -> None:
    """A1 = 1, A2 = 3, weights 1 and 1: Abar = 2. B goes from 1 to 2 and to 0, A stays: G1 = 2 - 1 = 1, G2 = 0 - 3 = -3.

    Common: (1 - 3) / 2 * 2 = -2. Leakage: (1 * (1 - 2) - 3 * (3 - 2)) / 2 = -2. Their sum is -4, which is
    (1 * 1 - 3 * 3) / 2. With weights 3 and 1: Abar = 1.5, common (3 * 1 - 3) / 4 * 1.5 = 0, leakage
    (3 * 1 * (-.5) - 3 * 1.5) / 4 = -1.5.
    """
    ends = {"one": (scalar(1, 1), scalar(1, 2)), "two": (scalar(3, 1), scalar(3, 0))}
    even = drift_and_leakage({name: LocalUpdate(*pair, 1) for name, pair in ends.items()}, {ENC: "B"})
    assert even["proposition 3.2/common drift"] == pytest.approx(2)
    assert even["proposition 3.2/leakage"] == pytest.approx(2)
    assert even["leaked share/of both"] == pytest.approx(0.5)
    assert even["assumption 3.3/smallest singular value"] == pytest.approx(1)
    uneven = drift_and_leakage({name: LocalUpdate(*pair, 3 if name == "one" else 1) for name, pair in ends.items()}, {ENC: "B"})
    assert uneven["proposition 3.2/common drift"] == pytest.approx(0)
    assert uneven["proposition 3.2/leakage"] == pytest.approx(1.5)
    assert uneven["leaked share/of both"] == pytest.approx(1)
    still = drift_and_leakage({"one": LocalUpdate(scalar(1, 1), scalar(1, 1), 1)}, {ENC: "B"})
    assert still["leaked share/of both"] == 0


def test_both_sharings_equal_the_printed_sums_on_dense_gradients() -> None:
    draw = torch.Generator().manual_seed(0)

    def random(layer: str, out: int, into: int) -> dict[str, torch.Tensor]:
        return factors(torch.randn(2, into, generator=draw), torch.randn(out, 2, generator=draw), layer)

    shapes, weights = {ENC: (5, 4), DEC: (3, 6)}, {"a": 1, "b": 2, "c": 5}
    moves = {}
    for name, weight in weights.items():
        pair = [{n: t for layer, shape in shapes.items() for n, t in random(layer, *shape).items()} for _ in range(2)]
        moves[name] = LocalUpdate(pair[0], pair[1], weight)
    common, leaked = 0.0, 0.0
    for layer, which in {ENC: "B", DEC: "A"}.items():
        private = f"{layer}.lora_{'A' if which == 'B' else 'B'}"
        mean = sum(weights[n] / 8 * one.start[private].double() for n, one in moves.items())
        parts = [0.0, 0.0]
        for n, one in moves.items():
            change = [s[f"{layer}.lora_B"].double() @ s[f"{layer}.lora_A"].double() for s in (one.start, one.end)]
            gradient = change[1] - change[0]
            for i, factor in enumerate((mean, one.start[private].double() - mean)):
                parts[i] = parts[i] + weights[n] / 8 * (gradient @ factor.T if which == "B" else factor.T @ gradient)
        common, leaked = common + float(parts[0].square().sum()), leaked + float(parts[1].square().sum())
    found = drift_and_leakage(moves, {ENC: "B", DEC: "A"})
    assert found["proposition 3.2/common drift"] == pytest.approx(common**0.5, rel=1e-9)
    assert found["proposition 3.2/leakage"] == pytest.approx(leaked**0.5, rel=1e-9)
    least = min(float(torch.linalg.matrix_norm(t.double(), -2)) for one in moves.values() for t in one.start.values())
    assert found["assumption 3.3/smallest singular value"] == pytest.approx(least, rel=1e-9)


def test_equal_private_factors_leak_nothing_and_assumption_3_3_fails_at_zero() -> None:
    """The paper's first vanishing condition; B = 0, where every run starts, has no singular value over 0."""
    a, b = torch.eye(2), torch.zeros(3, 2)
    found = drift_and_leakage({n: LocalUpdate(factors(a, b), factors(a, b + k), 1) for k, n in enumerate("xyz")}, {ENC: "B"})
    assert found["proposition 3.2/leakage"] == 0
    assert found["assumption 3.3/smallest singular value"] == 0
