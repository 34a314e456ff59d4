"""Fetches the files of a source from a mirror, the official address or a package index.

An interrupted download is resumed; a finished one is verified and renamed to its final name. It is kept in
`<downloads>/<SHA-256 of its address>/` until the stage has succeeded. A download that fails verification is moved to
`<SHA-256>.damaged/` and repeated once.
"""

from __future__ import annotations

import hashlib
import logging
import lzma
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import urlsplit

import requests
import urllib3
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from seqrec import artifacts
from seqrec.config import ConfigError, IngestConfig
from seqrec.data.readers.blocks import opened
from seqrec.data.sources import File, Publication, file_name
from seqrec.redaction import redacted

logger = logging.getLogger(__name__)

REQUIREMENT = re.compile(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?==[\w.!+-]+")  # of pip
MIRROR_VARIABLE = "SEQREC_DATA_MIRROR"
CHUNK_BYTES = 1 << 16
SIZE = "size"  # file beside a download: how many bytes it has
CONNECT_TIMEOUT_S = 10.0
PAUSE_S, LONGEST_PAUSE_S = 0.25, 60.0
TRANSIENT = (408, 416, 425, 429, 500, 502, 503, 504)
MAX_MEMBERS = 10_000  # limits of an archive, far above any known dataset, against decompression bombs
MAX_BYTES = 1 << 34
MAX_RATIO = 200
# What zipfile raises for corrupt archives: unknown versions or methods, password flags, members that differ from the
# directory. Decompressors raise errors of their own; bz2 raises a plain OSError.
CORRUPT_ZIP = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError, struct.error),
    *(ValueError, KeyError, IndexError, OverflowError, OSError),
)
TRANSPORT_ERRORS = (requests.RequestException, urllib3.exceptions.HTTPError)


class DownloadError(ValueError):
    """A file cannot be fetched, or fails verification."""


class NotThereError(DownloadError):
    """The server has no such file."""


class Found(NamedTuple):
    """A local file of a source; `origin` describes where it came from, without paths of this machine."""

    role: str
    path: Path
    origin: str


def obtain(
    publications: Sequence[Publication], config: IngestConfig, downloads: Path
) -> tuple[Publication, dict[str, Found]]:
    """Return the first publication that is available, and its files by role.

    Raises:
        DownloadError: none is available; the message lists what was tried.
        ConfigError: the mirror is a folder that does not exist.
    """
    failures: list[str] = []
    wrong: list[str] = []
    for label, publication, gather in _origins(publications, config, downloads):
        try:
            found = gather()
        except DownloadError as error:
            failures.append(f"{label}: {error}")
            wrong += [] if isinstance(error, NotThereError) else failures[-1:]
            continue
        for failure in wrong:  # an origin may lack a file, but a bad file is worth a warning
            logger.warning("%s", failure)
        return publication, {file.role: file for file in found}
    wanted = [place for file in publications[0].files if file.required for place in file.paths[:1]]
    archives = [publication.archive.name for publication in publications if publication.archive]
    raise DownloadError(
        "the files cannot be fetched\n  "
        + "\n  ".join(failures)
        + f"\nWithout network, set {MIRROR_VARIABLE} or ingest.mirror to a folder or URL that holds "
        + " and ".join(wanted)
        + (f", or {' or '.join(archives)}" if archives else "")
    )


def _origins(
    publications: Sequence[Publication], config: IngestConfig, downloads: Path
) -> Iterator[tuple[str, Publication, Callable[[], list[Found]]]]:
    """Yield label, publication and the call that gathers its files, in the order to try."""
    mirror = mirror_of(config)
    for publication in publications:
        if publication.local:
            yield "here", publication, partial(_gather, publication.files, _locally)
        if mirror:
            gather = partial(_from_mirror, publication, mirror, config, downloads)
            yield f"mirror {shown(mirror)}", publication, gather
    for publication in publications:
        archive = publication.archive
        if archive or any(file.urls for file in publication.files):
            label = "package index" if archive and archive.requirement else "official"
            yield label, publication, partial(_officially, publication, config, downloads)


def digests_of_own_files(publications: Sequence[Publication], config: IngestConfig) -> dict[str, str]:
    """Return by role the SHA-256 of the user's own files, which may change between two runs.

    Files on the web are left out, and all files if one that is required is missing.

    Raises:
        ConfigError: the mirror is a folder that does not exist.
    """
    mirror = mirror_of(config)
    folders = ["", *([mirror] if mirror and not _is_url(mirror) else [])]
    for publication, folder in ((one, folder) for one in publications if one.local for folder in folders):
        found = {file.role: _in_folder(folder, file) for file in publication.files}
        if all(found[file.role] for file in publication.files if file.required):
            return {role: artifacts.sha256(path) for role, path in found.items() if path}
    return {}


