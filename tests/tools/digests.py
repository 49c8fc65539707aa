"""Digests of short seeded runs: they show that a change of structure changed no number.

Runs every strategy, tasks, adapter kinds, noise at sites, records and by the step, masks, in process and through FLARE's
simulator, with three sites and generated data. Patient level is left out: generated data name no patients. It calls the
command line alone, so it survives any move of modules. A run's digest covers all tensors of its checkpoints (server, sites,
exported adapters), by name, dtype, shape and bytes, and all scores of `results.json`.

    python -m tests.tools.digests write FILE    # before the change
    python -m tests.tools.digests check FILE    # after it: names every run and part that differ; exit code 1

Digests hold for one machine and one set of packages. Secrets differ between runs, so private runs have `privacy.noise_seed`.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.metadata import entry_points
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors import safe_open

ROOT = Path(__file__).parents[2]
EQUAL_RANKS = (
    "fedit", "ffa_lora", "fedsa_lora", "fediat", "deer", "dp_dylora", "feddpa", "fedala", "feddbe", "fedra",
    "fedheal", "fedprox", "scaffold", "lora_fair", "frlora", "local_only", "centralized", "flora",
)  # fmt: skip
UNEQUAL_RANKS = ("fedhera", "fedhomolora", "flexlora", "fedhl", "fedhello", "flora", "hetlora")
TIERS = "tiers: {low: {train: 2, download: 4}, medium: {train: 3, download: 6}, high: {train: 4, download: 8}}"
SEGMENT = (
    "quickstart", "data.phantoms.training=8", "data.phantoms.validation=2", "data.phantoms.test=2", "training.batch_size=2",
    "training.local_steps=2", "model.image_size=64", "training.rounds=2",
)  # fmt: skip
CELLS = (
    "quickstart_cells", "data.phantoms.training=12", "data.phantoms.test=5", "training.batch_size=4", "training.rounds=2",
    "training.local_steps=2",
)  # fmt: skip
TEXT = (
    "quickstart_text", "data.phantoms.training=8", "data.phantoms.validation=2", "data.phantoms.test=2",
    "training.batch_size=2", "training.rounds=2", "training.local_steps=2", "task.max_new_tokens=4",
)  # fmt: skip
MASKED = "secure_aggregation={colluders: 1}"


def combinations() -> dict[str, tuple[str, ...]]:
    """Return the runs by name: the job's name, then its changed settings; an entry `--engine=flare` chooses the engine."""
    runs = {f"{name}/segmentation": (*SEGMENT, f"strategy={{name: {name}}}") for name in EQUAL_RANKS}
    runs |= {f"{name}/text": (*TEXT, f"strategy={{name: {name}}}") for name in ("fedit", "scaffold", "fedsa_lora")}
    runs["feddpa/text"] = (*TEXT, "strategy={name: feddpa, weighting: fixed}")
    unequal = "adapter={kind: dual_rank, rank: 8, scaling: 2.0, targets: paper}"
    runs |= {f"{name}/unequal": (*TEXT, unequal, f"strategy={{name: {name}, {TIERS}}}") for name in UNEQUAL_RANKS}
    runs["fedit/classification"] = CELLS
    runs["fedit/dora"] = (*SEGMENT, "strategy={name: fedit}", "adapter.dora=true")
    for name in ("fedit", "fedsca"):
        runs[f"{name}/bottleneck"] = (*SEGMENT, "adapter={kind: bottleneck}", f"strategy={{name: {name}}}")
    runs["fedit/full"] = (*CELLS, "adapter={kind: full}")
    runs["fedit/server adam"] = (*SEGMENT, "strategy={name: fedit}", "server={optimizer: adam, lr: 0.01}")
    runs["fedit/median"] = (*SEGMENT, "strategy={name: fedit}", "server={mean: median}")
    runs["fedit/sampled"] = (*SEGMENT, "strategy={name: fedit}", "federation.fraction_train=0.7")
    runs["fedit/masked"] = (*CELLS, MASKED, "federation.min_sites=3")
    runs["fediat/masked"] = (*SEGMENT, MASKED, "federation.min_sites=3")
    for name, base in (("fedit", SEGMENT), ("deer", SEGMENT), ("fedsa_lora", TEXT)):
        privacy = "privacy={unit: site, epsilon: 8, delta: 1.0e-5, clip: 1.0, trust: local, adjacency: zero-out}"
        lora = "adapter={kind: lora, rank: 1, targets: paper}"
        runs[f"{name}/site level"] = (*base, f"strategy={{name: {name}}}", privacy, lora)
    record = "privacy={unit: record, epsilon: 8, delta: 1.0e-5, clip: 1.0}"
    runs["fedit/record level"] = (*CELLS, record, "task.balance=none")
    step = "privacy={unit: record, trust: distributed, epsilon: 8, sample_rate: 0.3, divisor: 9, clip: 1.0}"
    runs["fedit/by the step"] = (
        *CELLS, step, "secure_aggregation={colluders: 1}", "federation.min_sites=3", "training.local_steps=1",
        "task.balance=none", "training.optimizer_state=fresh",
    )  # fmt: skip
    runs["fediat/flare"] = (*SEGMENT, "--engine=flare")
    runs["fedhera/flare"] = (*TEXT, unequal, f"strategy={{name: fedhera, {TIERS}}}", "--engine=flare")
    runs["fedit/flare masked"] = (*CELLS, MASKED, "federation.min_sites=3", "--engine=flare")
    return runs


