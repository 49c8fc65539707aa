"""How messages and files are fuzzed: 200 cases in the slow suite, 2,000 in the long one, none over five seconds."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

SECONDS = 5
CASES = [pytest.param(200, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.long)]
fuzzed = pytest.mark.parametrize("cases", CASES)
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=50), st.binary(max_size=20), st.just(10**400)
)
VALUES = st.one_of(PLAIN, st.lists(PLAIN, max_size=3), st.dictionaries(PLAIN, PLAIN, max_size=3))


def attack(cases: int, body: Callable[..., None], **drawn: st.SearchStrategy[Any]) -> None:
    """Call `body` with `cases` draws, by keyword."""
    limits = settings(max_examples=cases, deadline=SECONDS * 1000, database=None, suppress_health_check=list(HealthCheck))
    limits(given(**drawn)(lambda **values: body(**values)))()
