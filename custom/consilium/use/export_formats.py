"""The formats in which a model is exported: merged weights, ONNX graphs and MONAI bundles, and checks of their logits."""

import json
import logging
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined
from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.adapters.strategy_modules import merge_shift
from consilium.config.job import JobConfig
from consilium.core.errors import CheckpointError, ConfigError, raise_first
from consilium.core.sanitize import shown
from consilium.core.storage import PUBLIC, write_atomic
from consilium.federation.model_card import Card
from consilium.models.registry import MODELS, Graph
from consilium.models.weight_files import WEIGHTS, save_weights
from consilium.tasks.segmentation import prompt_kind_of

ENVIRONMENT = Environment(trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
"""Templates of pages in Markdown."""
ENVIRONMENT.globals["tuple"] = tuple

# probe -----------------------------------------------------------------------------------------------------------------
# Checks that an exported model has the logits of ours: the inputs, and the rounding errors that are allowed.

ROUNDING = 2.0**-24
"""The relative rounding error of one operation in float32."""
SAMPLES, TOKENS = 2, 16
Inputs = dict[str, Tensor]


def random_inputs(config: JobConfig, tokenizer: Any) -> Inputs:
    """Return random inputs by name, the same in every process: pictures, with prompts if the task has them; or token ids."""
    generator = torch.Generator().manual_seed(0)
    if tokenizer is not None:
        ids = torch.randint(len(tokenizer), (SAMPLES, TOKENS), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    side = config.model.image_side
    images = torch.randint(256, (SAMPLES, 3, side, side), generator=generator).float()
    if (kind := prompt_kind_of(config.task)) is None:
        return {"images": images}
    shape = SAMPLES, len(config.task.classes), len(kind.numbers) // 2, 2  # type: ignore[attr-defined]
    return {"images": images, "prompts": (torch.rand(shape, generator=generator).sort(2).values * (side - 1)).flatten(2)}


@torch.no_grad()
def logits_of(model: Callable[..., Any], inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the model's logits as float32 on the CPU."""
    found = model(**inputs)
    return getattr(found, "logits", found).detach().float().cpu()


def tolerance(model: nn.Module, wanted: Tensor) -> float:
    """Return by how much an export's logits may differ from `wanted`, the model's logits.

    The rounding error of a sum of n products is about sqrt(n) x 2^-24 of its size, in any order. The errors of successive
    layers add up. So the tolerance is: layers x sqrt(widest layer) x 2^-24 x the largest logit (at least 1).
    """
    widths = [parameter[0].numel() for parameter in model.parameters() if parameter.ndim > 1]
    return len(widths) * sqrt(max(widths, default=1)) * ROUNDING * max(1.0, float(wanted.abs().max()))


def require_equal(what: str, model: nn.Module, wanted: Tensor, found: Tensor) -> float:
    """Return the largest difference of the logits. Raises CheckpointError if it is more than rounding, see `tolerance`."""
    difference, most = float((found - wanted).abs().max()), tolerance(model, wanted)
    if found.shape != wanted.shape or not difference <= most:
        raise CheckpointError(
            f"--format {what}: its logits differ by {difference:.2g} from the model's, over {most:.2g}, so nothing was "
            "written; please report this with the job.yaml"
        )
    return difference


# merge -----------------------------------------------------------------------------------------------------------------


def check_merged(config: JobConfig) -> None:
    """Raise ConfigError for an adapter that cannot be merged into its base's weights."""
    if config.adapter_kind.merge is None:
        raise ConfigError(
            f"--format merged: adapter.kind {config.adapter.kind!r} adds layers that the base does not have, so there is "
            "nothing to merge into; use bundle or onnx"
        )


def merge(model: nn.Module, config: JobConfig) -> None:
    """Merge the adapter into the base's layers and remove it, in place. Raises ConfigError if that is not possible."""
    check_merged(config)
    if blocks := adapter_state.left_out_modules(model):
        raise ConfigError(
            f"--format merged: the model runs without {blocks[0]!r}, which the base's own code would run; use bundle or onnx"
        )
    if found := adapter_state.shared_weight(model, (name.rpartition(".")[0] for name in adapter_state.tensors(model))):
        raise ConfigError(
            f"--format merged: {found[0]!r} shares its weight with {found[1]!r}, which a merge would change too; use peft"
        )
    merge_shift(model, MODELS[config.model.name])  # it may refuse, so it comes first
    assert config.adapter_kind.merge is not None  # as `check_merged` has found
    config.adapter_kind.merge(model)


def merge_if_possible(model: nn.Module, config: JobConfig) -> None:
    """Merge the adapter in place if that is possible; otherwise leave the model unchanged. The logits do not change."""
    with suppress(ConfigError):
        merge(model, config)


def write_merged(folder: Path, model: nn.Module, config: JobConfig, tokenizer: Any) -> tuple[str, float]:
    """Merge the model in place and write it. Return (how to load it, in Markdown; largest difference from the model's logits).

    Raises ConfigError, CheckpointError.
    """
    inputs, base = random_inputs(config, tokenizer), MODELS[config.model.name]
    wanted = logits_of(model, inputs)
    merge(model, config)
    difference = require_equal("merged", model, wanted, logits_of(model, inputs))
    if base.save is not None:
        return base.save(folder, model, config.model, config.task, tokenizer), difference
    save_weights(folder, model)
    return f"{WEIGHTS} is the state dict of model {config.model.name!r}, by its own names.", difference


# ONNX ------------------------------------------------------------------------------------------------------------------
# After writing, the graphs are run with onnxruntime and their logits compared with the model's.

NEEDED = ("onnx", "onnxscript", "onnxruntime")
MOST_BYTES = 2**30
"""Largest size of weights inside a graph's file, which protobuf limits to 2 GiB. More weights go into a second file."""


_USAGE = ENVIRONMENT.from_string("""\
{{ "One ONNX graph" if parts | length == 1 else parts | length ~ " ONNX graphs, one behind the other" -}}
, checked by onnxruntime; batches may have any size.

```python
import onnxruntime

{% for name in parts %}
{{ name }} = onnxruntime.InferenceSession("{{ name }}.onnx")
{% endfor %}


def logits({{ inputs | join(", ") }}):
    \"\"\"Map float32 arrays (N first:
    {%- for name, tensor in inputs.items() %} {{ name }} {{ tuple(tensor.shape[1:]) }}{{ "," if not loop.last }}{% endfor %}
    {{- "; pictures are RGB in 0..255) to logits." }}\"\"\"
{% for name, part in parts.items() %}
    {{ part.output }} = {{ name }}.run(None, {{ "{" }}{% for key in part.inputs %}"{{ key }}": {{ key }}
    {{- ", " if not loop.last }}{% endfor %}{{ "}" }})[0]
{% endfor %}
    return {{ (parts.values() | list)[-1].output }}
```
""")


def check_onnx(config: JobConfig) -> None:
    """Raise ConfigError for language models and text encoders, and if the extra `onnx` is not installed."""
    reads_texts, encodes = MODELS[config.model.name].tokenizer is not None, bool(config.task.outputs)
    problems = {
        "--format onnx: a text encoder is not exported as a graph; use merged, and your runtime's own converter": (
            reads_texts and encodes
        ),
        "--format onnx: a language model generates token by token with a key-value cache, which is not exported; use merged, "
        "and your runtime's own converter": reads_texts,
        **{
            f"--format onnx: needs {name}, which is not installed; run: pip install 'consilium-flare[onnx]'": find_spec(name)
            is None
            for name in NEEDED
        },
    }
    raise_first(problems)


def write_onnx(folder: Path, model: nn.Module, config: JobConfig) -> tuple[str, float]:
    """Write one graph per part of the model. Return (how to run them, in Markdown; the largest difference of the logits).

    If the adapter can be merged, it is merged into `model` in place. The caller has called `check_onnx`.
    """
    import onnxruntime

    inputs = random_inputs(config, None)
    wanted, base = logits_of(model, inputs), MODELS[config.model.name]
    merge_if_possible(model, config)
    parts = base.graphs(model) if base.graphs else {"model": Graph(model, tuple(inputs), "logits")}
    held: Inputs = dict(inputs)
    for name, part in parts.items():
        own, path = {key: held[key] for key in part.inputs}, folder / f"{name}.onnx"
        _export_graph(path, part, own)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        held[part.output] = torch.from_numpy(session.run(None, {key: tensor.numpy() for key, tensor in own.items()})[0])
    return _USAGE.render(parts=parts, inputs=inputs), require_equal("onnx", model, wanted, list(held.values())[-1])


def _export_graph(path: Path, part: Graph, inputs: Inputs) -> None:
    """Export one part of the model as a graph that accepts batches of any size."""
    numbers = sum(p.numel() for p in part.module.parameters())
    shapes = {name: {0: torch.export.Dim.DYNAMIC} for name in inputs}
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter warns about its own code
            torch.onnx.export(
                part.module.eval(), (), str(path), kwargs=inputs, input_names=list(inputs), output_names=[part.output],
                dynamo=True, dynamic_shapes=shapes, external_data=4 * numbers > MOST_BYTES, verbose=False,
            )  # fmt: skip
    finally:
        logger.setLevel(level)


# bundle ----------------------------------------------------------------------------------------------------------------
# A MONAI bundle, which `python -m monai.bundle run` runs on pictures without this package. The layout follows the MONAI bundle
# specification (docs.monai.io, mb_specification). models/model.pt is the state dict that the specification requires.
# models/model.pt2 is the same model as a torch.export program, which needs no code of the model.

SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
CODE = Path(__file__).with_name("bundle_scripts.py")
"""The source file that is copied to the bundle's scripts/pictures.py."""
WRITERS = {"segmentation": "WriteMasks", "classification": "WriteClasses"}
"""For each task, the class in bundle_scripts.py that writes the network's outputs."""


_CODE = re.compile(r"^[$@%]|[@%][^\s@%]")
"""Matches texts that MONAI would run or look up in a configuration: "$code", "@name", "%file"."""


def check_bundle(config: JobConfig, card: Card) -> None:
    """Raise ConfigError for a task that bundles do not support, and for names that MONAI would run as code."""
    task, crop = config.task.name, getattr(config.task, "crop", None)
    names = [("name", config.name), *(("task.classes", name) for name in getattr(config.task, "classes", ()))]
    names += [
        (f"{key} of the card", getattr(card, key)) for key in ("model", "adapter", "site", "method", "job", "name", "version")
    ]
    problems = {
        f"--format bundle: bundles are of pictures, with masks or classes; task {task!r} has none; use merged": (
            not config.model.image_side or task not in WRITERS
        ),
        f"--format bundle: the model was trained on parts of {crop} pixels (task.crop), which a bundle does not cut yet; use "
        "onnx or merged, and give it such parts": crop,
        **{
            f"--format bundle: {what}: {shown(text, 80)!r}: MONAI would run a name with $, @ or % as code; use onnx, or train "
            "with another name": _CODE.search(str(text))
            for what, text in names
        },
    }
    raise_first(problems)


def write_bundle(folder: Path, model: nn.Module, config: JobConfig, card: Card) -> tuple[str, float]:
    """Write the bundle. Return (how to run it, in Markdown; the largest difference of its logits from the model's).

    If the adapter can be merged, it is merged into `model` in place. The caller has called `check_bundle`.
    """
    inputs = random_inputs(config, None)
    wanted = logits_of(model, inputs)
    merge_if_possible(model, config)
    shapes = tuple({0: torch.export.Dim.DYNAMIC} for _ in inputs)  # batches of any size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about its own code
        program = torch.export.export(model.requires_grad_(False), tuple(inputs.values()), dynamic_shapes=shapes)
    module = program.module()  # whose inputs are positional
    difference = require_equal("bundle", model, wanted, logits_of(lambda **named: module(*named.values()), inputs))
    (folder / "models").mkdir()
    torch.export.save(program, folder / "models/model.pt2")
    torch.save({name: tensor.cpu() for name, tensor in model.state_dict().items()}, folder / "models/model.pt")
    for name, value in {"metadata": bundle_metadata(config, card), "inference": bundle_inference_config(config)}.items():
        write_atomic(folder / f"configs/{name}.json", json.dumps(value, indent=4, ensure_ascii=False).encode(), PUBLIC)
    write_atomic(folder / "scripts/__init__.py", b'"""Code of this bundle."""\n', PUBLIC)
    write_atomic(folder / "scripts/pictures.py", CODE.read_bytes(), PUBLIC)
    kind = prompt_kind_of(config.task)
    prompts = _PROMPTS.format(many=kind.many, columns=", ".join(kind.numbers)) if kind else ""
    return _ABOUT.format(out=_OUT[config.task.name], prompts=prompts), difference


def bundle_metadata(config: JobConfig, card: Card) -> dict[str, Any]:
    """Return the content of configs/metadata.json.

    MONAI's schema requires two lists of packages, required and optional. MONAI's reader replaces the first by the second, so
    both lists are equal.
    """
    # `python -m monai.bundle` needs fire, which the extra `bundle` installs
    packages = {"pillow": version("pillow"), "fire": "0.7.1"}
    side, masks, classes = config.model.image_side, config.task.name == "segmentation", config.task.classes  # type: ignore[attr-defined]
    numbered = {str(number): name for number, name in enumerate(classes)}
    image = {
        "type": "image",
        "format": "magnitude",
        "modality": "n/a",
        "num_channels": 3,
        "spatial_shape": [side, side],
        "dtype": "float32",
        "value_range": [0, 255],
        "is_patch_data": False,
        "channel_def": {"0": "red", "1": "green", "2": "blue"},
    }
    inputs = {"image": image}
    if kind := prompt_kind_of(config.task):
        inputs["prompts"] = image | {
            "type": "tuples",
            "format": "points",
            "num_channels": len(classes),
            "spatial_shape": [len(kind.numbers)],
            "value_range": [0, side - 1],
            "channel_def": numbered,
        }
    outputs = {
        "type": "image" if masks else "probabilities",
        "format": "classes",
        "modality": "n/a",
        "num_channels": len(classes),
        "spatial_shape": [side, side] if masks else [],
        "dtype": "float32",
        "value_range": [],
        "is_patch_data": False,
        "channel_def": numbered,
    }
    return {
        "schema": SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": f"written by consilium {card.version}"},
        "monai_version": version("monai"),
        "pytorch_version": torch.__version__.partition("+")[0],
        "numpy_version": version("numpy"),
        "required_packages_version": packages,
        "optional_packages_version": packages,
        "name": card.job,
        "task": f"{config.task.name} of pictures",
        "description": f"{card.model} with adapter {card.adapter}, {card.name}, trained by {card.method}; see docs/README.md",
        "authors": "not stated; see docs/README.md",
        "copyright": "not stated; see docs/README.md",
        "intended_use": "Research. Not a medical device, and not tested for use on patients.",
        "network_data_format": {"inputs": inputs, "outputs": {"pred": outputs}},
    }


def bundle_inference_config(config: JobConfig) -> dict[str, Any]:
    """Return the content of configs/inference.json. Its sections have MONAI's names, so that other programs find them."""
    settings: Any = config.task
    window = [settings.window.center, settings.window.width] if settings.window else None
    reader = {"side": config.model.image_side, "resize": settings.resize, "padding": list(config.model.padding)}
    kind = prompt_kind_of(settings)
    masks = {"classes": list(settings.classes)} if settings.name == "segmentation" else {}
    prompts = {"prompts": f"@{kind.many}", "columns": list(kind.numbers)} if kind else {}
    return {
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/eval'",
        **({kind.many: ""} if kind else {}),
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "network_def": {
            "_target_": "scripts.pictures.load_network",
            "path": "$@bundle_root + '/models/model.pt2'",
            "device": "@device",
        },
        "network": "$@network_def",
        "datalist": {"_target_": "scripts.pictures.find_pictures", "place": "@dataset_dir", **masks, **prompts},
        "preprocessing": {
            "_target_": "Compose",
            "transforms": [{"_target_": "scripts.pictures.ReadPicture", **reader, "window": window}],
        },
        "dataset": {"_target_": "Dataset", "data": "@datalist", "transform": "@preprocessing"},
        "inferer": {"_target_": "SimpleInferer"},
        "postprocessing": {
            "_target_": f"scripts.pictures.{WRITERS[config.task.name]}",
            "folder": "@output_dir",
            "classes": list(settings.classes),
        },
        "evaluator": {
            "_target_": "scripts.pictures.Inference",
            "device": "@device",
            "network": "@network",
            "dataset": "@dataset",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
        },
        "run": ["$@evaluator.run()"],
    }


_ABOUT = """A MONAI bundle. It needs torch and `pip install monai fire pillow`, versions as in configs/metadata.json or later.
It does not need the package consilium. In the bundle's folder:

```bash
python -m monai.bundle run --config_file configs/inference.json --dataset_dir IMAGES --output_dir OUT
```

IMAGES is a folder of PNG, JPEG, TIFF or BMP pictures, or one such file. {out}{prompts}
The bundle cuts no tiles and opens no volumes, DICOM or slides: write their planes or tiles as pictures first, or use
`consilium predict`. It runs on the GPU if there is one; `--device '$torch.device("cpu")'` selects the CPU.
models/model.pt2 is the program that runs, and models/model.pt has its weights as a state dict. A bundle's configuration is
code, so only run bundles from people you trust.
"""
_OUT = {
    "segmentation": "OUT receives one mask per class, NAME_CLASS.png, with values 0 and 255 and the size of the picture.",
    "classification": "OUT receives classes.csv with one row per picture: its likeliest class, and each class's probability.",
}
_PROMPTS = """
The network takes {many}, one per class. `--{many} FILE` names a CSV file with the columns image, class, {columns}, in the
picture's pixels from the left and the top. Classes without a row are searched in the whole picture. If FILE is given, each
picture needs a row.
"""
