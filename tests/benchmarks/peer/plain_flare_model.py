"""What plain FLARE's server holds: the adapter alone, under PEFT's names."""

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn


class Adapter(nn.Module):
    """The adapter's tensors as parameters; FLARE's exporter wants `folder` under its own name."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        for name, tensor in load_file(Path(folder) / "initial.safetensors").items():
            self.register_parameter(name.replace(".", "/"), nn.Parameter(tensor))

    def state_dict(self, *args: object, **options: object) -> dict[str, Tensor]:  # type: ignore[override]
        """Return the tensors under PEFT's names."""
        return {name.replace("/", "."): tensor for name, tensor in super().state_dict(*args, **options).items()}

    def load_state_dict(self, state: dict[str, Tensor], *args: object, **options: object) -> object:  # type: ignore[override]
        """Take tensors under PEFT's names."""
        return super().load_state_dict({name.replace(".", "/"): tensor for name, tensor in state.items()}, *args, **options)
