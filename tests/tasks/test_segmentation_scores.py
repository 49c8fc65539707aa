"""Scores per image, volume and patient: cases worked by hand, and distances by scipy."""

from itertools import permutations, product
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from nibabel.orientations import ornt_transform
from scipy.ndimage import binary_erosion, distance_transform_edt

from consilium.tasks.segmentation import SEGMENTATION, SegmentationConfig, SegmentationScoresConfig
from consilium.tasks.segmentation.unit_scores import Plane, Units, dice_loss, distances
from tests.tasks.scoring import evaluated, picture, task_of, volume

PER_VOLUME = {"scores": {"per": "volume"}}


def block(shape: tuple[int, ...], *ranges: tuple[int, int]) -> np.ndarray:
    """Return a mask that is true within the ranges."""
    mask = np.zeros(shape, bool)
    mask[tuple(slice(*one) for one in ranges)] = True
    return mask


def blobs(seed: int, shape: tuple[int, int, int] = (8, 8, 6)) -> np.ndarray:
    """Return a mask of voxels near random centres."""
    random, grid = np.random.default_rng(seed), np.indices(shape).reshape(3, -1).T
    centres = random.uniform(1, np.array(shape) - 1, (3, 3))
    return (np.linalg.norm(grid[:, None] - centres, axis=2).min(1) < 1.8).reshape(shape)


def by_scipy(guess: np.ndarray, reference: np.ndarray, spacing: tuple[float, ...]) -> tuple[float, float]:
    """Return (HD95, ASSD) by their definitions, with distance transforms of the whole grid."""
    edges = [mask & ~binary_erosion(mask) for mask in (guess, reference)]
    ways = [distance_transform_edt(~edges[1 - i], sampling=spacing)[edges[i]] for i in (0, 1)]
    return max(np.percentile(way, 95) for way in ways), float(np.concatenate(ways).mean())


def test_a_volume_s_dice_is_not_the_mean_of_its_planes(tmp_path: Path) -> None:
    """Plane 0: 16 true, all found: Dice 1. Plane 1: 4 true, none found: 0. Mean 1/2; together 2 * 16 / (20 + 16) = 8/9."""
    reference, guess = np.zeros((8, 8, 2), bool), np.zeros((8, 8, 2), bool)
    reference[:4, :4, 0] = guess[:4, :4, 0] = reference[:2, :2, 1] = True
    entry = volume(tmp_path, "v", guess, reference, np.eye(4))
    found = {per: evaluated(task_of(tmp_path, [entry], scores={"per": per})) for per in ("image", "volume", "patient")}
    assert found["image"]["dice"] == pytest.approx(1 / 2)
    assert found["volume"]["dice"] == found["patient"]["dice"] == pytest.approx(8 / 9)
    assert found["volume"]["iou"] == pytest.approx(16 / 20)
    assert [found[per]["n"] for per in found] == [2, 1, 1]
    for per, metrics in found.items():
        assert metrics.keys() <= SEGMENTATION.metric_names(SegmentationConfig(classes=["spot"], scores={"per": per}))


def test_distances_are_in_millimetres_along_every_axis(tmp_path: Path) -> None:
    """One voxel each, apart by 3 columns of 0.5 mm, 2 rows of 2 mm and 1 plane of 5 mm."""
    guess, reference = block((8, 8, 4), (2, 3), (5, 6), (1, 2)), block((8, 8, 4), (5, 6), (3, 4), (2, 3))
    found = evaluated(task_of(tmp_path, [volume(tmp_path, "v", guess, reference, np.diag([0.5, 2, 5, 1]))], **PER_VOLUME))
    apart = np.sqrt(1.5**2 + 4**2 + 5**2)
    assert found["hd95_mm"] == found["hd95_mm/spot"] == pytest.approx(apart)
    assert found["assd_mm"] == pytest.approx(apart)
    assert "hd95" not in found


