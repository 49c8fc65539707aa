"""Flower: its FedAvg in its simulation. `python -m tests.benchmarks.peer.flower FOLDER`, in an environment that has flwr."""

import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from safetensors.torch import load_file

from tests.benchmarks.peer.work import Marks, Worker

FOLDER = Path(os.environ.setdefault("PEER_FOLDER", sys.argv[-1]))
client, server = ClientApp(), ServerApp()


@cache
def worker() -> Worker:
    """Return this process' model; Flower's workers live as long as the run."""
    return Worker(FOLDER)


def _site(context: Context) -> str:
    return list(worker().work["orders"])[int(context.node_config["partition-id"])]


@client.train()
def train(message: Message, context: Context) -> Message:
    """Do a round at a site, which remembers its own model in the run's state."""
    site, number = _site(context), int(message.content["config"]["server-round"]) - 1
    Marks(FOLDER).note("begin", round=number)
    own, losses = worker().round(site, number, message.content["arrays"].to_torch_state_dict())
    Marks(FOLDER).note("round", round=number, losses={site: losses})
    context.state["own"] = ArrayRecord(own)
    told = MetricRecord({"num-examples": worker().count(site)})
    return Message(content=RecordDict({"arrays": ArrayRecord(own), "metrics": told}), reply_to=message)


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Score what a site ends with."""
    site, values = _site(context), message.content["arrays"].to_torch_state_dict()
    losses = worker().close(site, values, context.state["own"].to_torch_state_dict())
    Marks(FOLDER).note("end", losses={site: losses})
    told = MetricRecord(losses | {"num-examples": worker().count(site)})
    return Message(content=RecordDict({"metrics": told}), reply_to=message)


class Closing(FedAvg):
    """FedAvg whose sites evaluate after the last round only."""

    rounds = 0

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Return the evaluations of the last round."""
        return super().configure_evaluate(server_round, arrays, config, grid) if server_round == self.rounds else []


@server.main()
def run(grid: Grid, context: Context) -> None:
    """Run all rounds."""
    work = worker_config()
    strategy = Closing(fraction_train=1.0, fraction_evaluate=1.0, min_available_nodes=len(work["orders"]))
    strategy.rounds = work["training"]["rounds"]
    strategy.start(grid, ArrayRecord(load_file(FOLDER / "initial.safetensors")), num_rounds=strategy.rounds)


def worker_config() -> dict:
    """Return the work's settings, without a model."""
    import json

    return json.loads((FOLDER / "work.json").read_text())


if __name__ == "__main__":
    torch.set_num_threads(1)
    sites = len(worker_config()["orders"])
    share = max((os.cpu_count() or 1) / sites, 0.1)
    run_simulation(server, client, sites, backend_config={"client_resources": {"num_cpus": share, "num_gpus": 0.0}})
