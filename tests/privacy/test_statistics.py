"""What may leave of counts: no small cell, nor one that can be worked out from the others, even knowing the rule."""

from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from consilium.config.job import JobConfig
from consilium.core.errors import Reason, RefusedError
from consilium.data.stats import LENGTHS, SIZES, SPACING, Tally, grey_bin_names
from consilium.privacy import disclosure_control
from consilium.privacy.disclosure_control import (
    Terms,
    answer_once,
    disclose,
    merge_small_cells,
    question_hash,
    releasable_classes,
)
from tests.conftest import small_cells, small_config


def cells(counts: tuple[int, ...]) -> tuple[dict[str, list[int]], list[str]]:
    """Return cells of so many samples, each of somebody else."""
    found, people = {}, 0
    for name, count in zip("abcdefgh", counts, strict=False):
        found[name] = list(range(people, people + count))
        people += count
    return found, [f"person-{i}" for i in range(people)]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((12, 30), [("a",), ("b",)]),
        ((3, 30), [("a", "b")]),  # the total minus the 30 would be the 3
        ((30, 3), [("a", "b")]),
        ((30, 0, 3), [("a", "b", "c")]),
        ((30, 0, 12), [("a",), ("b",), ("c",)]),
        ((4, 0, 6, 11), [("a", "b", "c"), ("d",)]),
        ((0, 10, 9, 10, 1), [("a",), ("b",), ("c", "d", "e")]),
        ((9,), []),
        ((0, 9), []),
        ((5, 4), []),
    ],
)
def test_groups_by_hand(counts: tuple[int, ...], expected: list[tuple[str, ...]]) -> None:
    assert merge_small_cells(*cells(counts), 10) == expected


@pytest.mark.parametrize(("minimum", "width", "most"), [(3, 3, 9), (3, 4, 7), (4, 3, 11)])
def test_of_every_merged_cell_many_values_stay_possible_for_who_knows_the_rule_and_the_total(
    minimum: int, width: int, most: int
) -> None:
    """All tables of a size are gone through: those that look alike from outside are what an attacker cannot tell apart."""
    alike: dict[Any, list[tuple[int, ...]]] = defaultdict(list)
    for counts in product(range(most + 1), repeat=width):
        table, people = cells(counts)
        groups = merge_small_cells(table, people, minimum)
        sums = tuple((names, sum(len(table[name]) for name in names)) for names in groups)
        assert all(total == 0 or total >= minimum for _, total in sums)
        if sum(counts) <= most:  # else some of the tables that look alike are too large to be among these
            alike[sum(counts), sums].append(counts)
    merged = 0
    for (total, sums), tables in alike.items():
        alone = {names[0] for names, _ in sums if len(names) == 1}
        for index, name in enumerate("abcd"[:width]):
            if name not in alone and total >= minimum:
                merged += 1
                assert len({counts[index] for counts in tables}) >= minimum - 1
    assert merged > 20


def test_people_count_and_not_their_samples() -> None:
    table = {"a": list(range(40)), "b": list(range(40, 60))}
    people = ["one volume"] * 40 + [f"person-{i}" for i in range(20)]
    assert merge_small_cells(table, people, 10) == [("a", "b")]


def masks(shown: dict[str, str], people: int) -> Tally:
    """Return a tally of masks; a text has + or - for every sample, ? where nobody has annotated it."""
    found = Tally({"training": [f"p{i}" for i in range(people)], "validation": [], "test": []})
    found.patients = dict.fromkeys(found.people, False)
    for split in found.people:
        marks = shown if split == "training" else dict.fromkeys(shown, "")
        found.classes[split] = {n: [i for i, m in enumerate(text) if m == "+"] for n, text in marks.items()}
        found.absent[split] = {n: [i for i, m in enumerate(text) if m == "-"] for n, text in marks.items()}
    found.areas = {name: [0.25] * text.count("+") for name, text in shown.items()}
    found.sizes, found.spacing, found.lengths = ({n: list[int]() for n in names} for names in (SIZES, SPACING, LENGTHS))
    return found


@pytest.mark.parametrize(
    ("disc", "cup", "expected"),
    [
        ("+" * 40, "+" * 40, ["disc", "cup"]),
        ("+" * 40, "+" * 30 + "-" * 10, ["disc", "cup"]),
        ("+" * 40, "+" * 31 + "-" * 9, ["disc"]),
        ("+" * 30 + "-" * 10, "+" * 25 + "-" * 15, ["disc"]),  # 30 - 25: five have a disc and no cup
        ("+" * 31 + "-" * 9, "+" * 20 + "-" * 20, ["cup"]),  # nine have no disc
        ("+" * 20 + "?" * 20, "+" * 20 + "-" * 20, ["disc", "cup"]),
        ("+" * 35 + "?" * 5, "-" * 40, ["cup"]),
    ],
)
def test_a_difference_of_two_counts_is_a_count_too(disc: str, cup: str, expected: list[str]) -> None:
    assert releasable_classes(masks({"disc": disc, "cup": cup}, 40), "training", 10) == expected


