"""The catalogue of datasets: where each is published, under which terms, and how its files are read.

Data is downloaded, never shipped: none of these licences lets us pass it on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from seqrec.config import ConfigError, IngestConfig
from seqrec.data import readers

GROUPLENS = "https://files.grouplens.org/datasets/movielens"
AMAZON_2014 = "https://snap.stanford.edu/data/amazon/productGraph/categoryFiles"
AMAZON_2018 = (
    "https://mcauleylab.ucsd.edu/public_datasets/data/amazon_v2",
    "https://jmcauley.ucsd.edu/data/amazon_v2",
)
MOVIELENS_LICENCE = (
    "MovieLens: research use, no redistribution without permission of GroupLens, citation required (see its README)"
)
AMAZON_LICENCE = "Amazon reviews: released by the McAuley lab for research use, citation required"


@dataclass(frozen=True, kw_only=True)
class File:
    """A published file. A name here may also be found with `.gz` added."""

    role: str  # what the reader calls it
    paths: tuple[str, ...]  # below a mirror, or inside the archive; the first that exists counts
    urls: tuple[str, ...] = ()  # official addresses, where it is published on its own
    sha256: tuple[str, ...] = ()  # accepted digests, of the file or of what its gzip holds; empty: unknown
    required: bool = True


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A zip archive, on the web or as a wheel in a package index."""

    name: str
    url: str = ""
    requirement: str = ""  # of pip, instead of `url`
    sha256: tuple[str, ...] = ()
    size: int = 0  # bytes; 0: unknown


@dataclass(frozen=True, kw_only=True)
class Publication:
    """One of the forms a source is published in; `local` files are looked up as plain paths first."""

    files: tuple[File, ...]
    read: readers.Reader
    archive: Archive | None = None
    local: bool = False


@dataclass(frozen=True, kw_only=True)
class Source:
    """An entry of the catalogue. The publications are tried in order."""

    licence: str
    publications: Callable[[IngestConfig], tuple[Publication, ...]]
    homepage: str = ""
    reference: Mapping[str, int] = field(default_factory=dict)  # known rows, users, items (with interactions)
    rows: Mapping[str, int] = field(default_factory=dict)  # category -> known rows

    def known(self, config: IngestConfig) -> dict[str, int]:
        """Return the counts that this source is known for: some of `rows`, `users`, `items`."""
        return {"rows": self.rows[config.category]} if config.category in self.rows else dict(self.reference)


def find(config: IngestConfig) -> Source:
    """Return the source that `config` names.

    Raises:
        ConfigError: unknown source or category, or a setting that this source does not have or lacks.
    """
    if config.source not in SOURCES:
        raise ConfigError(f"ingest.source: no source {config.source!r}; there are {', '.join(SOURCES)}")
    source = SOURCES[config.source]
    used = SETTINGS.get(config.source, ())
    for name in ("category", "interactions", "items", "columns", "sha256"):
        if getattr(config, name) and name not in used:
            raise ConfigError(f"ingest.{name}: has no effect with the source {config.source}")
    for name in ("category", "interactions"):
        if name in used and not getattr(config, name):
            raise ConfigError(f"ingest.{name}: the source {config.source} needs it")
    if config.category and config.category not in source.rows:
        known = ", ".join(source.rows)
        raise ConfigError(f"ingest.category: {config.source} has no {config.category!r}; there are {known}")
    return source


