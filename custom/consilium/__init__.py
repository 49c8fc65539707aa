"""Consilium: federated fine-tuning of medical foundation models on NVIDIA FLARE."""

import os

__version__ = "0.2.0"

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched at run time; libraries below transformers would, some of them code

# Threads that spin while they wait make a run several times slower where other work shares the cores. torch's libgomp reads it
# when it is loaded.
if not os.environ.get("OMP_WAIT_POLICY"):
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
