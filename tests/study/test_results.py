"""The tables of RESULTS.md that come from studies: effects, stored measures, and that the page has what they make."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.config.job import load_job, parse_override
from consilium.core.low_rank_sums import Update
from consilium.study.definition import Cell, cell_digest, load
from consilium.study.records import CellRecord
from tests.benchmarks import results
from tests.benchmarks.claims import Claim
from tests.benchmarks.effects import DICE, EFFECTS, Best, Effect, Side
from tests.benchmarks.measured import MEASURE, NOISE, Rows, collected, keep, measured, read
from tests.benchmarks.spectrum import shares
from tests.conftest import JOBS


def rows_of(values: dict[str, list[float]]) -> Rows:
    """Return rows of a score of methods, a value per seed."""
    return {
        (("seed", str(seed)), ("method", method), (MEASURE, "dice")): value
        for method, one in values.items()
        for seed, value in enumerate(one)
    }


def effect(expect: Side = "above 0", **more: Any) -> Effect:
    return Effect("a minus b", "dice", ({"method": "a"},), ({"method": "b"},), expect, **more)


def test_an_effect_is_paired_by_seed_and_has_the_t_interval_of_the_book() -> None:
    rows = rows_of({"a": [0.5, 0.7, 0.9], "b": [0.4, 0.5, 0.6, 0.1]})  # differences 0.1, 0.2, 0.3; t(0.975, 2) = 4.3027
    found = results.differences(rows, effect())
    assert [round(one, 9) for one in found.values()] == [0.1, 0.2, 0.3]
    assert results.interval(found) == pytest.approx((0.2, 4.3027 * 0.1 / 3**0.5), abs=1e-5)
    assert results.row(rows, effect()) == [
        "a minus b", "0.700", "+0.200 ± 0.248", "3 of 3", "above 0", "not shown"
    ]  # fmt: skip


WORDS: dict[Side, tuple[str, str, str]] = {
    "above 0": ("shown", "opposite: below 0", "not shown"),
    "below 0": ("opposite: above 0", "shown", "not shown"),
    "0": ("differs: above 0", "differs: below 0", "contains 0"),
}


@pytest.mark.parametrize("expect", WORDS)
def test_a_verdict_follows_from_where_the_interval_lies(expect: Side) -> None:
    found = [results.verdict(effect(expect), mean, half, 3) for mean, half in ((0.2, 0.1), (-0.2, 0.1), (0.2, 0.3))]
    assert [one.strip("*") for one in found] == [*WORDS[expect]]
    assert results.verdict(effect(expect), 0.2, 0.1, 2) == "too few seeds"


def test_effects_share_a_row_and_have_a_column_each() -> None:
    rows = rows_of({"a": [0.5, 0.7, 0.9], "b": [0.4, 0.5, 0.6], "c": [0.5, 0.6, 0.4]})
    found = [Effect("a's lead", "dice", ({"method": "a"},), ({"method": other},), column=f"over {other}") for other in "bc"]
    found.append(Effect("b's lead", "dice", ({"method": "b"},), ({"method": "c"},), "0", column="over c"))
    assert results.effects_by_column(rows, found).splitlines() == [
        "| effect (expected above 0) | over b | over c |",
        "| --- | --- | --- |",
        "| a's lead | 0.700: +0.200 ± 0.248, not shown (3 of 3) | 0.700: +0.200 ± 0.657, not shown (2 of 3) |",
        "| b's lead (expected 0) | - | 0.500: +0.000 ± 0.430, contains 0 (1 of 3) |",
    ]


def test_a_difference_of_differences_and_a_level() -> None:
    rows = rows_of({"a": [1.0, 2.0], "b": [0.5, 0.25], "c": [0.25, 0.5], "d": [0.125, 1.0]})
    both = Effect("", "dice", ({"method": "a"}, {"method": "d"}), ({"method": "b"}, {"method": "c"}))
    assert results.differences(rows, both) == {"0": 0.375, "1": 2.25}
    assert results.differences(rows, Effect("", "dice", ({"method": "a"},), level=0.5)) == {"0": 0.5, "1": 1.5}


def test_of_several_cells_the_best_of_what_is_there_counts_and_is_named() -> None:
    rows = rows_of({"a": [0.25, 0.5], "b": [0.5, 0.5], "c": [0.125, 0.25]})
    several = Best(tuple({"method": name} for name in ("a", "b", "missing")))
    row = results.row(rows, Effect("best minus c", "dice", (several,), ({"method": "c"},)))
    assert row[:4] == ["best minus c (b)", "0.500", "+0.312 ± 0.794", "2 of 2"]  # t(0.975, 1) = 12.706
    assert results.differences(rows, Effect("", "dice", (Best(({"method": "missing"},)),))) == {}


def test_iat_is_said_to_grow_against_each_other_split_as_its_rule_has_it() -> None:
    grows = [one for one in EFFECTS["claim_iat"] if one.about.startswith("growing")]
    assert {(one.plus[0]["shift"], one.minus[0]["split"]) for one in grows if isinstance(one.plus[0], dict)} == {
        (shift, split) for shift in ("appearance", "annotation") for split in ("M1", "M2", "M3")
    }  # fmt: skip


def test_effects_without_cells_are_named_below_the_table(tmp_path: Path) -> None:
    assert results.effects("quickstart_cells", tmp_path).startswith("Did not run: FedIT + prior + kept state minus local only")
    names = ("FedIT + prior + kept state", "local only")
    cells = {(("method", name), ("seed", seed)): 0.5 for name in names for seed in "123"}
    keep("quickstart_cells", {(*key, (MEASURE, "test/global/accuracy")): one for key, one in cells.items()}, tmp_path)
    page = results.effects("quickstart_cells", tmp_path)
    assert page.splitlines()[2].startswith("| FedIT + prior + kept state minus local only, accuracy | 0.500 | +0.000 ± 0.000 |")
    assert page.endswith("\nDid not run: FedIT + prior + kept state minus FedIT, accuracy.\n")


def test_finished_cells_are_kept_and_others_stay(tmp_path: Path) -> None:
    cells = load("quickstart_cells", workspace=tmp_path).cells()
    done, failed = cells[0], cells[1]
    for cell, state, accuracies in ((done, "done", (0.25, 0.75)), (failed, "failed", (1.0, 1.0))):
        cell.folder.mkdir(parents=True)
        CellRecord(state, seconds=12.34).save(cell.folder)  # type: ignore[arg-type]
        scores = {f"site-{i}": {"test/global/accuracy": value} for i, value in enumerate(accuracies)} | {"untested": {}}
        (cell.folder / "results.json").write_text(json.dumps(scores))
    wanted = {"test/global/accuracy": [done.labels], "test/global/loss": [{"method": "nothing"}]}
    labels = tuple(done.labels.items())
    assert measured(done, "test/global/accuracy at site-1") == 0.75
    rows = {(*labels, (MEASURE, "test/global/accuracy")): 0.5, (*labels, (MEASURE, "seconds")): 12.3}
    assert collected(cells, wanted) == rows
    before = {(*((axis, "9") for axis, _ in labels), (MEASURE, "seconds")): 1.0}
    keep("tiny", before, tmp_path)
    keep("tiny", rows, tmp_path)
    assert read("tiny", tmp_path) == before | rows


STEPS = {"unit": "record", "trust": "distributed", "sample_rate": 0.1, "divisor": 10, "noise_multiplier": 2, "clip": 0.5}
PRIVATE: dict[str, tuple[dict[str, Any] | None, int, float]] = {
    "none": (None, 40, 0.0),
    "by the step, 2 shares of 3 counted": (STEPS, 1, 2 * (400 * 3 / 2) ** 0.5 / 10),
    "at each site, 8 of 40 drawn": ({"unit": "record", "noise_multiplier": 2, "clip": 0.5}, 40, 2 * 20 / 8),
    "site level": ({"unit": "site", "noise_multiplier": 2, "clip": 0.5}, 1, 2 * 20 / 3**0.5),
}
"""A job's privacy, the units that a site tells, and the noise over the signal of 400 numbers of 3 sites, worked by hand."""


