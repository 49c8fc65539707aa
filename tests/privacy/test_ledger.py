"""The ledger: composition across jobs, budgets under concurrency, crashes, replays."""

import hashlib
import json
import math
import multiprocessing
import os
import signal
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from consilium.config.privacy import BudgetConfig
from consilium.core.errors import RefusedError
from consilium.privacy.accounting import (
    DISCRETE,
    Entry,
    GaussianEvent,
    epsilon_for,
    epsilon_of,
    gaussian_epsilon,
    merge,
    weakest,
)
from consilium.privacy.ledger import Ledger, check_dataset_name, summary

BUDGET = {"site": BudgetConfig(epsilon=3.0, delta=1e-5)}
ONE = Entry("ward-7", "site", "zero-out", "local", "job", "run-1", 0, 0, 20.0, 1.0, 1, 0.3)
AFFORDABLE = 206  # exact: sqrt(T) / 20 = mu with epsilon(mu, 1e-5) = 3


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "new" / "ledger.sqlite")
    assert ledger.entries() == []
    ledger.charge_once(ONE, BUDGET)
    ledger.charge_once(replace(ONE, phase=1, private=False), BUDGET)
    assert ledger.entries() == [ONE, replace(ONE, phase=1, private=False)]
    assert len(ledger.rows()) == 2


def test_the_budget_outlives_jobs_and_stops_at_the_last_release_it_covers(tmp_path: Path) -> None:
    assert (
        epsilon_of([GaussianEvent(20.0, 1.0, AFFORDABLE)], 1e-5)
        <= 3
        < epsilon_of([GaussianEvent(20.0, 1.0, AFFORDABLE + 1)], 1e-5)
    )
    ledger = Ledger(tmp_path / "l")
    ledger.charge_once(replace(ONE, count=AFFORDABLE - 1), BUDGET)
    ledger.charge_once(replace(ONE, job="other", run="run-2"), BUDGET)
    with pytest.raises(RefusedError, match=r"epsilon 2\.993 of 3 at delta 1e-05.*3\.001"):
        ledger.charge_once(replace(ONE, run="run-3"), BUDGET)
    assert len(ledger.entries()) == 2
    ledger.charge_once(replace(ONE, dataset="ward-8"), BUDGET)  # another data set, another budget


def test_a_plan_is_checked_with_what_it_has_spent_already_counted_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    plan = [replace(ONE, round=round) for round in range(AFFORDABLE)]
    ledger.charge_once(plan[0], BUDGET)
    ledger.check_budget(plan, BUDGET)
    with pytest.raises(RefusedError, match="privacy budget"):
        ledger.check_budget([*plan, replace(ONE, round=AFFORDABLE)], BUDGET)
    assert len(ledger.entries()) == 1


def _spend_many(path: Path, run: str) -> None:
    for round in range(60):
        try:
            Ledger(path).charge_once(replace(ONE, run=run, round=round, noise_multiplier=10.0), BUDGET)
        except RefusedError:
            return


