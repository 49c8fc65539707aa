"""Chromium over its DevTools protocol, for tests that press keys and measure pages as a user's browser shows them."""

import asyncio
import base64
import json
import re
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

WORDS = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run", "--hide-scrollbars")


class Tab:
    """A tab of a browser. `send` sends a command of the protocol and returns its result."""

    def __init__(self, link: aiohttp.ClientWebSocketResponse) -> None:
        self.link, self.numbers = link, count(1)
        self.requests: list[str] = []

    async def send(self, method: str, **values: Any) -> dict[str, Any]:
        number = next(self.numbers)
        await self.link.send_json({"id": number, "method": method, "params": values})
        while (said := await self.link.receive_json(timeout=60)).get("id") != number:
            if said.get("method") == "Network.requestWillBeSent":
                self.requests.append(said["params"]["request"]["url"])
        assert "error" not in said, said
        return said["result"]

    async def run(self, script: str) -> Any:
        """Return the value of a script of the test's; the page's own scripts are off."""
        return (await self.send("Runtime.evaluate", expression=script, returnByValue=True))["result"].get("value")

    async def open(self, address: str) -> None:
        """Load a page and wait for its end."""
        await self.send("Page.navigate", url=address)
        for _ in range(300):
            if await self.run("document.readyState") == "complete" and await self.run("location.href") != "about:blank":
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{address} did not load")

    async def size(self, width: int) -> None:
        await self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)

    async def press_tab(self) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)

    async def picture(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        found = await self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


def browse(folder: Path, visit: Callable[[Tab], Awaitable[None]]) -> None:
    """Call `visit` with a tab of a new browser, whose profile is in `folder`. Skips the test where there is no Chromium."""
    if (browser := shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")) is None:
        pytest.skip("no Chromium here")
    words = [browser, *WORDS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stderr
            port = next(found[1] for line in process.stderr if (found := re.search(r"ws://127.0.0.1:(\d+)/", line)))
            asyncio.run(_visit(int(port), visit))
        finally:
            process.terminate()


async def _visit(port: int, visit: Callable[[Tab], Awaitable[None]]) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json") as reply:
            (page,) = [one for one in json.loads(await reply.text()) if one["type"] == "page"]
        async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as link:
            tab = Tab(link)
            for name in ("Page", "Network"):
                await tab.send(f"{name}.enable")
            await tab.send("Emulation.setScriptExecutionDisabled", value=True)
            await visit(tab)
