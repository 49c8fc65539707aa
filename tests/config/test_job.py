"""job.yaml and site.yaml: what is accepted, and one line that names file, field, value and remedy for the rest."""

import re
from pathlib import Path

import pytest
import yaml

from consilium.config.job import JobConfig, load_job
from consilium.config.site import Given, find_site, load_site, read_site_folder
from consilium.core.errors import ConfigError
from consilium.federation.job_assembly import assemble_job
from consilium.strategies.fediat import FedIAT
from consilium.strategies.registry import STRATEGIES
from tests.conftest import JOBS, small_cells, small_config


def written(folder: Path, **changes: object) -> Path:
    raw = small_config().model_dump()
    for field, value in changes.items():
        section, _, key = field.partition("__")
        if key:
            raw[section][key] = value
        else:
            raw[section] = value
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.mark.parametrize("path", sorted(JOBS.glob("*/app/config/job.yaml")), ids=lambda p: p.parts[-4])
def test_every_job_of_the_project_is_valid(path: Path) -> None:
    config = load_job(path)
    assemble_job(config, path)
    assert config.name == path.parts[-4]
    assert load_job(path.parents[2]) == config


def test_a_study_is_not_a_job_and_the_message_names_its_base(tmp_path: Path) -> None:
    study = JOBS / "studies" / "my_images.yaml"
    with pytest.raises(ConfigError) as error:
        load_job(study, {"training.lr": 0.1}, author=True)
    said = re.fullmatch(
        r".*my_images\.yaml: is a study's file, not a job; give its base job instead, (\S+); its `set:` values go to --set",
        str(error.value),
    )
    assert said
    values = yaml.safe_load(study.read_text())["set"]
    assert load_job(Path(said[1]), values, author=True).task.classes == {"object": [1, 255]}
    (tmp_path / "mine.yaml").write_text("base: job\naxes: {}\n")
    with pytest.raises(ConfigError, match=r"give its base job instead, \S+job$"):
        load_job(tmp_path / "mine.yaml")


