"""Evidence of a run: an archive of a site's audit record and privacy ledger, signed with the key of the site's kit.

The archive is a zip of plain files. manifest.json lists every other file with its SHA-256. manifest.sig is the signature of
manifest.json. It is made with the kit's key in FLARE's format. kit.crt is the certificate of that key, and rootCA.pem the root
certificate that issued it. A verifier needs the root's fingerprint from another source, such as any kit of the same project.
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
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import rsa
from nvflare.fuel.f3.cellnet.identity import get_cert_common_name
from nvflare.lighter.utils import (
    load_crt_bytes,
    load_private_key_file,
    sign_content,
    verify_cert,
    verify_content,
)

from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.schema import Section, validate
from consilium.core.storage import write_atomic
from consilium.flare.kit.certificates import check_certificate_time, fingerprints, parse_fingerprint
from consilium.flare.kit.kit_reader import certificate_path, kit_name, private_key_path
from consilium.privacy import audit_log
from consilium.privacy.ledger import Ledger

MANIFEST, SIGNATURE, CERTIFICATE, ROOT = "manifest.json", "manifest.sig", "kit.crt", "rootCA.pem"
LEDGER, ACCEPTED = "ledger.sqlite", "accepted.json"
FORMAT = 1
MAX_FILES, MAX_BYTES = 200, 2**30
"""Limits of an archive that `verify` reads, because its author is not trusted: number of files, and bytes in total."""
MAX_VALUES, MAX_JSON = 2**25, 2**24
"""Largest number of JSON values in a record, which take at most 3 GB as Python objects; largest size of manifest.json and of
accepted.json in bytes."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RECORD = re.compile(r"audit-\d+\.jsonl")
_SUM = re.compile(r"[0-9a-f]{64}")


class Manifest(Section):
    """The content of manifest.json. `made`: seconds since 1970. `intact`: the site found its record and ledger unaltered."""

    format: int
    site: str
    experiment: str
    made: float
    intact: bool
    files: dict[str, str]


def copy_ledger(path: Path) -> bytes:
    """Return a consistent copy of a ledger's file, even while another process writes to it; b"" if there is no ledger.

    Raises ConfigError if the file cannot be read as a ledger.
    """
    if not path.is_file():
        return b""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / LEDGER
        try:
            with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
                source.backup(target)
        except sqlite3.Error as error:
            raise ConfigError(f"{path}: the privacy ledger cannot be read ({error}); restore it from a backup") from None
        return copy.read_bytes()


