"""ONNX graphs: onnxruntime runs them by the page's own code, in any batch, and they answer as the model did."""

from pathlib import Path
from typing import Any

import pytest

from consilium.core.errors import ConfigError
from consilium.use import export_formats
from tests.conftest import small_config, small_text
from tests.use.handing import CELLS, FUNDUS, changed, loaded, trained

BOXES = changed(FUNDUS, task={"classes": ["a", "b"], "prompt": "box"})
POINTS = changed(FUNDUS, task={"classes": ["a", "b"], "prompt": "point"})
JOBS = {"boxes": BOXES, "points": POINTS, "bottlenecks, not merged": small_config("fedsca"), "a classifier": CELLS}


@pytest.mark.slow  # the exporter takes seconds for each
@pytest.mark.parametrize("name", JOBS)
def test_graphs_answer_the_same_in_onnxruntime(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    config = JOBS[name]
    model = trained(config)
    inputs = {key: torch.cat([value, value.flip(0)])[:3] for key, value in export_formats.random_inputs(config, None).items()}
    wanted = export_formats.logits_of(model, inputs)
    page, _ = export_formats.write_onnx(tmp_path, model, config)
    graphs = {"model.onnx"} if config is CELLS else {"image_encoder.onnx", "mask_decoder.onnx"}
    assert {path.name for path in tmp_path.iterdir()} == graphs
    run: Any = loaded(page, tmp_path, monkeypatch)
    found = torch.from_numpy(run(*(value.numpy() for value in inputs.values())))
    assert float((found - wanted).abs().max()) <= export_formats.tolerance(model, wanted)


def test_what_has_no_graph_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^--format onnx: a language model generates token by token .*; use merged"):
        export_formats.check_onnx(small_text())
    monkeypatch.setattr(export_formats, "find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(ConfigError, match=r"^--format onnx: needs onnxscript, .*; run: pip install 'consilium-flare\[onnx\]'$"):
        export_formats.check_onnx(FUNDUS)
