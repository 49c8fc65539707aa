"""Our messages as FLARE shareables: tensors in a DXO, everything else in its meta under one key.

Inside a site, tasks and results go from filter to executor and back by `hold` and `take`: as objects of this process, under a
name that nobody else can know. So what the guard authorized is what runs, and what no guard takes up cannot leave.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs

from consilium.core.errors import Reason, RefusedError
from consilium.core.messages import Kind, Payload, Tensors, is_hash
from consilium.flare.job import tensor_packing
from consilium.privacy.guard.task import Task

HELLO, TRAIN, EVALUATE = Kind.HELLO.value, Kind.TRAIN.value, Kind.EVALUATE.value
STATISTICS, MODEL, MASKS = Kind.STATISTICS.value, Kind.MODEL.value, Kind.MASKS.value
KEY = "consilium"
REASON = "consilium_reason"
SEAL = "consilium_seal"
"""The header of a hello with the last seal of the site's ledger."""
HELD = "consilium_held"
REFUSED = ReturnCode.EXECUTION_EXCEPTION
"""The one return code of every refusal: a choice of codes would tell more than the reason does."""

_held: dict[str, Any] = {}


@dataclass(frozen=True)
class Answer:
    """A result and the task it answers. It becomes a message by the guard's result filter only."""

    task: Task
    result: Any


def register() -> None:
    """Teach FLARE's serializer tensors. Both sides must, or the receiver retries for ever."""
    fobs.register(TensorDecomposer)


def encode(payload: Payload, run: str, update: bool, num_samples: int = 1, packed: bool = False) -> Shareable:
    """Return a payload as a shareable: values (down) or, with `update`, a difference (up) with its weight.

    `packed`: for one of ours, see packing.py; FLARE's own controllers want tensors under their names.
    """
    tensors, rest = _contents(payload, run)
    if packed and not payload.masking:  # keys and signatures are bytes
        tensors, rest = tensor_packing.pack(tensors, rest)
    return _message(payload, tensors, rest, update, num_samples)


def encode_each(payloads: Mapping[str, Payload], run: str) -> dict[str, Shareable]:
    """Return every site's payload (values) as a packed shareable. Those of the same tensors and words have one content.

    So where all sites are sent the same, it is packed once, and the server's memory does not grow with their number.
    """
    made: dict[object, tuple[Tensors, Any]] = {}
    found = {}
    for name, payload in payloads.items():
        tensors, rest = _contents(payload, run)
        key = repr(rest), tuple((own, id(tensor)) for own, tensor in payload.tensors.items())
        if key not in made:
            made[key] = tensor_packing.pack(tensors, rest)
        found[name] = _message(payload, *made[key], update=False)
    return found


