"""Which layers' weights the code of `transformers` reads past the layer, by that code itself as it is installed."""

import re
from collections.abc import Iterator
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from consilium.models.custom_weight_access import is_weight_read, reading_architecture
from tests.models.classes import CLASSIFIERS, PROMPTABLE, SPEAKING

HARMLESS = {
    ("bloom", "dense"), ("bloom", "dense_4h_to_h"),  # only where it imitates how it was trained on several GPUs
    ("gptj", "q_proj"), ("gpt_neo", "q_proj"),  # only in attention by a package of its own
    ("hunyuan_v1_moe", "wg"),  # asked whether it is float32
    ("reformer", "query_key"), ("reformer", "value"),  # refused altogether
}  # fmt: skip
OTHERS = {"lm_head", "proj"}
"""What writes the output, which is never quantized, and convolutions over pictures."""


def sources() -> Iterator[tuple[str, str]]:
    """Yield architecture and code of every model that a job may name."""
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *CLASSIFIERS, *PROMPTABLE, *SPEAKING}
    for file in sorted(Path(transformers.models.__file__).parent.glob("*/modeling_*.py")):
        if file.parent.name in known or f"{file.parent.name}_text" in known:
            yield file.parent.name, file.read_text(encoding="utf-8")


def test_every_weight_that_code_reads_is_known() -> None:
    """A weight's type counts too: of a quantized layer that is the type of bytes, to which a picture would be rounded."""
    read = re.compile(
        r"^(?!\s*(?:#|init\.|@)).*self\.(?:\w+\.)*(\w+)\.weight\b(?!\.device|\.dtype\)\.is_floating)", re.MULTILINE
    )
    found = set()
    for kind, code in sources():
        linear = set(re.findall(r"self\.(\w+) = nn\.Linear\(", code))
        found |= {(kind, name) for name in read.findall(code) if name in linear - OTHERS}
    assert {
        ("mamba", "x_proj"),
        ("mamba2", "out_proj"),
        ("siglip2", "patch_embedding"),
        ("gemma3n", "correction_coefs"),
    } <= found
    assert {(kind, name) for kind, name in found if not is_weight_read(f"model.{name}", {kind})} <= HARMLESS


def test_every_weight_that_goes_into_a_product_is_known() -> None:
    """An adapter in such a layer trains nothing, at least where a GPU has Mamba's kernels."""
    found = set()
    for kind, code in sources():
        found |= {(kind, "out_proj")} if "outproj_weight=self.out_proj.weight" in code else set()
        found |= {(kind, name) for name in re.findall(r"^ +self\.(\w+_proj)\.weight,$", code, re.MULTILINE)}
        found |= {(kind, name) for name in re.findall(r"self\.(\w+)\.weight @", code)}
    assert {("jamba", "dt_proj"), ("falcon_mamba", "x_proj"), ("bamba", "out_proj")} <= found
    assert {(kind, name) for kind, name in found if reading_architecture(f"model.{name}", {kind}) != kind} == set()


def test_a_layer_is_known_by_its_own_name_and_architecture() -> None:
    """Most architectures call the projection of an attention's result out_proj too; adapters put a name behind the layer's."""
    assert reading_architecture("layers.0.mixer.out_proj", {"bamba", "llama"}) == "bamba"
    assert reading_architecture("layers.0.out_proj", {"llama"}) is None
    for wrapped in ("mixer.out_proj.base_layer", "mixer.out_proj.base"):
        assert is_weight_read(wrapped, {"mamba2"})
        assert not is_weight_read(wrapped, {"opt"})
    assert not is_weight_read("mixer.out_proj.base_layer.other", {"mamba2"})
