import gzip
import json
import uuid
from datetime import date, datetime
from decimal import Decimal

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seqrec.config import IngestConfig
from seqrec.data import readers
from seqrec.data.readers import DamagedFileError, blocks, delimited, json_lines, parquet_files, row_checks
from seqrec.data.readers.blocks import read_lines
from seqrec.data.readers.movielens import ML_100K_GENRES
from seqrec.data.readers.times import seconds

CSV = IngestConfig(source="csv")


def written(folder, **files):
    """Write texts, bytes or frames to files, given as name and content by role; return the files by role."""
    paths = {}
    for role, (name, content) in files.items():
        paths[role] = folder / name
        if isinstance(content, pl.DataFrame):
            content.write_parquet(paths[role])
        else:
            paths[role].write_bytes(content if isinstance(content, bytes) else content.encode())
    return paths


def read(reader, folder, config=CSV, **files):
    """Write the files and read them; return lists of blocks."""
    events, items = reader(written(folder, **files), config)
    return list(events), None if items is None else list(items)


def table(blocks):
    return pl.concat([block.good for block in blocks])


def rows(blocks):
    """Return (user, item, time, rating) of the good rows."""
    return table(blocks).select("user_id", "item_id", "timestamp", "rating").rows()


def bad(blocks):
    """Return (line, reason) of the bad rows."""
    return pl.concat([block.bad for block in blocks]).select("line", "reason").rows()


def own(folder, text, **columns):
    config = IngestConfig(source="csv", columns=columns)
    return read(readers.own_files, folder, config, interactions=("events.csv", text))[0]


def test_movielens_100k(tmp_path):
    flags = "|".join("1" if genre in ("Comedy", "Film-Noir") else "0" for genre in ML_100K_GENRES)
    none = "|".join("0" * 19)
    films = f"1|Café Noir (1995)|01-Jan-1995||http://x|{flags}\n2|unknown||||{none}\n3|To Tape (1996) (V)||||{flags}\n"
    events = "7\t1\t3\t881250949\n8\t2\t5\t0\n"
    files = {"interactions": ("u.data", events), "items": ("u.item", films.encode("latin-1"))}
    events, items = read(readers.movielens_100k, tmp_path, **files)
    assert rows(events) == [("7", "1", 881250949, 3.0), ("8", "2", 0, 5.0)]
    assert table(items).rows(named=True) == [
        {"item_id": "1", "title": "Café Noir", "year": "1995", "genres": "Comedy, Film-Noir"},
        {"item_id": "2", "title": "unknown", "year": None, "genres": None},
        {"item_id": "3", "title": "To Tape", "year": "1996", "genres": "Comedy, Film-Noir"},
    ]


@pytest.mark.parametrize(("reader", "encoding"), [(readers.movielens_1m, "latin-1"), (readers.movielens_10m, "utf-8")])
def test_movielens_1m_and_10m(tmp_path, reader, encoding):
    """Half stars, and titles with colons and other titles in brackets."""
    ratings = b"1::10::5::978300760\n2::11::3.5::978300761\n"
    films = "10::Star: Épisode IV (a.k.a. A New Hope) (1977)::Action|Sci-Fi\n"
    files = {"interactions": ("x.dat.gz", gzip.compress(ratings)), "items": ("movies.dat", films.encode(encoding))}
    events, items = read(reader, tmp_path, **files)
    assert rows(events) == [("1", "10", 978300760, 5.0), ("2", "11", 978300761, 3.5)]
    assert table(items).rows() == [("10", "Star: Épisode IV (a.k.a. A New Hope)", "1977", "Action, Sci-Fi")]


TITLES = [
    ('"Fawlty Towers (1975-1979)"', "Fawlty Towers", "1975"),
    ('"Big Bang Theory, The (2007-)"', "Big Bang Theory, The", "2007"),
    ("Death Note: Desu nôto (2006\u20132007)", "Death Note: Desu nôto", "2006"),
    ("Kingdom (2009\u2013 )", "Kingdom", "2009"),
    ("Babylon 5", "Babylon 5", None),
    ('"One, ""The"" (1999)"', 'One, "The"', "1999"),
    ("Blade Runner 2049 ", "Blade Runner 2049", None),
]


def test_movielens_latest(tmp_path):
    films = "".join(f"{number},{title},(no genres listed)\r\n" for number, (title, _, _) in enumerate(TITLES))
    events, items = read(
        readers.movielens_latest,
        tmp_path,
        interactions=("ratings.csv", "userId,movieId,rating,timestamp\r\n1,1,0.5,964982703\r\n"),
        items=("movies.csv", f"movieId,title,genres\r\n{films}9,Nine,Comedy|Drama\r\n"),
    )
    assert rows(events) == [("1", "1", 964982703, 0.5)]
    found = table(items)
    assert found.select("title", "year").rows()[:-1] == [(name, year) for _, name, year in TITLES]
    assert found["genres"].to_list() == [*[None] * len(TITLES), "Comedy, Drama"]


