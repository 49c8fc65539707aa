"""What a record holds is said in one table: all that a run writes fits it, and a line without one of its values is damage."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.errors import ConfigError
from consilium.messages import Payload
from consilium.report.compare import reading
from consilium.report.lines import LINES
from consilium.report.page.record import checked, read_record
from consilium.report.progress import read_lines
from consilium.report.runlog import RunLog
from consilium.strategies.strategy import ServerState
from tests.conftest import small_config

STATE, SITES = ServerState(0, 0, {}, {}), ["north", "south"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's record with every event."""
    folder = tmp_path_factory.mktemp("run")
    config = small_config("fedit", rounds=4)
    log = RunLog(folder, config)
    log.trains(config.strategy, {})
    log.began_from("0" * 64)
    for site in SITES:
        log.joined(0, site, "", test_only=site == "south")
    log.started(STATE, SITES)
    log.received("north", Payload(0, 0, {"x": torch.ones(2)}, metrics={"train/loss": float("nan")}))
    log.refused({"event": "refused", "site": "south", "round": 0, "reason": "no", "joining": False})
    log.concluded(STATE, SITES, 0.5)
    log.diagnostics(STATE, {"drift": 1.0})
    log.held_out("south", Payload(0, -1, {}, metrics={"validation/global/dice": 0.5}))
    log.ended({"round": 1, "rounds": 4, "validations": 1, "best_round": 0})
    log.final("north", Payload(1, 0, {}, metrics={"test/global/dice": 0.5}))
    log.resumed(STATE)
    log.close()
    return folder


def test_all_that_a_run_writes_fits(folder: Path) -> None:
    lines = [line for line in read_lines(folder / "metrics.jsonl") if line["event"] in LINES]
    assert {line["event"] for line in lines} == set(LINES)
    for line in lines:
        LINES[line["event"]].model_validate(line)
    assert reading.read_record(folder / "metrics.jsonl")
    assert read_record(folder).damaged == 0


@pytest.mark.parametrize(
    ("event", "value"),
    [(event, value) for event, kind in LINES.items() for value in kind.model_fields],
)
@pytest.mark.parametrize("wrong", [None, True, {"x": "1"}, "1", 10**400], ids=["null", "true", "object", "text", "too much"])
def test_a_value_that_is_missing_or_of_another_kind_is_damage(
    event: str, value: str, wrong: Any, folder: Path, tmp_path: Path
) -> None:
    line = next(line for line in read_lines(folder / "metrics.jsonl") if line["event"] == event)
    for changed in ({name: one for name, one in line.items() if name != value}, line | {value: wrong}):
        if changed.get(value) == "1" and value in ("site", "reason"):
            continue  # which is a name
        (tmp_path / "metrics.jsonl").write_text(json.dumps(changed) + "\n")
        with pytest.raises(ConfigError, match="is damaged; delete its folder"):
            reading.read_record(tmp_path / "metrics.jsonl")
        assert checked(changed) is None or value == "metrics"
