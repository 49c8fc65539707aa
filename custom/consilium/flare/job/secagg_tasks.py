"""Masked rounds over FLARE: the controller's tasks as the way to ask sites, see server/masked_round.py."""

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from consilium.core.messages import Kind, Payload
from consilium.flare.job import wire
from consilium.server.masked_round import Asked, MaskedRounds

if TYPE_CHECKING:
    from consilium.flare.job.controller import RoundController

CLOSING = 10.0
"""Seconds that a site has for a signature or shares once enough others have answered; none of it takes a second."""
QUICK = ("confirm", "reveal", "cancel")


class Aborted(Exception):
    """FLARE ends the job amid a phase."""


class MaskedTasks:
    """Drives masked phases by the tasks of a controller."""

    def __init__(self, controller: "RoundController", rounds: MaskedRounds) -> None:
        self.controller, self.rounds, self.coordinator = controller, rounds, rounds.coordinator
        self._lock = threading.Lock()

    def round(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run one phase; nothing of it counts if the job is ended before its end."""

        def ask(
            kind: Kind, messages: Mapping[str, Asked], take: Callable[[str, Any], None], enough: Callable[[], bool]
        ) -> None:
            there = {client.name for client in fl_ctx.get_engine().get_clients()}
            sent = {n: self._encoded(message) for n, message in messages.items() if n in there}
            quick = any(isinstance(one, dict) and one.get("step") in QUICK for one in messages.values())

            def received(name: str, result: Shareable) -> None:
                answer = wire.decode(result)[0] if kind is Kind.TRAIN else result.get(wire.MASKS)
                with self._lock:
                    take(name, answer)

            grace = CLOSING if quick else None
            self.controller.exchange(self.coordinator, kind.value, sent, received, enough, abort_signal, fl_ctx, grace)
            if abort_signal.triggered:
                raise Aborted

        try:
            self.rounds.phase(ask, lambda: self._evaluate_held_out(abort_signal, fl_ctx))
        except Aborted:
            return

    def _encoded(self, message: Asked) -> Shareable:
        if isinstance(message, Payload):
            return wire.encode(message, self.coordinator.run, update=False)
        return wire.encode_dict(wire.MASKS, {"run": self.coordinator.run, "question": message})

    def _evaluate_held_out(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        tasks = self.controller.evaluate_held_out(self.coordinator, fl_ctx)
        self.controller.end_held_out(self.coordinator, tasks, abort_signal, fl_ctx)
