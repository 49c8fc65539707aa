"""Merged models: others' own code loads them from the folder alone, and they answer as the model with its adapter did."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from consilium.adapters import adapter_state
from consilium.config.job import JobConfig
from consilium.core.errors import CheckpointError, ConfigError
from consilium.federation.job_assembly import assemble_job, build_model, tokenizer_of
from consilium.models.clip import network as clip
from consilium.models.registry import MODELS
from consilium.models.sam.network import build_sam
from consilium.use import export_formats
from tests.conftest import small_config, small_text
from tests.use.handing import CELLS, FUNDUS, HERE, changed, code, loaded, stir, trained

THREE = {"name": "segmentation", "classes": ["a", "b", "c"]}
FOUR = {"name": "segmentation", "classes": ["a", "b", "c", "d"]}
UNET = {"name": "unet", "variant": "resunet", "image_size": 32, "width": 2}
PICTURES: dict[str, JobConfig] = {
    "one class": changed(FUNDUS, task={"classes": ["a"]}),
    "two classes": FUNDUS,
    "q and v apart, four classes": changed(FUNDUS, task=FOUR, adapter={"rank": 2, "alpha": 4, "targets": "qv"}),
    "a decoder that trained": changed(FUNDUS, adapter={"rank": 2, "targets": "encoder-qkv", "decoder": "share"}),
    "boxes": changed(FUNDUS, task=THREE | {"prompt": "box"}),
    "points": changed(FUNDUS, task=FOUR | {"prompt": "point"}),
    "dual rank": changed(small_config("fedhera"), task=THREE),
    "all of it": changed(FUNDUS, adapter={"kind": "full"}),
    "a vector behind the encoder": changed(FUNDUS, strategy="feddbe"),
    "unet": changed(FUNDUS, model=UNET, adapter={"kind": "full"}),
    "cells": CELLS,
    "cells with a vector": changed(CELLS, strategy="feddbe"),
}


def compare(config: JobConfig, model: nn.Module, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge and write a model; load it by the page's code and compare its logits on inputs that nobody has seen."""
    tokenizer = tokenizer_of(config, HERE)
    inputs = export_formats.random_inputs(config, tokenizer)
    if "images" in inputs:
        inputs["images"] = inputs["images"].flip(-1) * 0.5
    wanted = export_formats.logits_of(model, inputs)
    with adapter_state.disable_adapter(model):
        base = export_formats.logits_of(model, inputs)
    page, difference = export_formats.write_merged(folder, model, config, tokenizer)
    with torch.no_grad():
        found = loaded(page, folder, monkeypatch)(**inputs)
    bound = export_formats.tolerance(model, wanted)
    assert float((found - wanted).abs().max()) <= bound
    assert 20 * bound < float((base - wanted).abs().max()), "else the base alone would pass"
    assert 0 <= difference <= bound


SLOW = ("unet", "one class", "two classes", "a decoder that trained")
"""MONAI alone takes seconds to load; the others differ little from those that stay."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PICTURES])
def test_a_merged_model_of_pictures_answers_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(PICTURES[name], trained(PICTURES[name]), tmp_path, monkeypatch)


def test_a_merged_language_model_answers_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = changed(small_text(), adapter={"rank": 4, "targets": "all-linear"})
    compare(config, trained(config), tmp_path, monkeypatch)
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"} <= {
        p.name for p in tmp_path.iterdir()
    }


def test_biomedclip_comes_as_transformers_lays_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a tenth of its size, with weights drawn here."""
    monkeypatch.setitem(clip.SHAPES, "biomedclip", clip.Shape(32, 2, 4, 64, 16, 24))
    config = changed(CELLS, model={"name": "clip", "variant": "biomedclip", "image_size": 64, "checkpoint": "x"})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = clip.build_clip("biomedclip", None, 64, 5, weights=False)
        nn.init.normal_(model.head.weight)
        config.adapter_kind.inject(model, config.adapter, MODELS["clip"])
    stir(model)
    compare(config, model, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("variant", "size", "classes"), [("vit_b", 1024, 2), ("vit_b", 256, 2), ("vit_b", 1024, 5), ("med2d", 256, 2)]
)
def test_the_code_for_a_published_sam_builds_it(variant: Any, size: int, classes: int, tmp_path: Path) -> None:
    from consilium.models.sam import SamConfig, export

    with torch.device("meta"):
        model = build_sam(variant, None, size, classes, weights=False)
        page = export.loading_page(model, SamConfig(variant=variant, image_size=size))
        names: dict[str, Any] = {}
        exec(code(page).partition("sam.load_state_dict")[0], names)
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in names["sam"].state_dict().items()} == wanted