def test_recbole_100k(tmp_path):
    films = (
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        '1\t"A B\t1995\tComedy Sci-Fi\n2\tTape (1996)\tV\tDrama\n'
    )
    events = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n7\t1\t3\t881250949\n"
    events, items = read(readers.recbole_100k, tmp_path, interactions=("x.inter", events), items=("x.item", films))
    assert rows(events) == [("7", "1", 881250949, 3.0)]
    assert table(items).rows(named=True) == [
        {"item_id": "1", "title": '"A B', "year": "1995", "genres": "Comedy, Sci-Fi"},
        {"item_id": "2", "title": "Tape", "year": "1996", "genres": "Drama"},
    ]


REVIEWS = [
    {"reviewerID": "A1", "asin": "B1", "overall": 5.0, "unixReviewTime": 1252800000, "style": {"Format:": "x"}},
    {"reviewerID": "A2", "asin": "B2", "unixReviewTime": 1252800001},
    {"asin": "B2", "overall": 1.0, "unixReviewTime": 1},
    {"reviewerID": "A3", "asin": "B2", "overall": 1.0},
]
BAD_REVIEWS = [(3, "no user_id"), (4, "no timestamp")]


def lines(objects, write=json.dumps):
    return "".join(write(each) + "\n" for each in objects)


@pytest.mark.parametrize(
    ("garbage", "reason"),  # without any, all lines are read at once
    [
        ("", ""),
        ("{not json\n", "not a JSON object or Python literal"),
        ('{"reviewerID": "\\ud83d", "asin": "B", "unixReviewTime": 5}\n', "user_id is not UTF-8"),
    ],
)
def test_amazon_reviews_with_missing_fields(tmp_path, garbage, reason):
    events, items = read(readers.amazon_2018, tmp_path, interactions=("x_5.json", lines(REVIEWS) + garbage))
    assert items is None
    assert rows(events) == [("A1", "B1", 1252800000, 5.0), ("A2", "B2", 1252800001, None)]
    assert bad(events) == BAD_REVIEWS + ([(5, reason)] if garbage else [])


def test_amazon_2018_metadata(tmp_path):
    products = [
        {"asin": "B1", "title": "A &amp; B &#39;n AT&T", "category": ["Home", "Kitchen &amp; Dining"], "brand": "X"},
        {"asin": "B2", "title": "var x = 1; new Date().getTime()", "category": [], "rank": ["1"]},
        {"asin": "B3"},
        {"title": "nobody"},
    ]
    files = {"interactions": ("x_5.json", lines(REVIEWS)), "items": ("meta_x.json", lines(products))}
    _, items = read(readers.amazon_2018, tmp_path, **files)
    assert table(items).rows(named=True) == [
        {"item_id": "B1", "title": "A & B 'n AT&T", "brand": "X", "category": "Home, Kitchen & Dining"},
        {"item_id": "B2", "title": None, "brand": None, "category": None},
        {"item_id": "B3", "title": None, "brand": None, "category": None},
    ]
    assert bad(items) == [(4, "no item_id")]


def test_amazon_2014_metadata_in_python_literals(tmp_path):
    products = [
        {"asin": "B1", "title": 'It\'s "so"', "categories": [["A", "B"], ["C"]], "price": 1.5, "related": None},
        {"asin": "B2", "brand": "X"},
    ]
    text = lines(products, write=repr) + "__import__('os').system('false')\n" + "{'asin': " + "[" * 5000 + "\n"
    files = {"interactions": ("x_5.json", lines(REVIEWS)), "items": ("meta_x.json", text)}
    _, items = read(readers.amazon_2014, tmp_path, **files)
    assert table(items).rows(named=True) == [
        {"item_id": "B1", "title": 'It\'s "so"', "brand": None, "category": "A, B, C"},
        {"item_id": "B2", "title": None, "brand": "X", "category": None},
    ]
    assert bad(items) == [(3, "not a JSON object or Python literal"), (4, "not a JSON object or Python literal")]


def test_text_that_is_not_utf_8_is_read_as_windows_1252_and_damaged_titles_are_named(tmp_path, caplog):
    log = "user_id,item_id,timestamp\n1,Caf\xe9,5\n".encode("cp1252")
    products = b"item_id,title\nCaf\xe9,\x80 5\nTea,\xe9 \xc3\xa9\n"
    blocks._say_encoding.cache_clear()
    (tmp_path / "copy").mkdir()
    read(readers.own_files, tmp_path / "copy", interactions=("x.csv", log), items=("y.csv", products))

    events, items = read(readers.own_files, tmp_path, interactions=("x.csv", log), items=("y.csv", products))

    assert rows(events) == [("1", "Caf\xe9", 5, None)]
    assert table(items).rows() == [("Caf\xe9", "\u20ac 5"), ("Tea", "\ufffd \xe9")]
    assert caplog.text.count("x.csv: lines that are not UTF-8 are read as Windows-1252") == 1  # not of the copy too
    assert "y.csv: 1 titles are not UTF-8" in caplog.text


