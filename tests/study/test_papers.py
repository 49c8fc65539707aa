"""The studies of the four papers against what these print: what trains, how large the data are, which numbers stand beside."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from consilium.cli.main import app
from consilium.config.site import Given, find_site
from consilium.core.errors import DataError
from consilium.data.importers.base import Options
from consilium.data.importers.registry import import_set
from consilium.estimates.communication import own_cost
from consilium.federation.job import assemble_job
from consilium.study.study import Cell, load
from tests.conftest import JOBS, run
from tests.data.importing import OUTER, mask, picture, splits_of

STUDIES = JOBS / "studies"
PAPERS = ("iat_", "fedsca_", "deer_table", "deer_figure", "fedhera_")
FEDSCA = ["fedsca_table1", "fedsca_table2_polyp", "fedsca_table2_fundus", "fedsca_table3"]
STANDS_FOR = {"NAME": "boolq", "K": "10", "N": "100", "B": "0.1"}
"""Words of `needs` whose values the sentence tells, and one of these."""
LARGE = {"alpaca": 52_000, "metamathqa": 395_000}
"""Records of sets without a published test split, as their publishers tell; a few of Alpaca's 52,002 have no output."""


def cells(study: str) -> list[Cell]:
    return load(STUDIES / f"{study}.yaml").cells()


def commands(study: str) -> Iterator[list[str]]:
    """Return the words of every `data ...` that a study needs; options alone are those of a partition."""
    for text in re.findall(r"`((?:data |--)[^`]*)`", load(STUDIES / f"{study}.yaml").config.needs):
        words = shlex.split(re.sub(r"\b[A-Z]+\b", lambda found: STANDS_FOR.get(found[0], found[0]), text))
        yield words if words[0] == "data" else ["data", "partition", "SOURCE", "DATA", *words]


@pytest.mark.parametrize("study", [path.stem for path in sorted(STUDIES.glob("*.yaml"))])
def test_the_data_that_a_study_needs_are_made_by_commands_that_there_are(study: str, tmp_path: Path) -> None:
    """As the command line reads them: names, options, values and their bounds, and nothing missing."""
    found = list(commands(study))
    assert found or not study.startswith(PAPERS), "says no command"
    room = typer.main.get_command(app).commands["data"]  # type: ignore[attr-defined]
    for _, verb, *words in found:
        given = room.commands[verb].make_context(verb, words).params
        if verb == "import":
            options = Options(given["validation"], given["test"], resplit=given["resplit"])
            with pytest.raises(DataError, match="no such"):
                import_set(given["name"], tmp_path / "none", tmp_path, options)


@pytest.mark.parametrize("study", [path.stem for path in sorted(STUDIES.glob("fedhera_*.yaml"))])
def test_fedheras_counts_are_all_records_cut_at_each_site(study: str) -> None:
    """Xiao et al., Appendix C.3: all of a set is dealt out, then 0.8 / 0.1 / 0.1."""
    for cell in cells(study):
        counts, name = cell.counts, cell.labels.get("data", "")
        assert counts is not None
        total = counts.training + counts.validation + counts.test
        assert [counts.training, counts.validation, counts.test] == pytest.approx(
            [0.8 * total, 0.1 * total, 0.1 * total], rel=1e-3
        )
        if size := LARGE.get({"fedhera_table10": "alpaca", "fedhera_table14": "metamathqa"}.get(study, name)):
            assert total == size


