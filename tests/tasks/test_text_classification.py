"""Reports by classes: text encoders of several architectures learn, keep records apart, and are what others open."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedTokenizerFast

from consilium.config.job import JobConfig, load_job
from consilium.config.site import SiteConfig
from consilium.core.errors import CheckpointError, ConfigError, ConsiliumError, DataError
from consilium.core.storage import checkpoint_hash
from consilium.data.datalist import Loading
from consilium.estimates.compute import flops_per_sample, memory_of
from consilium.federation.job_assembly import assemble_job, build_model, build_task
from consilium.runtime.engine import simulate
from consilium.tasks.registry import TASKS
from consilium.use import export_formats
from consilium.use.base_model_import import import_model
from consilium.use.export import export
from consilium.use.model import open_model
from tests.conftest import run, small_text
from tests.use.test_export import kept

WORDS = ("fluid", "clear", "opacity", "left", "right", "film", "the", "is")
CLASSES = ["effusion", "normal", "pneumonia"]
SIZES = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": SIZES | {"max_position_embeddings": 40},
    "roberta": SIZES | {"max_position_embeddings": 42, "pad_token_id": 1},
    "electra": SIZES | {"max_position_embeddings": 40, "embedding_size": 16},
    "distilbert": {"vocab_size": 16, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 40},
}


def save_encoder(folder: Path, kind: str = "bert", head: bool = False) -> Path:
    """Write a random encoder as `transformers` does, with `head` as it was pretrained; a tokenizer of WORDS beside it."""
    torch.manual_seed(0)
    made = (AutoModelForMaskedLM if head else AutoModel).from_config(AutoConfig.for_model(kind, **ENCODERS[kind]))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    made.save_pretrained(folder)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    words = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(folder)
    return folder


def reports(folder: Path, key: str = "text", count: int = 12) -> Path:
    """Write reports whose first word tells the class, two of a patient."""
    folder.mkdir(parents=True)
    for split, more in (("training", count), ("validation", 3), ("test", 6)):
        said = ((WORDS[i % 3], CLASSES[(0, 1, 2)[i % 3]], i) for i in range(more))
        lines = [
            {
                key: f"{word} {'the film is left ' * (i % 3)}",
                "label" if key == "text" else "output": name,
                "patient": f"p{i // 2}",
            }
            for word, name, i in said
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def job(folder: Path, strategy: str = "fedit", privacy: Any = None, **model: Any) -> JobConfig:
    raw = small_text(strategy, rounds=1, local_steps=2, batch_size=4).model_dump()
    config = json.loads((folder / "config.json").read_text())
    named = {"name": "text_encoder", "variant": "folder", "checkpoint": str(folder), "config": config, "max_length": 24}
    task = {"name": "classification", "classes": ["effusion", "normal", "pneumonia"]}
    return JobConfig.model_validate(raw | {"model": named | model, "task": task, "data": {}, "privacy": privacy})


def quiet(event: Mapping[str, Any]) -> None:
    """See nothing."""


@pytest.mark.parametrize(
    ("kind", "features"), [("bert", "pooled"), *((kind, "mean") for kind in ENCODERS), ("roberta", "first")]
)
def test_logits_are_the_heads_on_what_transformers_says(kind: str, features: str, tmp_path: Path) -> None:
    """Also in a batch with a longer text: padding changes nothing."""
    config = job(save_encoder(tmp_path / "base", kind), features=features)
    model: Any = build_model(config, SiteConfig())
    torch.nn.init.normal_(model.head.weight)
    plain = AutoModel.from_pretrained(tmp_path / "base").eval()
    short, long = torch.tensor([[2, 5, 3]]), torch.tensor([[2, 6, 8, 11, 12, 10, 3]])
    batch = torch.cat([torch.nn.functional.pad(short, (0, 4), value=-1), long])
    with torch.no_grad():
        for row, ids in zip(model(batch), (short, long), strict=True):
            states = plain(input_ids=ids)
            wanted = {"mean": states.last_hidden_state.mean(1), "first": states.last_hidden_state[:, 0]}
            feature = wanted.get(features, states.get("pooler_output"))
            torch.testing.assert_close(row, (feature @ model.head.weight.T)[0], rtol=1e-4, atol=1e-5)


def test_a_pretrained_checkpoint_serves_without_its_own_head(tmp_path: Path) -> None:
    """Masked language models, as BERT and RoBERTa are published, have a head and may have no pooler."""
    for kind in ("bert", "roberta", "distilbert"):
        base = save_encoder(tmp_path / kind, kind, head=True)
        model: Any = build_model(job(base, features="mean"), SiteConfig())
        assert all(torch.isfinite(one).all() for one in model.parameters())
        again: dict[str, Any] = build_model(job(base, features="mean"), SiteConfig()).state_dict()
        assert [n for n, one in model.state_dict().items() if "lora_" not in n and not torch.equal(one, again[n])] == []
    with pytest.raises(CheckpointError, match=r"pooler\.dense\.\w+ is missing; use model\.features: mean"):
        build_model(job(tmp_path / "bert"), SiteConfig())
    with pytest.raises(ConfigError, match=r"model\.features: 'pooled': .*'distilbert' pools nothing itself; use mean or first"):
        assemble_job(job(tmp_path / "distilbert"))


RECORD = {"unit": "record", "epsilon": 8.0, "delta": 1e-3, "clip": 1.0}


@pytest.mark.parametrize(
    ("strategy", "privacy"),
    [
        ("fedit", None),
        pytest.param("fedhera", None, marks=pytest.mark.slow),
        pytest.param("scaffold", None, marks=pytest.mark.slow),
        ("fedit", RECORD),
        pytest.param("fedit", RECORD | {"unit": "patient"}, marks=pytest.mark.slow),
        ("fedit", {"unit": "site", "epsilon": 20.0, "delta": 1e-2, "clip": 1.0}),
    ],
)
def test_runs_with_strategies_and_privacy_of_every_unit(strategy: str, privacy: Any, tmp_path: Path) -> None:
    base = save_encoder(tmp_path / "base")
    sites = {name: SiteConfig(datalist=reports(tmp_path / name)) for name in ("a", "b")}
    simulate(assemble_job(job(base, strategy, privacy)), sites, tmp_path / "run", quiet)
    results = json.loads((tmp_path / "run/results.json").read_text())
    if privacy is None:
        assert results["a"].keys() >= {"test/global/accuracy", "test/global/f1"}
    assert (tmp_path / "run/sites/a/adapters/global/adapter_model.safetensors").is_file()


def test_per_record_gradients_are_those_of_records_alone(tmp_path: Path) -> None:
    """A batch's loss is the mean of its records', each alone: nothing of one text is in another's logits."""
    config = job(save_encoder(tmp_path / "base"))
    own = SiteConfig(datalist=reports(tmp_path / "a"))
    model, task = build_model(config, own), build_task(config, TASKS["classification"].read(own.datalist), own)  # type: ignore[arg-type]
    torch.nn.init.normal_(model.get_submodule("head").weight)  # type: ignore[arg-type]
    alone = [float(task.loss(model, task.batch([i], 0))) for i in range(6)]
    assert float(task.loss(model, task.batch(range(6), 0))) == pytest.approx(sum(alone) / 6, rel=1e-5)


