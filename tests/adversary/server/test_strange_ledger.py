"""A ledger of a stranger, in an archive of evidence or a run's folder: SQLite that does something when it is read."""

import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from consilium.core.errors import RefusedError
from consilium.flare.kit.evidence_archive import LEDGER, verify_chains
from consilium.privacy.audit_log import read_with_epsilon
from consilium.privacy.ledger import COLUMNS, Ledger, summary
from tests.privacy.test_ledger import ONE

NAMES = ", ".join(COLUMNS)
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"
EMPTY = f"SELECT {', '.join(f'0 AS {name}' for name in ('time', *COLUMNS, 'seal'))} WHERE 0"
TABLE = f"CREATE TABLE releases (time REAL NOT NULL, {', '.join(f'{name} NOT NULL' for name in COLUMNS)}, seal NOT NULL"
HOSTILE = {
    "a view": f"CREATE VIEW releases AS {EMPTY}",
    "an endless view": f"CREATE VIEW releases AS {ENDLESS} i AS time, {', '.join(f'i AS {n}' for n in COLUMNS)}, i AS seal, "
    "i AS rowid FROM n WHERE i < 0",
    "a large view": f"CREATE VIEW releases AS SELECT 0 AS time, {', '.join(f'randomblob(9999999) AS {n}' for n in COLUMNS)}, "
    "0 AS seal, 1 AS rowid",
    "a computed column": f"{TABLE}, more AS (hex(zeroblob(9))) VIRTUAL)",
    "a computed seal": f"{TABLE.removesuffix('seal NOT NULL')}seal AS (hex(zeroblob(9))))",
    "a virtual table": f"CREATE VIRTUAL TABLE releases USING fts5(time, {NAMES}, seal)",
    "another column": f"{TABLE}, more)",
    "a checked column": f"{TABLE}, CHECK (length(hex(zeroblob(9))) > 1))",
    "a trigger": f"{TABLE}); CREATE TRIGGER t AFTER INSERT ON releases BEGIN DELETE FROM releases; END",
    "another table": f"{TABLE}); CREATE TABLE more (x)",
}


def written(path: Path, script: str) -> bytes:
    db = sqlite3.connect(path)
    db.executescript(script)
    db.close()
    return path.read_bytes()


@pytest.mark.parametrize("script", [pytest.param(script, id=name) for name, script in HOSTILE.items()])
def test_a_ledger_of_something_other_than_its_table(script: str, tmp_path: Path) -> None:
    """In evidence it is no whole ledger, and for a site it is none: nothing in it is run, whatever it would take."""
    path = tmp_path / "ledger.sqlite"
    assert "it holds something other than its one table" in str(verify_chains({LEDGER: written(path, script)})["ledger"])
    for use in (lambda: Ledger(path).seals(), lambda: Ledger(path).charge_once(ONE, {})):
        with pytest.raises(RefusedError, match="nothing was sent; restore it"):
            use()


WRONG = [{"count": -5}, {"sample_rate": 5.0}, {"sample_rate": -0.5}, {"noise_multiplier": 1e200}, {"trust": 5}]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_row_with_a_cost_that_no_release_has(wrong: dict[str, float], tmp_path: Path) -> None:
    """Minus five releases would lower the epsilon of the others. Other values ended `privacy ledger` with a traceback."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.charge_once(replace(ONE, **wrong), {})
    with pytest.raises(RefusedError, match="row 1 of the privacy ledger is none of this version"):
        summary(Ledger(ledger.path))


def test_a_row_of_many_bytes(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path).charge_once(ONE, {})
    written(path, "UPDATE releases SET job = zeroblob(100000000)")
    assert "too big" in str(verify_chains({LEDGER: path.read_bytes()})["ledger"])


@pytest.mark.parametrize(("noise", "rate", "count"), [(1e-100, 1.0, 1), (1e-17, 1.0, 1), (1e-80, 0.5, 9), (1.0, 0.5, 2**52)])
def test_a_record_of_a_cost_that_no_job_has(noise: float, rate: float, count: int, tmp_path: Path) -> None:
    """A page, `audit` and `evidence` read it: they show a large epsilon and do not break off."""
    cost = {"noise_multiplier": noise, "sample_rate": rate, "count": count, "slack": 1e-12}
    line = {"kind": "update", "round": 0, "phase": 0, "privacy": {"delta": 1e-5, "spend": cost}, "previous": ""}
    (tmp_path / "audit.jsonl").write_text(json.dumps(line) + "\n")
    (message,) = read_with_epsilon(tmp_path / "audit.jsonl")["messages"]
    assert message["privacy"]["epsilon"] > 1e13


@pytest.mark.parametrize("line", [lambda count: "[" + "0," * count + "0]", lambda count: "{}\n" + "{" * count])
def test_a_record_of_too_many_values(line: Callable[[int], str]) -> None:
    found = verify_chains({"audit-1.jsonl": line(2**25).encode()})
    assert found["record"] == "audit-1.jsonl holds over 33,554,432 values"
