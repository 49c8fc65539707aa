"""Which layers' weights the code of `transformers` reads past the layer, by that code itself as it is installed."""

import re
from collections.abc import Iterator
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from consilium.models.low_precision import READ_WEIGHTS
from consilium.models.transformers_folder import UNSUPPORTED
from tests.models.classes import CLASSIFIERS, PROMPTABLE, SPEAKING

HARMLESS = {
    ("bloom", "dense"), ("bloom", "dense_4h_to_h"),  # only where it imitates how it was trained on several GPUs
    ("gptj", "q_proj"), ("gpt_neo", "q_proj"),  # only in attention by a package of its own
    ("hunyuan_v1_moe", "wg"),  # asked whether it is float32
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
    assert {(kind, name) for kind, name in found if kind not in UNSUPPORTED and name not in READ_WEIGHTS} <= HARMLESS


def test_every_weight_that_goes_into_a_product_is_known() -> None:
    """An adapter in such a layer trains nothing, at least where a GPU has Mamba's kernels."""
    found = set()
    for kind, code in sources():
        found |= {(kind, "out_proj")} if "outproj_weight=self.out_proj.weight" in code else set()
        found |= {(kind, name) for name in re.findall(r"^ +self\.(\w+_proj)\.weight,$", code, re.MULTILINE)}
        found |= {(kind, name) for name in re.findall(r"self\.(\w+)\.weight @", code)}
    assert {("jamba", "dt_proj"), ("falcon_mamba", "x_proj"), ("bamba", "out_proj")} <= found
    assert {kind for kind, _ in found} <= UNSUPPORTED
