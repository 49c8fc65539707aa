"""Consilium: federated fine-tuning of medical foundation models on NVIDIA FLARE."""

import os

__version__ = "0.3.0"

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "USE_HUB_KERNELS": "NO",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "DO_NOT_TRACK": "1",
}
"""Switches of the Hugging Face libraries: they download no weights and no code, and send no usage data.

They are set before any library is loaded, in every process that imports this package. They override the environment, and child
processes inherit them. `USE_HUB_KERNELS` keeps transformers from the hub's layers where `kernels` is installed.
"""
os.environ.update(OFFLINE)

# Threads that spin while they wait make a run several times slower where other work shares the cores. torch's libgomp reads it
# when it is loaded.
if not os.environ.get("OMP_WAIT_POLICY"):
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
