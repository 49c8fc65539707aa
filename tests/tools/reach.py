"""The pytest plugin of mutants.py: it records which statements each test reaches.

Instrumented code calls hit() before each statement of a function. Child processes that a test starts record for that test.
"""

import os
import sys
from collections.abc import Iterator

import pytest

_records = os.open(os.environ["MUTANTS_RECORDS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_seen: set[str] = set()
_test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]  # "tests/x.py::test_y (call)" in a child process


def hit(place: str) -> None:
    """Record that the running test reaches a statement, given as path:line."""
    if place not in _seen:
        _seen.add(place)
        _record("hit", _test, place)


def _record(*fields: str) -> None:
    os.write(_records, ("\t".join(fields) + "\n").encode())


def _switch(test: str) -> None:
    global _test
    _test = test
    _seen.clear()


def pytest_runtest_logstart(nodeid: str) -> None:
    """Statements reached from here on belong to this test."""
    _switch(nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
    """A fixture that several tests share belongs to all tests of the file: any of them may be the one that notices."""
    before = _test
    if fixturedef.scope != "function":
        _switch(before.partition("::")[0])
    try:
        return (yield)
    finally:
        _switch(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record the processor time of a test and of its child processes: how busy the machine is does not count."""
    before = sum(os.times()[:4])
    try:
        return (yield)
    finally:
        _record("test", item.nodeid, f"{sum(os.times()[:4]) - before:.2f}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record that a test fails."""
    if report.failed:
        _record("failed", report.nodeid)


def pytest_sessionfinish() -> None:
    """Record the modules that the tests loaded, so that later processes can begin with them."""
    for name in list(sys.modules):
        _record("module", name)
