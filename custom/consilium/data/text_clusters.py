"""Classes for text records without labels: K-means clusters of their texts' embeddings.

FedHera's Table 10 partitions instructions by K-means clusters of "semantic embeddings" and does not name the embedding model.
Here, an embedding is the base model's mean hidden state, see models/causal_lm/text_embeddings.py. K-means is SciPy's, started
by k-means++.
"""

import warnings

import numpy as np
from scipy.cluster.vq import kmeans2

from consilium.core.errors import DataError
from consilium.core.seeding import seed_for

ITERATIONS = 100


def cluster_points(points: np.ndarray, count: int, seed: int) -> list[str]:
    """Return the name of each point's cluster, "cluster-0" and so on, for points (N, D).

    The same points and seed give the same clusters. Raises DataError if there are fewer different points than clusters.
    """
    if len(np.unique(points, axis=0)) < count:
        raise DataError(f"--clusters: {count} are more than there are different records; ask for less")
    draw = np.random.default_rng(seed_for(seed, "clusters"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a cluster that loses all its points stays empty, and no record has it
        _, found = kmeans2(points.astype(np.float64), count, iter=ITERATIONS, minit="++", rng=draw)
    width = len(str(count - 1))
    return [f"cluster-{int(number):0{width}d}" for number in found]
