"""`consilium bench`: how fast a job trains on this machine, beside the same model in bare PyTorch and PEFT."""

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from consilium.cli.model_options import DeviceOption, site_of
from consilium.cli.options import CheckpointsOption, Format, FormatOption, JobArgument, SetOption, load
from consilium.config.site import SiteConfig, read_site_folder
from consilium.core.errors import ConfigError
from consilium.runtime.benchmark import bench as measure

WORDS = {
    "job": "this job, as in a round",
    "ready": "its loop, batches lying ready",
    "bare": "bare PyTorch + PEFT loop",
    "original": "with the original attention",
}


def bench(
    job: JobArgument,
    override: SetOption = None,
    data: Annotated[Path | None, typer.Option(help="a site's folder; without it the job's generated data")] = None,
    checkpoints: CheckpointsOption = None,
    device: DeviceOption = "auto",
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="optimizer steps of a turn")] = 2,
    turns: Annotated[int, typer.Option(min=1, max=1_000, help="turns; ratios are their medians")] = 15,
    format: FormatOption = Format.TXT,
) -> None:
    """Measure steps of a job here: time beside a bare loop, data wait, samples or tokens a second, memory, FLOP/s."""
    config, _ = load(job, override or [])
    site = read_site_folder(data) if data else SiteConfig()
    if site is None:
        raise ConfigError(f"--data: {data}: holds no site.yaml and no data list; give a site's folder")
    said = site_of(device, checkpoints or site.checkpoints)
    one = {"device": said.device, "devices": (), "nodes": None, "base": "replicated"}  # a bare loop has one device
    own = site.model_copy(update={**one, "checkpoints": said.checkpoints})
    with tempfile.TemporaryDirectory() as folder:
        found = measure(config, own, Path(folder), steps, turns).to_dict()
    typer.echo(json.dumps(found, indent=1) if format is Format.JSON else _table(found, steps, turns))


def _table(found: dict[str, Any], steps: int, turns: int) -> str:
    """Return the figures in lines of 80 characters at most."""
    lines = [
        f"{found['device']}: {turns} turns of {steps} steps"[:80],
        f"{'':28}{'s a step':>9}{'x bare (95 %)':>22}{'its CPU':>9}{'peak GiB':>10}",
    ]
    for name, way in found["ways"].items():
        seconds = sorted(way["seconds"])[len(way["seconds"]) // 2]
        ratio, *ends = found["intervals"].get(f"{name}/bare", (1.0, 1.0, 1.0))
        said = f"{ratio:.3f} ({ends[0]:.3f}-{ends[1]:.3f})" if name != "bare" else "1"
        own = f"{found['processor'][f'{name}/bare'][0]:.3f}" if f"{name}/bare" in found["processor"] else "-"
        peak = f"{way['peak_bytes'] / 2**30:.2f}" if way["peak_bytes"] else "-"
        lines.append(f"{WORDS[name]:28}{seconds:>9.4f}{said:>22}{own:>9}{peak:>10}")
    share = found["share_of_peak"]
    known = f", {share:.0%} of the device's peak" if share is not None else ""
    lines += [
        f"waits for data: {found['data_wait']:.1%} of a step",
        f"{found['per_second']:,.1f} {found['unit']} a second, {found['tflops']:.4g} TFLOP/s{known}",
    ]
    return "\n".join(lines)