def test_concurrent_jobs_cannot_overspend(tmp_path: Path) -> None:
    """Four processes want 240 releases at sigma 10; exactly 51 fit into the budget."""
    path = tmp_path / "l"
    processes = [multiprocessing.get_context("fork").Process(target=_spend_many, args=(path, f"run-{i}")) for i in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    rows = Ledger(path).entries()
    assert len(rows) == 51
    assert epsilon_for("site", rows, 1e-5) <= 3


class _Meanwhile(dict[str, BudgetConfig]):
    """Budgets that let another process try to spend while they are read: it ends, or waits for its turn."""

    def __init__(self, budgets: dict[str, BudgetConfig], other: Callable[[], object]) -> None:
        super().__init__(budgets)
        self.pool, self.other = ThreadPoolExecutor(1), other

    def items(self) -> Any:
        self.found = self.pool.submit(self.other)
        wait([self.found], timeout=0.3)
        return super().items()


def test_a_release_is_written_before_another_is_checked(tmp_path: Path) -> None:
    """Each of two releases alone fits into the budget: the first is written, the second counts it."""
    half, first = replace(ONE, count=AFFORDABLE // 2 + 1), replace(ONE, dataset="ward-8")
    Ledger(tmp_path / "l").charge_once(first, BUDGET)
    budgets = _Meanwhile(BUDGET, lambda: Ledger(tmp_path / "l").charge_once(replace(half, run="run-2"), BUDGET))
    with budgets.pool:
        assert Ledger(tmp_path / "l").charge_once(half, budgets)
        with pytest.raises(RefusedError, match="privacy budget"):
            budgets.found.result()
    assert Ledger(tmp_path / "l").entries() == [first, half]


def _die_in_a_transaction(path: Path) -> None:
    ledger = Ledger(path)
    ledger.charge_once(ONE, BUDGET)
    with sqlite3.connect(path, isolation_level=None) as db:
        db.execute("BEGIN IMMEDIATE")
        db.execute("DELETE FROM releases")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_crash_in_a_transaction_loses_no_row(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_die_in_a_transaction, args=(tmp_path / "l",))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert Ledger(tmp_path / "l").entries() == [ONE]


def test_data_known_by_their_list_do_not_begin_anew_under_a_name(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    check_dataset_name("a", "ward-7", "/data/list.json", ledger)
    ledger.charge_once(replace(ONE, dataset="/data/list.json"), {})
    with pytest.raises(RefusedError, match=r"patients: /data/list\.json"):
        check_dataset_name("a", "ward-7", "/data/list.json", ledger)
    for dataset, listed in (("/data/list.json", "/data/list.json"), ("ward-7", ""), ("ward-7", "/data/other.json")):
        check_dataset_name("a", dataset, listed, ledger)


def test_a_summary_names_what_its_epsilon_means(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    ledger.charge_once(ONE, {})
    ledger.charge_once(replace(ONE, round=1, adjacency="replace", private=False), {})
    (found,) = summary(ledger, (1e-5, 1e-2))
    assert (found["dataset"], found["units"], found["adjacency"], found["trust"]) == ("ward-7", ["site"], "zero-out", ["local"])
    assert not found["private"]
    assert found["epsilon"]["site"]["1e-05"] == pytest.approx(epsilon_of([GaussianEvent(20.0, 1.0, 2)], 1e-5))
    assert found["epsilon"]["site"]["1e-05"] > found["epsilon"]["site"]["0.01"]


def test_a_site_level_release_counts_for_a_record_too(tmp_path: Path) -> None:
    """Two sets that differ in a record give two updates within the clip, up to 2 C apart: mu is 2 / sigma, or 1 / sigma where
    the noise was sized for 2 C. Composed by hand: mu^2 adds up, also with a row of record level."""
    ledger, record = Ledger(tmp_path / "l"), replace(ONE, unit="record", noise_multiplier=5.0)
    ledger.charge_once(ONE, {})
    ledger.charge_once(replace(ONE, round=1, adjacency="replace"), {})
    by_hand = (2 / 20) ** 2 + (1 / 20) ** 2
    assert summary(ledger)[0]["epsilon"]["record"]["1e-05"] == pytest.approx(gaussian_epsilon(by_hand**0.5, 1e-5))
    assert summary(ledger)[0]["epsilon"]["site"]["1e-05"] == pytest.approx(gaussian_epsilon(2**0.5 / 20, 1e-5))
    ledger.charge_once(record, {})
    both = (by_hand + (1 / 5) ** 2) ** 0.5
    assert summary(ledger)[0]["epsilon"]["record"]["1e-05"] == pytest.approx(gaussian_epsilon(both, 1e-5))


def test_a_record_level_release_ends_a_claim_about_the_whole_site(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    ledger.charge_once(ONE, BUDGET)
    record = replace(ONE, unit="record", round=1)
    with pytest.raises(RefusedError, match=r"one site.*'ward-7'.* epsilon 0\.\d+ of 3 .* inf"):
        ledger.charge_once(record, BUDGET)
    ledger.charge_once(record, {"record": BudgetConfig(epsilon=3.0, delta=1e-5)})
    assert summary(ledger)[0]["epsilon"]["site"]["1e-05"] == math.inf


@pytest.mark.parametrize("change", [{"noise_multiplier": 0.3}, {"clip": 30.0}, {"count": 2}, {"sample_rate": 0.5}])
@pytest.mark.parametrize("unit", ["site", "record"])
def test_a_known_release_on_other_terms_is_refused(unit: str, change: dict, tmp_path: Path) -> None:
    ledger, one = Ledger(tmp_path / "l"), replace(ONE, unit=unit)
    ledger.charge_once(one, {})
    for refused in (
        lambda: ledger.charge_once(replace(one, **change), {}),
        lambda: ledger.check_budget([replace(one, **change)], {}),
    ):
        with pytest.raises(RefusedError, match="other noise, clip or data"):
            refused()
    ledger.charge_once(replace(one, count=0, digest="aa"), {})
    with pytest.raises(RefusedError, match="released with other bytes"):
        ledger.charge_once(replace(one, count=0, digest="bb"), {})


@pytest.mark.parametrize("change", ["job", "dataset", "trust", "adjacency", "digest", "time", "clip"])
def test_a_value_of_another_kind_is_refused_in_a_line(change: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path).charge_once(ONE, BUDGET)
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE releases SET {change} = x'00ff'")
    for read in (Ledger(path).rows, Ledger(path).reseal):
        with pytest.raises(RefusedError, match=r"row 1 .* none of this version; .* restore it .* `consilium privacy accept`"):
            read()


def test_a_file_that_a_kill_left_empty_is_a_ledger_without_rows(tmp_path: Path) -> None:
    """The file is made before its table: every read refused, and nothing was there to restore."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.path.touch()
    assert (ledger.entries(), ledger.seal()) == ([], "")
    ledger.check_budget([ONE], {})
    ledger.charge_once(ONE, {})
    assert len(Ledger(ledger.path).entries()) == 1


# ledgers of versions that named no mechanism --------------------------------------------------------------------------

OLD_COLUMNS = (
    "dataset", "unit", "adjacency", "trust", "job", "run", "round", "phase", "noise_multiplier", "sample_rate", "count", "clip",
    "private", "digest",
)  # fmt: skip


def old_ledger(path: Path, *rows: Entry) -> Ledger:
    """Return a ledger as version 0.2.0 wrote it: without the column `mechanism`, in table and seals. Times are 1.5, 2.5 ..."""
    before = ""
    path.parent.mkdir(parents=True, exist_ok=True)
    with sqlite3.connect(path) as db:
        columns = ", ".join(f"{name} NOT NULL" for name in ("time REAL", *OLD_COLUMNS, "seal"))
        db.execute(f"CREATE TABLE releases ({columns})")
        for when, row in enumerate(rows):
            values = {name: getattr(row, name) for name in OLD_COLUMNS}
            before = hashlib.sha256(json.dumps([before, when + 1.5, values]).encode()).hexdigest()
            marks = ", ".join("?" * (len(OLD_COLUMNS) + 2))
            db.execute(f"INSERT INTO releases VALUES ({marks})", (when + 1.5, *values.values(), before))
    db.close()
    return Ledger(path)


RECORD = replace(ONE, unit="record", run="run-9", noise_multiplier=1.1, sample_rate=0.1, count=20)


def test_an_old_ledger_is_read_and_goes_on_and_its_rows_of_dpsgd_at_sites_are_void(tmp_path: Path) -> None:
    rows = [ONE, RECORD, replace(RECORD, run="run-8", trust="distributed"), replace(RECORD, unit="patient", run="run-7")]
    ledger = old_ledger(tmp_path / "l", *rows)
    assert ledger.entries() == rows
    assert [row.is_void for row in ledger.entries()] == [False, True, False, True]
    new = replace(RECORD, run="run-10", mechanism=DISCRETE)
    ledger.charge_once(new, {})
    assert Ledger(tmp_path / "l").entries() == [*rows, new]
    assert not new.is_void
    (found,) = summary(ledger)
    assert found["void"] == 2
    assert (found["releases"], found["steps"]) == (5, 1 + 4 * 20)  # all still count
    assert found["epsilon"]["record"]["1e-05"] == pytest.approx(epsilon_for("record", [*rows, new], 1e-5))


def test_a_row_of_version_0_2_0_has_the_seal_that_it_wrote(tmp_path: Path) -> None:
    row = Entry("ward-7", "record", "zero-out", "local", "job", "run-1", 0, 0, 20.0, 0.01, 50, 0.3)
    assert old_ledger(tmp_path / "l", row).seals() == ["f4332139c817b5997b4fa2b26b6e90226a60c077d8fd40d916f394b2dcef1dda"]


def test_an_old_row_is_the_same_release_under_this_version_and_spends_nothing(tmp_path: Path) -> None:
    ledger = old_ledger(tmp_path / "l", ONE)
    assert not ledger.charge_once(replace(ONE, mechanism=DISCRETE), BUDGET)
    assert ledger.entries() == [ONE]


@pytest.mark.parametrize(("row", "named"), [(RECORD, DISCRETE), (replace(RECORD, mechanism=DISCRETE), "")])
def test_a_row_whose_mechanism_was_written_or_taken_out_later_breaks_the_chain(tmp_path: Path, row: Entry, named: str) -> None:
    ledger = Ledger(tmp_path / "l")
    ledger.charge_once(row, {})
    with sqlite3.connect(tmp_path / "l") as db:
        db.execute("UPDATE releases SET mechanism = ?", (named,))
    db.close()
    with pytest.raises(RefusedError, match="row 1 of the privacy ledger was altered"):
        Ledger(tmp_path / "l").entries()


@pytest.mark.parametrize(("factor", "covered"), [(1.0, True), (1 + 1e-7, True), (1 - 1e-7, False), (1.001, False)])
def test_a_row_covers_a_release_of_the_same_terms_with_noise_not_under_its_own(
    factor: float, covered: bool, tmp_path: Path
) -> None:
    """Another version may round noise otherwise; less noise than was charged is refused."""
    ledger = Ledger(tmp_path / "l")
    ledger.charge_once(ONE, BUDGET)
    again = replace(ONE, noise_multiplier=ONE.noise_multiplier * factor)
    if covered:
        assert not ledger.charge_once(again, BUDGET)
    else:
        with pytest.raises(RefusedError, match="noise"):
            ledger.charge_once(again, BUDGET)
    assert ledger.entries() == [ONE]


def test_merging_keeps_the_total_and_the_weaker_adjacency_names_a_mixture() -> None:
    spends = [GaussianEvent(2.0, 1.0, 3), GaussianEvent(4.0), GaussianEvent(2.0), GaussianEvent(2.0, 0.5)]
    assert merge(spends) == [GaussianEvent(2.0, 1.0, 4), GaussianEvent(4.0), GaussianEvent(2.0, 0.5)]
    assert weakest(["replace", "replace"]) == "replace"
    assert weakest(["replace", "zero-out"]) == "zero-out"
