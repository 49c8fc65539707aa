"""Consilium: federated fine-tuning of medical foundation models on NVIDIA FLARE."""

import os

__version__ = "0.2.0"

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched at run time; libraries below transformers would, some of them code
