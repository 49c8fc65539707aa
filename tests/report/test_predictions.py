"""predictions.png to the pixel: masks where the references have them, words as they are, a row per site on a joint page."""

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from consilium.core.messages import Stage
from consilium.report import predictions
from consilium.report.predictions import (
    EDGE,
    GAP,
    GREY,
    LINE,
    MARGIN,
    PANEL,
    POINTS,
    RIGHT,
    SITES,
    WRONG,
    colours,
    draw_text,
    fit_text,
    font,
    join_predictions,
    overlay,
    write_predictions,
)
from consilium.tasks.base import Classified, Segmented

CYAN, YELLOW = (0, 200, 255), (255, 214, 0)
ODD = ("volume $x^2$", "$", "[red]a_{b}[/red]", "größe \\frac{}", "_hidden", "<b>&", "line\nbreak", "a" * 90, "", *"xyz")


def grey(count: int = 1, value: int = 100) -> Tensor:
    return torch.full((count, 3, 64, 64), value, dtype=torch.uint8)


def box(rows: slice, columns: slice) -> Tensor:
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[rows, columns] = True
    return mask


def pixels(image: Image.Image | Path) -> np.ndarray:
    opened = image if isinstance(image, Image.Image) else Image.open(image)
    return np.asarray(opened.convert("RGB")).astype(int)


def shares(area: np.ndarray, colour: tuple[int, int, int]) -> int:
    """Return how many pixels of an area are this colour."""
    return int((np.abs(area - np.array(colour)).max(-1) <= 2).sum())


def segmented(*predictions: Tensor, reference: Tensor | None = None, classes: tuple[str, ...] = ("disc",)) -> Segmented:
    """Return as many grey pictures as predictions (C, 64, 64); the references are the left half, Dice is 0.25."""
    left = box(slice(None), slice(0, 32))[None] if reference is None else reference
    count = len(predictions)
    return Segmented(grey(count), torch.stack([left] * count), torch.stack(predictions), torch.full((count,), 0.25), classes)


def test_a_mask_is_drawn_where_it_is() -> None:
    """Rows 16 to 47, columns 8 to 39 of 64, on 256 pixels: rows 64 to 191, columns 32 to 159."""
    drawn = pixels(overlay(grey()[0], box(slice(16, 48), slice(8, 40))[None], 256))
    inside = np.zeros((256, 256), bool)
    inside[64:192, 32:160] = True
    core, outside = np.zeros_like(inside), np.ones_like(inside)
    core[64 + 6 : 192 - 6, 32 + 6 : 160 - 6] = True
    outside[64 - 3 : 192 + 3, 32 - 3 : 160 + 3] = False
    assert (drawn[outside] == 100).all()
    assert np.abs(drawn[core] - [0.75 * 100 + 0.25 * c for c in CYAN]).max() <= 1
    for line in (drawn[65, 50:140], drawn[190, 50:140], drawn[80:180, 33], drawn[80:180, 158]):
        assert shares(line, CYAN) == len(line)


def test_a_class_without_a_mask_changes_nothing_and_one_of_all_pixels_has_no_outline() -> None:
    nothing, all_of_it = box(slice(0), slice(0)), box(slice(None), slice(None))
    assert (pixels(overlay(grey()[0], nothing[None], 128)) == 100).all()
    drawn = pixels(overlay(grey()[0], torch.stack([nothing, all_of_it]), 128))
    assert np.abs(drawn - [0.75 * 100 + 0.25 * c for c in YELLOW]).max() <= 1


@pytest.mark.parametrize("outer", [0, 1])
def test_a_class_inside_another_shows_both_outlines_in_either_order(outer: int) -> None:
    masks = [box(slice(24, 40), slice(24, 40)), box(slice(24, 40), slice(24, 40))]
    masks[outer] = box(slice(8, 56), slice(8, 56))
    drawn = pixels(overlay(grey()[0], torch.stack(masks), 256))
    wide, small = (CYAN, YELLOW) if outer == 0 else (YELLOW, CYAN)
    assert shares(drawn[100:150, 33], wide) == 50
    assert shares(drawn[110:146, 97], small) == 36


@pytest.mark.parametrize("shape", [(64, 64), (31, 31), (1, 1), (640, 640)])
def test_any_grid_fills_its_panel(shape: tuple[int, int]) -> None:
    image, mask = torch.full((3, *shape), 40, dtype=torch.uint8), torch.ones(1, *shape, dtype=torch.bool)
    drawn = pixels(overlay(image, mask, 90))
    assert drawn.shape == (90, 90, 3)
    assert np.abs(drawn - [0.75 * 40 + 0.25 * c for c in CYAN]).max() <= 1


