"""Masked rounds over FLARE: what server/masked_round.py asks of sites, as tasks."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from nvflare.apis.shareable import Shareable

from consilium.core.messages import Kind, Payload
from consilium.flare.job import wire
from consilium.flare.job.tasks import TaskSender
from consilium.server.masked_round import Asked, MaskedRounds

QUICK = ("confirm", "reveal", "cancel")
"""The steps of a phase for which a site computes less than a second."""
QUICK_GRACE = 10.0
"""Seconds that a site has for them once enough others have replied."""


class Aborted(Exception):
    """FLARE ends the job amid a phase."""


class MaskedTasks:
    """Runs masked phases by tasks."""

    def __init__(self, rounds: MaskedRounds) -> None:
        self._rounds, self._lock = rounds, threading.Lock()

    def round(self, tasks: TaskSender) -> None:
        """Run one phase; nothing of it counts if the job is ended before its end."""

        def ask(
            kind: Kind, messages: Mapping[str, Asked], take: Callable[[str, Any], None], enough: Callable[[], bool]
        ) -> None:
            connected = {client.name for client in tasks.fl_ctx.get_engine().get_clients()}
            sent = {n: _encoded(message, tasks.coordinator.run) for n, message in messages.items() if n in connected}
            quick = any(isinstance(one, dict) and one.get("step") in QUICK for one in messages.values())

            def received(name: str, result: Shareable) -> None:
                answer = wire.decode(result)[0] if kind is Kind.TRAIN else result.get(wire.MASKS)
                with self._lock:
                    take(name, answer)

            tasks.exchange(kind.value, sent, received, enough, QUICK_GRACE if quick else None)
            if tasks.aborted:
                raise Aborted

        try:
            self._rounds.phase(ask, lambda: tasks.end_held_out(tasks.send_held_out()))
        except Aborted:
            return


def _encoded(message: Asked, run: str) -> Shareable:
    if isinstance(message, Payload):
        return wire.encode(message, run, update=False)
    return wire.encode_dict(wire.MASKS, {"run": run, "question": message})
