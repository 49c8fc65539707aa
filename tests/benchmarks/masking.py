"""What secure aggregation costs: a site's four messages and the server's opening, against ten training steps of the same site.

    python -m tests.benchmarks.masking [--sites 12 50 100 --numbers 389120 --repeats 3]
    python -m tests.benchmarks.masking --sites --rounds 8     rounds on startup kits
    python -m tests.benchmarks.masking --sites --private 15   exact noise beside Opacus' in a step of DP-SGD

The step is of a ViT-B/16 at 224 pixels with random weights, rank 8 on all linear layers, 8 pictures, one thread. Processor's
seconds, in turns with the steps, so that what else the machine does falls on both; files are written as in a run, but waiting
for the disk does not count. A third of the sites is lost after the keys were dealt, or nobody. Round trips over a network come
on top: on kits a round is timed by the clock, from one conclusion to the next, with three sites that train one step each.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn

from consilium.adapters import adapter_state
from consilium.adapters.lora import inject
from consilium.config.job import JobConfig
from consilium.config.privacy import SitePartnersConfig
from consilium.core.messages import Payload
from consilium.flare.job.recipe import export
from consilium.models.clip import CLIP
from consilium.models.clip.network import build_clip
from consilium.privacy.discrete_gaussian import add_share, share_deviation
from consilium.privacy.dpsgd import DpSgd, PrivateSteps
from consilium.privacy.secagg.arithmetic import Layout, quantize
from consilium.privacy.secagg.certificates import SERVER, make_simulated_identities, read_root, read_simulated_identity
from consilium.privacy.secagg.client import SecAggClient, SiteRecord
from consilium.privacy.secagg.server import MASKED, Attempt, Collector
from tests.conftest import small_cells, small_config, training_only
from tests.deployment.federation import Federation

STEPS = 10
"""Training steps of a round."""


class Round:
    """One phase of `count` sites; the times of the first site's messages and of the server's opening."""

    def __init__(self, folder: Path, count: int, numbers: int) -> None:
        names = [f"site-{i:03d}" for i in range(count)]
        make_simulated_identities(folder / "identities", names)
        raw = small_config("fedit").model_dump() | {"secure_aggregation": {}}
        config = JobConfig.model_validate(raw)
        found = {n: read_simulated_identity(folder / "identities", n, SitePartnersConfig()) for n in names}
        self.parties = {n: SecAggClient(one, config, "run", SiteRecord(folder / n)) for n, one in found.items()}
        self.collector = Collector(folder / "server", config, "run", read_root(folder / "identities/rootCA.pem"), SERVER)
        self.sent, self.order = Payload(0, 0, {"w": torch.zeros(numbers)}), [("w", (numbers,))]
        self.site, self.numbers, self.round = 0.0, numbers, 0
        for name, party in self.parties.items():
            self.collector.admit(name, party.answer({"step": "hello"}))

    def run(self, lost: int) -> tuple[float, float]:
        """Return the seconds of one site and of the server's opening; the last `lost` sites go after the keys."""
        self.site, names = 0.0, list(self.parties)
        order: Layout = self.order
        attempt = self.collector.begin(self.round, 0, names)
        sent = replace(self.sent, round=self.round)
        self.round += 1
        for name in names:
            attempt.take_prepared(name, self._timed(name, lambda n=name: self.parties[n].answer(attempt.prepare_question())))
        parties = attempt.close_prepared()
        masks = attempt.mask_context(parties, order, sent)
        for name in names[: len(names) - lost]:
            attempt.take_masked(name, self._timed(name, lambda n=name: self._masked(attempt, n, parties, sent)))
        survivors = attempt.close_masked(parties)
        for name in survivors:
            answer = self._timed(name, lambda n=name: self.parties[n].answer(attempt.question("confirm", survivors=survivors)))
            attempt.take_confirmed(name, answer, survivors, masks)
        for name in survivors:
            answer = self._timed(name, lambda n=name: self.parties[n].answer(attempt.reveal_question()))
            attempt.take_revealed(name, answer, parties, masks)
        began = time.process_time()
        attempt.unmask(parties, survivors, masks, order)
        opening = time.process_time() - began
        self.collector.delete_phase_attempts(attempt)
        return self.site, opening

    def _timed(self, name: str, do: Callable[[], Any]) -> Any:
        began = time.process_time()
        found = do()
        self.site += (time.process_time() - began) * (name == next(iter(self.parties)))
        return found

    def _masked(self, attempt: Attempt, name: str, parties: list[str], sent: Payload) -> Payload:
        party = self.parties[name]
        party.check_train_question(replace(sent, masking=attempt.train_question(name, parties)), self.order)
        update = quantize({"w": torch.randn(self.numbers, generator=torch.Generator().manual_seed(self.round)) / 100})
        words = party.mask(attempt.place, update, 1)
        return Payload(sent.round, 0, {MASKED: torch.from_numpy(words.view("int64").copy())})


