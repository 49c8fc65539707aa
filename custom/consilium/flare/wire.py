"""Our messages as FLARE shareables: tensors in a DXO, everything else in its meta under one key."""

from typing import Any

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs

from consilium.errors import RefusedError
from consilium.strategy import Payload

HELLO, TRAIN, EVALUATE = "hello", "train", "evaluate"
KEY = "consilium"
REASON = "consilium_reason"
HELD = "consilium_held"

_held: dict[str, Payload] = {}


def register() -> None:
    """Teach FLARE's serializer tensors. Both sides must, or the receiver retries for ever."""
    fobs.register(TensorDecomposer)


def encode(payload: Payload, run: str, update: bool, num_samples: int = 1) -> Shareable:
    """Return a payload as a shareable: values (down) or, with `update`, a difference (up) with its weight."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in payload.tensors.items()}
    rest = {"run": run, "phase": payload.phase, "scalars": payload.scalars, "metrics": payload.metrics}
    dxo = DXO(DataKind.WEIGHT_DIFF if update else DataKind.WEIGHTS, tensors, {KEY: rest})
    if update:
        dxo.set_meta_prop(MetaKey.NUM_STEPS_CURRENT_ROUND, num_samples)
    shareable = dxo.to_shareable()
    shareable.set_header(AppConstants.CURRENT_ROUND, payload.round)
    shareable.add_cookie(AppConstants.CONTRIBUTION_ROUND, payload.round)
    return shareable


def decode(shareable: Shareable) -> tuple[Payload, str]:
    """Return (payload, run). A message of FLARE's own controllers has no phase, scalars or run: 0, none and "".

    Raises RefusedError for anything that is no such message.
    """
    try:
        dxo = from_shareable(shareable)
        rest: dict[str, Any] = dxo.get_meta_prop(KEY) or {}
        round = int(shareable.get_header(AppConstants.CURRENT_ROUND, dxo.get_meta_prop(MetaKey.CURRENT_ROUND, 0)))
        tensors, scalars = dict(dxo.data), dict(rest.get("scalars", {}))
        return Payload(round, int(rest.get("phase", 0)), tensors, scalars, dict(rest.get("metrics", {}))), rest.get("run", "")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RefusedError(f"not a consilium message: {error}") from None


def hold(payload: Payload, run: str) -> Shareable:
    """Keep a result in this process and return a shareable that only names it: what no guard takes up cannot leave."""
    _held[run] = payload
    return Shareable({HELD: run})


def take(shareable: Shareable) -> tuple[Payload, str]:
    """Return the (payload, run) that was held, or that the message itself carries. Raises RefusedError."""
    if HELD not in shareable:
        return decode(shareable)
    run = str(shareable[HELD])
    if run not in _held:
        raise RefusedError("the result is gone; nothing was sent; the site trains again when asked again")
    return _held.pop(run), run


def encode_dict(key: str, values: dict[str, Any]) -> Shareable:
    """Return a shareable that holds only plain values."""
    shareable = Shareable()
    shareable[key] = values
    return shareable


def refusal(reason: str, code: str = ReturnCode.EXECUTION_EXCEPTION) -> Shareable:
    """Return a reply that carries nothing but the reason why there is no result."""
    return make_reply(code, {REASON: reason})


def failure(shareable: Shareable) -> str | None:
    """Return why a reply holds no result, or None if it does."""
    code = shareable.get_return_code()
    return None if code == ReturnCode.OK else shareable.get_header(REASON, f"FLARE return code {code}; see the site's log")
