"""What a site's reply to the controller says: a hello, or why there is no result."""

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from consilium.errors import Reason, RefusedError
from consilium.flare import wire
from consilium.messages import Hello
from consilium.report.clean import shown

CODES = frozenset(value for key, value in vars(ReturnCode).items() if not key.startswith("_"))


def hello_of(name: str, result: Shareable) -> Hello:
    """Return a site's hello. Raises RefusedError unless it is one, under the name of the site's certificate."""
    try:
        hello = Hello(**result[wire.HELLO])
    except (TypeError, KeyError):
        raise RefusedError("its hello is none of this version; install the same at all sites") from None
    if hello.name != name:
        raise RefusedError(f"it says it is {shown(hello.name, 40)!r}, its certificate says {name!r}")
    return hello


def why(result: Shareable, fl_ctx: FLContext) -> str | None:
    """Return why a reply holds no result, None if it does: in our own words, whatever text a site sends.

    What the server's own check found comes in FLARE's context, which nobody else can write to.
    """
    code = result.get_return_code()
    if code == ReturnCode.OK:
        return None
    if found := fl_ctx.get_prop(wire.REASON):
        return found
    if (said := result.get_header(wire.REASON)) is None and code in CODES:
        return f"FLARE return code {code}; see the site's log"
    try:
        return Reason(said).text
    except ValueError:
        return "no reason that this version knows; see the site's log"
