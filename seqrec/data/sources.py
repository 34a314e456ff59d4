"""The catalogue of datasets: the published ones of sources.yaml, and the user's own files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from seqrec.config import ConfigError, IngestConfig
from seqrec.data import readers


def _read_yaml(name: str) -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


PUBLISHED = _read_yaml("sources.yaml")
KNOWN_ROWS: dict[str, dict[str, int]] = _read_yaml("known_rows.yaml")  # source -> category -> rows, 0 if unknown
OWN: dict[str, readers.Reader] = {
    "csv": readers.own_files,
    "lines": readers.lines_of_items,
    "prefixes": readers.growing_prefixes,
}
SOURCES = (*PUBLISHED, *OWN)
# Settings of section `ingest` that choose what to read; sources with categories have `category` alone, others none.
SETTINGS = {
    "csv": ("interactions", "items", "columns", "sha256", "time_format"),
    "lines": ("interactions", "items", "columns", "sha256", "lines"),
    "prefixes": ("interactions", "items", "sha256"),
}


@dataclass(frozen=True, kw_only=True)
class File:
    """A published file; its paths may also exist with `.gz` added."""

    role: str  # key under which the reader gets it
    paths: tuple[str, ...]  # below a mirror or inside the archive; the first that exists is used
    urls: tuple[str, ...] = ()  # official addresses, if published as a single file
    sha256: tuple[str, ...] = ()  # accepted digests, of the file or of its gzip content; empty: unknown
    required: bool = True


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A zip archive, on the web or as a wheel in a package index."""

    name: str
    url: str = ""
    requirement: str = ""  # requirement for pip, instead of `url`
    sha256: tuple[str, ...] = ()
    size: int = 0  # bytes; 0: unknown


@dataclass(frozen=True, kw_only=True)
class Publication:
    """One of the forms in which a source is published; `local` files are first looked up as plain paths."""

    files: tuple[File, ...]
    read: readers.Reader
    archive: Archive | None = None
    local: bool = False


@dataclass(frozen=True, kw_only=True)
class Source:
    """An entry of the catalogue; its publications are tried in order."""

    licence: str
    homepage: str
    reference: Mapping[str, int]  # known numbers of rows, users, items with events; some or none of them
    publications: tuple[Publication, ...]


def find(config: IngestConfig) -> Source:
    """Return the source of `config`.

    Raises:
        ConfigError: the source or category is unknown, a required setting is missing, or one has no effect here.
    """
    if config.source not in SOURCES:
        raise ConfigError(f"ingest.source: there is no source {config.source!r}; the sources are {', '.join(SOURCES)}")
    rows = KNOWN_ROWS.get(config.source, {})
    used = SETTINGS.get(config.source, ("category",) if rows else ())
    for name in ("category", "interactions", "items", "columns", "sha256", "time_format", "lines"):
        if getattr(config, name) and name not in used:
            raise ConfigError(f"ingest.{name}: has no effect with the source {config.source}")
    for name in ("category", "interactions"):
        if name in used and not getattr(config, name):
            raise ConfigError(f"ingest.{name}: required by the source {config.source}")
    if config.category and config.category not in rows:
        known = ", ".join(rows)
        raise ConfigError(f"ingest.category: {config.source} has no {config.category!r}; its categories are {known}")
    if config.source in OWN:
        return Source(licence="the user's own", homepage="", reference={}, publications=(_own(config),))
    entry = PUBLISHED[config.source]
    count = rows.get(config.category, 0)
    return Source(
        licence=entry["licence"],
        homepage=entry["homepage"],
        reference={"rows": count} if count else entry.get("reference", {}),
        publications=tuple(_published(form, config.category) for form in entry["publications"]),
    )


def describes_items(config: IngestConfig) -> bool:
    """Return whether the source has a file of items, whose columns are what text models read."""
    if config.repository:  # its content is unknown until it is fetched
        return True
    return any(file.role == "items" for publication in find(config).publications for file in publication.files)


def is_pinned(config: IngestConfig) -> bool:
    """Say whether the source can only ever give one content, so that ingesting it twice is a waste."""
    if config.events:
        return False
    if config.repository:
        return re.fullmatch(r"[0-9a-f]{40}", config.revision) is not None
    return all(
        (publication.archive is not None and bool(publication.archive.sha256))
        or all(file.sha256 for file in publication.files if file.required)
        for publication in find(config).publications
    )


def _published(form: Mapping[str, Any], category: str) -> Publication:
    """Return an entry of `publications` in sources.yaml, for one category."""

    def filled(texts: list[str]) -> tuple[str, ...]:
        return tuple(text.replace("{category}", category) for text in texts)

    files = tuple(
        File(
            role=role,
            paths=filled(file["paths"]),
            urls=filled(file.get("urls", [])),
            sha256=tuple(file.get("sha256", file.get("sha256_of", {}).get(category, []))),
            required=file.get("required", True),
        )
        for role, file in form["files"].items()
    )
    reader: Callable[..., readers.Tables] = getattr(readers, form["reader"])
    archive = None
    if entry := form.get("archive"):
        name = entry.get("name") or file_name(entry["url"])
        archive = Archive(**{"name": name, **entry, "sha256": tuple(entry.get("sha256", []))})
    return Publication(files=files, read=reader, archive=archive)


def _own(config: IngestConfig) -> Publication:
    places = {"interactions": config.interactions, "items": config.items}
    indices: dict[str, str] = {}
    if config.source == "prefixes":
        indices = {role: f"{config.interactions}.{role}" for role in ("item2index", "user2index")}
        parts = {part: f"{config.interactions}.{part}.inter" for part in ("train", "valid", "test")}
        places = parts | {"items": config.items} | indices
    unknown = set(config.sha256) - {role for role, place in places.items() if place}
    if unknown:
        raise ConfigError(f"ingest.sha256.{min(unknown)}: no such file; the files are {', '.join(places)}")
    files = tuple(
        File(
            role=role,
            paths=(place,),
            urls=(place,) if "://" in place else (),
            sha256=(config.sha256[role].lower(),) if role in config.sha256 else (),
            required=role not in indices,
        )
        for role, place in places.items()
        if place
    )
    return Publication(files=files, read=OWN[config.source], local=True)


def file_name(location: str) -> str:
    """Return the last part of a path or URL."""
    return PurePosixPath(location.partition("?")[0].replace("\\", "/")).name
