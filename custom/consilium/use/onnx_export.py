"""Export of a model as one or more ONNX graphs.

After writing, the graphs are run with onnxruntime and their logits compared with the model's.
"""

import logging
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from consilium.config.job import JobConfig
from consilium.core.errors import ConfigError
from consilium.models.registry import MODELS, Graph
from consilium.use.merge import Inputs, logits_of, merge_if_possible, random_inputs, require_equal

NEEDED = ("onnx", "onnxscript", "onnxruntime")
MOST_BYTES = 2**30
"""Largest size of weights inside a graph's file, which protobuf limits to 2 GiB. More weights go into a second file."""


def check(config: JobConfig) -> None:
    """Raise ConfigError for language models and text encoders, and if the extra `onnx` is not installed."""
    if MODELS[config.model.name].tokenizer is not None:
        writes = "a language model generates token by token with a key-value cache, which is not exported"
        what = "a text encoder is not exported as a graph" if config.task.outputs else writes
        raise ConfigError(f"--format onnx: {what}; use merged, and your runtime's own converter")
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ConfigError(
            f"--format onnx: needs {missing[0]}, which is not installed; run: pip install 'consilium-flare[onnx]'"
        )


def merge_and_write(folder: Path, model: nn.Module, config: JobConfig) -> tuple[str, float]:
    """Write one graph per part of the model. Return (how to run them, in Markdown; the largest difference of the logits).

    If the adapter can be merged, it is merged into `model` in place. The caller has called `check`.
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
    difference = require_equal("onnx", model, wanted, list(held.values())[-1])
    return _usage_page(parts, inputs), difference


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


def _usage_page(parts: Mapping[str, Graph], inputs: Inputs) -> str:
    """Return Markdown with Python code that runs the graphs one after the other."""
    lines = [f'{name} = onnxruntime.InferenceSession("{name}.onnx")' for name in parts]
    run = []
    for name, part in parts.items():
        fed = ", ".join(f'"{key}": {key}' for key in part.inputs)
        run.append(f"    {part.output} = {name}.run(None, {{{fed}}})[0]")
    shapes = ", ".join(f"{name} {tuple(tensor.shape[1:])}" for name, tensor in inputs.items())
    body = [
        "import onnxruntime", "", *lines, "", "",
        f"def logits({', '.join(inputs)}):",
        f'    """Map float32 arrays (N first: {shapes}; pictures are RGB in 0..255) to logits."""',
        *run,
        f"    return {list(parts.values())[-1].output}",
    ]  # fmt: skip
    code = "\n".join(body)
    what = "One ONNX graph" if len(parts) == 1 else f"{len(parts)} ONNX graphs, one behind the other"
    return f"{what}, checked by onnxruntime; batches may have any size.\n\n```python\n{code}\n```\n"
