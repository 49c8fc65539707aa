"""Means, intervals and ranks of a comparison, worked by hand."""

import itertools
import json
import math
from pathlib import Path

import pytest

from consilium.core.messages import Stage
from consilium.report.compare.score_statistics import comparisons, interval, patients_interval, ranks, scores_of
from consilium.report.compare.tables import comparison_tables, scores_table
from consilium.report.tables import markdown_text
from tests.report.runs import accuracy, change, group_of, made, make, note_in


def test_sites_on_one_test_split_are_one_pair_a_seed_and_none_narrows_the_other(tmp_path: Path) -> None:
    """The same three patients' test split at s0 and s1, another at s2: half widths of 0.06, 0.06 and 0.09."""
    folders = made(tmp_path, {"fedit": [[0.4, 0.4, 0.7]] * 2, "local_only": [[0.1, 0.3, 0.7]] * 2})
    for folder, losses in zip(folders, [(1.0, 1.0, 2.0)] * 2 + [(3.0, 4.0, 2.5)] * 2, strict=True):
        for site, loss, half in zip(("s0", "s1", "s2"), losses, (0.06, 0.06, 0.09), strict=True):
            at = json.loads((folder / "results.json").read_text())[site]["test/global/accuracy"]
            ends = {"test__global__accuracy_low": at - half, "test__global__accuracy_high": at + half}
            change(folder, site, test__global__loss=loss, test__pretrained__loss=0.5, **ends)
    table = accuracy(*folders)
    assert table.sites_by_test_split == [["s0", "s1"], ["s2"]]
    # the errors of s0 and s1 add up: sqrt((0.06 + 0.06)^2 + 0.09^2) / 3 = 0.15 / 3
    assert patients_interval(table, "fedit") == pytest.approx((0.45, 0.55))
    assert patients_interval(table, "local_only") == pytest.approx((1.1 / 3 - 0.05, 1.1 / 3 + 0.05))
    one = comparisons(table)[0]
    assert (one.pairs, one.wins, one.losses) == (4, 2, 0)  # not 6, of which 4
    assert one.difference == pytest.approx(0.4 / 3)
    assert "sites on one test split as one, others independent" in markdown_text(comparison_tables([table.group], Stage.GLOBAL))


def test_a_head_that_starts_at_zero_makes_no_common_test_split(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.2, 0.2]]})
    for site in ("s0", "s1"):
        change(folders[0], site, test__global__loss=math.log(5), test__pretrained__loss=math.log(5))
    assert accuracy(*folders).sites_by_test_split == [["s0"], ["s1"]]


def test_a_site_called_as_a_column_of_many_sites_is_not_taken_for_it(tmp_path: Path) -> None:
    table = accuracy(make(tmp_path / "a", {"worst site": 0.9, "s": 0.1}))
    assert table.scores_in_column("fedit", "worst site") == [0.9]
    many = accuracy(make(tmp_path / "b", {"worst site": 0.9, **{f"s{i}": 0.1 + i / 100 for i in range(20)}}))
    assert many.scores_in_column("fedit", "worst site") == [0.1]


def test_means_spread_and_weights_by_hand(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.2, 0.6], [0.4, 0.8]]})
    for folder in folders:
        change(folder, "s1", test__global__n=30.0)
    table = accuracy(*folders)
    assert table.means("fedit") == pytest.approx([0.4, 0.6])
    assert table.means("fedit", weighted=True) == pytest.approx([0.5, 0.7])  # (10 x 0.2 + 30 x 0.6) / 40
    row = comparison_tables([table.group], Stage.GLOBAL)[0].rows[1]
    assert row[:5] == ["fedit", "2/2", "0.300 ± 0.141", "0.700 ± 0.141", "0.500 ± 0.141"]


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_seed_without_all_sites_is_in_no_mean_and_what_is_missing_is_listed(score: float, tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.2, 0.6], [0.4, 0.8]], "ffa_lora": [[0.1, 0.1], [0.9, 0.9]], "fedprox": [[0.3, 0.3]]})
    change(folders[1], "s1", test__global__accuracy=score)
    results = json.loads((folders[2] / "results.json").read_text())
    (folders[2] / "results.json").write_text(json.dumps({"s0": results["s0"]}))
    table = accuracy(*folders)
    assert [table.means(m) for m in table.methods] == [pytest.approx([0.4]), pytest.approx([0.9]), pytest.approx([0.3])]
    assert table.missing == {
        ("fedit", "1", "s1"): "not finite",
        ("ffa_lora", "0", "s1"): "not scored there",
        ("fedprox", "1", "s0"): "no run with this seed",
        ("fedprox", "1", "s1"): "no run with this seed",
    }
    page = markdown_text(comparison_tables([table.group], Stage.GLOBAL))
    assert "| fedit | 1/2 | 0.300 ± 0.141 | 0.600\\* | 0.400\\* |" in page
    assert "| fedit | 1 | s1 | not finite |" in page


