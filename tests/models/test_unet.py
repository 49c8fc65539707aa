"""U-Nets: the same first weights everywhere, pictures of a batch apart, errors in one line."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from consilium.config.job import JobConfig
from consilium.core.errors import CheckpointError, ConfigError
from consilium.federation.job_assembly import assemble_job
from consilium.models.unet import MEAN
from consilium.models.unet.network import build_unet
from tests.conftest import small_config


@pytest.mark.parametrize("variant", ["unet", "resunet"])
def test_a_batch_s_pictures_do_not_act_on_each_other_and_the_seed_says_the_weights(variant: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model, again, other = (build_unet(variant, 2, 3, seed, None) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 255
    model.train()
    with torch.no_grad():
        both, one = model(images), model(images[:1])
    assert both.shape == (2, 3, 64, 64)
    assert torch.allclose(both[:1], one, atol=1e-5)
    assert not list(model.state_dict().keys() - dict(model.named_parameters()).keys())


def test_padding_is_zero_to_it() -> None:
    model, seen = build_unet("unet", 2, 1, 0, None), []
    model.net.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(torch.tensor(MEAN, dtype=torch.float32).view(1, 3, 1, 1).expand(1, 3, 32, 32))
    assert not seen[0].any()


def test_a_checkpoint_of_another_model_is_named(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    for name in ("x", "broken", "absent"):
        with pytest.raises(CheckpointError, match=r"model.checkpoint: .* cannot be used .* same variant, width and classes"):
            build_unet("unet", 2, 1, 0, tmp_path / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("section", "value", "said"),
    [
        ("task", {"prompt": "box"}, r"task\.prompt: 'box': model unet takes no prompts; use none"),
        ("training", {"gradient_checkpointing": True}, r"training\.gradient_checkpointing: model unet has none; use false"),
    ],
)
def test_what_it_has_not_is_refused(section: str, value: dict[str, object], said: str) -> None:
    raw = small_config("fedit").model_dump() | {"adapter": {"kind": "full"}}
    raw["model"] = {"name": "unet", "variant": "unet", "image_size": 32}
    raw[section] = raw[section] | value
    with pytest.raises(ConfigError, match=said):
        assemble_job(JobConfig.model_validate(raw))


def test_a_dtype_of_what_is_frozen_is_not_refused_where_all_trains() -> None:
    raw = small_config("fedit").model_dump() | {"adapter": {"kind": "full"}}
    raw["model"] = {"name": "unet", "variant": "unet", "image_size": 32, "width": 2, "dtype": "bf16"}
    assert assemble_job(JobConfig.model_validate(raw)).initial
