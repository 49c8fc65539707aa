"""An archive of what a site can prove of one run, signed with its kit's key, and checked anywhere without the site.

A zip of plain files. manifest.json names every other file with its SHA-256; manifest.sig is FLARE's signature of its bytes by
the kit's key; kit.crt and rootCA.pem are whose key that is. Who checks must know the root from elsewhere: by a kit of the same
project, or by its fingerprint.
"""

import hashlib
import io
import json
import re
import sqlite3
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from nvflare.fuel.f3.cellnet.identity import get_cert_common_name
from nvflare.lighter.utils import (
    load_crt,
    load_crt_bytes,
    load_private_key_file,
    sign_content,
    verify_cert,
    verify_content,
)

from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.schema import Section, read_fingerprint, validate
from consilium.core.storage import write_atomic
from consilium.flare.kit.local_folder import certificate, kit_name
from consilium.privacy.ledger import audit
from consilium.privacy.ledger.ledger import Ledger

MANIFEST, SIGNATURE, CERTIFICATE, ROOT = "manifest.json", "manifest.sig", "kit.crt", "rootCA.pem"
LEDGER, ACCEPTED = "ledger.sqlite", "accepted.json"
FORMAT = 1
MOST_FILES, MOST_BYTES = 200, 2**30
"""Of an archive that is checked: a stranger may have made it."""
MOST_VALUES, MOST_JSON = 2**25, 2**24
"""Values of a record, 3 GB of Python's objects at most, and bytes of manifest.json and of accepted.json."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RECORD = re.compile(r"audit-\d+\.jsonl")
_SUM = re.compile(r"[0-9a-f]{64}")


class Manifest(Section):
    """What an archive says it is. `made`: seconds since 1970; `intact`: what the site found of record and ledger."""

    format: int
    site: str
    experiment: str
    made: float
    intact: bool
    files: dict[str, str]


def copy_ledger(path: Path) -> bytes:
    """Return a whole copy of a ledger that other processes may be writing; b"" where there is none."""
    if not path.is_file():
        return b""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / LEDGER
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        return copy.read_bytes()


def chains(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return how many messages and rows there are, and the first line or row that is not as it was written, if any."""
    with tempfile.TemporaryDirectory() as place:
        found: dict[str, Any] = {"messages": 0, "record": None, "rows": 0, "ledger": None}
        named, known = set[str](), {"", *_accepted(files)}
        for name in filter(_RECORD.fullmatch, sorted(files)):
            if sum(map(files[name].count, b"[{,")) > MOST_VALUES:
                found["record"] = f"{name} holds over {MOST_VALUES:,} values"
                continue
            path = Path(place) / name
            path.write_bytes(files[name])
            try:
                read = audit.verified(path)
            except Exception as error:  # whatever a site signs ends in a line
                found["record"] = f"{name} cannot be read ({error})"
                continue
            found["messages"] += len(read["messages"])
            named |= {str(one.get("ledger", "")) for one in read["messages"]}
            if read["broken_line"]:
                found["record"] = f"{name}, line {read['broken_line']}"
        if LEDGER in files:
            (Path(place) / LEDGER).write_bytes(files[LEDGER])
            try:
                seals = Ledger(Path(place) / LEDGER).seals()
            except Exception as error:
                return found | {"ledger": str(error).replace(place, "")}
            found["rows"], known = len(seals), known | {*seals}
        if lost := sorted(named - known):  # a chain that was cut at its end is a whole one, and so is none at all
            found["ledger"] = f"lacks rows: a record names the seal {lost[0][:16]}"
        return found


def _accepted(files: Mapping[str, bytes]) -> set[str]:
    """Return the seals of rows whose loss the site's administrator has put on record."""
    try:
        found = files.get(ACCEPTED, b"[]")
        return {str(one) for one in json.loads(found)} if len(found) <= MOST_JSON else set()
    except (ValueError, TypeError, RecursionError):
        return set()


def pack(kit: Path, experiment: str, files: Mapping[str, bytes], output: Path) -> Manifest:
    """Write the signed archive of these files, of a site's kit. Raises ConfigError for a file that exists."""
    if output.exists():
        raise ConfigError(f"--output: {output}: exists; give another name, evidence is never replaced")
    own = certificate(kit)
    every = {**files, CERTIFICATE: own.read_bytes(), ROOT: (kit / "startup" / ROOT).read_bytes()}
    found = chains(files)
    manifest = Manifest(
        format=FORMAT,
        site=kit_name(kit),
        experiment=experiment,
        made=datetime.now(UTC).timestamp(),
        intact=not found["record"] and not found["ledger"],
        files={name: hashlib.sha256(content).hexdigest() for name, content in sorted(every.items())},
    )
    said = json.dumps(manifest.model_dump(), indent=1).encode()
    signature = sign_content(said, load_private_key_file(str(own.with_suffix(".key"))), return_str=False)
    place = io.BytesIO()
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**every, MANIFEST: said, SIGNATURE: signature}.items():
            archive.writestr(name, content)
    write_atomic(output, place.getvalue())
    return manifest


