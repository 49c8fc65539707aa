"""Pictures from updates: drawn where the gradient shows them, not from masks; told apart among others."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from consilium.adapters.adapter_state import freeze_base
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.federation.job_assembly import assemble_job
from consilium.privacy.secagg.arithmetic import UNIT
from consilium.runtime.engine import simulate
from consilium.use.invert import contributing_candidates, gradient, invert, mask_update, mean_gradient, psnr
from tests.conftest import run, small_cells, small_text, training_only


class Told:
    """A task of pictures and one label each."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["image"].flatten(1) / 255), batch["label"])


@pytest.fixture
def seen() -> tuple[nn.Module, list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return a linear model, six smooth pictures of 8 by 8, and each one's gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3 * 64, 4, bias=False))
    freeze_base(model, {"0.weight"})
    smooth = nn.functional.interpolate(torch.rand(6, 3, 2, 2), size=8, mode="bilinear") * 255
    batches = [{"image": one[None], "label": torch.tensor([i % 4])} for i, one in enumerate(smooth)]
    return model, batches, [gradient(model, Told(), one, ["0.weight"]) for one in batches]


def alike(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


def test_a_picture_is_drawn_from_the_gradient_that_is_it_and_not_from_masks(seen: tuple) -> None:
    """A linear layer's gradient is the picture times the error of each class, so its direction is the picture's."""
    model, batches, gradients = seen
    drawn, left = invert(model, Told(), gradients[0], batches[0], 60, 0)
    assert alike(drawn, batches[0]["image"]) > 0.9
    assert left < 0.05
    drawn, left = invert(model, Told(), mask_update(gradients[0], 0), batches[0], 60, 0)
    assert abs(alike(drawn, batches[0]["image"])) < 0.6
    assert left > 0.5


def test_the_right_pictures_are_picked_by_their_gradients(seen: tuple) -> None:
    _, _, gradients = seen
    assert contributing_candidates(gradients, gradients[3], 1) == {3}
    assert contributing_candidates(gradients, mean_gradient([gradients[1], gradients[4]]), 2) == {1, 4}
    assert contributing_candidates(gradients, {"0.weight": -gradients[3]["0.weight"]}, 6).isdisjoint({3})


def test_words_under_masks_are_uniform_whatever_the_update(seen: tuple) -> None:
    """Standardized to the range of a word, their mean is 0 and their deviation 1 / sqrt 3."""
    _, _, gradients = seen
    found = torch.cat([mask_update(gradients[0], seed)["0.weight"].flatten() for seed in range(10)]).double() / UNIT / 2**63
    assert float(found.mean()) == pytest.approx(0, abs=0.03)
    assert float(found.std()) == pytest.approx(3**-0.5, abs=0.02)


def test_noise_of_a_hundredth_of_the_range_is_forty_decibels() -> None:
    assert psnr(torch.full((2, 3, 4, 4), 2.55), torch.zeros(2, 3, 4, 4)) == pytest.approx(40)


def trained(config: JobConfig, folder: Path) -> Path:
    raw = config.model_dump()
    raw["federation"]["min_sites"] = 1
    simulate(assemble_job(JobConfig.model_validate(raw)), {"site-1": SiteConfig()}, folder, lambda event: None)
    return folder


@pytest.mark.slow
def test_the_command_draws_a_picture_and_says_how_well_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(training_only(small_cells("fedit", rounds=1, local_steps=20), test=1), tmp_path / "run")
    picture = tmp_path / "drawn.png"
    words = ("--site", "site-1", "--batch", 2, "--sum", 2, "--steps", 3, "-o", picture, "--format", "json")
    assert run(monkeypatch, "privacy", "invert", folder, *words) == 0
    found = json.loads(capsys.readouterr().out)
    attacks = {one["attack"]: one for one in found["attacks"]}
    assert list(attacks) == ["alone", "sum", "masked"]
    assert attacks["alone"]["told"] == 2  # of a batch of two among 24 their gradients tell which
    assert attacks["masked"]["distance"] > 0.8 > attacks["alone"]["distance"]
    with Image.open(picture) as drawn:
        assert np.asarray(drawn.convert("L")).std() > 10
    assert run(monkeypatch, "privacy", "invert", folder, "--site", "site-1", "--batch", 9, "--steps", 1) == 2
    assert "24 training pictures, the sum needs 27; lower --batch or --sum" in capsys.readouterr().err


@pytest.mark.slow
def test_texts_have_no_pictures_to_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(training_only(small_text("fedit", rounds=1, local_steps=1), test=1), tmp_path / "run")
    assert run(monkeypatch, "privacy", "invert", folder, "--site", "site-1") == 2
    assert "task.name: 'language' trains on no pictures that could be drawn" in capsys.readouterr().err
