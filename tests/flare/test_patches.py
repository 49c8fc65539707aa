"""FLARE's code that we replace: each patch meets the known source, and another source or version is refused."""

import inspect
import os
import queue
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import nvflare
import pytest
from nvflare.fuel.f3.streaming import byte_receiver

from consilium.core.errors import ConfigError
from consilium.flare import patches
from consilium.flare.patches import PATCHES, Patch, SharedTimer, share_timers

EVERY = {f"{patch.module.rpartition('.')[2]}.{patch.name}": patch for role in PATCHES.values() for patch in role}
each = pytest.mark.parametrize("patch", EVERY.values(), ids=EVERY.keys())
CLI = "from consilium.cli.main import main; main()"


@each
def test_a_changed_source_is_refused_in_one_line(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """One character of FLARE's own text is another."""
    read = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda found: read(found)[:-1] + " ")
    monkeypatch.setattr(nvflare, "__version__", "2.9.7")
    owner = import_module(patch.module)
    before = dict(vars(owner))
    with pytest.raises(ConfigError) as told:
        (patch.wrap if "." in patch.name else patch.replace)(lambda *given: None)
    assert "\n" not in str(told.value)
    for fact in ("2.9.7", f"{patch.module}.{patch.name}", "pip install nvflare==2.9.0"):
        assert fact in str(told.value)
    assert dict(vars(owner)) == before


@each
@pytest.mark.parametrize("gone", [{"name": "Nobody.method"}, {"name": "nothing"}, {"module": "nvflare.no_such_module"}])
def test_a_missing_name_is_refused(patch: Patch, gone: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"pip install nvflare==2\.9\.0"):
        replace(patch, **gone).checked_owner()


@pytest.mark.parametrize("role", PATCHES)
def test_the_installed_flare_is_the_known_one(role: str) -> None:
    assert patches.check(role).startswith(f"nvflare {nvflare.__version__}: ")


def test_a_wrapped_method_is_still_the_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two components wrap a server's heartbeat; each is called with what was there before it."""
    owner, called = patches.SERVER_HEARTBEAT.checked_owner(), list[str]()
    monkeypatch.setattr(owner, "heartbeat", owner.heartbeat)

    def around(name: str, method: object, *args: object) -> object:
        called.append(name)
        return method(*args) if name == "second" else args  # type: ignore[operator]

    for name in ("first", "second"):
        patches.SERVER_HEARTBEAT.wrap(partial(around, name))
    assert owner.heartbeat("manager", "token") == ("manager", "token")
    assert called == ["second", "first"]


@pytest.mark.parametrize("version", ["2.8.1", "2.10.0", "2.90.0", "3.0", "2", "0+unknown"])
def test_another_series_of_flare_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvflare, "__version__", version)
    with pytest.raises(ConfigError) as told:
        patches.check_version()
    assert f"nvflare: {version} is installed" in str(told.value)
    assert "pip install nvflare==2.9.0" in str(told.value)


def test_simulation_over_another_flare_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "lib/nvflare").mkdir(parents=True)
    (tmp_path / "lib/nvflare/__init__.py").write_text("__version__ = '2.8.1'\n")
    root = Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (tmp_path / "lib", root / "custom")))
    run = [sys.executable, "-c", CLI, "simulate", str(root / "jobs/quickstart_cells"), "--engine", "flare", "--workspace", "w"]
    done = subprocess.run(
        run, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    (line,) = (done.stdout + done.stderr).splitlines()
    assert "2.8.1 is installed" in line
    assert not (tmp_path / "w").exists()


def test_timers_share_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are called but the cancelled one; one that fails ends no other."""
    called: queue.SimpleQueue[int] = queue.SimpleQueue()

    def put(number: int) -> None:
        called.put(number)
        assert number != 0

    before, timers = threading.active_count(), [SharedTimer(0.05, partial(put, n)) for n in range(500) if n != 7]
    for timer in (*timers, cancelled := SharedTimer(1, partial(put, 7))):
        timer.start()
    cancelled.cancel()
    SharedTimer(1.1, partial(put, 500)).start()  # due after the cancelled one
    assert threading.active_count() <= before + 1
    assert sorted(called.get(timeout=10) for _ in range(500)) == [n for n in range(501) if n != 7]
    SharedTimer(1000, partial(put, 501)).start()
    SharedTimer(0.01, partial(put, 502)).start()  # due before the one that is waited for
    assert called.get(timeout=10) == 502


def test_flare_forgets_a_received_message_by_a_shared_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE's own function on a task of which no more is left than that asks for."""
    monkeypatch.setattr(byte_receiver, "threading", threading)
    share_timers()
    forgotten, before = threading.Event(), threading.active_count()
    task = SimpleNamespace(stop_lock=threading.Lock(), cleanup_timer=None, completed_task_ttl=0.01, _remove_task=forgotten.set)
    byte_receiver.RxTask._schedule_remove_task(task)
    assert isinstance(task.cleanup_timer, SharedTimer)
    assert forgotten.wait(10)
    assert threading.active_count() <= before + 1
