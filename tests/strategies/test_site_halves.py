"""FedALA, FedDBE and FedDPA against plain loops of two sites, one of which misses a round; their limits; what they refuse."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from consilium.adapters import adapter_state, lora
from consilium.adapters.kinds import LORA, LoraConfig
from consilium.adapters.lora import PerSample
from consilium.client.build import build_site
from consilium.client.model_store import interpolation_of
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.messages import Payload, Tensors
from consilium.federation.job_assembly import assemble_job
from consilium.federation.saved_model import export_adapter
from consilium.models.causal_lm import CAUSAL_LM
from consilium.strategies.fedala import FedALA
from consilium.strategies.feddbe import FedDBE
from consilium.strategies.feddpa import FedDPA
from consilium.strategies.strategy import Interpolation, Role
from consilium.training.interpolation import fixed_weight, interpolate_adapter, sample_weights
from tests.conftest import small_cells, small_config, small_text
from tests.strategies.scripted import Scripted, Unread
from tests.strategies.site_halves import KIND, SIZES, A, B, Points, averaged, cut, descend, features, federate, logits, toy

ROUNDS, ABSENT = 3, {(1, "b")}
HEAD = ["head.weight", "head.bias"]


def entropy(p: Tensors, name: str, share: float = 0.0) -> Tensor:
    points = Points(name)
    return F.cross_entropy(logits(p, features(p, points.x, share)), points.y)


def close(found: Tensors, wanted: Tensors) -> None:
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4)


def test_fedala_is_its_paper_in_a_plain_loop() -> None:
    """Eq. 4 and 5 on the head (the top layer): 25 passes at most the first time, one later; the encoder is the global one."""
    strategy = FedALA(layers=1, data=1.0, threshold=0.01, most_passes=25)
    state, own, kept = federate(strategy, ROUNDS, ABSENT)
    _, shared = toy(strategy)
    mine: dict[str, Tensors] = {}
    weights: dict[str, Tensors] = {}
    for round in range(ROUNDS):
        ends = {}
        for name in [name for name in SIZES if (round, name) not in ABSENT]:
            start = dict(shared)
            if name in mine:
                first, losses, gap = name not in weights, [], {n: shared[n] - mine[name][n] for n in HEAD}
                w = weights.get(name, {n: torch.ones_like(shared[n]) for n in HEAD})
                for _ in range(25 if first else 1):
                    at = {n: (mine[name][n] + gap[n] * w[n]).requires_grad_() for n in HEAD}
                    loss = entropy(start | at, name)
                    gradients = torch.autograd.grad(loss, [at[n] for n in HEAD])
                    w = {n: (w[n] - g * gap[n]).clamp(0, 1) for n, g in zip(HEAD, gradients, strict=True)}
                    losses.append(loss.item())
                    if len(losses) > 10 and torch.tensor(losses[-10:]).std(correction=0) < 0.01:
                        break
                start |= {n: mine[name][n] + gap[n] * w[n] for n in HEAD}
                weights[name] = w
            ends[name] = mine[name] = descend(start, [A, B, *HEAD], lambda p, name=name: entropy(p, name))
        shared = averaged(ends, shared)
    close(state.shared, shared)
    for name in SIZES:
        close(own[name], mine[name])
        assert kept[name].keys() == weights[name].keys()
        close(kept[name], weights[name])
    assert any((w < 1).any() for w in kept["a"].values())  # else nothing was mixed


class Noise:
    """Losses that never settle."""

    batches = 3

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, values: Tensors, names: Any) -> tuple[float, Tensors]:
        self.calls += 1
        return float(self.calls % 2 + self.calls % 5), {name: torch.ones_like(values[name]) for name in names}


def test_fedala_ends_its_first_learning_and_leaves_new_sites_alone() -> None:
    strategy, look = FedALA(most_passes=30), Noise()
    own, start = ({f"{layer}.lora_A": make(2) for layer in "xy"} for make in (torch.ones, torch.zeros))
    begin, kept = strategy.learn_mixture(own, start, {}, look)
    assert look.calls == 30 * 3
    assert kept.keys() == {"y.lora_A"}
    assert begin["x.lora_A"].tolist() == [0, 0]
    strategy.learn_mixture(own, start, kept, look)
    assert look.calls == 31 * 3
    assert strategy.learn_mixture({}, start, {}, look) == (start, {})
    assert strategy.learn_mixture(own, {}, {}, look) == ({}, {})
    assert look.calls == 31 * 3
    assert strategy.learn_mixture(own, start, {}, Unread()) == (start, {})  # no batch to learn from
    all_layers = FedALA(layers=None, most_passes=1)
    assert all_layers.learn_mixture(own, start, {}, look)[1].keys() == start.keys()
    # The gradients of 1 towards a global tensor that is larger by 1: w goes from 1 to 0 in one batch, and stays there.
    begin, kept = all_layers.learn_mixture(start, own, {}, look)
    assert (begin["y.lora_A"].tolist(), kept["y.lora_A"].tolist()) == ([0, 0], [0, 0])


def test_fedala_has_settled_when_its_last_ten_losses_differ_by_less_than_the_threshold() -> None:
    """Ten of eleven or more losses; half of them 0, half of them 1 have a standard deviation of 0.5, which is not under 0.5."""
    settled = FedALA(threshold=0.5, most_passes=13).is_settled
    assert [settled([9.0] + [1.0] * n) for n in (8, 9, 10)] == [False, False, True]
    assert not settled([1.0] * 10)
    assert not settled([1.0, 9.0, *[1.0] * 9])
    assert not settled([0.0, 1.0] * 6)
    assert FedALA(threshold=0.51).is_settled([0.0, 1.0] * 6)
    assert settled([0.0, 1.0] * 6 + [5.0])  # passes enough
    assert FedALA(most_passes=11).is_settled([float("nan")] * 11)


def test_fedala_counts_layers_of_the_adapter_from_the_output() -> None:
    block = "image_encoder.blocks.0.adapter_mlp"
    names = ["e.q.lora_A", "e.q.lora_B", *(f"{block}.{p}.{w}" for p in ("down", "up") for w in ("weight", "bias")), *HEAD]
    assert FedALA(layers=1).top_layer_tensors(names) == HEAD
    assert FedALA(layers=2).top_layer_tensors(names) == names[2:]
    assert FedALA(layers=None).top_layer_tensors(names) == names == FedALA(layers=9).top_layer_tensors(names)


def test_fedala_mixes_a_decoder_that_trains_whole() -> None:
    """SAM lists last the layers that rate masks, which no mask depends on: mixed alone they would change nothing."""
    raw = small_config("fedala").model_dump() | {"adapter": {"kind": "bottleneck", "decoder": "share"}}
    job = assemble_job(JobConfig.model_validate(raw))
    upper = FedALA().top_layer_tensors(job.initial)
    assert {name.rpartition(".mask_decoder.")[0] for name in upper} == {"base"}
    assert any("output_upscaling" in name for name in upper)
    assert len(upper) == sum(name.startswith("base.") for name in job.initial)


def test_feddbe_is_its_paper_in_a_plain_loop() -> None:
    """Round 0 finds the common mean; then head(z + m) and the pull of the running mean, which starts at 0 in every round."""
    strategy = FedDBE(kappa=2.0, momentum=0.3)
    state, own, _ = federate(strategy, ROUNDS, ABSENT)
    _, shared = toy(strategy)
    shared = {n: t for n, t in shared.items() if "shift" not in n}
    bias, mean, mine = dict.fromkeys(SIZES, torch.zeros(4)), torch.zeros(4), {}
    for round in range(ROUNDS):
        ends, found = {}, {}
        for name in [name for name in SIZES if (round, name) not in ABSENT]:
            running, points = [torch.zeros(4)], Points(name)

            def loss(p: Tensors, round: int, points: Points, running: list[Tensor], mean: Tensor) -> Tensor:
                z = features(p, points.x)
                now = 0.7 * running[-1] + 0.3 * z.mean(0)
                running.append(now.detach())
                task = F.cross_entropy(logits(p, z + p["m"] if round else z), points.y)
                return task + 2.0 * (0.5 * (now - mean) ** 2).mean() if round else task

            trained = [A, B, *HEAD, *["m"] * bool(round)]
            fixed = {"round": round, "points": points, "running": running, "mean": mean}
            end = descend(shared | {"m": bias[name]}, trained, partial(loss, **fixed))
            bias[name], ends[name], found[name] = end["m"], end, {"mean": running[-1]}
            mine[name] = {n: end[n] for n in shared}
        if not round:
            mean = averaged(found, ["mean"])["mean"]
        shared = averaged(ends, shared)
    close(state.shared, shared | {"feature_shift.mean": mean})
    for name in SIZES:
        close(own[name], mine[name] | {"feature_shift.shift": bias[name]})
    assert bias["a"].abs().max() > 1e-3


def test_feddbe_sends_the_mean_once_and_its_vector_never() -> None:
    strategy = FedDBE()
    names = [A, "feature_shift.shift", "feature_shift.mean"]
    assert strategy.names(dict.fromkeys(names, torch.zeros(1)), Role.SHARED, 0, 0) == [A, "feature_shift.mean"]
    assert strategy.names(dict.fromkeys(names, torch.zeros(1)), Role.SHARED, 1, 0) == [A]
    assert strategy.role("feature_shift.shift", 1, 0) is Role.LOCAL


@pytest.mark.parametrize(("variant", "reading"), [("T", "as_published"), ("F", "as_published"), ("T", "as_in_code")])
def test_feddpa_is_its_paper_in_a_plain_loop(variant: Any, reading: Any) -> None:
    """By the authors' code the local adapter is left alone in the first round."""
    strategy = FedDPA(variant=variant, local_share=0.4, reading=reading)
    state, own, _ = federate(strategy, ROUNDS, ABSENT)
    _, initial = toy(strategy)
    local = ["encoder.local_A", "encoder.local_B"]
    shared = {n: t for n, t in initial.items() if n not in local}
    twin = {name: {n: initial[n] for n in local} for name in SIZES}
    for round in range(ROUNDS):
        ends = {}
        for name in [name for name in SIZES if (round, name) not in ABSENT]:
            start = shared | twin[name]
            if variant == "T" and (round or reading == "as_published"):
                start = descend(start, local, lambda p, name=name: entropy(p, name, 0.4))
                twin[name] = {n: start[n] for n in local}
            ends[name] = descend(start, [A, B, *HEAD], lambda p, name=name: entropy(p, name))
        shared = averaged(ends, shared)
    close(state.shared, shared)
    for name in SIZES:
        close(own[name], twin[name])
    assert (variant == "F") == all(torch.equal(own["a"][n], initial[n]) for n in local)
    sent = Payload(ROUNDS, 0, {})
    trainer = Scripted(strategy, initial, {}, sent)
    trainer.closing = strategy.traits.fits_after_last_round
    assert trainer.closing == (variant == "F")
    strategy.local_update(trainer, sent)
    assert [(sorted(fit["names"]), fit.get("local_adapter_weight", 0.0)) for fit in trainer.fits] == [
        (local, 0.4), *[(sorted(shared), 0.0)] * (variant == "T")
    ]  # fmt: skip


