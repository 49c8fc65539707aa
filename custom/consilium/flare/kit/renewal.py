"""Renewal of certificates: the hub makes new kits, and each participant replaces the startup/ of its kit.

The root keeps its key and its name and gets a new certificate. Certificates issued under the old root certificate are valid
under the new one, and the reverse. So each hospital can change its kit at any time before the root in it expires. The server
keeps its key too.

A replacement of the root by one with another key needs no day on which all kits change together. The former root signs a
certificate of the new root: a cross-certificate (RFC 5280, section 3.2), here called the bridge. Each new kit sends the bridge
beside its own certificate, so participants that trust only the former root accept the new kits too. FLARE 2.9 checks such
chains wherever it checks a certificate. The server's kit trusts the former root until all kits are new, because old and new
kits are valid under it.
"""

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.verification import VerificationError
from nvflare.fuel.f3.cellnet.identity import get_cert_common_name
from nvflare.lighter.impl.cert import DEFAULT_CERT_VALID_DAYS
from nvflare.lighter.utils import (
    Identity,
    generate_cert,
    generate_keys,
    load_crt_chain,
    serialize_cert,
    serialize_pri_key,
    verify_cert_chain,
)

from consilium.config.deployment import load_deployment
from consilium.core.errors import ConfigError, raise_first
from consilium.core.storage import copy_tree, write_atomic
from consilium.flare.kit.certificates import fingerprints, parse_fingerprint
from consilium.flare.kit.connection_refusals import note_cause
from consilium.flare.kit.kit_hardening import is_as_signed, is_signed
from consilium.flare.kit.kit_reader import (
    LOCKED,
    RUN_FILES,
    certificate_path,
    is_key_of,
    load_certificate,
    participant_role,
    private_key_path,
)
from consilium.flare.kit.processes import check_stopped
from consilium.flare.kit.provision import FORMER, ROOT, ROOT_KEY, check_names, project_with_relays, provision, read_state
from consilium.report.tables import only_true

OLD, NEW = "startup.old", ".startup.new"
"""Folders beside a kit's startup/: OLD holds the replaced startup/, whose key is still valid; NEW the incomplete new copy."""
KEEP, NEW_ROOT, ONLY_NEW = "keep", "new", "only-new"
"""What happens to the root: KEEP its key; replace it by a NEW_ROOT; stop trusting the replaced root, so trust ONLY_NEW."""


def renew(sites: Path, folder: Path, names: Collection[str] = (), root: str = KEEP) -> Path:
    """Make kits with new keys and certificates for `names` and a new root certificate. Return the folder of the kits.

    `names`: all participants by default. `folder`: the output folder of `provision`. `root`: KEEP, NEW_ROOT (then kits for all
    participants are made) or ONLY_NEW. If no kits are made, the project's state stays as it was. Raises ConfigError for a name
    that is not in the sites.yml, for a folder without the project's state, and for a root that cannot be replaced.
    """
    deployment = load_deployment(sites)
    known = check_names(project_with_relays(deployment, sites, folder), names, sites)
    path = folder / deployment.name / "state" / "cert.json"
    if not path.is_file():
        raise ConfigError(f"{path}: not there, so nothing can be renewed; give the folder that `consilium provision -o` made")
    state = read_state(path)
    signing = load_pem_private_key(state[ROOT_KEY].encode(), password=None)  # before anything is changed
    if root == KEEP:
        name = Identity(get_cert_common_name(x509.load_pem_x509_certificate(state[ROOT].encode())))
        kept = generate_cert(name, name, signing, signing.public_key(), valid_days=deployment.valid_days, ca=True)
        state[ROOT] = serialize_cert(kept).decode()
    elif root == NEW_ROOT:
        state, names = start_root_key_rollover(state, deployment.valid_days), ()
        known |= state.keys() - {
            ROOT,
            ROOT_KEY,
            FORMER,
        }  # a participant who left, and comes back, gets a certificate of this root
    elif state.pop(FORMER, None) is None:
        raise ConfigError("--root only-new: no root is followed by another here; begin with --root new")
    server = deployment.server
    for name in (set(names) or known) & state.keys():
        if name == server.name:
            # A new key would end the sessions of all sites: the server signs them with its key, and FLARE's sites do not log in
            # again. So the server's new certificate has the key of the former one.
            key = x509.load_pem_x509_certificate(state[name]["cert"].encode()).public_key()
            signing = load_pem_private_key(state[ROOT_KEY].encode(), password=None)
            issuer = Identity(get_cert_common_name(x509.load_pem_x509_certificate(state[ROOT].encode())))
            hosts = {"server_default_host": server.name, "server_additional_hosts": list(server.hosts)}
            valid = min(deployment.valid_days, DEFAULT_CERT_VALID_DAYS)
            own = generate_cert(Identity(server.name, server.org), issuer, signing, key, valid, **hosts)
            state[name]["cert"] = serialize_cert(own).decode()
        else:
            del state[name]  # FLARE makes a key and certificate for each participant that is not in its state
    return provision(sites, folder, names, state)


