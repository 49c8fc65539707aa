"""Entries of the record of what leaves a site (privacy/ledger/audit.py): tensors, and the privacy of a release."""

from dataclasses import asdict
from typing import Any

from consilium.core.linalg.together import norms
from consilium.core.messages import Tensors
from consilium.privacy.accounting.composition import DISCRETE
from consilium.privacy.plan import Plan


def described_tensors(tensors: Tensors) -> dict[str, dict[str, Any]]:
    """Return shape, type, bytes and Euclidean norm of each tensor."""
    sizes = norms(tensors)
    return {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "bytes": tensor.numel() * tensor.element_size(),
            "norm": sizes[name],
        }
        for name, tensor in tensors.items()
    }


def privacy_of(plan: Plan, seeded: bool = False) -> dict[str, Any]:
    """Return the privacy of one release under `plan`. `seeded`: its noise came from a known seed."""
    private = plan.config
    named = {"unit": private.unit, "adjacency": private.adjacency, "trust": private.trust, "delta": private.delta}
    named |= {"calibration": private.calibration} if private.calibration != "honest" else {}
    named |= {"mechanism": DISCRETE} | ({"seeded": True} if seeded else {})
    numbers = {"clip": private.clip, "noise_multiplier": plan.noise_multiplier}
    return named | numbers | {"spend": asdict(plan.event)}
