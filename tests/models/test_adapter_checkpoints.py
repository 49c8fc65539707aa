"""An adapter of PEFT's as model.checkpoint or model.config: every kind of model refuses it and says how to merge it."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from consilium.config.job import JobConfig, load_job
from consilium.config.site import SiteConfig
from consilium.core.errors import CheckpointError
from consilium.federation.job_assembly import build_model, tokenizer_of
from consilium.models.causal_lm.network import build_causal_lm, load_tokenizer
from consilium.models.registry import MODELS
from tests.conftest import small_cells, small_config, small_text
from tests.models.classes import CLASSIFIERS, PROMPTABLE, SIDE, SPEAKING, make
from tests.models.folders import config_of, save_folder

MERGE = r"adapter.*merge it into its base first: PeftModel\.from_pretrained\(BASE, FOLDER\)\.merge_and_unload\(\)"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a LoRA as PEFT saves it; its settings name the base's folder."""
    folder = tmp_path_factory.mktemp("adapter") / "lora"
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    return folder


def bin_file(adapter: Path, place: Path) -> Path:
    torch.save(load_file(adapter / "adapter_model.safetensors"), place)
    return place


def beside(folder: Path, adapter: Path, place: Path) -> Path:
    """Return a copy of a model's folder with an adapter's files in it."""
    shutil.copytree(folder, place)
    for path in adapter.glob("adapter_*"):
        shutil.copy(path, place)
    return place


WAYS = {
    "folder": lambda adapter, at: adapter,
    "settings": lambda adapter, at: adapter / "adapter_config.json",
    "safetensors": lambda adapter, at: adapter / "adapter_model.safetensors",
    "pickle": lambda adapter, at: bin_file(adapter, at / "adapter_model.bin"),
    "renamed safetensors": lambda adapter, at: shutil.copy(adapter / "adapter_model.safetensors", at / "base.safetensors"),
    "renamed pickle": lambda adapter, at: bin_file(adapter, at / "base.pth"),
}
FILES = {  # kinds of models whose weights are one file
    "sam": {"name": "sam", "variant": "vit_b", "image_size": 64},
    "med2d": {"name": "sam", "variant": "med2d", "image_size": 64},
    "biomedclip": {"name": "clip", "variant": "biomedclip", "image_size": 64},
    "unet": {"name": "unet", "variant": "unet", "image_size": 32, "width": 2},
}
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "causal_lm": ("llama", {}),
    "vision_language": ("llava", SPEAKING["llava"]),
    "vision": ("dinov2", CLASSIFIERS["dinov2"]),
    "sam": ("sam", PROMPTABLE["sam"]),
}


def job_of(model: dict[str, Any], checkpoint: Path) -> JobConfig:
    """Return a job on this base, of the task that its kind serves."""
    kind = MODELS[model["name"]]
    raw = (small_cells if kind.task == "classification" else small_text if kind.task == "language" else small_config)("fedit")
    said = raw.model_dump() | {"model": model | {"checkpoint": str(checkpoint)}}
    if model["name"] == "unet":
        said["adapter"] = {"kind": "full"}
    if model["name"] == "vision_language":
        said["task"], said["data"] = {"name": "report"}, {}
    return JobConfig.model_validate(said)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", FILES)
def test_models_of_one_file_refuse_adapters(kind: str, way: str, adapter: Path, tmp_path: Path) -> None:
    if (kind, way) == ("unet", "renamed pickle"):
        pytest.skip("a unet reads no pickles")
    given = WAYS[way](adapter, tmp_path)
    with pytest.raises(CheckpointError, match=MERGE):
        build_model(job_of(FILES[kind], given), SiteConfig())


@pytest.mark.parametrize(
    "way", ["folder", "settings", "safetensors", "pickle", "beside a base", "as model.safetensors", "as a part"]
)
@pytest.mark.parametrize("kind", FOLDERS)
def test_models_of_a_folder_refuse_adapters(kind: str, way: str, base: Path, adapter: Path, tmp_path: Path) -> None:
    name, sizes = FOLDERS[kind]
    made = base if kind == "causal_lm" else make(tmp_path / "model", name, sizes).folder
    if way == "beside a base":
        given = beside(made, adapter, tmp_path / "both")
    elif way.startswith("as "):
        given = Path(shutil.copytree(made, tmp_path / "renamed"))
        (given / "model.safetensors").unlink()
        tensors = load_file(adapter / "adapter_model.safetensors")
        place = "model.safetensors" if way == "as model.safetensors" else "part.safetensors"
        save_file(tensors, given / place, {"format": "pt"})
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "part.safetensors")}
        (given / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        given = WAYS[way](adapter, tmp_path)
    model: dict[str, Any] = {"name": kind, "variant": "folder", "config": config_of(made)}
    model |= {"max_length": 64} if kind == "causal_lm" else {"image_size": SIDE}
    config = job_of(model, given)
    with pytest.raises(CheckpointError, match=MERGE):
        build_model(config, SiteConfig())
    if not way.startswith("as ") and MODELS[kind].tokenizer:
        with pytest.raises(CheckpointError, match=MERGE):
            tokenizer_of(config, SiteConfig())


def test_the_merge_that_the_error_names_gives_a_base_with_the_adapter_in_it(base: Path, adapter: Path, tmp_path: Path) -> None:
    tuned: Any = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        wanted, plain = tuned(ids).logits, AutoModelForCausalLM.from_pretrained(base).eval()(ids).logits
    new = tmp_path / "new"
    peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload().save_pretrained(new)
    for path in (*base.glob("tokenizer*"), *base.glob("special_tokens*")):
        shutil.copy(path, new)
    found = build_causal_lm("folder", new).eval()
    load_tokenizer("folder", new)
    with torch.no_grad():
        assert torch.allclose(found(ids).logits, wanted, atol=1e-5)
    assert not torch.allclose(wanted, plain, atol=1e-3)


@pytest.mark.parametrize("named", ["lora", "lora/adapter_config.json"])
def test_an_adapter_s_settings_are_no_architecture(named: str, adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(adapter, tmp_path / "lora")
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: x\nstrategy: fedit\ntask: {name: language, labels: [a, b]}\ntraining: {rounds: 1}\n"
        f"model: {{name: causal_lm, variant: folder, checkpoint: '{tmp_path}/lora', config: {named}}}\n"
    )
    with pytest.raises(CheckpointError, match=r"model\.config: .*adapter_config\.json: belongs to an adapter .*merge it in"):
        load_job(job, author=True)