def tensors(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each tensor of a safetensors file, in order."""
    with safe_open(path, "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name).contiguous()
            described = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
            yield described, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file of tensors in a run's folder, by relative path, and of its scores."""
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        total = hashlib.sha256()
        for described, content in tensors(path):
            total.update(described.encode() + content)
        found[str(path.relative_to(folder))] = total.hexdigest()[:16]
    results = json.dumps(scores(json.loads((folder / "results.json").read_text())), sort_keys=True)
    return found | {"results.json": hashlib.sha256(results.encode()).hexdigest()[:16]}


def scores(results: object) -> object:
    """Return results without what differs between two equal runs: times, memory, versions and names of runs."""
    left_out = ("seconds", "time", "memory", "version", "run", "seal", "packages", "code", "bytes")
    if isinstance(results, dict):
        return {k: scores(v) for k, v in results.items() if not any(word in k for word in left_out)}
    return [scores(v) for v in results] if isinstance(results, list) else results


def run(settings: tuple[str, ...], folder: Path) -> dict[str, str]:
    """Return the digests of one run, with three sites, made in `folder`."""
    job, changes = settings[0], [s for s in settings[1:] if not s.startswith("--")]
    data = folder / "data"
    for site in ("site-1", "site-2", "site-3"):
        (data / site).mkdir(parents=True)
        (data / site / "site.yaml").write_text("privacy: {noise_seed: 7}\n")
    command = ["consilium", "simulate", str(ROOT / "jobs" / job), "--workspace", str(folder / "run"), "--format", "json"]
    if any(change.startswith(("privacy=", "secure_aggregation=")) for change in changes):
        command += ["--data", str(data)]
    command += [part for change in changes for part in ("--set", change)]
    command += [part for s in settings if s.startswith("--") for part in s.split("=")]
    (main,) = (e.load() for e in entry_points(group="console_scripts") if e.name == "consilium")
    with patch.object(sys, "argv", command), redirect_stdout(StringIO()):
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"exit code {end.code}: {' '.join(command)}") from None
    return digests(folder / "run")


def main() -> None:
    """Write digests, or compare them with written ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("write", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="only runs whose name holds this text")
    options = parser.parse_args()
    before = json.loads(options.file.read_text()) if options.action == "check" else {}
    found, wrong = {}, []
    for name, settings in combinations().items():
        if options.only not in name:
            continue
        begun = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                found[name] = run(settings, Path(folder))
        except Exception:
            traceback.print_exc()
            found[name] = {"failed": ""}
        parts = [] if options.action == "write" else differing(before.get(name, {}), found[name])
        wrong += [name] * bool(parts or "failed" in found[name])
        print(
            f"{name}: {len(found[name])} parts, {time.monotonic() - begun:.1f} s {' '.join(parts)}", file=sys.stderr, flush=True
        )
    if options.action == "write":
        options.file.write_text(json.dumps(found, indent=1, sort_keys=True))
    print(f"{len(found)} runs, {len(wrong)} failed or differ: {', '.join(wrong)}", file=sys.stderr)
    raise SystemExit(bool(wrong))


def differing(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the parts that differ. Files are compared by content, so a file that only has another name is equal."""
    return sorted(k for k in before if before[k] not in after.values()) + sorted(
        k for k in after if after[k] not in before.values()
    )


if __name__ == "__main__":
    main()
