"""The author of a model folder puts files into it that `transformers` would follow out of it, or take for more than weights."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from consilium.core.errors import CheckpointError
from consilium.models.causal_lm.network import build_causal_lm, load_tokenizer
from tests.models.folders import config_of, save_folder

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(tmp_path / "model")


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def moved(path: Path) -> Path:
    """Move a file out of its folder, and return where it is now."""
    return Path(shutil.move(path, path.parent.parent / f"outside-{path.name}"))


def adapter(folder: Path) -> None:
    """PEFT's own settings: transformers reads the base's place, layers by a pattern of Python, and the weights beside it."""
    write(folder / "adapter_config.json", {"peft_type": "LORA", "target_modules": "(.*.*.*)*X", "base_model_name_or_path": "/"})


def index(folder: Path, to: Callable[[Path], str]) -> None:
    weights = folder / "model.safetensors"
    names = list(load_file(weights))
    write(folder / INDEX, {"metadata": {}, "weight_map": dict.fromkeys(names, to(moved(weights)))})


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def linked(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to(moved(folder / "model.safetensors"))


WEIGHTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "adapter": (adapter, r"adapter_config\.json: belongs to an adapter of PEFT's, which is not a base; merge it into its base"),
    "index above": (lambda f: index(f, lambda at: f"../{at.name}"), r"index\.json: weight_map\.\S+: '\.\./outside-model"),
    "index anywhere": (lambda f: index(f, str), r"index\.json: weight_map\.\S+: '/.* is not a name of a \.safetensors file"),
    "pickle": (pickled, r"'pytorch_model\.bin' may be a pickle, which is not read; convert it once: AutoModelForCausalLM"),
    "link": (linked, r"model\.safetensors: a link to /.*, outside the folder; copy the file into the folder"),
}


@pytest.mark.parametrize("attack", WEIGHTS)
def test_weights_come_from_plain_files_of_the_folder_only(attack: str, folder: Path) -> None:
    config = config_of(folder)
    change, told = WEIGHTS[attack]
    change(folder)
    with pytest.raises(CheckpointError, match=told):
        build_causal_lm("folder", folder, config)


def test_the_way_out_that_a_pickle_s_error_names_works(folder: Path, tmp_path: Path) -> None:
    wanted = load_file(folder / "model.safetensors")
    pickled(folder)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "new")
    assert load_file(tmp_path / "new" / "model.safetensors").keys() == wanted.keys()
    build_causal_lm("folder", tmp_path / "new")


def test_parts_of_weights_and_a_cache_of_hugging_face_load(folder: Path, tmp_path: Path) -> None:
    """A snapshot there is a folder of links to the blobs beside it."""
    wanted = build_causal_lm("folder", folder)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert (folder / INDEX).is_file()
    home = tmp_path / "hub" / "models--org--name"
    blobs, snapshot = home / "blobs", home / "snapshots" / "abc"
    blobs.mkdir(parents=True), snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs", str(number)))
    for where in (folder, snapshot):
        found = build_causal_lm("folder", where).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.state_dict().items())
        assert len(load_tokenizer("folder", where)) == 512
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: a link to /.*, outside the folder"):
        load_tokenizer("folder", snapshot)


SECRET = "Doe^John born 1961-02-03"


def settings(folder: Path, **more: Any) -> None:
    path = folder / "tokenizer_config.json"
    write(path, json.loads(path.read_text()) | more)


@pytest.mark.parametrize("keys", [("vocab", "merges"), ("vocab_file", "merges_file"), ("tokenizer_file",), ("init_inputs",)])
@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "BertTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("own", [True, False])
def test_settings_of_a_tokenizer_open_no_file(
    keys: tuple[str, ...], kind: str, own: bool, folder: Path, tmp_path: Path
) -> None:
    """Claim: no text of another file becomes a token, whether the folder has a tokenizer of its own or not."""
    secret = tmp_path / "patients.json"
    write(secret, {SECRET: 0, "</s>": 1})
    settings(folder, tokenizer_class=kind, **{key: [str(secret)] if key == "init_inputs" else str(secret) for key in keys})
    if own:
        assert SECRET not in load_tokenizer("folder", folder).get_vocab()
        return
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer to read \(no tokenizer\.json\)"):
        load_tokenizer("folder", folder)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja", "vocab.json"]
)
def test_a_file_of_the_tokenizer_is_no_link_out_of_the_folder(name: str, folder: Path) -> None:
    (folder / name).touch()
    (folder / name).symlink_to(moved(folder / name))
    with pytest.raises(CheckpointError, match=rf"{name}: a link to /.*, outside the folder; copy the file"):
        load_tokenizer("folder", folder)


def test_a_pipe_in_the_place_of_a_file_is_not_opened(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no plain file"):
        load_tokenizer("folder", folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer_class", "pipeline"),
        ("tokenizer_class", "os.path"),
        ("eos_token", ["</s>"]),
        ("pad_token", {"content": "</s>", "vocab_file": "/etc/passwd"}),
        ("added_tokens_decoder", {"0": "x"}),
        ("padding_side", "/etc/passwd"),
        ("model_max_length", "/etc/passwd"),
        ("chat_template", {"default": ["/etc/passwd"]}),
        ("extra_special_tokens", {"/etc/passwd": 1}),
        ("add_bos_token", "/etc/passwd"),
    ],
)
def test_a_setting_of_another_form_is_named(key: str, value: object, folder: Path) -> None:
    settings(folder, **{key: value})
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: {key}: .* is not a value of this key; use the file"):
        load_tokenizer("folder", folder)


def test_a_key_that_is_there_twice_is_refused(folder: Path) -> None:
    """Two readers may take two values: what was looked at would not be what is used."""
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"normalizer"', '"normalizer": {"type": "Evil"}, "normalizer"', 1))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not valid JSON \(a key is there twice: 'normalizer'"):
        load_tokenizer("folder", folder)


def test_nothing_of_the_view_outlives_the_load(folder: Path, tmp_path: Path) -> None:
    """Claim: what is exported names the folder, or nothing, and no file of the machine that has loaded it."""
    model, tokenizer = build_causal_lm("folder", folder), load_tokenizer("folder", folder)
    assert (model.name_or_path, tokenizer.name_or_path) == (str(folder), str(folder))
    model.save_pretrained(tmp_path / "out"), tokenizer.save_pretrained(tmp_path / "out")
    assert not [path for path in (tmp_path / "out").iterdir() if b"consilium-model-" in path.read_bytes()]
