"""Target patterns are matched in time that grows with the text alone: `(\\w+\\.?)+!` once hung the server's job for ever."""

import signal
from collections.abc import Iterator

import pytest
from torch import nn

from consilium.adapters.names import prepare_linear_layers
from consilium.config.job import JobConfig
from consilium.core.errors import ConfigError
from consilium.federation.job_assembly import assemble_job
from consilium.models.registry import TargetSet
from tests.conftest import small_config

HANGS = (r"(\w+\.?)+!", r"((\w+)+\.?)+!", r"(.*.*.*.*.*.*.*.*)*!", r"(\w|\w\w|\w\w\w|\.)+!")


@pytest.fixture
def twenty_seconds() -> Iterator[None]:
    """End a test that hangs; Python's own engine looks for signals while it backtracks."""

    def stop(*args: object) -> None:
        raise TimeoutError("the pattern hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("twenty_seconds")
@pytest.mark.parametrize("pattern", HANGS)
def test_a_pattern_that_backtracks_for_ever_matches_nothing_at_once(pattern: str) -> None:
    """Claim: no target pattern hangs the server or a site."""
    block = nn.ModuleDict({"self_attention_projection_of_queries_and_keys": nn.Linear(1, 1)})
    with pytest.raises(ConfigError, match="matches no linear layer of the model"):
        prepare_linear_layers(nn.ModuleDict({"image_encoder_transformer_blocks": block}), TargetSet(pattern))


@pytest.mark.parametrize(
    "pattern", [r"(?=mask).*", r"(?<!x)q_proj", r"(\w)\1", "((a{999}){999}){999}", "(", "[z-a]", "(?P<n>q)(?P=n)", r"(?>a+)b"]
)
def test_syntax_without_a_linear_time_engine_is_one_line(pattern: str) -> None:
    raw = small_config("fedit").model_dump()
    with pytest.raises(ConfigError, match=r"adapter\.targets: .* is not a valid regular expression of RE2") as caught:
        assemble_job(JobConfig.model_validate(raw | {"adapter": {"targets": pattern}}))
    assert len(str(caught.value).splitlines()) == 1


def test_a_pattern_has_a_length() -> None:
    raw = small_config("fedit").model_dump()
    with pytest.raises(ValueError, match=r"at most 1024 characters"):
        JobConfig.model_validate(raw | {"adapter": {"targets": "a|" * 600}})
