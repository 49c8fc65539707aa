"""The pages hold together: links, paths, fields, the tables written from the package, and what is not run."""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from consilium.adapters.registry import ADAPTERS
from consilium.config import reference
from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.config.site import SiteConfig
from consilium.core.errors import Reason
from consilium.core.schema import validate
from consilium.federation.job_consistency import decoder_rule
from consilium.models.registry import MODELS
from consilium.strategies.registry import STRATEGIES
from consilium.strategies.unequal_ranks import UnequalRanks
from consilium.tasks.registry import TASKS
from tests.pages.reading import PAGES, ROOT, anchors, blocks, code, links, text_of

NOT_RUN = {
    "README.md": ["python3 -m venv .venv", "python3 -m venv .venv"],
    "jobs/README.md": [
        "consilium simulate jobs/quickstart --mlflow",
        "consilium data import own",
        "consilium simulate jobs/nuclei_fediat",
        "consilium data import medquad",
        "consilium allow WORKSPACE",
    ],
    "jobs/models.md": ["consilium models import", "consilium data import csv-text"],
    "jobs/papers.md": ["consilium study run iat_table1"],
    "jobs/studies.md": ["consilium study run mine.yaml"],
    "custom/consilium/data/site.md": ["consilium data cache STATE"],
    "custom/consilium/data/README.md": [
        "consilium data import own",
        "consilium data import csv",
        "consilium data import fundus",
    ],
    "custom/consilium/privacy/secure-aggregation.md": ["consilium privacy sums KIT"],
    "custom/README.md": ["ruff check .", "python -m build"],
    "custom/recipes.md": ["pip install -e ./my-algorithms"],
    "custom/consilium/use/README.md": ["consilium submit", "lm_eval run", "python3 -m venv converter"],
    "provisioning/README.md": ["consilium poc jobs/quickstart_cells", "consilium allow /tmp/nvflare"],
    "provisioning/engineer.md": [
        "consilium lock",
        "consilium provision sites.yml",
        "consilium submit",
        "consilium status fundus-1",
        "consilium sites --kit",
    ],
    "provisioning/installation.md": [
        "python3 -m venv /opt/consilium",
        "echo 'consilium-flare==",
        "openssl x509",
        "useradd",
        "docker build",
    ],
    "provisioning/administrator.md": [
        "consilium doctor KIT",
        "consilium unlock",
        "runuser -u consilium",
        "mkdir -p -m 700 /etc/credstore.encrypted",
        "consilium stop KIT",
        "consilium approve JOB",
        "consilium approve jobs/quickstart",
        "consilium approve --revoke DIGEST",
        "consilium audit KIT",
    ],
    "provisioning/data-protection-officer.md": [
        "consilium serve",
        "consilium evidence fundus-1",
        "consilium forget fundus-1",
    ],
    "tests/README.md": ["pytest tests/strategies", "python -m tests.tools.mutants"],
}
"""How every block begins that no test runs; each has its reason in the page."""
OTHERS = ("profile.yml", "me.yml", "project.yml", "ages.yaml: a job.yaml", "mine.yaml: a study", "tasks/hospital.yaml")
"""YAML that is FLARE's or lm-evaluation-harness' own, or a file that the page's commands run."""
SHELLS = {"sh", "shell", "console", "zsh"}


@pytest.mark.parametrize("page", PAGES)
def test_only_these_blocks_are_not_run_and_each_says_why(page: str) -> None:
    left_out = [block for block in blocks(page) if block.why is not None]
    assert all(block.language == "bash" for block in left_out)
    begins = NOT_RUN.get(page, [])
    assert len(left_out) == len(begins), [block.first for block in left_out]
    assert all(block.text.startswith(begin) for block, begin in zip(left_out, begins, strict=True))
    assert text_of(page).count("<!-- not run") == len(left_out), "a reason stands right before its block"
    assert not [block.line for block in blocks(page) if block.language in SHELLS], "commands are bash"