def test_amazon_2023(tmp_path):
    """Times in milliseconds; metadata whose values are null, empty, or of changing type."""
    ratings = "user_id,parent_asin,rating,timestamp\nAGKH,B081TJ8YS3,4.0,1588615855070\n"
    products = [
        {"title": "R &amp; S", "price": "1", "store": "X", "categories": ["A", "B &amp; C"], "parent_asin": "B1"},
        {"title": "", "price": None, "store": None, "categories": [], "details": "{}", "parent_asin": "B2"},
        {"title": None, "price": 3.5, "categories": None, "parent_asin": "B3", "videos": [{"title": "not this"}]},
    ]
    files = {"interactions": ("x.csv.gz", gzip.compress(ratings.encode())), "items": ("x.jsonl", lines(products))}
    events, items = read(readers.amazon_2023, tmp_path, **files)
    assert rows(events) == [("AGKH", "B081TJ8YS3", 1588615855, 4.0)]
    assert table(items).rows(named=True) == [
        {"item_id": "B1", "title": "R & S", "brand": "X", "category": "A, B & C"},
        {"item_id": "B2", "title": None, "brand": None, "category": None},
        {"item_id": "B3", "title": None, "brand": None, "category": None},
    ]


STEAM_REVIEWS = [
    # the layout, with the prefixes of Python 2, is the published one; the people are not
    "{u'username': u'Chaos Syren', u'product_id': u'725280', u'page_order': 0, u'text': u\"It's 'fine'\\n10/10\", "
    "u'hours': 0.1, u'products': 41.0, u'date': u'2017-12-17', u'early_access': False, u'page': 1}\n",
    "{u'username': u'\\u2544SkyFox', u'product_id': u'328100', u'text': u\"u'username': u'nobody'\", "
    "u'date': u'2016-06-30', u'user_id': u'76561198007483075', u'found_funny': 2}\n",
    "{u'username': u'bell\\x07', u'product_id': u'1', u'date': u'2016-06-30'}\n",
    "{u'product_id': u'1', u'date': u'2016-06-30'}\n",
    "{u'username': u'cut sho\n",
]


def test_steam(tmp_path):
    games = [
        {"publisher": "Kotoshiro", "genres": ["Action", "Indie"], "app_name": "Lost", "title": "Lost!", "id": "761140"},
        {"app_name": "Log Challenge", "price": 2.99, "id": "773570", "early_access": False},
        {"genres": ["Free to Play"], "title": "No number"},
    ]
    events, items = read(
        readers.steam,
        tmp_path,
        interactions=("steam_reviews.json.gz", gzip.compress("".join(STEAM_REVIEWS).encode())),
        items=("steam_games.json", lines(games, write=repr)),
    )
    assert rows(events) == [("Chaos Syren", "725280", 1513468800, None), ("\u2544SkyFox", "328100", 1467244800, None)]
    assert bad(events) == [
        (3, "user_id has control characters"),
        (4, "no user_id"),
        (5, "not a JSON object or Python literal"),
    ]
    assert table(items).rows() == [
        ("761140", "Lost!", None, "Kotoshiro", "Action, Indie"),
        ("773570", "Log Challenge", None, None, None),
    ]
    assert bad(items) == [(3, "no item_id")]


def test_yelp(tmp_path):
    """Free text with everything in it that breaks a line or a parser, and categories that are null."""
    text = 'He said "5 stars"\r\nthen:\t{"user_id": "no"}, \u2028 \U0001f600'
    reviews = [
        {"user_id": "mh_-eMZ", "business_id": "b1", "stars": 3.0, "text": text, "date": "2018-07-07 22:09:11"},
        {"user_id": "u2", "business_id": None, "stars": 5, "text": "", "date": "2012-01-03"},
    ]
    surrogate = (
        '{"user_id": "u4", "business_id": "b2", "stars": 1.0, "text": "cut \\ud83d", "date": "2012-01-03 00:00:01"}\n'
    )
    businesses = [
        {"business_id": "b1", "name": "Brewery", "city": "Green Lane", "categories": "Brewpubs, Food"},
        {"business_id": "b2", "name": 'The "Raw" Bar', "city": "", "categories": None, "hours": {"Monday": "0:0-0:0"}},
    ]
    events, items = read(
        readers.yelp,
        tmp_path,
        interactions=("review.json", lines(reviews) + surrogate),
        items=("business.json", lines(businesses)),
    )
    assert rows(events) == [("mh_-eMZ", "b1", 1531001351, 3.0), ("u4", "b2", 1325548801, 1.0)]
    assert bad(events) == [(2, "no item_id")]
    assert table(items).rows() == [
        ("b1", "Brewery", "Brewpubs, Food", "Green Lane"),
        ("b2", 'The "Raw" Bar', None, None),
    ]


HEADER = "user_id:token\titem_id_list:token_seq\titem_id:token\n"


def prefixes(folder, train, valid, test, **indices):
    return read(
        readers.growing_prefixes,
        folder,
        train=("x.train.inter", HEADER + train),
        valid=("x.valid.inter", HEADER + valid),
        test=("x.test.inter", HEADER + test),
        items=("x.text", "item_id:token\ttext:token_seq\nB1\tSalt. Home.\n"),
        **indices,
    )