def _contents(payload: Payload, run: str) -> tuple[Tensors, Any]:
    """Return a payload's tensors and all that is said beside them."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in payload.tensors.items()}
    rest = {"run": run, "phase": payload.phase, "scalars": payload.scalars, "metrics": payload.metrics}
    return tensors, rest | {"ledger": payload.ledger} | ({"masking": payload.masking} if payload.masking else {})


def _message(payload: Payload, tensors: Tensors, rest: Any, update: bool, num_samples: int = 1) -> Shareable:
    dxo = DXO(DataKind.WEIGHT_DIFF if update else DataKind.WEIGHTS, dict(tensors), {KEY: rest})
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
        rest, tensors = dxo.get_meta_prop(KEY) or {}, dict(dxo.data)
        if isinstance(rest, bytes):
            tensors, rest = tensor_packing.unpack(tensors, rest)
        round = _whole(shareable.get_header(AppConstants.CURRENT_ROUND, dxo.get_meta_prop(MetaKey.CURRENT_ROUND, 0)))
        payload = Payload(
            round,
            _whole(rest.get("phase", 0)),
            tensors,
            dict(rest.get("scalars", {})),
            dict(rest.get("metrics", {})),
            _text(rest.get("ledger", "")),
            dict(rest.get("masking", {})),
        )
        return payload, _text(rest.get("run", ""))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RefusedError(f"not a consilium message: {type(error).__name__}", Reason.TASK) from None


def encode_hello(run: str, seal: str) -> Shareable:
    """Return the question who a site is; `seal`: the last of its privacy ledger that the server has, "" for none.

    The seal is a header, which sites of former versions do not read.
    """
    asked = encode_dict(HELLO, {"run": run})
    if seal:
        asked.set_header(SEAL, seal)
    return asked


def decode_seal(shareable: Shareable) -> str:
    """Return the seal that came with a hello, "" for none. Raises RefusedError for what is none."""
    if not is_hash(seal := shareable.get_header(SEAL, "")):
        raise RefusedError(f"not a task {HELLO} of consilium: its seal is none", Reason.TASK)
    return str(seal)


def decode_ask(shareable: Shareable, key: str = HELLO) -> str:
    """Return the run that a server's hello names, or its request for statistics or a model by that key.

    Raises RefusedError for anything that is no such message, or more than one.
    """
    asked, others = shareable.get(key), {HELLO, STATISTICS, MODEL, MASKS, "DXO"} - {key}
    if not isinstance(asked, dict) or asked.keys() != {"run"} or any(other in shareable for other in others):
        raise RefusedError(f"not a task {key} of consilium", Reason.TASK)
    return _text(asked["run"])


def decode_masks(shareable: Shareable) -> tuple[dict[str, Any], str]:
    """Return (question, run) of secure aggregation. Raises RefusedError for anything that is no such message."""
    asked, others = shareable.get(MASKS), {HELLO, STATISTICS, MODEL, "DXO"}
    if not isinstance(asked, dict) or asked.keys() != {"run", "question"} or any(other in shareable for other in others):
        raise RefusedError(f"not a task {MASKS} of consilium", Reason.TASK)
    if not isinstance(asked["question"], dict):
        raise RefusedError(f"not a task {MASKS} of consilium", Reason.TASK)
    return asked["question"], _text(asked["run"])


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) > 2**31:
        raise ValueError("no round or phase")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise RefusedError("not a consilium message: a name is no text", Reason.TASK)
    return value


def hold(item: Any) -> Shareable:
    """Keep a task or a result in this process and return a shareable that only names it."""
    name = secrets.token_hex(16)
    _held[name] = item
    return Shareable({HELD: name})


def held(shareable: Shareable) -> Any:
    """Return what a shareable names and this process keeps, or None."""
    name = shareable.get(HELD)
    return _held.get(name) if isinstance(name, str) else None


def take(shareable: Shareable) -> Any:
    """Return what a shareable names, which is then kept no longer. Raises RefusedError where there is nothing of that name."""
    found = held(shareable)
    if found is None:
        raise RefusedError("nothing that the guard has seen; nothing was sent", Reason.TASK)
    return _held.pop(shareable[HELD])


def encode_dict(key: str, values: dict[str, Any]) -> Shareable:
    """Return a shareable that holds only plain values."""
    shareable = Shareable()
    shareable[key] = values
    return shareable


def refusal(reason: Reason) -> Shareable:
    """Return a reply that carries nothing but the word for why there is no result."""
    return make_reply(REFUSED, {REASON: reason.value})


def reason_of(shareable: Shareable) -> Reason | None:
    """Return the word for why a reply holds no result, None if it does. Whatever else it says is not repeated."""
    if shareable.get_return_code() == ReturnCode.OK:
        return None
    try:
        return Reason(shareable.get_header(REASON))
    except ValueError:
        return Reason.ERROR


def bare(shareable: Shareable) -> Shareable:
    """Return a reply that holds no result without anything but its word, or its return code where it has no word."""
    said = shareable.get_header(REASON)
    return refusal(reason_of(shareable) or Reason.ERROR) if said is not None else make_reply(shareable.get_return_code())
