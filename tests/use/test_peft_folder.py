"""The PEFT folder of a language model: PEFT's and transformers' own classes open it, and vLLM's rules for adapters hold."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.storage import checkpoint_hash
from consilium.models.causal_lm.network import TINY_FOLDER, build_causal_lm, load_tokenizer as ours
from consilium.use import export_formats
from consilium.use.export import export, short_names
from consilium.use.model import open_model
from tests.conftest import run, small_text
from tests.models.classes import CLASSIFIERS, PROMPTABLE, SIDE, make
from tests.models.folders import config_of, save_folder
from tests.tasks.test_text_classification import job, save_encoder
from tests.use.handing import CELLS, FUNDUS, changed, run_peft_card
from tests.use.test_export import kept

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


def of_folder(tmp_path: Path, **adapter: Any) -> tuple[JobConfig, SiteConfig]:
    """Return a job on a folder with a chat template and a licence, and its site."""
    base = save_folder(tmp_path / "checkpoints" / "base")
    (base / "chat_template.jinja").write_text(TEMPLATE)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    model = {"name": "causal_lm", "variant": "folder", "max_length": 64, "checkpoint": str(base), "config": config_of(base)}
    config = changed(small_text(), model=model, adapter={"rank": 2, "alpha": 6, **adapter})
    return config, SiteConfig(device="cpu", checkpoints=tmp_path / "checkpoints")


def sha_of(config: JobConfig) -> str:
    return checkpoint_hash(Path(config.model.checkpoint))


@pytest.mark.parametrize(
    ("targets", "short"),
    [
        ("qv", ["q_proj", "v_proj"]),
        ("all-linear", ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]),
        (r"model\.layers\.1\.self_attn\.q_proj", None),
    ],
)
def test_pefts_own_class_opens_the_exported_folder_alone(targets: str, short: list[str] | None, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    config, own = of_folder(tmp_path, targets=targets)
    found = open_model(kept(tmp_path / "kept", config, sha_of(config)), own=own)
    inputs = export_formats.random_inputs(config, ours("tiny", None))
    wanted = export_formats.logits_of(found.model, inputs)
    folder = export(found, "peft", tmp_path / "peft", own).folder
    opened = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        got = opened(**inputs).logits
    base = build_causal_lm("folder", tmp_path / "checkpoints/base")
    assert float((got - wanted).abs().max()) <= export_formats.tolerance(base, wanted)
    assert float((export_formats.logits_of(base, inputs) - wanted).abs().max()) > 100 * export_formats.tolerance(base, wanted)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "checkpoints/base")
    assert settings["task_type"] == "CAUSAL_LM"
    assert settings["target_modules"] == short if short else isinstance(settings["target_modules"], str)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer("fever").input_ids == ours("tiny", None)("fever").input_ids


def test_the_card_has_licence_and_base(tmp_path: Path) -> None:
    config, own = of_folder(tmp_path)
    folder = kept(tmp_path / "kept", config, sha_of(config))
    page = (export(open_model(folder, own=own), "peft", tmp_path / "a", own, base="org/base").folder / "README.md").read_text()
    assert page.startswith(
        '---\nlicense: apache-2.0\nlibrary_name: peft\npipeline_tag: text-generation\nbase_model: "org/base"\n---\n'
    )
    assert "The licence is not stated" not in page
    assert json.loads((tmp_path / "a/adapter_config.json").read_text())["base_model_name_or_path"] == "org/base"
    merged = (export(open_model(folder, own=own), "merged", tmp_path / "b", own).folder / "README.md").read_text()
    assert merged.startswith("---\nlicense: apache-2.0\nlibrary_name: transformers\n")
    card = folder / "README.md"
    card.write_text(card.read_text().replace("license: unknown", "license: cc-by-4.0"))
    stated = (export(open_model(folder, own=own), "peft", tmp_path / "c", own).folder / "README.md").read_text()
    assert stated.startswith("---\nlicense: cc-by-4.0\n")
    card.unlink()  # as a folder that was copied without it
    alone = (export(open_model(folder, own=own), "peft", tmp_path / "d", own).folder / "README.md").read_text()
    assert alone.startswith("---\nlicense: apache-2.0\n")
    assert "AutoPeftModelForCausalLM" in alone


def test_the_command_names_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = changed(small_text(), adapter={"rank": 2})
    folder = kept(tmp_path / "kept", config)
    assert run(monkeypatch, "export-model", folder, "--format", "peft", "-o", tmp_path / "peft") == 0
    assert "--base NAME names it for others" in capsys.readouterr().err
    assert json.loads((tmp_path / "peft/adapter_config.json").read_text())["base_model_name_or_path"] == str(TINY_FOLDER)
    assert run(monkeypatch, "export-model", folder, "--format", "peft", "-o", tmp_path / "b", "--base", "org/tiny") == 0
    assert "--base NAME" not in capsys.readouterr().err
    assert run(monkeypatch, "predict", tmp_path / "b", tmp_path / "none") == 2  # opened before its input is looked for


@pytest.mark.parametrize("kind", ["vision", "sam", "classifier", "mean", "language"])
def test_the_code_of_a_card_runs_as_printed_on_a_base_in_a_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    own = SiteConfig(device="cpu", checkpoints=Path(tmp_path.name))
    if kind in ("vision", "sam"):
        base = make(tmp_path / "base", *(("clip", CLASSIFIERS["clip"]) if kind == "vision" else ("sam", PROMPTABLE["sam"])))
        place = {"variant": "folder", "checkpoint": str(base.folder), "config": base.config, "image_size": SIDE}
        config = changed(CELLS if kind == "vision" else FUNDUS, model={"name": kind, **place}, adapter={"rank": 2})
    elif kind == "language":
        config, _ = of_folder(tmp_path)
    else:
        config = job(save_encoder(tmp_path / "base"), features="pooled" if kind == "classifier" else "mean")
    adapter, here = kept(tmp_path / "kept", config, sha_of(config)), Path(config.model.checkpoint).relative_to(tmp_path)
    named = adapter / "job.yaml"
    named.write_text(named.read_text().replace(str(config.model.checkpoint), f"${{SITE}}/{here}"))
    run_peft_card(open_model(adapter, own=own), tmp_path / "peft", own, monkeypatch)


def test_vllms_rules_for_an_adapter_hold(tmp_path: Path) -> None:
    """Those of vllm/lora/peft_helper.py and lora_model.py: what it refuses or does not read, and the names of tensors."""
    config, own = of_folder(tmp_path, targets="all-linear")
    folder = export(open_model(kept(tmp_path / "kept", config, sha_of(config)), own=own), "peft", tmp_path / "peft", own).folder
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA"
    assert (settings["r"], settings["lora_alpha"]) == (2, 6)
    assert settings["bias"] == "none"
    for refused in (
        "modules_to_save",
        "use_dora",
        "rank_pattern",
        "alpha_pattern",
        "layers_to_transform",
        "trainable_token_indices",
    ):
        assert not settings.get(refused), refused
    assert isinstance(settings["target_modules"], list)
    modules = dict(build_causal_lm("folder", tmp_path / "checkpoints/base").named_modules())
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        layer, factor, end = name.removeprefix("base_model.model.").rsplit(".", 2)
        assert name.startswith("base_model.model.")
        assert (factor, end) in (("lora_A", "weight"), ("lora_B", "weight"))
        assert layer.rpartition(".")[2] in settings["target_modules"]
        base = modules[layer]
        assert tuple(tensor.shape) == ((2, base.in_features) if factor == "lora_A" else (base.out_features, 2))


@pytest.mark.parametrize(
    ("layers", "short"),
    [
        (["a.0.q", "a.1.q"], ["q"]),
        (["a.0.q"], []),  # the second layer's too would be adapted
        (["a.0.q", "a.1.q", "b.k"], ["k", "q"]),
        (["a.0"], []),  # a number is not a name: PEFT would look for it everywhere
        ([], []),
    ],
)
def test_short_names_are_taken_only_where_they_say_the_same(layers: list[str], short: list[str]) -> None:
    assert short_names(layers, ["a", "a.0", "a.0.q", "a.1", "a.1.q", "b", "b.k"]) == short
