"""State files: exact, checksummed, atomic."""

from pathlib import Path

import pytest
import torch

from consilium.errors import CheckpointError
from consilium.storage import load_state, save_state


def test_round_trip_is_exact(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 2), "b": torch.randn(4).bfloat16(), "n": torch.arange(3)}
    save_state(tmp_path / "x" / "s.safetensors", tensors, {"round": 3, "scalars": {"x": 0.5}})
    found, meta = load_state(tmp_path / "x" / "s.safetensors")
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in tensors.items())
    assert meta == {"round": 3, "scalars": {"x": 0.5}}
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["s.safetensors"]


def test_damage_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    save_state(path, {"a": torch.zeros(100)}, {})
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum does not match"):
        load_state(path)
    path.write_bytes(data[:50])
    with pytest.raises(CheckpointError, match="not a readable state file"):
        load_state(path)
    with pytest.raises(CheckpointError, match="not a readable state file"):
        load_state(tmp_path / "none")
