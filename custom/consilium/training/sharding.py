"""Shards a frozen base over several devices: each rank (process) holds a part of every block.

A rank gathers a whole block only while computing it. PyTorch's FSDP2 does this (`fully_shard`; Zhao et al., "PyTorch FSDP:
Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023). A block is one entry of a model's stack of layers. Tensors
outside of blocks (embeddings, norms, heads) and all trained tensors are whole at every rank, so that the guard sees whole
tensors. In a training step all ranks go through the blocks together. Only rank 0 evaluates: at each block it asks the others
for their parts.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.core.errors import ConsiliumError, Reason

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

GLOO = "consilium_gloo"
"""The name of our gloo backend in torch.distributed. Its default one would listen at the address of the machine's name."""
Maker = Callable[["Store", int, int, timedelta], "ProcessGroup"]


def named_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, block) for the blocks of a model's outermost stacks of layers.

    A stack is a ModuleList or Sequential of at least two modules of one class with parameters.
    """
    for name, child in model.named_children():
        blocks = list(child.children())
        alike = len(blocks) > 1 and len({type(one) for one in blocks}) == 1 and next(blocks[0].parameters(), None) is not None
        if isinstance(child, nn.ModuleList | nn.Sequential) and alike:
            yield from ((f"{name}.{number}", block) for number, block in enumerate(blocks))
        else:
            yield from ((f"{name}.{inner}", block) for inner, block in named_blocks(child))


def unsharded_parameters(model: nn.Module) -> set[Tensor]:
    """Return the parameters that every rank holds whole.

    These are the trained ones, those outside of blocks, single numbers, and those that two blocks share.
    """
    holders: dict[nn.Parameter, int] = {}
    for _, block in named_blocks(model):
        for parameter in block.parameters():
            holders[parameter] = holders.get(parameter, 0) + 1
    split = {one for one, count in holders.items() if count == 1 and one.ndim}
    found: set[Tensor] = {one for one in model.parameters() if one not in split}
    return found | set(adapter_state.tensors(model).values())


def spared_bytes(model: nn.Module, ranks: int) -> int:
    """Return the bytes that each of `ranks` ranks saves: the other ranks' parts, minus twice the largest block.

    The largest block is whole while it is computed, and a second time while its parts are gathered.
    """
    whole = unsharded_parameters(model)
    sizes = [
        sum(one.numel() * one.element_size() for one in block.parameters() if one not in whole)
        for _, block in named_blocks(model)
    ]
    return max(sum(size - -(-size // ranks) for size in sizes) - 2 * max(sizes, default=0), 0)


def backend(device: torch.device) -> str:
    """Return the backend for the exchange of blocks' parts: NCCL between GPUs, our gloo between CPUs."""
    return "nccl" if device.type == "cuda" else GLOO


def make_device_mesh(
    store: "Store", rank: int, size: int, device: torch.device, gloo: Maker, patience: timedelta
) -> "DeviceMesh":
    """Return the device mesh of a site's ranks, on each rank's `device`. `gloo` makes a process group of CPUs.

    torch.distributed allows one such world per process. Raises ConsiliumError if there is one already.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        what = "another site in this process already has a sharded base"
        raise ConsiliumError(f"site.yaml: base: 'sharded': {what}; give each a process of its own", Reason.POLICY)
    if device.type == "cuda":
        torch.cuda.init()  # otherwise the mesh would choose a device by the rank's number
        if device.index is not None:
            torch.cuda.set_device(device)  # where FSDP2 and NCCL compute
    else:
        dist.Backend.register_backend(GLOO, gloo, devices=["cpu"])
    dist.init_process_group(backend(device), store=store, rank=rank, world_size=size, timeout=patience)
    return dist.init_device_mesh(device.type, (size,))


def leave_world() -> None:
    """Destroy the process group that `make_device_mesh` has made, if there is one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def shard(model: nn.Module, mesh: "DeviceMesh", device: torch.device) -> list["FSDPModule"]:
    """Reduce every block to this rank's part, move all tensors to its device, and return the blocks.

    Nothing is exchanged: each rank has read the whole base and keeps its part. Raises ConsiliumError for a base without frozen
    blocks.
    """
    from torch.distributed.fsdp import fully_shard

    whole = unsharded_parameters(model)
    blocks = [block for _, block in named_blocks(model) if any(one not in whole for one in block.parameters())]
    if not blocks:
        what = "this model has no stack of blocks with frozen parameters"
        raise ConsiliumError(f"site.yaml: base: 'sharded': {what}; use replicated", Reason.POLICY)
    ignored = cast(set[nn.Parameter], whole)
    found = [fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=ignored) for block in blocks]
    tensors = [*whole, *model.buffers()]
    for tensor in tensors:
        tensor.data = tensor.data.to(device)
    return found


def join_block_gather(block: "FSDPModule") -> None:
    """Take part in gathering a block that another rank asked for, and free it again."""
    block.unshard()
    block.reshard()


def register_gather_hooks(blocks: list["FSDPModule"], ask: Callable[[int], None]) -> None:
    """Register hooks that call `ask` with a block's number before the model gathers the block's parts."""
    for number, block in enumerate(blocks):
        cast(nn.Module, block).register_forward_pre_hook(lambda module, args, number=number: ask(number), prepend=True)