def verify(path: Path, fingerprint: str) -> dict[str, Any]:
    """Check an archive against the root whose certificate or key has this `fingerprint` (see `root_fingerprint`).

    Returns plain JSON values: site, experiment, when it was made, and of record and ledger what is intact. Raises
    ConsiliumError for anything that is not as it was signed, and ConfigError for what is no archive. Nothing is unpacked.
    """
    wanted = named_root(fingerprint)
    files = _read(path)
    manifest = _manifest(path, files)
    own, root = _certificates(path, files)
    if wanted not in fingerprints(root):
        told = root.fingerprint(hashes.SHA256()).hex()
        raise ConsiliumError(f"{path}: its root is another one ({told}); it is of another project, or forged")
    _check_signature(path, manifest, files, own, root)
    content = {name: body for name, body in files.items() if name not in (MANIFEST, SIGNATURE)}
    if extra := sorted(content.keys() ^ manifest.files.keys()):
        what = "is not in the manifest" if extra[0] in content else "is missing"
        raise ConsiliumError(f"{path}: {extra[0]}: {what}; the archive was changed")
    for name, body in content.items():
        if hashlib.sha256(body).hexdigest() != manifest.files[name]:
            raise ConsiliumError(f"{path}: {name}: is not as it was signed; the archive was changed")
    found = chains(content)
    made = datetime.fromtimestamp(manifest.made, UTC).isoformat(timespec="seconds")
    return {"site": manifest.site, "experiment": manifest.experiment, "made": made, "files": sorted(content), **found}


def fingerprints(root: x509.Certificate) -> set[str]:
    """Return by what a root may be named: the SHA-256 of its certificate, or of its key, which a renewal keeps."""
    key = root.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return {root.fingerprint(hashes.SHA256()).hex(), hashlib.sha256(key).hexdigest()}


def named_root(fingerprint: str) -> str:
    """Return what `--fingerprint` names as 64 hex digits. Raises ConfigError for what is no fingerprint."""
    try:
        return read_fingerprint(fingerprint)
    except ValueError as error:
        raise ConfigError(f"--fingerprint: {error}") from None


def root_fingerprint(kit: Path) -> str:
    """Return the fingerprint of the root's key in any kit of the project. Raises ConfigError."""
    path = kit / "startup" / ROOT
    if not path.is_file():
        raise ConfigError(f"--kit: {kit}: no startup kit (no startup/{ROOT}); give its folder")
    root = load_crt(path)
    return (fingerprints(root) - {root.fingerprint(hashes.SHA256()).hex()}).pop()


def _bounded(archive: zipfile.ZipFile, one: zipfile.ZipInfo) -> bytes:
    """Return a file of as many bytes as the archive says, however many are packed in it."""
    with archive.open(one) as file:
        return file.read(one.file_size)


def _read(path: Path) -> dict[str, bytes]:
    """Return all files of an archive: none twice, none with a path, not too many or too large."""
    try:
        with zipfile.ZipFile(path) as archive:
            listed = archive.infolist()
            names = [one.filename for one in listed]
            if len(names) > MOST_FILES or sum(one.file_size for one in listed) > MOST_BYTES:
                raise ConfigError(f"{path}: over {MOST_FILES} files or {MOST_BYTES:,} bytes; it is none of ours")
            if [one for one in listed if one.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)]:
                raise ConfigError(f"{path}: a file is packed in another way; it is none of ours")
            if wrong := [name for name in names if not _NAME.fullmatch(name) or names.count(name) > 1]:
                raise ConfigError(f"{path}: {wrong[0][:80]!r}: a file twice, or one with a path; it is none of ours")
            return {one.filename: _bounded(archive, one) for one in listed}
    except (zipfile.BadZipFile, zlib.error, OSError, RuntimeError, EOFError, ValueError) as error:
        raise ConfigError(f"{path}: is no readable archive ({error}); give what `consilium evidence` wrote") from None


def _manifest(path: Path, files: Mapping[str, bytes]) -> Manifest:
    if missing := [name for name in (MANIFEST, SIGNATURE, CERTIFICATE, ROOT) if name not in files]:
        raise ConfigError(f"{path}: has no {missing[0]}; give what `consilium evidence` wrote")
    try:
        if len(files[MANIFEST]) > MOST_JSON:
            raise ValueError(f"over {MOST_JSON:,} bytes")
        manifest = validate(Manifest, json.loads(files[MANIFEST]), Path(MANIFEST))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {MANIFEST} cannot be read ({error})") from None
    if manifest.format != FORMAT or not all(_SUM.fullmatch(one) for one in manifest.files.values()):
        raise ConfigError(f"{path}: {MANIFEST}: format {manifest.format}, expected {FORMAT}; use the version that wrote it")
    return manifest


def _certificates(path: Path, files: Mapping[str, bytes]) -> tuple[x509.Certificate, x509.Certificate]:
    try:
        own, root = load_crt_bytes(files[CERTIFICATE]), load_crt_bytes(files[ROOT])
        if not all(isinstance(one.public_key(), rsa.RSAPublicKey) for one in (own, root)):
            raise ValueError("its key is none that FLARE makes")
        return own, root
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path}: a certificate in it cannot be read ({error})") from None


def _check_signature(
    path: Path, manifest: Manifest, files: Mapping[str, bytes], own: x509.Certificate, root: x509.Certificate
) -> None:
    """Raise ConsiliumError unless the site that the manifest names has signed it, within its certificate's time."""
    try:
        verify_cert(own, root.public_key())
    except InvalidSignature:
        raise ConsiliumError(f"{path}: {CERTIFICATE} is not signed by its root; the archive is forged") from None
    if (name := get_cert_common_name(own)) != manifest.site:
        raise ConsiliumError(f"{path}: says it is {manifest.site}'s, and {name} has signed it; the archive is forged")
    try:
        verify_content(files[MANIFEST], files[SIGNATURE], own.public_key())
    except InvalidSignature:
        raise ConsiliumError(f"{path}: {MANIFEST} is not as it was signed; the archive was changed") from None
    if not own.not_valid_before_utc.timestamp() <= manifest.made <= own.not_valid_after_utc.timestamp():
        raise ConsiliumError(f"{path}: was made outside of the time of its certificate; ask the site for a new one")