def test_growing_prefixes_become_one_sequence_a_user(tmp_path):
    events, items = prefixes(tmp_path, "u\ta\tb\nw\tx\ty\nu\ta b\tc\n", "u\ta b c\ta\n", "u\ta b c a\td\n")
    assert rows(events) == [
        *[("u", item, time, None) for time, item in enumerate("abcad")],
        ("w", "x", 0, None),
        ("w", "y", 1, None),
    ]
    assert table(events)["row"].to_list() == [1, 2, 3, 4, 5, 6, 7]
    assert table(items).rows(named=True) == [{"item_id": "B1", "title": None, "text": "Salt. Home."}]


def test_numbers_become_ids_again_where_an_index_lies_beside(tmp_path):
    indices = {
        "item2index": ("x.item2index", "B9\t0\nB7\t1\nB8\t2\n"),
        "user2index": ("x.user2index", "ANN\t0\n"),
    }
    events, _ = prefixes(tmp_path, "0\t0\t1\n", "0\t0 1\t2\n", "0\t0 1 2\t7\n", **indices)
    assert rows(events) == [("ANN", item, time, None) for time, item in enumerate(["B9", "B7", "B8"])]
    assert [reason for _, reason in bad(events)] == ["item_id is not in x.item2index"]


def test_a_prefix_that_was_cut_is_malformed(tmp_path):
    events, _ = prefixes(tmp_path, "u\ta\tb\nu\tb\n", "u\ta b\tc\n", "u\tb c\td\n")
    assert rows(events) == [("u", "a", 0, None), ("u", "b", 1, None), ("u", "c", 2, None)]
    quarantined = pl.concat([block.bad for block in events]).select("file", "line", "reason").rows()
    assert quarantined == [
        ("x.train.inter", 3, "not 3 columns"),
        ("x.test.inter", 2, "not a prefix of the user's longest sequence"),
    ]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_own_csv_in_any_order_of_columns(tmp_path, delimiter):
    text = "\ufeff" + "item_id,when,user_id\n a ,5, u\n".replace(",", delimiter)
    assert rows(own(tmp_path, text, timestamp="when")) == [("u", "a", 5, None)]


def test_own_items_keep_their_other_columns(tmp_path):
    events = "user,product,t,stars\nu,p1,5,3.5\n"
    products = b'sku,name,colour,title,t\np1,"Salt &lt;fine&gt;\n""and"" pepper",,a,1\np2, ,red,b,2\n'
    columns = {"user_id": "user", "item_id": "product", "timestamp": "t", "rating": "stars"}
    columns |= {"items.item_id": "sku", "title": "name", "hue": "colour"}  # not the file's own column `title`
    files = {"interactions": ("e.csv", events), "items": ("i.csv.gz", gzip.compress(products))}
    events, items = read(readers.own_files, tmp_path, IngestConfig(source="csv", columns=columns), **files)
    assert rows(events) == [("u", "p1", 5, 3.5)]
    assert table(items).rows(named=True) == [
        {"item_id": "p1", "title": 'Salt <fine>\n"and" pepper', "hue": None, "t": "1"},  # another one than the log's
        {"item_id": "p2", "title": None, "hue": "red", "t": "2"},
    ]


def test_a_key_that_almost_names_our_column_is_a_warning(tmp_path, caplog):
    files = {
        "interactions": ("e.csv", "user_id,item_id,timestamp\nu,p1,5\n"),
        "items": ("i.csv", "item_id,name\np1,Salt\n"),
    }
    _, items = read(readers.own_files, tmp_path, IngestConfig(source="csv", columns={"titel": "name"}), **files)
    assert table(items)["titel"].to_list() == ["Salt"]
    assert "ingest.columns.titel: items get a column titel; did you mean title?" in caplog.text


def test_own_parquet(tmp_path):
    when = [datetime(2020, 1, 1, 0, 0, 1), None]
    log = pl.DataFrame({"user_id": [1, 2], "item_id": [7.0, None], "timestamp": when, "rating": [4, 5]})
    catalogue = pl.DataFrame({"item_id": ["7"], "tags": [["a", "b"]], "rating": [["4", "5"]]})
    events, items = read(readers.own_files, tmp_path, interactions=("e.pq", log), items=("i.pq", catalogue))
    assert rows(events) == [("1", "7", 1577836801, 4.0)]
    assert bad(events) == [(2, "no item_id")]
    assert table(items).rows() == [("7", None, "a, b", "4, 5")]


