"""The command `consilium serve`: a read-only dashboard of a kit in the browser (it serves no model).

aiohttp serves the pages. FLARE depends on it, so every participant has it. It parses HTTP more strictly than http.server, whose
documentation advises against its use in production.

Other users of the machine and pages of other sites can reach the port. So a request must name this host and port (against DNS
rebinding), and must have a cookie that only the token in the printed address gives. Cookies are sent to all ports of a host, so
the cookie's path is random: a program at another port does not get it and cannot replace it. No request changes anything.

A program without the cookie can open connections and send half a request, or read no reply. aiohttp closes a connection that
waits for a request too long, and has no limit for their number. So a new connection above the limit closes the oldest one
without the cookie.
"""

import asyncio
import hmac
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer
from aiohttp import web
from rich.console import Console

from consilium.cli import kit_pages
from consilium.core.errors import ConfigError
from consilium.core.sanitize import rich_line

HOST, COOKIE = "127.0.0.1", "consilium"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Server": "consilium",
}
"""Headers of every reply."""
ERRORS = {
    400: ("Refused", "This is no request of a browser."),
    401: ("Not open", "Open the address that consilium serve printed. It is valid until that command ends."),
    403: ("Refused", "This address is not the one that consilium serve printed."),
    404: ("Not found", "There is no such page, or the kit has no such run."),
    405: ("Refused", "These pages can only be read."),
    500: ("Not shown", "This page cannot be made. The terminal in which consilium serve runs shows the reason."),
}
"""Title and text of each error page. They name no path."""
MOST_CONNECTIONS, WAIT = 128, 10.0
"""Open connections, and seconds that one may wait for a request."""
MOST_COOKIES = 2**20
"""Bytes of a header. Programs at other ports may set cookies, and a browser sends them all: 180 of 4096 bytes at most."""
CHUNK = 2**18
"""Bytes of an archive that are read at a time."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def serve(
    kit: Annotated[Path, typer.Option("--kit", help="a site's startup kit, or the server's")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="port of 127.0.0.1; default: a free one")] = 0,
) -> None:
    """Show a kit in the browser, for reading only: jobs, what left, budgets, approvals, health, certificates, evidence.

    Open the printed address in a browser on this machine. Anyone with the address can read the pages. Ctrl-C stops the command.
    """
    kit_pages.require_kit_role(kit)
    try:
        listener = socket.create_server((HOST, port))
    except OSError as error:
        raise ConfigError(f"--port: {port}: {error.strerror}; give another port, or leave --port out") from None
    token = secrets.token_urlsafe(32)
    port = listener.getsockname()[1]
    console = Console(soft_wrap=True, highlight=False)
    console.print(rich_line(f"http://{HOST}:{port}/?token={token}"))
    console.print(rich_line("open this address in a browser on this machine, and tell it to no one else; Ctrl-C ends it"))

    async def serve_until_signal() -> None:
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end.set)
        async with KitSite(kit, token, port).serving(listener):
            await end.wait()
            loop.remove_signal_handler(signal.SIGINT)  # a second Ctrl-C does not wait for a page that is being made

    asyncio.run(serve_until_signal())


class KitSite:
    """The replies to the requests of one user. `token`: the secret in the printed address. `port`: the port that listens."""

    def __init__(self, kit: Path, token: str, port: int) -> None:
        self.kit, self.token = kit, token
        names = (HOST, "localhost")
        # a browser leaves out port 80, the default of http
        self.hosts = {f"{name}:{port}" for name in names} | ({*names} if port == 80 else set())
        self.session, self.root = secrets.token_urlsafe(32), f"/{secrets.token_urlsafe(16)}/"
        self.admitted = set[web.RequestHandler]()
        """Connections that have sent the cookie."""
        self.lock = asyncio.Lock()  # one page at a time: matplotlib's settings are global
        self.health_lock = asyncio.Lock()  # the doctor may wait a minute for the server, and the other pages do not wait for it

    @asynccontextmanager
    async def serving(self, listener: socket.socket) -> AsyncIterator[None]:
        """Serve all pages within the block."""
        app = web.Application(middlewares=[self._guard])
        app.on_response_prepare.append(self._add_headers)
        pages: dict[str, tuple[asyncio.Lock, Callable[[web.Request], str]]] = {
            "": (self.lock, lambda request: kit_pages.overview(self.kit)),
            "health": (self.health_lock, lambda request: kit_pages.health_page(self.kit)),
            "runs/{run}": (self.lock, lambda request: kit_pages.run_page(self.kit, request.match_info["run"])),
        }
        app.add_routes([web.get(self.root + path, partial(self._show, *page)) for path, page in pages.items()])
        app.add_routes([web.get(self.root + "evidence/{run}", self._evidence)])
        runner = web.AppRunner(app, shutdown_timeout=2.0)
        await runner.setup()
        loop, server = asyncio.get_running_loop(), runner.server
        assert server is not None

        def connect() -> web.RequestHandler:
            self.admitted.intersection_update(server.connections)
            strangers = [one for one in server.connections if one not in self.admitted]  # the oldest first
            for one in strangers[: max(len(server.connections) + 1 - MOST_CONNECTIONS, 0)]:
                if one.transport is not None:
                    one.transport.abort()  # close() would wait until the reply is read
            return _HardenedRequestHandler(
                server,
                loop=loop,
                keepalive_timeout=WAIT,
                max_field_size=MOST_COOKIES,
                access_log=None,  # type: ignore[arg-type]  # a log of requests would contain the token
            )

        listening = await loop.create_server(connect, sock=listener, backlog=32)
        try:
            yield
        finally:
            listening.close()
            await runner.cleanup()

    async def _add_headers(self, request: web.Request, reply: web.StreamResponse) -> None:
        reply.headers.update(HEADERS)
        if request.protocol not in self.admitted:  # a connection without the cookie gets one reply
            reply.headers["Connection"] = "close"
            reply.force_close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse every request that is not this user's, and turn every failure into a page without details."""
        if request.host not in self.hosts:  # aiohttp refuses a second Host header
            return _error(403)
        if request.method not in ("GET", "HEAD"):
            return _error(405)
        if request.path == "/" and "token" in request.query:
            if not _is_equal(request.query["token"], self.token):
                return _error(401)
            # exchange the token for a cookie, and redirect to an address without it
            reply = web.Response(status=303, headers={"Location": self.root})
            reply.set_cookie(COOKIE, self.session, path=self.root, httponly=True, samesite="Strict")
            return reply
        pairs = (pair.strip().partition("=") for text in request.headers.getall("Cookie", ()) for pair in text.split(";"))
        # every cookie of our name is compared: programs at other ports can set one of that name
        if not any([_is_equal(value, self.session) for name, _, value in pairs if name == COOKIE]):
            return _error(401)
        self.admitted.add(request.protocol)
        try:
            return await handler(request)
        except (web.HTTPNotFound, kit_pages.UnknownRunError):
            return _error(404)
        except ConnectionError:  # the browser has gone
            raise
        except Exception as error:
            Console(stderr=True, soft_wrap=True).print(rich_line(f"{type(error).__name__}: {error}", "red", limit=1000))
            return _error(500)

    async def _show(self, lock: asyncio.Lock, make: Callable[[web.Request], str], request: web.Request) -> web.Response:
        async with lock:
            return _page(await asyncio.to_thread(make, request))

    async def _evidence(self, request: web.Request) -> web.StreamResponse:
        """Make the archive in a private temporary folder outside the kit, and send it in parts, because it may be large."""
        run = request.match_info["run"]
        reply = web.StreamResponse(headers={"Content-Type": "application/zip"})
        reply.headers["Content-Disposition"] = f"attachment; filename*=UTF-8''{quote(run, safe='')}.evidence.zip"
        async with self.lock:
            file = await asyncio.to_thread(kit_pages.open_evidence, self.kit, run)
        with file, suppress(ConnectionError):
            reply.content_length = os.fstat(file.fileno()).st_size
            await reply.prepare(request)
            while request.method == "GET" and (part := file.read(CHUNK)):
                await reply.write(part)
        return reply


class _HardenedRequestHandler(web.RequestHandler):
    """A connection whose errors have our headers too. aiohttp makes them without the application."""

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the reply to an invalid request or after a failure, and close the connection."""
        # aiohttp logs a traceback for each invalid request
        reply = _error(400) if status == 400 else super().handle_error(request, status, exc, message)
        reply.headers.update(HEADERS)
        reply.force_close()
        return reply


def _is_equal(given: str, secret: str) -> bool:
    """Compare a text from a request with a secret in a time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), secret.encode())


def _page(text: str, status: int = 200) -> web.Response:
    return web.Response(body=text.encode(errors="backslashreplace"), status=status, content_type="text/html", charset="utf-8")


def _error(status: int) -> web.Response:
    return _page(kit_pages.message_page(*ERRORS[status]), status)
