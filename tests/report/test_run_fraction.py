"""The fraction of a run and the time left, by hand, for sites of unequal sizes."""

import pytest

from consilium.report import live_view
from consilium.report.live_view import RunFraction


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of the monotonic clock."""
    now = [1000.0]
    monkeypatch.setattr(live_view.time, "monotonic", lambda: now[0])
    return now


def begun(run: RunFraction, round: int, *sites: str, phase: int = 0, phases: int = 1) -> None:
    run({"event": "round", "round": round, "phase": phase, "phases": phases, "sites": sites})


def trained(run: RunFraction, clock: list[float], site: str, steps: int) -> list[float | None]:
    """Let a site make its steps of one second each. Return the time left after each step."""
    found = []
    for step in range(1, steps + 1):
        clock[0] += 1
        run({"event": "step", "site": site, "step": step, "steps": steps, "loss": 1.0})
        found.append(run.seconds_left)
    run({"event": "metrics", "site": site, "round": run.round, "metrics": {"train/loss": 1.0}})
    return found


def test_unequal_sites_count_by_their_steps(clock: list[float]) -> None:
    """By hand: two rounds of 10 + 90 steps of a second each, one site after the other."""
    run = RunFraction(2)
    clock[0] += 30  # the time of loading
    begun(run, 0, "small", "large")
    assert run.seconds_left is None
    small = trained(run, clock, "small", 10)
    assert small[-1] == pytest.approx(30)  # the large site is unknown yet, and counts as the small one
    assert trained(run, clock, "large", 90) == pytest.approx([200.0 - n for n in range(11, 101)])
    begun(run, 1, "small", "large")
    assert trained(run, clock, "small", 10) == pytest.approx([100.0 - n for n in range(1, 11)])
    assert run.fraction == pytest.approx(0.55)
    assert trained(run, clock, "large", 90)[-1] == pytest.approx(0.0, abs=1e-9)
    run({"event": "metrics", "site": "small", "metrics": {"test/global/dice": 0.5}})
    assert run.fraction == 1.0


def test_resumed_run_counts_its_own_rounds(clock: list[float]) -> None:
    """By hand: five of ten rounds are done before, and a round takes 10 s."""
    run = RunFraction(10)
    begun(run, 5, "a")
    trained(run, clock, "a", 10)
    assert run.fraction == pytest.approx(0.6)
    assert run.seconds_left == pytest.approx(40)


def test_refused_sites_and_early_ends_leave_nothing_to_wait_for(clock: list[float]) -> None:
    run = RunFraction(4)
    begun(run, 0, "a", "b")
    trained(run, clock, "a", 10)
    assert run.fraction == pytest.approx(1 / 8)
    run({"event": "refused", "site": "b", "round": 0, "reason": "NaN"})
    assert run.fraction == pytest.approx(1 / 4)
    run({"event": "ended", "round": 1})
    assert run.fraction == 1.0
    assert run.seconds_left == 0


def test_phases_and_rounds_without_steps(clock: list[float]) -> None:
    run = RunFraction(2)
    assert run.fraction == 0.0
    begun(run, 1, "a", "b", phase=1, phases=2)
    assert run.fraction == 0.75
    run({"event": "metrics", "site": "a", "metrics": {"train/loss": 1.0}})
    assert run.fraction == 0.875
