"""The work as Flower's apps: a client's and a server's. Flower's processes import this module."""

import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import load_file

from tests.benchmarks.peer.work import Marks, Worker

FOLDER = Path(os.environ["PEER_FOLDER"])
client, server = ClientApp(), ServerApp()


@cache
def at_work() -> Worker:
    """Return this process' model; Flower's workers live as long as the run."""
    return Worker(FOLDER)


def _site(context: Context) -> str:
    return list(at_work().work["orders"])[int(context.node_config["partition-id"])]


@client.train()
def train(message: Message, context: Context) -> Message:
    """Do a round at a site, which remembers its own model in the run's state."""
    site, number = _site(context), int(message.content["config"]["server-round"]) - 1
    Marks(FOLDER).note("begin", round=number)
    own, losses = at_work().round(site, number, message.content["arrays"].to_torch_state_dict())
    Marks(FOLDER).note("round", round=number, losses={site: losses})
    context.state["own"] = ArrayRecord(own)
    told = MetricRecord({"num-examples": at_work().count(site)})
    return Message(content=RecordDict({"arrays": ArrayRecord(own), "metrics": told}), reply_to=message)


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Score what a site ends with."""
    site, values = _site(context), message.content["arrays"].to_torch_state_dict()
    losses = at_work().close(site, values, context.state["own"].to_torch_state_dict())
    Marks(FOLDER).note("end", losses={site: losses})
    told = MetricRecord(losses | {"num-examples": at_work().count(site)})
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
    work = settings()
    strategy = Closing(fraction_train=1.0, fraction_evaluate=1.0, min_available_nodes=len(work["orders"]))
    strategy.rounds = work["training"]["rounds"]
    strategy.start(grid, ArrayRecord(load_file(FOLDER / "initial.safetensors")), num_rounds=strategy.rounds)


def settings() -> dict[str, Any]:
    """Return the work's settings, without a model."""
    return json.loads((FOLDER / "work.json").read_text())