def test_feddpa_f_has_no_local_adapter_to_weigh_before_its_last_fit() -> None:
    found = {v: [interpolation_of(FedDPA(variant=v, most=0.3), closing) for closing in (False, True)] for v in ("T", "F")}
    assert found == {"T": [Interpolation(0.3, 5)] * 2, "F": [None, Interpolation(0.3, 5)]}
    assert FedDPA(weighting="fixed").traits.interpolation == Interpolation(0.5, 0)


def test_feddpa_as_in_code_sends_no_gradient_through_the_global_branch() -> None:
    """Two layers in a row: the first one's local factors hear of the second one's global branch only in the paper's reading."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 2, bias=False)).double()
    first, second = (layer.weight.detach().clone() for layer in model)
    config = LoraConfig(rank=2, alpha=3.0, targets="0|1")
    lora.inject(model, config, CAUSAL_LM)
    lora.add_local(model, config)
    model.double()
    parts = {n: p for n, p in model.named_parameters() if "lora_" in n}
    for parameter in parts.values():
        torch.nn.init.normal_(parameter)
    x = torch.randn(4, 3, dtype=torch.double)
    own = parts["0.lora_B.local.weight"].requires_grad_(True)

    def change(layer: int, name: str) -> Tensor:
        return parts[f"{layer}.lora_B.{name}.weight"] @ parts[f"{layer}.lora_A.{name}.weight"]

    for cut_global in (False, True):
        lora.mix(model, config, 0.4, cut_global)
        (found,) = torch.autograd.grad(model(x).square().sum(), own)
        z = x @ (first + 1.5 * (0.6 * change(0, "default") + 0.4 * change(0, "local"))).T
        beside = z.detach() if cut_global else z
        out = z @ (second + 1.5 * 0.4 * change(1, "local")).T + beside @ (1.5 * 0.6 * change(1, "default")).T
        (wanted,) = torch.autograd.grad(out.square().sum(), own)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("examples", [3, 0])
def test_the_personalized_model_weighs_each_sample_by_its_likeness_to_the_sites_records(examples: int) -> None:
    strategy = FedDPA()
    model, values = toy(strategy)
    adapter_state.load(model, values)
    points, x = Points("b"), Points("a").x
    order = torch.randperm(points.num_samples, generator=torch.Generator().manual_seed(5))[:examples]
    known, found = features(values, points.x[order], 1.0), features(values, x, 1.0)
    cosines = [[max(0.0, float(F.cosine_similarity(f, k, dim=0))) for k in known] for f in found]
    share = torch.tensor([0.6 * sum(row) / examples if examples else 0.6 for row in cosines])[:, None]

    def mix(value: float | Tensor) -> None:
        assert LORA.mix
        LORA.mix(model, LoraConfig(rank=2, alpha=3.0), value, False)

    mix(0.0)
    before = model(x)
    with interpolate_adapter(model, cut(model), points, mix, Interpolation(0.6, examples), 5):
        torch.testing.assert_close(model(x), logits(values, features(values, x, share)), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(model(x[:1]), logits(values, features(values, x[:1], share[:1])), atol=1e-5, rtol=1e-4)
    assert torch.equal(model(x), before)  # the global adapter alone again
    torch.testing.assert_close(before, logits(values, features(values, x)), atol=1e-5, rtol=1e-4)
    assert not examples or share.std() > 0.01


@pytest.mark.parametrize("weighting", ["similarity", "fixed"])
def test_a_site_compares_samples_where_its_strategy_weighs_by_their_likeness(weighting: str, tmp_path: Path) -> None:
    job = assemble_job(small_cells({"name": "feddpa", "weighting": weighting}))
    made, generator = build_site(job, "b", SiteConfig(), tmp_path, lambda event: None), torch.Generator().manual_seed(0)
    context = made.context
    context.load_values({name: 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in job.initial.items()})
    batch = context.task.batch([0, 1, 2], 0)
    with torch.no_grad():
        context.set_local_share(0.5)
        fixed = float(context.task.loss(context.model, batch))
        with made.evaluator.use_personalized(job.config.strategy.traits.interpolation, Payload(0, 0, {})):
            found = float(context.task.loss(context.model, batch))
    assert (abs(found - fixed) < 1e-5) is (weighting == "fixed")


def test_a_share_a_sample_reaches_all_rows_of_the_sample() -> None:
    rows = torch.ones(6, 2, 1) * PerSample(torch.tensor([2.0, 3.0]))
    assert rows.flatten().tolist() == [2.0] * 6 + [3.0] * 6
    with pytest.raises(ConfigError, match="7 rows for 2 samples"):
        torch.ones(7, 1) * PerSample(torch.tensor([2.0, 3.0]))


def test_both_adapters_are_exported_and_nothing_of_what_samples_are_compared_with(tmp_path: Path) -> None:
    job = assemble_job(small_config("feddpa"))
    LORA.export(tmp_path, job.initial, job.config.adapter, KIND, "toy")
    own, local = (load_file(tmp_path / part / "adapter_model.safetensors") for part in (".", "local"))
    assert own.keys() == local.keys()
    name = next(n for n in job.initial if n.endswith("lora_A"))
    key = f"base_model.model.{name}.weight"
    assert torch.equal(own[key], job.initial[name])
    assert torch.equal(local[key], job.initial[name.replace("lora_A", "local_A")])
    assert not torch.equal(own[key], local[key])


def test_a_sites_vector_is_exported_beside_its_adapter_and_the_common_mean_is_not(tmp_path: Path) -> None:
    job = assemble_job(small_config("feddbe"))
    export_adapter(tmp_path, job.initial | {"feature_shift.shift": torch.ones(64)}, job.config)
    assert load_file(tmp_path / "feature_shift.safetensors")["feature_shift.shift"].tolist() == [1.0] * 64
    assert not [name for name in load_file(tmp_path / "adapter_model.safetensors") if "feature_shift" in name]


RECORD = {"unit": "record", "epsilon": 5, "delta": 1e-5, "clip": 1.0}


@pytest.mark.parametrize(
    ("strategy", "named"),
    [
        ({"name": "fedala"}, "strategy.name: 'fedala'"),
        ({"name": "feddbe"}, "strategy.name: 'feddbe'"),
        ({"name": "feddpa", "variant": "F", "weighting": "fixed"}, "strategy.variant: 'F'"),
        ({"name": "feddpa"}, "strategy.weighting: 'similarity'"),
    ],
)
def test_record_level_privacy_refuses_what_it_does_not_cover(strategy: dict[str, Any], named: str) -> None:
    raw = small_config(strategy).model_dump() | {"privacy": RECORD}
    with pytest.raises(ConfigError) as refused:
        assemble_job(JobConfig.model_validate(raw))
    assert named in str(refused.value)
    assert "; use " in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_cannot_carry_a_local_adapter_is_refused() -> None:
    raw = small_config("feddpa").model_dump() | {"adapter": {"kind": "bottleneck", "width": 4}}
    with pytest.raises(ConfigError, match=r"adapter\.kind: 'bottleneck': .*; use lora"):
        assemble_job(JobConfig.model_validate(raw))
    with pytest.raises(ConfigError, match=r"strategy.weighting: 'similarity' .*; use fixed"):
        assemble_job(small_text("feddpa"))


def test_feddpa_s_similarity_counts_what_points_away_as_nothing() -> None:
    """References at cosine 1 and -1: the mean of 1 and 0, where the mean of both would be 0."""
    found, known = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0], [-3.0, 0.0]])
    assert sample_weights(Interpolation(1.0, 2), found, known).tolist() == [0.5]


def test_feddpa_as_in_code_gives_what_is_alike_to_the_global_adapter() -> None:
    """Cosines 1 and 0.6: the code's weight 0.5 * 0.8 goes to the global adapter, so 0.6 is left; cosine -1 leaves 1.5."""
    blend = Interpolation(0.5, 2, as_in_code=True)
    found = sample_weights(blend, torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0], [3.0, 4.0]]))
    torch.testing.assert_close(found, torch.tensor([0.6]))
    assert sample_weights(blend, torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]])).tolist() == [1.5]
    assert fixed_weight(blend) == 0.5
    assert fixed_weight(Interpolation(0.3, 0, as_in_code=True)) == pytest.approx(0.7)
    assert FedDPA(reading="as_in_code").traits.interpolation == Interpolation(0.5, 5, as_in_code=True)
