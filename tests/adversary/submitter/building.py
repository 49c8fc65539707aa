"""FLARE's own way from a job's configuration to components, in this process, under the policies of a startup kit.

What is about to be called is noted and not called: on a list that lets too much pass these tests would otherwise do harm.
"""

import json
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.fuel.common.excepts import ComponentNotAuthorized, ConfigError
from nvflare.fuel.utils import component_builder
from nvflare.fuel.utils.class_loader import load_class
from nvflare.fuel.utils.json_scanner import Node
from nvflare.private.fed.client.client_json_config import ClientJsonConfigurator
from nvflare.private.fed.server.server_json_config import ServerJsonConfigurator
from nvflare.private.fed.utils.fed_utils import authorize_build_component

from consilium.flare.kit.provision import provision

ROLES = ("server", "site")


def make_kits(folder: Path) -> dict[str, Path]:
    """Return the startup kits of a small deployment by role."""
    server = {"name": "localhost", "org": "hub", "state": str(folder / "state")}
    admins = [{"name": "a@hub.example", "org": "hub", "role": "lead"}]
    raw = {"name": "test", "server": server, "sites": [{"name": "clinic", "org": "clinic"}], "admins": admins}
    (folder / "sites.yml").write_text(yaml.safe_dump(raw))
    kits = provision(folder / "sites.yml", folder)
    return {"server": kits / "localhost", "site": kits / "clinic"}


class Builder:
    """A server's or site's job process, as far as building components goes. `called`: all that FLARE was about to call."""

    def __init__(self, kit: Path, role: str, config: dict[str, Any], folder: Path) -> None:
        file = folder / ("config_fed_server.json" if role == "server" else "config_fed_client.json")
        file.write_text(json.dumps(config))
        workspace = Workspace(str(kit), "localhost" if role == "server" else "clinic", "config")
        args = Namespace(job_id="job", workspace=str(kit), client_name="clinic", sp_scheme="grpc", sp_target="localhost:8002")
        made = ServerJsonConfigurator if role == "server" else ClientJsonConfigurator
        self.configurator = made(workspace, str(file), args, str(folder))
        context = FLContext()
        values = {FLContextKey.WORKSPACE_OBJECT: workspace, FLContextKey.CURRENT_JOB_ID: "job", FLContextKey.JOB_META: {}}
        for key, value in values.items():
            context.set_prop(key, value, private=True, sticky=False)
        self.configurator.set_component_build_authorizer(authorize_build_component, fl_ctx=context, event_handlers=[])
        self.called: list[str] = []

    def build(self, component: dict[str, Any]) -> bool:
        """Build an entry of `components`; return whether FLARE would have called what it names."""
        before, node = len(self.called), Node(component)
        node.paths, node.processor = ["components", "#1"], self.configurator
        with patch.object(component_builder, "instantiate_class", self._note):
            try:
                self.configurator.authorize_and_build_component(component, self.configurator.config_ctx, node)
            except (ComponentNotAuthorized, ConfigError, TypeError, ValueError):
                return False
        return len(self.called) > before

    def configure(self) -> None:
        """Read the whole configuration, as FLARE does when a job starts. What FLARE would call is noted here too."""
        with patch.object(component_builder, "instantiate_class", self._note), suppress(Exception):
            self.configurator.configure()  # it ends in an error in any case: nothing was made

    def _note(self, path: str, arguments: dict[str, Any]) -> None:
        load_class(path)  # TypeError where there is nothing of that name
        self.called.append(path)