def test_classes_as_names_number_themselves() -> None:
    raw = small_config().model_dump() | {"task": {"classes": ["disc", "cup"]}}
    assert JobConfig.model_validate(raw).task.classes == {"disc": [1], "cup": [2]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training__lr": -1}, r"training\.lr: -1: expected greater than 0"),
        ({"training__learning_rate": 3}, r"training\.learning_rate: unknown field; write training\.lr instead$"),
        ({"training__num_rounds": 3}, r"training\.num_rounds: unknown field; write training\.rounds instead$"),
        ({"adapter__r": 3}, r"adapter\.r: unknown field; write adapter\.rank instead$"),
        ({"adapter__lora_alpha": 3}, r"adapter\.lora_alpha: unknown field; write adapter\.alpha instead$"),
        ({"adapter": {"rank": 0}}, r"^[^\n]*adapter\.rank: 0: expected greater than or equal to 1$"),
        ({"task__classes": [["a"]]}, r"task\.classes: \[\['a'\]\]: expected a map, such as"),
        ({"task__classes": ["a", "a"]}, r"task\.classes: .*every class once; 'a'"),
        ({"federation__rounds": 3}, r"federation\.rounds: unknown field; write training\.rounds instead$"),
        ({"training__rouds": 3}, r"training\.rouds: unknown field; write training\.rounds instead$"),
        ({"model__variant": "vit_x"}, r"model\.variant: 'vit_x': expected 'tiny', 'vit_b'"),
        ({"training": {"lr": 0.1}}, r"training\.rounds: missing; add it"),
        ({"task__classes": {"disc": ["a"]}}, r"task\.classes\.disc\.0: 'a': expected a whole number"),
        ({"name": "a b"}, r"name: 'a b': "),
        ({"training": 5}, r"training: 5: expected a section with fields such as rounds"),
        ({"model": 5}, r"model: 5: expected a section with `name:`"),
        (
            {"model__name": "clipp"},
            r"model\.name: 'clipp': expected one of sam, clip, causal_lm, vision, text_encoder, vision_language, unet "
            r"\(did you mean 'clip'\?\); a name of another package needs it under `plugins` of site\.yaml$",
        ),
        ({"model__varant": "tiny"}, r"model\.varant: unknown field; write model\.variant instead$"),
        (
            {"model": {"name": "clip", "variant": "vit_b", "image_size": 64}},
            r"model\.variant: 'vit_b': expected 'tiny' or 'bio",
        ),
        ({"model": {"name": "clip", "variant": "tiny"}}, r"model\.image_size: missing; add it"),
        (
            {"model": {"name": "clip", "variant": "tiny", "image_size": 64}},
            r"task\.name: 'segmentation' does not fit model\.name",
        ),
        ({"task": {"name": "classification", "classes": ["a"]}}, r"task\.classes: \['a'\]: expected .*at least 2"),
        ({"task": {"name": "classification", "classes": ["a", "b", "a"]}}, r"task\.classes: .*every class once; 'a'"),
        ({"task": {"name": "classification", "classes": ["a", "b/c"]}}, r"task\.classes\.1: 'b/c'"),
        ({"data": {"phantoms": {"kind": "cells"}}}, r"data\.phantoms\.kind: 'cells' does not fit task\.name"),
        ({"data": {"phantoms": {"kind": "sentences"}}}, r"does not fit task\.name 'segmentation'; it is for language"),
        ({"model": {"name": "causal_lm", "variant": "tiny"}}, r"task\.name: 'segmentation' does not fit .*'language'"),
        ({"model": {"name": "causal_lm", "variant": "folder"}}, r"model\.checkpoint: None: expected the path of a"),
        (
            {"model": {"name": "causal_lm", "variant": "tiny", "config": {}}},
            r"model\.config: \{\}: expected none: variant 'tiny' has",
        ),
        ({"task": {"name": "language", "labels": ["a", "a"]}}, r"task\.labels: .*every label once; 'a' is there twice"),
    ],
)
def test_errors_name_file_field_value_and_remedy(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_job(written(tmp_path, **changes))
    assert str(caught.value).startswith(str(tmp_path / "job.yaml"))


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("training.learning_rate", 0.1, "training.lr"),
        ("federation.learning_rate", 0.1, "training.lr"),
        ("learning_rate", 0.1, "training.lr"),
        ("strategy.sor_wight", 0.5, "strategy.sor_weight"),
        ("strategy.values_in", "M1", ""),
        ("adapter.lora_rank", 4, "adapter.rank"),
        ("model.imagesize", 64, "model.image_size"),
        ("zzz", 3, ""),
    ],
)
def test_the_field_that_is_named_for_an_unknown_one_ends_the_complaint(
    field: str, value: object, remedy: str, tmp_path: Path
) -> None:
    path = written(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_job(path, {field: value})
    place = re.match(rf".*: ({re.escape(field.partition('.')[0])}[\w.]*): unknown field; ", str(caught.value))
    assert place
    assert "\n" not in str(caught.value)
    assert "did you mean" not in str(caught.value)
    found = re.search(r"write ([\w.]+) instead", str(caught.value))
    assert (found[1] if found else "") == remedy
    assert load_job(path, {remedy: value} if remedy else {})


@pytest.mark.parametrize("name", ["fedavgm", "FedAvgM", "fedadam", "fedyogi", "fed_opt", "fedmedian"])
def test_algorithms_that_are_a_step_of_the_server_are_named_there(name: str, tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_job(path, {"strategy": name})
    found = re.search(r"\(write strategy (\w+) and (server\.\w+) (\w+)\)", str(caught.value))
    assert found
    assert load_job(path, {"strategy": found[1], found[2]: found[3]}).strategy.name == "fedit"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training__momentum": 0.9}, r"training\.momentum: 0\.9 is of optimizer sgd, not adam; use sgd, or momentum 0$"),
        ({"federation": {"weighting": "uniform", "max_weight": 3}}, r"federation\.max_weight: 3 bounds weights, .*; use null$"),
    ],
)
def test_what_does_nothing_is_refused_in_an_authors_file_and_read_in_a_finished_run(
    changes: dict, message: str, tmp_path: Path
) -> None:
    path = written(tmp_path, **changes)
    assert load_job(path)
    with pytest.raises(ConfigError, match=message):
        load_job(path, author=True)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("fedavg", r"strategy\.name: 'fedavg': expected one of .* \(did you mean 'fedit'\?\)"),
        ("ffa", r"strategy\.name: 'ffa': expected one of .* \(did you mean 'ffa_lora'\?\)"),
        ({"name": ["fedit"]}, r"strategy\.name: \['fedit'\]: expected one of"),
        ("fedia", r"strategy\.name: 'fedia': expected one of .* \(did you mean 'fediat'\?\)"),
        ({"name": "fediat", "sharing": "M5"}, r"strategy\.sharing: 'M5': expected 'M1', 'M2', 'M3' or 'M4'"),
        ({"name": "fediat", "sor_wight": 1}, r"strategy\.sor_wight: unknown field; write strategy\.sor_weight instead$"),
        ({"name": "fediat", "ema": 1.0}, r"strategy\.ema: 1\.0: expected less than 1"),
        ({"name": "fedit", "sharing": "M1"}, r"strategy\.sharing: unknown field; remove it$"),
        ({"name": "fedprox", "rate": 2}, r"strategy\.rate: unknown field; remove it$"),  # not: write strategy instead
        ({"name": "fedit", "sor_wight": 1}, r"strategy\.sor_wight: unknown field; remove it$"),
    ],
)
def test_strategy_errors(strategy: object, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, strategy=strategy)
    with pytest.raises(ConfigError, match=message):
        assemble_job(load_job(path), path)


