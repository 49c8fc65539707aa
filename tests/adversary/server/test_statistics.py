"""A server that wants to know more of a site's data than counts of many."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from nvflare.apis.shareable import Shareable

from consilium.client.approval import check_approved
from consilium.core.errors import ConfigError, Reason, RefusedError
from consilium.flare.job import wire
from consilium.privacy import audit_log
from tests.adversary.server.conftest import RECORD_LEVEL, SITE_LEVEL, Client, MakeClient
from tests.privacy.test_statistics import masks

ASKED = {"statistics": {"minimum": 5, "bins": 16}}
ONLY = {"statistics": {"only": True}}


def ask(client: Client, message: object = None, people: int = 24) -> Shareable:
    client.trainer.counted = masks({"disc": "+" * people, "cup": "+" * 12 + "-" * (people - 12)}, people)
    return client.ask("statistics", Shareable({wire.STATISTICS: {"run": "run-1"} if message is None else message}))


def told(answer: Shareable) -> dict[str, Any]:
    assert wire.reason_of(answer) is None
    assert set(answer) <= {wire.STATISTICS, "__headers__"}
    return answer[wire.STATISTICS]


def refused(client: Client, answer: Shareable, reason: Reason) -> bool:
    return wire.reason_of(answer) is reason and not client.trainer.did and set(answer) <= {"__headers__"}


def test_other_bins_cannot_be_asked_for_afterwards(client: MakeClient) -> None:
    """Bins of 16 and of 8 levels, or classes that lie in one another, subtract to cells that nobody has shown."""
    first = told(ask(client(more=ASKED)))
    for other in ({"statistics": {"minimum": 5, "bins": 8}}, {"task": {"classes": {"disc": [1], "cup": [2]}}} | ASKED):
        site = client(more=other, folder="two")
        assert refused(site, ask(site), Reason.STATISTICS)
    assert told(ask(client(more=ASKED, folder="three"))) == first


def test_asking_again_after_a_patient_has_come_tells_nothing_of_her(client: MakeClient) -> None:
    first = told(ask(client(more=ASKED)))
    assert told(ask(client(more=ASKED, folder="two"), people=25)) == first


def test_a_list_that_gets_a_name_is_not_asked_anew(client: MakeClient) -> None:
    """The administrator moves `datalist:` under `datasets:`; a second answer, one patient later, could be subtracted."""
    first = client(more=ASKED)
    before = told(ask(first))
    for number, more in enumerate((ASKED, {"statistics": {"bins": 8}})):
        site = client(more=more, folder=str(number))
        site.guard.dataset, site.guard.listed = "eyes", first.guard.dataset
        again = ask(site, people=25)
        assert told(again) == before if more is ASKED else refused(site, again, Reason.STATISTICS)


def test_the_sites_minimum_counts(client: MakeClient) -> None:
    """A job that asks for counts of three gets the site's: twelve without a cup are under its thirteen."""
    site = client(more={"statistics": {"minimum": 3}}, site={"statistics_minimum": 13})
    found = told(ask(site))
    assert found["minimum"] == 13
    assert found["splits"]["training"]["classes"] == [{"names": ["disc"], "samples": 24}]
    with pytest.raises(ValueError, match="greater than or equal to 3"):
        client(more={"statistics": {"minimum": 1}})


@pytest.mark.parametrize(
    ("privacy", "policy", "reason"),
    [
        (SITE_LEVEL, {}, Reason.STATISTICS),
        (RECORD_LEVEL | {"noise_multiplier": 1.0, "epsilon": None}, {}, Reason.STATISTICS),
        (SITE_LEVEL, {"budgets": {"site": {"epsilon": 4}}}, Reason.STATISTICS),
        (None, {"budgets": {"site": {"epsilon": 4}}}, Reason.POLICY),
        (None, {"trust": ["local"]}, Reason.POLICY),
    ],
)
@pytest.mark.parametrize("only", [False, True])
def test_no_exact_count_leaves_beside_noise_unless_the_site_says_so(
    privacy: dict | None, policy: dict, reason: Reason, only: bool, client: MakeClient
) -> None:
    more = {"statistics": {"minimum": 5, "only": only}}
    site = client(privacy, more=more, **policy)
    assert refused(site, ask(site), reason if privacy else Reason.POLICY)
    assert not site.guard.ledger.entries()
    site = client(privacy, folder="two", more=more, site={"share_statistics": False}, **policy)
    assert refused(site, ask(site), reason if privacy else Reason.POLICY)
    site = client(privacy, folder="three", more=more, site={"share_statistics": True}, **policy)
    if privacy or only:
        told(ask(site))
    else:
        assert refused(site, ask(site), Reason.POLICY)  # the job itself is none for this site


