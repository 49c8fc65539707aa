"""A network between a site and the server, in this process: a relay with delay and rate, that stalls or breaks, or a proxy.

    with Relay(federation.port, delay=0.2, rate=250_000) as relay:
        federation.reroute("site-1", relay.port)      # the site's kit says so, signed as the hub would
        relay.stall(5); relay.reset(); relay.forget()
    relay.up, relay.down                               # bytes from the site, and to it

`target` None makes it a proxy as hospitals have them: it takes CONNECT HOST:PORT and nothing else, with a `login`
(USER:PASSWORD) from who gives it only. `asked` has what it took.
"""

import queue
import socket
import struct
import threading
import time
from base64 import b64encode
from contextlib import suppress
from typing import Self

CHUNK, QUEUED = 16_384, 64
"""Bytes of a read, and reads that wait for their turn: then the sender's socket fills, as on a slow line."""


class Relay:
    """See the module. `delay` in seconds for each direction, `rate` in bytes a second for each, 0 for no limit."""

    def __init__(self, target: int | None, delay: float = 0.0, rate: float = 0.0, login: str = "") -> None:
        self.target, self.delay, self.rate, self.login = target, delay, rate, login
        self.up = self.down = self.connections = 0
        self.asked: list[str] = []
        self._forgotten = 0
        self._stalled_until, self._counting = 0.0, threading.Lock()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.reset()

    def stall(self, seconds: float) -> None:
        """Let nothing through for so long; connections stay open."""
        self._stalled_until = time.monotonic() + seconds

    def reset(self) -> None:
        """Break all connections, as a router that starts anew."""
        for one in self._open:
            with suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.shutdown(socket.SHUT_RDWR)
                one.close()
        self._open = []

    def forget(self) -> None:
        """Lose what comes on the connections that are there, and tell neither end: as a router whose table was full."""
        self._forgotten = self.connections

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                site, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(site,), daemon=True).start()

    def _serve(self, site: socket.socket) -> None:
        with suppress(OSError):
            port = self.target or self._connect_port(site)
            server = socket.create_connection(("127.0.0.1", port))
            if self.target is None:
                site.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            self._open += [site, server]
            self.connections = number = self.connections + 1
            for source, sink, way in ((site, server, "up"), (server, site, "down")):
                waiting: queue.Queue[tuple[float, bytes]] = queue.Queue(QUEUED)
                threading.Thread(target=self._read, args=(source, waiting), daemon=True).start()
                threading.Thread(target=self._write, args=(sink, waiting, way, number), daemon=True).start()

    def _connect_port(self, site: socket.socket) -> int:
        """Read a CONNECT request and return the port it asks for."""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += site.recv(1)
        (verb, address, _), *lines = (line.decode().split() for line in head.splitlines())
        if self.login and ["Proxy-Authorization:", "Basic", b64encode(self.login.encode()).decode()] not in lines:
            site.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            site.close()
            raise OSError("login")
        self.asked.append(f"{verb} {address}")
        if verb != "CONNECT":
            site.close()
            raise OSError(verb)
        return int(address.rpartition(":")[2])

    def _read(self, source: socket.socket, waiting: "queue.Queue[tuple[float, bytes]]") -> None:
        data = b"?"
        while data:
            try:
                data = source.recv(CHUNK)
            except OSError:
                data = b""
            waiting.put((time.monotonic() + self.delay, data))

    def _write(self, sink: socket.socket, waiting: "queue.Queue[tuple[float, bytes]]", way: str, number: int) -> None:
        free = 0.0
        while (item := waiting.get())[1]:
            due, data = item
            if number <= self._forgotten:
                continue
            free = max(free, time.monotonic()) + (len(data) / self.rate if self.rate else 0.0)
            while (wait := max(due, free, self._stalled_until) - time.monotonic()) > 0:
                time.sleep(wait)
            try:
                sink.sendall(data)
            except OSError:
                break
            with self._counting:  # of several connections
                setattr(self, way, getattr(self, way) + len(data))
        with suppress(OSError):
            if number > self._forgotten:
                sink.shutdown(socket.SHUT_WR)
