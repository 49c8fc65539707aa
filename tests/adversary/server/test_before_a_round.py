"""A server that begins with a round: what a site cannot do whatever is sent says so before anything is charged."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.config.site import NodesConfig, SiteConfig
from consilium.errors import Reason
from consilium.federation.build import Job
from consilium.flare import context, filters, wire
from consilium.flare.executor import SiteExecutor
from consilium.flare.filters import GuardResultFilter, GuardTaskFilter
from consilium.messages import SiteInfo
from consilium.privacy.composition import Entry
from consilium.privacy.ledger import Ledger
from tests.adversary.server.conftest import RECORD_LEVEL, SITE_LEVEL
from tests.conftest import assembled, small_config
from tests.data.storing import break_pixels, make_site

NAME = FLContext().get_identity_name()


class Kit:
    """A site as FLARE runs it, of filters and executor alone; FLARE's context has the job, the settings and the folders."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder, self.executor = job, folder, SiteExecutor()

    def train(self, round: int = 0) -> Reason | None:
        """Return the word that the site answers a round with, None for an update."""
        fl_ctx = FLContext()
        fl_ctx.set_prop(FLContextKey.TASK_NAME, "train", private=True, sticky=False)
        sent = self.job.strategy.broadcast(self.job.strategy.init_state(self.job.initial), SiteInfo(NAME, 1))
        message = wire.encode(type(sent)(round, 0, sent.tensors), "run-1", update=False)
        return wire.reason_of(self._answer(GuardTaskFilter().process(message, fl_ctx), fl_ctx))

    def _answer(self, task: Shareable, fl_ctx: FLContext) -> Shareable:
        return GuardResultFilter().process(self.executor.execute("train", task, fl_ctx, Signal()), fl_ctx)

    def begin_anew(self) -> None:
        """Let the process end, and another begin."""
        self.executor.handle_event(EventType.END_RUN, FLContext())
        self.executor = SiteExecutor()
        filters._guards.clear()

    @property
    def rows(self) -> list[Entry]:
        return Ledger(self.folder / "ledger.sqlite").entries()


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make a site for a job with this `privacy` and `more`, with these settings."""
    made: list[Kit] = []

    def make(privacy: dict, more: dict | None = None, **settings: Any) -> Kit:
        job = assembled(JobConfig.model_validate(small_config("fedit").model_dump() | {"privacy": privacy} | (more or {})))
        site = SiteConfig(**settings, privacy=HospitalPrivacyPolicy(dataset="ward-7"))
        monkeypatch.setattr(context, "approved", lambda fl_ctx, name: (job, site))
        monkeypatch.setattr(context, "site_folder", lambda fl_ctx, job, name, site: tmp_path / "one")
        monkeypatch.setattr(context, "site_root", lambda fl_ctx, job, name, site: tmp_path)
        monkeypatch.setattr(context, "state_folder", lambda fl_ctx: tmp_path / "state")
        made.append(Kit(job, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.begin_anew()
    filters._sent.clear()
    filters._refused.clear()


BOTH = pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL], ids=["site", "record"])


@BOTH
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


@BOTH
def test_base_weights_that_are_missing_cost_nothing(privacy: dict, kit: Any, tmp_path: Path) -> None:
    """The word `checkpoint` costs a release where a server's values decide it; these came to nothing."""
    model = small_config("fedit").model_dump()["model"] | {"checkpoint": "${SITE}/none.pth"}
    site = kit(privacy, {"model": model}, datalist=make_site(tmp_path / "list"), checkpoints=tmp_path)
    assert [site.train(round) for round in (0, 1)] == [Reason.CHECKPOINT] * 2
    assert site.rows == []
    assert not list(tmp_path.rglob("refused/*"))


def test_other_devices_that_do_not_come_cost_nothing(kit: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef")
    (tmp_path / "secret").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as door:
        address = f"127.0.0.1:{door.getsockname()[1]}"
    nodes = NodesConfig(address=address, secret=tmp_path / "secret", ranks=1, wait=1)
    site = kit(SITE_LEVEL, datalist=make_site(tmp_path / "list"), nodes=nodes, device="cpu")
    assert [site.train(round) for round in (0, 1)] == [Reason.TRAINING] * 2
    assert site.rows == []
