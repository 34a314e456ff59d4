import gzip
import json
import os
import resource
import threading
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from support import contents, until

from seqrec import artifacts
from seqrec.config import ConfigError, IngestConfig
from seqrec.data.readers import blocks
from seqrec.stages.ingest import ingest

EVENTS = "user_id,item_id,timestamp,rating\n"


@pytest.fixture(autouse=True)
def _offline(request, monkeypatch):
    """Official addresses refuse the connection at once; only tests of the real mirror see SEQREC_DATA_MIRROR."""
    for variable in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    if "mirror" not in request.keywords:
        monkeypatch.delenv("SEQREC_DATA_MIRROR", raising=False)


def put(folder: Path, **files: str | bytes) -> Path:
    """Write files below `folder`; `/` and `.` of a name come from a dict."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def run(folder: Path, log: Path | None = None, **settings) -> dict[str, float]:
    config = IngestConfig(**{"retries": 0, "timeout_s": 5, **settings})
    return ingest(dataset="mine", output=folder / "out", downloads=folder / "downloads", config=config, events=log)


def run_csv(folder: Path, text: str | bytes, name: str = "events.csv", **settings) -> dict[str, float]:
    put(folder, **{name: text})
    return run(folder, source="csv", interactions=str(folder / name), **settings)


SMALL = {
    "ml-latest-small/ratings.csv": "userId,movieId,rating,timestamp\n1,10,4.0,100\n2,10,3.0,90\n1,11,5.0,80\nx,\n",
    "ml-latest-small/movies.csv": (
        "movieId,title,genres\n10,Ten (2010),Drama\n11,Eleven,Comedy\n10,Again,War\n12,Cold,War\n"
    ),
}


def test_ingest_writes_what_its_docstring_says(tmp_path, caplog):
    mirror = put(tmp_path / "mirror", **SMALL)
    counts = run(tmp_path, source="ml-latest-small", mirror=str(mirror), max_bad_share=0.25)
    out = tmp_path / "out"
    assert counts == {"rows": 3, "users": 2, "items": 2, "catalogue": 3, "quarantined": 1}
    interactions = pq.read_table(out / "interactions.parquet")
    assert interactions.schema.equals(artifacts.INTERACTIONS_SCHEMA)
    assert pl.from_arrow(interactions).rows() == [
        ("1", "10", 100, 2, 4.0),
        ("2", "10", 90, 3, 3.0),
        ("1", "11", 80, 4, 5.0),
    ]
    items = pq.read_table(out / "items.parquet")
    assert pl.from_arrow(items).rows(named=True) == [  # of item 10 the first row
        {"item_id": "10", "title": "Ten", "year": "2010", "genres": "Drama"},
        {"item_id": "11", "title": "Eleven", "year": None, "genres": "Comedy"},
        {"item_id": "12", "title": "Cold", "year": None, "genres": "War"},
    ]
    quarantine = pq.read_table(out / "quarantine.parquet")
    assert quarantine.schema.equals(artifacts.QUARANTINE_SCHEMA)
    assert pl.from_arrow(quarantine).rows() == [("ratings.csv", 5, "not 4 columns", "x,")]
    assert (out / "raw/ml-latest-small/ratings.csv").read_text() == SMALL["ml-latest-small/ratings.csv"]
    assert (out / "raw/ml-latest-small/movies.csv").read_text() == SMALL["ml-latest-small/movies.csv"]
    assert not list(out.rglob("*.partial"))
    card = json.loads((out / "source.json").read_text())
    assert str(tmp_path) not in str(card)
    assert card["source"] == "ml-latest-small"
    assert "research use" in card["licence"]
    assert card["counts"] == counts
    assert "items: 1 rows repeat the id of an earlier row and are not used" in caplog.messages
    assert card["reference"] == {"rows": 100_836, "users": 610, "items": 9_724}
    assert card["files"][0] == {
        "role": "interactions",
        "name": "ratings.csv",
        "origin": "mirror:ml-latest-small/ratings.csv",
        "size": len(SMALL["ml-latest-small/ratings.csv"]),
        "sha256": artifacts.sha256(mirror / "ml-latest-small/ratings.csv"),
    }


def test_the_events_of_the_store_follow_those_of_the_source(tmp_path):
    mirror, log = put(tmp_path / "mirror", **SMALL), tmp_path / "log.parquet"
    rows = {"user_id": ["1", "9"], "item_id": ["12", "new"], "timestamp": [300, 200], "received": [1.5, 2.5]}
    pl.DataFrame(rows).write_parquet(log)
    settings = {"source": "ml-latest-small", "mirror": str(mirror), "max_bad_share": 0.25}

    assert run(tmp_path, events=True, log=log, **settings)["rows"] == 5
    found = pl.read_parquet(tmp_path / "out/interactions.parquet")
    assert found.rows()[3:] == [("1", "12", 300, 6, None), ("9", "new", 200, 7, None)]
    assert found["row"].n_unique() == 5
    assert json.loads((tmp_path / "out/source.json").read_text())["reference"] == {}  # its counts are no longer known

    pl.read_parquet(log).clear().write_parquet(log)
    assert run(tmp_path, events=True, log=log, **settings)["rows"] == 3
    with pytest.raises(ConfigError, match=r"datasets\.mine\.ingest\.events: DVC cannot track the event store"):
        run(tmp_path, events=True, **settings)


def test_a_second_run_replaces_the_first(tmp_path):
    mirror = put(tmp_path / "mirror", **SMALL)
    run(tmp_path, source="ml-latest-small", mirror=str(mirror), max_bad_share=1)
    run_csv(tmp_path, EVENTS + "u,i,5,\n")
    fresh = tmp_path / "fresh"
    run_csv(fresh, EVENTS + "u,i,5,\n")
    assert contents(tmp_path / "out") == contents(fresh / "out")


def test_over_many_blocks_each_user_and_item_counts_once_in_order_of_first_appearance(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)
    generator = np.random.default_rng(0)
    users, items = generator.integers(0, 40, size=300), generator.integers(0, 90, size=300)
    lines = "".join(f"u{user},i{item},{time},\n" for time, (user, item) in enumerate(zip(users, items, strict=True)))
    counts = run_csv(tmp_path, EVENTS + lines)
    assert (counts["rows"], counts["users"], counts["items"]) == (300, len(set(users)), len(set(items)))
    found = pl.read_parquet(tmp_path / "out" / "items.parquet")  # without a file of items, the ids that occur
    assert found.rows() == [(f"i{item}", None) for item in dict.fromkeys(items)]
    assert counts["catalogue"] == len(found)
    assert pl.read_parquet(tmp_path / "out" / "interactions.parquet")["row"].to_list() == list(range(2, 302))


FILMS = {"ratings.csv": "userId,movieId,rating,timestamp\n1,2,0.5,5\n", "movies.csv": "movieId,title,genres\n2,T,War\n"}
PUBLISHED = {  # what a mirror may hold: of each source one event of user 1 with item 2, called T
    "ml-10M100K/ratings.dat": "1::2::0.5::5\n",
    "ml-10M100K/movies.dat": "2::T::War\n",
    **{f"{name}/{file}": FILMS[file] for name in ("ml-20m", "ml-25m", "ml-32m") for file in FILMS},
    "amazon-2018-full/Software.csv": "2,1,0.5,5\n",
    "amazon-2018-full/meta_Software.json": '{"asin": "2", "title": "T"}\n',
    "amazon-2023/Software.csv.gz": gzip.compress(b"user_id,parent_asin,rating,timestamp\n1,2,0.5,5\n"),
    "amazon-2023/meta_Software.jsonl": '{"parent_asin": "2", "title": "T"}\n',
    "steam/steam_reviews.json": "{u'username': u'1', u'product_id': u'2', u'date': u'1970-01-01'}\n",
    "steam/steam_games.json": "{u'id': u'2', u'title': u'T'}\n",
    "yelp/yelp_academic_dataset_review.json": (
        '{"user_id": "1", "business_id": "2", "stars": 0.5, "date": "1970-01-01 00:00:05"}\n'
    ),
    "yelp/yelp_academic_dataset_business.json": '{"business_id": "2", "name": "T"}\n',
    "gowalla/loc-gowalla_totalCheckins.txt.gz": gzip.compress(b"1\t1970-01-01T00:00:05Z\t0\t0\t2\n"),
}
SOURCES = ("ml-10m", "ml-20m", "ml-25m", "ml-32m", "amazon-2018-full", "amazon-2023", "steam", "yelp", "gowalla")


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_of_the_papers_is_read_from_a_mirror(tmp_path, name):
    settings = {"category": "Software"} if name.startswith("amazon") else {}
    assert run(tmp_path, source=name, mirror=str(put(tmp_path / "m", **PUBLISHED)), **settings)["rows"] == 1
    event = pl.read_parquet(tmp_path / "out" / "interactions.parquet").row(0, named=True)
    assert (event["user_id"], event["item_id"]) == ("1", "2")
    assert event["timestamp"] == (0 if name == "steam" else 5)
    assert event["rating"] == (None if name in ("steam", "gowalla") else 0.5)
    items = pl.read_parquet(tmp_path / "out" / "items.parquet")
    assert items.select("item_id", "title").rows() == [("2", None if name == "gowalla" else "T")]


def test_all_reviews_of_2018_are_read_where_the_ratings_alone_are_not_there(tmp_path):
    review = '{"reviewerID": "1", "asin": "2", "overall": 0.5, "unixReviewTime": 5}\n'
    mirror = put(tmp_path / "m", **{"amazon-2018-full/Software.json": review})
    run(tmp_path, source="amazon-2018-full", category="Software", mirror=str(mirror))
    card = json.loads((tmp_path / "out" / "source.json").read_text())
    assert card["files"][0]["origin"] == "mirror:amazon-2018-full/Software.json"
    assert card["reference"] == {"rows": 459_436}


def test_a_source_without_an_address_says_which_file_to_bring(tmp_path):
    with pytest.raises(ValueError, match=r"yelp/yelp_academic_dataset_review\.json"):
        run(tmp_path, source="yelp", mirror=str(put(tmp_path / "m", empty="")))


def test_own_files_are_looked_up_here_and_in_the_mirror(tmp_path, monkeypatch):
    put(tmp_path / "mirror", **{"sets/events.csv": EVENTS + "u,i,5,\n", "sets/data.csv": "item_id,title\ni,I\n"})
    monkeypatch.chdir(put(tmp_path / "work", **{"own/data.csv": EVENTS + "u,i,5,\nw,i,6,\n"}))
    settings = {"source": "csv", "items": "sets/data.csv", "mirror": str(tmp_path / "mirror")}
    assert run(tmp_path, interactions="sets/events.csv", **settings)["rows"] == 1


def test_files_of_the_same_name_are_both_kept(tmp_path):
    put(tmp_path, **{"a/data.csv": EVENTS + "u,i,5,\n", "b/data.csv": "item_id,title\ni,I\n"})
    run(tmp_path, source="csv", interactions=str(tmp_path / "a/data.csv"), items=str(tmp_path / "b/data.csv"))
    assert sorted(contents(tmp_path / "out" / "raw")) == ["csv/interactions-data.csv", "csv/items-data.csv"]


def events(good: int, garbage: int) -> str:
    return EVENTS + "".join(f"u{n},i,{n},\n" for n in range(good)) + "garbage\n" * garbage


def test_times_of_another_format_are_answered_with_the_setting_to_name_it(tmp_path):
    with pytest.raises(ValueError, match=r"Name the format of the times, such as ingest\.time_format"):
        run_csv(tmp_path, EVENTS + "".join(f"u{n},i,31/01/2024,\n" for n in range(9)))


def test_sixty_percent_of_garbage_fails_with_examples(tmp_path):
    with pytest.raises(ValueError, match=r"60 of 100 rows") as caught:
        run_csv(tmp_path, events(40, 60))
    message = str(caught.value)
    assert message.startswith("datasets.mine: ")
    assert "ingest.max_bad_share = 0.01" in message
    assert "\n  events.csv:42: not 4 columns: garbage\n  events.csv:43:" in message
    assert message.count("events.csv:") == 3
    assert len(pl.read_parquet(tmp_path / "out" / "quarantine.parquet")) == 60
    assert not (tmp_path / "out" / "source.json").exists()


def test_garbage_in_the_items_counts_as_well(tmp_path):
    put(tmp_path, **{"items.csv": "item_id,title\ni,I\nx\n"})
    with pytest.raises(ValueError, match=r"1 of 2 rows of items are malformed"):
        run_csv(tmp_path, events(5, 0), items=str(tmp_path / "items.csv"))


@pytest.mark.parametrize("empty", ["ml-latest-small/ratings.csv", "ml-latest-small/movies.csv"])
def test_an_empty_file_of_a_source_fails(tmp_path, empty):
    mirror = put(tmp_path / "mirror", **{**SMALL, empty: SMALL[empty].partition("\n")[0]})
    with pytest.raises(ValueError, match="file is empty"):
        run(tmp_path, source="ml-latest-small", mirror=str(mirror), max_bad_share=0.5)


def test_a_wrong_checksum_fails(tmp_path):
    files = {"ml-1m/ratings.dat": "1::1::5::978300760\n", "ml-1m/movies.dat": "1::Other (1995)::Drama\n"}
    with pytest.raises(ValueError, match=r"mirror:ml-1m/movies\.dat: SHA-256 is \w+, expected 0140fc23"):
        run(tmp_path, source="ml-1m", mirror=str(put(tmp_path / "m", **files)))


def test_a_log_that_is_still_written_to_is_refused(tmp_path):
    done = threading.Event()

    def write():
        until((tmp_path / "events.csv").exists)
        with (tmp_path / "events.csv").open("a") as file:
            while not done.wait(0.001):
                print("u1,i1,1000000000", file=file, flush=True)

    threading.Thread(target=write, daemon=True).start()
    try:
        with pytest.raises(ValueError, match=r"events\.csv changed while it was read"):
            run_csv(tmp_path, events(10_000, 0))
    finally:
        done.set()


def test_what_only_later_json_lines_have_is_read(tmp_path):
    rows = [{"user_id": f"u{n}", "item_id": "i1", "timestamp": 10**9 + n, "pad": "x" * 100} for n in range(40_000)]
    rows.append(rows[-1] | {"user_id": "last", "rating": 4.0})
    run_csv(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), name="log.jsonl")

    ratings = pq.read_table(tmp_path / "out/interactions.parquet")["rating"]
    assert (ratings.null_count, ratings[-1].as_py()) == (40_000, 4.0)


def test_a_checksum_of_an_own_file_is_verified(tmp_path):
    put(tmp_path, **{"events.csv": events(5, 0)})
    right = artifacts.sha256(tmp_path / "events.csv")
    for digest in (right, right.upper()):  # as PowerShell writes it
        assert run_csv(tmp_path, events(5, 0), sha256={"interactions": digest})["rows"] == 5
    with pytest.raises(ValueError, match="interactions: a SHA-256 has 64 hexadecimal digits"):
        run_csv(tmp_path, events(5, 0), sha256={"interactions": right[1:]})
    with pytest.raises(ValueError, match="SHA-256 is"):
        run_csv(tmp_path, events(6, 0), sha256={"interactions": right})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "ml-2k"}, r"datasets\.mine\.ingest\.source: there is no source 'ml-2k'; the sources are ml-100k, "),
        ({"source": "amazon-2018"}, r"datasets\.mine\.ingest\.category: required by the source"),
        ({"source": "amazon-2018", "category": "Gifts"}, r"ingest\.category: .*its categories are .*Gift_Cards"),
        ({"source": "csv"}, r"ingest\.interactions: required by the source csv"),
        ({"source": "ml-1m", "category": "Books"}, r"ingest\.category: has no effect with the source ml-1m"),
        ({"source": "ml-1m", "sha256": {"items": "0" * 64}}, r"ingest\.sha256: has no effect"),
        ({"source": "csv", "interactions": "x", "sha256": {"items": "0" * 64}}, r"ingest\.sha256\.items: no such file"),
        ({"source": "ml-1m", "mirror": "nowhere"}, r"ingest\.mirror .*nowhere"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, **settings)


def test_what_is_to_be_read_is_never_overwritten(tmp_path):
    put(tmp_path / "out" / "raw", **{"events.csv": events(5, 0), **SMALL})
    with pytest.raises(ConfigError, match=r"ingest\.interactions: .* which this stage overwrites"):
        run(tmp_path, source="csv", interactions=str(tmp_path / "out/raw/events.csv"))
    with pytest.raises(ConfigError, match=r"ingest\.mirror: .* which this stage overwrites"):
        run(tmp_path, source="ml-latest-small", mirror=str(tmp_path / "out" / "raw"))
    run(tmp_path, source="csv", interactions=str(put(tmp_path / "in", **{"events.csv": events(5, 0)}) / "events.csv"))
    assert (tmp_path / "out/raw/events.csv").exists()


def test_a_full_disk_is_named_and_leaves_nothing_half_done(tmp_path):
    put(tmp_path, **{"events.csv": EVENTS + "".join(f"u{n * 7919 % 99991},i{n},{n},\n" for n in range(20_000))})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match=f"no room for {tmp_path}/out"):
            run(tmp_path, source="csv", interactions=str(tmp_path / "events.csv"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {name for name in contents(tmp_path / "out") if not name.endswith(".partial")} == set()
    run(tmp_path, source="csv", interactions=str(tmp_path / "events.csv"))
    assert not [name for name in contents(tmp_path / "out") if name.endswith(".partial")]


needs_mirror = pytest.mark.skipif(not os.environ.get("SEQREC_DATA_MIRROR"), reason="SEQREC_DATA_MIRROR is not set")
BEAUTY = "amazon-2014-processed/Beauty"
SCIENTIFIC = "amazon-2018-processed/Industrial_and_Scientific/Scientific"
REAL = {  # rows, users, items with events, items
    "ml-100k": ({"source": "ml-100k"}, (100_000, 943, 1_682, 1_682)),
    "ml-1m": ({"source": "ml-1m"}, (999_690, 6_040, 3_486, 3_883)),
    "gift-cards": ({"source": "amazon-2018", "category": "Gift_Cards"}, (2_972, 458, 148, 1_547)),
    "musical": ({"source": "amazon-2014", "category": "Musical_Instruments"}, (10_261, 1_429, 900, 900)),
    "beauty": (
        {"source": "csv", "interactions": f"{BEAUTY}/interactions.csv.gz", "items": f"{BEAUTY}/items.csv.gz"},
        (198_215, 22_332, 12_086, 12_086),
    ),
    "beauty-22363-order": (
        {"source": "lines", "interactions": f"{BEAUTY}-22363/order_only.txt.gz"},
        (198_502, 22_363, 12_101, 12_101),
    ),
    "scientific": (
        {"source": "prefixes", "interactions": SCIENTIFIC, "items": f"{SCIENTIFIC}.text"},
        (19_712, 2_928, 1_585, 1_585),
    ),
}


@needs_mirror
@pytest.mark.mirror
@pytest.mark.parametrize("name", REAL)
def test_real_files_have_their_known_counts(tmp_path, name):
    settings, (rows, users, items, catalogue) = REAL[name]
    counts = run(tmp_path, **settings)
    assert counts == {"rows": rows, "users": users, "items": items, "catalogue": catalogue, "quarantined": 0}
    assert pl.read_parquet(tmp_path / "out" / "interactions.parquet")["row"].is_sorted()