def mirror_of(config: IngestConfig) -> str:
    """Return the folder or URL of the mirror, which is tried first; empty without a mirror.

    Raises:
        ConfigError: the mirror is a folder that does not exist.
    """
    mirror = os.environ.get(MIRROR_VARIABLE) or config.mirror
    if mirror and not _is_url(mirror) and not Path(mirror).is_dir():
        raise ConfigError(f"ingest.mirror (or {MIRROR_VARIABLE}): {redacted(mirror)} is neither a folder nor a URL")
    return mirror


def _gather(files: Sequence[File], lookup: Callable[[File], Found | None]) -> list[Found]:
    gathered = []
    for file in files:
        found = lookup(file)
        if found is not None:
            verify(found.path, file.sha256, found.origin)
            gathered.append(found)
        elif file.required:
            raise NotThereError(f"{file.role}: no {' or '.join(shown(path) for path in file.paths)} (nor with .gz)")
        elif file.role == "items":
            logger.warning("no %s: items will have no titles", file.paths[0])
    return gathered


def _locally(file: File) -> Found | None:
    path = _in_folder("", file)
    return Found(file.role, path, f"local:{path.name}") if path else None


def _in_folder(folder: str, file: File) -> Path | None:
    paths = (Path(folder, name) for place in file.paths for name in (place, f"{place}.gz"))
    return next((path for path in paths if path.is_file()), None)


def _from_mirror(publication: Publication, mirror: str, config: IngestConfig, downloads: Path) -> list[Found]:
    def lookup(file: File) -> Found | None:
        for place in file.paths:
            for name in (place, f"{place}.gz"):
                path = _in_mirror(mirror, name, config, downloads, sha256=file.sha256)
                if path is not None:
                    return Found(file.role, path, f"mirror:{name}")
        return None

    archive = publication.archive
    try:
        return _gather(publication.files, lookup)
    except NotThereError as error:
        for name in (archive.name, f"{PurePosixPath(archive.name).stem}/{archive.name}") if archive else ():
            get = partial(_in_mirror, mirror, name, config, downloads)
            found = _unpacked(publication, get, f"mirror:{name}", downloads)
            if found is not None:
                return found
        raise error


def _in_mirror(
    mirror: str, name: str, config: IngestConfig, downloads: Path, *, sha256: Sequence[str] = ()
) -> Path | None:
    if _is_url(name):
        return None
    if not _is_url(mirror):
        path = Path(mirror, name)
        return path if path.is_file() else None
    try:
        return _fetched(f"{mirror.rstrip('/')}/{name}", config, downloads, sha256=sha256)
    except NotThereError:
        return None


def _officially(publication: Publication, config: IngestConfig, downloads: Path) -> list[Found]:
    archive = publication.archive
    if archive and archive.requirement:
        requirement, retries, timeout_s = archive.requirement, config.retries, config.timeout_s
        get = partial(pip_download, requirement, downloads, retries=retries, timeout_s=timeout_s)
        return _unpacked(publication, get, f"pypi:{archive.requirement}", downloads) or []
    if archive:
        get = partial(_fetched, archive.url, config, downloads, sha256=archive.sha256, size=archive.size)
        return _unpacked(publication, get, archive.url, downloads) or []

    def lookup(file: File) -> Found | None:
        failure: DownloadError | None = None
        for url in file.urls:
            try:
                return Found(file.role, _fetched(url, config, downloads, sha256=file.sha256), shown(url))
            except NotThereError:
                continue
            except DownloadError as error:
                failure = failure or error
        if failure:
            raise failure
        return None

    return _gather(publication.files, lookup)


def _unpacked(
    publication: Publication, get: Callable[[], Path | None], origin: str, downloads: Path
) -> list[Found] | None:
    """Return the files in the archive that `get` fetches; None if there is none.

    A download that cannot be unpacked is set aside and repeated once.
    """
    for attempt in (1, 2):
        path = get()
        if path is None:
            return None
        try:
            return _unpack(publication, path, origin, downloads)
        except DownloadError as error:
            if not set_aside(path, downloads, error) or attempt == 2:
                raise
    raise AssertionError


def _unpack(publication: Publication, path: Path, origin: str, downloads: Path) -> list[Found]:
    archive = publication.archive
    assert archive is not None
    ours = path.is_relative_to(downloads)
    folder = (path.parent if ours else _folder(origin, downloads)) / "unpacked"
    verify(path, archive.sha256, origin, size=archive.size)
    extract(path, folder, [file.paths[0] for file in publication.files])

    def lookup(file: File) -> Found | None:
        member = folder / file.paths[0]
        return Found(file.role, member, f"{origin}!{file.paths[0]}") if member.is_file() else None

    return _gather(publication.files, lookup)


