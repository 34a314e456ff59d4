"""Fetches the tables that a revision of a DVC project has ingested, as recorded in its dvc.lock."""

from __future__ import annotations

import hashlib
import logging
import posixpath
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from seqrec import artifacts
from seqrec.config import ConfigError, IngestConfig
from seqrec.redaction import redacted

if TYPE_CHECKING:
    from dvc.api import DVCFileSystem

logger = logging.getLogger(__name__)
FILES = (artifacts.INTERACTIONS, artifacts.ITEMS, artifacts.QUARANTINE, artifacts.SOURCE_CARD)


def fetch(output: Path, config: IngestConfig) -> dict[str, float]:
    """Write the ingested tables of revision `config.revision` of the DVC project `config.repository` to `output`.

    They are fetched from the project's remote and checked against the hashes in its dvc.lock.

    Args:
        output: output folder.
        config: section `ingest`.

    Returns:
        The counts of the ingestion.

    Raises:
        ConfigError: the repository or revision does not exist, or it ingested another source.
        ValueError: a file in the remote differs.
    """
    from dvc.api import DVCFileSystem
    from dvc.exceptions import DvcException
    from dvc.scm import SCMError

    try:
        project = DVCFileSystem(config.repository, rev=config.revision)
        recorded = _recorded(project)
        (output / artifacts.SOURCE_CARD).unlink(missing_ok=True)  # first, because it marks the rest as complete
        shutil.rmtree(output / "raw", ignore_errors=True)
        (output / "raw").mkdir(parents=True)  # an output of the stage; the files are with the other project
        for name in FILES:
            path, md5 = recorded[name]
            with artifacts.written(output / name) as partial:
                project.get_file(path, str(partial))
                with partial.open("rb") as file:
                    found = hashlib.file_digest(file, "md5").hexdigest()
                if found != md5:
                    raise ValueError(
                        f"{name} of {config.repository} at {config.revision} differs from the digest in its dvc.lock"
                    )
    except (DvcException, SCMError, FileNotFoundError) as error:
        reason = redacted(str(error))
        raise ConfigError(
            f"ingest.repository: {config.repository} at {config.revision} cannot be read ({reason}); check the "
            "address, the revision and the credentials of the DVC remote"
        ) from error
    card = artifacts.read_json(output / artifacts.SOURCE_CARD)
    if (card["source"], card["category"]) != (config.source, config.category):
        ingested = " ".join(filter(None, (card["source"], card["category"])))
        raise ConfigError(
            f"ingest.source: {config.repository} at {config.revision} ingested another source, {ingested}"
        )
    logger.info("%s was fetched from revision %s of %s", config.source, config.revision, config.repository)
    return {name: float(value) for name, value in card["counts"].items()}


def _recorded(project: DVCFileSystem) -> dict[str, tuple[str, str]]:
    """Return path and MD5 of the outputs of stage `ingest`, by file name."""
    lock: dict[str, Any] = yaml.safe_load(project.read_text("dvc.lock"))
    outs = lock.get("stages", {}).get("ingest", {}).get("outs", ())
    recorded = {posixpath.basename(out["path"]): (out["path"], out["md5"]) for out in outs}
    if absent := [name for name in FILES if name not in recorded]:
        raise ConfigError(
            f"ingest.repository: dvc.lock has no {absent[0]} of the stage `ingest`: run `dvc repro` in that project "
            "and commit"
        )
    return recorded
