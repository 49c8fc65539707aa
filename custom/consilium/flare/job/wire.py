"""Encoding of our messages as FLARE shareables: tensors in a DXO, all other values in the DXO's meta under one key.

Inside a site, filters and executor hand over tasks and results by `put` and `pop`. The objects stay in this process, and the
shareable holds only a random name. So exactly the authorized task runs, and a result can leave only through the guard.
"""

import json
import math
import secrets
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs
from torch import Tensor

from consilium.core.errors import Reason, RefusedError
from consilium.core.messages import Kind, Payload, Tensors, is_hash_or_empty
from consilium.privacy.guard.task_schedule import AuthorizedTask

# tensor packing --------------------------------------------------------------------------------------------------------
# Small tensors are packed into one buffer, because FLARE's serializer adds about 260 bytes to each tensor, and an adapter has
# hundreds of them. Large tensors are sent unpacked: FLARE streams them, and 260 bytes are little compared to their size.

BUFFER = "consilium_buffer"
"""The name of the buffer among the tensors of a message. Its shape is (bytes,) and its type uint8."""
SMALL = 2**16
"""Tensors with fewer bytes than this go into the buffer."""
MAX_TEXT = 2**24
"""Largest size of the unzipped text in bytes, because a few kilobytes could unpack to gigabytes."""
MAX_TENSORS, MAX_AXES = 2**16, 8
"""Largest number of tensors in a message, and of axes of a tensor."""
_NAMES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8", "bool")
DTYPES = {name: getattr(torch, name) for name in _NAMES}
Listed = list[Any]


