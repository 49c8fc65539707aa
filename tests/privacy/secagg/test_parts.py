"""The parts by hand: the grid and its bound, Shamir's shares, what is signed, terms, masks."""

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings, strategies as st

from consilium.core.errors import RefusedError
from consilium.core.messages import Payload
from consilium.privacy.secagg import sealing
from consilium.privacy.secagg.arithmetic import UNIT, flatten, largest_value, layout, quantize, unflatten, vector_length
from consilium.privacy.secagg.sealing import encode_fields, is_signed_by, sign
from consilium.privacy.secagg.terms import Terms, hash_sent_tensors, terms_of
from tests.privacy.secagg.conftest import NOISE, secure_config


def test_numbers_go_to_the_nearest_point_of_the_grid_and_integers_stay() -> None:
    found = quantize({"x": torch.tensor([1.0, -0.5, 2.0**-36, 0.4 * 2.0**-36, -1.6 * 2.0**-36], dtype=torch.float64)})
    assert found["x"].tolist() == [2**36, -(2**35), 1, 0, -2]
    noisy = torch.tensor([7, -(2**50) - 1])  # a double has no such number
    assert quantize({"x": noisy})["x"] is noisy


def test_a_hundred_sites_of_the_largest_weight_send_numbers_under_10_24() -> None:
    """2^62 / (100 * 65,536) units of 2^-36 are 10.24, by hand."""
    assert largest_value(None, 100, 65_536) * UNIT == pytest.approx(10.24, abs=1e-10)
    assert largest_value(10.2, 100, 65_536) == int(10.2 / UNIT)
    with pytest.raises(RefusedError, match=r"could wrap; at most 10\.24"):
        largest_value(10.3, 100, 65_536)


def test_the_largest_numbers_of_all_sites_together_do_not_wrap() -> None:
    most, weight, sites = largest_value(None, 3, 5), 5, 3
    words = flatten({"x": torch.tensor([most, -most])}, weight, most)
    total, weights = unflatten(words * np.uint64(sites), [("x", (2,))])
    assert total["x"].tolist() == [3 * 5 * most, -3 * 5 * most]
    assert weights == 15


def test_numbers_over_the_bound_are_cut_off_at_it(caplog: pytest.LogCaptureFixture) -> None:
    """Of the smallest integer there is no absolute value in 64 bits."""
    words = flatten({"x": torch.tensor([-(2**63), -11, 7, 2**63 - 1])}, 3, 10)
    assert words.view(np.int64).tolist() == [-30, -30, 21, 30, 3]
    assert "were cut off" in caplog.text
    assert "secure_aggregation.bound" in caplog.text


def test_tensors_stand_in_a_vector_by_name_and_the_weight_last() -> None:
    words = flatten({"b": torch.tensor([[3], [4]]), "a": torch.tensor([1, -2])}, 10, 100)
    assert words.view(np.int64).tolist() == [10, -20, 30, 40, 10]
    order = layout({"b": (2, 1), "a": (2,)})
    assert vector_length(order) == 5
    tensors, weight = unflatten(words, order)
    assert tensors["b"].tolist() == [[30], [40]]
    assert (tensors["a"].tolist(), weight) == ([10, -20], 10)


def test_shares_are_the_polynomial_at_one_two_three() -> None:
    """42 + 7 x + 3 x^2, by hand; and 5 - x, whose values under 0 wrap at the prime."""
    assert sealing.share(42, 3, 4, [7, 3]) == [52, 68, 90, 118]
    assert sealing.share(0, 2, 2, [sealing.PRIME - 1]) == [2**521 - 2, 2**521 - 3]
    assert sealing.reconstruct({1: 52, 2: 68, 4: 118}) == 42
    assert sealing.reconstruct({4: 118, 3: 90, 2: 68}) == 42


@settings(max_examples=20, deadline=None)
@given(secret=st.integers(0, 2**256 - 1), other=st.integers(0, 2**256 - 1))
def test_a_share_fewer_fits_every_secret(secret: int, other: int) -> None:
    """Two of three shares: for any other secret there is a third share that gives it, so they tell nothing."""
    shares = sealing.share(secret, 3, 5)
    assert sealing.reconstruct({1: shares[0], 3: shares[2], 5: shares[4]}) == secret
    # the value at 5 of the parabola through (0, other), (1, s1), (3, s3), by Lagrange's weights at 5: 8/3, -5, 10/3
    third = pow(3, -1, sealing.PRIME)
    fitting = (8 * third * other - 5 * shares[0] + 10 * third * shares[2]) % sealing.PRIME
    assert sealing.reconstruct({1: shares[0], 3: shares[2], 5: fitting}) == other


def test_what_is_signed_begins_as_no_text_does_and_fields_do_not_run_together() -> None:
    raw = encode_fields("confirm", b"ab", b"c")
    assert raw == (
        b"\xff"
        + b"\0" * 7
        + b"\x12consilium-secagg-1"
        + b"\0" * 7
        + b"\x07confirm"
        + b"\0" * 7
        + b"\x02ab"
        + b"\0" * 7
        + b"\x01c"
    )
    with pytest.raises(UnicodeDecodeError):
        raw.decode()
    assert encode_fields("confirm", b"a", b"bc") != raw


def test_a_signature_is_of_one_type_and_one_message(keys: dict[str, rsa.RSAPrivateKey]) -> None:
    signature = sign(keys["a"], "confirm", b"x", b"y")
    assert is_signed_by(keys["a"].public_key(), signature, "confirm", b"x", b"y")
    assert not is_signed_by(keys["a"].public_key(), signature, "reveal", b"x", b"y")
    assert not is_signed_by(keys["a"].public_key(), signature, "confirm", b"xy", b"")
    assert not is_signed_by(keys["b"].public_key(), signature, "confirm", b"x", b"y")
    assert not is_signed_by(keys["a"].public_key(), "no hex digits", "confirm", b"x", b"y")


