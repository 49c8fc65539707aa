"""`consilium export-model`: what it writes for others, and what it says where it writes nothing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from consilium.adapters import adapter_state
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import CheckpointError, ConfigError
from consilium.federation.job_assembly import build_model
from consilium.federation.model_card import Card
from consilium.federation.saved_model import SavedModel, convert_changes_to_parameters, write_adapter_folder
from consilium.models.sam.network import build_sam
from consilium.use import export_formats
from consilium.use.base_model_import import PROVENANCE, licence_of
from consilium.use.export import export
from consilium.use.export_folder import check_destination, write_record
from consilium.use.model import open_model
from tests.conftest import run, small_config, small_text
from tests.use.handing import CELLS, FUNDUS, HERE, changed, loaded, run_peft_card, trained

LORA = changed(FUNDUS, adapter={"rank": 2, "targets": "encoder-qkv", "decoder": "share"})


def kept(folder: Path, config: JobConfig, base_sha256: str = "", **forward: Any) -> Path:
    """Write an adapter folder as a run leaves it; return it."""
    model = trained(config)
    values = adapter_state.values(model)
    card = Card.of(config, "global", 1, base_sha256)
    write_adapter_folder(folder, SavedModel(values, 1, **forward), convert_changes_to_parameters(model, values), config, card)
    return folder


@pytest.mark.parametrize(("dtype", "said"), [("bf16", False), ("nf4", True), ("int8", True)])
def test_a_peft_folder_says_that_its_base_was_quantized(dtype: str, said: bool, tmp_path: Path) -> None:
    """Its card's scores are those of the quantized base, and PEFT alone does not ask for one."""
    found = open_model(kept(tmp_path / "kept", LORA), own=HERE)
    config = found.config.model_copy(update={"model": found.config.model.model_copy(update={"dtype": dtype})})
    page = (export(replace(found, config=config), "peft", tmp_path / "peft", HERE).folder / "README.md").read_text()
    assert (f"bitsandbytes stored the base as {dtype}" in page) == said


def test_peft_alone_loads_the_adapter(tmp_path: Path) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    folder = kept(tmp_path / "kept", LORA)
    found = open_model(folder, own=HERE)
    inputs = export_formats.random_inputs(LORA, None)
    wanted = export_formats.logits_of(found.model, inputs)
    made = export(found, "peft", tmp_path / "peft", HERE)
    assert made.difference is None
    assert {path.name for path in made.folder.iterdir()} == {
        "README.md", "adapter_config.json", "adapter_model.safetensors", "consilium.safetensors", "decoder.safetensors",
        "export.json", "job.yaml",
    }  # fmt: skip
    moved = made.folder.rename(tmp_path / "moved")
    assert torch.equal(export_formats.logits_of(open_model(moved, own=HERE).model, inputs), wanted)
    moved.rename(made.folder)
    base = build_sam("tiny", None, 64, 2)
    assert base.load_state_dict(load_file(made.folder / "decoder.safetensors"), strict=False).unexpected_keys == []
    answered = export_formats.logits_of(PeftModel.from_pretrained(base, str(made.folder)).eval(), inputs)
    assert float((answered - wanted).abs().max()) <= export_formats.tolerance(base, wanted)
    page = (made.folder / "README.md").read_text()
    assert page.startswith("---\nlicense: unknown\n")
    assert "Not a medical device" in page
    assert "`consilium predict` and `evaluate` open this folder too." in page


