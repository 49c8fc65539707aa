"""The commands for a hospital's machines: `consilium wheels`, `service install` and `prepare`."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.options import Format, FormatOption, emit
from consilium.core.errors import ConfigError
from consilium.core.storage import PUBLIC, write_atomic
from consilium.flare.kit.install import runtime as install_runtime
from consilium.flare.kit.install import service
from consilium.flare.kit.install.wheels import SIGNATURE, WHEELS, Target, make

KitArgument = Annotated[Path, typer.Argument(help="a site's or the server's startup kit")]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def wheels(
    wheel: Annotated[Path, typer.Argument(metavar="WHEEL", help="the released wheel of this package")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the new folder to carry to the machine")],
    platform: Annotated[str, typer.Option(help="linux-x86_64 or linux-aarch64, glibc 2.28 or newer")] = "linux-x86_64",
    python: Annotated[str, typer.Option(help="the machine's Python")] = HERE,
    accelerator: Annotated[
        str, typer.Option(help="build of torch: cpu, cu128, ...; without it what the index gives, on PyPI for a recent CUDA")
    ] = "",
    extra: Annotated[list[str] | None, typer.Option(help="of this package, such as dicom; several times for several")] = None,
    links: Annotated[list[Path] | None, typer.Option(help="a folder of wheels to look into as well; repeatable")] = None,
    sign: Annotated[Path | None, typer.Option(help="kits/NAME/state, whose root key signs")] = None,
    format: FormatOption = Format.TXT,
) -> None:
    """Collect all that a machine without internet needs: wheels for it, their hashes, a bill of materials, install.sh."""
    sums = make(wheel, output, Target(platform, python, accelerator), extra or (), links or (), sign)
    found = list((output / WHEELS).iterdir())
    size = sum(path.stat().st_size for path in found)
    unsigned = f"not signed: tell the SHA-256 of {sums} by telephone, or give --sign"
    text = (
        f"{output}: {len(found)} wheels, {size / 2**20:,.0f} MiB, for {platform}, Python {python}\n"
        f"{f'signed by the root key: {sums.with_name(SIGNATURE)}' if sign else unsigned}"
    )
    emit({"folder": str(output), "wheels": len(found), "bytes": size, "signed": sign is not None}, text, format)


def install(
    kit: KitArgument,
    show: Annotated[bool, typer.Option("--print", help="print the unit and write nothing")] = False,
) -> None:
    """Write a sandboxed systemd unit for a kit; it runs as the kit's owner. Needs root. It starts nothing."""
    text, path = service.unit(kit), service.UNITS / service.file_name(kit)
    if show:
        typer.echo(text, nl=False)
        return
    if os.geteuid() != 0:
        raise ConfigError(f"{path}: only root writes there; use sudo, or --print and hand it to whom may")
    write_atomic(path, text.encode(), PUBLIC)
    path.chmod(0o644)
    typer.echo(f"{path}: written. Then: systemctl daemon-reload && systemctl enable --now {path.name}")
    typer.echo(f"its log: journalctl -u {path.name}")


def prepare(
    kit: KitArgument,
    runtime: Annotated[Path, typer.Option(help="FLARE's settings of the runtime, as provisioning/container/slurm.yaml")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the new folder of the prepared kit")],
    format: FormatOption = Format.TXT,
) -> None:
    """Prepare a kit for Docker, Kubernetes or Slurm by `nvflare deploy prepare`, and keep the kit's policies in it."""
    prepared = install_runtime.prepare(kit, runtime, output)
    emit({"kit": str(output)}, f"{prepared}: prepared, with the policies of {kit}", format)
