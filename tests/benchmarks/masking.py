"""What secure aggregation costs: a site's four messages and the server's opening, against ten training steps of the same site.

    python -m tests.benchmarks.masking [--sites 12 50 100 --numbers 389120 --repeats 3]

The step is that of tests.benchmarks.client_step (a random Llama, 8 ranks, 4 x 256 tokens, one thread). Processor's seconds, in
turns with the steps, so that what else the machine does falls on both; files are written as in a run, but waiting for the disk
does not count. A third of the sites is lost after the keys were dealt, or nobody. Round trips over a network come on top.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from consilium.config.job import JobConfig
from consilium.config.secure_aggregation import SitePartnersConfig
from consilium.messages import Payload
from consilium.privacy.secagg.arithmetic import Layout, quantize
from consilium.privacy.secagg.attempt import MASKED, Attempt
from consilium.privacy.secagg.collector import Collector
from consilium.privacy.secagg.party import Party
from consilium.privacy.secagg.record import SiteRecord
from consilium.privacy.secagg.simulated import SERVER, read_root, simulated_identities, simulated_identity
from tests.benchmarks.client_step import SHAPE, way
from tests.conftest import small_config

STEPS = 10
"""Training steps of a round."""


class Round:
    """One phase of `count` sites; the times of the first site's messages and of the server's opening."""

    def __init__(self, folder: Path, count: int, numbers: int) -> None:
        names = [f"site-{i:03d}" for i in range(count)]
        simulated_identities(folder / "identities", names)
        raw = small_config("fedit").model_dump() | {"secure_aggregation": {}}
        config = JobConfig.model_validate(raw)
        found = {n: simulated_identity(folder / "identities", n, SitePartnersConfig()) for n in names}
        self.parties = {n: Party(one, config, "run", SiteRecord(folder / n)) for n, one in found.items()}
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
            answer = self._timed(name, lambda n=name: self.parties[n].answer(attempt.confirm_question(survivors)))
            attempt.take_confirmed(name, answer, survivors, masks)
        for name in survivors:
            answer = self._timed(name, lambda n=name: self.parties[n].answer(attempt.reveal_question()))
            attempt.take_revealed(name, answer, parties, masks)
        began = time.process_time()
        attempt.unmask(parties, survivors, masks, order)
        opening = time.process_time() - began
        self.collector.forget(attempt)
        return self.site, opening

    def _timed(self, name: str, do: Callable[[], Any]) -> Any:
        began = time.process_time()
        found = do()
        self.site += (time.process_time() - began) * (name == next(iter(self.parties)))
        return found

    def _masked(self, attempt: Attempt, name: str, parties: list[str], sent: Payload) -> Payload:
        party = self.parties[name]
        party.open(replace(sent, masking=attempt.train_question(name, parties)), self.order)
        update = quantize({"w": torch.randn(self.numbers, generator=torch.Generator().manual_seed(self.round)) / 100})
        words = party.mask(attempt.place, update, 1)
        return Payload(sent.round, 0, {MASKED: torch.from_numpy(words.view("int64").copy())})


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+", default=[12, 50, 100])
    parser.add_argument("--numbers", type=int, default=389_120)
    parser.add_argument("--repeats", type=int, default=3)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    model, ids = way(8, 8), torch.randint(3, SHAPE["vocab_size"], (4, 256), generator=torch.Generator().manual_seed(0))
    model.step(ids)
    print("| sites | lost | a site, s | over ten steps | opening at the server, s |\n|---|---|---|---|---|")
    for count in wanted.sites:
        with tempfile.TemporaryDirectory() as folder:
            rounds = Round(Path(folder), count, wanted.numbers)
            for lost in (0, (count - 1) // 3):
                found = []
                for _ in range(wanted.repeats):
                    model.timed(ids)
                    site, opening = rounds.run(lost)
                    found.append((site, site / (STEPS * model.times[-1]), opening))
                cells = [statistics.median(one) for one in zip(*found, strict=True)]
                print(f"| {count} | {lost} | {cells[0]:.3f} | {cells[1]:.4f} | {cells[2]:.3f} |", flush=True)


if __name__ == "__main__":
    main()
