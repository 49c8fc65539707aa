"""Cluster texts by the hidden states of a language model, for `consilium data partition --clusters`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from consilium.data.partition import cluster_points
from consilium.models.causal_lm.network import build_causal_lm, load_tokenizer
from consilium.models.causal_lm.text_embeddings import embeddings
from consilium.models.untrusted_folder import named_as


def text_clusters(count: int, folder: Path | None, seed: int, texts: Sequence[str]) -> list[str]:
    """Return the name of each text's cluster, one of `count`. `folder`: the language model; None for the tiny one."""
    variant: Literal["tiny", "folder"] = "folder" if folder else "tiny"
    with named_as("--model"):
        model, tokenizer = build_causal_lm(variant, folder), load_tokenizer(variant, folder)
    points = embeddings(model, tokenizer, texts)
    return cluster_points(points, count, seed)
