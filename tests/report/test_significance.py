"""Paired tests by counting all signs, and their correction."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from consilium.core.messages import Stage
from consilium.report.compare.score_statistics import comparisons, holm, p_value
from consilium.report.compare.tables import comparison_tables, p_text
from consilium.report.tables import markdown_text
from tests.report.runs import accuracy, change, group_of, made


def signed_rank(differences: Sequence[float]) -> float:
    """Return Wilcoxon's exact two-sided p by counting all signs; no ties, no zeros."""
    order = sorted(map(abs, differences))
    sums = [sum(s * (i + 1) for i, s in enumerate(signs)) for signs in itertools.product((0, 1), repeat=len(order))]
    plus = sum(order.index(abs(d)) + 1 for d in differences if d > 0)
    least = min(plus, sum(range(1, len(order) + 1)) - plus)
    return min(1.0, 2 * sum(one <= least for one in sums) / len(sums))


def test_the_paired_test_is_that_of_all_signs(tmp_path: Path) -> None:
    gaps = [0.11, 0.02, -0.03, 0.07, 0.05, 0.13, 0.01, 0.09]
    folders = made(tmp_path, {"fedit": [[0.5 + g for g in gaps]], "ffa_lora": [[0.5] * 8]})
    (one,) = comparisons(accuracy(*folders))
    assert (one.pairs, one.wins, one.losses) == (8, 7, 1)
    assert one.difference == pytest.approx(sum(gaps) / 8)
    assert one.p == one.holm == pytest.approx(signed_rank(gaps))


def test_only_common_pairs_are_tested_and_too_few_are_not(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.5] * 6], "ffa_lora": [[0.6] * 6], "fedprox": [[0.7] * 6]})
    change(folders[2], "s3", test__global__accuracy=math.nan)
    found = {(c.one, c.other): c for c in comparisons(accuracy(*folders))}
    assert {key: (c.pairs, c.p is None) for key, c in found.items()} == {
        ("fedit", "ffa_lora"): (6, False),
        ("fedit", "fedprox"): (5, True),
        ("ffa_lora", "fedprox"): (5, True),
    }
    only = comparisons(accuracy(*folders), "fedprox")
    assert [(c.one, c.other) for c in only] == [("fedit", "fedprox"), ("ffa_lora", "fedprox")]
    assert "too few: under 6 pairs" in markdown_text(comparison_tables([group_of(*folders)], Stage.GLOBAL))


def test_equal_scores_have_p_1() -> None:
    import numpy as np

    tied = np.array([0.0] * 10 + [0.02, 0.04, 0.06, 0.08, 0.1])  # five signs: 2 / 2^5
    assert p_value(tied) == pytest.approx(0.0625)
    assert p_value(np.zeros(9)) == 1.0


def test_holms_correction_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])  # 4 x .01, then 3 x .03 holds for 2 x .04
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_p_that_is_no_number_is_not_the_smallest() -> None:
    assert [p_text(value) for value in (math.nan, 0.0004, None, 0.05)] == ["-", "<0.001", "too few", "0.050"]
