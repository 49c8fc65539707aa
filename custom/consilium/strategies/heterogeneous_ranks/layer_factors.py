"""Functions on the adapter tensors of one layer: trained factors, frozen tails, changes from uploads, averages of the rest."""

from collections.abc import Mapping

from consilium.adapters.names import GATE, TAIL, WHOLE, is_base, is_frozen_part, is_head
from consilium.core.lazy import Tensor, torch
from consilium.core.lowrank import Change, Product
from consilium.core.messages import Tensors
from consilium.strategies.strategy import ServerState, SiteResult


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return the shapes (out, in) of the LoRA layers in `tensors`, by layer, in order of depth.

    Layer names are sorted part by part, with numbers compared as numbers.
    """

    def depth(layer: str) -> list[tuple[bool, int, str]]:
        return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in layer.split(".")]

    layers = sorted((name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")), key=depth)
    return {layer: (len(tensors[f"{layer}.lora_B"]), tensors[f"{layer}.lora_A"].shape[1]) for layer in layers}


def non_lora_tensors(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors outside LoRA: a classifier's head and trained parts of the base.

    Factors, tails and gates are left out.
    """
    return {name: tensor for name, tensor in tensors.items() if is_head(name) or is_base(name)}


def pair(layer: str, product: Product) -> Tensors:
    """Return a product (B, A) as the tensors of the layer's trained factors."""
    return {f"{layer}.lora_A": product[1], f"{layer}.lora_B": product[0]}


def prefix_and_tail(layer: str, product: Product, rank: int, gate: float) -> Tensors:
    """Return the first `rank` ranks of a product (B, A) as trained factors, and the others as the frozen tail with `gate`."""
    b, a = product
    tensors = pair(layer, (b[:, :rank], a[:rank]))
    if a.shape[0] > rank:
        tensors |= {f"{layer}.tail_A": a[rank:], f"{layer}.tail_B": b[:, rank:], f"{layer}.{GATE}": torch.tensor([gate])}
    return tensors


def with_factored_tails(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return `tensors` with every tail as two factors: a tail sent as one matrix (out, in) is paired with an identity."""
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(f".{WHOLE}")}
    for name in sorted(tensors.keys() - found.keys()):
        layer, whole = name.removesuffix(f".{WHOLE}"), tensors[name]
        out, into = whole.shape
        b, a = (whole, torch.eye(into)) if into <= out else (torch.eye(out), whole)
        found |= {f"{layer}.tail_A": a.to(whole), f"{layer}.tail_B": b.to(whole), f"{layer}.{GATE}": whole.new_ones(1)}
    return found


def full_download_numbers(tensors: Mapping[str, Tensor]) -> int:
    """Return the count of numbers in trained factors and a head, plus a tail as large as each layer's weights."""
    trained = sum(t.numel() for n, t in tensors.items() if not is_frozen_part(n))
    return trained + sum(out * into for out, into in shapes(tensors).values())


def factors(tensors: Mapping[str, Tensor], layer: str) -> Product:
    """Return (B, A) of a layer's trained factors."""
    return tensors[f"{layer}.lora_B"], tensors[f"{layer}.lora_A"]


def changes(uploads: Mapping[str, SiteResult], share: Mapping[str, float], layer: str, tails: bool = False) -> list[Change]:
    """Return the change of one layer at every site: its weight, and its factors before and after training.

    Sites are in the order of names. A site that did not train the layer has rank 0. With `tails` the frozen ranks are appended
    to both factors, without the gate, which gives the site's whole product.
    """
    found = []
    for name, upload in sorted(uploads.items()):
        (b, a), (db, da) = factors(upload.sent.tensors, layer), factors(upload.update.tensors, layer)
        start, end = (b, a), (b + db, a + da)
        if tails:
            start, end = _with_tail(upload, layer, start), _with_tail(upload, layer, end)
        found.append(Change(share[name], start, end))
    return found


def _with_tail(upload: SiteResult, layer: str, product: Product) -> Product:
    if f"{layer}.tail_A" not in upload.sent.tensors:
        return product
    tail_a, tail_b = (upload.sent.tensors[f"{layer}.{part}"] for part in TAIL)
    return torch.cat([product[0], tail_b], 1), torch.cat([product[1], tail_a])


def mean_non_lora_tensors(state: ServerState, uploads: Mapping[str, SiteResult], share: Mapping[str, float]) -> Tensors:
    """Return the non-LoRA tensors (a head, trained parts of the base) plus the weighted mean of their updates.

    The sum is in float64, over the sites in the order of names.
    """
    moved = {n: t.double() for n, t in non_lora_tensors(state.shared).items()}
    for name, upload in sorted(uploads.items()):
        moved = {n: t + share[name] * upload.update.tensors[n].double() for n, t in moved.items()}
    return {n: t.to(state.shared[n].dtype) for n, t in moved.items()}