@pytest.mark.parametrize("seed", range(4))
def test_distances_of_volumes_and_planes_are_scipys(seed: int, tmp_path: Path) -> None:
    guess, reference, step = blobs(seed), blobs(seed + 100), (0.7, 1.3, 4.0)
    entry = volume(tmp_path, "v", guess, reference, np.diag([*step, 1]))
    found = evaluated(task_of(tmp_path, [entry], **PER_VOLUME))
    assert (found["hd95_mm"], found["assd_mm"]) == pytest.approx(by_scipy(guess, reference, step), rel=1e-6)
    planes = [k for k in range(6) if reference[..., k].any()]
    far = np.hypot(8 * 0.7, 8 * 1.3)
    each = [by_scipy(guess[..., k], reference[..., k], step[:2]) if guess[..., k].any() else (far, far) for k in planes]
    found = evaluated(task_of(tmp_path, [entry]))
    assert (found["hd95_mm"], found["assd_mm"]) == pytest.approx(tuple(np.mean(each, axis=0)), rel=1e-6)


def test_a_prediction_without_the_class_is_the_grid_s_diagonal_away(tmp_path: Path) -> None:
    reference, nothing = block((8, 8, 4), (1, 3), (1, 3), (1, 3)), np.zeros((8, 8, 4), bool)
    found = evaluated(task_of(tmp_path, [volume(tmp_path, "v", nothing, reference, np.diag([1, 2, 3, 1]))], **PER_VOLUME))
    assert found["hd95_mm"] == found["assd_mm"] == pytest.approx(np.sqrt(8**2 + 16**2 + 12**2))
    assert found["dice"] == 0


def test_units_are_never_mixed(tmp_path: Path) -> None:
    """A picture's pixels have no known size: 2 pixels there, 3 mm in the volume."""
    plane = [block((8, 8), (4, 5), (1 + 2 * i, 2 + 2 * i)) for i in (0, 1)]
    cube = [block((8, 8, 2), (4, 5), (1 + i, 2 + i), (0, 1)) for i in (0, 1)]
    entries = [picture(tmp_path, "p", *plane), volume(tmp_path, "v", *cube, np.diag([1, 3, 1, 1]))]
    found = evaluated(task_of(tmp_path, entries, **PER_VOLUME))
    assert (found["hd95"], found["hd95_mm"]) == pytest.approx((2, 3))
    assert found["n"] == 2


def test_a_volume_scores_alike_whatever_way_it_is_stored(tmp_path: Path) -> None:
    affine = np.diag([0.8, 1.2, 3.0, 1.0])
    guess, reference = blobs(1), blobs(2)
    settings = {"slices": {"axis": "axial"}, "scores": {"per": "volume", "grid": "original"}}
    found = []
    for axes, signs in product(permutations(range(3)), ((1, 1, 1), (-1, 1, -1))):  # test_grid has all 48
        wanted = np.array([[axis, sign] for axis, sign in zip(axes, signs, strict=True)])
        turned = [
            nibabel.Nifti1Image(mask.astype(np.uint8), affine).as_reoriented(
                ornt_transform(np.array([[0, 1], [1, 1], [2, 1]]), wanted)
            )
            for mask in (guess, reference)
        ]
        stored = [np.asarray(one.dataobj).astype(bool) for one in turned]
        found.append(evaluated(task_of(tmp_path, [volume(tmp_path, "v", *stored, turned[0].affine)], side=16, **settings)))
    assert len(found) == 12
    first = {name: value for name, value in found[0].items() if name != "loss"}
    for other in found[1:]:
        assert {name: other[name] for name in first} == pytest.approx(first, rel=1e-6)
    assert first["hd95_mm"] == pytest.approx(by_scipy(guess, reference, (0.8, 1.2, 3.0))[0], rel=1e-6)


def test_the_original_grid_has_the_file_s_pixels(tmp_path: Path) -> None:
    """One true pixel of 16 x 16, all predicted: Dice 2 / 257. On the grid of 8 x 8 the pixel's cell is not even sampled."""
    entry = picture(tmp_path, "p", np.ones((16, 16), bool), block((16, 16), (4, 5), (4, 5)))
    assert evaluated(task_of(tmp_path, [entry], scores={"grid": "original"}))["dice"] == pytest.approx(2 / 257)
    small = evaluated(task_of(tmp_path, [entry], scores={"grid": "resized"}))  # there one pixel of 8 x 8 stands for it
    assert (small["dice"], small["too_small/test/spot"]) == (pytest.approx(2 / 65), 1)


