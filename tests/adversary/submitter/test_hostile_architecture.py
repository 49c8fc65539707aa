"""A submitter writes a model's config.json so that `transformers` fetches code or weights, opens a file or imports a module."""

import copy
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig

from consilium.core.errors import ConfigError
from consilium.models.causal_lm import CausalLmConfig
from consilium.models.meta_device import build_on_meta_device
from consilium.models.registry import MODELS
from consilium.models.sam import SamConfig
from consilium.models.text_encoder import TextEncoderConfig
from consilium.models.vision import VisionConfig
from consilium.tasks.classification import ClassificationConfig
from consilium.tasks.segmentation import SegmentationConfig
from tests.models.classes import CLASSIFIERS, PROMPTABLE, SIDE, SPEAKING

TEXT = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
    "head_dim": 16, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MORE = ("mixtral", "gemma3_text", "gpt2", "gpt_neox", "falcon", "qwen3_moe", "phi3")
SPOKEN = {kind: TEXT for kind in (*CausalLmConfig.apart, *MORE)}
SPOKEN["falcon"] = {key: size for key, size in TEXT.items() if key != "head_dim"}  # it works its own out
READING = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SMALL = {"distilbert": {"vocab_size": 64, "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 48}}
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: ("causal_lm", sizes) for kind, sizes in SPOKEN.items()},
    **{kind: ("vision", sizes) for kind, sizes in CLASSIFIERS.items()},
    **{kind: ("sam", sizes) for kind, sizes in PROMPTABLE.items()},
    **{kind: ("vision_language", sizes) for kind, sizes in SPEAKING.items()},
    **{kind: ("text_encoder", SMALL.get(kind, READING)) for kind in TextEncoderConfig.apart},
}
OWN: dict[str, dict[str, Any]] = {
    "sam": {"variant": "tiny", "image_size": 64},
    "clip": {"variant": "tiny", "image_size": 64},
    "causal_lm": {"variant": "tiny"},
    "unet": {"variant": "unet", "image_size": 64, "width": 1},
}
REPOSITORY, WORD = "evil-org/evil-code", "evilmodule"
VALUES: list[Any] = [
    REPOSITORY,
    f"{REPOSITORY}@v1:forward",
    "https://evil.example/code.py",
    "../../../../etc/passwd",
    WORD,
    {"": REPOSITORY},
    {"model_type": "timm_backbone", "backbone": f"hf-hub:{REPOSITORY}", "use_pretrained_backbone": True},
    {"quant_method": WORD, "auto_map": {"AutoConfig": f"{REPOSITORY}--evil.Config"}},
    [REPOSITORY],
    [{"": REPOSITORY}],
]
ADDED: dict[str, Any] = {
    "attn_implementation": {"": REPOSITORY},
    "_attn_implementation": REPOSITORY,
    "_attn_implementation_internal": REPOSITORY,
    "experts_implementation": {"": REPOSITORY},
    "auto_map": {"AutoConfig": f"{REPOSITORY}--evil.Config", "AutoModel": f"{REPOSITORY}--evil.Model"},
    "trust_remote_code": True,
    "use_kernels": True,
    "kernel_config": {"kernel_mapping": {"RMSNorm": f"{REPOSITORY}:RMSNorm"}},
    "quantization_config": {"quant_method": "gptq", "modules": [REPOSITORY]},
    "name_or_path": REPOSITORY,
    "_name_or_path": REPOSITORY,
    "pretrained_model_name_or_path": REPOSITORY,
    "backbone": REPOSITORY,
    "use_pretrained_backbone": True,
    "backbone_config": {"model_type": "timm_backbone", "backbone": f"hf-hub:{REPOSITORY}"},
    "attribute_map": {"hidden_act": "_attn_implementation"},
    "base_model_tp_plan": {"layers": REPOSITORY},
    "per_layer_config": {"0": {"attn_implementation": {"": REPOSITORY}}},
    "dtype": "hub",
    "torch_dtype": "load",
    "transformers_weights": "../../../../etc/passwd",
    "__class__": REPOSITORY,
    "id2label": {"0": REPOSITORY},
    "evil/key": 1,
}
LOADERS = (
    ("transformers.integrations.hub_kernels", "load_and_register_attn_kernel"),
    ("transformers.integrations.hub_kernels", "get_kernel"),
    ("transformers.dynamic_module_utils", "get_class_from_dynamic_module"),
    ("transformers.dynamic_module_utils", "get_cached_module_file"),
    ("transformers.utils.hub", "cached_files"),
    ("huggingface_hub.file_download", "hf_hub_download"),
)
LIBRARIES = tuple(
    str(Path(one).resolve()) for one in (sys.prefix, sys.base_prefix, torch.__path__[0], "custom", "/proc", "/sys")
)
seen: list[str] | None = None
"""What the process did since `watched` began, None outside of it; audit hooks cannot be removed."""


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if seen is None:
        return
    if event.startswith(("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn")):
        seen.append(f"{event} {arguments!r:.100}")
    elif event == "open" and isinstance(arguments[0], str | bytes):
        path = arguments[0] if isinstance(arguments[0], str) else arguments[0].decode()
        if not str(Path(path).resolve()).startswith(LIBRARIES):
            seen.append(f"open {path}")
    elif event == "import" and WORD in str(arguments[0]):
        seen.append(f"import {arguments[0]}")