def update_kit(kit: Path, new: Path, fingerprint: str = "", running: bool = False) -> list[str]:
    """Replace a kit's startup/ by the startup/ of the renewed kit `new`. Return one line per new certificate.

    The kit's local/, ledger and records stay. A root with another key is accepted only with the SHA-256 `fingerprint` of its
    certificate or key, which the site must get by another channel than the kit. `running`: allow a running site, which uses
    the new certificate from its next connection on. Raises ConfigError, before anything is changed, if the kit runs without
    `running`, or if `new` is no renewal of it.
    """
    startup, ready, old = kit / "startup", kit / NEW, kit / OLD
    if not startup.exists() and old.is_dir():  # stopped between the two renames below
        os.replace(old, startup)
    certificate_path(kit)
    if not running:
        check_stopped(kit)
    elif (role := participant_role(kit)) in ("server", "relay"):
        raise ConfigError(f"--running: {kit}: a {role} reads its certificate at its start; stop it, and leave out --running")
    if problems := _renewal_problems(kit, new, parse_fingerprint(fingerprint) if fingerprint else ""):
        raise ConfigError(f"{new}: {problems[0]}")
    shutil.rmtree(ready, ignore_errors=True)
    ready.mkdir(mode=0o700)  # others cannot read the key during the copy, whatever file modes the renewed kit has
    copied = copy_tree(new / "startup", ready / "startup", symlinks=True, ignore=RUN_FILES)
    if (new / LOCKED).is_file():
        write_atomic(kit / LOCKED, (new / LOCKED).read_bytes())
    for path in (copied, *copied.rglob("*")):
        path.chmod(0o700 if path.is_dir() or path.suffix == ".sh" else 0o600)
    shutil.rmtree(old, ignore_errors=True)
    os.replace(startup, old)
    os.replace(copied, startup)
    ready.rmdir()
    old.chmod(0o700)
    if not running:  # the process of a running site notes what it finds
        note_cause(kit, None)
    own, root = load_certificate(certificate_path(kit)), load_certificate(startup / "rootCA.pem")
    return [f"{what} valid until {one.not_valid_after_utc:%Y-%m-%d}" for what, one in (("certificate", own), ("root", root))]


def _renewal_problems(kit: Path, new: Path, fingerprint: str) -> list[str]:
    """Return the reasons why the kit `new` is no renewal of `kit`. `fingerprint`: of an accepted root with another key."""
    before, after = load_certificate(certificate_path(kit)), load_certificate(certificate_path(new))
    root, next_root = (load_certificate(one / "startup" / "rootCA.pem") for one in (kit, new))
    same_root, is_named = root.public_key() == next_root.public_key(), fingerprint in fingerprints(next_root)
    start, end = after.not_valid_before_utc, after.not_valid_after_utc
    verified = False
    with suppress(VerificationError, ValueError):  # ValueError: half a chain
        own, *chain = load_crt_chain(certificate_path(new))
        verify_cert_chain(own, chain, next_root)
        verified = True
    whose = f"is of {after.subject.rfc4514_string()}, the kit of {before.subject.rfc4514_string()}; ask the hub for yours"
    ask = "Ask the hub by telephone for the root's fingerprint, and give it with --fingerprint"
    problems = {
        whose: before.subject != after.subject,
        "is of another role; ask the hub for yours": certificate_path(kit).name != certificate_path(new).name,
        f"its root has another key than yours. {ask}; this one's is {fingerprints(next_root)[0]}": not (same_root or is_named),
        f"its certificate is valid from {start} to {end}; look at the clock": not start <= datetime.now(UTC) <= end,
        "its certificate is not signed by its root; ask the hub again": not verified,
        "its certificate ends no later than the one that is here; give the newest prod_NN that the hub made": (
            end <= before.not_valid_after_utc
        ),
        "its key is in clear, yours is locked; run `consilium lock` and `consilium unlock` on it first": (
            (kit / LOCKED).is_file() and not (new / LOCKED).is_file()
        ),
        "its key is none of its certificate; ask the hub again": not is_key_of(private_key_path(new), after),
        "its startup/ is not as the hub signed it; ask the hub again": (
            is_signed(kit / "startup") and not is_as_signed(new / "startup")
        ),
    }
    return only_true(problems)


def start_root_key_rollover(state: dict[str, Any], days: int) -> dict[str, Any]:
    """Return a project's state with a new root, valid for `days`, and the bridge that the former root signs for it.

    The new root has another key and another name. Raises ConfigError if the former root has expired, or if an earlier
    replacement of the root has not ended.
    """
    former, now = x509.load_pem_x509_certificate(state[ROOT].encode()), datetime.now(UTC)
    problems = {
        "a new root is being put in already; end that first, with --root only-new": FORMER in state,
        "the root has ended and vouches for nobody; make a new project in a new folder": former.not_valid_after_utc <= now,
    }
    raise_first(problems, source="--root new")
    key, public = generate_keys()
    before = Identity(get_cert_common_name(former))
    stem, dash, number = (before.name or "").rpartition("-")  # two roots of one name would be taken for each other
    name = f"{stem}-{int(number) + 1}" if dash and number.isdecimal() else f"{before.name}-2"
    signing = load_pem_private_key(state[ROOT_KEY].encode(), password=None)
    bridge = generate_cert(Identity(name), before, signing, public, not_valid_after=former.not_valid_after_utc, ca=True)
    root = generate_cert(Identity(name), Identity(name), key, public, valid_days=days, ca=True)
    kept = {"cert": state[ROOT], "key": state[ROOT_KEY], "bridge": serialize_cert(bridge).decode()}
    return state | {ROOT: serialize_cert(root).decode(), ROOT_KEY: serialize_pri_key(key).decode(), FORMER: kept}
