"""Kits with one FLARE relay before the server, which every site but the first goes through, from FLARE's own project.yml."""

from pathlib import Path

from nvflare.lighter.constants import CtxKey
from nvflare.lighter.prov_utils import prepare_builders
from nvflare.lighter.provision import prepare_project
from nvflare.lighter.provisioner import Provisioner

from consilium.config.deployment import load_deployment
from consilium.flare.kit.provision import project_of

RELAY = "relay-1"


def provision_relayed(sites: Path, folder: Path) -> Path:
    """Make kits as `consilium.flare.kit.provision.provision` does, and a relay's beside them."""
    from tests.deployment.federation import free_port

    raw = project_of(load_deployment(sites), sites.resolve())
    clients = [one for one in raw["participants"] if one["type"] == "client"]
    for one in clients[1:]:
        one["connect_to"] = {"name": RELAY}
    host = {"default_host": "localhost", "port": free_port(), "scheme": "grpc", "connection_security": "mtls"}
    raw["participants"].append({"name": RELAY, "type": "relay", "org": "hub", "listening_host": host})
    context = Provisioner(str(folder.resolve()), prepare_builders(raw)).provision(prepare_project(raw))
    assert not context.get(CtxKey.BUILD_ERROR)
    return Path(context.get_result_location())
