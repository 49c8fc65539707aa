"""A hospital after a job on real kits: its own page, its own DICOM predicted by its own model, and nothing of it elsewhere.

One site runs closed, as in a container: its machine is read-only, and its processes have no capability.
"""

import subprocess
from pathlib import Path

import pytest

from consilium.config.job import load_job
from consilium.federation.runs import STATE
from tests.conftest import JOBS, run
from tests.data.marked import MARK, holding, hospitals, pydicom
from tests.deployment.federation import Federation

pytestmark = pytest.mark.slow
SEGMENTATION = "1.2.840.10008.5.1.4.1.1.66.4"
"""The SOP class of DICOM-SEG (PS3.6)."""
SMALL = {"data": {}, "federation.min_sites": 2, "training.rounds": 1, "model.image_size": 64, "training.batch_size": 2}


def test_a_hospital_reads_predicts_and_keeps_what_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lists = hospitals(tmp_path / "pacs")
    sites = {name: {"datalist": str(path)} for name, path in lists.items()}
    with Federation(tmp_path / "hub", sites, closed=["site-1"] if _may_close() else []) as federation:
        federation.start()
        assert all(map(_is_closed, federation.processes("site-1") if federation.closed else ()))
        job = federation.submit(federation.export(load_job(JOBS / "quickstart_dicom", SMALL)))
        assert federation.wait(job, 240) == "FINISHED:COMPLETED"
        name, kit = federation.server_files().name, federation.kit("site-1")
        server = [federation.kit("server"), tmp_path / "hub/server-state", federation.download(job)]
        federation.shutdown()
        _logs_name_the_run_and_no_data(federation, job, tmp_path / "pacs")
    _nothing_of_a_patient(server, tmp_path / "pacs")
    runs, series = kit / STATE / "runs" / name, tmp_path / "pacs/site-1/images"
    assert run(monkeypatch, "report", runs, "--site", "site-1", "-o", tmp_path / "own.html") == 0
    page = (tmp_path / "own.html").read_text()
    assert page.count("data:image/jpeg") >= 4
    assert "Messages that left this site" in page
    words = ("predict", runs, series, "--site", "site-1", "--stage", "personalized", "-o", tmp_path / "masks")
    assert run(monkeypatch, *words) == 0, capsys.readouterr()
    _check_masks(tmp_path / "masks", series)


def _logs_name_the_run_and_no_data(federation: Federation, job: str, pacs: Path) -> None:
    """All that server and sites have printed or logged: no patient, no file and no folder of the data; the job by its id."""
    for name in ("server", *federation.sites):
        logs = [path for word in ("*log*.txt", "*log*.json", "audit.log") for path in federation.kit(name).rglob(word)]
        assert {"log.txt", "log.json", "audit.log"} <= {path.name for path in logs}
        text = federation.log(name) + "\n".join(path.read_text(errors="replace") for path in logs)
        assert f"run={job}" in text
        assert [word for word in (MARK, "Zyxwv", "Qqjohanna", str(pacs), ".dcm", "datalist") if word in text] == []


def _may_close() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


def _is_closed(process: int) -> bool:
    """Tell whether a process has a read-only machine and no capability, and may get none."""
    status = Path(f"/proc/{process}/status").read_text()
    mounts = [line.split()[4:6] for line in Path(f"/proc/{process}/mountinfo").read_text().splitlines()]
    (options,) = [options for place, options in mounts if place == "/"]
    return "ro" in options.split(",") and "CapEff:\t0000000000000000" in status and "NoNewPrivs:\t1" in status


def _nothing_of_a_patient(folders: list[Path], pacs: Path) -> None:
    """No name, no UID, no row of pixels, no picture."""
    assert len(holding(pacs)) > 20
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "results.json" for path in files)
    assert [found for folder in folders for found in holding(folder)] == []
    assert not [path for path in files if path.suffix in (".dcm", ".jpg", ".jpeg", ".nii") or path.name == "cases.json"]
    contents = [path.read_bytes() for path in files]
    for image in [path for path in pacs.rglob("*.dcm") if pydicom.dcmread(path).Modality != "SEG"][:20]:
        pixels = pydicom.dcmread(image).pixel_array
        row = pixels[pixels.shape[0] // 2].tobytes()
        assert not any(row in content for content in contents)


def _check_masks(masks: Path, series: Path) -> None:
    """One DICOM-SEG for every series, of its patient and its frame of reference."""
    found = [pydicom.dcmread(path) for path in sorted(masks.rglob("*.dcm"))]
    images = [pydicom.dcmread(path, stop_before_pixels=True) for path in series.rglob("*.dcm")]
    known = {one.SeriesInstanceUID: one.FrameOfReferenceUID for one in images if one.Modality != "SEG"}
    assert {str(one.SOPClassUID) for one in found} == {SEGMENTATION}
    assert {one.ReferencedSeriesSequence[0].SeriesInstanceUID for one in found} == known.keys()
    assert all(MARK in one.PatientID and one.FrameOfReferenceUID in known.values() for one in found)