def test_a_job_of_statistics_only_trains_nothing(client: MakeClient) -> None:
    """It is let in where a job without noise is not, so it must not turn into one."""
    site = client(more=ONLY, site={"share_statistics": True}, budgets={"site": {"epsilon": 4}})
    hello = site.ask("hello", Shareable({wire.HELLO: {"run": "run-1"}}))[wire.HELLO]
    assert hello["num_samples"] == 1  # nothing is weighed, so not even that is told
    told(ask(site))
    site.trainer.did.clear()
    for place in ((0, 0), (1, 0), (2, 0), (-1, -1)):
        for task in ("train", "evaluate"):
            assert refused(site, site.ask(task, site.task(*place)), Reason.TASK)


@pytest.mark.parametrize("message", [{}, {"run": "r", "bins": 2}, {"run": "r", "minimum": 1}, {"run": 7}, {"run": "../x"}, "r"])
def test_the_message_itself_sets_nothing(message: object, client: MakeClient) -> None:
    site = client(more=ASKED)
    assert refused(site, ask(site, message), Reason.TASK)


def test_a_job_that_does_not_ask_is_told_nothing(client: MakeClient) -> None:
    site = client()
    assert refused(site, ask(site), Reason.TASK)


def test_statistics_beside_another_task(client: MakeClient) -> None:
    site = client(more=ASKED)
    for task in ("hello", "train", "evaluate", "statistics"):
        for both in (site.task(), Shareable({wire.HELLO: {"run": "run-1"}})):
            both[wire.STATISTICS] = {"run": "run-1"}
            assert refused(site, site.ask(task, both), Reason.TASK)


def test_a_job_that_is_not_approved_is_told_nothing(tmp_path: Path, client: MakeClient) -> None:
    """The section is part of the digest: a job that was approved without it, or with another minimum, is another job."""
    import yaml

    from consilium.client.approval import approve
    from consilium.config.site import SiteConfig

    digests = set()
    for number, section in enumerate((None, {"minimum": 10}, {"minimum": 5}, {"only": True})):
        app = tmp_path / str(number) / "app"
        (app / "config").mkdir(parents=True)
        (app / "config" / "config_fed_client.json").write_text("{}")
        config = client(more={"statistics": section}).job.config
        (app / "config" / "job.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        with pytest.raises(RefusedError) as caught:
            check_approved(app, config, SiteConfig(approve="digest"), tmp_path)
        assert caught.value.reason is Reason.APPROVAL
        digests.add(approve(app, tmp_path))
        check_approved(app, config, SiteConfig(approve="digest"), tmp_path)
    assert len(digests) == 4


def test_what_left_is_on_record_and_a_refusal_too(client: MakeClient) -> None:
    site = client(more=ASKED)
    found = told(ask(site))
    (line,) = audit_log.read_with_epsilon(next(site.guard.folder.rglob(audit_log.FILE)))["messages"]
    assert (line["kind"], line["values"]) == ("statistics", json.loads(json.dumps(found)))
    other = client(more={"statistics": {"bins": 8}}, folder="two")
    ask(other)
    (line,) = audit_log.read_with_epsilon(next(other.guard.folder.rglob(audit_log.FILE)))["messages"]
    assert (line["kind"], line["reason"]) == ("refusal", "statistics")


def test_without_a_record_nothing_leaves(client: MakeClient) -> None:
    site = client(more=ASKED)
    with patch.object(audit_log.AuditLog, "add", side_effect=RefusedError("full", Reason.LEDGER)):
        assert wire.reason_of(ask(site)) is Reason.LEDGER


def test_what_goes_wrong_in_counting_is_a_word(client: MakeClient) -> None:
    site = client(more=ASKED)
    with patch.object(site.trainer, "statistics", side_effect=ConfigError("/data/smith.png: has no mask")):
        answer = site.ask("statistics", Shareable({wire.STATISTICS: {"run": "run-1"}}))
    assert wire.reason_of(answer) is Reason.JOB
    assert set(answer) <= {"__headers__"}
    assert "smith" not in json.dumps(answer["__headers__"], default=str)