def pack(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> tuple[Tensors, bytes]:
    """Return (the tensors to send, a zipped JSON text).

    The text has the names of all tensors in their order, the types and shapes of the tensors in the buffer, and `rest`.
    """
    small, sent, names = list[Tensor](), Tensors(), list[Listed]()
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.nbytes < SMALL and dtype in DTYPES:
            small.append(tensor.reshape(-1).view(torch.uint8))
            names.append([name, dtype, list(tensor.shape)])
        else:
            sent[name] = tensor
            names.append([name])
    if small:
        sent[BUFFER] = torch.cat(small)
    return sent, zlib.compress(json.dumps([names, dict(rest)], separators=(",", ":")).encode(), 9)


def unpack(sent: Mapping[str, Tensor], compressed: bytes) -> tuple[Tensors, dict[str, Any]]:
    """Return the arguments of `pack`, the inverse. Raises ValueError, TypeError or KeyError for values `pack` cannot return."""
    opened = zlib.decompressobj()
    try:
        text = opened.decompress(compressed, MAX_TEXT)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not opened.eof or opened.unused_data:
        raise ValueError("too long, or cut")
    names, rest = json.loads(text)
    if not isinstance(names, list) or len(names) > MAX_TENSORS:
        raise ValueError("no names, or too many")
    buffer, tensors, place = sent.get(BUFFER, torch.empty(0, dtype=torch.uint8)), Tensors(), 0
    for name, *kind in names:
        if not isinstance(name, str) or name in tensors or name == BUFFER:
            raise ValueError("no name, or one twice")
        if not kind:
            tensors[name] = sent[name]
            continue
        tensors[name] = one = _unpack_tensor(buffer[place:], *kind)
        place += one.nbytes
    if place != buffer.numel() or sent.keys() - {BUFFER} - tensors.keys() or not isinstance(rest, dict):
        raise ValueError("more, or less, than is listed")
    return tensors, rest


def _unpack_tensor(rest: Tensor, dtype: str, shape: list[int]) -> Tensor:
    """Return a copy of the tensor at the start of `rest`, which is the unread part of the buffer."""
    if rest.dtype != torch.uint8 or rest.ndim != 1 or not isinstance(shape, list) or len(shape) > MAX_AXES:
        raise ValueError("no buffer, or no shape")
    if any(type(size) is not int or not 0 <= size <= SMALL for size in shape):  # multiplying very long numbers takes minutes
        raise ValueError("no shape of a small tensor")
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if not size <= min(len(rest), SMALL):
        raise ValueError("a tensor beyond the buffer")
    return rest[:size].clone().view(DTYPES[dtype]).reshape(shape)


# wire ------------------------------------------------------------------------------------------------------------------

HELLO, TRAIN, EVALUATE = Kind.HELLO.value, Kind.TRAIN.value, Kind.EVALUATE.value
STATISTICS, MODEL, MASKS = Kind.STATISTICS.value, Kind.MODEL.value, Kind.MASKS.value
KEY = "consilium"
REASON = "consilium_reason"
SEAL = "consilium_seal"
"""The header of a hello that holds the last seal of the site's privacy ledger known to the server."""
HELD = "consilium_held"
REFUSED = ReturnCode.EXECUTION_EXCEPTION
"""The return code of every refusal. Different codes would reveal more than the reason."""

_held: dict[str, Any] = {}


@dataclass(frozen=True)
class Answer:
    """A result with the task it answers. Only the guard's result filter turns it into a message."""

    task: AuthorizedTask
    result: Any


def register() -> None:
    """Register tensors with FLARE's serializer. Server and sites must call this, or a receiver retries for ever.

    FLARE's own types are registered first. If a serializer meets our messages before they are, it loses the contents of FLARE's
    messages.
    """
    flare_decomposers.register()
    fobs.register(TensorDecomposer)


def encode(payload: Payload, run: str, update: bool, num_samples: int = 1, packed: bool = False) -> Shareable:
    """Return a payload as a shareable. It holds values for a site or, with `update`, a site's update and `num_samples`.

    `packed`: pack small tensors, see `pack`. FLARE's own controllers need all tensors under their names.
    """
    tensors, rest = _payload_contents(payload, run)
    if packed and not payload.masking:  # keys and signatures are bytes
        tensors, rest = pack(tensors, rest)
    return _to_shareable(payload, tensors, rest, update, num_samples)


def encode_each(payloads: Mapping[str, Payload], run: str) -> dict[str, Shareable]:
    """Return each site's payload (values) as a packed shareable. Equal payloads with the same tensor objects share content.

    So a payload for all sites is packed once, and the server's memory does not grow with the number of sites.
    """
    made: dict[object, tuple[Tensors, Any]] = {}
    found = {}
    for name, payload in payloads.items():
        tensors, rest = _payload_contents(payload, run)
        key = repr(rest), tuple((own, id(tensor)) for own, tensor in payload.tensors.items())
        if key not in made:
            made[key] = pack(tensors, rest)
        found[name] = _to_shareable(payload, *made[key], update=False)
    return found


def _payload_contents(payload: Payload, run: str) -> tuple[Tensors, Any]:
    """Return (a payload's tensors on the CPU, its other values)."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in payload.tensors.items()}
    rest = {"run": run, "phase": payload.phase, "scalars": payload.scalars, "metrics": payload.metrics}
    return tensors, rest | {"ledger": payload.ledger} | ({"masking": payload.masking} if payload.masking else {})


def _to_shareable(payload: Payload, tensors: Tensors, rest: Any, update: bool, num_samples: int = 1) -> Shareable:
    dxo = DXO(DataKind.WEIGHT_DIFF if update else DataKind.WEIGHTS, dict(tensors), {KEY: rest})
    if update:
        dxo.set_meta_prop(MetaKey.NUM_STEPS_CURRENT_ROUND, num_samples)
    shareable = dxo.to_shareable()
    shareable.set_header(AppConstants.CURRENT_ROUND, payload.round)
    shareable.add_cookie(AppConstants.CONTRIBUTION_ROUND, payload.round)
    return shareable


def decode(shareable: Shareable) -> tuple[Payload, str]:
    """Return (payload, run) of a message. Raises RefusedError if it is malformed.

    Messages from FLARE's own controllers have no phase, scalars or run. For them the phase is 0, the scalars are empty and the
    run is "".
    """
    try:
        dxo = from_shareable(shareable)
        rest, tensors = dxo.get_meta_prop(KEY) or {}, dict(dxo.data)
        if isinstance(rest, bytes):
            tensors, rest = unpack(tensors, rest)
        return Payload(
            _checked_integer(shareable.get_header(AppConstants.CURRENT_ROUND, dxo.get_meta_prop(MetaKey.CURRENT_ROUND, 0))),
            _checked_integer(rest.get("phase", 0)),
            tensors,
            dict(rest.get("scalars", {})),
            dict(rest.get("metrics", {})),
            _checked_text(rest.get("ledger", "")),
            dict(rest.get("masking", {})),
        ), _checked_text(rest.get("run", ""))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RefusedError(f"not a consilium message: {type(error).__name__}", Reason.TASK) from None


def encode_hello(run: str, seal: str) -> Shareable:
    """Return a hello to a site. `seal`: the last seal of the site's privacy ledger known to the server, "" for none.

    The seal is sent in a header, because sites of former versions ignore it there.
    """
    asked = encode_dict(HELLO, {"run": run})
    if seal:
        asked.set_header(SEAL, seal)
    return asked


def decode_task(kind: Kind, shareable: Shareable) -> tuple[str, Payload | None, str]:
    """Return (run, payload, seal) of a server's message. The payload may be None, and the seal "".

    Raises RefusedError if the message is not of this kind, or if it also has content of another kind.
    """
    problem = RefusedError(f"not a task {kind.value} of consilium", Reason.TASK)
    own = "DXO" if kind in (Kind.TRAIN, Kind.EVALUATE) else kind.value
    if any(other in shareable for other in {HELLO, STATISTICS, MODEL, MASKS, "DXO"} - {own}):
        raise problem
    if own == "DXO":
        payload, run = decode(shareable)
        return run, payload, ""
    asked = shareable.get(own)
    if not isinstance(asked, dict) or asked.keys() != ({"run", "question"} if kind is Kind.MASKS else {"run"}):
        raise problem
    seal = shareable.get_header(SEAL, "") if kind is Kind.HELLO else ""
    if not is_hash_or_empty(seal) or not isinstance(asked.get("question", {}), dict):
        raise problem
    question = Payload(-1, -1, {}, masking=asked["question"]) if kind is Kind.MASKS else None
    return _checked_text(asked["run"]), question, str(seal)


def _checked_integer(value: Any) -> int:
    if type(value) is not int or abs(value) > 2**31:
        raise ValueError("no round or phase")
    return value


def _checked_text(value: Any) -> str:
    if not isinstance(value, str):
        raise RefusedError("not a consilium message: a name is not a text", Reason.TASK)
    return value


def put(item: Any) -> Shareable:
    """Store a task or a result in this process under a random name. Return a shareable with only that name."""
    name = secrets.token_hex(16)
    _held[name] = item
    return Shareable({HELD: name})


def peek(shareable: Shareable) -> Any:
    """Return the stored object that a shareable names, None if there is none."""
    name = shareable.get(HELD)
    return _held.get(name) if isinstance(name, str) else None


def pop(shareable: Shareable) -> Any:
    """Return the stored object that a shareable names, and delete it from the store. Raises RefusedError if there is none."""
    found = peek(shareable)
    if found is None:
        raise RefusedError("nothing that the guard has seen; nothing was sent", Reason.TASK)
    return _held.pop(shareable[HELD])


def encode_dict(key: str, values: dict[str, Any]) -> Shareable:
    """Return a shareable that holds the plain `values` under `key`."""
    return Shareable({key: values})


def refusal(reason: Reason) -> Shareable:
    """Return a reply that holds nothing but the reason why there is no result."""
    return make_reply(REFUSED, {REASON: reason.value})


def reason_of(shareable: Shareable) -> Reason | None:
    """Return the reason why a reply has no result, None if it has a result. No other text in the reply is used."""
    if shareable.get_return_code() == ReturnCode.OK:
        return None
    try:
        return Reason(shareable.get_header(REASON))
    except ValueError:
        return Reason.ERROR
