"""Streams of random bytes and what is drawn from them: known vectors, laws by counting, and that streams stay apart."""

import itertools
import os
from collections import Counter

import pytest
from scipy.stats import chi2, chisquare

from consilium.privacy.randomness import Randomness, secret_below, secret_bytes


def test_a_stream_is_aes_256_in_counter_mode() -> None:
    """Blocks 0 and 1 under the key of zeros: J. Viega and D. McGrew, "GCM", test case 13, its hash key and its tag."""
    blocks = "dc95c078a2408989ad48a21492842087", "530f8afbc74536b9a963b4f1c4cb738b"
    stream = Randomness(bytes(32), private=True)
    assert stream(5) + stream(27) == bytes.fromhex("".join(blocks))


@pytest.mark.parametrize("width", [4, 8, 16])
def test_keys_that_agree_in_their_low_or_high_bytes_give_different_streams(width: int) -> None:
    key = bytes(range(32))
    for other in (bytes(32 - width) + key[-width:], key[:width] + bytes(32 - width)):
        one, two = (Randomness(found, private=True)(1 << 12) for found in (key, other))
        same = sum(a == b for a, b in zip(one, two, strict=True))
        assert same < 60  # of 4,096 bytes 16 agree by chance


def test_secret_streams_never_repeat_and_seeded_ones_do_and_say_so() -> None:
    one, other = Randomness.of(None), Randomness.of(None)
    assert one.private
    assert other.private
    assert one(32) != other(32)
    seeded = [Randomness.of(seed) for seed in (7, 7, 2**40 + 7)]
    assert not any(stream.private for stream in seeded)
    first, again, far = (stream(32) for stream in seeded)
    assert first == again != far
    assert not seeded[0].derive_stream("noise").private


def test_streams_of_two_purposes_are_others_and_do_not_move_each_other() -> None:
    stream = Randomness.of(1)
    noise, draws = stream.derive_stream("noise"), stream.derive_stream("draws")
    noise(1000)
    assert draws(16) == Randomness.of(1).derive_stream("draws")(16) != Randomness.of(1).derive_stream("noise")(16)


def test_a_forked_process_has_a_secret_stream_of_its_own() -> None:
    stream, noise = Randomness.of(None), Randomness.of(None)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, stream(16) + noise.derive_stream("x")(16))
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(read, 32)
    os.close(read)
    os.close(write)
    assert theirs[:16] != stream(16)
    assert theirs[16:] != noise.derive_stream("x")(16)


def test_whole_numbers_under_a_limit_are_uniform() -> None:
    stream = Randomness.of(2)
    for limit in (2, 5, 256, 257):
        counts = Counter(stream.below(limit) for _ in range(20 * limit + 2000))
        assert set(counts) <= set(range(limit))
        assert chisquare([counts[value] for value in range(limit)]).pvalue > 1e-4
    assert stream.below(1) == 0


def test_each_choice_is_as_likely_as_another() -> None:
    stream, pairs = Randomness.of(3), list(itertools.permutations("abcd", 2))
    counts = Counter(tuple(stream.choice("abcd", 2)) for _ in range(6000))
    assert chisquare([counts[pair] for pair in pairs]).pvalue > 1e-4
    assert sorted(stream.choice("abcd", 4)) == list("abcd")


def test_coins_fall_with_their_rate_each_on_its_own() -> None:
    stream, rounds = Randomness.of(4), 4000
    drawn = [tuple(stream.poisson_sample(3, 0.3)) for _ in range(rounds)]
    subsets = [subset for size in range(4) for subset in itertools.combinations(range(3), size)]
    expected = [rounds * 0.3 ** len(subset) * 0.7 ** (3 - len(subset)) for subset in subsets]
    counts = Counter(drawn)
    statistic = sum((counts[s] - e) ** 2 / e for s, e in zip(subsets, expected, strict=True))
    assert chi2.sf(statistic, len(subsets) - 1) > 1e-4


@pytest.mark.parametrize(("rate", "word", "takes_part"), [
    (0.5, 2**63 - 1, True), (0.5, 2**63, False), (2.0**-64, 0, True), (2.0**-64, 1, False), (1.0, 2**64 - 1, True),
    (2.0**-65, 0, False), (1 - 2.0**-53, 2**64 - 2**11 - 1, True), (1 - 2.0**-53, 2**64 - 2**11, False),
])  # fmt: skip
def test_a_coin_compares_64_bits_with_the_rate(
    rate: float, word: int, takes_part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Randomness, "__call__", lambda stream, count: word.to_bytes(8, "little"))
    assert Randomness.of(None).poisson_sample(1, rate) == ([0] if takes_part else [])


def test_the_systems_bytes_and_numbers_never_repeat() -> None:
    assert secret_bytes(16) != secret_bytes(16)
    assert secret_below(2**128) != secret_below(2**128)
    assert {secret_below(3) for _ in range(200)} == {0, 1, 2}
