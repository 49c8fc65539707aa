"""What a run keeps is what its table scored, and a folder that is not whole is refused in one line."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from consilium.client.model_store import write_shared_model
from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import CheckpointError, ConfigError, ConsiliumError
from consilium.core.messages import SiteInfo, Stage
from consilium.core.storage import save_state
from consilium.federation.job_assembly import assemble_job, build_task
from consilium.federation.model_card import Card, page
from consilium.federation.saved_model import (
    CARD,
    SavedModel,
    read_adapter_folder,
    read_best,
    save_if_best,
    write_adapter_folder,
)
from consilium.report.run_record import cell_folder
from consilium.runtime.engine import simulate
from consilium.server.coordinator import Coordinator
from consilium.server.run_start import check_start_folder, server_start
from consilium.use.model import TrainedModel, adapter_folder, open_model
from tests.conftest import small_config
from tests.use.conftest import SITES


def dice(opened: TrainedModel, folder: Path, site: str) -> float:
    task = build_task(opened.config, load_site_data(opened.config, site, SiteConfig(), folder))
    return task.evaluate(opened.model, "test", opened.config.training.batch_size)["dice"]


def test_every_model_that_a_run_keeps_has_the_tables_score(finished: Path, tmp_path: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    for site, stage in (("site-1", Stage.GLOBAL), ("site-1", Stage.PERSONALIZED), ("site-2", Stage.PERSONALIZED)):
        assert dice(open_model(finished, site, stage), tmp_path / site, site) == results[site][f"test/{stage}/dice"]
    assert results["site-1"]["test/global/dice"] != results["site-1"]["test/personalized/dice"]
    assert dice(open_model(finished), tmp_path / "site-2", "site-2") == results["site-2"]["test/global/dice"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["fediat", "fedsca", "fedala", "fedra", "dp_dylora", "frlora", "feddbe", {"name": "feddpa", "weighting": "fixed"}],
)
def test_the_models_of_other_algorithms_have_it_too(strategy: str | dict[str, Any], tmp_path: Path) -> None:
    simulate(assemble_job(small_config(strategy, lr=1e-2)), SITES, tmp_path / "run", lambda event: None)
    results = json.loads((tmp_path / "run/results.json").read_text())
    for stage in (Stage.GLOBAL, Stage.PERSONALIZED):
        opened = open_model(tmp_path / "run", "site-1", stage)
        assert dice(opened, tmp_path / "site-1", "site-1") == results["site-1"][f"test/{stage}/dice"]


def test_the_card_says_what_it_is_and_shows_the_tables_scores(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    site, whole = open_model(finished, "site-1").card, open_model(finished).card
    assert site.scores is not None
    assert whole.scores is not None
    assert site.scores["dice"][0] == results["site-1"]["test/global/dice"]
    each = [results[name]["test/global/dice"] for name in SITES]
    assert whole.scores["dice"][0] == pytest.approx(sum(each) / 2)
    assert list(whole.scores["dice"][1:]) == [min(each), max(each)]
    assert (whole.sites, whole.training, site.training) == (2, 8, 4)
    text = (finished / "sites/site-1/adapters/global/README.md").read_text()
    assert {"license: unknown", "base_model: sam-tiny"} <= set(text.splitlines())
    assert "Not a medical device" in text
    assert "no guarantee" in text


def test_the_global_card_has_means_over_the_sites_that_train(tmp_path: Path) -> None:
    job = assemble_job(small_config("fedit"))
    sites = {"a": SiteInfo("a", 4), "b": SiteInfo("b", 2), "aside": SiteInfo("aside", 0)}
    dices = {"a": 0.5, "b": 0.75, "aside": 0.125, "pooled": 1.0}
    results = {name: {"test/global/dice": dice} for name, dice in dices.items()}
    for scored, expected in (
        (["a", "b", "aside"], (0.625, 0.5, 0.75)),
        (["a", "pooled"], (0.75, 0.5, 1)),
        (["aside"], (0.125,) * 3),
    ):
        told = {name: results[name] for name in scored}
        log = Mock(results=told, seeded=set(), trained={"a", "b"})
        write_shared_model(tmp_path, job.config, SavedModel(job.initial, 2), sites, log, None, None)
        _, card = read_adapter_folder(tmp_path / "adapters/global")
        assert card.scores is not None
        assert tuple(card.scores["dice"]) == expected
        assert (card.sites, card.training) == (2, 6)
    log.trained = {"a", "gone"}  # of a site that has left, the number of samples is not known
    write_shared_model(tmp_path, job.config, SavedModel(job.initial, 2), sites, log, None, None)
    _, card = read_adapter_folder(tmp_path / "adapters/global")
    assert (card.sites, card.training) == (2, None)


def test_a_sites_files_are_its_users_alone(finished: Path) -> None:
    folder = finished / "sites/site-1/adapters"
    assert {p.name for p in folder.iterdir()} == {"global", "personalized", "global-best", "personalized-best"}
    assert {p.stat().st_mode & 0o077 for p in folder.rglob("*")} == {0}


def test_the_best_model_has_the_highest_score_or_the_lowest_loss_and_a_private_job_keeps_none(tmp_path: Path) -> None:
    for metric, scores, best in (("dice", [0.5, 0.7, 0.7, 0.6], 1), ("loss", [0.5, 0.2, 0.2, 0.6], 1)):
        path = tmp_path / metric
        for number, score in enumerate([*scores, float("nan"), None]):
            save_if_best(path, SavedModel({"a": torch.ones(1)}, number), small_config(), metric, score)
        found = read_best(path)
        assert found is not None
        assert (found[0].rounds, found[1]) == (best, scores[best])
    privacy = {"unit": "site", "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}
    config = type(small_config()).model_validate(small_config("ffa_lora").model_dump() | {"privacy": privacy})
    save_if_best(tmp_path / "best", SavedModel({"a": torch.ones(1)}, 1), config, "dice", 0.9)
    assert read_best(tmp_path / "best") is None


def test_names_in_a_card_are_no_markup(finished: Path) -> None:
    card = replace(open_model(finished).card, site="[x](http://e) | <b>\x1b[31m", job="# a\n# b")
    text = page(card)
    assert "<b>" not in text
    assert "\x1b" not in text
    assert "\n# b" not in text


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the shared adapter, to be damaged."""
    return Path(shutil.copytree(finished / "adapters/global", tmp_path / "adapter"))


