"""Python loads this at the start of every process of a site under test: it writes down what they hand to FLARE's transport.

It knows nothing of consilium. Below the folder WIRE_TAP it keeps, for each process: PID.frames, one line for each frame that
goes to the server (its bytes); PID.messages, pickled, each message before FLARE encodes it, as plain values.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER, LOCK = os.environ.get("WIRE_TAP", ""), threading.Lock()


def plain(value: Any) -> Any:
    """Return a value as plain Python: a tensor as ("tensor", dtype, shape, its bytes), any other object as its properties."""
    if value is None or isinstance(value, (str, int, float, bool, bytes)):
        return value
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        raw = value.detach().cpu().contiguous().view(-1) if hasattr(value, "detach") else value
        raw = raw.view(sys.modules["torch"].uint8).numpy() if hasattr(value, "detach") else raw
        return ("tensor", str(value.dtype).removeprefix("torch."), tuple(value.shape), raw.tobytes())
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.copy().items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(one) for one in list(value)]
    return {type(value).__name__: plain(getattr(value, "props", None))}


def append(ending: str, data: bytes) -> None:
    """Add to this process' file, so that a process that is killed has written all it sent."""
    with LOCK, open(Path(FOLDER) / f"{os.getpid()}.{ending}", "ab") as file:
        file.write(data)


def tap_messages(module: ModuleType) -> None:
    encode = module.encode_payload

    def tapped(message: Any, *args: Any, **given: Any) -> Any:
        if message.payload is not None and not isinstance(message.payload, (bytes, bytearray, memoryview)):
            append("messages", pickle.dumps(plain(message.payload)))
        return encode(message, *args, **given)

    module.encode_payload = tapped


def tap_frames(module: ModuleType) -> None:
    send = module.StreamConnection.send_frame

    def tapped(connection: Any, frame: Any) -> None:
        append("frames", b"%d\n" % len(frame))
        send(connection, frame)

    module.StreamConnection.send_frame = tapped


TAPS: dict[str, Callable[[ModuleType], None]] = {
    "nvflare.fuel.f3.cellnet.utils": tap_messages,
    "nvflare.fuel.f3.drivers.grpc_driver": tap_frames,
}


class Loader(importlib.abc.Loader):
    """Loads a module as it would be, and then taps it."""

    def __init__(self, inner: Any, tap: Callable[[ModuleType], None]) -> None:
        self.inner, self.tap = inner, tap

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        self.tap(module)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules to tap, each once, where Python's own finders do."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if (tap := TAPS.pop(name, None)) is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec
        spec.loader = Loader(spec.loader, tap)
        return spec


if FOLDER:
    sys.meta_path.insert(0, Finder())
