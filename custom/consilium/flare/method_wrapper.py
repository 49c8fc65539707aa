"""A wrapper around a method of FLARE's, for components of a kit that need what FLARE has no event for."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from consilium.core.errors import ConsiliumError


def wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Have `around` called with what FLARE's method was, and then its arguments."""
    method = getattr(owner, name, None)
    if method is None:
        raise ConsiliumError(f"FLARE has no {owner.__name__}.{name}, which this kit needs; install the pinned nvflare")

    @wraps(method)
    def wrapped(*args: Any, **given: Any) -> Any:
        return around(method, *args, **given)

    setattr(owner, name, wrapped)