@pytest.mark.parametrize(("grid", "dice"), [("resized", 2 * 16 / (16 + 32)), ("original", 2 * 64 / (64 + 128))])
def test_padding_is_not_scored(grid: str, dice: float, tmp_path: Path) -> None:
    """A wide picture of 8 x 16: its left half is true, all is predicted, and below it lies as much padding as picture."""
    entry = picture(tmp_path, "p", np.ones((8, 16), bool), block((8, 16), (0, 8), (0, 8)))
    task = task_of(tmp_path, [entry], resize="pad", scores={"grid": grid})
    task._sample = lambda split, index: {"image": 255 + 0 * sample["image"], "label": sample["label"]}  # padding is bright too
    sample = task_of(tmp_path, [entry], resize="pad")._samples("test", 0)
    found = evaluated(task)
    assert found["dice"] == pytest.approx(dice)
    assert found["hd95"] == pytest.approx(4 if grid == "resized" else 8, abs=0.5)


def test_resized_millimetres_follow_the_shrinking(tmp_path: Path) -> None:
    """Planes of 32 x 16 voxels of 1 x 2 mm as 8 x 8 pixels: 4 mm each. Blocks apart by 2 pixels of rows lie 8 mm apart."""
    guess, reference = block((32, 16, 2), (8, 12), (8, 10), (0, 1)), block((32, 16, 2), (16, 20), (8, 10), (0, 1))
    resized = {"scores": {"per": "volume", "grid": "resized"}}
    found = evaluated(task_of(tmp_path, [volume(tmp_path, "v", guess, reference, np.diag([1, 2, 9, 1]))], **resized))
    assert found["hd95_mm"] == pytest.approx(8)


def test_a_patient_s_score_is_the_mean_of_its_volumes(tmp_path: Path) -> None:
    """Dice of the volumes: 1 and 2 * 2 / (2 + 6) = 1/2 of one patient, 0 of another: by volume 1/2, by patient 3/8."""
    two, six, away = (block((8, 8, 2), (0, 1), (0, n), (0, 1)) for n in (2, 6, 0))
    pairs = [(two, two), (six, two), (away, two)]
    entries = [volume(tmp_path, f"v{i}", *pair, np.eye(4)) for i, pair in enumerate(pairs)]
    for entry, patient in zip(entries, ("a", "a", "b"), strict=True):
        entry["patient"] = patient
    found = {per: evaluated(task_of(tmp_path, entries, scores={"per": per})) for per in ("volume", "patient")}
    assert found["volume"]["dice"] == pytest.approx(1 / 2)
    assert found["patient"]["dice"] == pytest.approx(3 / 8)
    assert [found[per]["n"] for per in found] == [3, 2]
    assert (found["patient"]["dice_low"], found["patient"]["dice_high"]) == pytest.approx((0, 3 / 4))


def test_planes_in_any_order_and_batch_make_the_same_volumes(tmp_path: Path) -> None:
    entries = [volume(tmp_path, f"v{i}", blobs(i), blobs(i + 9), np.diag([1, 1, 2, 1])) for i in range(2)]
    whole = evaluated(task_of(tmp_path, entries, **PER_VOLUME))
    planes = [entry | {"slice": k} for k in (3, 0, 5, 1, 4, 2) for entry in entries]  # the volumes' planes alternate
    mixed = evaluated(task_of(tmp_path, planes, **PER_VOLUME), batch_size=5)
    assert {k: v for k, v in mixed.items() if k != "loss"} == {k: v for k, v in whole.items() if k != "loss"}
    assert mixed["loss"] == pytest.approx(whole["loss"])


def test_empty_references_count_if_the_job_says_so(tmp_path: Path) -> None:
    """Three tiles without the class, one with a false positive, and one found whole: (1 + 1 + 0 + 1) / 4."""
    nothing, some = np.zeros((8, 8), bool), block((8, 8), (0, 2), (0, 2))
    pairs = [(nothing, nothing), (nothing, nothing), (some, nothing), (some, some)]
    entries = [picture(tmp_path, f"p{i}", *pair) for i, pair in enumerate(pairs)]
    found = evaluated(task_of(tmp_path, entries, scores={"empty_references": "count"}))
    assert (found["dice"], found["iou"], found["n"]) == (0.75, 0.75, 4)
    assert found["hd95"] == 0
    found = evaluated(task_of(tmp_path, entries))
    assert (found["dice"], found["n"]) == (1, 1)


