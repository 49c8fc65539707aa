"""A job.yaml or site.yaml that asks for more than a machine has: refused in one line, before memory or time is taken."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from consilium.adapters import adapter_state, bottleneck, dual_rank, lora
from consilium.adapters.kinds import BottleneckConfig, DualRankConfig, LoraConfig
from consilium.adapters.registry import ADAPTERS
from consilium.config.job import JobConfig, load_job
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.schema import LARGEST_FILE, read_yaml
from consilium.federation.job_assembly import assemble_job
from consilium.models import architecture
from consilium.models.meta_device import build_on_meta_device
from consilium.models.registry import MODELS
from consilium.models.sam import SAM
from consilium.models.sam.network import build_sam
from consilium.strategies.registry import STRATEGIES
from consilium.tasks.registry import TASKS
from tests.conftest import JOBS, small_config, small_text

FREE = {"config"}
"""A map without a schema here: `model.config` has test_config_json below."""
KINDS = {f"{r.what} {name}": kind.config for r in (MODELS, TASKS, ADAPTERS) for name, kind in r.items()}
SCHEMAS = {"job": JobConfig, "site": SiteConfig} | dict(STRATEGIES) | KINDS


def unbounded(schema: dict[str, Any], place: str = "") -> Iterator[str]:
    """Yield where a JSON schema lets a number, a text, a list or a map grow without end."""
    bounds = {
        "integer": ("maximum", "exclusiveMaximum"),
        "number": ("maximum", "exclusiveMaximum"),
        "string": ("maxLength", "pattern", "format"),  # a format: the paths in a hospital's own site.yaml
        "array": ("maxItems",),
    }
    kind = schema.get("type")
    named = any("enum" in schema.get(part, {}) for part in ("items", "propertyNames"))  # a list or map of fixed words
    if kind in bounds and not named and not {*bounds[kind], "enum", "const"} & schema.keys():
        yield f"{place}: {kind}"
    if schema.get("additionalProperties", False) is not False and not named and "maxProperties" not in schema:
        yield f"{place}: map"
    for key, below in schema.items():
        if key in ("properties", "$defs"):
            for name, field in below.items():
                if name not in FREE:
                    yield from unbounded(field, f"{place}.{name}")
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            for part in below:
                yield from unbounded(part, place)
        elif key in ("items", "additionalProperties", "propertyNames") and isinstance(below, dict):
            yield from unbounded({"type": "string"} | below if key == "propertyNames" else below, f"{place}.{key}")


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_number_and_text_of_the_schema_has_a_bound(name: str) -> None:
    """Claim: no field of job.yaml, site.yaml or a section of any kind takes a number, text, list or map without a limit."""
    assert list(unbounded(TypeAdapter(SCHEMAS[name]).json_schema())) == []


def test_the_walk_sees_what_is_not_bounded() -> None:
    assert list(unbounded(TypeAdapter(dict[str, list[int]]).json_schema())) == [
        ": map",
        ".additionalProperties: array",
        ".additionalProperties.items: integer",
    ]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
@pytest.mark.parametrize(
    "field", ["privacy.noise_multiplier", "training.lr", "federation.straggler_grace_seconds", "adapter.alpha"]
)
def test_no_number_is_infinite(field: str, value: float) -> None:
    changes = {"privacy": {"unit": "site", "noise_multiplier": 1.0, "clip": 1.0}, field: value}
    with pytest.raises(ConfigError, match=rf"{field}: -?(inf|nan): expected a finite number"):
        load_job(JOBS / "quickstart", changes)


def test_a_rank_of_three_million_is_refused_before_memory_is_taken() -> None:
    """It asked for 60 GB. The field's bound refuses it, the layers' own sizes refuse what the bound lets through."""
    with pytest.raises(ConfigError, match=r"adapter\.rank: 3000000: expected less than or equal to 1024"):
        load_job(JOBS / "quickstart", {"adapter.rank": 3_000_000})
    with pytest.raises(ConfigError, match=r"adapter\.rank: 1024: '.*' is .*; use at most"):
        assemble_job(load_job(JOBS / "quickstart", {"adapter.rank": 1024}))


@pytest.mark.parametrize("kind", ["lora", "dual_rank", "bottleneck"])
def test_an_adapter_larger_than_a_federation_carries_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: every kind counts its numbers before it makes them; tried with a small limit."""
    monkeypatch.setattr(adapter_state, "LARGEST", 1000)
    with torch.device("meta"):
        model = build_sam("tiny", None, 64, 2, weights=False)
        names = [name for name, _ in model.named_parameters()]
        inject = {
            "lora": lambda: lora.inject(model, LoraConfig(rank=4), SAM),
            "dual_rank": lambda: dual_rank.inject(model, DualRankConfig(kind="dual_rank", rank=64), SAM),
            "bottleneck": lambda: bottleneck.inject(model, BottleneckConfig(kind="bottleneck"), SAM),
        }
        with pytest.raises(ConfigError, match=r"adapter: [\d,]+ numbers to train, over 1,000; lower rank or width"):
            inject[kind]()
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 1_000_000),
        ("num_hidden_layers", 10**40),
        ("num_local_experts", 50_000),
        ("vocab_size", 2**40),
        ("rope_theta", float("nan")),
        ("layer_types", ["full_attention"] * 5000),
        ("architectures", ["x" * 5000]),
        ("rope_scaling", {"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": {"i": 1}}}}}}}}}),
    ],
)
def test_config_json_has_bounds_too(key: str, value: object) -> None:
    """Claim: a pasted config.json cannot make the server lay out a model for minutes."""
    raw = small_text().model_dump()
    model = {"name": "causal_lm", "variant": "folder", "checkpoint": "x", "config": {"model_type": "llama", key: value}}
    with pytest.raises(ValueError, match="at most"):
        JobConfig.model_validate(raw | {"model": model})