def test_the_bootstrap_over_few_seeds_is_over_all_resamples() -> None:
    values = [0.1, 0.4, 0.6]
    means = sorted(sum(chosen) / 3 for chosen in itertools.product(values, repeat=3))
    at = [q * 26 for q in (0.025, 0.975)]  # linear between the 27 means
    ends = [means[int(x)] + (x - int(x)) * (means[int(x) + 1] - means[int(x)]) for x in at]
    assert interval(values) == pytest.approx(tuple(ends))
    assert interval(values[:2]) is None
    low, high = interval([0.5] * 20) or (0, 0)
    assert (low, high) == pytest.approx((0.5, 0.5))


def test_patients_interval_by_hand(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.4, 0.6]]})
    change(folders[0], "s0", test__global__accuracy_low=0.34, test__global__accuracy_high=0.46)
    change(folders[0], "s1", test__global__accuracy_low=0.52, test__global__accuracy_high=0.68)
    # half widths 0.06 and 0.08 of two independent sites: sqrt(0.0036 + 0.0064) / 2 = 0.05
    assert patients_interval(accuracy(*folders), "fedit") == pytest.approx((0.45, 0.55))


def test_an_interval_over_patients_stays_where_scores_can_be(tmp_path: Path) -> None:
    """Five pictures a site of which one, or two, are right: percentile bootstraps of 0 to 0.6 and 0 to 0.8."""
    folders = made(tmp_path, {"fedit": [[0.2, 0.4]], "fedprox": [[0.0, 0.0]]})
    for site, high in (("s0", 0.6), ("s1", 0.8)):
        change(folders[0], site, test__global__accuracy_low=0.0, test__global__accuracy_high=high)
        change(folders[1], site, test__global__accuracy_low=0.1, test__global__accuracy_high=0.0)  # no score of its own below
    # mean 0.3; below 0.2 and 0.4: sqrt(0.04 + 0.16) / 2; above 0.4 twice: sqrt(0.16 + 0.16) / 2
    ends = (0.3 - math.sqrt(0.2) / 2, 0.3 + math.sqrt(0.32) / 2)
    assert patients_interval(accuracy(*folders), "fedit") == pytest.approx(ends)
    assert ends[0] > 0
    assert patients_interval(accuracy(*folders), "fedprox") == (0.0, 0.0)


def test_ranks_share_places_and_less_is_better_for_losses(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.9, 0.5]], "ffa_lora": [[0.9, 0.7]], "fedprox": [[0.1, 0.6]]})
    assert ranks(accuracy(*folders)) == ({"fedit": 2.25, "ffa_lora": 1.25, "fedprox": 2.5}, 2)
    for folder, loss in zip(folders, (1.0, 2.0, 3.0), strict=True):
        for site in ("s0", "s1"):
            change(folder, site, test__global__loss=loss)
    assert ranks(scores_of(group_of(*folders), Stage.GLOBAL, "loss"))[0] == {"fedit": 1.0, "ffa_lora": 2.0, "fedprox": 3.0}


def test_means_that_differ_by_rounding_alone_share_their_rank(tmp_path: Path) -> None:
    """The sums of .1 .2 .3 and of .2 .2 .2 differ in their last bit."""
    folders = made(tmp_path, {"fedit": [[0.1], [0.2], [0.3]], "ffa_lora": [[0.2], [0.2], [0.2]]})
    assert ranks(accuracy(*folders))[0] == {"fedit": 1.5, "ffa_lora": 1.5}


def test_a_weighted_mean_is_of_all_seeds_or_none(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.9, 0.5], [0.1, 0.1]]})
    assert accuracy(*folders).means("fedit", weighted=True) == [pytest.approx(0.7), pytest.approx(0.1)]
    path = folders[1] / "results.json"
    results = json.loads(path.read_text())
    del results["s0"]["test/global/n"]
    path.write_text(json.dumps(results))
    assert accuracy(*folders).means("fedit", weighted=True) == []


def test_sites_that_only_test_are_in_no_mean_rank_or_test(tmp_path: Path) -> None:
    """Means over a and b: .5 and .6. At the site that only tests, the first is far better."""
    scores = {"fedit": (0.4, 0.6, 0.9), "ffa_lora": (0.5, 0.7, 0.1)}
    runs = [make(tmp_path / name, dict(zip("abs", values, strict=True)), name) for name, values in scores.items()]
    table = accuracy(*(note_in(run, {"event": "joined", "site": "s", "round": 0, "test_only": True}) for run in runs))
    assert table.sites == ["a", "b", "s"]
    assert table.averaged_sites == ["a", "b"]
    first, second = table.methods
    assert table.means(first) == pytest.approx([0.5])
    assert table.means(second) == pytest.approx([0.6])
    assert ranks(table) == ({first: 2.0, second: 1.0}, 2)
    sheet = scores_table(table, scores_of(table.group, Stage.PRETRAINED, "accuracy"))
    assert "test only, in no mean, rank or test: s" in sheet.notes
    assert {"0.900", "0.100"} <= {cell for row in sheet.rows for cell in row}


def test_where_less_is_better_the_worst_site_has_the_most(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", {f"s{i}": 0.5 for i in range(21)})
    for i in range(21):
        change(folder, f"s{i}", test__global__loss=1.0 + i)
    table = scores_of(group_of(folder), Stage.GLOBAL, "loss")
    assert [table.scores_in_column(table.methods[0], heading) for heading in table.columns] == [[21.0], [11.0], [1.0]]
