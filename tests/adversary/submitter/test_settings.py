"""A submitter's job folder holds files named as FLARE's own settings, which FLARE looks for anywhere under the kit."""

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from nvflare.apis.fl_constant import SystemConfigs
from nvflare.fuel.f3.comm_config import CommConfigurator
from nvflare.fuel.f3.drivers.grpc_driver import GRPC_DEFAULT_OPTIONS, GrpcDriver
from nvflare.fuel.utils.config_service import ConfigService

from consilium.flare.kit.kit_hardening import shadow_job_settings


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """Return a kit with many jobs' folders: which FLARE would look into first depends on the file system."""
    (tmp_path / "local").mkdir()
    (tmp_path / "local/resources.json").write_text(json.dumps({"whose": "the site's"}))
    for number in range(40):
        config = tmp_path / f"{number:02d}b6" / "app_site" / "config"
        config.mkdir(parents=True)
        (config / "comm_config.json").write_text(json.dumps({"comm_driver_path": str(config)}))
        (config / "resources.json").write_text(json.dumps({"whose": "the job's"}))
    return tmp_path


@pytest.fixture
def driver_path(kit: Path) -> Iterator[Path]:
    """Let FLARE start as a job process does, and forget it afterwards."""
    kept = (ConfigService._sections, ConfigService._config_path, ConfigService._cmd_args, ConfigService._var_dict)
    ConfigService.reset()
    CommConfigurator.reset()
    yield kit
    CommConfigurator.reset()
    CommConfigurator._configuration = None
    ConfigService.reset()
    ConfigService._sections, ConfigService._config_path, ConfigService._cmd_args, ConfigService._var_dict = kept


def test_the_kits_own_settings_win(driver_path: Path) -> None:
    """No folder of transports, which FLARE would import, comes from a job; nor do resources."""
    shadow_job_settings(driver_path)
    ConfigService.initialize({SystemConfigs.RESOURCES_CONF: "resources.json"}, [str(driver_path)])
    assert CommConfigurator().get_comm_driver_path(None) is None
    assert ConfigService.get_section(SystemConfigs.RESOURCES_CONF) == {"whose": "the site's"}


def test_flares_grpc_takes_two_connections_of_every_site_and_some_peoples_and_finds_dead_lines(driver_path: Path) -> None:
    """By itself it serves a hundred, and the next waits for ever; its limits of a message's size stay what they were."""
    (driver_path / "comm_config.json").write_text("{}\n")  # as kits of earlier versions have it
    shadow_job_settings(driver_path)
    ConfigService.initialize({}, [str(driver_path)])
    driver, server = GrpcDriver(), files("consilium.flare.kit").joinpath("policies", "resources_server.json")
    assert driver.max_workers >= 2 * json.loads(server.read_text())["servers"][0]["max_num_clients"] + 100
    options = dict(driver.options)
    assert options.items() >= dict(GRPC_DEFAULT_OPTIONS).items()
    assert 10_000 <= options["grpc.http2.min_ping_interval_without_data_ms"] < options["grpc.keepalive_time_ms"] <= 30_000


def test_a_sites_own_connection_settings_stay(kit: Path) -> None:
    (kit / "comm_config.json").write_text('{"max_message_size": 1}')
    for _ in range(2):
        shadow_job_settings(kit)
    assert json.loads((kit / "comm_config.json").read_text()) == {"max_message_size": 1}
    assert (kit / "resources.json").read_text() == (kit / "local/resources.json").read_text()