sys.addaudithook(_hear)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Collect connections, processes, files opened outside of the installed libraries, and calls of the hub's loaders."""
    global seen
    with pytest.MonkeyPatch.context() as patch:
        for module, name in LOADERS:
            __import__(module)

            def called(*args: Any, own: str = name, **kwargs: Any) -> Any:
                if seen is not None:
                    seen.append(f"{own} {args!r:.100}")
                raise OSError("no hub")

            patch.setattr(sys.modules[module], name, called)
        seen = found = list[str]()
        try:
            yield found
        finally:
            seen = None


def full(kind: str) -> dict[str, Any]:
    """Return what `transformers` writes of a small model of a class, with all defaults: a leaf for every field but labels."""
    shape = AutoConfig.for_model(kind, **FOLDERS[kind][1])
    return json.loads(shape.to_json_string(use_diff=False), object_hook=without_labels)


def without_labels(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in ("id2label", "label2id")}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of everything in a config.json: every leaf, every map and every list, but not the whole."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed(config: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    found = copy.deepcopy(config)
    place: Any = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return found


def attacks(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield config.json files with a hostile value in the place of each leaf, and with hostile keys in each map."""
    for path in places(config):
        for value in VALUES:
            yield f"{path}: {value!r}", changed(config, path, value)
    maps = [(), *(path for path in places(config) if isinstance(_at(config, path), dict))]
    for path in maps:
        for key, value in ADDED.items():
            yield f"{(*path, key)}: {value!r}", changed(config, (*path, key), value)


def _at(config: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        config = config[key]
    return config


def given(name: str, config: dict[str, Any]) -> dict[str, Any]:
    section = {"name": name, "variant": "folder", "checkpoint": "x", "config": config}
    side = {} if name in ("causal_lm", "text_encoder") else {"image_size": SIDE}
    more = {"max_length": 32} if name in ("causal_lm", "vision_language", "text_encoder") else {}
    pools = {"features": "mean"} if name == "text_encoder" else {}  # what all of them have: distilbert and electra pool nothing
    return section | side | more | pools


def lay_out(name: str, section: dict[str, Any]) -> None:
    """Do what a server does with a model of a job: read its section and lay the model out. Raises what it raises."""
    kind = MODELS[name]
    task: Any = ClassificationConfig(name="classification", classes=["a", "b"])
    if name in ("sam", "unet"):
        task = SegmentationConfig(name="segmentation", classes=["a"])
    with build_on_meta_device():
        kind.build(kind.config.model_validate(section), task, None, False, use_checkpointing=False)


def require_harmless(what: str, name: str, section: dict[str, Any]) -> bool:
    """Fail unless the section is refused in clear lines or harmless; return whether it was refused."""
    lines = list[str]()
    with watched() as found:
        try:
            lay_out(name, section)
        except ConfigError as error:
            lines = [str(error)]
        except ValidationError as error:  # `validate` makes a line of each, as for every section
            lines = [f"model.{one['msg']}" for one in error.errors()]
    assert all("\n" not in line and line.startswith("model.") for line in lines), (what, lines)
    assert found == [], (what, lines)
    return bool(lines)


QUICK = ("llama", "clip", "bert")
SAMPLED = [pytest.param(kind, False, marks=() if kind in QUICK else pytest.mark.slow) for kind in FOLDERS]
WHOLE = [pytest.param(kind, True, marks=pytest.mark.long) for kind in FOLDERS]


@pytest.mark.parametrize(("kind", "whole"), SAMPLED + WHOLE)
def test_a_hostile_value_at_any_leaf_is_refused_or_harmless(kind: str, whole: bool) -> None:
    """Every 7th value, and keys beside the model's own: three classes by default, all in the slow suite. All values: long."""
    name, config = FOLDERS[kind][0], full(kind)
    lay_out(name, given(name, config))  # as it is, it is taken
    every = list(attacks(config))
    beside = [(key, config | {key: value}) for key, value in ADDED.items()]
    chosen = every if whole else every[len(kind) % 7 :: 7] + beside
    refused = sum(require_harmless(what, name, given(name, one)) for what, one in chosen)
    assert refused > len(chosen) / 2


@pytest.mark.parametrize("kind", ["llama", "clip", "sam", "qwen2_vl"])
@pytest.mark.parametrize(
    "value", [{"": REPOSITORY}, REPOSITORY, [REPOSITORY], {"text_config": REPOSITORY}, "flash_attention_2", WORD]
)
def test_attention_is_code_of_transformers_itself(kind: str, value: Any) -> None:
    name, sizes = FOLDERS[kind]
    config = {"model_type": kind, **sizes}
    for section in (config | {"attn_implementation": value}, config | {"experts_implementation": value}):
        with watched() as found, pytest.raises((ConfigError, ValidationError), match=r"(attn|experts)_implementation"):
            lay_out(name, given(name, section))
        assert found == []


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_plain_attention_may_be_named(attention: str) -> None:
    lay_out("causal_lm", given("causal_lm", {"model_type": "llama", **TEXT, "attn_implementation": attention}))


@pytest.mark.parametrize("kind", [VisionConfig, SamConfig, CausalLmConfig, TextEncoderConfig])
def test_every_architecture_that_may_be_private_is_attacked(kind: Any) -> None:
    assert set(kind.apart) <= FOLDERS.keys()


@pytest.mark.parametrize("name", OWN)
def test_a_model_with_an_architecture_of_its_own_takes_none_of_a_job(name: str) -> None:
    """Its section has plain fields alone. A checkpoint is a path at the site, which a layout does not open."""
    section = {"name": name, **OWN[name]}
    lay_out(name, section)
    fields = MODELS[name].config.model_validate(section).model_dump()
    for field in (*fields, "config"):
        for value in VALUES:
            if field != "name":
                require_harmless(f"{field}: {value!r}", name, section | {field: value})
    with pytest.raises(ValidationError):
        lay_out(name, section | {"config": {"model_type": "llama"}})


def test_the_watch_sees_what_it_is_for(tmp_path: Path) -> None:
    """Files, connections, loaders: each is reported, so that an empty report means something."""
    import socket

    from transformers.utils import hub

    (tmp_path / "file").write_text("")
    with watched() as found:
        (tmp_path / "file").read_text()
        with pytest.raises(OSError, match="no hub"):
            hub.cached_files(REPOSITORY, ["config.json"])
        with socket.socket() as plug:
            plug.settimeout(0.01)
            plug.connect_ex(("127.0.0.1", 9))
        with pytest.raises(ImportError):
            __import__(WORD)
    assert {word.split()[0] for word in found} >= {"open", "cached_files", "socket.connect", "import"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "silu"),
        ("dtype", "bfloat16"),
        ("torch_dtype", "float16"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ],
)
def test_words_that_published_folders_have_are_taken(key: str, value: Any) -> None:
    lay_out("causal_lm", given("causal_lm", {"model_type": "llama", **TEXT, key: value}))


def test_notes_of_a_published_folder_are_left_out() -> None:
    """As older files have them: a folder's origin, classes of its publisher, settings of pipelines, keys of generation."""
    notes = {
        "_name_or_path": "meta-llama/Llama-2-7b-hf", "transformers_version": "4.31.0.dev0", "auto_map": {"AutoModel": "a--b.C"},
        "task_specific_params": {"text-generation": {"do_sample": True}}, "id2label": {"0": "no finding, at all"}, "top_k": 50,
        "_attn_implementation_autoset": True, "pruned_heads": {}, "torchscript": False, "bad_words_ids": None, "prefix": "</s>",
    }  # fmt: skip
    lay_out("causal_lm", given("causal_lm", {"model_type": "llama", **TEXT, **notes}))
