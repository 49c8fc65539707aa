"""FLARE components the tests put into job folders: a listener on a site's bytes, a site gone wrong, FLARE's FedAvg."""

import os
from dataclasses import replace
from pathlib import Path

import torch
from nvflare.apis.dxo import from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.fuel.utils import fobs

from consilium.adapters import adapter_state
from consilium.config.job import load_job
from consilium.core.storage import save_state
from consilium.federation.job_assembly import assemble_job
from consilium.flare.job import site_jobs, wire
from consilium.flare.job.executor import SiteExecutor


class _Recorder(Filter):
    """Keeps the bytes FLARE's serializer makes of what passes, a file each in `folder`."""

    folder: str

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        folder = Path(os.environ["CONSILIUM_OUTPUT"]) / self.folder / fl_ctx.get_identity_name()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{len(list(folder.iterdir()))}.bin").write_bytes(fobs.dumps(shareable))
        return shareable


class Listener(_Recorder):
    """Last filter of a site: keeps what the site sends."""

    folder = "heard"


class Ear(_Recorder):
    """First task filter of a site: keeps every task it receives."""

    folder = "received"


class Corrupter(Filter):
    """A site whose results are damaged after its own check, in another way every round."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        if fl_ctx.get_identity_name() == "site-4" and "DXO" in shareable and from_shareable(shareable).data:
            dxo, round = from_shareable(shareable), shareable.get_header("current_round")
            data, rest = wire.unpack(dxo.data, dxo.meta[wire.KEY])
            name = next(iter(data))
            damage = (
                lambda: data[name].fill_(float("nan")),
                lambda: data.update(extra=torch.zeros(1)),
                lambda: data.update({name: torch.zeros(1)}),
                lambda: [tensor.mul_(1e6) for tensor in data.values()],
                lambda: shareable.set_header("current_round", round - 1),
            )
            damage[round]()
            dxo.data, dxo.meta[wire.KEY] = wire.pack(data, rest)
            dxo.update_shareable(shareable)
        return shareable


class InitialFedAvg(FedAvg):
    """FLARE's FedAvg with its two documented hooks: where the first model comes from and where the last one goes."""

    def load_model(self) -> FLModel:
        path = Path(os.environ["CONSILIUM_JOB"])
        return FLModel(params=assemble_job(load_job(path), path).initial)

    def save_model(self, model: FLModel) -> None:
        save_state(Path(os.environ["CONSILIUM_OUTPUT"]) / "fedavg.safetensors", model.params, {})
        (Path(os.environ["CONSILIUM_OUTPUT"]) / "results.json").write_text("{}")


class Thief(SiteExecutor):
    """An executor gone wrong: at site-3 it hands its whole adapter to the guard as its update."""

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        result = super().execute(task_name, shareable, fl_ctx, abort_signal)
        if task_name != wire.TRAIN or fl_ctx.get_identity_name() != "site-3":
            return result
        answer = wire.pop(result)
        everything = {
            n: p.detach().clone() for n, p in adapter_state.tensors(site_jobs.built_client(self, fl_ctx).context.model).items()
        }
        return wire.put(replace(answer, result=replace(answer.result, tensors=everything)))


class Smuggler(SiteExecutor):
    """An executor gone wrong: it makes a message itself instead of leaving that to the guard."""

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        answer = wire.pop(super().execute(task_name, shareable, fl_ctx, abort_signal))
        return wire.encode(answer.result, "", update=True) if task_name == wire.TRAIN else wire.put(answer)