@pytest.mark.parametrize("page", PAGES)
def test_a_reason_that_leaves_a_block_to_a_test_names_one_that_exists(page: str) -> None:
    for block in blocks(page):
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", block.why or "")
        words = re.sub(r"`[^`]*`|the tests\b", "", block.why or "")
        assert not re.search(r"tests?/|\ba test\b|\bthe test of\b", words), f"{block.page}:{block.line}: name file::test"
        for file, test in named:
            assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{test}"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(str(target.resolve().relative_to(ROOT.resolve()))), link


@pytest.mark.parametrize("page", PAGES)
def test_files_named_in_a_page_are_there(page: str) -> None:
    begin = re.compile(r"(custom|jobs|provisioning|tests|\.ci)/[\w./-]+")
    named = [word for word in code(page) if begin.fullmatch(word)]
    made = {home[0] for block in blocks(page) if (home := block.home)} | {"tests/strategies/test_one_mix.py"}
    assert [word for word in named if not (ROOT / word).exists() and word not in made] == []
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert [word for word in code(page) if re.fullmatch(r"test_\w+\.py", word) and word not in tests] == []


@pytest.mark.parametrize("page", PAGES)
def test_dotted_fields_named_in_a_page_exist(page: str) -> None:
    known = _fields()
    for word in re.findall(r"\b(" + "|".join(known) + r")\.([a-z]\w+)\b", " ".join([*code(page), *_commands(page)])):
        assert word[1] in known[word[0]] | {"yaml", "py", "json", "jsonl", "safetensors", "png"}, ".".join(word)


def _commands(page: str) -> list[str]:
    return [block.text for block in blocks(page) if block.language == "bash"]


@cache
def _fields() -> dict[str, set[str]]:
    """Return the fields of every section of job.yaml and of site.yaml's privacy, of whatever kind."""
    sections: dict[str, list[type]] = {
        "strategy": [*STRATEGIES.values(), UnequalRanks],
        **{key: [kind.config for kind in kinds.values()] for key, kinds in _kinds().items()},
    }
    found = {key: {name for one in many for name in _names(one)} | {"name", "kind"} for key, many in sections.items()}
    return found | {
        "training": {one.alias or name for name, one in reference.TrainingConfig.model_fields.items()},
        "federation": set(reference.FederationConfig.model_fields),
        "privacy": {*reference.SiteLevelDpConfig.model_fields, *HospitalPrivacyPolicy.model_fields},
    }


def _kinds() -> dict[str, Any]:
    return {"model": MODELS, "adapter": ADAPTERS, "task": TASKS}


def _names(section: type) -> set[str]:
    return set(reference.fields_of(section))


@pytest.mark.parametrize(
    "block", [b for page in PAGES for b in blocks(page) if b.language == "yaml"], ids=lambda b: f"{b.page}:{b.line}"
)
def test_yaml_in_a_page_is_what_the_package_reads(block: Any) -> None:
    kind = block.first.removeprefix("# ").partition("   ")[0]
    raw, where = yaml.safe_load(block.text), Path(f"{block.page}:{block.line}")
    if kind == "site.yaml":
        validate(SiteConfig, raw, where)
    elif kind == "job.yaml":
        rest = yaml.safe_load((ROOT / "jobs/quickstart/app/config/job.yaml").read_text())
        del rest["data"]  # its generated pictures are for one task only
        validate(JobConfig, rest | raw, where)
    else:
        assert kind in OTHERS, f"the first line of a YAML block says what it is, not {kind!r}"


@pytest.mark.parametrize("page", PAGES)
def test_json_in_a_page_is_json(page: str) -> None:
    for block in blocks(page):
        if block.language == "json":
            json.loads(block.text)