def _zipped(
    name: str,
    read: readers.Reader,
    members: Mapping[str, str],
    pins: Mapping[str, str],
    *,
    sha256: str = "",
    size: int = 0,
) -> Publication:
    """Return MovieLens's way: `<name>.zip` with a folder `<name>`; `members` and `pins` map roles."""
    files = [
        File(
            role=role,
            paths=(f"{name}/{member}",),
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


def _movielens_latest_small(config: IngestConfig) -> tuple[Publication, ...]:
    # GroupLens says that this one may change, so nothing is pinned.
    members = {"interactions": "ratings.csv", "items": "movies.csv", "readme": "README.txt"}
    return (_zipped("ml-latest-small", readers.movielens_latest, members, {}),)


def _amazon_2014(config: IngestConfig) -> tuple[Publication, ...]:
    names = {"interactions": f"reviews_{config.category}_5.json", "items": f"meta_{config.category}.json"}
    urls = {role: (f"{AMAZON_2014}/{name}.gz",) for role, name in names.items()}
    return (_json_files("amazon-2014", readers.amazon_2014, config.category, names, urls),)


def _amazon_2018(config: IngestConfig) -> tuple[Publication, ...]:
    names = {"interactions": f"{config.category}_5.json", "items": f"meta_{config.category}.json"}
    folders = {"interactions": "categoryFilesSmall", "items": "metaFiles2"}
    urls = {role: tuple(f"{base}/{folders[role]}/{name}.gz" for base in AMAZON_2018) for role, name in names.items()}
    return (_json_files("amazon-2018", readers.amazon_2018, config.category, names, urls),)


def _json_files(
    folder: str, read: readers.Reader, category: str, names: Mapping[str, str], urls: Mapping[str, tuple[str, ...]]
) -> Publication:
    files = [
        File(
            role=role,
            paths=(f"{folder}/{name}", name),
            urls=urls[role],
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


def _named(places: Mapping[str, str], config: IngestConfig) -> tuple[File, ...]:
    unknown = set(config.sha256) - {role for role, place in places.items() if place}
    if unknown:
        raise ConfigError(f"ingest.sha256.{min(unknown)}: no such file; there are {', '.join(places)}")
    return tuple(
        File(
            role=role,
            paths=(place,),
            urls=(place,) if "://" in place else (),
            sha256=(config.sha256[role],) if role in config.sha256 else (),
        )
        for role, place in places.items()
        if place
    )


def file_name(place: str) -> str:
    """Return the last part of a path or URL."""
    return PurePosixPath(place.partition("?")[0].replace("\\", "/")).name


# Digests of the official files: of the gzip itself, or of what it holds.
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
# The 5-core files and their rows, as the home pages list them.
AMAZON_2014_ROWS = {
    "Amazon_Instant_Video": 37_126,
    "Apps_for_Android": 752_937,
    "Automotive": 20_473,
    "Baby": 160_792,
    "Beauty": 198_502,
    "Books": 8_898_041,
    "CDs_and_Vinyl": 1_097_592,
    "Cell_Phones_and_Accessories": 194_439,
    "Clothing_Shoes_and_Jewelry": 278_677,
    "Digital_Music": 64_706,
    "Electronics": 1_689_188,
    "Grocery_and_Gourmet_Food": 151_254,
    "Health_and_Personal_Care": 346_355,
    "Home_and_Kitchen": 551_682,
    "Kindle_Store": 982_619,
    "Movies_and_TV": 1_697_533,
    "Musical_Instruments": 10_261,
    "Office_Products": 53_258,
    "Patio_Lawn_and_Garden": 13_272,
    "Pet_Supplies": 157_836,
    "Sports_and_Outdoors": 296_337,
    "Tools_and_Home_Improvement": 134_476,
    "Toys_and_Games": 167_597,
    "Video_Games": 231_780,
}
AMAZON_2018_ROWS = {
    "AMAZON_FASHION": 3_176,
    "All_Beauty": 5_269,
    "Appliances": 2_277,
    "Arts_Crafts_and_Sewing": 494_485,
    "Automotive": 1_711_519,
    "Books": 27_164_983,
    "CDs_and_Vinyl": 1_443_755,
    "Cell_Phones_and_Accessories": 1_128_437,
    "Clothing_Shoes_and_Jewelry": 11_285_464,
    "Digital_Music": 169_781,
    "Electronics": 6_739_590,
    "Gift_Cards": 2_972,
    "Grocery_and_Gourmet_Food": 1_143_860,
    "Home_and_Kitchen": 6_898_955,
    "Industrial_and_Scientific": 77_071,
    "Kindle_Store": 2_222_983,
    "Luxury_Beauty": 34_278,
    "Magazine_Subscriptions": 2_375,
    "Movies_and_TV": 3_410_019,
    "Musical_Instruments": 231_392,
    "Office_Products": 800_357,
    "Patio_Lawn_and_Garden": 798_415,
    "Pet_Supplies": 2_098_325,
    "Prime_Pantry": 137_788,
    "Software": 12_805,
    "Sports_and_Outdoors": 2_839_940,
    "Tools_and_Home_Improvement": 2_070_831,
    "Toys_and_Games": 1_828_971,
    "Video_Games": 497_577,
}
# The settings of section `ingest` that say what to read, where a source has such a choice.
SETTINGS = {
    "amazon-2014": ("category",),
    "amazon-2018": ("category",),
    "csv": ("interactions", "items", "columns", "sha256"),
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
        publications=_movielens_latest_small,
        reference={"rows": 100_836, "users": 610, "items": 9_724},
    ),
    "ml-1m": Source(
        licence=MOVIELENS_LICENCE,
        homepage="https://grouplens.org/datasets/movielens/1m/",
        publications=_movielens_1m,
        reference={"rows": 1_000_209, "users": 6_040, "items": 3_706},
    ),
    "amazon-2014": Source(
        licence=AMAZON_LICENCE,
        homepage="https://cseweb.ucsd.edu/~jmcauley/datasets/amazon/links.html",
        publications=_amazon_2014,
        rows=AMAZON_2014_ROWS,
    ),
    "amazon-2018": Source(
        licence=AMAZON_LICENCE,
        homepage="https://cseweb.ucsd.edu/~jmcauley/datasets/amazon_v2/",
        publications=_amazon_2018,
        rows=AMAZON_2018_ROWS,
    ),
    "csv": Source(licence="the user's own", publications=_own),
    "prefixes": Source(licence="the user's own", publications=_prefixes),
}