@pytest.mark.parametrize(("study", "name"), [("fedhera_table1", "alpaca"), ("fedhera_table14", "metamathqa")])
def test_no_record_is_lost_on_the_way_to_the_sites(
    study: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A set without a published test split, by the study's own commands: ten records a site, eight to train on."""
    (tmp_path / "SOURCE").mkdir()
    answers = {
        "alpaca": [{"instruction": f"do {i}", "input": "", "output": "done"} for i in range(1000)],
        "metamathqa": [
            {"query": f"ask {i}", "response": "1\nThe answer is: 1", "type": "GSM", "original_question": str(i)}
            for i in range(1000)
        ],
    }
    file = {"alpaca": "alpaca_data.json", "metamathqa": "MetaMathQA-395K.json"}[name]
    (tmp_path / "SOURCE" / file).write_text(json.dumps(answers[name]))
    monkeypatch.chdir(tmp_path)
    for words in list(commands(study))[:2]:
        assert run(monkeypatch, *words) == 0
    capsys.readouterr()
    lines = {
        split: sum(f.read_text().count("\n") for f in Path("DATA").rglob(f"{split}.jsonl"))
        for split in ("training", "validation", "test")
    }
    assert lines == {"training": 800, "validation": 100, "test": 100}


def test_deers_table_3_trains_at_four_even_sites_and_tests_each_set_at_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zhu et al., IV-A: sets that only test, scored each on its own. Here 22 pictures and five sets."""
    trains = [*(f"{n}" for n in range(11)), *(f"cju{n}" for n in range(11))]
    tests = [f"TESTS/TestDataset/{name}/" for name in ("CVC-300", "CVC-ClinicDB", "CVC-ColonDB", "ETIS-LaribPolypDB", "Kvasir")]
    for place, letter, names in [("TRAIN/TrainDataset/", "", trains), *((one, "s", ["50", "51"]) for one in tests)]:
        for name in names:
            picture(tmp_path / f"{place}image{letter}/{name}.png")
            mask(tmp_path / f"{place}mask{letter}/{name}.png", {255: OUTER})
    monkeypatch.chdir(tmp_path)
    for words in commands("deer_table3"):
        assert run(monkeypatch, *words) == 0
    data = Path("DATA")
    alone = {path.name: find_site(path.name, Given(data)).test_only for path in data.iterdir() if path.is_dir()}
    splits = {name: {split: len(items) for split, items in splits_of(data, name).items()} for name in alone}
    for name in ("cvc-clinicdb", "cvc-colondb", "etis-laribpolypdb", "kvasir-seg"):
        assert alone.pop(name)
        assert splits.pop(name) == {"training": 0, "validation": 0, "test": 2}
    assert list(alone.values()) == [False] * 4
    trained = [one["training"] for one in splits.values()]
    assert sum(trained) == 22
    assert max(trained) - min(trained) <= 2, "two frames of a run stay together"
    assert not any(one["validation"] or one["test"] for one in splits.values())


@pytest.mark.slow
def test_fedscas_figure_7_has_its_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the validation split by round, of which the study's import keeps some."""
    imported = next(commands("fedsca_figure7"))
    assert float(imported[imported.index("--validation") + 1]) > 0
    assert run(monkeypatch, "study", "run", "fedsca_figure7", "--smoke", "--workspace", tmp_path / "runs") == 0
    words = ("--smoke", "--workspace", tmp_path / "runs", "--metric", "iou", "--pictures", tmp_path / "pictures")
    assert run(monkeypatch, "compare", "fedsca_figure7", *words) == 0
    assert (tmp_path / "pictures/curves.png").is_file()


@pytest.mark.parametrize("study", FEDSCA)
def test_every_method_on_adapters_of_fedscas_tables_trains_what_its_table_3_prints(study: str) -> None:
    """Zhang et al., Table 3: 56.2M for each (MiB of float32), so adapters and decoder; -F, all of SAM, has another number."""
    names = {cell.labels["method"]: cell for cell in cells(study) if not cell.labels["method"].endswith("-F")}
    assert {"FedProx", "FedRA", "FedSA", "Ours"} < names.keys()
    trained = {name: 4 * own_cost(assemble_job(cell.load(), cell.base)).trainable / 2**20 for name, cell in names.items()}
    assert trained == pytest.approx(dict.fromkeys(names, 56.2), abs=0.1)


PRINTED = [
    ("IAT + SOR, Table 3", "fediat M4", (0.39, 0.55)),
    ("IAT + SOR, Table 3", "fedit", (0.39, 0.78)),
    ("of FLoRA", "flora", (4.35, 29.94)),
    ("of FedDPA", "feddpa T", (4.65, 8.71)),
    ("of FRLoRA", "frlora", (0.29, 21.82)),
    ("FedSCA, Tables 3 and 4", "fedprox", (56.2 * 2**18 / 1e6, None)),
    ("of FedAvg-F and FedProx-F", "fedprox", (357.4 * 2**18 / 1e6, None)),
]
"""A row of the page, a method of its command, and what the papers print: millions that train, and of up plus down."""


@pytest.mark.slow
@pytest.mark.parametrize(("row", "method", "printed"), PRINTED)
def test_the_page_s_commands_of_cost_make_what_the_papers_print(
    row: str,
    method: str,
    printed: tuple[float, float | None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (JOBS / "README.md").read_text()
    (command,) = re.findall(rf"^\| {re.escape(row)}[^|]*\| `consilium ([^`]*)`", page, re.MULTILINE)
    monkeypatch.chdir(JOBS.parent)
    assert run(monkeypatch, *shlex.split(command), "--format", "json") == 0
    found = {one["strategy"]: one for one in json.loads(capsys.readouterr().out)}[method]
    trains, moves = printed
    assert found["trainable"] / 1e6 == pytest.approx(trains, rel=2e-3, abs=0.005)
    assert moves is None or (found["up"] + found["down"]) / 1e6 == pytest.approx(moves, abs=0.005)
