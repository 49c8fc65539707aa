"""Small tensors in one buffer: FLARE's serializer adds some 260 bytes to every one, and an adapter has hundreds.

Large ones travel as they are: FLARE streams them one by one, and the 260 bytes are nothing there.
"""

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from consilium.core.messages import Tensors

BUFFER = "consilium_buffer"
"""The name that the buffer, (bytes,) uint8, has among the tensors of a message."""
SMALL = 2**16
"""Bytes of a tensor from which on it is none of the buffer's."""
LONGEST = 2**24
"""Bytes of what is said beside the tensors, at most: a few kilobytes unpack to gigabytes otherwise."""
MOST, MOST_AXES = 2**16, 8
"""Tensors of a message, and axes of one."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    )
}
Listed = list[Any]


def pack(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> tuple[Tensors, bytes]:
    """Return the tensors to send, and all that is said beside them: what they are called, in their order, and `rest`."""
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


def unpack(sent: Mapping[str, Tensor], said: bytes) -> tuple[Tensors, dict[str, Any]]:
    """Return what `pack` was given. Raises ValueError, TypeError or KeyError for anything that it has not made."""
    names, rest = json.loads(_unzipped(said))
    if not isinstance(names, list) or len(names) > MOST:
        raise ValueError("no names, or too many")
    buffer, tensors, place = sent.get(BUFFER, torch.empty(0, dtype=torch.uint8)), Tensors(), 0
    for name, *kind in names:
        if not isinstance(name, str) or name in tensors or name == BUFFER:
            raise ValueError("no name, or one twice")
        if not kind:
            tensors[name] = sent[name]
            continue
        tensors[name] = one = _tensor(buffer[place:], *kind)
        place += one.nbytes
    if place != buffer.numel() or sent.keys() - {BUFFER} - tensors.keys() or not isinstance(rest, dict):
        raise ValueError("more, or less, than is listed")
    return tensors, rest


def _tensor(rest: Tensor, dtype: str, shape: list[int]) -> Tensor:
    """Return the first tensor of what is left of a buffer, as one of its own."""
    if rest.dtype != torch.uint8 or rest.ndim != 1 or not isinstance(shape, list) or len(shape) > MOST_AXES:
        raise ValueError("no buffer, or no shape")
    if any(type(size) is not int or not 0 <= size <= SMALL for size in shape):  # a product of long numbers takes minutes
        raise ValueError("no shape of a small tensor")
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if not size <= min(len(rest), SMALL):
        raise ValueError("a tensor beyond the buffer")
    return rest[:size].clone().view(DTYPES[dtype]).reshape(shape)


def _unzipped(said: bytes) -> bytes:
    """Return the text, bounded before it takes memory. Raises ValueError."""
    opened = zlib.decompressobj()
    try:
        text = opened.decompress(said, LONGEST)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not opened.eof or opened.unused_data:
        raise ValueError("too long, or cut")
    return text
