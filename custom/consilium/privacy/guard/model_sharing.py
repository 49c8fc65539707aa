"""What a site shares in a cross-site job: scores of each model once, and its own model where its site.yaml allows that."""

import json
import math
from collections.abc import Collection
from pathlib import Path

import torch

from consilium.adapters.names import is_frozen_part
from consilium.config.job import JobConfig
from consilium.core.errors import Reason, RefusedError
from consilium.core.messages import Payload
from consilium.core.storage import digest, note

MODELS = 256
"""The most models that one job scores at a site."""
NUMBERS = frozenset({"scaling", "share"})
"""Numbers that a model's forward pass needs besides its tensors."""
FILE = "scored.json"


def check_shares_model(name: str, config: JobConfig, shares: bool, protects: bool) -> None:
    """Raise RefusedError unless the job asks for this site's own model and the site shares it.

    `shares`: share_personalized of its site.yaml; `protects`: it has a privacy policy, under which no model leaves.
    """
    if config.cross_site is None or not config.cross_site.personalized:
        raise RefusedError(f"{name}: the job asks for no personalized model; nothing was sent", Reason.TASK)
    if config.privacy is not None or config.secure_aggregation is not None or protects:
        raise RefusedError(f"{name}: under privacy or masks no personalized model leaves; nothing was sent", Reason.MODEL)
    if not shares:
        what = "its site.yaml does not say share_personalized: true, so its model stays here; nothing was sent"
        raise RefusedError(f"{name}: {what}", Reason.MODEL)


def check_once(folder: Path, place: tuple[int, int], sent: Payload) -> None:
    """Note which model is scored at a place. Raises RefusedError for another one there.

    `folder`: the submission's. Otherwise a server could learn of the data, score by score, with models made for it.
    """
    key, found = "{}-{}".format(*place), f"{digest(sent.tensors)} {sorted(sent.scalars.items())}"
    path = folder / FILE
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if key in known and known[key]["model"] != found:
        raise RefusedError(f"round {place[0]} phase {place[1]} had another model before; nothing was sent", Reason.TASK)
    if key not in known:
        note(path, key, {"model": found})


def is_adapter_tensor(name: str, names: Collection[str]) -> bool:
    """Tell whether a tensor is an adapter's: one of its `names`, or a frozen part of one of its layers."""
    layer = name.rpartition(".")[0]
    return name in names or (is_frozen_part(name) and any(one.rpartition(".")[0] == layer for one in names))


def check_model(name: str, result: Payload, names: Collection[str]) -> None:
    """Raise RefusedError unless `result` is an adapter and nothing else: known names, finite floats."""
    if extra := sorted(name for name in result.tensors if not is_adapter_tensor(name, names)):
        raise RefusedError(f"{name}: tensor {extra[0]!r} is none of the adapter's; nothing was sent")
    if bad := sorted(n for n, t in result.tensors.items() if not t.is_floating_point() or not torch.isfinite(t).all()):
        raise RefusedError(f"{name}: tensor {bad[0]!r} is no finite float; nothing was sent")
    if result.metrics or result.scalars.keys() != NUMBERS or not all(map(math.isfinite, result.scalars.values())):
        raise RefusedError(f"{name}: a model with other numbers than {', '.join(sorted(NUMBERS))}; nothing was sent")
