"""Run a job folder through FLARE's SimEnv: `python jobs/run.py jobs/quickstart --sites 3` (add --export to export it)."""

import argparse

from nvflare.recipe import SimEnv

from consilium.flare.job.recipe import ConsiliumRecipe


def main() -> None:
    """Run or export the job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", nargs="?", default="jobs/quickstart")
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--workspace", default="runs/simenv")
    wanted = parser.parse_args()
    run = ConsiliumRecipe(wanted.job).execute(SimEnv(num_clients=wanted.sites, workspace_root=wanted.workspace))
    print("Result:", run.get_result())


if __name__ == "__main__":
    main()
