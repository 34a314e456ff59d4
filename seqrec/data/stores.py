"""Files at addresses of object stores: s3://, gs:// and az:// (and file://), by the file systems of pyarrow.

Credentials are those of the environment, as for the tools of each store: AWS_ACCESS_KEY_ID and so on, with
AWS_ENDPOINT_URL for a store that is compatible with S3; GOOGLE_APPLICATION_CREDENTIALS; AZURE_STORAGE_ACCOUNT with
AZURE_STORAGE_KEY or a managed identity.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from pyarrow import fs

from seqrec import artifacts
from seqrec.config import ConfigError
from seqrec.config.checks import STORES, check_address

ACCOUNT, KEY = "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY"
CHUNK_BYTES = 1 << 20
PATIENCE = timedelta(seconds=30)  # Google's client would try for a quarter of an hour


class TransferError(OSError):
    """A store does not answer, or refuses."""


def is_address(place: str) -> bool:
    """Return whether `place` is an address in an object store."""
    return place.partition("://")[0] in STORES


def fetch(address: str, target: Path) -> None:
    """Copy the file at an address to `target`.

    Raises:
        FileNotFoundError: there is none.
        TransferError: the store does not answer, or refuses.
        ConfigError: AZURE_STORAGE_ACCOUNT is not set.
    """
    with _explained(address):
        system, path = _located(address)
        with system.open_input_stream(path, compression=None) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, CHUNK_BYTES)


@contextmanager
def local(place: str) -> Iterator[Path]:
    """Yield the file at `place`, a path or an address in a store, as a file of this machine.

    Raises:
        ValueError: an unknown scheme.
        OSError: as `fetch`, or there is no such path.
    """
    check_address("items", place)
    if not is_address(place):
        yield Path(place)
        return
    with tempfile.TemporaryDirectory() as folder:
        fetch(place, Path(folder, "file"))
        yield Path(folder, "file")


@contextmanager
def written(place: str | Path) -> Iterator[Path]:
    """Yield a local file, which gets to `place`, a path or an address in a store, once it is complete.

    Raises:
        ValueError: an unknown scheme, or AZURE_STORAGE_ACCOUNT is not set.
        TransferError: the store does not answer, or refuses.
    """
    place = str(place)
    check_address("output", place)
    if not is_address(place):
        with artifacts.written(Path(place)) as partial:
            yield partial
        return
    system, path = _located(place)
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder, "file")
        yield local
        with _explained(place), local.open("rb") as file, system.open_output_stream(path, compression=None) as target:
            shutil.copyfileobj(file, target, CHUNK_BYTES)


def _located(address: str) -> tuple[fs.FileSystem, str]:
    scheme, _, path = address.partition("://")
    if scheme == "gs":
        return fs.GcsFileSystem(retry_time_limit=PATIENCE), path
    if scheme == "az":
        if not os.environ.get(ACCOUNT):
            raise ConfigError(f"{address}: set {ACCOUNT} to the name of the storage account")
        return fs.AzureFileSystem(os.environ[ACCOUNT], account_key=os.environ.get(KEY)), path
    return fs.FileSystem.from_uri(address)


@contextmanager
def _explained(address: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # of this machine, or FileNotFoundError
            raise
        raise TransferError(f"{address}: {error}") from error
