"""The state that our components keep in a process. No other test knows the tables by their names."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

from nvflare.apis.fl_context import FLContext

from consilium.client.client import Client
from consilium.flare.job import site_jobs, wire
from consilium.privacy.guard.guard import Guard

TABLES = (site_jobs.jobs, wire._held)


@contextmanager
def emptied() -> Iterator[None]:
    """Begin with nothing, as a new process does, and leave all as it was."""
    with ExitStack() as stack:
        for table in TABLES:
            stack.enter_context(patch.dict(table, clear=True))
        yield


@contextmanager
def filters_put_back() -> Iterator[None]:
    """Leave the state of filters as it was."""
    with patch.dict(site_jobs.jobs, {key: replace(one) for key, one in site_jobs.jobs.items()}):
        yield


def put(guard: Guard) -> None:
    """Let the filters of a context without a job meet this guard."""
    site_jobs.site_job_state(FLContext()).guard = guard


def forget_guards() -> None:
    """Forget the guards, as a process that ends does."""
    for one in site_jobs.jobs.values():
        one.guard = None


def forget_messages() -> None:
    """Forget what filters have sent and refused."""
    for one in site_jobs.jobs.values():
        one.sent = one.refused = None


def guards() -> list[Guard]:
    """Return the guards of this process."""
    return [one.guard for one in site_jobs.jobs.values() if one.guard]


def sites_here() -> list[Client]:
    """Return the sites of this process."""
    return [one.site for one in site_jobs.jobs.values() if one.site]