@pytest.mark.parametrize("privacy", PRIVATE)
def test_noise_over_signal_is_what_a_page_of_arithmetic_says(privacy: str, tmp_path: Path) -> None:
    section, units, ratio = PRIVATE[privacy]
    plain = ("training.local_steps=1", "training.optimizer_state=fresh", "task.balance=none")
    events: list[dict[str, Any]] = [{"event": "parameters", "shared": 400}]
    events += [{"event": "result", "round": number, "phase": 0, "weight": units} for number in (0, 0, 0, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    (tmp_path / "results.json").write_text("{}")
    base, texts = JOBS / "quickstart_secagg" / "app" / "config" / "job.yaml", [f"privacy={json.dumps(section)}", *plain]
    config = load_job(base, dict(map(parse_override, texts)))
    cell = Cell(cell_digest(config, "", ""), {}, texts, tmp_path, base)
    assert measured(cell, NOISE) == pytest.approx(ratio)


@pytest.mark.parametrize("study", EFFECTS)
def test_effects_name_what_their_study_has(study: str) -> None:
    config = load(study).config
    for one in EFFECTS[study]:
        for labels in one.cells:
            assert all(value in config.axes[axis] for axis, value in labels.items()), labels


def test_the_tables_of_the_page_are_what_was_measured() -> None:
    page = results.PAGE.read_text()
    assert results.renewed(page, None, []) == page, "run python -m tests.benchmarks.results"
    assert {match["study"] for match in results.BLOCK.finditer(page)} - {None} == set(EFFECTS)
    assert page.count("<!-- made by results:") == len(results.BLOCK.findall(page)) == page.count("<!-- end -->")


@pytest.mark.parametrize(
    ("eight", "thousand", "said"),
    [
        ([0.19, 0.2, 0.21], [0.0, 0.1, -0.1], "shown"),
        ([0.19, 0.2, 0.21], [0.1, 0.1, 0.11], "partly shown"),
        ([0.1, 0.2, 0.4], [0.1, 0.1, 0.11], "not shown"),
    ],
)
def test_a_claim_holds_if_all_its_effects_are_as_they_should(
    tmp_path: Path, eight: list[float], thousand: list[float], said: str
) -> None:
    """Differences over 0 at epsilon 8, by their t interval of the book (4.3027 at three seeds), and none at 1000."""
    rows: Rows = {
        (("epsilon", epsilon), ("regulator", side), ("seed", str(seed)), (MEASURE, DICE)): value if side == "on" else 0.0
        for epsilon, values in (("8", eight), ("1000", thousand))
        for seed, value in enumerate(values)
        for side in ("on", "off")
    }
    keep("claim_deer_noise", rows, tmp_path)
    by = {epsilon: f"epsilon {epsilon}: regulator on minus off, Dice" for epsilon in ("8", "1000")}
    row = results.claimed(Claim("noise", "claim_deer_noise", by, "in words"), tmp_path)
    assert row[:2] == ["noise", f"**{said}**: in words"]
    if said == "shown":
        assert row[2:] == ["8 +0.200 ± 0.025; 1000 +0.000 ± 0.248", "3"]


@pytest.mark.parametrize("dense", [False, True])
def test_shares_of_energy_are_those_of_squared_singular_values(dense: bool) -> None:
    """Values 3, 1, 1, 1 and 1, 1, 1, 1 of two layers: 9/12 and 1/4 in the first rank, 10/12 and 2/4 in the first two."""
    diagonals = [torch.tensor([3.0, 1, 1, 1]).diag(), torch.eye(4)]
    wide = [torch.nn.functional.pad(one, (0, 5, 0, 4)) for one in diagonals]
    none = torch.zeros(8, 0), torch.zeros(0, 9)
    updates = {str(n): Update(*none, one) if dense else Update(one, torch.eye(9)) for n, one in enumerate(wide)}
    one, two, four, eight = shares(updates)
    assert one == pytest.approx((1 / 2, 1 / 4, 3 / 4))
    assert two == pytest.approx((2 / 3, 1 / 2, 5 / 6))
    assert four == eight == pytest.approx((1, 1, 1))
