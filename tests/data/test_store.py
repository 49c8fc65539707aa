"""Samples on disk: whole or not there, for this user alone, within their room, named by nothing that tells."""

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from consilium.data import disk_cache as cache_folder
from consilium.data.datalist import Item
from consilium.data.disk_cache import DiskCache, open_disk_cache
from tests.conftest import Capture, Patch, refused, run
from tests.data.storing import made

SAMPLE = {"image": np.arange(48, dtype=np.uint8).reshape(3, 4, 4), "label": np.ones((1, 4, 4), np.uint8)}
NAME = "0" * 32


def store(folder: Path, most: int = 10**6) -> DiskCache:
    found = open_disk_cache(folder, most)
    assert found is not None
    return found


def equal(found: dict[str, np.ndarray] | None) -> bool:
    return found is not None and found.keys() == SAMPLE.keys() and all(np.array_equal(found[k], SAMPLE[k]) for k in SAMPLE)


def test_a_sample_comes_back_as_it_was_in_another_process_too(tmp_path: Path) -> None:
    kept = store(tmp_path)
    assert kept.put(NAME, SAMPLE)
    assert kept.put("2" * 32, {})  # a check that was passed
    found = store(tmp_path).get(NAME)
    assert equal(found)
    assert store(tmp_path).get("2" * 32) == {}
    with pytest.raises(ValueError, match="read-only"):
        found["image"][0] = 1
    os.rename(kept.folder / f"{NAME}.sample", kept.folder / f"{'1' * 32}.sample")  # another one's name
    assert store(tmp_path).get("1" * 32) is None


def test_folder_of_a_series_is_listed_once_for_a_name(tmp_path: Path, monkeypatch: Patch) -> None:
    """Every plane of a series asks for its name each time it is read."""
    kept = store(tmp_path)
    series = tmp_path / "series"
    series.mkdir()
    for number in range(50):
        (series / f"{number}.dcm").write_bytes(b"x")
    monkeypatch.setattr(cache_folder, "RECENT", -1.0)  # as if no file had just changed
    calls, stat_of = list[Path](), Path.stat
    monkeypatch.setattr(Path, "stat", lambda self, **how: calls.append(self) or stat_of(self, **how))
    before = kept.name(Item(series, None, 3), "settings")
    assert len(calls) < 10
    (series / "7.dcm").write_bytes(b"other")
    assert kept.name(Item(series, None, 3), "settings") != before