def test_a_row_shows_picture_reference_and_every_models_masks_in_their_order(tmp_path: Path) -> None:
    """The reference is the left half; base says the upper half, received the lower, personal the right."""
    upper, lower = (box(rows, slice(None))[None] for rows in (slice(0, 32), slice(32, 64)))
    right, none = box(slice(None), slice(32, 64))[None], box(slice(0), slice(0))[None]
    stages = {
        Stage.PERSONALIZED: segmented(right, none),
        Stage.PRETRAINED: segmented(upper, none),
        Stage.GLOBAL: segmented(lower, none),
    }
    write_predictions(tmp_path / "p.png", stages)
    page, top = pixels(tmp_path / "p.png"), MARGIN + LINE + 8
    filled, quarters = [0.75 * 100 + 0.25 * c for c in CYAN], [(0, 0), (0, 1), (1, 0), (1, 1)]
    inside = [(), ((0, 0), (1, 0)), ((0, 0), (0, 1)), ((1, 0), (1, 1)), ((0, 1), (1, 1))]
    for column, masked in enumerate(inside):
        square = page[top:, MARGIN + column * (PANEL + GAP) :]
        for y, x in quarters:
            assert np.abs(square[75 + 150 * y, 75 + 150 * x] - (filled if (y, x) in masked else [100] * 3)).max() <= 1
    second = page[top + PANEL + LINE + GAP :][:PANEL]
    assert (second[:, MARGIN + 2 * (PANEL + GAP) :][:, :PANEL] == 100).all()


def test_a_model_without_a_result_has_no_column_and_nothing_at_all_no_file(tmp_path: Path) -> None:
    mask = box(slice(0, 32), slice(None))[None]
    write_predictions(tmp_path / "p.png", {Stage.GLOBAL: segmented(mask), Stage.PRETRAINED: segmented(mask)})
    assert pixels(tmp_path / "p.png").shape[1] == 2 * MARGIN + 4 * PANEL + 3 * GAP
    write_predictions(tmp_path / "none.png", {})
    assert not join_predictions({"a": tmp_path / "none.png"}, tmp_path / "joint.png")
    assert [path.name for path in tmp_path.iterdir()] == ["p.png"]


def test_the_file_is_the_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_predictions(tmp_path / "p.png", {Stage.PRETRAINED: segmented(box(slice(0), slice(0))[None])})
        join_predictions({"a": tmp_path / "p.png"}, tmp_path / "joint.png")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("p.png", "joint.png")] == [0o600] * 2


def classified(*guesses: int, classes: tuple[str, ...] = ("round", "long")) -> Classified:
    """Return pictures of class 0, 1, 0, ... with these classes guessed for them."""
    said = torch.nn.functional.one_hot(torch.tensor(guesses), len(classes)) * 0.5 + 0.5 / len(classes)
    return Classified(grey(len(guesses)), torch.arange(len(guesses)) % 2, said, classes)


def test_every_models_answer_is_green_where_it_is_right_and_red_where_not(tmp_path: Path) -> None:
    write_predictions(tmp_path / "p.png", {Stage.PRETRAINED: classified(1, 1, 1), Stage.GLOBAL: classified(0, 0, 0)})
    page, top = pixels(tmp_path / "p.png"), MARGIN + LINE + 8
    for column, right in enumerate(([False, True, False], [True, False, True])):
        for row, good in enumerate(right):
            x, y = MARGIN + (2 + column) * (PANEL + GAP), top + row * (PANEL + LINE + GAP)
            assert (shares(page[y : y + PANEL, x : x + PANEL], RIGHT) > 50) is good
            assert (shares(page[y : y + PANEL, x : x + PANEL], WRONG) > 50) is not good


