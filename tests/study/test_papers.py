"""The studies of the four papers against what these print: what trains, how large the data are, which numbers stand beside."""

import json
import re
import shlex
from collections.abc import Iterator
from functools import cache, reduce
from pathlib import Path
from typing import Any, cast

import pytest
import typer
import yaml

from consilium.cli.main import app
from consilium.config.job import load_job
from consilium.config.site import Given, find_site
from consilium.core.errors import DataError
from consilium.data.importers.base import Options
from consilium.estimates.communication import own_cost
from consilium.federation.job_assembly import assemble_job
from consilium.study.definition import Cell, Study, load
from tests.conftest import JOBS, run
from tests.data.importing import OUTER, import_set, mask, picture, splits_of
from tests.tools.papers import PAGE, marks, of_jobs, papers, rewritten

STUDIES = JOBS / "studies"
PAPERS = ("iat_", "fedsca_", "deer_table", "deer_figure", "fedhera_")
FEDSCA = ["fedsca_table1", "fedsca_table2_polyp", "fedsca_table2_fundus", "fedsca_table3"]
STANDS_FOR = {"NAME": "boolq", "K": "10", "N": "100", "B": "0.1"}
"""Words of `needs` whose values the sentence tells, and one of these."""
LARGE = {"alpaca": 52_000, "metamathqa": 395_000}
"""Records of sets without a published test split, as their publishers tell; a few of Alpaca's 52,002 have no output."""


@cache
def read(study: str) -> Study:
    return load(STUDIES / f"{study}.yaml")


def cells(study: str) -> list[Cell]:
    return read(study).cells()


def commands(study: str) -> Iterator[list[str]]:
    """Return the words of every `data ...` that a study needs; options alone are those of a partition."""
    for text in re.findall(r"`((?:data |--)[^`]*)`", read(study).config.needs):
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


@pytest.mark.parametrize(
    ("study", "name"),
    [("fedhera_table1", "alpaca"), pytest.param("fedhera_table14", "metamathqa", marks=pytest.mark.slow)],
)
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


@pytest.mark.parametrize("study", [FEDSCA[0], *(pytest.param(one, marks=pytest.mark.slow) for one in FEDSCA[1:])])
def test_every_method_on_adapters_of_fedscas_tables_trains_what_its_table_3_prints(study: str) -> None:
    """Zhang et al., Table 3: 56.2M for each (MiB of float32), so adapters and decoder; -F, all of SAM, has another number."""
    names = {cell.labels["method"]: cell for cell in cells(study) if not cell.labels["method"].endswith("-F")}
    assert {"FedProx", "FedRA", "FedSA", "Ours"} < names.keys()
    trained = {name: 4 * own_cost(assemble_job(cell.load(), cell.base)).trainable / 2**20 for name, cell in names.items()}
    assert trained == pytest.approx(dict.fromkeys(names, 56.2), abs=0.1)


PRINTED: dict[str, dict[str, tuple[float, float | None]]] = {
    "IAT + SOR, Table 3": {"fediat M4": (0.39, 0.55), "fedit": (0.39, 0.78)},
    "of FLoRA": {"flora": (4.35, 29.94)},
    "of FedDPA": {"feddpa T": (4.65, 8.71)},
    "of FRLoRA": {"frlora": (0.29, 21.82)},
    "FedSCA, Tables 3 and 4": {"fedprox": (56.2 * 2**18 / 1e6, None)},
    "of FedAvg-F and FedProx-F": {"fedprox": (357.4 * 2**18 / 1e6, None)},
}
"""By row of the page and method of its command, the papers' numbers: millions of parameters that train, and of up plus down."""


