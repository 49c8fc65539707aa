"""LoRA by name: the paper's counts, start values, PEFT folders that plain PEFT loads with equal outputs."""

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from consilium.adapters import adapter_state, lora
from consilium.adapters.kinds import LORA, LoraConfig
from consilium.config.job import JobConfig
from consilium.core.errors import CheckpointError, ConfigError
from consilium.federation.job_assembly import assemble_job
from consilium.federation.job_consistency import name_base_changes
from consilium.federation.saved_model import convert_changes_to_parameters
from consilium.models.causal_lm import CAUSAL_LM
from consilium.models.clip import CLIP
from consilium.models.clip.network import build_clip
from consilium.models.sam import SAM
from consilium.models.sam.network import build_sam
from consilium.strategies.registry import STRATEGIES
from tests.conftest import initial


def tiny(targets: str, rank: int = 3, alpha: float = 6.0) -> nn.Module:
    model = build_sam("tiny", None, 64, 2)
    lora.inject(model, LoraConfig(rank=rank, alpha=alpha, targets=targets), SAM)
    return model


def randomize(model: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = {n: 0.2 * torch.randn(p.shape, generator=generator) for n, p in adapter_state.tensors(model).items()}
    adapter_state.load(model, values)
    return values


@pytest.mark.parametrize(("rank", "trainable"), [(8, 389_120), (16, 778_240)])
def test_vit_b_paper_targets_have_the_papers_count(rank: int, trainable: int) -> None:
    with torch.device("meta"):
        model = build_sam("vit_b", None, 1024, 2, weights=False)
        lora.inject(model, LoraConfig(rank=rank, alpha=rank, targets="paper"), SAM)
    assert sum(p.numel() for p in adapter_state.tensors(model).values()) == trainable
    assert all(p.requires_grad == ("lora_" in n) for n, p in model.named_parameters())


def test_initial_values_are_seeded_per_tensor_and_change_nothing() -> None:
    model, images = tiny("paper"), torch.rand(1, 3, 64, 64) * 255
    start = initial(model, seed=5)
    assert all(torch.equal(t, initial(model, seed=5)[n]) for n, t in start.items())
    assert not torch.equal(*[initial(model, seed=s)["image_encoder.blocks.0.attn.qkv.lora_A"] for s in (5, 6)])
    bound = 128**-0.5
    a = start["image_encoder.blocks.0.attn.qkv.lora_A"]
    assert a.abs().max() <= bound
    assert a.std() == pytest.approx(bound / 3**0.5, rel=0.1)
    adapter_state.load(model, start)
    assert torch.equal(model(images), build_sam("tiny", None, 64, 2)(images))


@pytest.mark.parametrize("targets", ["paper", "qv", "all-linear", r"image_encoder\.blocks\.[01]\.mlp\.lin1"])
def test_plain_peft_loads_the_folder_with_equal_outputs(targets: str, tmp_path: Path) -> None:
    model, images = tiny(targets), torch.rand(2, 3, 64, 64) * 255
    values = randomize(model)
    lora.save_peft(tmp_path, values, 3, 6.0, "sam-tiny", SAM.targets.get(targets))
    plain = build_sam("tiny", None, 64, 2)
    before = plain(images)
    loaded = peft.PeftModel.from_pretrained(plain, str(tmp_path)).eval()
    assert torch.allclose(loaded(images), model(images), atol=2e-4)
    assert not torch.allclose(loaded(images), before, atol=1e-2)
    assert all(n.startswith("base_model.model.") for n in load_file(tmp_path / "adapter_model.safetensors"))
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (said["base_model_name_or_path"], said["inference_mode"], said["modules_to_save"]) == ("sam-tiny", True, None)
    assert said["rank_pattern"].keys() == said["alpha_pattern"].keys()
    assert set(said["rank_pattern"].values()) == ({6} if targets == "qv" else set())  # q and v in one layer


def small_clip() -> nn.Module:
    return build_clip("tiny", None, 64, 5)


@pytest.mark.parametrize("targets", ["paper", "qv", "all-linear", ".*"])
def test_plain_peft_loads_a_classifier_with_its_head(targets: str, tmp_path: Path) -> None:
    model, images = small_clip(), torch.rand(2, 3, 64, 64) * 255
    lora.inject(model, LoraConfig(rank=3, alpha=6.0, targets=targets), CLIP)
    values = randomize(model)
    assert {"head.weight", "head.bias"} == {n for n in values if n.startswith("head")}
    lora.save_peft(tmp_path, values, 3, 6.0, "clip-tiny", CLIP.targets.get(targets))
    plain = small_clip()
    torch.nn.init.normal_(plain.head.weight)  # a fresh head, whatever its values
    loaded = peft.PeftModel.from_pretrained(plain, str(tmp_path)).eval()
    assert torch.allclose(loaded(images), model(images), atol=2e-4)
    assert model(images).std() > 0.1


def test_target_sets_of_the_tower() -> None:
    counts = {}
    for targets in ("paper", "qv", "all-linear"):
        model = small_clip()
        lora.inject(model, LoraConfig(rank=2, alpha=2, targets=targets), CLIP)
        counts[targets] = len({n.rpartition(".")[0] for n in adapter_state.tensors(model) if "lora_A" in n})
    assert counts == {"paper": 12, "qv": 8, "all-linear": 24}


def test_the_head_is_trained_starts_at_zero_and_is_chance_when_disabled() -> None:
    model, images = small_clip(), torch.rand(2, 3, 64, 64) * 255
    lora.inject(model, LoraConfig(rank=2, alpha=2, targets="paper"), CLIP)
    assert {n for n, p in model.named_parameters() if p.requires_grad and "lora" not in n} == {"head.weight", "head.bias"}
    start = initial(model, 0)
    assert not start["head.weight"].any()
    assert start["vision_model.layers.0.attention.q_proj.lora_A"].any()
    randomize(model)
    adapted = model(images)
    with adapter_state.disable_adapter(model):
        assert not model(images).any()
    assert torch.equal(model(images), adapted)


def test_qv_leaves_k_alone() -> None:
    model = tiny("qv")
    adapted = {n.rpartition(".")[0] for n in adapter_state.tensors(model)}
    assert {f"image_encoder.blocks.0.attn.qkv.{s}" for s in "qv"} <= adapted
    assert not [n for n in adapted if n.endswith((".k", "k_proj", "out_proj"))]


def test_a_layer_whose_name_ends_like_an_adapted_ones_is_left_alone() -> None:
    """The pattern is of whole names: `proj` is none of `deep.proj`, nor `a.b` of `a_b`."""
    model = nn.Module()
    for name in ("proj", "deep", "a", "a_b"):
        setattr(model, name, nn.Module() if name in ("deep", "a") else nn.Linear(4, 4))
    model.deep.proj, model.a.b = nn.Linear(4, 4), nn.Linear(4, 4)
    lora.inject(model, LoraConfig(rank=2, alpha=2, targets=r"proj|a\.b"), CAUSAL_LM)
    assert {name.rpartition(".")[0] for name in adapter_state.tensors(model)} == {"proj", "a.b"}
    assert not any(isinstance(module, nn.Dropout) for module in model.modules())


def test_errors_name_what_is_wrong(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"adapter\.targets: 'nothing' matches no linear layer"):
        tiny("nothing")
    with pytest.raises(ConfigError, match="not a valid regular expression"):
        tiny("a(")
    assert capfd.readouterr() == ("", "")
    model = tiny("paper")
    values = initial(model, 0)
    name = next(iter(values))
    with pytest.raises(CheckpointError, match=r"shape \(1, 1\)"):
        adapter_state.load(model, values | {name: torch.zeros(1, 1)})
    with pytest.raises(CheckpointError, match="not in both"):
        adapter_state.load(model, {n: t for n, t in values.items() if n != name})


def job(strategy: str = "fedit", **adapter: object) -> JobConfig:
    """Return a job on the tiny SAM."""
    return JobConfig.model_validate({
        "name": "a", "strategy": strategy, "model": {"name": "sam", "variant": "tiny", "image_size": 64},
        "task": {"name": "segmentation", "classes": ["a"]}, "training": {"rounds": 1}, "adapter": {"rank": 4} | adapter,
    })  # fmt: skip


def test_rslora_multiplies_by_alpha_over_the_root_of_the_rank(tmp_path: Path) -> None:
    config = job(rslora=True, alpha=6.0).adapter
    assert config.product_scaling == 6 / 2  # not 6 / 4
    model, images = build_sam("tiny", None, 64, 1), torch.rand(1, 3, 64, 64) * 255
    LORA.inject(model, config, SAM)
    randomize(model)
    own = peft.LoraConfig(r=4, lora_alpha=6.0, use_rslora=True, target_modules=r"image_encoder\.blocks\.\d+\.attn\.qkv")
    layer = peft.inject_adapter_in_model(own, build_sam("tiny", None, 64, 1)).image_encoder.blocks[0].attn.qkv
    assert layer.scaling["default"] == model.image_encoder.blocks[0].attn.qkv.scaling["default"] == 3.0
    LORA.export(tmp_path, adapter_state.values(model), config, SAM, "sam")
    assert {path.name for path in tmp_path.iterdir()} >= {"adapter_config.json"}
    assert not (tmp_path / "decoder.safetensors").exists()
    tuned = peft.PeftModel.from_pretrained(build_sam("tiny", None, 64, 1), tmp_path)
    torch.testing.assert_close(tuned(images), model(images))
    LORA.scale(model, config, 0.5)
    assert model.image_encoder.blocks[0].attn.qkv.scaling["default"] == 1.5


def test_a_decoder_beside_lora_trains_whole_is_exported_apart_and_is_not_adapted_twice(tmp_path: Path) -> None:
    config = job(targets="encoder-qkv", decoder="share").adapter
    model = build_sam("tiny", None, 64, 1)
    LORA.inject(model, config, SAM)
    values = adapter_state.values(model)
    LORA.export(tmp_path, values, config, SAM, "sam")
    assert load_file(tmp_path / "decoder.safetensors").keys() == {n for n in values if n.startswith("base.mask_decoder.")}
    assert not any("mask_decoder" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    assert LORA.shapes(build_sam("tiny", None, 64, 1), config, SAM)
    with pytest.raises(ConfigError, match=r"adapter\.targets: 'all-linear' adapts 'mask_decoder\..*share trains whole"):
        LORA.shapes(build_sam("tiny", None, 64, 1), job(targets="all-linear", decoder="share").adapter, SAM)
    assert LORA.shapes(build_sam("tiny", None, 64, 1), job(targets="all-linear").adapter, SAM)


def test_a_head_goes_to_a_file_of_its_own_where_the_base_has_none(tmp_path: Path) -> None:
    model = small_clip()
    lora.inject(model, LoraConfig(rank=3, alpha=6.0, targets="paper"), CLIP)
    values = randomize(model)
    lora.save_peft(tmp_path, values, 3, 6.0, "clip-tiny", CLIP.target("paper"), head_apart=True)
    head = load_file(tmp_path / "head.safetensors")
    assert head.keys() == {"weight", "bias"}
    assert torch.equal(head["weight"], values["head.weight"])
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] is None
    assert not any("head" in name for name in load_file(tmp_path / "adapter_model.safetensors"))


def test_dora_starts_as_the_base_and_plain_peft_loads_its_lengths_of_rows(tmp_path: Path) -> None:
    config, images = job(dora=True).adapter, torch.rand(1, 3, 64, 64) * 255
    model = build_sam("tiny", None, 64, 1)
    LORA.inject(model, config, SAM)
    with torch.device("meta"):
        shapes = LORA.shapes(build_sam("tiny", None, 64, 1, weights=False), config, SAM)
    assert {name: tuple(tensor.shape) for name, tensor in adapter_state.tensors(model).items()} == dict(shapes)
    adapter_state.load(model, initial(model, seed=1) | adapter_state.initial_base_changes(model))
    base = build_sam("tiny", None, 64, 1)
    torch.testing.assert_close(model(images), base(images), rtol=1e-4, atol=1e-4)
    randomize(model)
    wanted, values = model(images), adapter_state.values(model)
    weight = base.image_encoder.blocks[0].attn.qkv.weight
    name = "image_encoder.blocks.0.attn.qkv"
    direction = weight + values[f"{name}.lora_B"] @ values[f"{name}.lora_A"]  # alpha is the rank
    length = weight.norm(dim=1) + values[f"base.{name}.lora_magnitude_vector.default.weight"]
    merged = length[:, None] * direction / direction.norm(dim=1, keepdim=True)  # DoRA, Eq. 5
    with adapter_state.disable_adapter(model):
        torch.testing.assert_close(model(images), base(images), rtol=1e-4, atol=1e-4)
    LORA.export(tmp_path / "site", convert_changes_to_parameters(model, values), config, SAM, "sam")
    tuned = peft.PeftModel.from_pretrained(build_sam("tiny", None, 64, 1), tmp_path / "site")
    torch.testing.assert_close(tuned(images), wanted, rtol=1e-4, atol=1e-4)
    LORA.export(tmp_path / "server", name_base_changes(values), config, SAM, "sam")
    assert not (tmp_path / "server" / "adapter_config.json").exists()  # a server has no lengths to add the changes to
    lora.merge(model)
    torch.testing.assert_close(model.image_encoder.blocks[0].attn.qkv.weight, merged, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(images), wanted, rtol=1e-4, atol=1e-4)


def test_dora_is_refused_where_its_lengths_have_no_rule() -> None:
    assert len(assemble_job(job(dora=True)).initial) == 3 * len([n for n in assemble_job(job()).initial if "lora_A" in n])
    known = {name for name, strategy in STRATEGIES.items() if strategy().traits.elementwise}
    assert known == {"fedit", "fedprox", "scaffold", "centralized", "local_only"}
    for strategy in ("ffa_lora", "fedra"):
        with pytest.raises(ConfigError, match="has no rule for the lengths of rows; use fedit"):
            assemble_job(job(strategy, dora=True))
    with pytest.raises(ConfigError, match=r"adapter\.dora: true: targets 'qv' are parts of layers"):
        assemble_job(job(dora=True, targets="qv"))


def test_a_rank_above_a_layers_size_is_refused_and_the_largest_one_is_taken() -> None:
    """The least of a layer's two sizes is named."""
    model = build_sam("tiny", None, 64, 2)
    config = LoraConfig(targets="encoder-qkv")
    most = min(min(layer.weight.shape) for name, layer in model.named_modules() if name.endswith("attn.qkv"))
    found = lora.shapes(model, config.model_copy(update={"rank": most}), SAM)
    assert {rank for name, (rank, _) in found.items() if name.endswith("lora_A")} == {most}
    with pytest.raises(ConfigError, match=rf"adapter\.rank: {most + 1}: .*; use at most {most}, or other targets"):
        lora.shapes(model, config.model_copy(update={"rank": most + 1}), SAM)
