"""Checks of sites' replies: a hello, or the reason for no result. No text of a site is repeated."""

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from consilium.core.errors import Reason, RefusedError
from consilium.core.messages import PROTOCOL, Hello
from consilium.core.sanitize import shown
from consilium.federation.compatibility import check_versions
from consilium.flare.job import wire

CODES = frozenset(value for key, value in vars(ReturnCode).items() if not key.startswith("_"))


def hello(name: str, result: Shareable) -> Hello:
    """Return a site's hello. Raises RefusedError unless it has the name of the site's certificate."""
    try:
        raw = result[wire.HELLO]
        if type(raw) is dict and raw.get("protocol", 1) != PROTOCOL:  # another protocol's other fields are not known
            check_versions(Hello(name, 0, False, raw.get("version", ""), protocol=raw.get("protocol", 1)))
        found = Hello(**raw)
    except (TypeError, KeyError):
        raise RefusedError("its hello is none of this version; install the same at all sites") from None
    if found.name != name:
        raise RefusedError(f"it says it is {shown(found.name, 40)!r}, its certificate says {name!r}")
    return found


def failure_reason(result: Shareable, fl_ctx: FLContext) -> str | None:
    """Return why a reply has no result, None if it has one: one of our own texts, never a site's.

    The reason of the server's own check comes in FLARE's context, to which no site can write.
    """
    code = result.get_return_code()
    if code == ReturnCode.OK:
        return None
    if found := fl_ctx.get_prop(wire.REASON):
        return found
    if (reason := result.get_header(wire.REASON)) is None and code in CODES:
        return f"FLARE return code {code}; see the site's log"
    try:
        return Reason(reason).text
    except ValueError:
        return "no reason that this version knows; see the site's log"
