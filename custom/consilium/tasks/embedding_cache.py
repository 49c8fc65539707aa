"""Embeddings of pictures by a frozen encoder, computed once and cached beside the site's decoded samples.

If no part of the encoder trains, the embedding of a picture is the same in every step, round and stage. Each picture is encoded
separately, cached or not, so that no result depends on the cache. The store is that of the decoded samples: names are salted,
files belong to the user, and both share one size limit and are deleted together.
"""

import numpy as np
import torch
from torch import Tensor, nn

from consilium.data.disk_cache import DiskCache, salted_hash


class EmbeddingCache:
    """Computes embeddings of pictures by one encoder, or takes them from `store`. None: nothing is cached.

    `identity` names the encoder's weights and settings.
    """

    def __init__(self, store: DiskCache | None, identity: str) -> None:
        self._store, self._identity = store, identity

    @torch.no_grad()
    def __call__(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the embeddings (N, ...), on the model's device, of pictures (N, 3, S, S) with whole numbers in 0..255.

        The model needs a method `embed` for one picture (1, 3, S, S).
        """
        device, found = next(model.parameters()).device, list[Tensor]()
        for image in (picture[None] for picture in images):
            name = self._name(image, device) if self._store else ""
            if self._store and (stored := self._store.get(name)) is not None:
                ((dtype, array),) = stored.items()
                found.append(torch.from_numpy(np.array(array)).view(getattr(torch, dtype)).to(device, non_blocking=True))
                continue
            found.append(model.embed(image.to(device)))  # type: ignore[operator]
            if self._store:
                flat = found[-1].detach().cpu().contiguous()
                self._store.put(name, {str(flat.dtype).removeprefix("torch."): flat.view(torch.uint8).numpy()})
        return torch.cat(found)

    def _name(self, image: Tensor, device: torch.device) -> str:
        """Return a salted name made from the picture, the encoder, and the device and precision in use."""
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        content = salted_hash(self._salt(), "picture", image.to(torch.uint8).cpu().numpy().tobytes())
        return salted_hash(
            self._salt(), "embedding", self._identity, tuple(image.shape), content, device.type, autocast, torch.__version__
        )

    def _salt(self) -> bytes:
        assert self._store is not None
        return self._store.salt
