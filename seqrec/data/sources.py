"""The catalogue of datasets: where each is published, under which terms, and how its files are read.

Data is downloaded and never shipped, because none of these licences permits redistribution.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

import yaml

from seqrec.config import ConfigError, IngestConfig
from seqrec.data import readers

KNOWN_ROWS: dict[str, dict[str, int]] = yaml.safe_load(
    Path(__file__).with_name("known_rows.yaml").read_text(encoding="utf-8")
)
GROUPLENS = "https://files.grouplens.org/datasets/movielens"
AMAZON_2014 = "https://snap.stanford.edu/data/amazon/productGraph/categoryFiles"
AMAZON_2018 = (
    "https://mcauleylab.ucsd.edu/public_datasets/data/amazon_v2",
    "https://jmcauley.ucsd.edu/data/amazon_v2",
)
AMAZON_2023 = "https://mcauleylab.ucsd.edu/public_datasets/data/amazon_2023"
STEAM = "https://cseweb.ucsd.edu/~wckang"
SNAP = "https://snap.stanford.edu/data"
MOVIELENS_LICENCE = (
    "MovieLens: research use, no redistribution without permission of GroupLens, citation required (see its README)"
)
AMAZON_LICENCE = "Amazon reviews: released by the McAuley lab for research use, citation required"
STEAM_LICENCE = "Steam reviews: released by the McAuley lab for research use, citation required"
YELP_LICENCE = "Yelp Open Dataset: academic use under the terms accepted at download, no redistribution"
GOWALLA_LICENCE = "Gowalla check-ins: published by SNAP, Stanford, without a stated licence; citation required"


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
    publications: Callable[[IngestConfig], tuple[Publication, ...]]
    homepage: str = ""
    reference: Mapping[str, int] = field(default_factory=dict)  # known numbers of rows, users, items with interactions
    rows: Mapping[str, int] = field(default_factory=dict)  # category -> known number of rows, 0 if unknown

    def known(self, config: IngestConfig) -> dict[str, int]:
        """Return the known counts of this source: some of `rows`, `users`, `items`."""
        rows = self.rows.get(config.category, 0)
        return {"rows": rows} if rows else dict(self.reference)


def find(config: IngestConfig) -> Source:
    """Return the source of `config`.

    Raises:
        ConfigError: the source or category is unknown, a required setting is missing, or one has no effect here.
    """
    if config.source not in SOURCES:
        raise ConfigError(f"ingest.source: no source {config.source!r}; there are {', '.join(SOURCES)}")
    source = SOURCES[config.source]
    used = SETTINGS.get(config.source, ())
    for name in ("category", "interactions", "items", "columns", "sha256", "time_format", "lines"):
        if getattr(config, name) and name not in used:
            raise ConfigError(f"ingest.{name}: has no effect with the source {config.source}")
    for name in ("category", "interactions"):
        if name in used and not getattr(config, name):
            raise ConfigError(f"ingest.{name}: the source {config.source} needs it")
    if config.category and config.category not in source.rows:
        known = ", ".join(source.rows)
        raise ConfigError(f"ingest.category: {config.source} has no {config.category!r}; there are {known}")
    return source


def is_pinned(config: IngestConfig) -> bool:
    """Say whether the source can only ever give one content, so that ingesting it twice is a waste."""
    if config.repository:
        return re.fullmatch(r"[0-9a-f]{40}", config.revision) is not None
    return all(
        (publication.archive is not None and bool(publication.archive.sha256))
        or all(file.sha256 for file in publication.files if file.required)
        for publication in find(config).publications(config)
    )


def _zipped(
    name: str,
    read: readers.Reader,
    members: Mapping[str, str],
    pins: Mapping[str, str],
    *,
    folder: str = "",
    sha256: str = "",
    size: int = 0,
) -> Publication:
    """Return a MovieLens publication: `<name>.zip` with a folder, usually `<name>`; `members` and `pins` map roles."""
    files = [
        File(
            role=role,
            paths=(f"{folder or name}/{member}",),
            sha256=(pins[role],) if role in pins else (),
            required=role in ("interactions", "items"),
        )
        for role, member in members.items()
    ]
    url = f"{GROUPLENS}/{name}.zip"
    archive = Archive(name=f"{name}.zip", url=url, sha256=(sha256,) if sha256 else (), size=size)
    return Publication(files=tuple(files), read=read, archive=archive)


def _movielens_100k(config: IngestConfig) -> tuple[Publication, ...]:
    official = _zipped(
        "ml-100k",
        readers.movielens_100k,
        {"interactions": "u.data", "items": "u.item", "readme": "README"},
        {
            "interactions": "06416e597f82b7342361e41163890c81036900f418ad91315590814211dca490",
            "items": "553841ebc7de3a0fd0d6b62a204ea30c1e651aacfb2814c7a6584ac52f2c5701",
        },
        sha256="50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229",
        size=4_924_029,
    )
    return official, _recbole_100k()


def _recbole_100k() -> Publication:
    folder = "recbole/dataset_example/ml-100k"
    return Publication(
        files=(
            File(
                role="interactions",
                paths=(f"{folder}/ml-100k.inter", "ml-100k/ml-100k.inter"),
                sha256=("4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",),
            ),
            File(
                role="items",
                paths=(f"{folder}/ml-100k.item", "ml-100k/ml-100k.item"),
                sha256=("51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",),
            ),
        ),
        read=readers.recbole_100k,
        archive=Archive(
            name="recbole-1.2.1-py3-none-any.whl",
            requirement="recbole==1.2.1",
            sha256=("9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",),
            size=2_130_151,
        ),
    )


def _movielens_1m(config: IngestConfig) -> tuple[Publication, ...]:
    return (
        _zipped(
            "ml-1m",
            readers.movielens_1m,
            {"interactions": "ratings.dat", "items": "movies.dat", "readme": "README"},
            {"items": "0140fc2356357c1a851d0f52e893a1e4d3696df632c4141cea8d5bc3d621f0b9"},
            sha256="a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
            size=5_917_549,
        ),
    )


def _movielens_10m(config: IngestConfig) -> tuple[Publication, ...]:
    members = {"interactions": "ratings.dat", "items": "movies.dat", "readme": "README.html"}
    return (_zipped("ml-10m", readers.movielens_10m, members, {}, folder="ml-10M100K"),)


def _movielens_csv(name: str, sha256: str = "", size: int = 0) -> Callable[[IngestConfig], tuple[Publication, ...]]:
    members = {"interactions": "ratings.csv", "items": "movies.csv", "readme": "README.txt"}
    return lambda config: (_zipped(name, readers.movielens_latest, members, {}, sha256=sha256, size=size),)


def _amazon_2014(config: IngestConfig) -> tuple[Publication, ...]:
    names = {"interactions": f"reviews_{config.category}_5.json", "items": f"meta_{config.category}.json"}
    urls = {role: (f"{AMAZON_2014}/{name}.gz",) for role, name in names.items()}
    return (_files("amazon-2014", readers.amazon_2014, names, urls),)


def _amazon_2018(config: IngestConfig) -> tuple[Publication, ...]:
    names = {"interactions": f"{config.category}_5.json", "items": f"meta_{config.category}.json"}
    folders = {"interactions": "categoryFilesSmall", "items": "metaFiles2"}
    urls = {role: tuple(f"{base}/{folders[role]}/{name}.gz" for base in AMAZON_2018) for role, name in names.items()}
    return (_files("amazon-2018", readers.amazon_2018, names, urls),)


def _amazon_2018_full(config: IngestConfig) -> tuple[Publication, ...]:
    """Return two publications with the same events: ratings only, a tenth of the size, and full reviews."""
    item = f"meta_{config.category}.json"
    forms = (
        (readers.amazon_2018_ratings, f"{config.category}.csv", "categoryFilesSmall", ""),
        (readers.amazon_2018, f"{config.category}.json", "categoryFiles", ".gz"),
    )
    return tuple(
        _files(
            "amazon-2018-full",
            read,
            {"interactions": name, "items": item},
            {
                "interactions": tuple(f"{base}/{folder}/{name}{ending}" for base in AMAZON_2018),
                "items": tuple(f"{base}/metaFiles2/{item}.gz" for base in AMAZON_2018),
            },
        )
        for read, name, folder, ending in forms
    )


def _amazon_2023(config: IngestConfig) -> tuple[Publication, ...]:
    names = {"interactions": f"{config.category}.csv", "items": f"meta_{config.category}.jsonl"}
    folders = {"interactions": "benchmark/5core/rating_only", "items": "raw/meta_categories"}
    urls = {role: (f"{AMAZON_2023}/{folders[role]}/{name}.gz",) for role, name in names.items()}
    return (_files("amazon-2023", readers.amazon_2023, names, urls),)


def _steam(config: IngestConfig) -> tuple[Publication, ...]:
    names = {"interactions": "steam_reviews.json", "items": "steam_games.json"}
    return (_files("steam", readers.steam, names, {role: (f"{STEAM}/{name}.gz",) for role, name in names.items()}),)


def _yelp(config: IngestConfig) -> tuple[Publication, ...]:
    # No URL: users must accept the terms at https://business.yelp.com/data/resources/open-dataset/ and unpack it.
    names = {"interactions": "yelp_academic_dataset_review.json", "items": "yelp_academic_dataset_business.json"}
    return (_files("yelp", readers.yelp, names, {}),)


def _gowalla(config: IngestConfig) -> tuple[Publication, ...]:
    name = "loc-gowalla_totalCheckins.txt"
    return (_files("gowalla", readers.gowalla, {"interactions": name}, {"interactions": (f"{SNAP}/{name}.gz",)}),)


def _files(
    folder: str, read: readers.Reader, names: Mapping[str, str], urls: Mapping[str, tuple[str, ...]]
) -> Publication:
    """Return files that are published separately, and lie below `folder` in a mirror."""
    files = [
        File(
            role=role,
            paths=(f"{folder}/{name}", name),
            urls=urls.get(role, ()),
            sha256=AMAZON_PINS.get(f"{folder}/{name}", ()),
            required=role == "interactions",
        )
        for role, name in names.items()
    ]
    return Publication(files=tuple(files), read=read)


def _own(config: IngestConfig) -> tuple[Publication, ...]:
    named = {"interactions": config.interactions, "items": config.items}
    return (Publication(files=_named(named, config), read=readers.own_files, local=True),)


def _prefixes(config: IngestConfig) -> tuple[Publication, ...]:
    named = {part: f"{config.interactions}.{part}.inter" for part in ("train", "valid", "test")}
    indices = {role: f"{config.interactions}.{role}" for role in ("item2index", "user2index")}
    files = _named({**named, "items": config.items, **indices}, config)
    files = tuple(replace(file, required=file.role not in indices) for file in files)
    return (Publication(files=files, read=readers.growing_prefixes, local=True),)


def _lines(config: IngestConfig) -> tuple[Publication, ...]:
    named = {"interactions": config.interactions, "items": config.items}
    return (Publication(files=_named(named, config), read=readers.lines_of_items, local=True),)


def _named(locations: Mapping[str, str], config: IngestConfig) -> tuple[File, ...]:
    unknown = set(config.sha256) - {role for role, place in locations.items() if place}
    if unknown:
        raise ConfigError(f"ingest.sha256.{min(unknown)}: no such file; there are {', '.join(locations)}")
    return tuple(
        File(
            role=role,
            paths=(location,),
            urls=(location,) if "://" in location else (),
            sha256=(config.sha256[role],) if role in config.sha256 else (),
        )
        for role, location in locations.items()
        if location
    )


def file_name(location: str) -> str:
    """Return the last part of a path or URL."""
    return PurePosixPath(location.partition("?")[0].replace("\\", "/")).name


# Digests of the official files: of the gzip file or of its content.
AMAZON_PINS = {
    "amazon-2014/reviews_Musical_Instruments_5.json": (
        "03f9cc27ae13a454cb4ea6cb620fb10546cc1194ef921441d1c5f34addff2748",
        "8e1aaab451ba61484dfe393f53d11886246bc426c7046b180b62352580f68c1d",
    ),
    "amazon-2018/Gift_Cards_5.json": (
        "41e1f0e50d3c1c9d7d949fb6315944c8bde51ea6b7429a29fdd0d02cbc07ef25",
        "9a712964d5f4d6d6ce905efc63dd41fe1309dd02a6daa4e7e0570725a44261cf",
    ),
    "amazon-2018/meta_Gift_Cards.json": (
        "24ac90af3eb47d9c04458a61a44a76a882419190e027c6ec14ee0a993549c34a",
        "538994d5d15bef85a2d5a81ce79becff140719cdc6394a46e4b934cf63e09acf",
    ),
}
# Settings of section `ingest` that choose what to read; only some sources have them.
SETTINGS = {
    "amazon-2014": ("category",),
    "amazon-2018": ("category",),
    "amazon-2018-full": ("category",),
    "amazon-2023": ("category",),
    "csv": ("interactions", "items", "columns", "sha256", "time_format"),
    "lines": ("interactions", "items", "sha256", "lines"),
    "prefixes": ("interactions", "items", "sha256"),
}
SOURCES: dict[str, Source] = {
    "ml-100k": Source(
        licence=MOVIELENS_LICENCE,
        homepage="https://grouplens.org/datasets/movielens/100k/",
        publications=_movielens_100k,
        reference={"rows": 100_000, "users": 943, "items": 1_682},
    ),
    "ml-latest-small": Source(
        licence=MOVIELENS_LICENCE,
        homepage="https://grouplens.org/datasets/movielens/latest/",
        publications=_movielens_csv("ml-latest-small"),  # its publisher may change it, so nothing is pinned
        reference={"rows": 100_836, "users": 610, "items": 9_724},
    ),
    "ml-1m": Source(
        licence=MOVIELENS_LICENCE,
        homepage="https://grouplens.org/datasets/movielens/1m/",
        publications=_movielens_1m,
        reference={"rows": 1_000_209, "users": 6_040, "items": 3_706},
    ),
    "ml-10m": Source(
        licence=MOVIELENS_LICENCE,
        homepage="https://grouplens.org/datasets/movielens/10m/",
        publications=_movielens_10m,
        reference={"rows": 10_000_054, "users": 69_878, "items": 10_677},
    ),
    "ml-20m": Source(
        licence=MOVIELENS_LICENCE,
        homepage="https://grouplens.org/datasets/movielens/20m/",
        publications=_movielens_csv(
            "ml-20m", "96f243c338a8665f6bcc89c53edf6ee39162a846940de6b7c8c48aeada765ff3", 198_702_078
        ),
        reference={"rows": 20_000_263, "users": 138_493, "items": 26_744},
    ),
    "ml-25m": Source(
        licence=MOVIELENS_LICENCE,
        homepage="https://grouplens.org/datasets/movielens/25m/",
        publications=_movielens_csv(
            "ml-25m", "8b21cfb7eb1706b4ec0aac894368d90acf26ebdfb6aced3ebd4ad5bd1eb9c6aa", 261_978_986
        ),
        reference={"rows": 25_000_095, "users": 162_541, "items": 59_047},
    ),
    "ml-32m": Source(
        licence=MOVIELENS_LICENCE,
        homepage="https://grouplens.org/datasets/movielens/32m/",
        publications=_movielens_csv("ml-32m"),
        reference={"rows": 32_000_204, "users": 200_948, "items": 84_432},
    ),
    "amazon-2014": Source(
        licence=AMAZON_LICENCE,
        homepage="https://cseweb.ucsd.edu/~jmcauley/datasets/amazon/links.html",
        publications=_amazon_2014,
        rows=KNOWN_ROWS["amazon-2014"],
    ),
    "amazon-2018": Source(
        licence=AMAZON_LICENCE,
        homepage="https://cseweb.ucsd.edu/~jmcauley/datasets/amazon_v2/",
        publications=_amazon_2018,
        rows=KNOWN_ROWS["amazon-2018"],
    ),
    "amazon-2018-full": Source(
        licence=AMAZON_LICENCE,
        homepage="https://cseweb.ucsd.edu/~jmcauley/datasets/amazon_v2/",
        publications=_amazon_2018_full,
        rows=KNOWN_ROWS["amazon-2018-full"],
    ),
    "amazon-2023": Source(
        licence=AMAZON_LICENCE,
        homepage="https://amazon-reviews-2023.github.io/",
        publications=_amazon_2023,
        rows=KNOWN_ROWS["amazon-2023"],
    ),
    "steam": Source(
        licence=STEAM_LICENCE,
        homepage="https://cseweb.ucsd.edu/~jmcauley/datasets.html#steam_data",
        publications=_steam,
        reference={"rows": 7_793_069, "users": 2_567_538, "items": 15_474},
    ),
    "yelp": Source(
        licence=YELP_LICENCE,
        homepage="https://business.yelp.com/data/resources/open-dataset/",
        publications=_yelp,  # a new edition every few years: no counts
    ),
    "gowalla": Source(
        licence=GOWALLA_LICENCE,
        homepage="https://snap.stanford.edu/data/loc-Gowalla.html",
        publications=_gowalla,
        reference={"rows": 6_442_892, "users": 107_092, "items": 1_280_969},
    ),
    "csv": Source(licence="the user's own", publications=_own),
    "lines": Source(licence="the user's own", publications=_lines),
    "prefixes": Source(licence="the user's own", publications=_prefixes),
}