def _fetched(url: str, config: IngestConfig, downloads: Path, *, sha256: Sequence[str] = (), size: int = 0) -> Path:
    return fetch(url, downloads, sha256=sha256, size=size, retries=config.retries, timeout_s=config.timeout_s)


def fetch(
    url: str, downloads: Path, *, sha256: Sequence[str] = (), size: int = 0, retries: int = 4, timeout_s: float = 30.0
) -> Path:
    """Download `url`, resuming a partial download, and return the verified file.

    Attempts that received data do not count as retries. Pauses between attempts start at half a second and double. A
    file of the wrong size or digest is set aside and downloaded again once.

    Raises:
        NotThereError: the server has no such file.
        DownloadError: all attempts failed, or size or digest was wrong twice.
    """
    folder = _folder(url, downloads)
    target, part = folder / (file_name(urlsplit(url).path) or "index"), folder / "partial"
    for attempt in (1, 2):
        folder.mkdir(parents=True, exist_ok=True)
        if not target.is_file():
            _persist(url, part, retries, timeout_s)
            artifacts.write_text(folder / SIZE, str(_size(part)))
            artifacts.rename(part, target)
        try:
            if not _is_whole(target):
                raise DownloadError(f"{shown(url)}: {target} is cut short; fetch it again")
            verify(target, sha256, shown(url), size=size)
            break
        except DownloadError as error:
            set_aside(target, downloads, error)
            if attempt == 2:
                raise
    return target


def _persist(url: str, part: Path, retries: int, timeout_s: float) -> None:
    failed = 0
    while True:
        before = _size(part)
        try:
            return _transfer(url, part, timeout_s)
        except TRANSPORT_ERRORS as error:
            failed = 0 if _size(part) > before else failed + 1
            if failed > retries:
                raise DownloadError(f"{shown(url)}: {_reason(error)} ({failed} attempts)") from error
            logger.info("%s: %s; trying again", shown(url), _reason(error))
            time.sleep(min(PAUSE_S * 2**failed, LONGEST_PAUSE_S))


def _transfer(url: str, part: Path, timeout_s: float) -> None:
    """Append the missing bytes to `part`, provided that the server confirms its file to be unchanged."""
    stamp = part.with_name("version")  # the server's version of the file that `part` belongs to
    version = stamp.read_text(encoding="utf-8") if stamp.is_file() else ""
    have = _size(part) if version else 0
    headers = {"Accept-Encoding": "identity"}  # lengths and ranges refer to the uncompressed bytes
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": version}
    timeout = (min(CONNECT_TIMEOUT_S, timeout_s), timeout_s)
    with requests.get(url, headers=headers, stream=True, timeout=timeout) as response:
        held = response.headers.get("Content-Range", "")  # `bytes 10-19/20`; `bytes */20` where nothing is left to send
        if have and held == f"bytes */{have}":
            return
        if response.status_code == requests.codes.requested_range_not_satisfiable:
            part.unlink(missing_ok=True)  # it is longer than the file on the server
        _check_status(response)
        if not held.startswith(f"bytes {have}-"):
            part.unlink(missing_ok=True)
            have = 0
        if not have:
            stamp.write_text(_version(response), encoding="utf-8")
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        with part.open("ab") as file, _progress(shown(url), total, have) as advance:
            for chunk in response.raw.stream(CHUNK_BYTES, decode_content=False):
                file.write(chunk)
                advance(len(chunk))
    if total is not None and _size(part) != total:
        raise requests.ConnectionError(f"received only {_size(part):,} of {total:,} bytes")


def _check_status(response: requests.Response) -> None:
    code, address = response.status_code, shown(response.url)
    if code in (404, 410):
        raise NotThereError(f"{address}: not found (HTTP {code})")
    if code in TRANSIENT:
        raise requests.HTTPError(f"HTTP {code} {response.reason}")
    if not 200 <= code < 300:
        raise DownloadError(f"{address}: HTTP {code} {response.reason}")


def _version(response: requests.Response) -> str:
    tag = response.headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else response.headers.get("Last-Modified", "")


