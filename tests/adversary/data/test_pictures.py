"""Pictures that are none, or far more than they seem."""

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from consilium.core.errors import DataError
from consilium.data.check import check_datalist
from consilium.data.importers.base import grey_values, is_usable_mask
from consilium.data.pictures import picture_shape
from tests.adversary.data.lists import picture, problem, refusal, write_list


def declared(path: Path, side: int) -> Path:
    """Write a PNG of a few hundred bytes whose header declares side x side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b""))
    return path


def test_a_bomb_of_20000_by_20000_pixels(tmp_path: Path) -> None:
    """A small file that declares 400 million pixels is refused in a line, before any of it is unpacked."""
    declared(tmp_path / "a.png", 20_000)
    assert "over 100,000,000 pixels" in problem(write_list(tmp_path, {"image": "a.png", "label": 0}))
    for read in (picture_shape, grey_values, lambda path: is_usable_mask(path, [0, 1])):
        with pytest.raises(DataError, match=r"a\.png: cannot be read as one picture \(over 100,000,000 pixels\); "):
            read(tmp_path / "a.png")


def test_a_program_called_a_picture(tmp_path: Path) -> None:
    """PostScript under the name of a PNG is not handed to an interpreter: four formats are read, whatever a name says."""
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(/tmp/x) (w) file\n%%EOF\n"
    (tmp_path / "a.png").write_bytes(postscript)
    assert "cannot identify image file" in problem(write_list(tmp_path, {"image": "a.png", "label": 0}))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda b: b[:45],
    "overwritten": lambda b: b[:41] + b"\xff" * 40 + b[81:],
    "repeated": lambda b: b[:8] * 50,
    "empty": lambda b: b"",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_picture(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """A picture cut off, overwritten or empty is one problem with its name."""
    path = picture(tmp_path / "a.png")
    path.write_bytes(damage(path.read_bytes()))
    assert "a.png: image cannot be read" in problem(write_list(tmp_path, {"image": "a.png", "label": 0}))


@pytest.mark.parametrize("what", ["pipe", "folder", "/dev/zero", "/dev/null"])
@pytest.mark.parametrize("key", ["image", "label"])
def test_what_is_no_file(what: str, key: str, tmp_path: Path) -> None:
    """A pipe, a folder or a device as a picture or a mask is refused with the list; nothing waits for it."""
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    picture(tmp_path / "a.png")
    odd = what if what.startswith("/") else f"{what}.png"
    text = refusal(write_list(tmp_path, {"image": "a.png", "label": "a.png"} | {key: odd}), classes=False)
    assert "training[0]" in text
    assert "not a file" in text


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_in_a_folder_per_class(kind: str, tmp_path: Path) -> None:
    """The same where there is no list: found on opening, named, not waited for."""
    folder = tmp_path / "class"
    folder.mkdir()
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda p: p.symlink_to("/dev/zero")}[kind](folder / "a.png")
    (line,) = check_datalist(tmp_path).problems["unreadable"]
    assert "a.png: cannot be read" in line


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "link.png"])
def test_a_path_out_of_the_folder(name: str, tmp_path: Path) -> None:
    """Pictures may lie elsewhere by design; a file that is not a picture is refused without a word of what is in it."""
    (tmp_path / "link.png").symlink_to("/etc/passwd")
    name = os.path.relpath("/etc/passwd", tmp_path) if name.startswith("..") else name
    text = problem(write_list(tmp_path, {"image": name, "label": 0}))
    assert "image cannot be read" in text
    assert "root" not in text.replace(str(tmp_path), "")
    picture(tmp_path / "elsewhere.png")
    (tmp_path / "site").mkdir()
    assert not check_datalist(write_list(tmp_path / "site", {"image": "../elsewhere.png", "label": 0})).problems


def test_a_loop_of_links(tmp_path: Path) -> None:
    """Links that lead to one another are not a file."""
    (tmp_path / "a.png").symlink_to(tmp_path / "b.png")
    (tmp_path / "b.png").symlink_to(tmp_path / "a.png")
    assert "no such file" in refusal(write_list(tmp_path, {"image": "a.png", "label": 0}))


def test_a_picture_followed_by_a_terabyte(tmp_path: Path) -> None:
    """A picture with a hole of a terabyte behind it is not read to its end: it is over what is opened."""
    path = picture(tmp_path / "a.png")
    with open(path, "r+b") as file:
        file.truncate(2**40)
    assert "at most" in refusal(write_list(tmp_path, {"image": "a.png", "label": 0}))