def test_the_exported_folders_open_with_transformers_and_peft_alone(tmp_path: Path) -> None:
    from peft import AutoPeftModelForSequenceClassification

    config, own = job(save_encoder(tmp_path / "base")), SiteConfig(device="cpu")
    adapter = kept(tmp_path / "kept", config, checkpoint_hash(tmp_path / "base"))
    found = open_model(adapter, own=own)
    ids = torch.tensor([[2, 5, 8, 3], [2, 6, 11, 3]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    wanted = export_formats.logits_of(found.model, inputs)
    assert float(wanted.std()) > 0.01
    folder = export(found, "peft", tmp_path / "peft", own).folder
    opened = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=3).eval()
    torch.testing.assert_close(opened(**inputs).logits.detach(), wanted, rtol=1e-4, atol=1e-5)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["classifier"])
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")
    assert settings["target_modules"] == ["key", "query", "value"]
    page = (folder / "README.md").read_text()
    assert "pipeline_tag: text-classification" in page
    assert "head.safetensors" not in page
    for part in ("the order of the classes: effusion, normal, pneumonia.", "cut at their end, to 24 tokens"):
        assert part in page
    merged = export(open_model(adapter, own=own), "merged", tmp_path / "merged", own).folder
    code = (merged / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    named: dict[str, Any] = {}
    exec(code.replace('"."', repr(str(merged))).replace('"head.safetensors"', repr(str(merged / "head.safetensors"))), named)
    torch.testing.assert_close(named["logits"](**inputs), wanted, rtol=1e-4, atol=1e-5)


def test_import_of_an_encoder_names_the_model_section_that_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = save_encoder(Path("a base, 'one': {x}"), head=True)
    with pytest.raises(ConfigError, match=r"SOURCE: .*'bert' is a text encoder, which needs no import") as found:
        import_model(base, tmp_path / "made")
    section = yaml.safe_load(str(found.value).partition("job.yaml: ")[2])["model"] | {"features": "mean", "max_length": 24}
    whole = {"name": "types", "strategy": {"name": "fedit"}, "model": section, "training": {"rounds": 1, "local_steps": 1}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(whole | {"task": {"name": "classification", "classes": CLASSES}}))
    assert build_model(load_job(tmp_path / "job.yaml", author=True), SiteConfig(checkpoints=tmp_path)) is not None


def test_a_model_on_the_mean_keeps_its_head_in_a_file(tmp_path: Path) -> None:
    import peft
    from safetensors.torch import load_file

    config, own = job(save_encoder(tmp_path / "base"), features="mean"), SiteConfig(device="cpu")
    found = open_model(kept(tmp_path / "kept", config, checkpoint_hash(tmp_path / "base")), own=own)
    ids = torch.tensor([[2, 5, 8, 3]])
    wanted = export_formats.logits_of(found.model, {"input_ids": ids})
    folder = export(found, "peft", tmp_path / "peft", own).folder
    assert json.loads((folder / "adapter_config.json").read_text())["task_type"] == "FEATURE_EXTRACTION"
    base, head = AutoModel.from_pretrained(tmp_path / "base"), load_file(folder / "head.safetensors")
    states = peft.PeftModel.from_pretrained(base, folder).eval()(input_ids=ids).last_hidden_state.mean(1)
    torch.testing.assert_close((states @ head["weight"].T + head["bias"]).detach(), wanted, rtol=1e-4, atol=1e-5)


def test_predict_writes_a_class_and_probabilities_for_each_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = job(save_encoder(tmp_path / "base"))
    adapter = kept(tmp_path / "kept", config, checkpoint_hash(tmp_path / "base"))
    (tmp_path / "new.jsonl").write_text('{"text": "fluid left"}\n{"text": "clear", "label": "unknown"}\n{"nothing": 1}\n')
    assert run(monkeypatch, "predict", adapter, tmp_path / "new.jsonl", "--out", tmp_path / "said") in (0, 1, 3)
    lines = [json.loads(line) for line in (tmp_path / "said/new.jsonl").read_text().splitlines()]
    assert [line["record"] for line in lines] == ["new.jsonl:1", "new.jsonl:2"]
    for line in lines:
        assert line["class"] == max(line["probabilities"], key=line["probabilities"].get)
        assert sum(line["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    assert "new.jsonl:3" in capsys.readouterr().err
    before = [(tmp_path / name).read_bytes() for name in ("new.jsonl", "said/new.jsonl")]
    for out, why in ((tmp_path, "is an input, which is never replaced"), (tmp_path / "said", "is there already")):
        assert run(monkeypatch, "predict", adapter, tmp_path / "new.jsonl", "--out", out) == 2
        assert why in capsys.readouterr().err.replace("\n", " ")
    assert [(tmp_path / name).read_bytes() for name in ("new.jsonl", "said/new.jsonl")] == before


def test_a_text_that_the_tokenizer_cannot_read_is_named_and_the_others_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tokenizer has no token for unknown words. A blank in its place would get a class."""
    base = save_encoder(tmp_path / "base")
    raw = json.loads((base / "tokenizer.json").read_text())
    raw["model"]["unk_token"] = "[NONE]"
    (base / "tokenizer.json").write_text(json.dumps(raw))
    adapter = kept(tmp_path / "kept", job(base), checkpoint_hash(base))
    (tmp_path / "new.jsonl").write_text('{"text": "fluid"}\n{"text": "fracture"}\n{"text": "clear"}\n')
    assert run(monkeypatch, "predict", adapter, tmp_path / "new.jsonl", "--out", tmp_path / "said") == 1
    assert "new.jsonl:2: model.checkpoint: its tokenizer fails for a text" in capsys.readouterr().err.replace("\n", " ")
    lines = [json.loads(line) for line in (tmp_path / "said/new.jsonl").read_text().splitlines()]
    assert [line["record"] for line in lines] == ["new.jsonl:1", "new.jsonl:3"]
    folder = reports(tmp_path / "a")
    (folder / "test.jsonl").write_text('{"text": "fracture", "label": "normal"}\n{"text": "clear", "label": "normal"}\n')
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job(base).model_dump()))
    assert run(monkeypatch, "data", "check", folder, "--job", tmp_path / "job.yaml") == 1
    said = capsys.readouterr().out
    assert "1 x refused by the job" in said
    assert "test.jsonl:1: model.checkpoint: its tokenizer fails for a text" in said


def test_what_does_not_fit_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = save_encoder(tmp_path / "base")
    config, read = job(base), TASKS["classification"].read
    folder = reports(tmp_path / "a")
    (folder / "training.jsonl").write_text('{"text": "fluid", "label": "fracture"}\n')
    with pytest.raises(ConsiliumError, match=r"jsonl:1: label 'fracture' is not a class of the task; task\.classes has"):
        build_task(config, read(folder), SiteConfig())
    (folder / "training.jsonl").write_text('{"text": "fluid", "label": 3}\n')
    with pytest.raises(ConsiliumError, match=r"training\.jsonl:1: label 3 is outside 0\.\.2"):
        build_task(config, read(folder), SiteConfig())
    (folder / "training.jsonl").write_text(
        '{"text": "fluid", "label": 2}\n{"text": "' + "left " * 40 + '", "label": "normal"}\n'
    )
    task: Any = build_task(config, read(folder), SiteConfig())
    assert task.batch([0, 1], 0)["label"].tolist() == [2, 1]
    ids = task.batch([0, 1], 0)["text"]
    assert ids.shape == (2, 24)
    assert (ids[1, 0], ids[1, -1], ids[0, 3]) == (2, 3, -1)
    assert "1 texts lost their end: they are longer than model.max_length 24 tokens" in caplog.text
    (folder / "training.jsonl").write_text('{"text": "[SEP] fluid", "label": 0}\n')
    assert build_task(config, read(folder), SiteConfig()).batch([0], 0)["text"][0].tolist().count(3) == 1  # its own words
    (folder / "training.jsonl").write_text('{"text": "fluid"}\n')
    with pytest.raises(DataError, match=r'training\.jsonl:1: needs a "label"; write the answer there'):
        read(folder)
    (tmp_path / "d.json").write_text(json.dumps({"training": [{"image": str(tmp_path / "d.json"), "label": 0}]}))
    with pytest.raises(DataError, match=r"holds pictures, which model\.name 'text_encoder' does not read; give a folder with"):
        build_task(config, read(tmp_path / "d.json"), SiteConfig())
    with pytest.raises(ConfigError, match=r"model\.config\.is_decoder: true: 'bert' is not an encoder alone"):
        assemble_job(job(base, config=json.loads((base / "config.json").read_text()) | {"is_decoder": True}))
    with pytest.raises(ConfigError, match=r"model_type 'llama' is not a text encoder; known are bert"):
        assemble_job(job(base, config={"model_type": "llama"}))
    with pytest.raises(ConfigError, match=r"model\.max_length: 64: this folder's model has 40 positions; use 40 at most"):
        assemble_job(job(base, max_length=64))


@pytest.mark.parametrize("features", ["pooled", "mean"])
def test_costs_are_counted_on_a_model_that_is_only_laid_out(features: str, tmp_path: Path) -> None:
    """By hand, of L layers of width D and F between, T tokens: 2 T (4 D^2 + 2 D F) with weights, 4 T^2 D beside."""
    laid = assemble_job(job(save_encoder(tmp_path / "base"), features=features))
    layers, width, between, tokens = 2, 16, 24, 24
    products = layers * (2 * tokens * (4 * width**2 + 2 * width * between) + 4 * tokens**2 * width)
    assert products < flops_per_sample(laid).scoring < 1.3 * products
    assert memory_of(laid).peak > 4 * 16 * 16


def test_settings_of_pictures_are_refused_and_the_check_names_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_encoder(tmp_path / "base")
    raw = job(base).model_dump()
    with pytest.raises(
        ValidationError, match=r"task\.crop: 64 is for pictures, and model\.name 'text_encoder' reads texts; leave"
    ):
        JobConfig.model_validate(raw | {"task": raw["task"] | {"crop": 64}})
    folder = reports(tmp_path / "a")
    (folder / "test.jsonl").write_text('{"text": "new", "label": "fracture"}\n')
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(raw))
    assert run(monkeypatch, "data", "check", folder, "--job", tmp_path / "job.yaml") == 1
    said = capsys.readouterr().out
    assert "1 x no class of the job" in said
    assert "test.jsonl:1: label 'fracture' is not a class of the task" in said
    assert "class effusion: 4 training, 1 validation" in said


@pytest.mark.parametrize("features", ["pooled", "mean", "first"])
def test_a_text_without_a_token_has_a_finite_loss(features: str, tmp_path: Path) -> None:
    """Of a tokenizer that puts nothing around a text."""
    base = save_encoder(tmp_path / "base")
    raw = json.loads((base / "tokenizer.json").read_text())
    (base / "tokenizer.json").write_text(json.dumps(raw | {"post_processor": None}))
    folder = reports(tmp_path / "a")
    (folder / "training.jsonl").write_text('{"text": "   ", "label": 0}\n{"text": "fluid left", "label": 1}\n')
    config, own = job(base, features=features), SiteConfig()
    task = build_task(config, TASKS["classification"].read(folder), own)
    model = build_model(config, own)
    torch.nn.init.normal_(model.get_submodule("head").weight)  # type: ignore[arg-type]
    for rows in ([0], [0, 1]):
        assert torch.isfinite(task.loss(model, task.batch(rows, 0)))


def test_a_text_without_a_class_of_the_job_is_neither_learned_nor_scored(tmp_path: Path) -> None:
    """In a job with privacy an error would reveal that a site has such a text."""
    config, folder = job(save_encoder(tmp_path / "base"), features="mean"), reports(tmp_path / "data")
    lines = {split: (folder / f"{split}.jsonl").read_text().splitlines() for split in ("training", "test")}
    for split, (first, second, *rest) in lines.items():
        changed = json.dumps(json.loads(second) | {"label": "unknown"})
        (folder / f"{split}.jsonl").write_text("\n".join([first, changed, *rest]) + "\n")
    model: Any = build_model(config, SiteConfig())
    torch.nn.init.normal_(model.head.weight)
    data = replace(TASKS["classification"].read(folder), loading=Loading(ignore_unfit=True))
    task = build_task(config, data)
    assert task.batch(range(4), 0)["label"].tolist() == [0, 2, 0]
    assert task.batch([1], 0) == {}
    found = task.evaluate(model, "test", 4, full=True)
    assert found["n"] == 5
    assert sum(value for name, value in found.items() if name.startswith("confusion/")) == 5


def test_the_table_names_texts_too(tmp_path: Path) -> None:
    config = job(save_encoder(tmp_path / "base"))
    assert TASKS["classification"].scores(config.task).remark == ", per image or text"


def test_an_empty_text_is_named(tmp_path: Path) -> None:
    folder = reports(tmp_path / "a")
    for empty in ('""', "null"):
        (folder / "training.jsonl").write_text(f'{{"text": {empty}, "label": 0}}\n')
        with pytest.raises(DataError, match=r"training\.jsonl:1: text: an empty text; write its words"):
            TASKS["classification"].read(folder)
