"""A model's architecture by path: read where the job is made, refused everywhere else, and wrong paths in one line."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from consilium.cli.options import load
from consilium.config.job import load_job, read_job_bytes
from consilium.core.errors import ConfigError
from consilium.federation.job_assembly import assemble_job
from tests.conftest import run
from tests.models.folders import config_of, save_folder


def _job(folder: Path, config: Any) -> Path:
    model = {"name": "causal_lm", "variant": "folder", "checkpoint": "${SITE}/base", "config": config}
    raw = {"name": "named", "strategy": "fedit", "model": model, "task": "language", "training": {"rounds": 1}}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.mark.parametrize("named", ["base/config.json", "base", "{}/base"])
def test_the_contents_stand_in_the_place_of_the_path(named: str, tmp_path: Path) -> None:
    save_folder(tmp_path / "base")
    path = _job(tmp_path, named.format(tmp_path))
    config, _ = load(path, [])
    assert config.model.config == dict(sorted(config_of(tmp_path / "base").items()))
    assert assemble_job(config, path).initial.keys() == {
        f"model.layers.{i}.self_attn.{p}_proj.lora_{f}" for i in (0, 1) for p in "qkv" for f in "AB"
    }
    sent = tmp_path / "sent.yaml"
    sent.write_bytes(read_job_bytes(path))
    (tmp_path / "base/config.json").unlink()  # nobody needs it any more
    assert load_job(sent) == config


def test_a_path_on_the_command_line_counts_from_the_job_s_folder_too(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "base")
    config, _ = load(_job(tmp_path, {"model_type": "llama"}), ["model.config=base"])
    assert config.model.config == dict(sorted(config_of(folder).items()))


def test_a_site_opens_no_path_that_a_job_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_folder(tmp_path / "base")
    path, opened = _job(tmp_path, str(tmp_path / "base")), []
    plain = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: (opened.append(self), plain(self, *a, **k))[1])
    told = r"model\.config: .*the contents of config\.json: paths are read only where a job is made; run `consilium export"
    with pytest.raises(ConfigError, match=told):
        load_job(path)
    assert opened == [path]


def test_a_job_without_a_path_stays_as_its_author_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("# kept\nname: a\n")
    assert read_job_bytes(path) == path.read_bytes()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("gone.json", None, r"no such file; .* by an absolute path or one from job\.yaml's folder"),
        ("list.json", "[1, 2]", "no map"),
        ("text.json", "{", "no valid JSON"),
        ("large.json", '{"a": "' + "x" * 2**20 + '"}', "no map of at most"),
        ("deep.json", "[" * 100_000, "no valid JSON"),
    ],
)
def test_what_is_wrong_with_the_file_is_one_line(name: str, text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"^[^\n]*model\.config: '{name}': {said}[^\n]*$"):
        load(_job(tmp_path, name), [])


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no such file"):
        load(_job(tmp_path, "pipe"), [])


def test_a_check_with_a_site_s_kit_opens_no_path_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_folder(tmp_path / "base")
    (tmp_path / "training.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    (tmp_path / "kit/local").mkdir(parents=True)
    words = ("data", "check", tmp_path, "--job", _job(tmp_path, str(tmp_path / "base")), "--kit", tmp_path / "kit")
    opened, plain = list[Path](), Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: (opened.append(self), plain(self, *a, **k))[1])
    assert run(monkeypatch, *words) == 2
    assert tmp_path / "base/config.json" not in opened
