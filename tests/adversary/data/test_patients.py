"""One patient in many spellings is one patient everywhere; what nobody sees is refused; what is nearly equal is named."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consilium.client.build import build_guard, build_site
from consilium.client.site_data import count_units
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import DataError
from consilium.data import volumes
from consilium.data.check import check_datalist, check_texts
from consilium.data.datalist import SPLITS, DataList, read_datalist
from consilium.data.importers.base import Options
from consilium.data.importers.table import read_table
from consilium.data.importers.write_datalists import arrange_by_site
from consilium.data.partition import share_out, split_list
from consilium.data.patients import patients_and_most_samples, training_indices_by_patient
from consilium.data.planes_and_tiles import expand
from consilium.data.stats import site_stats, tally
from consilium.data.text import read_texts
from consilium.federation.job_assembly import assemble_job
from consilium.use.attack import draw_units
from tests.adversary.data.lists import data_check, one_line, picture, write_list
from tests.conftest import small_cells, training_only
from tests.data.writing import write

SEEN = (
    "M\u00fcller^Zo\u00eb 17",  # composed
    "Mu\u0308ller^Zoe\u0308 17",  # letters and marks apart
    "\uff2d\u00fcller^Zo\u00eb 17",  # a full-width letter
    "M\u00fcller^Zo\u00eb \uff11\uff17",  # full-width digits
    "M\u00fcller^Zo\u00eb \u0661\u0667",  # Arabic digits
    " M\u00fcller^Zo\u00eb 17\t",
    "M\u00fcller^Zo\u00eb  17",
    "M\u00fcller^Zo\u00eb\u00a017",  # a blank where no line may break
    "M\u00fcller^Zo\u00eb 17^^",  # DICOM PS3.5, 6.2.1: empty components at the end may be left out
    "M\u00fcller ^Zo\u00eb 17==",
)
"""One patient, as hospitals' systems write it; all of it is seen."""
UNSEEN = {
    "M\u00fcller^Zo\u00eb\u200b 17": "U+200B ZERO WIDTH SPACE as its character 11",
    "M\u00fcller^Zo\u00eb\0 17": "U+0000",
    "\ufeffM\u00fcller^Zo\u00eb 17": "U+FEFF",
    "M\u00fcller^Zo\u00eb\u00ad 17": "U+00AD SOFT HYPHEN",
    "M\u00fcller^Zo\u00eb 17\u200f": "U+200F",
    "M\u00fcller^Zo\u00eb 17\ufe0f": "U+FE0F",
}
"""The same with a character that nobody sees, and what is said of it."""
OTHER = "M\u00fcller^Zo\u00eb 18"
ONE_AND_ANOTHER = (*SEEN, OTHER)


def entries(folder: Path, *patients: Any) -> list[dict[str, Any]]:
    """Write a picture for each and return the entries of a list, of two classes in turn."""
    made = []
    for number, who in enumerate(patients):
        picture(folder / f"{number}.png")
        made.append({"image": f"{number}.png", "label": number % 2, "patient": who})
    return made


def private() -> JobConfig:
    """Return a job that hides patients."""
    privacy = {"unit": "patient", "epsilon": 8, "per_patient": 2}
    return JobConfig.model_validate(training_only(small_cells("fedit")).model_dump() | {"privacy": privacy, "data": {}})


def assert_two(data: DataList) -> None:
    """Check that a list has one patient in many samples, and another in the last."""
    count = len(data.splits["training"]) - 1
    assert training_indices_by_patient(data.splits["training"]) == (tuple(range(count)), (count,))
    assert patients_and_most_samples(data.splits["training"]) == (2, count)


