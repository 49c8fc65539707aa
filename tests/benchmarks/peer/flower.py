"""Flower: its FedAvg in its simulation. `python -m tests.benchmarks.peer.flower FOLDER`, in an environment that has flwr."""

import os

from flwr.simulation import run_simulation

from tests.benchmarks.peer.flower_app import client, server, settings

if __name__ == "__main__":
    sites = len(settings()["orders"])
    share = max((os.cpu_count() or 1) / sites, 0.1)
    run_simulation(server, client, sites, backend_config={"client_resources": {"num_cpus": share, "num_gpus": 0.0}})
