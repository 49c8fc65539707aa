"""Small tensors in one buffer: FLARE's serializer adds about 260 bytes to each tensor, and an adapter has hundreds.

Large tensors are sent as they are: FLARE streams each, and 260 bytes do not matter there.
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
"""The name of the buffer, (bytes,) uint8, among the tensors of a message."""
SMALL = 2**16
"""Tensors of fewer bytes go into the buffer."""
MAX_TEXT = 2**24
"""Most bytes of the unzipped text: a few kilobytes could unpack to gigabytes."""
MAX_TENSORS, MAX_AXES = 2**16, 8
"""Most tensors of a message, and axes of a tensor."""
_NAMES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8", "bool")
DTYPES = {name: getattr(torch, name) for name in _NAMES}
Listed = list[Any]


def pack(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> tuple[Tensors, bytes]:
    """Return the tensors to send, and a zipped text: all tensors' names, types and shapes in their order, and `rest`."""
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
    """Return the arguments of `pack`. Raises ValueError, TypeError or KeyError for values that `pack` has not made."""
    names, rest = json.loads(_unzipped(said))
    if not isinstance(names, list) or len(names) > MAX_TENSORS:
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
    """Return a copy of the first tensor in the rest of a buffer."""
    if rest.dtype != torch.uint8 or rest.ndim != 1 or not isinstance(shape, list) or len(shape) > MAX_AXES:
        raise ValueError("no buffer, or no shape")
    if any(type(size) is not int or not 0 <= size <= SMALL for size in shape):  # the product of very long numbers takes minutes
        raise ValueError("no shape of a small tensor")
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if not size <= min(len(rest), SMALL):
        raise ValueError("a tensor beyond the buffer")
    return rest[:size].clone().view(DTYPES[dtype]).reshape(shape)


def _unzipped(said: bytes) -> bytes:
    """Return the text; it takes at most MAX_TEXT bytes of memory. Raises ValueError."""
    opened = zlib.decompressobj()
    try:
        text = opened.decompress(said, MAX_TEXT)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not opened.eof or opened.unused_data:
        raise ValueError("too long, or cut")
    return text