@pytest.mark.slow
@pytest.mark.parametrize(("row", "methods"), PRINTED.items())
def test_the_page_s_commands_of_cost_make_what_the_papers_print(
    row: str,
    methods: dict[str, tuple[float, float | None]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (JOBS / "papers.md").read_text()
    (command,) = re.findall(rf"^\| {re.escape(row)}[^|]*\| `consilium ([^`]*)`", page, re.MULTILINE)
    monkeypatch.chdir(JOBS.parent)
    assert run(monkeypatch, *shlex.split(command), "--format", "json") == 0
    found = {one["strategy"]: one for one in json.loads(capsys.readouterr().out)}
    for method, (trains, moves) in methods.items():
        assert found[method]["trainable"] / 1e6 == pytest.approx(trains, rel=2e-3, abs=0.005)
        assert moves is None or (found[method]["up"] + found[method]["down"]) / 1e6 == pytest.approx(moves, abs=0.005)


HERA = {
    "strategy.profile": "skewed", "model.max_length": 512, "adapter.rank": 64, "adapter.scaling": 16 / 8,
    "adapter.dropout": 0.05, "training.rounds": 10, "training.local_epochs": 5, "training.batch_size": 4,
    "training.optimizer": "adamw", "training.lr": 2e-5, "training.schedule": "cosine", "federation.fraction_train": 0.1,
    "federation.fraction_evaluate": 1.0,
}  # fmt: skip
IAT = {
    "model.variant": "vit_b", "model.image_size": 1024, "adapter.rank": 8, "training.rounds": 200, "training.local_epochs": 1,
    "training.batch_size": 4, "training.optimizer": "adam",
}  # fmt: skip
FEDSCA = {
    "strategy.low": 1, "strategy.similarity": "l2", "strategy.pull": 0.01, "model.image_size": 320, "task.loss": "bce",
    "training.rounds": 100, "training.local_epochs": 1, "training.batch_size": 32, "training.optimizer": "adam",
    "training.lr": 1e-4,
}  # fmt: skip
DEER = {
    "adapter.rank": 8, "adapter.alpha": 8, "training.rounds": 50, "training.optimizer": "sgd", "privacy.unit": "site",
    "privacy.adjacency": "zero-out",
}  # fmt: skip
SEGMENTS = {"training.local_steps": 3, "task.prompt": "box", "task.scores.iou": "both", "model.variant": "med2d"}
CLASSIFIES = {"training.local_steps": 5, "model.variant": "biomedclip"}
SETTINGS: dict[str, dict[str, object]] = {
    "fundus_fediat": {**IAT, "strategy.sharing": "M4", "strategy.sor_weight": 1e-4},
    "nuclei_fediat": {**IAT, "strategy.sharing": "M4", "strategy.sor_weight": 1e-4},
    "fundus_fedit": IAT,
    "nuclei_fedit": IAT,
    "polyp_fedsca": FEDSCA,
    "prostate_fedsca": FEDSCA,
    "fundus_fedsca": FEDSCA,
    "cardiac_deer": {**DEER, **SEGMENTS, "training.batch_size": 32 // 4},
    "polyp_deer": {**DEER, **SEGMENTS, "training.batch_size": 128 // 4, "privacy.epsilon": 1},
    "endoscopy_deer": {**DEER, **CLASSIFIES, "training.batch_size": round(128 / 12), "privacy.epsilon": 3},
    "oct_deer": {**DEER, **CLASSIFIES, "training.batch_size": round(512 / 12), "privacy.epsilon": 0.1},
    "gsm8k_fedhera": {**HERA, "model.checkpoint": "${SITE}/Mistral-7B-Instruct-v0.2", "task.evaluate": "exact"},
    "commonsense_fedhera": {**HERA, "model.checkpoint": "${SITE}/Llama-2-7b-hf", "task.evaluate": "label"},
    "alpaca_fedhera": {**HERA, "model.checkpoint": "${SITE}/Llama-3.2-3B-Instruct", "task.evaluate": "generation"},
    "e2e_fedhera": {**HERA, "model.checkpoint": "${SITE}/Llama-3.2-3B-Instruct", "task.evaluate": "generation"},
}
"""What the papers print: IAT + SOR, Section 4.1; FedSCA, 4.2; DEeR, V-B; FedHera, Tables 4 and 5, Appendices C and E."""
OURS = {
    "fedhera": {"strategy.allocation", "strategy.decay", "training.seed"},
    "deer": {"privacy.accountant", "privacy.clip", "privacy.delta", "task.augment", "training.seed"},
    "fedsca": {"strategy.alpha", "task.augment"},
    "fediat": {"strategy.ema", "strategy.eps", "strategy.eps_scale", "adapter.targets", "task.augment"},
    "fedit": {"adapter.targets", "task.augment"},
}
"""By a job's last word, settings that are not the paper's, although no line of the job writes some of them."""
NAMED = {
    "name", "strategy.name", "model.name", "model.variant", "model.config", "model.checkpoint", "adapter.kind", "task.name",
    "task.classes",
}  # fmt: skip
"""What makes a job the one that it is, and needs no mark."""


def written(job: str) -> set[str]:
    """Return the fields that a job.yaml writes."""

    def leaves(part: object, path: str) -> Iterator[str]:
        if not isinstance(part, dict) or path in NAMED:
            yield path
            return
        for key, value in part.items():
            yield from leaves(value, f"{path}.{key}".lstrip("."))

    return set(leaves(yaml.safe_load((JOBS / job / "app" / "config" / "job.yaml").read_text()), ""))


@pytest.mark.parametrize("job", SETTINGS)
def test_a_job_marks_what_is_the_papers_and_what_is_ours(job: str) -> None:
    """Each mark is the job's value; a paper's mark is what the paper prints; no field that the job writes lacks a mark."""
    found = marks(JOBS / job / "app" / "config" / "job.yaml")
    config = load_job(JOBS / job)
    for mark in found:
        value = reduce(getattr, mark.field.split("."), cast(Any, config))
        assert mark.value == "[...]" or yaml.safe_load(mark.value) == value or float(mark.value) == value, mark
    theirs = {mark.field for mark in found if not mark.ours}
    for field, value in SETTINGS[job].items():
        assert reduce(getattr, field.split("."), cast(Any, config)) == value, field
        assert field in theirs, field
    ours = {mark.field for mark in found if mark.ours}
    assert ours >= OURS[job.rpartition("_")[2]]
    assert not theirs & ours
    places = {mark.field: mark.why for mark in found if not mark.ours}
    assert all(re.search(r"Section|Table|Figure|Eq\.|Appendix", why) for why in places.values())
    assert written(job) - NAMED <= {mark.field for mark in found}


def test_every_job_of_a_paper_is_checked_and_the_page_has_their_tables() -> None:
    assert set(of_jobs()) == set(SETTINGS)
    page = PAGE.read_text(encoding="utf-8")
    assert page == rewritten(page), "stale; run python -m tests.tools.papers"
    assert all(f"<!-- settings of {paper} -->" in page for paper in papers())
