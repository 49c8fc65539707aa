"""Folders per class: which are one, how their splits are named, how they read."""

from pathlib import Path

from consilium.config.site import Given, find_site, is_site_folder
from consilium.data.datalist import read_datalist
from consilium.data.folders import has_classes, walk_folders
from tests.conftest import refused


def fill(folder: Path, *files: str) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_splits_by_their_usual_names_and_nothing_else(tmp_path: Path) -> None:
    fill(tmp_path, "train/b/1.png", "train/a/2.JPG", "val/a/3.tif", "test/b/4.nii.gz", "test/b/notes.txt", "README.md")
    data = read_datalist(tmp_path, labels_are_classes=True)
    assert [(i.image.name, i.label) for i in data.splits["training"]] == [("2.JPG", "a"), ("1.png", "b")]
    assert [(i.image.name, i.label) for i in data.splits["validation"]] == [("3.tif", "a")]
    assert [(i.image.name, i.label) for i in data.splits["test"]] == [("4.nii.gz", "b")]


def test_without_splits_all_is_training(tmp_path: Path) -> None:
    data = read_datalist(fill(tmp_path, "a/1.png", "b/1.png"))
    assert [i.label for i in data.splits["training"]] == ["a", "b"]
    assert not data.splits["test"]


def test_no_pictures_is_an_error(tmp_path: Path) -> None:
    refused("no pictures in folders of classes there; lay it out as", read_datalist, fill(tmp_path, "a.png", "a/notes.txt"))


def test_a_site_may_be_such_a_folder_but_a_split_is_no_site(tmp_path: Path) -> None:
    fill(tmp_path, "site-1/a/1.png", "train/a/1.png", "empty/x.txt")
    assert is_site_folder(tmp_path / "site-1")
    assert not is_site_folder(tmp_path / "train")
    assert not has_classes(tmp_path / "empty")
    assert find_site("site-1", Given(tmp_path)).datalist == tmp_path / "site-1"


def test_hidden_files_of_a_mac_are_no_pictures(tmp_path: Path) -> None:
    data = read_datalist(fill(tmp_path, "a/1.png", "a/._1.png", "b/1.png", "b/._1.png"))
    assert [item.image.name for item in data.splits["training"]] == ["1.png", "1.png"]


def test_links_are_followed_once_and_not_in_circles(tmp_path: Path) -> None:
    fill(tmp_path, "root/b/1.png", "root/.hidden/1.png", "root/__MACOSX/1.png", "far/c/1.png")
    for name, target in {"root/a": "far", "root/d": "far", "root/b/up": "root", "far/c/back": "far", "root/top": "."}.items():
        (tmp_path / name).symlink_to(tmp_path / target)
    (tmp_path / "root/inside").symlink_to(tmp_path / "root/b")
    found = [str(one.relative_to(tmp_path)) for one in walk_folders(tmp_path / "root")]
    assert found == ["root", "root/a", "root/a/c", "root/b"]


def test_a_link_to_itself_is_no_folder(tmp_path: Path) -> None:
    fill(tmp_path, "a/1.png")
    (tmp_path / "loop").symlink_to("loop")
    assert list(walk_folders(tmp_path)) == [tmp_path, tmp_path / "a"]