@pytest.mark.parametrize(
    "block", [b for page in PAGES for b in blocks(page) if b.home and b.home[1] is None], ids=lambda b: b.home[0]
)
def test_code_of_a_recipe_is_as_clean_as_the_package(block: Any) -> None:
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "--stdin-filename", ROOT / block.home[0], "-"]
        done = subprocess.run(ruff, input=block.text, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", list(reference.PAGES))
def test_tables_of_fields_are_those_of_the_package(page: str) -> None:
    wanted = reference.replace_tables(text_of(page), reference.PAGES[page]())
    assert text_of(page) == wanted, "stale; run python -m consilium.config.reference"


def test_every_field_has_a_meaning() -> None:
    written = "".join(write() for write in reference.PAGES.values())
    assert [line for line in written.splitlines() if line.endswith("|  |")] == []


def test_a_fields_meaning_is_about_that_field() -> None:
    """No paper's title, no other field's hint, and of generated groups nothing about organs."""
    rows = [row for write in reference.PAGES.values() for row in write().splitlines() if row.startswith("| `")]
    assert [row for row in rows if "Source: " in row or "arXiv" in row] == []
    told = {name: next(row for row in rows if f".{name}` |" in row) for name in ("partners", "groups")}
    assert "a checkpoint's" not in told["partners"]
    assert "organ" not in told["groups"]


def test_the_tables_say_what_a_field_takes() -> None:
    rows = {line.split("|")[1].strip(" `"): line for line in reference.chapter("x", reference.TrainingConfig).splitlines()[6:]}
    assert rows["momentum"] == "| `momentum` | number, from 0 under 1 | `0` | sgd only |"
    assert rows["validate.every"].startswith("| `validate.every` | whole number")
    assert "whole number, from 1 to 100,000 | required" in rows["rounds"]
    assert "`adam`, `adamw`, `sgd` | `adam`" in rows["optimizer"]


def test_the_page_knows_which_algorithms_share_a_decoder_that_trains() -> None:
    """SAM with LoRA beside its decoder; an algorithm for unequal ranks takes no such adapter."""
    shares: dict[str | None, set[str]] = {}
    for name, kind in STRATEGIES.items():
        if kind().traits.one_rank or not kind().traits.ranks_differ:
            shares.setdefault(decoder_rule(kind(), ["base.mask_decoder.mask_tokens.weight"]), set()).add(name)
    text = " ".join(text_of("jobs/algorithms.md").split())
    told = [re.search(rf"\. ([^.]*) {rule}\.", text) for rule in ("keep it", "has no rule for it")]
    assert [set(re.findall(r"`(\w+)`", one[1])) for one in told if one] == [shares["keep"], shares[None]]
    assert shares["share"] > {"fedit", "fedprox", "fedra", "fedheal", "fedala", "feddbe", "flora", "feddpa"}


def test_every_test_in_the_table_of_claims_is_where_the_page_says() -> None:
    rows = [line for line in text_of("provisioning/README.md").splitlines() if re.search(r"test_\w+\.py` \|$", line)]
    short = {name for row in rows for name in re.findall(r"`(test_\w+\.py)`", row)}
    assert len(rows) > 60
    assert sorted(short - {path.name for path in (ROOT / "tests/adversary").rglob("test_*.py")}) == []


def test_the_page_lists_every_reason_that_a_site_may_send() -> None:
    listed = text_of("custom/consilium/privacy/leaves.md").partition("sends one of these reasons:")[2].partition(".")[0]
    assert re.findall(r"`(\w+)`", listed) == [str(reason) for reason in Reason]


def test_pages_install_the_cpu_build_of_the_pinned_torch() -> None:
    pinned = next(line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("torch=="))
    for page in ("README.md", "provisioning/installation.md"):
        found = re.findall(r"CPU build of torch (\S+)", " ".join((ROOT / page).read_text().split()))
        assert [f"torch=={one.rstrip('.')}" for one in found] == [pinned], page


def test_the_first_page_is_short_and_its_test_command_is_the_one_that_runs() -> None:
    assert len(text_of("README.md").splitlines()) <= 100
    commands = [block.text.strip() for block in blocks("README.md") if block.text.startswith("python3 -m venv")]
    assert commands[1] in (ROOT / ".ci/run").read_text().splitlines()


@pytest.mark.parametrize("job", ["quickstart_cells", "quickstart"])
def test_the_pictures_of_the_quickstarts_are_light(job: str) -> None:
    assert (ROOT / "jobs" / job / "predictions.png").stat().st_size < 300_000