def test_a_list_and_records_count_one_patient_once(tmp_path: Path) -> None:
    data = read_datalist(write_list(tmp_path, *entries(tmp_path, *ONE_AND_ANOTHER)))
    assert_two(data)
    job = private()
    assert len(set(tally(data, job.task, 8).people["training"])) == 2
    assert count_units(job, data) == 2
    notes = [{"input": str(n), "output": "x", "patient": who} for n, who in enumerate(ONE_AND_ANOTHER)]
    assert_two(read_texts(write(tmp_path / "notes", "training.jsonl", *notes)))
    numbers = entries(tmp_path, 7, "7", "\uff17", " 7")
    assert training_indices_by_patient(read_datalist(write_list(tmp_path, *numbers)).splits["training"]) == ((0, 1, 2, 3),)


@pytest.mark.slow
def test_ledger_and_training_count_the_same(tmp_path: Path) -> None:
    """The guard's plan, which the ledger charges, and the patients whom steps draw are of one list."""
    listed = entries(tmp_path, *(f"{who[:-2]} {n}{who[-2:]}" for n in range(8) for who in ("P 17", "P \uff11\uff17")))
    path = tmp_path / "datalist.json"
    path.write_text(json.dumps({"training": listed, "test": listed[:1]}))
    job, site = assemble_job(private()), SiteConfig(datalist=path)
    guard = build_guard(job, "site-1", site, tmp_path / "run", tmp_path, lambda event: None)
    assert guard.plan is not None
    trained = build_site(job, "site-1", site, tmp_path / "run", lambda event: None, data=None)
    assert len(training_indices_by_patient(trained.context.data.splits["training"])) == 8
    assert guard.plan.event.sample_rate == pytest.approx(min(1.0, private().training.batch_size / 8))


def test_dicom_files_of_one_patient_are_of_one(tmp_path: Path) -> None:
    """Hidden characters too: nobody can take them out of a file, and they make no second patient."""
    dicoms = pytest.importorskip("tests.data.dicoms")
    names = [*(who for who in SEEN if "\t" not in who), *UNSEEN, OTHER]
    for number, who in enumerate(names):
        made = dicoms.image(np.zeros((4, 4), np.uint8), SpecificCharacterSet="ISO_IR 192")
        made.PatientName, made.PatientID = who, ""
        made.StudyInstanceUID = f"1.2.{number}"
        dicoms.save(made, tmp_path / f"{number}.dcm")
    listed = [{"image": f"{n}.dcm", "label": 0} for n in range(len(names))]
    data = expand(read_datalist(write_list(tmp_path, *listed)))
    assert_two(data)
    for number, who in enumerate(names):
        made = dicoms.image(np.zeros((4, 4), np.uint8), SpecificCharacterSet="ISO_IR 192", PatientID=who)
        dicoms.save(made, tmp_path / f"{number}.dcm")
    volumes.drop_caches()
    assert_two(expand(read_datalist(tmp_path / "datalist.json")))


def test_a_table_and_what_is_cut_from_it_know_one_patient(tmp_path: Path) -> None:
    """Import, split, partition, statistics and attack: no sample of the patient is apart from the others."""
    listed = entries(tmp_path, *SEEN[:5], *SEEN[6:], *(f"other {n}" for n in range(12)))
    lines = [f"{one['image']},a,{one['patient']}" for one in listed]
    (tmp_path / "table.csv").write_text("\n".join(["image,label,patient", *lines]), encoding="utf-8")
    sites, _ = arrange_by_site(read_table(tmp_path / "table.csv", Options()).samples, "csv", Options(validation=0.3, test=0.3))
    mine = set(range(len(SEEN) - 1))
    for splits in sites.values():
        held = [{int(one.image.stem) for one in samples} & mine for samples in splits.values()]
        assert sorted(map(len, held)) == [0, 0, len(mine)]
    path = write_list(tmp_path, *(one | {"label": 0} for one in listed))
    split_list(path, tmp_path / "cut", validation=0.3, test=0.3)
    data = read_datalist(tmp_path / "cut/datalist.json")
    assert sum(any(int(i.image.stem) in mine for i in data.splits[s]) for s in SPLITS) == 1
    whole = read_datalist(path)
    assert site_stats(whole)["patients"] == 13
    shared = share_out(whole.splits, ["0"], ["site-1", "site-2"], None, 0, 1)
    assert sum(any(int(i.image.stem) in mine for i in found["training"]) for found in shared.values()) == 1
    apart = {"training": whole.splits["training"][:5], "validation": (), "test": whole.splits["training"][5:]}
    trained = {(str(item.image), item.name) for item in apart["training"]}
    with pytest.raises(DataError, match="1 patients are in training and in another split"):
        draw_units(DataList(path, apart), trained, by_patient=True)


