"""Processor seconds of the commands that read no tensor: `python -m tests.benchmarks.commands [--repeats 5]`.

Each call is a process of its own at low priority, with one thread. Seconds are its own and its children's, median of the
repeats. The input is small: a run of one step at two sites with noise, and the kits of a server and these sites.

Commands whose help loads PyTorch are left out, such as cost and fit, and so are calls that need a server, such as status.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from consilium.cli.main import COMMANDS, Group
from consilium.federation.run_folders import STATE

JOBS = Path(__file__).parents[2] / "jobs"
LOADS_TORCH = {
    "cost", "fit", "study show", "study run", "predict", "evaluate", "export-model", "models import",
    "privacy attack", "privacy invert", "export", "submit", "resume", "poc", "approve", "doctor",
}  # fmt: skip
RUN = (
    "simulate", str(JOBS / "quickstart_cells"), "--sites=clinic,ward", "--rounds=1", "--set=training.local_steps=1",
    "--set=privacy={unit: site, clip: 1.0, noise_multiplier: 2.0}", "--workspace=run",
)  # fmt: skip
FEDERATION = {
    "name": "federation",
    "server": {"name": "localhost", "org": "hub", "port": 8002, "state": "/srv/federation"},
    "sites": [{"name": name, "org": name} for name in ("clinic", "ward")],
    "admins": [{"name": "lead@hub.example", "org": "hub", "role": "lead"}],
}
KITS = "kits/federation/prod_00"
LIST = "run/sites/clinic/phantoms/datalist.json"
EVIDENCE = f"evidence run --kit={KITS}/clinic -o evidence.zip"
CALLS = (
    "study list", "compare run other", "report run", "init made", f"data check {LIST}", f"data stats {LIST}",
    f"data split {LIST} split", "data phantoms drawn --kind=cells --sites=2",
    "privacy plan --epsilon=8 --rounds=20 --accountant=exact",
    f"privacy ledger {KITS}/clinic", f"privacy sums {KITS}/clinic", f"audit {KITS}/clinic", EVIDENCE,
    f"evidence before.zip --verify --kit={KITS}/clinic", f"metrics {KITS}/clinic", "provision sites.yml -o new",
    f"allow {KITS}/clinic", "renew sites.yml -o kits",
)  # fmt: skip
"""Calls in a copy of the folder that `prepare` fills."""


def names() -> list[str]:
    """Return all commands, "" for the program itself."""
    found = [""]
    for entries in COMMANDS.values():
        for name, entry in entries.items():
            found += [f"{name} {inner}" for inner in entry.commands] if isinstance(entry, Group) else [name]
    return found


def seconds(words: Sequence[str], folder: Path) -> float:
    """Return the processor seconds of one call in `folder`. Ends the program if the call fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(["consilium", *words], cwd=folder, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"consilium {' '.join(words)}: {done.stderr.strip()}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def prepare(folder: Path) -> None:
    """Write the input of CALLS into `folder`."""
    (folder / "sites.yml").write_text(yaml.safe_dump(FEDERATION))
    for words in (RUN, ("provision", "sites.yml", "-o", "kits")):
        seconds(words, folder)
    shutil.copytree(folder / "run", folder / "other")
    state = folder / KITS / "clinic" / STATE
    own = shutil.copytree(folder / "run/sites/clinic", state / "runs/run/sites/clinic")
    (own / "ledger.sqlite").rename(state / "ledger.sqlite")
    seconds(EVIDENCE.replace("evidence.zip", "before.zip").split(), folder)


def main() -> None:
    """Print a row for each call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    os.nice(10)
    os.environ["OMP_NUM_THREADS"] = "1"
    print("| command | processor s | least | most |\n|---|--:|--:|--:|", flush=True)
    with tempfile.TemporaryDirectory() as base:
        prepare(Path(base))
        for call in [*(f"{name} --help".strip() for name in names() if name not in LOADS_TORCH), *CALLS]:
            found = []
            for _ in range(repeats):
                with tempfile.TemporaryDirectory() as other:  # some calls write
                    found.append(seconds(call.split(), shutil.copytree(base, Path(other) / "copy")))
            print(f"| `{call}` | {statistics.median(found):.2f} | {min(found):.2f} | {max(found):.2f} |", flush=True)


if __name__ == "__main__":
    main()
