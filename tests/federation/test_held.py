"""What the server holds while sites answer: for a mean, one result at a time, however many sites there are."""

import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.dxo import from_shareable

from consilium.core.messages import SiteInfo
from consilium.federation.job_assembly import Job
from consilium.flare.job import wire
from consilium.runtime.engine import LocalTransport
from consilium.runtime.run_loop import RunLoop
from consilium.server.coordinator import Coordinator
from tests.federation.test_coordinator import coordinator, update
from tests.flare.answering import Federation, context, trained


def watched(server: Coordinator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets, at every result that is added, how many of those before it still live."""
    seen, living, add = list[weakref.ref[Any]](), list[int](), server.aggregate.add

    def spy(site: SiteInfo, result: Any, *rest: Any) -> None:
        living.append(sum(one() is not None for one in seen))
        seen.extend(weakref.ref(tensor) for tensor in result.tensors.values())
        add(site, result, *rest)

    monkeypatch.setattr(server.aggregate, "add", spy)
    return living


@pytest.mark.parametrize(("strategy", "keeps"), [("fedit", False), ("lora_fair", True)])
def test_in_process_no_result_is_held_while_the_next_site_trains(
    strategy: str, keeps: bool, small_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = small_job(strategy)
    server = coordinator(job, tmp_path, 4)
    living = watched(server, monkeypatch)
    member = SimpleNamespace(prepare_ask=lambda what, run, payload: lambda: update(job, 0.1, payload.round))
    RunLoop(server, LocalTransport(server, dict.fromkeys(server.sites, member))).run_phase()
    assert len(living) == 4
    assert any(living) is keeps
    server.close()


def test_flares_controller_holds_no_result_and_sends_all_sites_one_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "b", "c", "d"]
    federation, fl_ctx = Federation(tmp_path, {name: trained(1.0) for name in names}), context(names)
    federation.register(fl_ctx)
    federation.sent.clear()
    living = watched(federation.coordinator, monkeypatch)
    federation.play_round(fl_ctx)
    assert living == [0, 0, 0, 0]
    sent = [from_shareable(task.data).data[wire.BUFFER] for name, task in federation.sent if task.name == wire.TRAIN]
    assert len(sent) == 4
    assert all(one is sent[0] for one in sent)
