"""DP-DyLoRA: one rank for all sites, sent and trained alone, at scale alpha / b."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from consilium.adapters import adapter_state, lora
from consilium.adapters.kinds import LoraConfig
from consilium.client.build import build_site
from consilium.client.client import Client
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.federation.job_assembly import assemble_job, build_model
from consilium.federation.saved_model import read_adapter_folder
from consilium.server.aggregation import ExactMean
from consilium.strategies.dp_dylora import DPDyLoRA
from consilium.strategies.strategy import scaling_multiplier
from tests.conftest import small_cells, small_config, small_text
from tests.strategies.scripted import update_of

A, B = "layer.lora_A", "layer.lora_B"
SITE = SiteInfo("a", 1)


def start() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {A: torch.randn(4, 5, generator=generator), B: torch.randn(6, 4, generator=generator)}


def test_every_rank_is_drawn_and_the_seed_fixes_them() -> None:
    ranks = [DPDyLoRA(rank_min=2).rank(4, round) for round in range(60)]
    assert set(ranks) == {2, 3, 4}
    assert ranks == [DPDyLoRA(rank_min=2).rank(4, round) for round in range(60)]
    assert ranks != [DPDyLoRA(rank_min=2, seed=1).rank(4, round) for round in range(60)]
    assert DPDyLoRA(rank_min=9).rank(4, 0) == 4


@pytest.mark.parametrize("round", range(8))
def test_only_active_ranks_travel_train_and_change(round: int) -> None:
    strategy = DPDyLoRA()
    state = replace(strategy.initialize(start()), round=round)
    rank, payload = strategy.rank(4, round), strategy.payload(state, SITE)
    assert {n: tuple(t.shape) for n, t in payload.tensors.items()} == {A: (rank, 5), B: (6, rank)}
    assert scaling_multiplier(strategy, payload) == pytest.approx(4 / rank)
    begin = strategy.receive({}, payload)
    product = state.shared[B][:, :rank] @ state.shared[A][:rank]
    assert torch.allclose(begin[B] @ begin[A], product, atol=1e-6)
    end = {n: t + 1 for n, t in begin.items()}
    update = update_of(strategy, begin, end, payload)
    assert {n: t.shape for n, t in update.tensors.items()} == {n: t.shape for n, t in payload.tensors.items()}
    mean = ExactMean()
    mean.add(update.tensors, 1)
    after = strategy.aggregate(state, mean.value()).shared
    assert torch.allclose(after[A][:rank], state.shared[A][:rank] + 1)
    assert torch.equal(after[A][rank:], state.shared[A][rank:])
    assert torch.equal(after[B][:, rank:], state.shared[B][:, rank:])


def test_padding_gets_no_gradient() -> None:
    strategy = DPDyLoRA()
    state = strategy.initialize(start())
    begin = strategy.receive({}, strategy.payload(state, SITE))
    a, b = (begin[n].clone().requires_grad_() for n in (A, B))
    (torch.randn(7, 5) @ (b @ a).T).square().sum().backward()
    rank = strategy.rank(4, 0)
    assert a.grad[rank:].abs().sum() == 0
    assert b.grad[:, rank:].abs().sum() == 0
    assert a.grad[:rank].abs().sum() > 0


def test_the_forward_pass_uses_alpha_over_the_rounds_rank() -> None:
    config = small_config("dp_dylora")
    job, model = assemble_job(config), build_model(config, SiteConfig())
    images = torch.rand(1, 3, 64, 64) * 255
    values = {n: torch.randn_like(t) * 0.05 for n, t in job.initial.items()}
    adapter_state.load(model, values)
    lora.scale(model, LoraConfig(), 2.0)
    with torch.no_grad():
        doubled = model(images)
        adapter_state.load(model, {n: t * 2 if n.endswith("B") else t for n, t in values.items()})
        lora.scale(model, LoraConfig(), 1.0)
        assert torch.allclose(model(images), doubled, atol=1e-4)


def test_the_personalized_model_is_scored_and_stored_at_the_scale_of_its_training(tmp_path: Path) -> None:
    """Its last validation is that of the round; rank 1 of 4 is at four times alpha / r."""
    job = assemble_job(small_config("dp_dylora", lr=3e-2, local_steps=2))
    site = build_site(job, "site-1", SiteConfig(), tmp_path, lambda event: None)
    round = next(round for round in range(20) if job.strategy.rank(4, round) == 1)
    state = replace(job.strategy.initialize(job.initial), round=round)
    trained = site.train("run", job.strategy.payload(state, SITE)).metrics
    found = site.evaluate("run", job.strategy.final(replace(state, round=round + 1), SITE)).metrics
    assert found["validation/personalized/dice"] == trained["validation/personalized/dice"] != found["test/pretrained/dice"]
    assert read_adapter_folder(tmp_path / "adapters/personalized")[0].scaling == 4


def test_every_choice_is_the_cut_model_at_its_own_scale() -> None:
    """At rank b the product is alpha / b of the cut factors, while the site's model has alpha / r."""
    strategy, alpha = DPDyLoRA(rank_min=2, tested_rank="best"), 8.0
    payload = strategy.final(replace(strategy.initialize(start()), round=2), SITE)
    assert scaling_multiplier(strategy, payload) == 1
    found = strategy.final_candidates(payload)
    assert list(found) == ["rank 4", "rank 3", "rank 2"]
    for rank, one in zip((4, 3, 2), found.values(), strict=True):
        assert {n: t.shape for n, t in one.tensors.items()} == {n: t.shape for n, t in payload.tensors.items()}
        cut = alpha / rank * payload.tensors[B][:, :rank] @ payload.tensors[A][:rank]
        assert scaling_multiplier(strategy, one) == 1
        assert torch.allclose(alpha / 4 * one.tensors[B] @ one.tensors[A], cut, atol=1e-5)
    assert torch.equal(found["rank 4"].tensors[B], payload.tensors[B])
    assert all(torch.equal(payload.tensors[n], t) for n, t in start().items())  # the last broadcast is at full rank
    assert list(DPDyLoRA().final_candidates(payload).values()) == [payload]