class ViTB:
    """A ViT-B/16 at 224 pixels of random weights, rank 8 on all linear layers, and the seconds of its steps of 8 pictures."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = build_clip("biomedclip", None, None, 5, weights=False)
        inject(self.model, 8, 8.0, CLIP.target("all-linear"))
        self.model.train()
        trained = [tensor for tensor in adapter_state.tensors(self.model).values() if isinstance(tensor, nn.Parameter)]
        self.optimizer, self.times = torch.optim.AdamW(trained, lr=1e-4), list[float]()
        self.images, self.labels = torch.rand(8, 3, 224, 224) * 255, torch.arange(8) % 5

    def timed(self) -> None:
        """Take one step and keep its time."""
        began = time.process_time()
        nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.times.append(time.process_time() - began)


def masks(counts: list[int], numbers: int, repeats: int) -> None:
    """Print what masks cost, against steps of a ViT-B taken in turns with the rounds."""
    step = ViTB()
    step.timed()
    print("| sites | lost | a site, s | over ten steps | opening at the server, s |\n|---|---|---|---|---|")
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            rounds = Round(Path(folder), count, numbers)
            for lost in (0, (count - 1) // 3):
                found = []
                for _ in range(repeats):
                    step.timed()
                    site, opening = rounds.run(lost)
                    found.append((site, site / (STEPS * step.times[-1]), opening))
                cells = [statistics.median(one) for one in zip(*found, strict=True)]
                print(f"| {count} | {lost} | {cells[0]:.3f} | {cells[1]:.4f} | {cells[2]:.3f} |", flush=True)
    print(f"\na step: {statistics.median(step.times):.2f} s")


def noise(repeats: int) -> None:
    """Print what a share of discrete noise on a million numbers costs, against as many numbers of torch.randn."""
    zeros = {"w": torch.zeros(10**6, dtype=torch.int64)}
    deviation = share_deviation(1.0, 1.0, 8)
    found = []
    for _ in range(repeats):
        began = time.process_time()
        add_share(zeros, deviation)
        middle = time.process_time()
        torch.randn(10**6)
        found.append((middle - began, (middle - began) / (time.process_time() - middle)))
    share, ratio = (statistics.median(one) for one in zip(*found, strict=True))
    print(f"\na share of noise on a million numbers: {share:.2f} s, {ratio:.0f} times torch.randn")


class OpacusSteps:
    """A step of DP-SGD as Opacus takes it: gradients of a whole batch by hooks, clipped and with noise in float32."""

    def __init__(self, vit: ViTB, trained: dict[str, nn.Parameter], dp: DpSgd) -> None:
        self._vit, self._model = vit, GradSampleModule(vit.model, strict=False)
        optimizer = torch.optim.AdamW(list(trained.values()), lr=1e-4)
        generator = torch.Generator().manual_seed(0)
        self.optimizer = DPOptimizer(
            optimizer, noise_multiplier=dp.noise_multiplier, max_grad_norm=dp.clip, expected_batch_size=8, generator=generator
        )

    def __call__(self) -> None:
        """Take a step on 8 pictures."""
        self._model.enable_hooks()
        nn.functional.cross_entropy(self._model(self._vit.images), self._vit.labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._model.disable_hooks()


def leading(tensors: dict[str, nn.Parameter], numbers: int) -> dict[str, nn.Parameter]:
    """Return the first tensors that have so many numbers together."""
    found: dict[str, nn.Parameter] = {}
    for name, tensor in tensors.items():
        if sum(one.numel() for one in found.values()) >= numbers:
            break
        found[name] = tensor
    return found


def private_steps(repeats: int, numbers: int) -> None:
    """Print what a step of ours costs, one picture at a time with exact noise, beside one of Opacus, all 8 in a batch.

    They are timed in turns on the same ViT-B, all threads of the process; with them the bare passes, one picture at a time.
    """
    vit, dp = ViTB(), DpSgd(1.0, 1.0, 0.5)
    trained = leading({n: t for n, t in adapter_state.tensors(vit.model).items() if isinstance(t, nn.Parameter)}, numbers)
    for name, parameter in adapter_state.tensors(vit.model).items():
        parameter.requires_grad_(name in trained)
    numbers = sum(tensor.numel() for tensor in trained.values())
    times = dict[str, list[float]]()
    opacus = OpacusSteps(vit, trained, dp)
    with PrivateSteps(vit.model, torch.optim.AdamW(list(trained.values()), lr=1e-4), trained, 16, dp) as private:

        def alone() -> None:
            for image, label in zip(vit.images, vit.labels, strict=True):
                nn.functional.cross_entropy(vit.model(image[None]), label[None]).backward()
                for parameter in trained.values():
                    parameter.grad = None

        def exact() -> None:
            for image, label in zip(vit.images, vit.labels, strict=True):
                with private.sum.add_unit():
                    nn.functional.cross_entropy(vit.model(image[None]), label[None]).backward()
            private.step({})

        for turn in range(2 + repeats):  # two are not counted
            for name, take in (("Opacus", opacus), ("not private", alone), ("exact", exact)):
                began = time.process_time()
                take()
                if turn > 1:
                    times.setdefault(name, []).append(time.process_time() - began)
    over = {
        a: statistics.median(y / x for x, y in zip(times[a], times["exact"], strict=True)) for a in ("Opacus", "not private")
    }
    seconds = {name: round(statistics.median(found), 2) for name, found in times.items()}
    print(f"\na step of DP-SGD of 8 pictures on {numbers:,} numbers, s: {seconds}; exact over the others: {over}")


def kits(rounds: int) -> None:
    """Print the seconds of a round on startup kits of three sites on this machine: plain, masked, with noise in shares."""
    raw = training_only(small_cells("fedit", local_steps=1, rounds=rounds), test=1).model_dump()
    raw["data"]["phantoms"]["training"] = 8
    raw["federation"] |= {"min_sites": 3}
    steps = {"unit": "record", "trust": "distributed", "epsilon": 4, "sample_rate": 0.25, "divisor": 6.0, "clip": 0.05}
    sections: dict[str, dict[str, Any]] = {"plain": {}, "masked": {"secure_aggregation": {}}}
    sections["masked, noise in shares"] = {"secure_aggregation": {}, "privacy": steps}
    print("\n| job on kits | a round, s |\n|---|---|")
    with (
        tempfile.TemporaryDirectory() as folder,
        Federation(Path(folder), {f"site-{i}": {} for i in (1, 2, 3)}) as federation,
    ):
        federation.start()
        for name, section in sections.items():
            job = Path(folder) / "job.yaml"
            job.write_text(yaml.safe_dump(JobConfig.model_validate(raw | section).model_dump()))
            federation.wait(federation.submit(export(job, Path(folder) / name)), 600)
            ends = [event["time"] for event in federation.events("concluded")]
            print(f"| {name} | {statistics.median(b - a for a, b in pairwise(ends)):.2f} |", flush=True)
        federation.shutdown()


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="*", default=[12, 50, 100])
    parser.add_argument("--numbers", type=int, default=389_120)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=0, help="of jobs on startup kits; 0: none")
    parser.add_argument("--private", type=int, default=0, help="steps of DP-SGD, exact beside Opacus'; 0: none")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    if wanted.sites:
        masks(wanted.sites, wanted.numbers, wanted.repeats)
        noise(wanted.repeats)
    if wanted.private:
        private_steps(wanted.private, wanted.numbers)
    if wanted.rounds:
        kits(wanted.rounds)


if __name__ == "__main__":
    main()
