"""One buffer for small tensors: nothing is changed, nothing odd gets through, and what it adds stays small."""

import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nvflare.fuel.utils import fobs

from consilium.core.errors import RefusedError
from consilium.core.messages import Payload
from consilium.flare.job import wire

TENSORS = {
    "b.lora_A": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "large.lora_B": torch.rand(300, 200),
    "a.gate": torch.tensor([0.25], dtype=torch.float64),
    "none": torch.zeros(0, 4),
    "count": torch.tensor(7),
}


SENDS_OURS_FIRST = """
import os, sys
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.fuel.utils import fobs
from consilium.core.messages import Payload
from consilium.flare.job import wire
heard, sends = os.pipe()
if not os.fork():
    flare_decomposers.register()
    os.write(sends, fobs.dumps(Shareable({"cert": b"the server's"})))
    os._exit(0)
wire.register()
fobs.dumps(wire.encode(Payload(0, 0, {}), "run-1", update=True))
assert fobs.loads(os.read(heard, 10_000))["cert"] == b"the server's"
"""


def through(payload: Payload, packed: bool = True) -> Payload:
    wire.register()
    return wire.decode(fobs.loads(fobs.dumps(wire.encode(payload, "run-1", update=True, packed=packed))))[0]


def test_flares_messages_keep_their_contents_after_ours() -> None:
    # FLARE's admin login reads the server's certificate from such a message; without it no session succeeds
    subprocess.run([sys.executable, "-c", SENDS_OURS_FIRST], check=True)


def test_packing_keeps_tensors() -> None:
    turned = {"t.lora_A": torch.rand(3, 2).T}
    sent = Payload(3, 1, TENSORS | turned, {"gate": 0.5}, {"train/loss": float("inf")}, "seal")
    heard = through(sent)
    assert list(heard.tensors) == list(sent.tensors)
    for name, tensor in sent.tensors.items():
        assert heard.tensors[name].dtype == tensor.dtype
        assert torch.equal(heard.tensors[name], tensor)
    assert (heard.scalars, heard.metrics, heard.ledger, heard.round) == (sent.scalars, sent.metrics, "seal", 3)
    assert through(Payload(0, 0, {})).tensors == {}


def test_overhead_is_at_most_a_fiftieth() -> None:
    """Llama of 64 dimensions, five blocks, rank 8 on q, k, v: 51,200 bytes, of which 30 x 260 more were 15 %."""
    sizes = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
    tensors = {}
    for layer, (name, out) in ((layer, one) for layer in range(5) for one in sizes.items()):
        where = f"model.layers.{layer}.self_attn.{name}"
        tensors |= {f"{where}.lora_A": torch.rand(8, 64), f"{where}.lora_B": torch.rand(out, 8)}
    metrics = {f"validation/{model}/loss": 1.234567 for model in ("global", "personalized")} | {"train/loss": 0.7654321}
    message = wire.encode(Payload(4, 0, tensors, {}, metrics, "0" * 64), "", update=True, packed=True)
    assert sum(tensor.nbytes for tensor in tensors.values()) == 51_200
    assert len(fobs.dumps(message)) <= 1.02 * 51_200


def said(names: Any, rest: Any = {}) -> bytes:  # noqa: B006
    return zlib.compress(json.dumps([names, rest]).encode())


FOUR = ["a", "float32", [1]]
HOSTILE: dict[str, Callable[[], bytes]] = {  # made in the test: every worker collects this file
    "no text": lambda: b"\x00",
    "a bomb": lambda: zlib.compress(b"[" + b" " * 2 * wire.MAX_TEXT),
    "nested": lambda: zlib.compress(b"[" * 100_000),
    "cut": lambda: said([FOUR])[:-3],
    "two texts": lambda: said([FOUR]) + said([FOUR]),
    "no pair": lambda: zlib.compress(b"[[]]"),
    "a number": lambda: said([[4, "float32", [1]]]),
    "twice": lambda: said([FOUR, FOUR]),
    "unknown type": lambda: said([["a", "complex64", [1]]]),
    "too few": lambda: said([]),
    "too many": lambda: said([FOUR, ["b", "float32", [1]]]),
    "beyond": lambda: said([["a", "float32", [2**40, 2**40]]]),
    "below": lambda: said([["a", "float32", [-1, -1]]]),
    "no size": lambda: said([["a", "float32", [True]]]),
    "not there": lambda: said([FOUR, ["b"]]),
    "the buffer itself": lambda: said([[wire.BUFFER]]),
    "no rest": lambda: said([FOUR], []),
    "long numbers": lambda: zlib.compress(b'[[["a","float32",[' + b",".join([b"9" * 4000] * 400) + b"]]],{}]"),
    "many axes": lambda: said([["a", "float32", [1] * 9]]),
    "a shape that is none": lambda: said([["a", "float32", "4"]]),
    "more names than an adapter has": lambda: said([[str(i), "float32", [0]] for i in range(wire.MAX_TENSORS + 1)]),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_malformed_packs_are_refused(kind: str) -> None:
    message = wire.encode(Payload(0, 0, {wire.BUFFER: torch.zeros(4, dtype=torch.uint8)}), "", update=True)
    message["DXO"]["meta"][wire.KEY] = HOSTILE[kind]()
    with pytest.raises(RefusedError, match="not a consilium message"):
        wire.decode(message)


def test_other_buffers_are_refused() -> None:
    for buffer in (torch.zeros(1), torch.zeros(2, 2, dtype=torch.uint8), "text"):
        message = wire.encode(Payload(0, 0, {}), "", update=True)
        message["DXO"]["meta"][wire.KEY], message["DXO"]["data"] = said([FOUR]), {wire.BUFFER: buffer}
        with pytest.raises(RefusedError, match="not a consilium message"):
            wire.decode(message)
