"""The controller over sites that are functions, for what it does when one is late, silent or answers nonsense."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from consilium import __version__
from consilium.core.messages import Hello, Payload
from consilium.federation.job_assembly import assemble_job
from consilium.flare.job import wire
from consilium.flare.job.controller import RoundController
from consilium.flare.job.transport import FlareTransport
from consilium.runtime.run_loop import RunLoop
from consilium.server.coordinator import Coordinator
from tests.conftest import small_config

Answer = Callable[[Shareable], Shareable | None]


class Federation(RoundController):
    """The controller over sites that answer at once by a function, or (None) never."""

    def __init__(self, folder: Path, answers: dict[str, Answer]) -> None:
        super().__init__()
        self.task_check_period = 0.01
        config = small_config("fedit")
        federation = config.federation.model_copy(update={"straggler_grace_seconds": 0.05})
        job = assemble_job(config.model_copy(update={"federation": federation}))
        self.coordinator = Coordinator(job, folder, lambda event: None)
        self.answers, self.sent, self.dead = answers, [], {}

    def send(self, task: Task, fl_ctx: FLContext, targets: list[str], **_: object) -> None:
        (name,) = targets
        self.sent.append((name, task))
        result = self.answers[name](task.data)
        if result is not None:
            if wire.HELLO in result and not result[wire.HELLO]["name"]:
                result[wire.HELLO]["name"] = name  # as an honest site does
            client_task = ClientTask(client=SimpleNamespace(name=name), task=task)
            client_task.result = result
            task.result_received_cb(client_task=client_task, fl_ctx=fl_ctx)
            task.completion_status = TaskCompletionStatus.OK

    def transport_of(self, fl_ctx: FLContext, signal: Signal | None = None) -> FlareTransport:
        return FlareTransport(self, self.coordinator, signal or Signal(), fl_ctx, set, 0.01)

    def register(self, fl_ctx: FLContext) -> None:
        """Send the sites a hello."""
        self.transport_of(fl_ctx).send_hellos()

    def sequence(self, fl_ctx: FLContext) -> RunLoop:
        return RunLoop(self.coordinator, self.transport_of(fl_ctx))

    def play_round(self, fl_ctx: FLContext) -> None:
        """Do the next round."""
        self.sequence(fl_ctx).run_phase()
        self.register(fl_ctx)

    def play_final(self, fl_ctx: FLContext) -> None:
        """Do the final evaluation."""
        self.sequence(fl_ctx).finish()

    def get_client_disconnect_time(self, client_name: str) -> float | None:
        return self.dead.get(client_name)

    def cancel_task(self, task: Task, completion_status: TaskCompletionStatus, fl_ctx: FLContext) -> None:
        task.completion_status = completion_status


def trained(value: float) -> Answer:
    def answer(message: Shareable) -> Shareable:
        if wire.HELLO in message:
            return wire.encode_dict(wire.HELLO, Hello("", 4, False, __version__).to_dict())
        payload, run = wire.decode(message)
        return wire.encode(
            Payload(payload.round, 0, {n: torch.full_like(t, value) for n, t in payload.tensors.items()}), run, True
        )

    return answer


def context(names: list[str]) -> FLContext:
    fl_ctx = FLContext()
    clients = [SimpleNamespace(name=n) for n in names]
    engine = SimpleNamespace(get_clients=lambda: clients, fire_event=lambda *event: None)
    fl_ctx.get_engine = lambda: engine
    return fl_ctx
