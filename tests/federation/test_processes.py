"""Work done in a process of its own: what it returns, what it raises, and an end without an answer."""

import os
from pathlib import Path

import pytest

from consilium.core.child_process import SPAWN, run_in_subprocess
from consilium.core.errors import ConfigError, ConsiliumError, Reason


def divided(number: int, by: int) -> tuple[int, Path, int]:
    if by == 0:
        raise ConfigError("by: 0: nothing is divided by it; give another", Reason.POLICY)
    return number // by, Path("there"), os.getpid()


def gone() -> None:
    os._exit(3)


def test_it_returns_what_the_work_returns_and_the_process_is_another() -> None:
    found, path, process = run_in_subprocess(SPAWN, divided, 6, 2)
    assert (found, path) == (3, Path("there"))
    assert process != os.getpid()


def test_an_error_for_the_user_is_the_same_error() -> None:
    with pytest.raises(ConfigError, match="by: 0: ") as found:
        run_in_subprocess(SPAWN, divided, 6, 0)
    assert found.value.reason is Reason.POLICY


def test_a_process_that_ends_without_an_answer_says_how_it_ended() -> None:
    with pytest.raises(ConsiliumError, match=r"the job could not be prepared: .*exit code 3"):
        run_in_subprocess(SPAWN, gone)