def test_a_mask_is_the_key_stream_as_little_endian_words() -> None:
    """AES-256 in counter mode from 0: NIST's zero key gives dc95c078a2408989 ad48a21492842087 first (FIPS 197, ECB of 0)."""
    assert [int(word) for word in sealing.mask(bytes(32), 2)] == [
        int.from_bytes(bytes.fromhex("dc95c078a2408989"), "little"),
        int.from_bytes(bytes.fromhex("ad48a21492842087"), "little"),
    ]
    key = bytes(range(32))
    block = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update((1).to_bytes(16, "big"))
    assert sealing.mask(key, 4)[2:].tobytes() == block


def test_two_sites_have_one_key_and_a_point_of_small_order_none() -> None:
    one, two = sealing.new_key(), sealing.new_key()
    left = sealing.pair_key(one, sealing.public_key_of(two), "mask", b"context", ("a", "b"))
    assert left == sealing.pair_key(two, sealing.public_key_of(one), "mask", b"context", ("b", "a"))
    assert left != sealing.pair_key(one, sealing.public_key_of(two), "seal", b"context", ("a", "b"))
    assert left != sealing.pair_key(one, sealing.public_key_of(two), "mask", b"another", ("a", "b"))
    with pytest.raises(RefusedError, match="no key"):
        sealing.pair_key(one, "00" * 32, "mask", b"context", ("a", "b"))


def test_shares_open_for_their_receiver_in_their_context_only() -> None:
    key = bytes(32)
    sealed = sealing.seal(key, b"shares", b"context", "a", "b")
    assert sealing.unseal(key, sealed, b"context", "a", "b") == b"shares"
    flipped = sealed[:-1] + ("0" if sealed[-1] != "0" else "1")
    for text, context, sender, receiver in (
        (sealed, b"another", "a", "b"),
        (sealed, b"context", "c", "b"),
        (sealed, b"context", "a", "c"),
        (flipped, b"context", "a", "b"),
        ("zz", b"context", "a", "b"),
    ):
        with pytest.raises(RefusedError, match="not as they were sealed"):
            sealing.unseal(key, text, context, sender, receiver)


@pytest.mark.parametrize(
    ("asked", "section", "expected"),
    [(3, {}, (3, 3)), (4, {}, (3, 3)), (5, {}, (4, 4)), (12, {}, (9, 9)), (100, {}, (67, 67)), (5, {"colluders": 2}, (4, 4))],
)
def test_the_default_threshold_is_two_thirds_and_one(asked: int, section: dict, expected: tuple[int, int]) -> None:
    found = terms_of(secure_config(**section), asked)
    assert (found.threshold, found.least) == expected
    assert found == Terms(asked, *expected, section.get("colluders", 1))
    assert found.least_honest_sites == expected[1] - section.get("colluders", 1)


@pytest.mark.parametrize(
    "privacy",
    [
        None,
        NOISE | {"noise_multiplier": 0.0},
        NOISE | {"noise_multiplier": 0.049},  # the ledger counts it as none
        NOISE | {"trust": "central"},  # the server adds it to what it has
        {"unit": "site", "epsilon": 1, "clip": 0.3, "calibration": "paper", "sites": 12, "samples": 6400},
    ],
)
def test_without_noise_a_sum_is_of_all_that_are_asked(privacy: dict | None) -> None:
    found = terms_of(secure_config(privacy), 12)
    assert (found.threshold, found.least) == (9, 12)


def test_noise_lets_a_sum_lack_a_site() -> None:
    for more in ({"trust": "local"}, {"trust": "distributed"}, {"noise_multiplier": 0.05}):
        assert terms_of(secure_config(NOISE | more), 12).least == 9


@pytest.mark.parametrize(
    ("asked", "section", "why"),
    [
        (2, {}, "could show one site"),  # t = 2, c = 1
        (4, {"threshold": 4, "colluders": 3}, "could show one site"),
        (6, {"threshold": 3}, "could both be opened"),  # 6 <= 6 + 1
        (5, {"threshold": 3}, "could both be opened"),  # 6 <= 5 + 1
        (3, {"threshold": 4}, "needs 4 sites"),
    ],
)
def test_terms_that_protect_nobody_are_refused(asked: int, section: dict, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        terms_of(secure_config(**section), asked)


def test_a_site_answers_for_all_that_it_was_sent_but_a_tail_that_one_matrix_replaced() -> None:
    """Layer 1's tail and what stays at a site are not sent again, and count; so does a matrix if factors came after it."""
    first = {f"{layer}.{part}" for layer in ("1", "10") for part in ("lora_A", "tail_A", "tail_B", "gate")} | {"1.lora_B"}
    before = hash_sent_tensors(Payload(0, 0, {name: torch.zeros(1) for name in first}), {})
    found = hash_sent_tensors(Payload(1, 0, {"10.lora_A": torch.ones(1), "10.tail_whole": torch.ones(1)}), before)
    assert found.keys() == first - {"10.tail_A", "10.tail_B", "10.gate"} | {"10.tail_whole"}
    assert {name for name, one in found.items() if before.get(name) != one} == {"10.lora_A", "10.tail_whole"}
    assert "10.tail_whole" in hash_sent_tensors(Payload(2, 0, {"10.tail_A": torch.ones(1)}), found)