def halved(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


@pytest.mark.parametrize("damage", [halved, flipped, lambda data: b"", lambda data: b"x" + data[1:], lambda data: data + b"x"])
@pytest.mark.parametrize("again", [True, False])
def test_a_damaged_sample_is_not_there_and_is_made_again(damage: Callable[[bytes], bytes], again: bool, tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.put(NAME, SAMPLE)
    if again:
        assert equal(kept.get(NAME))
    path = kept.folder / f"{NAME}.sample"
    path.write_bytes(damage(path.read_bytes()))
    assert kept.get(NAME) is None
    path.unlink(missing_ok=True)
    assert kept.put(NAME, SAMPLE)
    assert equal(kept.get(NAME))


def test_all_is_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        kept = store(tmp_path / "state")
        kept.put(NAME, SAMPLE)
        data = made(tmp_path / "site")
        kept.name(data.splits["training"][0], "")
    finally:
        os.umask(before)
    assert stat.S_IMODE(kept.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept.folder.iterdir()} == {0o600}


def test_a_folder_left_open_is_closed_and_a_link_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / cache_folder.FOLDER).mkdir(mode=0o755)
    assert stat.S_IMODE(store(tmp_path).folder.stat().st_mode) == 0o700
    other = tmp_path / "other"
    other.mkdir()
    (other / cache_folder.FOLDER).symlink_to(tmp_path)
    assert open_disk_cache(other, 100) is None
    (tmp_path / cache_folder.FOLDER).chmod(0o777)  # somebody may have put a salt of his own there
    assert open_disk_cache(tmp_path, 100) is None
    (tmp_path / cache_folder.FOLDER).chmod(0o700)
    (tmp_path / cache_folder.FOLDER / "salt").rename(tmp_path / "elsewhere")
    (tmp_path / cache_folder.FOLDER / "salt").symlink_to(tmp_path / "elsewhere")
    assert open_disk_cache(tmp_path, 100) is None
    assert caplog.text.count("it is a link, another user's, or others may write in it") == 2
    assert "its salt is a link" in caplog.text


def test_what_was_used_longest_ago_goes_first_but_nothing_of_this_process(tmp_path: Path) -> None:
    first = store(tmp_path)
    names = [f"{n:032x}" for n in range(4)]
    for name in names[:3]:
        first.put(name, SAMPLE)
    size = (first.folder / f"{names[0]}.sample").stat().st_size
    time.sleep(0.02)
    first.get(names[0])  # now 1 is the one used longest ago
    time.sleep(0.02)
    second = store(tmp_path, 3 * size + size // 2)
    assert second.put(names[3], SAMPLE)
    left = {path.stem for path in second.folder.glob("*.sample")}
    assert names[1] not in left
    assert {names[0], names[3]} <= left
    third = store(tmp_path, 2 * size)
    for name in (names[0], names[3]):
        assert equal(third.get(name))
    assert not third.put("f" * 32, SAMPLE)
    assert equal(third.get(names[0]))
    assert equal(third.get(names[3]))


def test_a_full_disk_is_said_once_and_reading_goes_on(
    tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = store(tmp_path)
    kept.put(NAME, SAMPLE)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not kept.put("1" * 32, SAMPLE)
    monkeypatch.undo()
    assert not kept.put("2" * 32, SAMPLE)
    assert equal(kept.get(NAME))
    assert caplog.text.count("No space left on device") == 1
    assert not [path for path in kept.folder.iterdir() if path.name.startswith(".")]


def test_the_last_of_the_disk_is_left_to_others(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12, 2**29))
    assert not store(tmp_path).put(NAME, SAMPLE)


def test_a_cache_cleared_while_it_is_used_is_made_again(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.put(NAME, SAMPLE)
    cache_folder.clear_cache(kept.folder)
    assert not kept.folder.exists()
    assert kept.get(NAME) is None
    assert kept.put(NAME, SAMPLE)
    assert equal(kept.get(NAME))
    assert stat.S_IMODE(kept.folder.stat().st_mode) == 0o700


def test_clearing_leaves_what_is_not_ours(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.put(NAME, SAMPLE)
    for name in ("letter.txt", ".bash_history.1"):
        (kept.folder / name).write_text("mine")
    (kept.folder / f".{NAME}-140.99").write_text("half a sample")
    cache_folder.clear_cache(kept.folder)
    assert {path.name for path in kept.folder.iterdir()} == {"letter.txt", ".bash_history.1"}


def somebody_elses(folder: Path, salt: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "salt").write_bytes(bytes(salt))
    for name in ("index", ".bash_history.1", ".note-old.20"):
        (folder / name).write_text("mine")
    return folder


def test_a_folder_that_is_no_cache_is_not_cleared(tmp_path: Path) -> None:
    """Neither one behind a link that another user has put into a shared folder, nor one that only looks like a cache."""
    behind = somebody_elses(tmp_path / "home", cache_folder.SALT)
    alike = somebody_elses(tmp_path / "alike" / cache_folder.FOLDER, cache_folder.SALT + 1)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / cache_folder.FOLDER).symlink_to(behind)
    for root in (tmp_path / "shared", tmp_path / "alike"):
        cache_folder.clear_cache_if_present(root)
        refused(cache_folder.FOLDER, cache_folder.find_cache, root)
    assert len(list(behind.iterdir())) == len(list(alike.iterdir())) == 4


def test_the_command_shows_and_clears(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    kept = store(tmp_path)
    kept.put(NAME, SAMPLE)
    size = (kept.folder / f"{NAME}.sample").stat().st_size
    assert run(monkeypatch, "data", "cache", tmp_path) == 0
    assert f"entries: 1, bytes: {size}" in capsys.readouterr().out
    assert run(monkeypatch, "data", "cache", kept.folder, "--clear") == 0
    assert not kept.folder.exists()
    assert run(monkeypatch, "data", "cache", tmp_path) == 2
    assert cache_folder.FOLDER in capsys.readouterr().err


# names ----------------------------------------------------------------------------------------------------------------


def test_a_name_changes_with_all_that_makes_the_sample_and_nothing_else(tmp_path: Path) -> None:
    kept, item = store(tmp_path), made(tmp_path / "site").splits["training"][0]
    name = kept.name
    first = name(item, "a")
    assert name(replace(item, patient="x", study="y"), "a") == first
    copy = tmp_path / "copy.png"
    shutil.copy(item.image, copy)
    assert name(replace(item, image=copy), "a") == first
    others = [name(item, "b"), name(replace(item, slice=1), "a"), name(replace(item, axis="axial"), "a")]
    others.append(name(replace(item, label_map=((1, ("disc",)),)), "a"))
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(copy)
    others += [name(replace(item, image=copy), "a"), name(replace(item, label=copy), "a")]
    assert len({first, *others}) == 7
    assert store(tmp_path / "elsewhere").name(item, "a") != first


def test_a_name_follows_a_change_that_leaves_size_and_time(tmp_path: Path, monkeypatch: Patch) -> None:
    """A new file is known by its content, which a copy shares; an older one by its state, whose ctime cannot be set back."""
    item = made(tmp_path / "site").splits["training"][0]
    before, data = item.image.stat(), bytearray(item.image.read_bytes())
    for recent in (1e6, -1.0):
        monkeypatch.setattr(cache_folder, "RECENT", recent)
        name, kept = store(tmp_path).name(item, ""), store(tmp_path)
        assert store(tmp_path).name(item, "") == name
        data[-20] ^= 1
        item.image.write_bytes(bytes(data))
        os.utime(item.image, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert kept.name(item, "") != name


def test_neither_names_nor_bytes_tell_of_a_patient_or_a_path(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(cache_folder, "RECENT", -1.0)
    kept = store(tmp_path / "state")
    for item in made(tmp_path / "Muster_Clinic").splits["training"]:
        kept.put(kept.name(item, ""), SAMPLE)
        kept.put(kept.name(item, "", "check"), {})
    assert len(list(kept.folder.iterdir())) == 5 + 5 + 1
    for path in kept.folder.iterdir():
        for word in ("muster", "erika", "clinic", "training", "png"):
            assert word not in path.name.lower()
            assert word.encode() not in path.read_bytes().lower()


def test_a_pipe_in_a_list_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    refused("a pipe or a device", store(tmp_path).name, Item(tmp_path / "pipe.png", None), "")


WORKER = """
import sys, numpy as np
from pathlib import Path
from consilium.data.disk_cache import open_disk_cache
kept = open_disk_cache(Path(sys.argv[1]), 10**9)
wrong = 0
for turn in range(2):
    for n in range(60):
        expected = np.full((3, 40, 40), n, np.uint8)
        found = kept.get(f"{n:032x}")
        if found is None:
            kept.put(f"{n:032x}", {"image": expected})
        elif not np.array_equal(found["image"], expected):
            wrong += 1
print(wrong, len(list(kept.folder.glob("*.sample"))), kept.salt.hex())
"""


def test_two_processes_share_a_cache(tmp_path: Path) -> None:
    started = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[0].split() for process in started]
    assert [one[:2] for one in said] == [["0", "60"]] * 2
    assert said[0][2] == said[1][2]
    assert not list((tmp_path / cache_folder.FOLDER).glob(".*"))
