"""A server that begins with a round: what a site cannot do whatever is sent says so before anything is charged."""

from pathlib import Path
from typing import Any

import pytest

from consilium.core.errors import Reason
from tests.adversary.server.conftest import RECORD_LEVEL, SITE_LEVEL
from tests.conftest import small_config
from tests.data.storing import break_pixels, make_site

AT_RECORD_LEVEL = pytest.mark.parametrize(
    "privacy", [pytest.param(SITE_LEVEL, marks=pytest.mark.slow), RECORD_LEVEL], ids=["site", "record"]
)
"""At site level, where the same checks come first, in the slow suite: each trains a model."""


@AT_RECORD_LEVEL
def test_a_picture_that_cannot_be_decoded_costs_nothing_where_nobody_said_hello(
    privacy: dict, kit: Any, tmp_path: Path
) -> None:
    """FLARE's FedAvg says none, nor does a server that would have every round charged; nor a process that began anew."""
    site = kit(privacy, datalist=make_site(tmp_path / "list"))
    picture = tmp_path / "list" / "Muster_Erika_training_0.png"
    whole = picture.read_bytes()
    break_pixels(picture)
    assert [site.train(round) for round in (0, 1, 0)] == [Reason.DATA] * 3
    assert site.rows == []
    picture.write_bytes(whole)
    assert site.train() is None
    rows = site.rows
    break_pixels(picture)
    site.begin_anew()
    assert [site.train(round) for round in (0, 1, 0)] == [None, Reason.DATA, None]  # what has left needs no picture
    assert site.rows == rows


@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL], ids=["site", "record"])
def test_base_weights_that_are_missing_cost_nothing(privacy: dict, kit: Any, tmp_path: Path) -> None:
    """The word `checkpoint` costs a release where a server's values decide it; these came to nothing."""
    model = small_config("fedit").model_dump()["model"] | {"checkpoint": "${SITE}/none.pth"}
    site = kit(privacy, {"model": model}, datalist=make_site(tmp_path / "list"), checkpoints=tmp_path)
    assert [site.train(round) for round in (0, 1)] == [Reason.CHECKPOINT] * 2
    assert site.rows == []
    assert not list(tmp_path.rglob("refused/*"))


def test_other_devices_that_do_not_come_cost_nothing(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(work: Any, threads: int) -> None:
        raise OSError("no process can be made")

    monkeypatch.setattr("consilium.client.data_parallel.ChildProcess", gone)
    site = kit(SITE_LEVEL, datalist=make_site(tmp_path / "list"), devices=("cpu", "cpu"))
    assert [site.train(round) for round in (0, 1)] == [Reason.TRAINING] * 2
    assert site.rows == []
