"""The fraction of a run, by hand, for sites of unequal sizes."""

import pytest

from consilium.report.live_view import RunFraction


def begun(run: RunFraction, round: int, *sites: str, phase: int = 0, phases: int = 1) -> None:
    run({"event": "round", "round": round, "phase": phase, "phases": phases, "sites": sites})


def trained(run: RunFraction, site: str, steps: int) -> list[float]:
    """Let a site make its steps. Return the fraction after each step."""
    found = []
    for step in range(1, steps + 1):
        run({"event": "step", "site": site, "step": step, "steps": steps, "loss": 1.0})
        found.append(run.fraction)
    run({"event": "metrics", "site": site, "round": run.round, "metrics": {"train/loss": 1.0}})
    return found


def test_unequal_sites_count_by_their_steps() -> None:
    """By hand: two rounds of 10 + 90 steps, one site after the other."""
    run = RunFraction(2)
    begun(run, 0, "small", "large")
    assert trained(run, "small", 10)[-1] == pytest.approx(1 / 4)  # the large site is unknown yet, and counts as the small one
    assert trained(run, "large", 90) == pytest.approx([n / 200 for n in range(11, 101)])
    begun(run, 1, "small", "large")
    assert trained(run, "small", 10) == pytest.approx([0.5 + n / 200 for n in range(1, 11)])
    assert trained(run, "large", 90)[-1] == pytest.approx(1.0)
    run({"event": "metrics", "site": "small", "metrics": {"test/global/dice": 0.5}})
    assert run.fraction == 1.0


def test_refused_sites_and_early_ends_leave_nothing_to_wait_for() -> None:
    run = RunFraction(4)
    begun(run, 0, "a", "b")
    trained(run, "a", 10)
    assert run.fraction == pytest.approx(1 / 8)
    run({"event": "refused", "site": "b", "round": 0, "reason": "NaN"})
    assert run.fraction == pytest.approx(1 / 4)
    run({"event": "ended", "round": 1})
    assert run.fraction == 1.0


def test_phases_and_rounds_without_steps() -> None:
    run = RunFraction(2)
    assert run.fraction == 0.0
    begun(run, 1, "a", "b", phase=1, phases=2)
    assert run.fraction == 0.75
    run({"event": "metrics", "site": "a", "metrics": {"train/loss": 1.0}})
    assert run.fraction == 0.875
