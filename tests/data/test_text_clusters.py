"""K-means on points whose clusters are plain to see, and the points that stand for texts."""

import numpy as np
import torch

from consilium.data.partition import cluster_points
from consilium.models.causal_lm.network import build_causal_lm, load_tokenizer
from consilium.models.causal_lm.text_embeddings import embeddings
from tests.conftest import refused


def test_three_far_clouds_are_three_clusters_whatever_their_order() -> None:
    rng, true = np.random.default_rng(0), np.arange(60) % 3
    points = np.array([[0, 0], [50, 0], [0, 50]])[true] + rng.normal(size=(60, 2))
    found = cluster_points(points, 3, seed=1)
    assert len(set(found)) == 3
    assert len({(a, b) for a, b in zip(found, true.tolist(), strict=True)}) == 3
    assert found == cluster_points(points, 3, seed=1)


def test_more_clusters_than_points_are_refused() -> None:
    refused("--clusters: 3 are more", cluster_points, np.array([[0.0], [0.0], [1.0]]), 3, 0)


def test_a_text_is_the_mean_of_its_last_hidden_states() -> None:
    model, tokenizer = build_causal_lm("tiny", None), load_tokenizer("tiny", None)
    texts = ["urgent", "see the ward soon"]
    found = embeddings(model, tokenizer, texts)
    with torch.no_grad():
        for row, text in zip(found, texts, strict=True):
            states = model.model(tokenizer(text, return_tensors="pt").input_ids).last_hidden_state[0]
            np.testing.assert_allclose(row, states.numpy().mean(0), rtol=1e-4, atol=1e-5)


def test_of_a_text_is_read_what_the_model_has_positions_for() -> None:
    tokenizer = load_tokenizer("tiny", None)
    sizes = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 512}
    model = build_causal_lm("folder", None, {"model_type": "gpt2", **sizes}, weights=False)
    long = "see the ward soon, and again on every day of the week"
    np.testing.assert_array_equal(*embeddings(model, tokenizer, [long, f"{long}, and more"]))
