"""A server that would know for nothing how training went: by zeros, by a disk with little room, by a hello."""

import errno
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from consilium.client.build import build_site
from consilium.config.site import SiteConfig
from consilium.core.errors import DataError, Reason, RefusedError
from consilium.core.messages import Kind
from consilium.flare.job import wire
from consilium.privacy import audit_log
from tests.adversary.server.conftest import RECORD_LEVEL, SITE_LEVEL, Client, MakeClient
from tests.adversary.server.test_words import admitted, answered, failing
from tests.conftest import small_config
from tests.flare import process_state

FULL = OSError(errno.ENOSPC, "No space left on device")


def test_a_release_of_zeros_costs_what_any_does(client: MakeClient) -> None:
    """DEeR's A with B = 0 leaves as zeros, which cost nothing: each told that training on the A sent had not overflowed."""
    more = {"training": small_config("deer", rounds=3).model_dump()["training"]}
    sites = [client(SITE_LEVEL, "deer", f"job-{number}", more=more) for number in range(3)]
    told = [_asked_with_zeros(site, f"run-{n}") for n, site in enumerate([*sites[:2], failing(sites[2])])]
    assert told == [None, None, Reason.TRAINING]
    assert [(row.phase, row.count) for row in sites[0].guard.ledger.entries()] == [(1, 1)] * 3


def _asked_with_zeros(site: Client, run: str) -> Reason | None:
    sent = site.broadcast(0, 1)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in sent.tensors.items()}
    process_state.put(site.guard)
    return wire.reason_of(site.ask("train", wire.encode(replace(sent, tensors=zeros), run, update=False)))


@pytest.mark.parametrize(
    ("fails", "privacy"),
    [
        (True, SITE_LEVEL),
        (False, RECORD_LEVEL),
        pytest.param(True, RECORD_LEVEL, marks=pytest.mark.slow),
        pytest.param(False, SITE_LEVEL, marks=pytest.mark.slow),
    ],
)
def test_a_disk_with_room_for_a_word_alone_has_one_answer_that_is_paid(
    fails: bool, privacy: dict, client: MakeClient, tmp_path: Path
) -> None:
    """What training leaves did not fit, and was asked anew for nothing, until it failed for what the server sent."""
    told = []
    site = _training(client(privacy), tmp_path)
    with patch("consilium.client.client.save_state", side_effect=FULL):
        told.append(wire.reason_of(answered(failing(site) if fails else site, admitted(site))))
    told.append(wire.reason_of(answered(failing(site), admitted(site))))
    told.append(wire.reason_of(client(privacy).ask("train", site.task())))
    assert told == [Reason.TRAINING if fails else Reason.LEDGER] * 3
    rows = site.guard.ledger.entries()
    assert [row.count > 0 for row in rows].count(True) == [row.digest for row in rows].count("word") == 1


def test_a_release_that_does_not_fit_is_answered_with_a_word_that_is_paid(client: MakeClient) -> None:
    site = client(SITE_LEVEL)
    with patch("consilium.privacy.guard.release_store.save_state", side_effect=FULL):
        assert wire.reason_of(answered(site, admitted(site))) is Reason.LEDGER
    assert wire.reason_of(answered(site, admitted(site))) is Reason.LEDGER
    assert [(row.count, row.digest) for row in site.guard.ledger.entries()] == [(1, "word")]


def _training(site: Client, folder: Path) -> Client:
    site.trainer = build_site(site.job, "site-1", SiteConfig(), folder / "one", lambda event: None, root=folder)
    return site


def test_a_hello_tells_of_no_training_that_was_not_paid(client: MakeClient, tmp_path: Path) -> None:
    """`joined` said that the site had kept its state, so that training had not failed, where nothing could leave too."""
    site = _training(client(SITE_LEVEL, budgets={"site": {"epsilon": 3.1}}), tmp_path)
    joined = [_joined(site)]
    task = admitted(site)
    other = client(SITE_LEVEL, folder="two", budgets={"site": {"epsilon": 3.1}})
    for round in range(2):
        assert wire.reason_of(other.ask("train", other.task(round, run="run-2"))) is None
    assert wire.reason_of(answered(site, task)) is Reason.BUDGET
    assert list((tmp_path / "one").rglob("state.safetensors"))
    joined.append(_joined(site))
    site = _training(client(SITE_LEVEL, budgets={"site": {"epsilon": 100}}), tmp_path)
    assert wire.reason_of(answered(site, admitted(site))) is None
    assert [*joined, _joined(site)] == [False, False, True]


def _joined(site: Client) -> bool:
    process_state.put(site.guard)
    return site.ask("hello", wire.encode_dict(wire.HELLO, {"run": "run-1"}))[wire.HELLO]["joined"]


@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL])
def test_what_a_word_costs_comes_into_the_record_once_however_late(privacy: dict, client: MakeClient, tmp_path: Path) -> None:
    """Its row was written, its line was not, and never came."""
    site = failing(client(privacy))
    task = admitted(site)
    with patch("consilium.privacy.audit_log.os.write", side_effect=FULL):
        assert wire.reason_of(answered(site, task)) is Reason.LEDGER
    again = client(privacy)
    for _ in range(3):
        assert wire.reason_of(again.ask("train", again.task())) is Reason.TRAINING
    (path,) = tmp_path.rglob("audit.jsonl")
    rows = [line["row"] for line in audit_log.read_with_epsilon(path)["messages"] if "privacy" in line]
    assert rows == [f"run-1.{site.job.config.digest[:16]}"]


@pytest.mark.parametrize("text", ['{"run-1.', "[]", '{"run": 3}', '{"run": {}}'])
def test_a_damaged_list_of_homes_is_named_before_any_training(text: str, client: MakeClient, tmp_path: Path) -> None:
    """It was `error`, and a traceback in a simulation."""
    (tmp_path / "homes.json").write_text(text)
    site = client(SITE_LEVEL)
    with pytest.raises(
        RefusedError, match=r"homes\.json: cannot be read; .* restore it, or remove it where no run goes on"
    ) as error:
        site.guard.authorize(Kind.TRAIN, "run-1", site.broadcast())
    assert error.value.reason is Reason.LEDGER


@pytest.mark.parametrize(("privacy", "word"), [(None, Reason.DATA), (SITE_LEVEL, Reason.TRAINING)])
def test_a_picture_that_fails_amid_training_is_paid_for(
    privacy: dict | None, word: Reason, client: MakeClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`data` told for nothing, at every ask, that no batch before the broken picture had failed on the values sent."""
    site = _training(client(privacy), tmp_path)
    broken = patch.object(site.trainer.context.task, "batch", side_effect=DataError("Muster_Erika.png: image cannot be read"))
    for _ in range(2):
        with broken:
            assert wire.reason_of(answered(site, admitted(site))) is word
    assert "the data cannot be used" in caplog.text
    assert "Muster" not in caplog.text  # FLARE's log has many readers
    rows = site.guard.ledger.entries()
    assert [row.digest for row in rows if row.digest] == ["word"] * (privacy is not None)
    assert [row.count > 0 for row in rows].count(True) == (privacy is not None)
