"""A server that goes on asking while a site's share is away, its list grows or its disk fills: nothing is paid for nothing."""

import errno
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from consilium.core.errors import Reason
from consilium.privacy.ledger import Ledger
from tests.adversary.server.conftest import PLANNED, RECORD_LEVEL, SITE_LEVEL
from tests.adversary.server.test_before_a_round import AT_RECORD_LEVEL
from tests.conftest import small_config
from tests.data.storing import break_pixels, make_site
from tests.flare import process_state

FOUR_ROUNDS = {"training": small_config("fedit", rounds=4, local_steps=1).model_dump()["training"]}
FULL = OSError(errno.ENOSPC, "No space left on device")


def on_a_share(folder: Path) -> tuple[Path, Path]:
    """Return a list whose files lie on a share, and that share."""
    listed, share = make_site(folder / "list"), folder / "share"
    share.mkdir()
    lists = json.loads(listed.read_text())
    for entry in (entry for entries in lists.values() for entry in entries):
        for key in ("image", "label"):
            (listed.parent / entry[key]).rename(share / entry[key])
            entry[key] = str(share / entry[key])
    listed.write_text(json.dumps(lists))
    return listed, share


@pytest.mark.parametrize(
    ("restarted", "privacy"),
    [
        (False, RECORD_LEVEL),
        (True, SITE_LEVEL),
        pytest.param(False, SITE_LEVEL, marks=pytest.mark.slow),
        pytest.param(True, RECORD_LEVEL, marks=pytest.mark.slow),
    ],
)
def test_a_share_that_is_away_when_bad_samples_are_skipped(restarted: bool, privacy: dict, kit: Any, tmp_path: Path) -> None:
    """All entries were left out, each round left as noise alone and was paid, also after the share was back."""
    listed, share = on_a_share(tmp_path)
    site = kit(privacy, FOUR_ROUNDS, datalist=listed, bad_samples="skip")
    if restarted:
        assert site.train(0) is None
        site.begin_anew()
    before = site.rows
    share.rename(tmp_path / "away")
    assert [site.train(round) for round in (1, 2)] == [Reason.DATA] * 2
    assert site.rows == before
    (tmp_path / "away").rename(share)
    assert site.train(2) is None
    (found,) = process_state.sites_here()
    assert found.context.task.num_samples == 5


@AT_RECORD_LEVEL
def test_pictures_cut_off_while_a_job_runs(privacy: dict, kit: Any, tmp_path: Path) -> None:
    """They were there, so the round was charged, and trained on nothing."""
    site = kit(privacy, FOUR_ROUNDS, datalist=make_site(tmp_path / "list"), bad_samples="skip")
    assert site.train(0) is None
    before, pictures = site.rows, sorted((tmp_path / "list").glob("*training_?.png"))
    for picture in pictures:
        picture.write_bytes(picture.read_bytes()[:60])
    assert [site.train(round) for round in (1, 2)] == [Reason.DATA] * 2
    assert site.rows == before


def test_the_ledger_charges_the_plan_of_the_list_that_is_trained_on(kit: Any, tmp_path: Path) -> None:
    """A list that was mended and grew between two tries: its rate was of the new one, the charge of the old."""
    listed = make_site(tmp_path / "list", training=12)
    lists = json.loads(listed.read_text())
    every = lists["training"]
    listed.write_text(json.dumps(lists | {"training": every[:5]}))
    site = kit(PLANNED, FOUR_ROUNDS, datalist=listed)
    break_pixels(tmp_path / "list" / "Muster_Erika_training_0.png")
    assert site.train(0) is Reason.DATA
    listed.write_text(json.dumps(lists | {"training": every[1:]}))
    assert site.train(0) is None
    (guard,), (made,) = process_state.guards(), process_state.sites_here()
    assert (made.context.task.num_samples, guard.num_samples, guard.plan) == (11, 11, made.context.plan)
    (row,) = [row for row in site.rows if row.count]
    assert (row.sample_rate, row.count) == (made.context.plan.event.sample_rate, made.context.plan.event.count)


@AT_RECORD_LEVEL
def test_a_disk_too_full_to_note_that_a_round_begins(privacy: dict, kit: Any, tmp_path: Path) -> None:
    """At record level the round was charged before the note, and nothing was trained: so for every round."""
    ledger = tmp_path / "elsewhere" / "ledger.sqlite"
    policy = {"dataset": "ward-7", "ledger": ledger}
    site = kit(privacy, FOUR_ROUNDS, policy, datalist=make_site(tmp_path / "list"))
    assert site.train(0) is None
    before = Ledger(ledger).entries()
    with patch("consilium.privacy.guard.release_store.write_json", side_effect=FULL):
        assert [site.train(round) for round in (1, 2)] == [Reason.LEDGER] * 2
    assert Ledger(ledger).entries() == before
    assert site.train(2) is None


def test_a_round_noted_and_not_charged_is_charged_when_it_is_asked_again(kit: Any, tmp_path: Path) -> None:
    """A kill between the two: the note gives no free answer, and blocks none."""
    site = kit(RECORD_LEVEL, FOUR_ROUNDS, datalist=make_site(tmp_path / "list"))
    with patch.object(Ledger, "charge_once", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        site.train(0)
    assert not [row for row in site.rows if row.count]
    site.begin_anew()
    assert site.train(0) is None
    assert len([row for row in site.rows if row.count]) == 1