def test_what_the_base_has_no_place_for_is_refused() -> None:
    config, model = small_config("fedsca"), trained(FUNDUS)
    with pytest.raises(ConfigError, match=r"^--format merged: adapter.kind 'bottleneck' adds layers .*; use bundle or onnx$"):
        export_formats.merge(build_model(config, HERE), config)
    adapter_state.leave_out(model, {"image_encoder.blocks.2"})
    with pytest.raises(ConfigError, match=r"runs without 'image_encoder.blocks.2', .*; use bundle or onnx$"):
        export_formats.merge(model, FUNDUS)


def test_a_layer_that_shares_its_weight_is_refused_and_said_when_the_job_is_made() -> None:
    """The tiny model's output layer is its embedding: merged, both would change, and other answers be written."""
    config = changed(small_text(), adapter={"rank": 4, "targets": "lm_head"})
    shared = "'lm_head' shares its weight with 'model.embed_tokens'"
    model = trained(config)
    with pytest.raises(ConfigError, match=rf"^--format merged: {shared}, which a merge would change too; use peft$"):
        export_formats.merge(model, config)
    wanted = f"adapter.targets: {shared}; it trains, but cannot be merged into the base"
    assert assemble_job(config).warnings == (wanted,)
    assert assemble_job(small_text()).warnings == ()


def test_a_vector_that_no_bias_can_hold_is_refused_before_anything_is_changed() -> None:
    config = changed(small_text(), strategy="feddbe")
    model = trained(config)
    inputs = export_formats.random_inputs(config, tokenizer_of(config, HERE))
    wanted = export_formats.logits_of(model, inputs)
    with pytest.raises(ConfigError, match="no bias there"):
        export_formats.merge(model, config)
    export_formats.merge_if_possible(model, config)
    assert torch.equal(export_formats.logits_of(model, inputs), wanted)


def test_logits_that_differ_by_more_than_rounding_are_refused() -> None:
    model, wanted = nn.Linear(100, 3), torch.tensor([[1.0, -4.0, 2.0]])
    bound = 10 * 2**-24 * 4  # one layer, sqrt(100), the largest logit
    assert export_formats.tolerance(model, wanted) == pytest.approx(bound)
    near = wanted + torch.tensor([0.0, 0.9 * bound, 0.0])
    assert export_formats.require_equal("merged", model, wanted, near) == pytest.approx(0.9 * bound, rel=0.2)
    for bad in (wanted + 2 * bound, wanted * float("nan")):
        with pytest.raises(CheckpointError, match=r"^--format merged: its logits differ by .*, so nothing was written"):
            export_formats.require_equal("merged", model, wanted, bad)


def test_merged_sam_has_the_names_and_shapes_of_the_unchanged_one(tmp_path: Path) -> None:
    config = PICTURES["q and v apart, four classes"]
    export_formats.write_merged(tmp_path, trained(config), config, None)
    plain = build_sam("tiny", None, 64, 4).state_dict()
    assert {n: t.shape for n, t in load_file(tmp_path / "model.safetensors").items()} == {n: t.shape for n, t in plain.items()}