BOMBS = {
    "aliases": ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "aliases are not read"),
    "depth": ("a: " + "[" * 100_000, "over 32 deep"),
    "maps": ("{a: " * 40 + "1" + "}" * 40, "over 32 deep"),
    "size": ("a: [" + "1, " * (LARGEST_FILE // 3) + "1]", "over 1048576 bytes"),
    "digits": ("a: " + "9" * 4299 + "9" * 10, "characters, over 4096"),
    "base 60": ("a: " + "59:" * 300_000 + "59", "characters, over 4096"),
    "a day that is none": ("a: 2001-99-99", "month must be"),
    "no text": (b"\xff\xfe\x00a", "not valid YAML"),
    "a number without digits": ("a: !!int ''", "not valid YAML"),
    "a time that is none": ("a: !!timestamp soon", "not valid YAML"),
    "neither true nor false": ("a: !!bool maybe", "not valid YAML"),
    "objects": ("a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_yaml_bomb_is_one_line(bomb: str, tmp_path: Path) -> None:
    """Claim: no file of YAML takes more than seconds to read, and none ends in a traceback."""
    text, message = BOMBS[bomb]
    path = tmp_path / "job.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        read_yaml(path)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 600


def test_errors_stay_short_and_printable(tmp_path: Path) -> None:
    """Claim: what a job says comes back escaped and cut, a screen of lines at most."""
    path = tmp_path / "job.yaml"
    names = "\n".join(f'"k{i}\\e[31m{"x" * 500}": 1' for i in range(200))
    path.write_text(f'name: "{"y" * 4000}"\n{names}\n')
    with pytest.raises(ConfigError) as caught:
        load_job(path)
    lines = str(caught.value).splitlines()
    assert len(lines) <= 21
    assert all(line.isprintable() and len(line) < 1000 for line in lines)


def test_class_names_are_printable_and_few() -> None:
    for classes in (["disc", "cup\n# owned"], ["a\x1b[31m", "b"], ["a" * 65, "b"], [f"c{i}" for i in range(257)]):
        raw = small_config().model_dump()
        for task in ({"classes": classes}, {"name": "classification", "classes": classes}):
            with pytest.raises(ValueError, match="classes"):
                JobConfig.model_validate(raw | {"task": task})


@pytest.mark.parametrize(
    "key", ["depths", "depth", "num_blocks", "n_attn_blocks", "blocks_per_stage", "num_hidden_layers", "layers"]
)
def test_the_blocks_of_all_stages_together_have_a_bound(key: str) -> None:
    """1024 stages of 1024 blocks took 46 seconds of processor time and 0.9 GB of the server until they were refused."""
    architecture.check_and_clean_config({"model_type": "regnet", key: [1, 3, 17, 1003]})
    for many in ([1024] * 1024, [1, 3, 17, 1004], [[1000], [25]]):
        with pytest.raises(ValueError, match=rf"{key} of at most 1024 in all"):
            architecture.check_and_clean_config({"model_type": "regnet", key: many})
    with pytest.raises(ValueError, match="of at most"):
        architecture.check_and_clean_config({"model_type": "regnet", key: tuple(many)})


def test_modules_that_nobody_holds_yet_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list's layers without a parameter are in no model, and so in no count of one, before all of them are made."""
    monkeypatch.setattr("consilium.models.meta_device.MOST", 50)
    made, before = [], torch.nn.Module.__init__
    with build_on_meta_device(), build_on_meta_device():
        with pytest.raises(ConfigError, match="over 50 modules or parameters"):
            made.extend(torch.nn.Identity() for _ in range(1000))
        assert len(made) <= 50
    assert torch.nn.Module.__init__ is before
    assert len([torch.nn.Identity() for _ in range(100)]) == 100