class Marked:
    """A task that scores each rank as told, by how many ranks of the model are not 0."""

    def __init__(self, site: Client, scores: dict[int, float], metric: str, validation: bool = True) -> None:
        self.site, self.scores, self.metric, self.validation, self.seen = site, scores, metric, validation, list[int]()

    def has(self, split: str) -> bool:
        return self.validation or split != "validation"

    def evaluate(self, model: object, split: str, batch_size: int, full: bool = False) -> dict[str, float]:
        assert split == "validation"
        values = adapter_state.tensors(self.site.context.model)
        a = next(t for n, t in values.items() if n.endswith("lora_A"))
        self.seen.append(int((a.abs().sum(1) > 0).sum()))
        return {self.metric: self.scores[self.seen[-1]]}


@pytest.mark.parametrize(
    ("scores", "metric", "best"),
    [
        ({1: 0.2, 2: 0.7, 3: 0.5, 4: 0.6}, "accuracy", 2),
        ({1: 0.7, 2: 0.7, 3: 0.1, 4: 0.7}, "accuracy", 4),
        ({1: float("nan"), 2: 0.1, 3: 0.0, 4: float("nan")}, "accuracy", 2),
        ({1: 3.0, 2: 2.0, 3: 1.0, 4: 2.0}, "loss", 3),
    ],
)
def test_a_site_takes_the_rank_that_its_validation_split_likes_best(
    scores: dict[int, float], metric: str, best: int, tmp_path: Path
) -> None:
    site, payload, events = at_a_site(tmp_path)
    site.context.task = Marked(site, scores, metric)
    if metric == "loss":
        raw = small_text(TESTED).model_dump()
        site.context.config = JobConfig.model_validate(raw | {"task": {"name": "language", "evaluate": "loss"}})
    chosen = site.evaluator.choose_final({}, payload)
    assert site.context.task.seen == [4, 3, 2, 1]
    wanted = site.context.strategy.final_candidates(payload)[f"rank {best}"].tensors
    assert all(torch.equal(t, chosen.tensors[n]) for n, t in wanted.items())
    assert events == [{"event": "chosen", "site": "site-1", "text": f"tests rank {best}, the best of its validation split"}]


def test_without_a_validation_split_a_site_tests_the_full_rank_and_says_so(tmp_path: Path) -> None:
    site, payload, events = at_a_site(tmp_path)
    site.context.task = Marked(site, {}, "accuracy", validation=False)
    assert site.evaluator.choose_final({}, payload) is not None
    assert not site.context.task.seen
    assert [event["text"] for event in events] == ["tests rank 4, having no validation split"]


TESTED = {"name": "dp_dylora", "tested_rank": "best"}


def at_a_site(folder: Path) -> tuple[Client, Payload, list[dict[str, object]]]:
    """Return a site, what it receives to evaluate, and the list of what it says."""
    raw = small_cells(TESTED).model_dump()
    job, events = assemble_job(JobConfig.model_validate(raw | {"adapter": {"kind": "lora", "rank": 4}})), []
    site = build_site(job, "site-1", SiteConfig(), folder, lambda event: events.append(dict(event)))
    events.clear()  # that it loads model and data
    drawn = {n: torch.ones_like(t) for n, t in job.initial.items()}
    state = job.strategy.initialize(drawn)
    return site, job.strategy.final(state, SITE), events
