"""What tests of models handed on share: small models whose adapters say something, and the code that a page gives."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.federation.job_assembly import build_model, tokenizer_of
from consilium.use import export_formats
from consilium.use.export import export
from consilium.use.model import TrainedModel
from tests.conftest import small_cells, small_config

HERE = SiteConfig(device="cpu")
CELLS = small_cells()
FUNDUS = small_config("fedit")


def changed(config: JobConfig, **sections: Any) -> JobConfig:
    """Return a job with other sections, without what was generated for the first."""
    raw = config.model_dump()
    return JobConfig.model_validate(raw | sections | {"data": {}})


def trained(config: JobConfig, seed: int = 0) -> nn.Module:
    """Return a job's model with every adapter tensor moved, as training would."""
    model = build_model(config, HERE)
    stir(model, seed)
    return model


@torch.no_grad()
def stir(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in adapter_state.tensors(model).values():
        step = 0.1 * float(tensor.std()) if tensor.numel() > 1 and tensor.any() else 0.05
        tensor += step * torch.randn(tensor.shape, generator=generator)


def code(page: str) -> str:
    """Return the one block of Python of a page."""
    (found,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return found


def loaded(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """Return `logits` of the page's block, run in the folder as a user runs it."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    with torch.no_grad():
        exec(code(page), names)
    return names["logits"]


def run_peft_card(found: TrainedModel, folder: Path, own: SiteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Export a model for PEFT, run the code of its card in its folder as printed, and compare the logits."""
    inputs = export_formats.random_inputs(found.config, tokenizer_of(found.config, own))
    wanted = export_formats.logits_of(found.model, inputs)
    made = export(found, "peft", folder, own)
    monkeypatch.chdir(made.folder)
    names: dict[str, Any] = {}
    exec(code((made.folder / "README.md").read_text()), names)
    answered = export_formats.logits_of(names["model"].eval(), inputs)
    assert float((answered - wanted).abs().max()) <= export_formats.tolerance(names["model"], wanted)