@contextmanager
def _progress(label: str, total: int | None, done: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal; do nothing elsewhere."""
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    text = TextColumn("{task.description}")
    with Progress(text, *columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total, completed=done)
        yield lambda count: bar.advance(task, count)


def pip_download(requirement: str, downloads: Path, *, retries: int = 4, timeout_s: float = 30.0) -> Path:
    """Fetch the wheel of `requirement` from the configured package index, without installing it.

    Raises:
        DownloadError: the requirement is not of the form NAME==VERSION, or pip failed; the message gives its reason.
    """
    if not REQUIREMENT.fullmatch(requirement):  # options of pip, URLs or paths could run or fetch anything
        raise DownloadError(f"{redacted(requirement)!r}: a package must be given as NAME==VERSION")
    folder = _folder(f"pypi:{requirement}", downloads)
    for wheel in folder.glob("*.whl"):
        return wheel
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--retries", str(retries), "--timeout", f"{timeout_s:.0f}"]
    result = subprocess.run(
        [*command, "--dest", str(scratch), "--", requirement], capture_output=True, text=True, check=False
    )
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        last = (result.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise DownloadError(f"pip download {requirement}: {redacted(last)}")
    artifacts.rename(wheels[0], folder / wheels[0].name)
    return folder / wheels[0].name


def extract(archive: Path, folder: Path, members: Sequence[str]) -> None:
    """Extract those of `members` that the zip archive holds, replacing `folder`.

    Raises:
        DownloadError: the archive is damaged or encrypted, holds links or paths outside the folder, or exceeds the
            limits of its size.
    """
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with zipfile.ZipFile(archive) as content:
            _refuse_unsafe(content.infolist(), archive)
            for name in set(members) & set(content.namelist()):
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with content.open(name) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file)
    except CORRUPT_ZIP as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's error, not the archive's
            raise
        raise DownloadError(f"{archive.name} is truncated or damaged: {error}; fetch it again") from error


def _refuse_unsafe(members: list[zipfile.ZipInfo], archive: Path) -> None:
    size = sum(member.file_size for member in members)
    if len(members) > MAX_MEMBERS or size > MAX_BYTES or size > MAX_RATIO * archive.stat().st_size:
        raise DownloadError(f"{archive.name} is refused: {len(members):,} members that unpack to {size:,} bytes")
    for member in members:
        path = PurePosixPath(member.filename.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in (path.parts or ("",))[0]:
            raise DownloadError(f"{archive.name} is refused: its member {member.filename!r} leaves the folder")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise DownloadError(f"{archive.name} is refused: its member {member.filename!r} is a link")
        if member.flag_bits & 1:
            raise DownloadError(f"{archive.name} is refused: its member {member.filename!r} is encrypted")


def verify(path: Path, sha256: Sequence[str], label: str, *, size: int = 0) -> None:
    """Raise `DownloadError` unless the file has `size` (0: any) and one of the digests (none: any).

    For a gzip file, the digest of its content is accepted as well, since it does not depend on the compression.
    """
    if size and path.stat().st_size != size:
        raise DownloadError(f"{label}: {path.stat().st_size:,} bytes, expected {size:,}; fetch it again")
    if not sha256:
        return
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest not in sha256 and _content_digest(path) not in sha256:
        raise DownloadError(f"{label}: SHA-256 is {digest}, expected {' or '.join(sha256)}; fetch it again")


def _content_digest(path: Path) -> str:
    try:
        with opened(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (EOFError, OSError, zlib.error):
        return ""


def forget(found: Sequence[Found], downloads: Path) -> None:
    """Delete the downloads that `found` came from; files elsewhere, such as those of a mirror folder, are kept."""
    for file in found:
        if file.path.is_relative_to(downloads):
            folder = downloads / file.path.relative_to(downloads).parts[0]
            for each in (folder, _aside(folder)):
                shutil.rmtree(each, ignore_errors=True)


def set_aside(path: Path, downloads: Path, reason: Exception) -> bool:
    """Rename the folder of a download that failed verification, so that it is downloaded again.

    Returns:
        Whether the file was a download; files elsewhere belong to the user and are kept.
    """
    if not path.is_relative_to(downloads):
        return False
    folder = downloads / path.relative_to(downloads).parts[0]
    shutil.rmtree(_aside(folder), ignore_errors=True)
    folder.replace(_aside(folder))
    logger.warning("%s: moved to %s", reason, _aside(folder))
    return True


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.damaged")


def shown(address: str) -> str:
    """Return a path or URL without possible secrets: user, password and query."""
    if not _is_url(address):
        return address
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _is_url(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def _folder(address: str, downloads: Path) -> Path:
    return downloads / hashlib.sha256(address.encode()).hexdigest()


def _is_whole(target: Path) -> bool:
    """Return whether a download has the size that it had when it was complete."""
    size = target.with_name(SIZE)
    return size.is_file() and size.read_text(encoding="utf-8") == str(_size(target))


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _reason(error: Exception) -> str:
    """Return the innermost message, because outer ones repeat the address with any password in it."""
    cause: BaseException = error
    while cause.args and isinstance(cause.args[0], BaseException):
        cause = cause.args[0]
    reason = getattr(cause, "reason", None)
    text = str(reason if isinstance(reason, BaseException) else cause).rpartition(": ")[2]
    return redacted(text) or type(error).__name__