def test_several_problems_are_one_line_each(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(written(tmp_path, training__lr=0, training__batch_size=0))
    assert len(str(caught.value).splitlines()) == 2


def test_numbers_as_json_writes_them_are_numbers(tmp_path: Path) -> None:
    text = (JOBS / "quickstart/app/config/job.yaml").read_text()
    (tmp_path / "job.yaml").write_text(re.sub(r"strategy:.*", "strategy: {name: fediat, sor_weight: 1e-05, ema: 9E-1}", text))
    assert load_job(tmp_path / "job.yaml").strategy == FedIAT(sor_weight=1e-5, ema=0.9)


def test_files_that_are_no_jobs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no job\.yaml there"):
        load_job(tmp_path)
    (tmp_path / "job.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_job(tmp_path)
    (tmp_path / "job.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="is not a map of sections; start with `name:`, `strategy:`, `model:`"):
        load_job(tmp_path)


def test_overrides_are_validated_like_the_file() -> None:
    assert load_job(JOBS / "quickstart", {"training.rounds": 3, "strategy.sharing": "M1"}).training.rounds == 3
    with pytest.raises(ConfigError, match=r"training\.rounds: 0: .*1"):
        load_job(JOBS / "quickstart", {"training.rounds": 0})
    with pytest.raises(ConfigError, match="no section above"):
        load_job(JOBS / "quickstart", {"name.x.y": 0})


def test_a_rank_alone_does_not_change_the_scaling_a_file_sets(tmp_path: Path) -> None:
    path = written(tmp_path)  # rank 4, alpha 4
    message = r"adapter\.rank: 16: the file has alpha 4\.0, and alpha / rank scales the adapter; set adapter\.alpha too"
    with pytest.raises(ConfigError, match=message):
        load_job(path, {"adapter.rank": 16})
    assert load_job(path, {"adapter.rank": 16, "adapter.alpha": 16}).adapter.product_scaling == 1.0
    assert load_job(path, {"adapter.rank": 4}).adapter.product_scaling == 1.0
    assert load_job(path, {"adapter": {"rank": 16}}).adapter.product_scaling == 1.0
    # without alpha in the file, a rank scales by 1
    assert load_job(JOBS / "quickstart", {"adapter.rank": 16}).adapter.product_scaling == 1.0
    assert load_job(JOBS / "quickstart", {"adapter.rank": 16, "adapter.alpha": 8}).adapter.product_scaling == 0.5


LLAMA = {"model_type": "llama", "attention_dropout": 0.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter.dropout": 0.1}, r"adapter\.dropout: 0\.1 draws all masks of a batch at once"),
        ({"training.precision": "bf16"}, r"training\.precision: 'bf16' rounds a record's gradient by who is beside it"),
        ({"training.accumulate": 2}, r"training\.accumulate: cannot be over 1 with privacy\.unit record"),
        ({"privacy.noise_multiplier": 0.01}, r"privacy\.noise_multiplier: 0\.01: under 0\.05 no accountant tells it from none"),
        ({"model.config": LLAMA | {"attention_dropout": 0.1}}, r"model\.config\.attention_dropout: 0\.1 draws all masks"),
        ({"model.config": LLAMA | {"model_type": "xlnet"}}, r"model\.config\.model_type: 'xlnet': not known to keep records"),
        ({"model.config": LLAMA | {"model_type": "mixtral"}}, r"model\.config\.model_type: 'mixtral': not known to keep"),
    ],
)
def test_what_ties_records_together_is_refused_at_record_level(changes: dict, message: str) -> None:
    privacy = {"privacy": {"unit": "record", "noise_multiplier": 1.0}}
    model = {"model.variant": "folder", "model.checkpoint": "x"} if "model.config" in changes else {}
    load_job(JOBS / "quickstart_text", privacy)
    with pytest.raises(ConfigError, match=message):
        load_job(JOBS / "quickstart_text", privacy | model | changes)


def test_site_files_and_where_they_are_looked_for(tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    (local / "site.yaml").write_text("datalist: data/list.json\nshare_metrics: false\n")
    assert load_site(local / "site.yaml").datalist == local / "data/list.json"
    assert not find_site("a", kit_local=local).share_metrics
    assert find_site("a", kit_local=tmp_path).datalist is None
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "datalist.json").touch()
    given = Given(tmp_path, Path("/weights"))
    assert find_site("a", given, local).datalist == tmp_path / "a" / "datalist.json"
    assert find_site("a", given).checkpoints == Path("/weights")
    with pytest.raises(ConfigError, match=r"site\.yaml nor datalist\.json.* b"):
        find_site("b", given)
    (tmp_path / "a" / "site.yaml").write_text("device: gpu")
    with pytest.raises(ConfigError, match="device: 'gpu'"):
        find_site("a", given)


def test_a_site_without_data_or_checkpoints_says_so(tmp_path: Path) -> None:
    from consilium.client.build import build_site
    from consilium.config.site import SiteConfig

    path = written(tmp_path, data={})
    with pytest.raises(ConfigError, match=r"site-1: .*set `datalist:`"):
        build_site(assemble_job(load_job(path)), "site-1", SiteConfig(), tmp_path, lambda event: None)
    changes = {"data": {"phantoms": {"kind": "fundus", "training": 1}}, "model.image_size": 64}
    fundus = assemble_job(load_job(JOBS / "fundus_fediat", changes))
    with pytest.raises(ConfigError, match=r"model\.checkpoint: .*checkpoint folder"):
        build_site(fundus, "site-1", SiteConfig(), tmp_path, lambda event: None)


def test_yes_and_no_as_names_are_told_to_be_quoted(tmp_path: Path) -> None:
    """YAML reads them as true and false; in quotes, as the line says, they are names."""
    text = yaml.safe_dump(small_cells().model_dump(mode="json"), sort_keys=False)
    named = re.sub(r"classes:\n(  - .*\n)+", "classes: [{}]\n", text)
    path = tmp_path / "job.yaml"
    path.write_text(named.format("yes, no"))
    with pytest.raises(ConfigError, match=r"task\.classes\.0: True: expected a text; YAML reads yes.* write it in quotes"):
        load_job(path)
    path.write_text(named.format("'yes', 'no'"))
    assert load_job(path).task.classes == ["yes", "no"]


def test_a_folder_of_data_may_hold_settings_of_the_site_too(tmp_path: Path) -> None:
    """A site.yaml that names no data list changes nothing about which list is used, and its other settings count."""
    (tmp_path / "training.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "site.yaml").write_text("capacity: {train: 2, download: 4}\n")
    site = read_site_folder(tmp_path)
    assert site is not None
    assert site.datalist == tmp_path
    assert site.capacity is not None
    assert site.capacity.train == 2
    (tmp_path / "site.yaml").write_text("datalist: other.json\n")
    site = read_site_folder(tmp_path)
    assert site is not None
    assert site.datalist == tmp_path / "other.json"


@pytest.mark.parametrize(
    ("field", "value"),
    [("task.classes", "nucleus"), ("task.classes", 3), ("data", "/pictures"), ("training", 5), ("training.rounds", "four"),
     ("training.lr", [1]), ("task.augment", "perhaps"), ("federation", ["a"]), ("model.image_size", 64.5), ("name", 3)],
)  # fmt: skip
def test_a_value_of_another_kind_is_told_without_pythons_words(field: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(written(tmp_path), {field: value})
    said = str(caught.value)
    assert f"{field}: {value!r}: expected " in said
    assert not re.search(r"valid|dictionary|instance|Config\b|integer|tuple|boolean|None\b", said), said


def test_the_registry_names_every_strategy_by_its_own_name() -> None:
    assert all(cls.name == name for name, cls in STRATEGIES.items())
