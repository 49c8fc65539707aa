"""Plain FLARE: its FedAvg recipe and its Client API in the simulator. `python -m tests.benchmarks.peer.plain_flare FOLDER`."""

import sys
from pathlib import Path

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.client.config import ExchangeFormat
from nvflare.recipe import SimEnv

from tests.benchmarks.peer.plain_flare_model import Adapter


def main(folder: Path) -> None:
    """Run the work; one round more than there are, in which sites only score what they end with."""
    import json

    work = json.loads((folder / "work.json").read_text())
    sites = list(work["orders"])
    recipe = FedAvgRecipe(
        name="plain",
        model=Adapter(str(folder)),
        min_clients=len(sites),
        num_rounds=work["training"]["rounds"] + 1,
        train_script=str(Path(__file__).with_name("plain_flare_client.py")),
        train_args=str(folder),
        server_expected_format=ExchangeFormat.PYTORCH,
        key_metric="",
    )
    recipe.execute(SimEnv(clients=sites, num_threads=len(sites), workspace_root=str(folder / "flare")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