def test_rows_of_a_parquet_file_are_counted_across_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_files, "BATCH_ROWS", 2)
    log = pl.DataFrame({"user_id": ["u"] * 5, "item_id": list("abcde"), "timestamp": [1, 2, 3, -4, 5]})
    events = own(tmp_path, log)
    assert table(events)["row"].to_list() == [1, 2, 3, 5]
    aside = pl.concat([block.bad for block in events])
    assert aside.select("line", "reason", "text").rows() == [(4, "timestamp is negative", "u,d,-4")]


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("user,item_id,timestamp\n", {}, r"no column 'user_id'; .*'user', .*ingest\.columns\.user_id"),
        ("user_id,item_id,timestamp\n", {"rating": "stars"}, r"ingest\.columns\.rating: no file has a column 'stars'"),
        ("user_id,item_id,timestamp\n", {"usr_id": "user_id"}, r"ingest\.columns\.usr_id: .* did you mean user_id\?"),
        ("user_id,item_id,timestamp\n", {"item.hue": "item_id"}, r"ingest\.columns\.item\.hue: unknown key"),
        ("user_id,item_id,timestamp,item_id\n", {}, "appears twice"),
        ("user_id,item_id,timestamp,ta\x00gs\n", {}, "contains a NUL character"),
        ("", {}, "events.csv is empty"),
        ("\n\n", {}, "events.csv is empty"),
        ("PAR1 and no more", {}, "truncated or damaged"),
    ],
)
def test_a_table_that_cannot_be_read_says_why(tmp_path, text, columns, message):
    with pytest.raises(ValueError, match=message):
        own(tmp_path, text, **columns)


HEAD = "user_id,item_id,timestamp,rating\n"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("u,i,5", "not 4 columns"),
        ("u,i,5,1,x", "not 4 columns"),
        (",i,5,1", "no user_id"),
        ("u, ,5,1", "no item_id"),
        ("nan,i,5,1", "no user_id"),  # what pandas makes of a missing value that becomes text
        ("\\N,i,5,1", "no user_id"),  # what MySQL makes of it
        ("u,NULL,5,1", "no item_id"),
        ("NULL  ,i,5,1", "no user_id"),  # of fixed width
        (b"u,caf\xe9 \xc3\xa9,5,1", "item_id is not UTF-8"),  # not Latin-1 either
        ('u,"a\tb",5,1', "item_id has control characters, such as a line break"),
        (f"u,{'i' * 257},5,1", "item_id has more than 256 characters"),
        ("u,i,,1", "no timestamp"),
        ("u,i,NULL,1", "no timestamp"),
        ("u,i, NaT,1", "no timestamp"),
        ("u,i,soon,1", "timestamp is neither a number nor an ISO time"),
        ("u,i,inf,1", "timestamp is neither a number nor an ISO time"),
        ("u,i,1e300,1", "timestamp is neither a number nor an ISO time"),
        ("u,i,-1,1", "timestamp is negative"),
        ("u,i,9999-12-31,1", "timestamp is after the year 5138"),  # often means `never`
        ("u,i,5,good", "rating is not a number"),
        ("u,i,5,inf", "rating is not a number"),
        ('u,"i,5,1', "quotes do not match"),
        ('u,"i" x,5,1', "quotes do not match"),
        ('u,"i,5",1', "not 4 columns"),
        ("x" * 1000, "not 4 columns"),
    ],
)
def test_a_malformed_line_is_set_aside_alone(tmp_path, line, reason):
    raw = line if isinstance(line, bytes) else line.encode()
    events = own(tmp_path, HEAD.encode() + b"u,i,1,\n\n" + raw + b'\nu,"i",2,2.5\n')
    assert rows(events) == [("u", "i", 1, None), ("u", "i", 2, 2.5)]
    assert bad(events) == [(4, reason)]
    aside = pl.concat([block.bad for block in events]).row(0, named=True)
    assert (aside["file"], aside["text"]) == ("events.csv", raw.decode("utf-8", "replace")[:500])
    assert table(events)["row"].to_list() == [2, 5]


@pytest.mark.parametrize(
    ("by", "line", "item"),
    [
        ("\t", 'u\t"Ten" (Remaster)\t5\t1', '"Ten" (Remaster)'),
        ("\t", 'u\t"Ten\t5\t1', '"Ten'),
        ("|", 'u|"Ten" (Remaster)|5|1', '"Ten" (Remaster)'),
        (",", r'u,"The \"10\" song, live",5,1', 'The "10" song, live'),
    ],
)
def test_quotes_that_are_text_lose_no_event(tmp_path, by, line, item):
    assert rows(own(tmp_path, HEAD.replace(",", by) + f"{line}\n")) == [("u", item, 5, 1)]


def test_quotes_at_the_ends_of_lines_of_a_table_join_no_lines(tmp_path):
    """A quote that is text begins a title, and another one, far below, ends one."""
    titles = ["one", '"Heroes', "two", 'Mix 12"', "three"]
    text = "user_id\titem_id\ttimestamp\ttitle\n"
    text += "".join(f"u\ti{n}\t{n}\t{title}\n" for n, title in enumerate(titles))
    assert [row[1] for row in rows(own(tmp_path, text))] == [f"i{n}" for n in range(5)]