@pytest.mark.parametrize("who", UNSEEN, ids=lambda who: ascii(who))
def test_what_nobody_sees_is_refused_where_somebody_wrote_it(who: str, tmp_path: Path) -> None:
    """A list, records and a table are refused in a line that has the place and the code point, and nothing of the patient."""
    path = write_list(tmp_path, *entries(tmp_path, "a", who))
    (tmp_path / "table.csv").write_text(f"image,label,patient\n0.png,a,b\n1.png,a,{who}", encoding="utf-8")
    notes = write(tmp_path / "notes", "training.jsonl", {"input": "a", "output": "b", "patient": who})
    reads: dict[str, Callable[[], object]] = {
        f"{path}: training[1]": lambda: read_datalist(path),
        f"{tmp_path / 'table.csv'}: line 3": lambda: read_table(tmp_path / "table.csv", Options()),
        f"{notes}/training.jsonl:1": lambda: read_texts(notes),
    }
    for place, read in reads.items():
        with pytest.raises(DataError) as caught:
            read()
        text = one_line(str(caught.value))
        assert text.startswith(f"{place}: patient has {UNSEEN[who]}")
        assert "take it out" in text
        assert "ller" not in text


def test_data_check_names_every_hidden_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_list(tmp_path, *entries(tmp_path, *UNSEEN, "a"))
    assert data_check(monkeypatch, path) == 1
    shown = capsys.readouterr().out
    assert f"{len(UNSEEN)} x hidden character" in shown
    assert all(f"training[{n}]: patient has U+" in shown for n in range(len(UNSEEN)))


NEARLY = ("P-017", "p17", "P_017", "p 17.", "P17")
APART = ("P18", "P170", "P1 7 1", "Q17")


@pytest.mark.slow
def test_nearly_equal_patients_are_named_by_their_samples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`data check` and the site's own log say which samples to look at, and no identifier; they stay different patients."""
    path = write_list(tmp_path, *entries(tmp_path, *NEARLY, *APART))
    (kind, (line,)) = next((k, v) for k, v in check_datalist(path).warnings.items() if "differ by case" in k)
    assert all(f"training: {n}.png" in line for n in range(len(NEARLY)))
    assert not [n for n in range(len(NEARLY), len(NEARLY) + len(APART)) if f"{n}.png" in line]
    assert not [who for who in NEARLY if who in line + kind]
    data = read_datalist(path)
    assert len(training_indices_by_patient(data.splits["training"])) == len(NEARLY) + len(APART)
    notes = [{"input": str(n), "output": "x", "patient": who} for n, who in enumerate((*NEARLY, *APART))]
    told = check_texts(write(tmp_path / "notes", "training.jsonl", *notes)).warnings
    assert [len(lines) for kind, lines in told.items() if "differ by case" in kind] == [1]
    site, events = SiteConfig(datalist=path), []
    with caplog.at_level(logging.WARNING):
        build_site(assemble_job(private()), "site-1", site, tmp_path / "run", events.append)
    (record,) = [one for one in caplog.records if "differ by case" in one.getMessage()]
    assert record.name.startswith("consilium.data")  # on kits these go to the site's private file: flare/job/private_log.py
    assert "0.png" in record.getMessage()
    assert not [event for event in events if "differ by case" in json.dumps(event, default=str)]


def test_patients_of_other_names_are_not_warned_of(tmp_path: Path) -> None:
    path = write_list(tmp_path, *entries(tmp_path, *APART, "", "10", "01", "100"))
    assert not [kind for kind in check_datalist(path).warnings if "differ by case" in kind]