APART = changed(CELLS, strategy={"name": "fedit"}, adapter={"rank": 2, "targets": "qv"})


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(FUNDUS, id="sam", marks=pytest.mark.slow),  # LORA without the decoder
        pytest.param(LORA, id="decoder"),
        pytest.param(CELLS, id="head"),
        pytest.param(APART, id="qv"),
        pytest.param(small_text(), id="text"),
    ],
)
def test_the_code_of_a_peft_card_runs_as_it_is_printed(
    config: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bases here are tiny ones, which come with the package."""
    run_peft_card(open_model(kept(tmp_path / "kept", config), own=HERE), tmp_path / "peft", HERE, monkeypatch)


def test_the_command_writes_a_merged_model_with_card_and_licence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = kept(tmp_path / "kept", CELLS)
    page = (folder / "README.md").read_text()
    (folder / "README.md").write_text(page.replace("license: unknown", "license: cc-by-4.0"))
    (folder / "LICENSE.txt").write_text("CC BY 4.0")
    assert run(monkeypatch, "export-model", folder, "--format", "merged", "-o", tmp_path / "new" / "a name") == 0
    out = tmp_path / "new" / "a name"
    assert "merged of global" in capsys.readouterr().out
    assert (out / "LICENSE.txt").read_text() == "CC BY 4.0"
    page = (out / "README.md").read_text()
    assert page.startswith("---\nlicense: cc-by-4.0\n")
    assert "in the order of the classes: round, elongated, target, teardrop, spiky." in page
    record = json.loads((out / "export.json").read_text())
    assert (record["format"], record["job"], record["model"]) == ("merged", "small", "global")
    model, inputs = open_model(folder, own=HERE).model, export_formats.random_inputs(CELLS, None)
    wanted = export_formats.logits_of(model, inputs)
    with torch.no_grad():
        found = loaded(page, out, monkeypatch)(**inputs)
    assert float((found - wanted).abs().max()) <= export_formats.tolerance(model, wanted)
    assert list((tmp_path / "new").iterdir()) == [out], "nothing half-written beside it"
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "as the umask says, whoever wrote it"


def test_an_existing_folder_is_never_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    check_destination(folder)
    folder.mkdir()
    check_destination(folder)
    (folder / "thesis.tex").write_text("years of work")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for place in (folder, folder / "thesis.tex", tmp_path / "link"):
        with pytest.raises(ConfigError, match=r"is there already; choose a new folder, or remove this one first$"):
            check_destination(place)


def test_a_folder_that_comes_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = kept(tmp_path / "kept", LORA), tmp_path / "out"

    def come(made: Path, told: dict[str, Any]) -> None:
        out.mkdir()
        (out / "thesis.tex").write_text("years of work")
        write_record(made, told)

    monkeypatch.setattr("consilium.use.export.write_record", come)
    with pytest.raises(ConfigError, match="the export cannot be moved there"):
        export(open_model(folder, own=HERE), "peft", out, HERE)
    assert (out / "thesis.tex").read_text() == "years of work"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["kept", "out"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_failed_export_leaves_no_folder(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = kept(tmp_path / "kept", LORA), tmp_path / "out"

    def full(*args: object) -> None:
        raise error

    monkeypatch.setattr("consilium.use.export.write_record", full)
    with pytest.raises((OSError, CheckpointError), match="No space left"):
        export(open_model(folder, own=HERE), "peft", out, HERE)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["kept"]


def test_nothing_but_checked_tensors_and_own_files_is_handed_on(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = kept(tmp_path / "kept", LORA)
    before = load_file(folder / "adapter_model.safetensors")
    save_file({name: tensor + 1 for name, tensor in before.items()}, folder / "adapter_model.safetensors")
    (tmp_path / "secret").write_text("a key")
    (folder / "LICENSE").symlink_to(tmp_path / "secret")
    (folder / "NOTICES").mkdir()
    (folder / "README.md").write_bytes(b"caf\xe9")
    made = export(open_model(folder, own=HERE), "peft", tmp_path / "out", HERE).folder
    found = load_file(made / "adapter_model.safetensors")
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
    assert not {"LICENSE", "NOTICES"} & {path.name for path in made.iterdir()}
    assert (made / "README.md").read_text(encoding="utf-8").startswith("caf\ufffd")


REFUSED: dict[str, tuple[JobConfig, dict[str, Any], str, str]] = {
    "a blend": (
        small_config("feddpa"),
        {"share": 0.5, "similar": 5},
        "merged",
        "--stage personalized: its local adapter's weight",
    ),
    "two adapters": (small_config("feddpa"), {"share": 0.3}, "peft", "the model is two adapters, 0.7 and 0.3; use merged"),
    "a scaled one": (LORA, {"scaling": 0.5}, "peft", "the adapter is scaled by 0.5, which PEFT does not read; use merged"),
    "bottlenecks for PEFT": (
        small_config("fedsca"),
        {},
        "peft",
        "PEFT does not know adapter.kind 'bottleneck'; use merged, bundle",
    ),
    "bottlenecks to merge": (small_config("fedsca"), {}, "merged", "there is nothing to merge into; use bundle or onnx"),
    "a vector for PEFT": (changed(FUNDUS, strategy="feddbe"), {}, "peft", "has a vector behind its encoder"),
    "a text's graph": (small_text(), {}, "onnx", "a language model generates token by token"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_a_format_cannot_hold_is_refused_in_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, forward, format, why = REFUSED[case]
    folder = kept(tmp_path / "kept", config, **forward)
    monkeypatch.setattr("consilium.use.model.build_model", _never)
    assert run(monkeypatch, "export-model", folder, "--format", format, "-o", tmp_path / "out") == 2
    said = capsys.readouterr().err.strip()
    assert why in said
    assert "\n" not in said
    assert not (tmp_path / "out").exists()


def _never(*args: object) -> None:
    raise AssertionError("it takes minutes to load a large base; refuse before")


def test_two_adapters_of_fixed_shares_merge_into_one(tmp_path: Path) -> None:
    config = small_config({"name": "feddpa", "weighting": "fixed"})
    folder = kept(tmp_path / "kept", config, share=0.3)
    model, inputs = open_model(folder, own=HERE).model, export_formats.random_inputs(config, None)
    wanted = export_formats.logits_of(model, inputs)
    alone = export_formats.logits_of(build_model(config, SiteConfig(device="cpu")), inputs)
    made = export(open_model(folder, own=HERE), "merged", tmp_path / "out", HERE)
    assert made.difference is not None
    assert made.difference <= export_formats.tolerance(model, wanted) < 0.05 * float((alone - wanted).abs().max())


@pytest.mark.parametrize("file", [PROVENANCE, "README.md"])
def test_a_licence_adds_no_fields_to_a_card(file: str, tmp_path: Path) -> None:
    told = "mit\nbase_model: another"
    text = json.dumps({"licence": told}) if file == PROVENANCE else f"---\nlicense: {json.dumps(told)}\n---\n"
    (tmp_path / file).write_text(text)
    assert licence_of(tmp_path) == r"mit\nbase_model: another"