NOTED = "user_id,item_id,timestamp,note\n"
QUOTED_EVENTS = "".join(f'u{n},i,{n},"a\nb ""{n}"""\n' if n % 3 else f"u{n},i,{n},4\n" for n in range(60))
REVIEW = '{"reviewerID": "A%d", "asin": %d, "overall": 4, "unixReviewTime": 5}\n'
BLOCKS = {  # reader, settings, text, and the bad rows
    "csv": (readers.own_files, {}, NOTED + QUOTED_EVENTS + "garbage\n", [(102, "not 4 columns")]),
    "amazon-2018": (
        readers.amazon_2018,
        {},
        "".join(REVIEW % (n, n) for n in range(50)) + '{"reviewerID": "x"\n"asin": "y"}\n',
        [(line, "not a JSON object or Python literal") for line in (51, 52)],
    ),
    "lines": (
        readers.lines_of_items,
        {"lines": "sequences"},
        "".join(f"u{n} i{n} j k\n" for n in range(40)) + "u7 a\n",
        [(41, "the user has a line before this one")],
    ),
    "pairs": (
        readers.lines_of_items,
        {"lines": "pairs"},
        "".join(f"u{n % 7} i{n}\n" for n in range(40)) + "u7\n",
        [(41, "not a user and an item")],
    ),
}


def test_regular_and_irregular_blocks_have_the_same_columns(tmp_path):
    found = []
    for name, text in {"regular": "a,b\n", "irregular": "a\n"}.items():
        (tmp_path / name).write_text(text)
        found += [frame.columns for frame in delimited.delimited(tmp_path / name, ("x", "y"), ",")]
    assert found == [[*blocks.MARKS, "x", "y"]] * 2


@pytest.mark.parametrize("size", [7, 64])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_size_of_a_block_changes_nothing(tmp_path, monkeypatch, name, size):
    reader, settings, text, wrong = BLOCKS[name]
    paths, config = written(tmp_path, interactions=("file", text)), IngestConfig(source="csv", **settings)
    whole = list(reader(paths, config).interactions)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", size)
    parts = list(reader(paths, config).interactions)
    assert len(parts) > len(whole)
    assert table(parts).equals(table(whole))
    assert bad(parts) == bad(whole) == wrong


@pytest.mark.parametrize(
    "text",
    [
        "u,i,1,4\nw,j,2,\n",
        "u,i,1,4\r\nw,j,2,3.5\r\n",
        "u,i,1,4\nw,j,2,3",
        " u , i ,1,4\nw,caf\u00e9,soon,3\n",
        ",,,\nu,i,1,4\n",
    ],
)
def test_the_fast_way_reads_the_same(tmp_path, monkeypatch, text):
    taken = []
    regular = delimited._regular
    monkeypatch.setattr(delimited, "_regular", lambda *rest: taken.append(regular(*rest)) or taken[-1])
    fast = own(tmp_path, HEAD + text)
    monkeypatch.setattr(delimited, "_regular", lambda *_: None)
    slow = own(tmp_path, HEAD + text)
    assert taken[0] is not None
    assert table(fast).equals(table(slow))
    assert pl.concat([block.bad for block in fast]).equals(pl.concat([block.bad for block in slow]))


@pytest.mark.parametrize("odd", [["a", "b"], {"id": "a"}])
@pytest.mark.parametrize("place", [0, 5])
def test_a_list_or_an_object_is_no_id(tmp_path, odd, place):
    """Nor does one line with it hide the column of all the others."""
    rows = [{"user_id": f"u{n % 3}", "item_id": f"i{n}", "timestamp": 1_600_000_000 + n} for n in range(10)]
    rows[place]["user_id"] = odd
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert "user_id" in json_lines.keys(tmp_path / "log.jsonl")
    (frame,) = json_lines.json_lines(tmp_path / "log.jsonl", {"user_id": pl.String})
    assert frame["user_id"].to_list() == [None if n == place else f"u{n % 3}" for n in range(10)]


def test_an_id_in_json_is_the_same_whichever_way_its_line_is_read():
    """A malformed line sends its whole block the slow way."""
    numbers = ["1.0", "1e5", "1E2", "1e22", "-0.0", "1.5", "1e-7", "12345678.9", "7", "123456789012345678901"]
    ids = [*numbers, '"1.0"', "true"]
    texts = pl.Series([f'{{"id": {text}}}' for text in ids])
    fields = {"id": pl.String}

    fast = json_lines._decoded(texts, fields).struct.field("id").to_list()

    assert [json_lines._parsed(text, fields)[1] for text in texts] == fast
    assert fast[:2] == ["1", "100000"]


def test_a_missing_rating_is_no_malformed_row(tmp_path):
    missing = ["", "NA", "NULL", "nan", "None", " "]
    text = "".join(f"u{n},i,1580515200,{value}\n" for n, value in enumerate([*missing, " 5 ", "bad"]))
    events = own(tmp_path, HEAD + text)
    assert [row[3] for row in rows(events)] == [*[None] * len(missing), 5]
    assert bad(events) == [(9, "rating is not a number")]

    frame = pl.DataFrame({"user_id": "u", "item_id": "i", "timestamp": 1580515200, "rating": [float("nan"), None, 4.5]})
    assert table(own(tmp_path, frame))["rating"].to_list() == [None, None, 4.5]