def test_twelve_odd_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    masks = torch.stack([box(slice(0, 64), slice(5 * i, 5 * i + 5)) for i in range(12)])
    write_predictions(tmp_path / "p.png", {Stage.PRETRAINED: segmented(masks, reference=masks, classes=ODD)})
    key = pixels(tmp_path / "p.png")[MARGIN + LINE + 8 + PANEL + LINE + GAP :]
    assert all(shares(key, colour) >= 22 * 22 for colour in colours(12))
    write_predictions(tmp_path / "c.png", {Stage.PRETRAINED: classified(*range(6), classes=ODD)})
    face = font(24)
    assert fit_text("$x^2$ [red]", 500, face) == "$x^2$ [red]"
    assert fit_text("a\nb\x1b[1m", 500, face) == "a\\nb\\x1b[1m"
    long = "words and words and words"
    cut = fit_text(long, 200, face)
    assert long.startswith(cut[:-1])
    assert cut[-1] == "…"
    assert face.getlength(cut) <= 200 < face.getlength(long[: len(cut)] + "…")
    assert all(face.getlength(fit_text(name, 60, face)) <= 60 for name in ODD)


def test_no_two_classes_have_one_colour() -> None:
    found = colours(60)
    assert found[:12] == list(predictions.PALETTE)
    assert min(math.dist(a, b) for i, a in enumerate(found[:12]) for b in found[:i]) > 60
    assert len(set(found)) == 60


def test_sites_pages_are_joined_a_row_each_under_the_widest_heading(tmp_path: Path) -> None:
    """The first site never trained; the fourth has no picture, which the last line says."""
    half, none = box(slice(0, 32), slice(None))[None], box(slice(0), slice(0))[None]
    for site in ("a", "b", "c", "e", "f"):
        found = {
            Stage.PRETRAINED: segmented(none, half),
            Stage.GLOBAL: segmented(none, half),
            Stage.PERSONALIZED: segmented(half, none),
        }
        write_predictions(tmp_path / f"{site}.png", {k: v for k, v in found.items() if site != "a" or k != Stage.PERSONALIZED})
    assert join_predictions({site: tmp_path / f"{site}.png" for site in ("a", "b", "c", "d", "e", "f")}, tmp_path / "joint.png")
    joint, own = pixels(tmp_path / "joint.png"), pixels(tmp_path / "b.png")
    step, top = PANEL + LINE + GAP, MARGIN + LINE + 8
    assert joint.shape == (top + 5 * step + 2 * LINE + MARGIN, own.shape[1] + EDGE, 3)
    for row in (1, 2, 3, 4):
        assert (joint[top + row * step :][:step, MARGIN + EDGE : -MARGIN] == own[top:][:step, MARGIN:-MARGIN]).all()
    assert (joint[top:][:step, -MARGIN - PANEL :] == 255).all()
    assert (joint[:top, EDGE:] == own[:top]).all()  # the headings
    key, last = joint[-MARGIN - 2 * LINE : -MARGIN - LINE, EDGE:], joint[-MARGIN - LINE : -MARGIN]
    assert (key == own[-MARGIN - LINE : -MARGIN]).all()
    told = draw_text("5 of 6 sites; without d", (4 * PANEL, LINE), POINTS, GREY, left=True)
    assert (last[:, MARGIN + EDGE :][:, : told.width] == pixels(told)).all()
    assert all((joint[top + row * step :][:PANEL, MARGIN : MARGIN + EDGE] < 60).all(-1).sum() > 20 for row in range(5))


@pytest.mark.parametrize(("count", "notes"), [(SITES, 0), (SITES + 1, 1)])
def test_a_joint_page_shows_all_sites_up_to_its_limit(count: int, notes: int, tmp_path: Path) -> None:
    write_predictions(tmp_path / "p.png", {Stage.GLOBAL: segmented(box(slice(0, 32), slice(None))[None])})
    assert join_predictions({f"site-{number}": tmp_path / "p.png" for number in range(count)}, tmp_path / "joint.png")
    rows = SITES * (PANEL + LINE + GAP)
    assert pixels(tmp_path / "joint.png").shape[0] == MARGIN + LINE + 8 + rows + (1 + notes) * LINE + MARGIN


def test_lines_of_the_key_start_at_the_left(tmp_path: Path) -> None:
    masks = torch.stack([box(slice(0, 32), slice(None))] * 2)
    found = replace(segmented(masks, reference=masks, classes=("d" * 60, "e" * 60)), grid="original grid")
    write_predictions(tmp_path / "p.png", {Stage.GLOBAL: found})
    lines = pixels(tmp_path / "p.png")[-MARGIN - 2 * LINE : -MARGIN].reshape(2, LINE, -1, 3)
    first = [int(np.flatnonzero((line < 250).any(-1).any(0))[0]) for line in lines]
    assert first[0] == MARGIN
    assert MARGIN <= first[1] < MARGIN + 4  # a letter has a little room at its left
