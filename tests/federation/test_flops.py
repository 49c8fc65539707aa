"""What a job computes: counts against hand counts of the layers' own sizes, runs against sums by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

import consilium.models
from consilium.config.job import JobConfig
from consilium.estimates.compute import Samples, Work, flops_per_sample, generated_samples, run_flops, step_flops
from consilium.federation.job_assembly import assemble_job
from tests.conftest import small_cells, small_config, small_text

LM = json.loads((Path(consilium.models.__file__).parent / "weights/tiny_lm/config.json").read_text())
TOKENS, RANK = 128, 4


def job_of(config: JobConfig, **sections: Any) -> Any:
    return assemble_job(JobConfig.model_validate(config.model_dump() | sections))


def test_a_language_model_s_sample_is_what_its_layers_sizes_say() -> None:
    """Linear layers take 2 T in out, attention 2 T T d twice a layer; LoRA on all of them 2 T r (in + out) more.

    Back: every product gives two of its size, but frozen weights want no gradient, so a linear layer gives one; those that read
    the embedding, which nothing behind wants a gradient of, none, and of their LoRA's two factors A gives one.
    """
    width, inner, layers = LM["hidden_size"], LM["intermediate_size"], LM["num_hidden_layers"]
    keys = width // LM["num_attention_heads"] * LM["num_key_value_heads"]
    first = [(width, width), (width, keys), (width, keys)]
    others = [(width, width), (width, inner), (width, inner), (inner, width)]
    adapter = {"kind": "lora", "rank": RANK, "targets": "all-linear"}
    work = flops_per_sample(job_of(small_text("fedit"), adapter=adapter))

    def linear(pairs: list[tuple[int, int]]) -> int:
        return sum(2 * TOKENS * i * o for i, o in pairs)

    def lora(pairs: list[tuple[int, int]]) -> int:
        return sum(2 * TOKENS * RANK * (i + o) for i, o in pairs)

    attention = 2 * 2 * TOKENS**2 * width
    head = linear([(width, LM["vocab_size"])])
    forward = layers * (linear(first + others) + lora(first + others) + attention) + head
    unwanted = linear(first) + sum(2 * TOKENS * RANK * i for i, _ in first)
    backward = layers * (linear(first + others) + 2 * lora(first + others) + 2 * attention) + head - unwanted
    assert work.scoring == forward
    assert work.training == forward + backward
    # DPO: two answers, and both by the base without its LoRA
    base = layers * (linear(first + others) + attention) + head
    pair = flops_per_sample(job_of(small_text("fedit"), adapter=adapter, task={"name": "language", "learn": "preference"}))
    assert (pair.training, pair.scoring) == (2 * (forward + backward + base), 2 * (forward + base))


def test_experts_count_as_often_as_a_token_asks_one() -> None:
    """An expert of Qwen3's has three products of width and inner size; the router one of width and the experts' number."""
    experts, width, inner, layers = 4, 32, 16, 2
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    shape = {"model_type": "qwen3_moe", "vocab_size": 64, "moe_intermediate_size": inner, **sizes}
    given = {"name": "causal_lm", "variant": "folder", "checkpoint": "x", "max_length": TOKENS}

    def scoring(experts: int, asked: int) -> int:
        config = shape | {"num_experts": experts, "num_experts_per_tok": asked}
        return flops_per_sample(job_of(small_text("fedit"), model=given | {"config": config})).scoring

    one = scoring(experts, 1)
    assert scoring(experts, 3) - one == layers * 2 * 3 * 2 * TOKENS * width * inner
    assert scoring(2 * experts, 1) - one == layers * 2 * TOKENS * width * experts


WORK = Work(training=30, scoring=10)


def test_a_step_is_its_batches() -> None:
    job = job_of(small_config("fedit", batch_size=4, accumulate=3))
    assert step_flops(job, WORK) == 30 * 4 * 3


def test_a_patient_counts_with_the_most_samples_of_a_step() -> None:
    privacy = {"unit": "patient", "epsilon": 8.0, "per_patient": 5}
    job = job_of(small_cells("fedit", rounds=2, local_steps=3, batch_size=4), privacy=privacy)
    assert step_flops(job, WORK) == 30 * 4 * 5
    assert run_flops(job, WORK, Samples(3, 60)) == 2 * 3 * 3 * (30 * 4 * 5)


def test_a_run_is_its_rounds_its_validation_and_its_final_scores() -> None:
    """Four sites of 10 and 5 and 3 samples, half asked, two rounds of two passes over the data; the seed decides nothing."""
    validation = {"validate": {"every": 2}}
    job = job_of(small_config("fedit", rounds=2, local_steps=None, local_epochs=2, **validation))
    job = job_of(job.config, federation={"min_sites": 1, "fraction_train": 0.5})
    stages = len(job.config.training.validation.stages)
    trained = 2 * 2 * (2 * 10) * 30
    scored = 1 * stages * 2 * 5 + 3 * 4 * 3
    assert run_flops(job, WORK, Samples(4, 40, 20, 12)) == trained + scored * 10


@pytest.mark.parametrize(
    ("strategy", "times"), [("fedit", 1), ("deer", 2), ({"name": "feddpa", "variant": "T"}, 2), ("centralized", 1 / 3)]
)
def test_phases_and_passes_train_again_and_pooled_data_train_once(strategy: Any, times: float) -> None:
    job = job_of(small_config(strategy, rounds=5, local_steps=3, batch_size=2))
    assert run_flops(job, WORK, Samples(3, 3)) == pytest.approx(5 * 3 * 6 * 30 * times)


def test_generated_data_say_their_own_size() -> None:
    assert generated_samples(small_cells("fedit"), 3) == Samples(3, 72, 15, 30)
    raw = small_cells("fedit").model_dump() | {"data": {}}
    assert generated_samples(JobConfig.model_validate(raw), 3) is None


@pytest.mark.parametrize(
    "sections",
    [
        {"adapter": {"kind": "bottleneck", "decoder": "keep"}, "strategy": "fedsca"},
        {"adapter": {"kind": "full"}, "model": {"name": "unet", "variant": "unet", "image_size": 32, "width": 2}},
        pytest.param({"adapter": {"kind": "dual_rank", "rank": 4}, "strategy": "fedhera"}, marks=pytest.mark.slow),
        {"strategy": "feddpa"},
    ],
)
def test_every_kind_is_counted_without_weights(sections: dict[str, Any]) -> None:
    work = flops_per_sample(job_of(small_config("fedit"), **sections))
    assert work.scoring > 10**5
    assert 1.5 * work.scoring < work.training <= 3.1 * work.scoring