@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: data[:30] + b"\xff" * 20 + data[50:]])
def test_a_damaged_gzip_is_named(tmp_path, damage):
    content = gzip.compress("".join(f"{n * 7919 % 1000}\n" for n in range(1000)).encode())
    (tmp_path / "x.gz").write_bytes(damage(content))
    with pytest.raises(DamagedFileError, match=r"x\.gz is truncated or damaged"):
        list(read_lines(tmp_path / "x.gz"))


def test_a_file_without_line_ends_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "LONGEST_LINE", 1000)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 100)
    (tmp_path / "x").write_bytes(b"x" * 5000)
    with pytest.raises(ValueError, match=r"x: no line end in 1,100 bytes"):
        list(read_lines(tmp_path / "x"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", 0),
        (" 5 ", 5),
        ("99999999999", 99999999999),
        ("1577836801.9", 1577836801),
        ("1577836801999", 1577836801),
        ("1577836801999999", 1577836801),
        ("1577836801999999999", 1577836801),
        ("1.577836801e9", 1577836801),
        ("2020-01-01", 1577836800),
        ("2020-01-01 01", 1577840400),
        ("2020-01-01T00:01Z", 1577836860),
        ("2020-01-01 00:00:01.999", 1577836801),
        ("2020-01-01 00:00:01 UTC", 1577836801),
        ("2020-01-01T02:00:01+02:00", 1577836801),
        ("2020-01-01 02:00:01.5+0200", 1577836801),
        ("2020-01-01 00:00:01,5", 1577836801),
        ("2020-01-01T02:00:01.5+02:00[Europe/Berlin]", 1577836801),
        ("2020-01-01 02:00:01 +0200 CEST", 1577836801),
        ("2019-12-31 21:00:01 -0300 -03", 1577836801),
        ("637134336010000000", 1577836801),
        ("01/02/2020", None),
    ],
)
def test_times_as_text(value, expected):
    assert seconds(pl.Series([value])).to_list() == [expected]
    assert seconds(pl.Series(["1", value, "x"])).to_list() == [1, expected, None]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pl.Series([1577836801, None, -5]), [1577836801, None, -5]),
        (pl.Series([1577836801.5, float("nan"), 1e300]), [1577836801, None, None]),
        (pl.Series([1577836801999], dtype=pl.UInt64), [1577836801]),
        (pl.Series([date(2020, 1, 1)]), [1577836800]),
        (pl.Series([datetime(2020, 1, 1, 0, 0, 1, 999999)]), [1577836801]),
        (pl.Series([datetime(2020, 1, 1)]).dt.replace_time_zone("Asia/Tokyo"), [1577836800 - 9 * 3600]),
    ],
)
def test_times_as_numbers_and_dates(values, expected):
    assert seconds(values).to_list() == expected
    assert seconds(pl.Series([20200201, 1]), "%Y%m%d").to_list() == [1580515200, None]


def test_whole_numbers_with_a_fraction_of_zero_are_the_same_ids(tmp_path):
    """What pandas writes for integers if one of them is missing."""
    text = "user_id,item_id,timestamp\n5.0,B1.0,1\n5.00,1.05,2\n05.0,v1.0,3\n"

    found = [row[:2] for row in rows(own(tmp_path, text))]

    assert found == [("5", "B1.0"), ("5", "1.05"), ("05", "v1.0")]


def of_lines(folder, text, **settings):
    config = IngestConfig(source="lines", **settings)
    return read(readers.lines_of_items, folder, config, interactions=("x.txt", text))[0]


def test_a_line_of_a_user_and_items_is_a_sequence(tmp_path):
    events = of_lines(
        tmp_path, gzip.compress(b"1 7 8 7\n\n2\t9  8 \n3\n1 5 6\n4 caf\xe9 \xc3\xa9\n5 7\n"), lines="sequences"
    )
    assert rows(events) == [
        *[("1", "7", 0, None), ("1", "8", 1, None), ("1", "7", 2, None), ("2", "9", 0, None), ("2", "8", 1, None)],
        ("5", "7", 0, None),
    ]
    assert table(events)["row"].to_list() == [1, 2, 3, 4, 5, 6]
    assert bad(events) == [(4, "no items after the user"), (5, "the user has a line before this one"), (6, "not UTF-8")]


def test_a_line_of_a_user_and_an_item_is_an_event(tmp_path):
    events = of_lines(tmp_path, "u a\nw b\nu b c\nu\nu c\nw a\n", lines="pairs")
    assert rows(events) == [("u", "a", 0, None), ("w", "b", 0, None), ("u", "c", 1, None), ("w", "a", 1, None)]
    assert table(events)["row"].to_list() == [1, 2, 5, 6]
    assert bad(events) == [(3, "not a user and an item"), (4, "not a user and an item")]


@pytest.mark.parametrize(
    ("text", "last"), [("u a b\nw a\n", ("w", "a", 0)), ("u a\nw a\nu b\n", ("u", "b", 1))], ids=["sequences", "pairs"]
)
def test_what_the_lines_are_is_seen_where_only_one_is_possible(tmp_path, text, last):
    assert rows(of_lines(tmp_path, text))[-1][:3] == last


