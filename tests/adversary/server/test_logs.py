"""FLARE's log has many readers: it names no folder of the data, and holds no number of private training."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.fl_context import FLContext

from consilium.config.job import JobConfig
from consilium.core.errors import Reason, RefusedError
from consilium.data.stats import Tally
from consilium.flare.job.private_log import route_to_private_log
from consilium.privacy.disclosure_control import TERMS, answer_once, check_question
from consilium.report.private_logging import OF_DATA
from tests.adversary.server.conftest import RECORD_LEVEL, SITE_LEVEL
from tests.conftest import small_config
from tests.data.storing import make_site

WARD = "Muster_Erika_1970"


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    for logger in map(logging.getLogger, OF_DATA):
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL], ids=["site", "record"])
def test_no_number_of_private_training_is_logged(privacy: dict, kit: Any, tmp_path: Path, log: Any) -> None:
    """The loss, and how long the update was before noise, were; the site's own file has them."""
    site = kit(privacy, datalist=make_site(tmp_path / "list"))
    route_to_private_log(FLContext())
    assert site.train() is None
    texts = [json.loads(text[text.index("{") :]) for text in log.messages if '"event"' in text]
    assert {event["event"] for event in texts} >= ({"metrics", "release"} if privacy is SITE_LEVEL else {"metrics", "warning"})
    assert {key for event in texts for key in event} <= {"event", "site", "round", "phase", "stage", "what", "reason"}
    (kept,) = (tmp_path / "state/errors").glob("*.log")
    assert '"train/loss": ' in kept.read_text()
    assert ('"clip_factor": ' in kept.read_text()) is (privacy is SITE_LEVEL)


def test_a_job_over_the_budget_names_no_folder(kit: Any, tmp_path: Path, log: Any) -> None:
    """Without a name the data are known by their list's path."""
    site = kit(SITE_LEVEL, policy={"budgets": {"site": {"epsilon": 0.1}}}, datalist=make_site(tmp_path / WARD))
    assert site.train() is Reason.BUDGET
    assert "the privacy budget does not allow the job; the text is in " in log.text
    assert WARD not in log.text
    (kept,) = (tmp_path / "state/errors").glob("*.log")
    assert f"{WARD}/datalist.json' has spent epsilon 0 of 0.1" in kept.read_text()


def test_data_that_got_a_name_are_told_of_without_their_folder(kit: Any, tmp_path: Path, log: Any) -> None:
    listed = make_site(tmp_path / WARD)
    site = kit(SITE_LEVEL, policy={}, datalist=listed)
    assert site.train() is None
    site.begin_anew()
    log.clear()
    named = {"data": {"dataset": "ward"}}
    assert kit(SITE_LEVEL, named, {}, datasets={"ward": {"datalist": listed}}).train() is Reason.LEDGER
    assert "the ledger has rows of the data list under its path; the text is in " in log.text
    assert WARD not in log.text


def test_a_list_without_a_test_split_is_told_of_without_its_folder(kit: Any, tmp_path: Path, log: Any) -> None:
    listed = make_site(tmp_path / WARD)
    listed.write_text(json.dumps({"training": json.loads(listed.read_text())["training"]}))
    assert kit(SITE_LEVEL, policy={}, datalist=listed, test_only=True).train() is Reason.JOB
    assert "test_only: its data list has no test split" in log.text
    assert WARD not in log.text


def test_another_question_about_data_without_a_name(tmp_path: Path) -> None:
    listed, (one, other) = str(tmp_path / WARD / "datalist.json"), (asking(minimum) for minimum in (10, 20))
    answer_once(tmp_path, listed, one, Tally(), TERMS)
    with pytest.raises(RefusedError, match=WARD) as caught:
        check_question(tmp_path, listed, other)
    assert caught.value.told == "another question about the data was answered before"


def asking(minimum: int) -> JobConfig:
    return JobConfig.model_validate(small_config("fedit").model_dump() | {"statistics": {"minimum": minimum}})
