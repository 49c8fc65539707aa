"""What our components keep in a process: emptied, filled and looked at. No other test knows the tables by their names."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from nvflare.apis.fl_context import FLContext

from consilium.client.client import Client
from consilium.flare.job import filters, job_context, site_registry, wire
from consilium.privacy.guard.guard import Guard

OF_FILTERS = (filters._guards, filters._sent, filters._refused)
TABLES = (*OF_FILTERS, site_registry._sites, site_registry._read, wire._held, job_context._opened)


@contextmanager
def emptied() -> Iterator[None]:
    """Begin with nothing, as a new process does, and leave all as it was."""
    with ExitStack() as stack:
        for table in TABLES:
            stack.enter_context(patch.dict(table, clear=True))
        stack.enter_context(patch.object(site_registry, "_useless", set()))
        yield


@contextmanager
def filters_put_back() -> Iterator[None]:
    """Leave what filters keep as it was."""
    with ExitStack() as stack:
        for table in OF_FILTERS:
            stack.enter_context(patch.dict(table))
        yield


def put(guard: Guard) -> None:
    """Let the filters of a context without a job meet this guard."""
    fl_ctx = FLContext()
    filters._guards[fl_ctx.get_job_id(), fl_ctx.get_identity_name()] = guard


def forget_guards() -> None:
    """Forget the guards, as a process that ends does."""
    filters._guards.clear()


def forget_messages() -> None:
    """Forget what filters have sent and refused."""
    filters._sent.clear()
    filters._refused.clear()


def guards() -> list[Guard]:
    """Return the guards of this process."""
    return list(filters._guards.values())


def sites_here() -> list[Client]:
    """Return the sites of this process."""
    return list(site_registry._sites.values())
