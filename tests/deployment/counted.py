"""What crosses the wire, counted without this package: at a proxy on loopback, and before FLARE encodes it (tap/).

A site's processes reach the server by a proxy of their own (CONNECT, as hospitals have them), which sees TLS and counts bytes.
`tap/sitecustomize.py` writes down the frames that FLARE's transport is handed, and every message as plain values. Both ends
must agree: what the proxy saw is the frames and what TLS adds; of all messages only answers to tasks hold tensors.
"""

import json
import pickle
import socket
import socketserver
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np

TAP = Path(__file__).parent / "tap"
SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8, "uint8": 1, "bool": 1}


class Proxy(socketserver.ThreadingTCPServer):
    """An HTTP proxy for CONNECT. `up`: bytes from the site to the server; `links`: connections made."""

    daemon_threads, allow_reuse_address = True, True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Link)
        self.up, self.links, self.lock = 0, 0, threading.Lock()

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """Return what makes gRPC go through here."""
        return {"grpc_proxy": f"http://127.0.0.1:{self.server_address[1]}"}


class _Link(socketserver.BaseRequestHandler):
    """One connection."""

    server: Proxy

    def handle(self) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            if not (found := self.request.recv(1)):
                return
            head += found
        host, _, port = head.split()[1].decode().rpartition(":")
        try:
            other = socket.create_connection((host, int(port)), 10)
        except OSError:
            self.request.sendall(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
            return
        other.settimeout(None)
        with self.server.lock:
            self.server.links += 1
        self.request.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        back = threading.Thread(target=self._pump, args=(other, self.request, False), daemon=True)
        back.start()
        self._pump(self.request, other, True)
        back.join()

    def _pump(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if up:
                    with self.server.lock:
                        self.server.up += len(data)
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def frames(folder: Path) -> list[int]:
    """Return the bytes of each frame that the processes of a site handed to the transport."""
    return [int(line) for path in folder.glob("*.frames") for line in path.read_text().split()]


def messages(folder: Path) -> Iterator[Any]:
    """Yield every message of a site's processes, as plain values."""
    for path in sorted(folder.glob("*.messages")):
        with open(path, "rb") as file, suppress(EOFError, pickle.UnpicklingError):  # a killed process may have begun one
            while True:
                yield pickle.load(file)


def tensors_in(value: Any) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    """Yield (dtype, shape, bytes) of every tensor anywhere in a message."""
    if isinstance(value, tuple):
        yield value[1:]
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one)


def answers(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (kind of task, message) for each answer to a task that a site handed to FLARE."""
    for message in messages(folder):
        headers = message.get("__headers__") or {} if isinstance(message, dict) else {}
        if "__task_name__" in headers and ("DXO" in message or _asked(message) or "consilium_reason" in headers):
            yield headers["__task_name__"], message


def _asked(message: Any) -> str:
    return next((key for key in ("hello", "statistics", "masks") if isinstance(message, dict) and key in message), "")


def said(message: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the named tensors of an answer as the record should describe them; a buffer of small ones is cut up here."""
    data, meta = dict(message["DXO"]["data"]), message["DXO"]["meta"].get("consilium")
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    listed = json.loads(zlib.decompress(meta))[0] if isinstance(meta, bytes) else [[name] for name in data]
    buffer, place = data.pop("consilium_buffer", ("tensor", "uint8", (0,), b""))[3], 0
    for name, *kind in listed:
        if kind:
            size = SIZES[kind[0]] * int(np.prod(kind[1], dtype=int))
            found[name] = (kind[0], tuple(kind[1]), buffer[place : place + size])
            place += size
        else:
            found[name] = data[name][1:]
    assert place == len(buffer)
    return {name: _described(*one) for name, one in found.items()}


def _described(dtype: str, shape: tuple[int, ...], raw: bytes) -> dict[str, Any]:
    values = np.frombuffer(raw, np.dtype(dtype)).astype(float)
    return {"shape": list(shape), "dtype": dtype, "bytes": len(raw), "norm": f"{np.sqrt((values**2).sum()):.6g}"}
