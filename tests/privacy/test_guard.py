"""What may leave a site."""

import pytest
import torch

from consilium.errors import RefusedError
from consilium.privacy.guard import allowed_metrics, check_release
from consilium.strategies.fediat import FedIAT
from consilium.strategy import Payload

SHARED, LOCAL = "image_encoder.blocks.0.attn.qkv.lora_B", "image_encoder.blocks.0.attn.qkv.lora_A"
METRICS = allowed_metrics(frozenset({"dice"}))


def test_a_proper_update_passes() -> None:
    check_release(Payload(0, 0, {SHARED: torch.zeros(2)}, {}, {"validation/received/dice": 0.5}), FedIAT(), METRICS)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (Payload(0, 0, {LOCAL: torch.zeros(2)}), "is local, only shared tensors may leave"),
        (Payload(0, 0, {SHARED: torch.tensor([float("nan")])}), "NaN or Inf"),
        (Payload(0, 0, {}, {"patients": 3.0}), "scalar 'patients' is not declared"),
        (Payload(0, 0, {}, {}, {"validation/received/names": 3.0}), "metric 'validation/received/names' is not declared"),
    ],
)
def test_anything_else_is_refused(payload: Payload, reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        check_release(payload, FedIAT(), METRICS)
