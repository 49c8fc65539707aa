"""Whole language runs in one process: the tiny LM learns to sort notes, a folder's model runs by its job's config."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import CheckpointError
from consilium.federation.job_assembly import assemble_job
from consilium.models.causal_lm.network import build_causal_lm
from consilium.runtime.engine import simulate
from tests.conftest import small_text
from tests.data.writing import write
from tests.models.folders import config_of, save_folder

SITES = {f"site-{i}": SiteConfig() for i in (1, 2)}


def quiet(event: Mapping[str, Any]) -> None:
    """See nothing."""


def test_the_tiny_lm_learns_and_its_adapter_loads_with_plain_peft(tmp_path: Path) -> None:
    simulate(assemble_job(small_text("fedit", rounds=1, lr=2e-2, batch_size=4, local_steps=6)), SITES, tmp_path, quiet)
    results = json.loads((tmp_path / "results.json").read_text())
    mean = {k: sum(r[f"test/{k}"] for r in results.values()) / len(results) for k in ("pretrained/loss", "global/loss")}
    assert mean["global/loss"] < 0.6 * mean["pretrained/loss"]
    assert all(0 <= r["test/global/accuracy"] <= 1 for r in results.values())
    base, ids = build_causal_lm("tiny", None), torch.arange(9)[None]
    before = base(ids).logits
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "sites/site-1/adapters/global")
    assert not torch.equal(loaded(ids).logits, before)
    assert not list(tmp_path.rglob("predictions.png"))


def folder_job(folder: Path, **model: Any) -> JobConfig:
    raw = small_text("fedit", rounds=1, local_steps=1).model_dump()
    raw["model"] = {"name": "causal_lm", "variant": "folder", "checkpoint": "${SITE}", "config": config_of(folder)} | model
    return JobConfig.model_validate(raw | {"task": {"name": "language"}, "data": {}, "federation": {}})


def test_a_folder_s_model_runs_on_a_site_s_own_lists(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", "qwen3")
    write(tmp_path / "ward", "train.jsonl", {"instruction": "Add.", "input": "1 2", "output": "3"})
    write(tmp_path / "ward", "validation.jsonl", {"input": "Say a.", "output": "a"})
    site = SiteConfig(datalist=tmp_path / "ward", checkpoints=folder)
    simulate(assemble_job(folder_job(folder)), {"ward": site}, tmp_path / "run", quiet)
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["ward"].keys() >= {"validation/global/loss", "validation/global/perplexity"}
    other = config_of(folder) | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    with pytest.raises(CheckpointError, match="another architecture"):
        simulate(assemble_job(folder_job(folder, config=other)), {"ward": site}, tmp_path / "again", quiet)
