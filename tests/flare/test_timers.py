"""One thread for all of FLARE's timers: each is called when it is due, and none that was cancelled."""

import queue
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from nvflare.fuel.f3.streaming import byte_receiver

from consilium.flare.job.timers import SharedTimer, share_timers


def test_hundreds_of_timers_take_one_thread_and_all_are_called_but_who_was_cancelled() -> None:
    called: queue.SimpleQueue[int] = queue.SimpleQueue()

    def put(number: int) -> None:
        called.put(number)
        assert number != 0  # a timer that fails ends no other

    before, timers = threading.active_count(), [SharedTimer(0.05, partial(put, n)) for n in range(500)]
    last = SharedTimer(0.1, partial(put, 500))
    last.start()
    for timer in timers:
        timer.start()
    timers[7].cancel()
    assert threading.active_count() <= before + 1
    found = [called.get(timeout=10) for _ in range(500)]
    assert sorted(found) == [n for n in range(501) if n != 7]


def test_flare_forgets_a_received_message_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE's own function on a task of which no more is left than that asks for."""
    monkeypatch.setattr(byte_receiver, "threading", threading)
    share_timers()
    forgotten, before = threading.Event(), threading.active_count()
    task = SimpleNamespace(stop_lock=threading.Lock(), cleanup_timer=None, completed_task_ttl=0.01, _remove_task=forgotten.set)
    byte_receiver.RxTask._schedule_remove_task(task)
    assert isinstance(task.cleanup_timer, SharedTimer)
    assert forgotten.wait(10)
    assert threading.active_count() <= before + 1