def test_without_any_reference_nothing_is_reported_but_the_loss_and_that_nothing_was_scored(tmp_path: Path) -> None:
    nothing = np.zeros((8, 8), bool)
    found = evaluated(task_of(tmp_path, [picture(tmp_path, f"p{i}", nothing, nothing) for i in range(2)]))
    assert found.keys() == {"loss", "n"}
    assert found["n"] == 0


@pytest.mark.parametrize("lost", [0, 3])
def test_a_volume_whose_plane_is_left_out_is_scored_without_it(lost: int, tmp_path: Path) -> None:
    entries = [volume(tmp_path, f"v{i}", blobs(i), blobs(i + 9), np.diag([1, 1, 2, 1])) for i in range(2)]
    items = task_of(tmp_path, entries, **PER_VOLUME).data.splits["test"]
    units = Units(items, SegmentationScoresConfig(per="volume"), False)
    for item in items:
        masks = [torch.from_numpy(blobs(int(item.image.stem[1]) + of)[..., item.slice][None]) for of in (0, 9)]
        if item.slice != lost:
            units.add(Plane(item, *masks, torch.tensor([True])))
    kept = [k for k in range(6) if k != lost]
    wanted = []
    for i in range(2):
        guess, reference = blobs(i)[..., kept], blobs(i + 9)[..., kept]
        wanted.append(2 * (guess & reference).sum() / (guess.sum() + reference.sum()))
    assert units.scores()[1]["dice"][:, 0].tolist() == pytest.approx(wanted)


def test_a_picture_of_several_tiles_has_overlaps_and_no_distance_of_its_last_tile(tmp_path: Path) -> None:
    """4 pixels in each half; the left one's are missed: Dice 2 * 4 / (4 + 8). The last tile alone is answered rightly."""
    guess, reference = np.zeros((2, 16, 32), bool)
    reference[4:6, 4:6] = reference[4:6, 20:22] = guess[4:6, 20:22] = True
    settings = {"tiles": {"size": 16}, "scores": {"per": "volume"}}
    found = evaluated(task_of(tmp_path, [picture(tmp_path, "p", guess, reference)], side=16, **settings))
    assert found["dice"] == pytest.approx(2 / 3)
    assert not [name for name in found if name.startswith(("hd95", "assd"))]


def test_one_volume_drawn_by_two_raters_is_two(tmp_path: Path) -> None:
    """The prediction is the first rater's drawing: Dice 1 for one, 0 for the other."""
    left, right = np.zeros((8, 8, 2), bool), np.zeros((8, 8, 2), bool)
    left[:4], right[4:] = True, True
    first = volume(tmp_path, "v", left, left, np.eye(4))
    second = first | {"label": volume(tmp_path, "w", left, right, np.eye(4))["label"]}
    found = evaluated(task_of(tmp_path, [first, second], scores={"per": "volume"}))
    assert found["n"] == 2
    assert found["dice"] == pytest.approx(0.5)


@pytest.mark.slow  # MONAI takes seconds to load
@pytest.mark.parametrize("shape", [(2, 2, 64, 64), (1, 1, 33, 17), (2, 3, 8, 9, 10)])
def test_the_dice_loss_is_monais_to_the_bit(shape: tuple[int, ...]) -> None:
    from monai.losses import DiceLoss

    generator = torch.Generator().manual_seed(0)
    logits, label = torch.randn(shape, generator=generator), (torch.rand(shape, generator=generator) > 0.6).float()
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found, expected = dice_loss(ours, label), DiceLoss(sigmoid=True, reduction="none")(theirs, label)
    assert torch.equal(found, expected.flatten(1))
    assert torch.equal(found.mean(), DiceLoss(sigmoid=True)(theirs, label))
    found.mean().backward()
    expected.mean().backward()
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.slow  # MONAI takes seconds to load
@pytest.mark.parametrize("seed", range(6))
def test_surfaces_are_monais_to_the_bit(seed: int) -> None:
    from monai.metrics.utils import get_edge_surface_distance

    masks, step = [np.pad(blobs(2 * seed + i), 1) for i in (0, 1)], [0.7, 1.3, 5.0]
    _, both, _ = get_edge_surface_distance(*map(torch.from_numpy, masks), spacing=step, symmetric=True)
    expected = max(float(torch.quantile(one, 0.95)) for one in both), float(torch.cat(list(both)).mean())
    assert distances(*masks, step) == expected