def verify_chains(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Verify the hash chains of a site's records and ledger.

    Returns "messages" and "rows", the numbers of messages in the records and of rows in the ledger; and "record" and "ledger",
    each a text about the first alteration found, or None if there is none.
    """
    with tempfile.TemporaryDirectory() as place:
        found: dict[str, Any] = {"messages": 0, "record": None, "rows": 0, "ledger": None}
        named, known = set[str](), {""}
        for name in filter(_RECORD.fullmatch, sorted(files)):
            if sum(map(files[name].count, b"[{,")) > MAX_VALUES:
                found["record"] = f"{name} holds over {MAX_VALUES:,} values"
                continue
            path = Path(place) / name
            path.write_bytes(files[name])
            try:
                read = audit_log.load_record(path)
            except Exception as error:  # a site can sign arbitrary bytes
                found["record"] = f"{name} cannot be read ({error})"
                continue
            found["messages"] += len(read["messages"])
            named |= {str(one.get("ledger", "")) for one in read["messages"]}
            if read["broken_line"]:
                found["record"] = f"{name}, line {read['broken_line']}"
        with suppress(ValueError, TypeError, RecursionError):  # lost rows that the site's administrator has acknowledged
            if len(accepted := files.get(ACCEPTED, b"[]")) <= MAX_JSON:
                known |= {str(one) for one in json.loads(accepted)}
        if LEDGER in files:
            (Path(place) / LEDGER).write_bytes(files[LEDGER])
            try:
                seals = Ledger(Path(place) / LEDGER).seals()
            except Exception as error:
                return found | {"ledger": str(error).replace(place, "")}
            found["rows"], known = len(seals), known | {*seals}
        if lost := sorted(named - known):  # a chain without its last rows still verifies, and so does an empty chain
            found["ledger"] = f"lacks rows: a record names the seal {lost[0][:16]}"
        return found


def pack(kit: Path, experiment: str, files: Mapping[str, bytes], output: Path) -> Manifest:
    """Write `files` of a site to the archive `output`, sign it with the kit's key, and return its manifest.

    Raises ConfigError if `output` exists, if the kit's certificate is not valid now, or if its key is locked.
    """
    if output.exists():
        raise ConfigError(f"--output: {output}: exists; give another name, evidence is never replaced")
    check_certificate_time(kit)  # no verifier would accept the archive
    own, found = certificate_path(kit), verify_chains(files)
    every = {**files, CERTIFICATE: own.read_bytes(), ROOT: (kit / "startup" / ROOT).read_bytes()}
    manifest = Manifest(
        format=FORMAT,
        site=kit_name(kit),
        experiment=experiment,
        made=datetime.now(UTC).timestamp(),
        intact=not found["record"] and not found["ledger"],
        files={name: hashlib.sha256(content).hexdigest() for name, content in sorted(every.items())},
    )
    text = json.dumps(manifest.model_dump(), indent=1).encode()
    signature = sign_content(text, load_private_key_file(str(private_key_path(kit))), return_str=False)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**every, MANIFEST: text, SIGNATURE: signature}.items():
            archive.writestr(name, content)
    write_atomic(output, packed.getvalue())
    return manifest


def verify(path: Path, fingerprint: str) -> dict[str, Any]:
    """Verify an archive's signature and digests. `fingerprint`: that of the root's certificate or key, see `root_fingerprint`.

    Returns JSON values: "site", "experiment", "made" (ISO time), "files", and the values of `verify_chains`. Raises
    ConsiliumError if the archive was altered or forged, or if its root is another one. Raises ConfigError if it is no archive
    of this kind. No file is unpacked.
    """
    wanted, (files, manifest) = parse_fingerprint(fingerprint), _read_archive(path)
    try:
        own, root = load_crt_bytes(files[CERTIFICATE]), load_crt_bytes(files[ROOT])
        if not all(isinstance(one.public_key(), rsa.RSAPublicKey) for one in (own, root)):
            raise ValueError("its key is none that FLARE makes")
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path}: a certificate in it cannot be read ({error})") from None
    # the site named in the manifest must have signed it, and while its certificate was valid
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
    content = {name: body for name, body in files.items() if name not in (MANIFEST, SIGNATURE)}
    found = {name: hashlib.sha256(body).hexdigest() for name, body in content.items()}
    if changed := sorted(name for name, _ in found.items() ^ manifest.files.items()):
        raise ConsiliumError(
            f"{path}: {changed[0]}: is not as it was signed: changed, added or taken out; the archive was changed"
        )
    if wanted not in fingerprints(root):
        raise ConsiliumError(
            f"{path}: is intact and signed, "
            f"but its root is another one than --fingerprint or --kit names ({fingerprints(root)[0]}, "
            f"valid since {root.not_valid_before_utc:%Y-%m-%d}); "
            "ask the hub for its root's fingerprint again. If the root was renewed later, give --kit with a kit from before "
            "(at the hub: kits/PROJECT/prod_NN/PARTICIPANT). If no kit of the hub fits, the archive is not of its project"
        )
    made = datetime.fromtimestamp(manifest.made, UTC).isoformat(timespec="seconds")
    about = {"site": manifest.site, "experiment": manifest.experiment, "made": made, "files": sorted(content)}
    return about | verify_chains(content)


def _read_archive(path: Path) -> tuple[dict[str, bytes], Manifest]:
    """Return the content of all files of an archive by name, and its manifest.

    Raises ConfigError for duplicate names, for names with a path, above MAX_FILES files or MAX_BYTES bytes, and if a file of
    the signature is missing or the manifest is invalid.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            listed = archive.infolist()
            names = [one.filename for one in listed]
            if len(names) > MAX_FILES or sum(one.file_size for one in listed) > MAX_BYTES:
                raise ConfigError(f"{path}: over {MAX_FILES} files or {MAX_BYTES:,} bytes; not made by `consilium evidence`")
            packed = {one.filename for one in listed if one.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)}
            if wrong := [one for one in names if not _NAME.fullmatch(one) or names.count(one) > 1 or one in packed]:
                what = "a file twice, with a path, or packed in another way"
                raise ConfigError(f"{path}: {wrong[0][:80]!r}: {what}; not made by `consilium evidence`")
            # at most the declared size, even if more is packed
            files = {one.filename: archive.open(one).read(one.file_size) for one in listed}
    except (zipfile.BadZipFile, zlib.error, OSError, RuntimeError, EOFError, ValueError) as error:
        raise ConfigError(f"{path}: is not a readable archive ({error}); give what `consilium evidence` wrote") from None
    if missing := [name for name in (MANIFEST, SIGNATURE, CERTIFICATE, ROOT) if name not in files]:
        raise ConfigError(f"{path}: has no {missing[0]}; give what `consilium evidence` wrote")
    try:
        if len(files[MANIFEST]) > MAX_JSON:
            raise ValueError(f"over {MAX_JSON:,} bytes")
        manifest = validate(Manifest, json.loads(files[MANIFEST]), Path(MANIFEST))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {MANIFEST} cannot be read ({error})") from None
    if manifest.format != FORMAT or not all(_SUM.fullmatch(one) for one in manifest.files.values()):
        raise ConfigError(f"{path}: {MANIFEST}: format {manifest.format}, expected {FORMAT}; use the version that wrote it")
    return files, manifest
