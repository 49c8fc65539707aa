"""A newcomer's trial: hospitals as they keep their pictures, at most three commands to checked data, no script, no refusal."""

from pathlib import Path

import pytest

from tests.conftest import JOBS
from tests.data.hospitals import drawn, hospital, photo, said

Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]
HABITS = {
    "Klinik Süd": ("images/{}.jpg", "masks/{}_mask.png", (255,)),
    "nnU-Net": ("imagesTr/case_{:03}_0000.png", "labelsTr/case_{:03}.png", (1,)),
    "north": ("{}.tif", "{}_seg.tif", (255,)),
    "Hôpital": ("scans/img_{}.png", "truth/mask_{}.png", (255,)),
}
"""Four naming habits in three formats."""


def write_hospitals(folder: Path) -> None:
    for site, (image, mask, values) in HABITS.items():
        hospital(folder / site, image, mask, values, count=10)
    for number in range(12):
        photo(folder / "classes" / ("benign", "malign")[number % 2] / f"{number}.jpg")
        photo(folder / "table" / "pictures" / f"{number}.bmp")
        drawn(folder / "table" / "by hand" / f"m{number}.png", 1)
    rows = [f"pictures/{n}.bmp,by hand/m{n}.png,P{n // 2}" for n in range(12)]
    (folder / "table" / "list.csv").write_text("\n".join(["file,mask,patient", *rows]))


def test_three_commands_from_hospitals_folders_to_checked_data(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    write_hospitals(tmp_path / "hospitals")
    told = said(monkeypatch, capsys, "data", "import", "own", tmp_path / "hospitals", tmp_path / "lists")
    for note in (
        "Klinik Süd -> klinik-sud",
        "'{}_mask', as 0_mask.png of 0.jpg",
        "'{}_0000={}', as case_000.png of case_000_0000.png",
    ):
        assert note in told
    assert 'task.classes: {"object": [1, 255]}' in told
    assert 'task.classes: ["benign", "malign"]' in told
    checked = said(monkeypatch, capsys, "data", "check", tmp_path / "lists")
    assert checked.count("no problems") == 6
    words = ["data", "check", tmp_path / "lists" / "segmentation", "--job", JOBS / "quickstart"]
    checked = said(monkeypatch, capsys, *words, "--set", "task.classes={object: [1, 255]}")
    assert checked.count("no problems") == 5
    for site in ("hopital", "klinik-sud", "nnU-Net", "north", "table"):
        assert f"{site}\n{tmp_path}" in checked
