"""What startup kits decide, asked of FLARE's own functions in this process; test_federation asks running kits."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from nvflare.apis.fl_constant import AdminCommandNames, SiteType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.workspace import Workspace
from nvflare.fuel.sec.authz import AuthorizationService, AuthzContext, Person
from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
from nvflare.private.fed.app.fl_app_validator import FLAppValidator
from nvflare.private.fed.app.fl_conf import create_privacy_manager
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.private.fed.utils.app_deployer import AppDeployer
from nvflare.private.privacy_manager import PrivacyService
from nvflare.security.security import FLAuthorizer

from consilium.federation.run_folders import OWNER
from consilium.flare.job.recipe import export
from tests.deployment.federation import ADMIN, LEAD, Federation
from tests.deployment.jobs import check_private_run, job_yaml, private_job, ward, with_scope, without_guard
from tests.flare.running import own_process
from tests.flare.together import JOB, Together

ORGANIZATIONS = {"server": "hub", "site-1": "site_1"}
ROLES = {ADMIN: "project_admin", LEAD: "lead"}


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Kits of which nothing is started: two wards, and one with too small a budget."""
    return Federation(tmp_path_factory.mktemp("policies") / "kits", {"site-1": ward(50), "site-2": ward(50), "site-3": ward(1)})


@contextmanager
def policies(kit: Path, name: str) -> Iterator[Workspace]:
    """Let FLARE's services be what they are in a participant's process."""
    rights = json.loads((kit / "local/authorization.json").read_text())
    workspace, side = Workspace(str(kit), name), SiteType.SERVER if name == "server" else SiteType.CLIENT
    manager = create_privacy_manager(workspace, names_only=True, is_server=name == "server")
    with ExitStack() as stack:
        for service, field, value in (
            (AuthorizationService, "the_authorizer", FLAuthorizer(ORGANIZATIONS[name], rights)),
            (AppAuthzService, "app_validator", FLAppValidator(side)),
            (PrivacyService, "manager", manager),
        ):
            stack.enter_context(patch.object(service, field, value))
        yield workspace


def deployed(kits: Federation, name: str, job: Path, user: str) -> str:
    """Return why a participant does not take a job; "" if it does."""
    submitter = {JobMetaKey.SUBMITTER_NAME: user, JobMetaKey.SUBMITTER_ORG: "hub", JobMetaKey.SUBMITTER_ROLE: ROLES[user]}
    meta: dict[str, Any] = json.loads((job / "meta.json").read_text()) | {key.value: v for key, v in submitter.items()}
    app = zip_directory_to_bytes(str(job / "app"), "")
    with policies(kits.kit(name), name) as workspace:
        return AppDeployer().deploy(workspace, "job", meta, "app", app, FLContext()) or ""


def test_byoc_and_scopes_are_refused(kits: Federation, tmp_path: Path) -> None:
    bundle = export(job_yaml(tmp_path), tmp_path / "bundle", bundle=True)
    good, scoped = kits.export(private_job()), with_scope(kits.export(private_job()))
    for name, user in product(ORGANIZATIONS, ROLES):
        assert deployed(kits, name, bundle, user) == "BYOC not permitted"
        if name != "server":  # the server has no privacy.json: data and their filters are the sites'
            assert deployed(kits, name, scoped, user) == "privacy scope 'open' is not allowed"
        assert deployed(kits, name, good, user) == ""


@pytest.mark.parametrize("name", ["server", "site-1"])
def test_files_of_others_are_not_listed(name: str, kits: Federation) -> None:
    with policies(kits.kit(name), name):
        for user, role in ROLES.items():
            asked = AuthzContext(AdminCommandNames.SHELL_LS, Person(user, "hub", role))
            assert AuthorizationService.authorize(asked)[0] is False
        seen = AuthzContext(AdminCommandNames.CHECK_STATUS, Person(ADMIN, "hub", "project_admin"))
        assert AuthorizationService.authorize(seen)[0] is True


def test_kit_guard_covers_jobs_without_one(kits: Federation, tmp_path: Path) -> None:
    places = {name: kits.kit(name) for name in ("server", *kits.sites)}
    with own_process():
        Together(without_guard(kits.export(private_job())), kits.sites, tmp_path / "none", places).run()
    check_private_run(kits)
    published = kits.kit("server") / JOB / "consilium"
    assert {p.name for p in published.iterdir()} >= {"metrics.jsonl", "results.json", "privacy.json"}
    assert not {"server", OWNER} & {p.name for p in published.iterdir()}