def config(**section: Any) -> JobConfig:
    return JobConfig.model_validate(small_config("fedit").model_dump() | {"statistics": section})


def test_what_leaves_of_masks_by_hand() -> None:
    counted = masks({"disc": "+" * 20, "cup": "+" * 12 + "-" * 8}, 20)
    counted.sizes["64 to 128"] = list(range(17))
    counted.sizes["512 to 1024"] = [17, 18, 19]
    counted.light = [np.array([0.5, 0.5, 0, 0])] * 19 + [np.array([0.5, 0, 0, 0.5])]
    found = disclose(counted, config(bins=4), 10).model_dump(mode="json")
    assert found["splits"]["training"] == {
        "samples": 20,
        "patients": None,
        "classes": [{"names": ["disc"], "samples": 20}],
    }
    assert found["splits"]["validation"] is found["splits"]["test"] is None
    assert found["areas"] == [{"names": ["disc"], "share": 0.25}]
    assert found["sizes"] == [{"names": ["under 64"], "samples": 0}, {"names": list(SIZES[1:]), "samples": 20}]
    # 19 of 20 pictures reach the second quarter and one the last: 19 * 0.5 / 20 + 0.5 / 20 = 0.5
    first, *rest = grey_bin_names(4)
    assert found["greys"] == [{"names": [first], "share": 0.5}, {"names": rest, "share": 0.5}]


def test_fewer_people_than_the_minimum_are_not_even_counted() -> None:
    found = disclose(masks({"disc": "+" * 9, "cup": "+" * 9}, 9), config(), 10).model_dump(mode="json")
    assert set(found["splits"].values()) == {None}
    assert not any(found[key] for key in ("areas", "sizes", "spacing", "lengths", "greys"))


def test_patients_are_told_only_where_all_are_known() -> None:
    counted = masks({"disc": "+" * 24, "cup": "+" * 24}, 24)
    counted.people["training"] = [f"patient-{i // 2}" for i in range(24)]
    for known, expected in ((True, 12), (False, None)):
        counted.patients["training"] = known
        assert disclose(counted, config(), 10).splits["training"].patients == expected


@pytest.mark.parametrize(
    ("share", "protects", "private", "leaves"),
    [
        (None, False, False, True),
        (None, True, False, False),
        (None, False, True, False),
        (False, False, False, False),
        (True, True, True, True),
    ],
)
def test_who_may_have_them(share: bool | None, protects: bool, private: bool, leaves: bool) -> None:
    if leaves:
        Terms(share).check("a", protects, private)
        return
    with pytest.raises(RefusedError) as caught:
        Terms(share).check("a", protects, private)
    assert caught.value.reason is Reason.STATISTICS


def test_one_answer_a_data_set(tmp_path: Path) -> None:
    first = answer_once(tmp_path, "ward-7", config(), masks({"disc": "+" * 20, "cup": "+" * 20}, 20), Terms())
    assert first["minimum"] == 10  # the larger one of the job's and the site's
    more = masks({"disc": "+" * 21, "cup": "+" * 21}, 21)
    assert answer_once(tmp_path, "ward-7", config(), more, Terms()) == first  # the difference would be one patient
    for other in ({"bins": 8}, {"minimum": 11}):
        with pytest.raises(RefusedError, match="could be subtracted") as caught:
            answer_once(tmp_path, "ward-7", config(**other), more, Terms())
        assert caught.value.reason is Reason.STATISTICS
    assert answer_once(tmp_path, "ward-8", config(bins=8, minimum=11), more, Terms(minimum=12))["minimum"] == 12
    assert answer_once(tmp_path, "ward-9", config(bins=8, minimum=11), more, Terms())["minimum"] == 11
    (kept,) = (p for p in (tmp_path / "statistics").glob("*.json") if p.read_text().count('"samples": 20'))
    assert kept.stat().st_mode & 0o077 == 0
    full = patch.object(disclosure_control, "write_json", side_effect=OSError(28, "No space left"))
    with full, pytest.raises(RefusedError, match=r"cannot be written .*make room") as caught:
        answer_once(tmp_path, "ward-10", config(), more, Terms())
    assert caught.value.reason is Reason.LEDGER
    kept.write_text("{")
    with pytest.raises(RefusedError, match="cannot be read"):
        answer_once(tmp_path, "ward-7", config(), more, Terms())


def test_what_makes_a_question() -> None:
    """All that an answer depends on, and nothing else: a training job after the statistics asks the same again."""
    one = config(only=True)
    assert question_hash(one) == question_hash(config())
    longer = one.model_dump() | {"training": {"rounds": 50}, "strategy": "fediat"}
    assert question_hash(JobConfig.model_validate(longer)) == question_hash(one)
    others = [{"classes": {"disc": [1], "cup": [2]}}, {"slices": {"every": 2}}, {"window": {"center": 0, "width": 9}}]
    for change in others:
        raw = one.model_dump()
        raw["task"] |= change
        assert question_hash(JobConfig.model_validate(raw)) != question_hash(one)
    assert question_hash(JobConfig.model_validate(small_cells().model_dump() | {"statistics": {}})) != question_hash(one)
