"""The command `consilium data phantoms`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from consilium.cli.options import FormatOption, check_finite, emit
from consilium.core.errors import ConfigError
from consilium.data.synthetic.phantoms import KINDS, check_own, make_phantoms
from consilium.federation.simulated_sites import MOST_SITES


def data_phantoms(
    folder: Annotated[Path, typer.Argument(help="folder for a folder per site")],
    kind: Annotated[
        str, typer.Option(help="kind of data: fundus, nuclei, organ (volumes with a lesion), cells, sentences or codes")
    ] = "fundus",
    sites: Annotated[int, typer.Option(min=1, max=MOST_SITES)] = 3,
    files: Annotated[
        Literal["nifti", "dicom", "png"] | None,
        typer.Option(help="file format of volumes; png: a file per slice"),
    ] = None,
    training: Annotated[int, typer.Option(min=1, max=100_000)] = 24,
    validation: Annotated[int, typer.Option(min=0, max=100_000)] = 8,
    test: Annotated[int, typer.Option(min=0, max=100_000)] = 16,
    size: Annotated[int, typer.Option(min=16, max=4096, help="side of a picture in pixels")] = 128,
    appearance: Annotated[
        float, typer.Option(min=0, max=1, help="how much the pictures' appearance differs between sites")
    ] = 0.7,
    annotation: Annotated[float, typer.Option(min=0, max=1, help="how much the annotation differs between sites")] = 0.7,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    format: FormatOption = "txt",
) -> None:
    """Generate data of sites that differ in appearance and annotation, for `consilium simulate --data FOLDER`."""
    check_finite(appearance=appearance, annotation=annotation)
    if kind not in KINDS:
        raise ConfigError(f"--kind: {kind!r} is not one of {', '.join(KINDS)}")
    if files and kind != "organ":
        raise ConfigError("--files: only volumes are written in several ways; add --kind organ")
    names = [f"site-{i}" for i in range(1, sites + 1)]
    for name in names:
        check_own(folder / name)
    shifts = (appearance, annotation)
    how = (seed, training, validation, test, size, *shifts, files or "nifti")
    lists = [str(make_phantoms(folder / name, kind, name, *how)) for name in names]
    emit(lists, lists, format)
