"""LoRA-FAIR: the corrected B against dense objectives, closed forms and limits of the penalty."""

import pytest
import torch
from torch import Tensor

from consilium.core.messages import SiteInfo, Tensors
from consilium.strategies.lora_fair import LoraFair
from consilium.strategies.strategy import ServerState, SiteResult, shares
from consilium.strategies.unequal_ranks import factors
from tests.strategies.unequal import LAYERS, answer, initial, product

SITES = ["a", "b", "c"]


def round_of(strategy: LoraFair) -> tuple[ServerState, dict[str, SiteResult], ServerState]:
    """Return a state, what its sites answer, and the state after."""
    state = strategy.initialize({n: t + 0.3 * torch.randn(t.shape, generator=seeded(n)) for n, t in initial(rank=3).items()})
    uploads = {}
    for index, name in enumerate(SITES):
        site = SiteInfo(name, index + 1)
        sent = strategy.payload(state, site)
        uploads[name] = SiteResult(answer(strategy, sent, index, 0.5), index + 1, sent, site)
    return state, uploads, strategy.aggregate(state, uploads)


def seeded(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(map(ord, name)))


def parts(uploads: dict[str, SiteResult], layer: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return D and the mean B and A, dense, float64."""
    share = shares(uploads)
    ends: dict[str, Tensors] = {name: upload.trained_tensors() for name, upload in uploads.items()}
    wanted = sum(share[name] * product(end, layer) for name, end in ends.items())
    b, a = (sum(share[name] * factors(end, layer)[i].double() for name, end in ends.items()) for i in (0, 1))
    return wanted, b, a


def test_frobenius_has_its_closed_form() -> None:
    _, uploads, after = round_of(LoraFair(loss="frobenius", penalty=0.5))
    for layer in LAYERS:
        wanted, b, a = parts(uploads, layer)
        change = (wanted - b @ a) @ a.T @ torch.linalg.inv(a @ a.T + 0.5 * torch.eye(3))
        torch.testing.assert_close(factors(after.shared, layer), ((b + change).float(), a.float()))


def test_cosine_ends_where_the_dense_objective_s_gradient_does() -> None:
    _, uploads, _ = round_of(LoraFair())
    for layer in LAYERS:
        wanted, b, a = parts(uploads, layer)
        left, right = torch.linalg.qr(wanted)
        change = LoraFair(penalty=0.01).correction((left, right), b, a).requires_grad_()

        def objective(change: Tensor, wanted: Tensor = wanted, b: Tensor = b, a: Tensor = a) -> Tensor:
            cosine = torch.nn.functional.cosine_similarity(wanted.flatten(), ((b + change) @ a).flatten(), dim=0)
            return 1 - cosine + 0.01 * change.square().sum()

        (gradient,) = torch.autograd.grad(objective(change), change)
        assert float(gradient.abs().max()) < 1e-7
        assert float(objective(change.detach())) < float(objective(torch.zeros_like(b)))


@pytest.mark.parametrize("loss", ["cosine", "frobenius"])
def test_a_great_penalty_leaves_the_mean_and_a_small_one_reaches_the_projection(loss: str) -> None:
    _, uploads, _ = round_of(LoraFair(loss=loss))
    for layer in LAYERS:
        wanted, b, a = parts(uploads, layer)
        pair = torch.linalg.qr(wanted)
        assert float(LoraFair(loss=loss, penalty=1e9).correction(pair, b, a).abs().max()) < 1e-6
        best = wanted @ torch.linalg.pinv(a) @ a  # D on the row space of A
        found = (b + LoraFair(loss=loss, penalty=1e-9).correction(pair, b, a)) @ a
        cosine = torch.nn.functional.cosine_similarity(best.flatten(), found.flatten(), dim=0)
        assert float(cosine) == pytest.approx(1, abs=1e-6)


def test_without_an_angle_there_is_no_correction() -> None:
    """D = 0 with B A = diag(1, 1), and B = 0 with D = diag(1, 1): neither has a cosine."""
    zero, one = torch.zeros(2, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    for wanted, b in ((zero, one), (one, zero)):
        assert LoraFair().correction((wanted, one), b, one).tolist() == zero.tolist()


def test_equal_sites_need_no_correction_and_nothing_stays_nothing() -> None:
    strategy = LoraFair()
    state = strategy.initialize(initial(rank=3))
    uploads = {}
    for name in SITES:
        sent = strategy.payload(state, SiteInfo(name, 1))
        uploads[name] = SiteResult(answer(strategy, sent, 7), 1, sent, SiteInfo(name, 1))
    after = strategy.aggregate(state, uploads)
    for layer in LAYERS:
        torch.testing.assert_close(factors(after.shared, layer), factors(uploads["a"].trained_tensors(), layer))
    still = {n: SiteResult(answer(strategy, u.sent, 7, 0.0), 1, u.sent, u.site) for n, u in uploads.items()}
    unmoved = strategy.aggregate(state, still)
    for name, tensor in state.shared.items():
        torch.testing.assert_close(unmoved.shared[name], tensor)


def test_the_papers_settings_are_the_defaults() -> None:
    """Bian et al. (2024, arXiv 2411.14961): the similarity is the cosine, lambda is 0.01."""
    assert (LoraFair().loss, LoraFair().penalty) == ("cosine", 0.01)