@pytest.mark.parametrize("text", ["u a\nw a\n", "u a b\nu a\n"])
def test_lines_that_may_be_either_need_the_setting(tmp_path, text):
    with pytest.raises(ValueError, match=r"sequences or pairs .*set ingest\.lines"):
        of_lines(tmp_path, text)
    assert of_lines(tmp_path, text, lines="sequences")


def test_a_table_without_times_is_no_lines_of_items(tmp_path):
    with pytest.raises(ValueError, match="look like a table with blanks between columns"):
        of_lines(tmp_path, "u a 5\nu b 4\nw a 3\n")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("B9\t0\nB7\n", "x.item2index: 1 of 2 lines are wrong; line 2: not 2 columns"),
        ("B9\t0\nB7\t0\n", "line 1: this id or this number appears twice"),
        ("B9\t0\nB9\t1\n", "line 1: this id or this number appears twice"),
        ("B9\t\n", "line 1: no id or no number"),
        ("", "x.item2index is empty"),
    ],
)
def test_an_index_that_is_wrong_is_an_error(tmp_path, index, message, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 5)  # regular and irregular blocks
    with pytest.raises(ValueError, match=message):
        prefixes(tmp_path, *["0\t0\t1\n"] * 3, item2index=("x.item2index", index))


@pytest.mark.parametrize(
    ("time_format", "value", "expected"),
    [
        ("%d/%m/%Y", "01/02/2020", 1580515200),
        ("%d.%m.%y %H:%M", " 01.02.20 00:01 ", 1580515260),
        ("%Y-%m-%d %H:%M:%S.%f", "2020-02-01 00:00:01.25", 1580515201),
        ("%Y-%m-%dT%H:%M:%S%z", "2020-02-01T02:00:01+0200", 1580515201),
        ("%Y-%m-%dT%H:%M:%S%z", "2020-02-01T00:00:01Z", 1580515201),
        ("%b %d %Y, %I:%M %p", "Feb 01 2020, 12:01 AM", 1580515260),
        ("%Y-%m-%d %H:%M:%S%z", "2020-02-01 02:00:01+02", 1580515201),
    ],
)
def test_times_in_a_form_of_ones_own(tmp_path, time_format, value, expected):
    text = f'user_id,item_id,timestamp\nu,i,"{value}"\nu,j,1580515200\nu,k,2020-99-99\n'
    config = IngestConfig(source="csv", time_format=time_format)
    events, _ = read(readers.own_files, tmp_path, config, interactions=("e.csv", text))
    assert rows(events) == [("u", "i", expected, None)]
    assert bad(events) == [(line, f"timestamp does not have the form {time_format}") for line in (3, 4)]


UNREAD = ("%d/%m/%Y %H:%M %p", "%d/%m/%Y %I:%M", "%Y-%m-%d %M")  # by polars


@pytest.mark.parametrize("time_format", ["soon", "%H:%M", "%q", "%Y-%m-%d %", "%Y-%m-%d %H:%M %Z", *UNREAD])
def test_a_form_that_is_no_date_is_refused(time_format):
    assert seconds(pl.Series(["01/02/2020 03:04 PM"]), time_format).to_list() == [None]
    with pytest.raises(ValueError, match="time_format"):
        IngestConfig(source="csv", time_format=time_format)


def test_parquet_of_odd_types_is_read_as_text_and_numbers(tmp_path):
    columns = {
        "user_id": pa.array([b"u", b"\xff"]),
        "item_id": pa.array(["i", "j"]).dictionary_encode(),
        "timestamp": pa.array([Decimal("5.5"), Decimal(6)], type=pa.decimal128(5, 1)),
        "rating": pa.array([date(2020, 1, 1), None]),
    }
    pq.write_table(pa.table(columns), tmp_path / "e.parquet")
    events = list(readers.own_files({"interactions": tmp_path / "e.parquet"}, CSV).interactions)
    assert bad(events) == [(1, "rating is not a number"), (2, "user_id is not UTF-8")]


@pytest.mark.parametrize("kind", [pa.binary(), pa.binary(16), pa.uuid()])
def test_uuids_in_parquet_are_read_as_their_text(tmp_path, kind):
    users = [uuid.uuid5(uuid.NAMESPACE_URL, str(number)) for number in range(3)]
    values = pa.array([*(user.bytes for user in users), None], pa.binary(16)).cast(kind)
    items = pa.array([b"0123456789abcdef"] * 4, pa.binary(16))
    pq.write_table(pa.table({"user_id": values, "item_id": items, "timestamp": range(4)}), tmp_path / "e.parquet")

    events = list(readers.own_files({"interactions": tmp_path / "e.parquet"}, CSV).interactions)

    assert rows(events) == [(str(user), "0123456789abcdef", time, None) for time, user in enumerate(users)]
    assert bad(events) == [(4, "no user_id")]


def test_an_id_has_no_blanks_nor_invisible_marks_around_it():
    assert row_checks.identifier(pl.Series(["\ufeff u1 ", " \u200b 7.0"])).to_list() == ["u1", "7"]
