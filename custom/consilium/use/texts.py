"""Answers of a language model to records of instructions, as its closing evaluation writes them."""

from pathlib import Path
from typing import Any

from consilium.data.datalist import DataList
from consilium.data.text import Text, read_records
from consilium.errors import DataError
from consilium.federation.build import build_task
from consilium.training.device import autocast
from consilium.use.model import TrainedModel


def answers(opened: TrainedModel, path: Path, batch_size: int, bad: list[DataError]) -> list[dict[str, Any]]:
    """Return a record of each line that can be used, with its "answer"; why others cannot goes into `bad`."""
    import torch

    config = opened.config
    texts: list[Text] = list(read_records(path, bad, pictures=config.model.image_side > 0))
    if not texts:
        return []
    data = DataList(path, {"training": tuple(texts), "validation": (), "test": ()})
    task: Any = build_task(config, data, opened.own)
    device = next(opened.model.parameters()).device
    with torch.no_grad(), autocast(device, config.training.precision):
        written = task.write(opened.model, "training", batch_size)
    return [_record(text, said) for text, said in zip(texts, written, strict=True)]


def _record(text: Text, said: str) -> dict[str, Any]:
    asked = {"instruction": text.instruction, "input": text.input}
    return {"record": text.name} | {key: value for key, value in asked.items() if value} | {"answer": said}
