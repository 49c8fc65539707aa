"""A federation in this process: a job folder's components, and of FLARE all but the network, the processes and the runners.

Components are built from the job's configuration by FLARE's configurators. FLARE's communicator hands out the controller's
tasks and takes the answers. FLARE's function applies the filters, those of a kit's privacy.json before the job's. Every
message passes through FLARE's serializer. A simulation of the same takes a minute, most of it to start processes.
"""

import shutil
import threading
import time
from argparse import Namespace
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FilterKey, FLContextKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.utils.task_utils import apply_filters
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils import fobs
from nvflare.private.fed.app.fl_conf import create_privacy_manager
from nvflare.private.fed.client.client_json_config import ClientJsonConfigurator
from nvflare.private.fed.server.server_json_config import ServerJsonConfigurator
from nvflare.private.privacy_manager import Scope

from consilium.flare.job import wire

JOB = "simulate_job"
SERVER = "server"


class Participant:
    """The server or a site: its components, and what they ask of FLARE's engine. `kit`: a startup kit, or an empty folder."""

    def __init__(self, job: Path, name: str, kit: Path) -> None:
        for folder in ("startup", "local"):
            (kit / folder).mkdir(parents=True, exist_ok=True)
        self.name, self.workspace, self.clients = name, Workspace(str(kit), name), []
        self.config = self._configured(Path(shutil.copytree(job / "app", kit / JOB / f"app_{name}")))
        self.scope = create_privacy_manager(self.workspace, names_only=False, is_server=name == SERVER).get_scope("")
        self._contexts = FLContextManager(self, name, JOB)
        with self.new_context() as fl_ctx:
            self.fire_event(EventType.START_RUN, fl_ctx)

    def _configured(self, app: Path) -> Any:
        """Return what FLARE's runner would work with, as FLARE reads it from an app's configuration."""
        kind, side = (ServerJsonConfigurator, "server") if self.name == SERVER else (ClientJsonConfigurator, "client")
        root = self.workspace.get_root_dir()
        args = Namespace(job_id=JOB, workspace=root, client_name=self.name, sp_scheme="tcp", sp_target="localhost:0", set=[])
        made = kind(self.workspace, str(app / "config" / f"config_fed_{side}.json"), args, str(app))
        made.configure()
        return made.runner_config

    def new_context(self) -> FLContext:
        """Return a context as FLARE makes it in a job process."""
        fl_ctx = self._contexts.new_context()
        fl_ctx.set_prop(FLContextKey.SCOPE_OBJECT, self.scope, private=True, sticky=False)
        return fl_ctx

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Tell all components."""
        for component in self.config.handlers:
            component.handle_event(event_type, fl_ctx)

    def get_component(self, name: str) -> Any:
        """Return a component by its id in the job's configuration."""
        return self.config.components.get(name)

    def get_clients(self) -> list[Client]:
        """Return the sites that the server knows."""
        return self.clients

    def get_workspace(self) -> Workspace:
        """Return the participant's folder."""
        return self.workspace

    def filtered(self, chain: str, message: Shareable, fl_ctx: FLContext, task: str, direction: str) -> Shareable:
        """Return what the filters of the participant's privacy.json and of the job make of a message."""
        fl_ctx.set_prop(FLContextKey.TASK_NAME, task, private=True, sticky=False)
        return apply_filters(chain, message, fl_ctx, getattr(self.config, chain), task, direction)


class Together:
    """A server and its sites, which do one task after the other. `kits`: startup kits by name, where a site has one."""

    def __init__(self, job: Path, sites: list[str], folder: Path, kits: Mapping[str, Path] | None = None) -> None:
        wire.register()
        places = {name: folder / name for name in [SERVER, *sites]} | dict(kits or {})
        everybody = {name: Participant(job, name, kit) for name, kit in places.items()}
        self.server, self.abort, self.over = everybody.pop(SERVER), Signal(), threading.Event()
        self.sites = everybody
        self.server.clients = [Client(name, name) for name in sites]
        self.controller, self.communicator = self.server.config.workflows[0].controller, WFCommServer()

    def run(self) -> None:
        """Run the job to its end. Raises what a site's components raise: they should turn it into an answer."""
        fl_ctx = self.server.new_context()
        self.controller.set_communicator(self.communicator)
        self.communicator.initialize_run(fl_ctx)
        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(self._serve)
            try:
                self.controller.initialize(fl_ctx)
                self.controller.control_flow(self.abort, fl_ctx)
                self.controller.stop_controller(fl_ctx)
            finally:
                self.over.set()
                self.communicator.finalize_run(fl_ctx)
            served.result()

    def _serve(self) -> None:
        try:
            while not self.over.is_set():
                if not any([self._one_task(client) for client in self.server.clients]):
                    time.sleep(0.01)
        except BaseException:
            self.abort.trigger(True)
            raise

    def _one_task(self, client: Client) -> bool:
        """Let a site do the task that waits for it; return whether there was one."""
        with self.server.new_context() as fl_ctx:
            task, number, data = self.communicator.process_task_request(client, fl_ctx)
        if not task:
            return False
        answer = fobs.loads(fobs.dumps(self._answer(self.sites[client.name], task, fobs.loads(fobs.dumps(data)))))
        with self.server.new_context() as fl_ctx:
            result = self.server.filtered(Scope.TASK_RESULT_FILTERS_NAME, answer, fl_ctx, task, FilterKey.IN)
            self.communicator.process_submission(client, task, number, result, fl_ctx)
        return True

    def _answer(self, site: Participant, task: str, data: Shareable) -> Shareable:
        with site.new_context() as fl_ctx:
            asked = site.filtered(Scope.TASK_DATA_FILTERS_NAME, data, fl_ctx, task, FilterKey.IN)
            answer = site.config.task_router.route(task).execute(task, asked, fl_ctx, self.abort)
            answer.set_cookie_jar(data.get_cookie_jar() or {})  # as FLARE's client does: a controller knows its task by them
            return site.filtered(Scope.TASK_RESULT_FILTERS_NAME, answer, fl_ctx, task, FilterKey.OUT)
