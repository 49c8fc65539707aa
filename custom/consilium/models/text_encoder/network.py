"""Text classifiers on an encoder of `transformers`, under the encoder's own names: plain PEFT loads what is exported."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from consilium.core.errors import ConfigError
from consilium.models import transformers_folder
from consilium.models.text_encoder import PAD, TextEncoderConfig
from consilium.models.weight_files import HEAD_FILE, page, save_pretrained, save_tensors

KNOWN = transformers_folder.Known(
    "text encoder", "bert, roberta, xlm-roberta, camembert, distilbert, electra", AutoModelForMaskedLM
)
OTHERS = r"(cls|lm_head|classifier|vocab_\w+|generator_\w+|discriminator_\w+|predictions|qa_outputs)\b.*"
"""Tensors of a checkpoint's training task, which the encoder does not have."""
POOLER = r"pooler\..*"
_LOAD = """import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
encoder = AutoModel.from_pretrained(".", dtype=torch.float32).eval()
head = load_file("{file}")


@torch.no_grad()
def logits(input_ids, attention_mask):
    \"\"\"Map token ids and mask (N, T) to class logits (N, {outputs}).\"\"\"
    output = encoder(input_ids=input_ids, attention_mask=attention_mask)
    features = {features}
    return F.linear(features, head["head.weight"], head["head.bias"])
"""
_FEATURES = {
    "pooled": "output.pooler_output",
    "first": "output.last_hidden_state[:, 0]",
    "mean": "(output.last_hidden_state * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)",
}


class TextClassifier(PreTrainedModel):
    """Methods that `build` adds to the encoder's own class: token ids in, class logits out."""

    features: str

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Map token ids (N, T), padded with PAD or given with a mask, to class logits (N, C)."""
        mask = (input_ids != PAD).long() if attention_mask is None else attention_mask
        seen = None if mask.is_meta else mask  # transformers would read its values, which meta lacks
        output: Any = super().forward(input_ids=input_ids.clamp(min=0), attention_mask=seen)  # type: ignore[misc]
        tokens = output.last_hidden_state
        if self.features == "mean":
            found = (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        else:
            found = tokens[:, 0] if self.features == "first" else output.pooler_output
        return self.head(self.pooled(found))  # type: ignore[no-any-return]


def build(
    config: TextEncoderConfig, task: Any, checkpoint: Path | None, weights: bool, use_checkpointing: bool
) -> PreTrainedModel:
    """See registry.Build: a classifier with the folder's weights and a zero head."""
    pooled = config.features == "pooled"
    known = KNOWN._replace(
        spare=OTHERS if pooled else f"{OTHERS}|{POOLER}", lacking="use model.features: mean" if pooled else ""
    )
    model: Any = transformers_folder.build(AutoModel, checkpoint, config.config, weights, known)
    kind = model.config.model_type
    for key in ("is_decoder", "is_encoder_decoder"):
        if getattr(model.config, key, False):
            raise ConfigError(f"model.config.{key}: true: {kind!r} is not an encoder alone; known are {KNOWN.examples}")
    if config.features != "pooled" and getattr(model, "pooler", None) is not None:
        model.pooler = None
    transformers_folder.require_positions(model, config.max_length, 0)
    transformers_folder.add_head(model, ("head", "pooled", "features"), model.config.hidden_size, task.outputs, KNOWN)
    model.features = config.features
    transformers_folder.extend_class(model, TextClassifier)
    if not weights:
        _check_features(copy.deepcopy(model).to("meta"), config)
    return transformers_folder.set_evaluation_mode(model, use_checkpointing)


def _check_features(model: TextClassifier, config: TextEncoderConfig) -> None:
    """Raise ConfigError if the encoder lacks the features that the job asks for. One forward pass shows it."""
    kind = f"model_type {model.config.model_type!r}"
    try:
        found = model(torch.zeros(2, 8, dtype=torch.long, device="meta"))
    except Exception as error:  # each architecture fails in its own way
        if config.features == "pooled":
            raise ConfigError(f"model.features: 'pooled': {kind} pools nothing itself; use mean or first") from None
        raise ConfigError(
            f"model.config: {kind} does not take texts ({transformers_folder.shorten_error(error)}); known are {KNOWN.examples}"
        ) from None
    if found.ndim != 2:
        raise ConfigError(f"model.config: {kind} has no features of each text; known are {KNOWN.examples}")


def tokenizer_of(config: TextEncoderConfig, checkpoint: Path | None) -> PreTrainedTokenizerBase:
    """See registry.ModelKind."""
    return transformers_folder.load_tokenizer(checkpoint, config.config, writes=False)


def save(target: Path, model: Any, config: TextEncoderConfig, task: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    """See registry.Saved. The head gets a file."""
    head = model.head
    transformers_folder.restore_class(model, "head", "pooled", "features", pixels=False)
    save_pretrained(target, model)
    save_tensors(target / HEAD_FILE, {"head.weight": head.weight, "head.bias": head.bias})
    tokenizer.save_pretrained(target)
    code = _LOAD.format(file=HEAD_FILE, outputs=head.out_features, features=_FEATURES[config.features])
    return page(f"`AutoModel` loads the encoder; what stands behind it is {HEAD_FILE}.", code)
