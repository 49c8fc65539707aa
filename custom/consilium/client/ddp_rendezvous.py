"""A site's ranks on other machines: they call rank 0 at an address, prove that they know the site's secret, and then work.

The handshake is that of `multiprocessing.connection` (HMAC of a challenge, both ways). What follows it is neither encrypted nor
authenticated, as what gloo and NCCL send is not: the machines must be on a network of their own. Rank 0 listens at the address
of site.yaml only, and only while its ranks gather.
"""

import errno
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import AuthenticationError, connection
from pathlib import Path

from consilium.client.ddp_failures import RemoteRank
from consilium.client.ddp_worker import work
from consilium.config.site import NodesConfig
from consilium.core.child_process import ChildProcess, exit_with_parent
from consilium.core.errors import ConfigError, ConsiliumError, Reason

HANDSHAKE = 10
"""Seconds that a caller has in all to prove that it knows the secret, however slowly it sends."""
AGAIN = 1.0
"""Seconds after which a rank that found nobody, or whose training is over, calls again."""
AT_ONCE = 256
"""Callers that may be proving themselves at a time; the next ones wait."""
LOOK = 0.1
"""Seconds between two looks whether all are there."""
PASSING = (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED)
"""What strangers can do to the door: hold all files this process may open, or hang up at once. It passes with them."""
SHORTEST = 16
"""Bytes of a secret, at least."""


def read_secret(path: Path) -> bytes:
    """Return the secret of a file that only its owner may read. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; make one on rank 0's machine: head -c 32 /dev/urandom | base64 > {path}")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"{path}: others may read this secret; chmod 600 it")
    if len(found := path.read_bytes().strip()) < SHORTEST:
        raise ConfigError(f"{path}: a secret of {len(found)} bytes; give it {SHORTEST} at least")
    return found


def gather(nodes: NodesConfig) -> list[RemoteRank]:
    """Return the site's ranks on other machines once all have called. Raises ConfigError, ConsiliumError."""
    gathering = _Gathering(read_secret(nodes.secret), nodes.ranks, time.monotonic() + nodes.wait)
    try:
        with socket.create_server(nodes.place) as door:
            door.settimeout(LOOK)
            while gathering.goes_on():
                with suppress(TimeoutError):
                    gathering.hear(door)
    except OSError as error:
        gathering.end()
        raise ConsiliumError(f"site.yaml: nodes.address: {nodes.address}: {error.strerror}", Reason.TRAINING) from None
    if len(found := gathering.end(nodes.ranks)) < nodes.ranks:
        what = f"{len(found)} of {nodes.ranks} ranks called within {nodes.wait} s; start `consilium rank` there"
        raise ConsiliumError(f"site.yaml: nodes: {what}", Reason.TRAINING)
    return found


class _Gathering:
    """Callers prove side by side that they know the secret, so that a stranger who says nothing holds up nobody."""

    def __init__(self, secret: bytes, wanted: int, until: float) -> None:
        self.secret, self.wanted, self.until = secret, wanted, until
        self.found: list[RemoteRank] = []
        self.open, self.lock, self.free = True, threading.Lock(), threading.BoundedSemaphore(AT_ONCE)

    def goes_on(self) -> bool:
        """Tell whether ranks are missing and there is time left."""
        return len(self.found) < self.wanted and time.monotonic() < self.until

    def hear(self, door: socket.socket) -> None:
        """Let the next caller prove itself, in a thread of its own. Raises TimeoutError if none can now."""
        if not self.free.acquire(timeout=LOOK):
            raise TimeoutError
        try:
            caller, (machine, *_) = door.accept()
        except OSError as error:
            self.free.release()
            if error.errno in PASSING:
                time.sleep(LOOK)
                raise TimeoutError from None
            raise
        threading.Thread(target=self._admit, args=(_piped(caller), machine), daemon=True).start()

    def end(self, wanted: int = 0) -> list[RemoteRank]:
        """Let nobody in any more; return who is, and hang up on them where they are fewer than `wanted`, or none is."""
        with self.lock:
            self.open = False
        for one in self.found if len(self.found) < wanted or not wanted else ():
            one.end()
        return self.found

    def _admit(self, pipe: connection.Connection, machine: str) -> None:
        try:
            with _hurried(pipe, min(HANDSHAKE, self.until - time.monotonic())):
                connection.deliver_challenge(pipe, self.secret)
                connection.answer_challenge(pipe, self.secret)
        except (AuthenticationError, OSError, EOFError):
            pipe.close()
            return
        finally:
            self.free.release()
        with self.lock:
            if self.open and len(self.found) < self.wanted:
                self.found.append(RemoteRank(pipe, machine))
                return
        pipe.close()


def _piped(link: socket.socket) -> connection.Connection:
    """Return a connection over a socket."""
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection.Connection(link.detach())


@contextmanager
def _hurried(pipe: connection.Connection, seconds: float) -> Iterator[None]:
    """Hang up if the block takes longer. A limit of each read would let a byte now and then hold the site for ever."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as link:
        timer = threading.Timer(max(seconds, 0.0), _shut, (link,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def _shut(link: socket.socket) -> None:
    with suppress(OSError):  # the other end has hung up
        link.shutdown(socket.SHUT_RDWR)


# on the other machine -------------------------------------------------------------------------------------------------


def stand_by(place: tuple[str, int], secret: bytes, devices: Sequence[str], threads: int) -> None:
    """Keep a process for each device that works for rank 0 whenever it is called for; endless, until this process ends."""
    children = [ChildProcess(partial(_join, place, secret, device), threads) for device in devices]
    try:
        while True:
            connection.wait([child.process.sentinel for child in children])
            for number, child in enumerate(children):
                if child.process.exitcode is not None:
                    child.end()
                    time.sleep(AGAIN)
                    children[number] = ChildProcess(partial(_join, place, secret, devices[number]), threads)
    finally:
        for child in children:
            child.end()


def _join(place: tuple[str, int], secret: bytes, device: str, parent: connection.Connection) -> None:
    """Call until rank 0 answers, then work for it once."""
    exit_with_parent()
    while True:
        try:
            link = socket.create_connection(place, timeout=HANDSHAKE)
            address, pipe = link.getsockname()[0], _piped(link)
            with _hurried(pipe, HANDSHAKE):
                connection.answer_challenge(pipe, secret)
                connection.deliver_challenge(pipe, secret)
            break
        except AuthenticationError:
            print(f"{place[0]}:{place[1]}: has another secret; nothing is done for it", flush=True)
            time.sleep(HANDSHAKE)
        except (OSError, EOFError):
            time.sleep(AGAIN)
    threading.Thread(target=_watch, args=(os.dup(pipe.fileno()),), daemon=True).start()
    work(pipe, address, device)


def _watch(descriptor: int) -> None:
    """End this process when rank 0 has hung up, even while it waits in a collective, because NCCL's never time out here."""
    with socket.socket(fileno=descriptor) as link:
        while True:
            try:
                if link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                    os._exit(1)
            except BlockingIOError:
                pass
            except OSError:
                os._exit(1)
            time.sleep(AGAIN)
