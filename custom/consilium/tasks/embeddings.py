"""Embeddings of pictures by a frozen encoder, computed once and cached beside the site's decoded samples.

Where nothing in the encoder trains, its answer to a picture is the same in every step, round and stage. Each picture is encoded
by itself, kept or not, so that no result depends on what is kept. The store is that of the samples: salted names, the user's
own files, the same room, cleared with them.
"""

import numpy as np
import torch
from torch import Tensor, nn

from consilium.data.store import Store, salted_hash


class Embeddings:
    """Embeddings of pictures by an encoder that `identity` names, weights and settings. Without a store none is kept."""

    def __init__(self, store: Store | None, identity: str) -> None:
        self._store, self._identity = store, identity

    @torch.no_grad()
    def __call__(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the embeddings (N, ...) of pictures (N, 3, S, S), whole numbers of 0..255, on the model's device.

        The model has `embed`, of one picture (1, 3, S, S).
        """
        device = next(model.parameters()).device
        return torch.cat([self._one(model, image[None], device) for image in images])

    def _one(self, model: nn.Module, image: Tensor, device: torch.device) -> Tensor:
        name = self._name(image, device) if self._store else ""
        if self._store and (found := self._store.get(name)) is not None:
            ((dtype, array),) = found.items()
            return torch.from_numpy(np.array(array)).view(getattr(torch, dtype)).to(device, non_blocking=True)
        made: Tensor = model.embed(image.to(device))  # type: ignore[operator]
        if self._store:
            flat = made.detach().cpu().contiguous()
            self._store.put(name, {str(made.dtype).removeprefix("torch."): flat.view(torch.uint8).numpy()})
        return made

    def _name(self, image: Tensor, device: torch.device) -> str:
        """Return a salted name of the picture, the encoder and the precision in which it computes here."""
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        content = salted_hash(self._salt(), "picture", image.to(torch.uint8).cpu().numpy().tobytes())
        return salted_hash(
            self._salt(), "embedding", self._identity, tuple(image.shape), content, device.type, autocast, torch.__version__
        )

    def _salt(self) -> bytes:
        assert self._store is not None
        return self._store.salt
