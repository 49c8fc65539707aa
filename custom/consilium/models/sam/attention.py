"""SAM's attention on PyTorch's fused kernels, and the split of a fused qkv projection. Parameters stay where Meta has them."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from segment_anything.modeling.image_encoder import Attention as ImageAttention, get_rel_pos
from segment_anything.modeling.transformer import Attention as DecoderAttention
from torch import Tensor, nn

CPU_FUSED_TOKENS = 1024
"""On CPUs the fused kernel wins from about here on: 64 x 64 tokens 1.3 times faster, 16 x 16 tokens 1.4 times slower."""


class FusedImageAttention(ImageAttention):
    """The image encoder's attention with decomposed relative positions and no (tokens x tokens) tensor in memory.

    The score is scale * q.k + q.R_h[kh] + q.R_w[kw]. It is one inner product of the longer vectors [scale * q, q.R_h, q.R_w]
    and [k, onehot(kh), onehot(kw)], so a plain fused kernel computes it exactly. An additive mask would not do: it depends on
    q, needs a gradient, and that sends PyTorch back to the unfused path.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C)."""
        batch, height, width, _ = x.shape
        if x.device.type == "cpu" and height * width < CPU_FUSED_TOKENS:
            return super().forward(x)
        qkv = self.qkv(x).reshape(batch, height * width, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key = qkv[0], qkv[1]
        grid = query.unflatten(2, (height, width))
        by_row = torch.einsum("bnhwc,hkc->bnhwk", grid, get_rel_pos(height, height, self.rel_pos_h).to(grid.dtype))
        by_col = torch.einsum("bnhwc,wkc->bnhwk", grid, get_rel_pos(width, width, self.rel_pos_w).to(grid.dtype))
        rows = torch.eye(height, dtype=key.dtype, device=key.device).repeat_interleave(width, 0)
        cols = torch.eye(width, dtype=key.dtype, device=key.device).repeat(height, 1)
        place = torch.cat([rows, cols], -1).expand(*key.shape[:2], -1, -1)
        # queries and keys (B, heads, H * W, d + H + W) whose inner product is the whole score
        query = torch.cat([query * self.scale, by_row.flatten(2, 3).to(query.dtype), by_col.flatten(2, 3).to(query.dtype)], -1)
        key = torch.cat([key, place], -1)
        value = F.pad(qkv[2], (0, query.shape[-1] - qkv.shape[-1]))  # the flash kernels want one head size
        mixed = F.scaled_dot_product_attention(query, key, value, scale=1.0)[..., : qkv.shape[-1]]
        return self.proj(mixed.transpose(1, 2).reshape(batch, height, width, -1))


class FusedDecoderAttention(DecoderAttention):
    """The mask decoder's attention on the fused kernel."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map queries (B, N, C), keys and values (B, M, C) to (B, N, C)."""
        heads = [
            self._separate_heads(projected, self.num_heads) for projected in (self.q_proj(q), self.k_proj(k), self.v_proj(v))
        ]
        return self.out_proj(self._recombine_heads(F.scaled_dot_product_attention(*heads)))


def use_fused(model: nn.Module) -> None:
    """Switch every attention of a SAM to the fused classes, in place: same parameters, another forward."""
    fused: dict[type, type[nn.Module]] = {ImageAttention: FusedImageAttention, DecoderAttention: FusedDecoderAttention}
    for module in model.modules():
        if (found := fused.get(type(module))) is not None:
            module.__class__ = found


class SplitQKV(nn.Module):
    """A fused qkv projection as three linear layers, so that an adapter can take q and v and leave k alone."""

    def __init__(self, fused: nn.Linear) -> None:
        super().__init__()
        for name, weight, bias in zip("qkv", fused.weight.chunk(3), fused.bias.chunk(3), strict=True):
            part = nn.Linear(fused.in_features, fused.out_features // 3, device=weight.device, dtype=weight.dtype)
            part.weight, part.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., 3 * in), in the order q, k, v."""
        return torch.cat([part(x) for part in self.children()], dim=-1)


def split_qkv(model: nn.Module) -> None:
    """Replace the fused qkv projection of every image encoder block by SplitQKV, in place."""
    for module in model.modules():
        if isinstance(module, ImageAttention) and not isinstance(module.qkv, SplitQKV):
            module.qkv = SplitQKV(module.qkv)


def join_qkv(model: nn.Module) -> None:
    """Undo `split_qkv`, in place; q, k and v must be plain layers."""
    for name, split in [(n, m) for n, m in model.named_modules() if isinstance(m, SplitQKV)]:
        parts = [part for part in split.children() if isinstance(part, nn.Linear)]
        weight, bias = torch.cat([p.weight for p in parts]), torch.cat([p.bias for p in parts])
        fused = nn.Linear(weight.shape[1], weight.shape[0], device=weight.device, dtype=weight.dtype)
        fused.weight, fused.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, fused)


def fuse_qv_factors(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the factors of the fused projection: A = [A_q; A_v], B with B_q in the q rows and B_v in the v rows.

    So a pair of rank r on q and v becomes one adapter of rank 2r, block-placed and so exactly equal.
    """
    fused = {n: t for n, t in values.items() if ".attn.qkv." not in n}
    for layer in {n.rpartition(".")[0].rpartition(".")[0] for n in values if ".attn.qkv." in n}:
        a_q, a_v, b_q, b_v = (values[f"{layer}.{s}.lora_{f}"] for f in "AB" for s in "qv")
        over_q, over_v = torch.zeros_like(b_q), torch.zeros_like(b_v)
        rows = (torch.cat(pair, 1) for pair in ((b_q, over_v), (over_q, over_v), (over_q, b_v)))
        fused[f"{layer}.lora_A"], fused[f"{layer}.lora_B"] = torch.cat([a_q, a_v]), torch.cat([*rows])
    return fused
