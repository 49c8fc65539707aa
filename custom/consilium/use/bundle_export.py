"""Export of a model as a MONAI bundle, which `python -m monai.bundle run` runs on pictures without this package.

The layout follows the MONAI bundle specification (docs.monai.io, mb_specification). models/model.pt is the state dict that the
specification requires. models/model.pt2 is the same model as a torch.export program, which needs no code of the model.
"""

import json
import re
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from consilium.config.job import JobConfig
from consilium.core.errors import ConfigError
from consilium.core.sanitize import shown
from consilium.core.storage import PUBLIC, write_atomic
from consilium.federation.model_card import Card
from consilium.tasks.segmentation import prompt_kind_of
from consilium.use.merge import logits_of, merge_if_possible, random_inputs, require_equal

SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
FIRE = "0.7.1"
"""Version of fire, which `python -m monai.bundle` needs. The extra `bundle` installs it."""
CODE = Path(__file__).with_name("bundle_scripts.py")
"""The source file that is copied to the bundle's scripts/pictures.py."""
WRITERS = {"segmentation": "WriteMasks", "classification": "WriteClasses"}
"""For each task, the class in bundle_scripts.py that writes the network's outputs."""


_CODE = re.compile(r"^[$@%]|[@%][^\s@%]")
"""Matches texts that MONAI would run or look up in a configuration: "$code", "@name", "%file"."""


def check(config: JobConfig, card: Card) -> None:
    """Raise ConfigError for a task that bundles do not support, and for names that MONAI would run as code."""
    if not config.model.image_side or config.task.name not in WRITERS:
        raise ConfigError(
            f"--format bundle: bundles are of pictures, with masks or classes; task {config.task.name!r} has none; use merged"
        )
    if crop := getattr(config.task, "crop", None):
        raise ConfigError(
            f"--format bundle: the model was trained on parts of {crop} pixels (task.crop), which a bundle does not cut yet; "
            "use onnx or merged, and give it such parts"
        )
    told = {
        "name": config.name,
        "model": card.model,
        "adapter": card.adapter,
        "site": card.site,
        "method": card.method,
        "job of the card": card.job,
        "name of the card": card.name,
        "version of the card": card.version,
    }
    for what, text in [*told.items(), *(("task.classes", name) for name in _class_names(config))]:
        if _CODE.search(str(text)):
            raise ConfigError(
                f"--format bundle: {what}: {shown(text, 80)!r}: MONAI would run a name with $, @ or % as code; use onnx, or "
                "train with another name"
            )


def merge_and_write(folder: Path, model: nn.Module, config: JobConfig, card: Card) -> tuple[str, float]:
    """Write the bundle. Return (how to run it, in Markdown; the largest difference of its logits from the model's).

    If the adapter can be merged, it is merged into `model` in place. The caller has called `check`.
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
    _write_json(folder / "configs/metadata.json", metadata(config, card))
    _write_json(folder / "configs/inference.json", inference_config(config))
    write_atomic(folder / "scripts/__init__.py", b'"""Code of this bundle."""\n', PUBLIC)
    write_atomic(folder / "scripts/pictures.py", CODE.read_bytes(), PUBLIC)
    return _ABOUT.format(
        out=_OUT[config.task.name], prompts=_PROMPTS.get(getattr(config.task, "prompt", "none"), "")
    ), difference


def _write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=4, ensure_ascii=False).encode(), PUBLIC)


def metadata(config: JobConfig, card: Card) -> dict[str, Any]:
    """Return the content of configs/metadata.json.

    MONAI's schema requires two lists of packages, required and optional. MONAI's reader replaces the first by the second, so
    both lists are equal.
    """
    packages = {"pillow": version("pillow"), "fire": FIRE}
    side, masks = config.model.image_side, config.task.name == "segmentation"
    outputs = {
        "type": "image" if masks else "probabilities",
        "format": "classes",
        "modality": "n/a",
        "num_channels": len(_class_names(config)),
        "spatial_shape": [side, side] if masks else [],
        "dtype": "float32",
        "value_range": [],
        "is_patch_data": False,
        "channel_def": _numbered_classes(config),
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
        "network_data_format": {"inputs": _describe_inputs(config), "outputs": {"pred": outputs}},
    }


def _describe_inputs(config: JobConfig) -> dict[str, Any]:
    side, whole = config.model.image_side, {"dtype": "float32", "is_patch_data": False}
    colours = {"0": "red", "1": "green", "2": "blue"}
    image = {"type": "image", "format": "magnitude", "modality": "n/a", "num_channels": 3, "spatial_shape": [side, side]}
    found = {"image": image | whole | {"value_range": [0, 255], "channel_def": colours}}
    if kind := prompt_kind_of(config.task):
        prompt = {"type": "tuples", "format": "points", "modality": "n/a", "num_channels": len(_class_names(config))}
        numbers = {"spatial_shape": [len(kind.numbers)], "value_range": [0, side - 1], "channel_def": _numbered_classes(config)}
        found["prompts"] = prompt | numbers | whole
    return found


def _class_names(config: JobConfig) -> list[str]:
    return list(getattr(config.task, "classes", ()))


def _numbered_classes(config: JobConfig) -> dict[str, str]:
    return {str(number): name for number, name in enumerate(_class_names(config))}


def inference_config(config: JobConfig) -> dict[str, Any]:
    """Return the content of configs/inference.json. Its sections have MONAI's names, so that other programs find them."""
    settings: Any = config.task
    window = [settings.window.center, settings.window.width] if settings.window else None
    reader = {"side": config.model.image_side, "resize": settings.resize, "padding": list(config.model.padding)}
    kind = prompt_kind_of(settings)
    prompts = {"prompts": f"@{kind.many}", "classes": _class_names(config), "columns": list(kind.numbers)} if kind else {}
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
        "datalist": {"_target_": "scripts.pictures.find_pictures", "place": "@dataset_dir", **prompts},
        "preprocessing": {
            "_target_": "Compose",
            "transforms": [{"_target_": "scripts.pictures.ReadPicture", **reader, "window": window}],
        },
        "dataset": {"_target_": "Dataset", "data": "@datalist", "transform": "@preprocessing"},
        "inferer": {"_target_": "SimpleInferer"},
        "postprocessing": {
            "_target_": f"scripts.pictures.{WRITERS[config.task.name]}",
            "folder": "@output_dir",
            "classes": _class_names(config),
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
_PROMPTS = {
    "box": """
The network takes one box per class. `--boxes FILE` gives the boxes: a CSV file of image, class, left, top, right, bottom in the
picture's pixels, or a JSON list of such objects. Without a box, the whole picture is the box.
""",
    "point": """
The network takes one point per class. `--points FILE` gives the points: a CSV of image, class, x, y in the picture's pixels
from the left and the top, or a JSON list of such objects. A class without a point is searched in the whole picture.
""",
}