def _changed(change: Callable[[SavedModel, Card], tuple[SavedModel, Card]]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        kept, card = change(*read_adapter_folder(folder))
        config = open_model(folder).config
        write_adapter_folder(folder, kept, kept.values, config, card)

    return write


def test_the_card_tells_what_the_forward_pass_takes_beside_the_files(copy: Path) -> None:
    def card() -> str:
        return (copy / CARD).read_text()

    plain = card()
    for changes, told in (
        ({"scaling": 2.5}, ["2.5"]),
        ({"share": 0.3125}, ["0.6875", "0.3125"]),
        ({"similar": 7919}, ["7919"]),
    ):
        _changed(lambda kept, card, changes=changes: (replace(kept, **changes), card))(copy)
        assert all(number in card() and number not in plain for number in told)
    assert SavedModel({}, 3).stored_forward_settings == {"rounds": 3, "scaling": 1.0, "share": 0.0, "similar": 0}


def _header(change: Callable[[SavedModel, Card], tuple[SavedModel, Card]]) -> Callable[[Path], None]:
    """Return what writes only the file that is opened again."""

    def write(folder: Path) -> None:
        kept, card = change(*read_adapter_folder(folder))
        save_state(
            folder / "consilium.safetensors", kept.values, {"forward": kept.stored_forward_settings, "card": asdict(card)}
        )

    return write


def _deep(folder: Path) -> None:
    deep = "[" * 200_000 + "]" * 200_000
    save_file({"a": torch.ones(1)}, folder / "consilium.safetensors", {"meta": deep, "sha256": ""})


def _nan(kept: SavedModel, card: Card) -> tuple[SavedModel, Card]:
    name = next(iter(kept.values))
    return replace(kept, values={**kept.values, name: kept.values[name] * float("nan")}), card


def _whole(kept: SavedModel, card: Card) -> tuple[SavedModel, Card]:
    return replace(kept, values={name: tensor.int() for name, tensor in kept.values.items()}), card


def _fewer(kept: SavedModel, card: Card) -> tuple[SavedModel, Card]:
    return replace(kept, values=dict(list(kept.values.items())[1:])), card


def _other_base(kept: SavedModel, card: Card) -> tuple[SavedModel, Card]:
    return kept, replace(card, base_sha256="ab" * 32)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_changed(_nan), "has NaN or Inf"),
        (_header(_whole), "is of torch.int32, no float"),
        (_header(lambda kept, card: (replace(kept, scaling=float("inf")), card)), "scaling inf: is not a finite number"),
        (_header(lambda kept, card: (replace(kept, scaling="1"), card)), "is of another version"),
        (_header(lambda kept, card: (replace(kept, share=1.5), card)), "share 1.5: is not within 0 and 1"),
        (_header(lambda kept, card: (replace(kept, share=float("nan")), card)), "share nan: is not within 0 and 1"),
        (_deep, "not a readable state file"),
        (_changed(_fewer), "does not fit its job.yaml"),
        (_changed(_other_base), "made on a base with sha256 abab.* the package's weights are here"),
        (lambda folder: (folder / "job.yaml").unlink(), r"job\.yaml"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_in_one_line(copy: Path, damage: Callable[[Path], None], said: str) -> None:
    damage(copy)
    with pytest.raises(ConsiliumError, match=f"^[^\n]*{said}[^\n]*$"):
        open_model(copy)


@pytest.mark.parametrize(
    ("site", "stage", "said"),
    [
        ("site-9", Stage.GLOBAL, "keeps no model of it; it has: site-1, site-2"),
        ("../site-1", Stage.GLOBAL, "not a site's name"),
        (None, Stage.PERSONALIZED, "no such model; there is: global"),
        ("site-1", Stage.PRETRAINED, "there is: global, global-best, personalized, personalized-best"),
    ],
)
def test_a_model_that_is_not_there_is_named_with_those_that_are(
    finished: Path, site: str | None, stage: Stage, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        open_model(finished, site, stage)


def test_an_adapter_folder_is_no_other_model_than_asked_for(finished: Path) -> None:
    last, best = (finished / "sites/site-1/adapters" / name for name in ("personalized", "personalized-best"))
    for folder, stage, wanted in ((last, Stage.PERSONALIZED, False), (best, Stage.PERSONALIZED, True), (best, None, True)):
        assert adapter_folder(folder) == adapter_folder(folder, None, stage, wanted) == folder
    assert adapter_folder(finished) == finished / "adapters/global"
    with pytest.raises(ConfigError, match=r"--site x: .* is one adapter, not a run; leave the site out"):
        adapter_folder(last, "x")
    for folder, stage, wanted, said in (
        (last, Stage.GLOBAL, False, "--stage global: .* is one adapter, 'personalized'; leave --stage and --best out"),
        (last, None, True, "--best: .* is one adapter, 'personalized'"),
        (best, Stage.PERSONALIZED, False, "is one adapter, 'personalized-best'"),
    ):
        with pytest.raises(ConfigError, match=said):
            adapter_folder(folder, None, stage, wanted)


def test_a_run_goes_on_from_an_adapter(finished: Path, tmp_path: Path) -> None:
    folder = finished / "adapters/global"
    raw = small_config("fediat", rounds=1).model_dump()
    raw["adapter"]["start"] = str(folder)
    job = assemble_job(type(small_config()).model_validate(raw))
    begun = Coordinator(job, tmp_path / "next", lambda event: None)
    begun.close()
    kept = load_file(folder / "consilium.safetensors")
    assert all(torch.equal({**begun.state.shared, **begun.state.initial}[name], tensor) for name, tensor in kept.items())
    assert begun.checkpoint == ""
    lines = [json.loads(text) for text in (tmp_path / "next/metrics.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["event"] == "start"]
    assert len(line["adapter_sha256"]) == 64


@pytest.mark.parametrize(
    ("section", "changed", "said"),
    [
        ("adapter", {"rank": 2, "alpha": 2}, "has shape .* this job's is"),
        ("adapter", {"alpha": 8}, "multiplies its products by 1, this job by 2"),
        ("adapter", {"targets": "encoder-qkv"}, "has .* which this job's adapter lacks"),
        ("model", {"variant": "vit_b"}, "is of base 'sam-tiny', this job's is 'sam-vit_b'"),
        ("adapter", {"start": "nowhere"}, "no consilium.safetensors there"),
        ("adapter", {"start": "${SITE}/a"}, "needs the server's checkpoint folder"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(finished: Path, section: str, changed: dict[str, Any], said: str) -> None:
    raw = small_config("fedit").model_dump()
    raw["adapter"]["start"] = str(finished / "adapters/global")
    raw[section] |= changed
    with pytest.raises((ConfigError, CheckpointError), match=said):
        server_start(assemble_job(type(small_config()).model_validate(raw)), SiteConfig())


def test_a_submitter_gets_no_adapter_from_outside_the_servers_checkpoint_folder(finished: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(finished / "adapters/global", checkpoints / "shared")
    (checkpoints / "link").symlink_to(finished / "adapters")
    own, raw = SiteConfig(checkpoints=checkpoints), small_config("fedit").model_dump()
    for start in (
        str(finished / "adapters/global"),
        "${SITE}/../run/adapters/global",
        "${SITE}/link/global",
        "adapters/global",
    ):
        raw["adapter"]["start"] = start
        with pytest.raises(ConfigError, match="not in the server's checkpoint folder"):
            check_start_folder(JobConfig.model_validate(raw), own)
    raw["adapter"]["start"] = str(checkpoints / "shared")
    with pytest.raises(ConfigError, match="not in the server's checkpoint folder"):
        check_start_folder(JobConfig.model_validate(raw), SiteConfig())
    raw["adapter"]["start"] = "${SITE}/shared"
    check_start_folder(JobConfig.model_validate(raw), own)


def test_a_run_of_a_study_is_named_by_its_values(finished: Path, tmp_path: Path) -> None:
    for cell, labels in (("a1", {"method": "FedIT", "seed": "0"}), ("b2", {"method": "IAT + SOR", "seed": "0"}), ("c3", None)):
        (tmp_path / "study/cells").mkdir(parents=True, exist_ok=True)
        (tmp_path / "study/cells" / cell).symlink_to(finished)
        if labels:
            (tmp_path / "study/cells" / cell).unlink()
            shutil.copytree(finished / "adapters", tmp_path / "study/cells" / cell / "adapters")
            (tmp_path / "study/cells" / cell / "results.json").write_text("{}")
            (tmp_path / "study/cells" / cell / "cell.json").write_text(json.dumps({"labels": labels}))
    found = adapter_folder(tmp_path / "study/method=IAT + SOR, seed=0")
    assert found == tmp_path / "study/cells/b2/adapters/global"
    assert cell_folder(tmp_path / "study/cells/a1") == tmp_path / "study/cells/a1"
    for wrong in ("study", "study/method=FedIT", "study/seed=1"):
        with pytest.raises(ConfigError, match=r"which run of the study\? .*method=FedIT,seed=0, method=IAT \+ SOR,seed=0$"):
            adapter_folder(tmp_path / wrong)
    (tmp_path / "study").rename(tmp_path / "study-small")
    with pytest.raises(
        ConfigError, match=r"a smaller size has its own folder; if it ran, give .*/study-small/method=FedIT,seed=0$"
    ):
        adapter_folder(tmp_path / "study/method=FedIT,seed=0")
