"""Columns of a log are recognised by name and by content, and refused where they cannot be."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

from seqrec.config import IngestConfig
from seqrec.data.column_guess import FITTING, NAMED, ORDER, REQUIRED, guess, guess_items, is_lines
from seqrec.data.readers import blocks, csv_files, own_files

ROWS = 60


def table(columns):
    """A log of 60 events: users a0.., items b0.., times a day apart, in `columns`, such as `userId=user t=epoch`."""
    values = {
        "user": [f"a{row % 20}" for row in range(ROWS)],
        "item": [f"b{row % 15}" for row in range(ROWS)],
        "epoch": [1_600_000_000 + 86_400 * row for row in range(ROWS)],
        "iso": [f"{datetime(2020, 1, 1) + timedelta(days=row):%Y-%m-%d %H:%M:%S}" for row in range(ROWS)],
        "german": [f"{datetime(2020, 1, 1) + timedelta(days=row):%d.%m.%Y}" for row in range(ROWS)],
        "stars": [str(row % 5 + 1) for row in range(ROWS)],
        "price": [f"{row}.99" for row in range(ROWS)],
        "number": list(range(ROWS)),
        "long-number": [123_456_789_000 + row for row in range(ROWS)],
        "words": [f"Thing {row % 15}" for row in range(ROWS)],
        "group": [f"c{row % 12}" for row in range(ROWS)],
        "brand": [f"Brand {row % 3}" for row in range(ROWS)],
        "person": [f"Ann {row % 20}" for row in range(ROWS)],
        "released": [f"20{row % 15 + 10}-01-01" for row in range(ROWS)],
        "joined": [f"20{row % 20 + 10}-01-01" for row in range(ROWS)],
        "clock": [f"{row % 24:02}:30:00" for row in range(ROWS)],
        "compact-day": [f"{datetime(2020, 1, 1) + timedelta(days=row):%Y%m%d}" for row in range(ROWS)],
        "second": [1_600_000_000 + 86_401 * row for row in range(ROWS)],
        "percent": [row * 7 % 100 for row in range(ROWS)],
        "visit": [f"a{row % 20}-{row % 40}" for row in range(ROWS)],
        "count": [row * 5 % 13 for row in range(ROWS)],
        "whole": [f"{row % 20}.0" for row in range(ROWS)],
        "some-days": [f"2020-01-{row % 13 + 10}" for row in range(ROWS)],
        "finished": [f"2020-01-{row % 13 + 10}" if row % 8 else "" for row in range(ROWS)],
        "pseudonym": [f"{1_000_000_000 + row % 20}.{1_680_000_000 + row % 20}" for row in range(ROWS)],
        "share": [row / ROWS for row in range(ROWS)],
        "text": [f"I liked it a lot, and so did {row} friends" for row in range(ROWS - 5)] + ["Good"] * 5,
        "either-time": [f"{row % 12 + 1:02}/{row % 11 + 1:02}/2020" for row in range(ROWS)],
        "yes": [str(row % 3 > 0) for row in range(ROWS)],
        "one": ["Page viewed"] * ROWS,
        "some-users": ["NA" if row % 20 < 15 else f"a{row % 20}" for row in range(ROWS)],
    }
    return pl.DataFrame({name: values[kind] for name, kind in (column.split("=") for column in columns.split())})


T0 = 1_600_000_000
LOGS = {  # columns with their values, and the found ones in order: users, items, times, ratings, titles
    "shop": (
        "order=number Customer=user product_name=words SKU=item bought_at=iso",
        "Customer SKU bought_at product_name",
    ),
    "movielens": ("userId=user movieId=item rating=stars timestamp=epoch", "userId movieId timestamp rating"),
    "amazon": (
        "overall=stars reviewerID=user asin=item reviewerName=words unixReviewTime=epoch",
        "reviewerID asin unixReviewTime overall",
    ),
    "nothing in the names": ("n=number a=user b=item v=stars p=price c=iso", "a b c"),
    "times without a name": ("visitorid=user itemid=item x=epoch", "visitorid itemid x"),
    "a German date": ("uid=user article=item Date=german", "uid article Date"),
    "a release": ("user_id=user movie_id=item release_date=released watched_at=iso", "user_id movie_id watched_at"),
    "a release beside an unknown word": (
        "user_id=user movie_id=item release_date=released started=iso",
        "user_id movie_id started",
    ),
    "a sign-up is not a time": ("user_id=user page=item join_date=joined x=iso", "user_id page x"),
    "a clock is not a date": ("user=user item=item time=clock date=iso", "user item date"),
    "an invoice is not an item": (
        "InvoiceNo=group StockCode=item Description=words InvoiceDate=iso CustomerID=user",
        "CustomerID StockCode InvoiceDate Description",
    ),
    "a plural": ("transaction_number=user date=iso items=item", "transaction_number items date"),
    "a plural that counts": ("user=user product=item items=stars date=iso", "user product date"),
    "a product's name": (
        "user_id=user item_id=item time=epoch brand_name=brand item_name=words",
        "user_id item_id time item_name",
    ),
    "a product beside its id": ("user_id=user product=words product_id=item ts=epoch", "user_id product_id ts product"),
    "a constant is not a title": ("user_id=user event_item=item event_name=one ts=epoch", "user_id event_item ts"),
    "a brand is not a title": ("user_id=user item_id=item time=epoch brand_name=brand", "user_id item_id time"),
    "a share is not a time": ("user_id=user item_id=item watched_pct=percent last_dt=iso", "user_id item_id last_dt"),
    "a day is coarse": ("user_id=user video_id=item date=compact-day time_ms=second", "user_id video_id time_ms"),
    "few visitors log in": ("session_id=visit user_id=some-users item_id=item ts=epoch", "session_id item_id ts"),
    "an attribute of users is not an item": ("user_id=user name=person gmap=item ts=epoch", "user_id gmap ts"),
    "a price is no item": ("user_id=user session=visit qty=percent listing_id=item ts=epoch", "user_id listing_id ts"),
    "a category is not an item": ("user_id=user item_category=group thing=item ts=epoch", "user_id thing ts"),
    "an artist has tracks": ("user_id=user ts=epoch artist_name=group track_name=words", "user_id track_name ts"),
    "variants of a product": ("asin=percent parent_asin=item user_id=user ts=epoch", "user_id parent_asin ts"),
    "a beer and its style": (
        "beer_style=group profilename=user beer_beerid=item review_time=epoch",
        "profilename beer_beerid review_time",
    ),
    "a text is not an item": (
        "podcast_id=item content=words rating=stars author_id=user created_at=iso",
        "author_id podcast_id created_at rating",
    ),
    "a long text is not an item": ("user_id=user content=text place=item ts=epoch", "user_id place ts"),
    "an image is not a user": ("userName=person userImage=visit content=words at=iso appId=item", "userName appId at"),
    "a rated location is not an item": ("hotel_id=item user_id=user location=count date=iso", "user_id hotel_id date"),
    "a user's location is not an item": ("user_location_id=group user_id=user thing=item ts=epoch", "user_id thing ts"),
    "a step": (
        "user_id=user session_id=visit timestamp=epoch step=count reference=item",
        "user_id reference timestamp",
    ),
    "reviewers": ("reviews=visit reviewers=user date_reviews=iso course_id=item", "reviewers course_id date_reviews"),
    "a count is not an item": (
        "order_id=number customer_id=user order_date=iso item_count=count product_name=words",
        "customer_id product_name order_date",
    ),
    "a type of client is not a user": ("client=stars visitor_id=user page=item time=iso", "visitor_id page time"),
    "a song needs no id": ("user=user song=item artist_id=group ts=epoch", "user song ts"),
    "a date is not a user": ("due=some-days a=user b=item when=iso", "a b when"),
    "some events have no time": ("person=user thing=item completed=finished n=count", "person thing completed"),
    "the date of a session is not a user": ("session=some-days a=user b=item when=iso", "a b when"),
    "pseudonyms of Google Analytics": (
        "event_date=compact-day event_timestamp=epoch user_pseudo_id=pseudonym item_id=item",
        "user_pseudo_id item_id event_timestamp",
    ),
    "a chain of stores": ("date=iso store_id=group cust_id=user prod_id=item", "cust_id prod_id date"),
    "visitors": ("userId=some-users anonymousId=user event=number sku=item ts=epoch", "anonymousId sku ts"),
    "an e-mail": ("ClientE-Mail=user Produkt-ID=item ordered_on=iso", "ClientE-Mail Produkt-ID ordered_on"),
    "a product's SKU": ("post_id=visit email=user product_sku=item date=iso", "email product_sku date"),
    "in German": (
        "Filiale=group Bonnr=visit Kundennr=user EAN=item Artikelname=words Menge=count Kaufdatum=iso",
        "Kundennr EAN Kaufdatum Artikelname",
    ),
    "in Portuguese": (
        "id_pedido=visit id_cliente=user id_produto=item descrição=words criado=iso",
        "id_cliente id_produto criado descrição",
    ),
    "in French": (
        "commande=visit client=user produit=item désignation=words quantité=percent date=iso",
        "client produit date désignation",
    ),
    "a trip is of one user": ("user_id=user utrip_id=visit city_id=item checkin=iso", "user_id city_id checkin"),
    "the number of a row is not an item": ("user_id=user item_id=number sku=item t=epoch", "user_id sku t"),
    "a critic": ("rt_link=item critic_name=user top=stars review_date=iso", "critic_name rt_link review_date"),
    "ids written as fractions": ("n=number a=whole b=item c=iso", "a b c"),
}


@pytest.mark.parametrize("name", LOGS)
def test_columns_are_found_by_their_names_and_values(tmp_path, name):
    columns, wanted = LOGS[name]
    table(columns).write_csv(tmp_path / "log.csv")

    found, time_format = guess(tmp_path / "log.csv", {})

    assert [one.column for one in found] == wanted.split()
    assert time_format == ("%d.%m.%Y" if found[2].column == "Date" else "")


def test_categories_few_values_and_a_second_time_are_no_items(tmp_path):
    rows = range(3_000)
    day = [datetime(2020, 1, 1) + timedelta(days=row // 10) for row in rows]
    log = pl.DataFrame(
        {
            "user": [f"a{row % 90}" for row in rows],
            "LOCATION_NUMBER": [row % 3 for row in rows],
            "unixtime": [int(one.timestamp()) for one in day],
            "class": [f"c{row * row % 97 % 12}" for row in rows],
            "vendor": [f"v{row * row % 97}" for row in rows],
            "voucher": [f"w{row * row % 97}-{row % 7}" if row % 4 == 0 else "" for row in rows],
            "time": [f"{one:%b %d, %Y}" for one in day],
        }
    )
    for left_out, item in (
        (["LOCATION_NUMBER"], "vendor"),
        (["vendor", "class"], "LOCATION_NUMBER"),
        (["class", "voucher"], "LOCATION_NUMBER"),  # neither the name nor its values tell that the other is better
    ):
        log.drop(left_out).write_csv(tmp_path / "log.csv")
        assert [one.column for one in guess(tmp_path / "log.csv", {})[0]] == ["user", item, "time"]
    log.rename({"vendor": "vendor_id"}).write_csv(tmp_path / "log.csv")
    assert [one.column for one in guess(tmp_path / "log.csv", {})[0]] == ["user", "vendor_id", "time"]


def test_a_row_must_be_one_event(tmp_path):
    rows = {"user": ["a", "b"], "item": [{"id": 1}, {"id": 2}], "items": [["x", "y"], ["y"]], "times": [[1], [2]]}
    pl.DataFrame(rows).write_parquet(tmp_path / "log")

    with pytest.raises(ValueError, match=r"none of the columns user looks like item_id.* each row must be one event"):
        guess(tmp_path / "log", {})


def test_objects_in_objects_are_named_as_unread(tmp_path):
    (tmp_path / "log").write_text(json.dumps({"event": {"user": {"id": 1}, "item": {"id": 2}}, "at": T0}) + "\n")

    with pytest.raises(ValueError, match=r"looks like user_id.* objects in objects, are not read"):
        guess(tmp_path / "log", {})


def format_of(times, folder):
    users, items = [f"u{n % 30}" for n in range(len(times))], [f"i{n % 20}" for n in range(len(times))]
    pl.DataFrame({"user": users, "item": items, "time": times}).write_parquet(folder / "log")
    found, time_format = guess(folder / "log", {})
    assert [one.column for one in found] == ["user", "item", "time"]
    return time_format


SAME = (
    *("%m/%d/%Y %H:%M:%S.%f", "%d.%m.%Y, %H:%M:%S"),
    *("%m/%d/%Y %I:%M:%S %p", "%m/%d/%Y, %I:%M:%S %p", "%m/%d/%y %H:%M", "%d/%m/%y %H:%M", "%y/%m/%d %H:%M"),
    *("%Y%m%d", "%Y%m%d%H%M", "%B %d, %Y", "%a, %d %b %Y %H:%M:%S GMT"),
)


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        *zip(SAME, SAME, strict=True),
        ("%a %b %d %H:%M:%S +0000 %Y", "%a %b %d %H:%M:%S %z %Y"),
        ("%d/%b/%Y:%H:%M:%S +0000", "%d/%b/%Y:%H:%M:%S %z"),
        ("%d-%b-%Y %H:%M:%S", "%d-%B-%Y %H:%M:%S"),
        ("%Y-%-m-%-d %H:%M", "%Y-%m-%d %H:%M"),  # digits may lack zeros
        ("%Y-%m-%d %H", ""),
        ("%Y%m%dT%H%M%SZ", "%Y%m%dT%H%M%S%z"),
    ],
)
def test_formats_of_times(tmp_path, form, wanted):
    times = [f"{datetime(2019, 1, 1, 15) + timedelta(hours=41 * row):{form}}" for row in range(400)]

    assert format_of(times, tmp_path) == wanted


def test_numbers_may_be_days(tmp_path):
    days = [int(f"{datetime(2019, 1, 1) + timedelta(days=row):%Y%m%d}") for row in range(400)]

    assert format_of(days, tmp_path) == "%Y%m%d"


def test_the_format_that_fits_most_times_is_chosen(tmp_path):
    """The first days of a month with the month first: few of them are above 12."""
    times = [f"01/{1 + n * 62 // 2000:02}/2021 10:{n % 60:02}" for n in range(400)]
    assert 0.95 < sum(int(time[3:5]) <= 12 for time in times) / len(times) < 1

    assert format_of(times, tmp_path) == "%m/%d/%Y %H:%M"


@pytest.mark.parametrize("kind", ["csv", "gzip", "ndjson", "parquet"])
def test_rows_from_all_over_a_file_decide(tmp_path, monkeypatch, kind):
    """The first 4,000 rows have eight users, and no day of a month above 12."""
    monkeypatch.setattr(blocks, "PIECE_BYTES", 1 << 10)
    times = [f"{datetime(2024, 1, 1) + timedelta(minutes=4 * row):%m/%d/%Y %H:%M}" for row in range(10_000)]
    users, items = [f"a{row // 500}" for row in range(10_000)], [f"b{row * row % 97}" for row in range(10_000)]
    rows = pl.DataFrame({"x": users, "y": items, "z": times})
    path = tmp_path / "log"
    getattr(rows, f"write_{kind}".replace("gzip", "csv"))(path)
    if kind == "gzip":
        path.write_bytes(gzip.compress(path.read_bytes()))

    found, time_format = guess(path, {})

    assert [one.column for one in found] == ["x", "y", "z"]
    assert time_format == "%m/%d/%Y %H:%M"


@pytest.mark.parametrize(("time", "said"), [("german", True), ("second", False)])
def test_a_time_of_day_in_a_column_of_its_own_is_named(tmp_path, caplog, time, said):
    table(f"Date={time} Time=clock CustomerID=user ProductID=item").write_csv(tmp_path / "log.csv")

    assert guess(tmp_path / "log.csv", {})[0][2].column == "Date"

    assert ("the time of day in Time is not used" in caplog.text) is said


def test_times_with_gaps_are_no_numbers_in_order(tmp_path):
    rows = table("user=user item=item when=epoch").with_columns(
        pl.when(pl.int_range(pl.len()) % 10 == 0).then(0).otherwise("when").alias("when")
    )
    rows.write_csv(tmp_path / "log.csv")

    found, _ = guess(tmp_path / "log.csv", {"timestamp": "when"})
    assert found[-1].why != ORDER


def test_what_the_caller_names_is_taken(tmp_path):
    table("user_id=user item_id=item other=item timestamp=epoch").write_csv(tmp_path / "log.csv")

    found, _ = guess(tmp_path / "log.csv", {"item_id": "other"})

    assert {"item_id": "other", "user_id": "user_id"}.items() <= {one.name: one.column for one in found}.items()


@pytest.mark.parametrize(
    ("columns", "chosen", "message"),
    [
        ("user=user item=item", {}, "columns user, item looks like timestamp; name it with --time"),
        ("user=user item=item purchased=yes", {}, "columns user, item, purchased looks like timestamp"),
        ("user=user item=item time=words", {}, "have no known format.* set --time-format"),
        ("user=user item=item day=number", {}, "have no known format.* with --time day"),
        ("user=user item=item hour_of_day=count", {}, "have no known format.* another column with --time$"),
        ("user=user item=item day=count month=count year=count", {}, "if day, month, year are the parts of a date"),
        (
            "user=user item=item time=either-time",
            {},
            "such as '01/01/2020' may have the format %d/%m/%Y or %m/%d/%Y: choose one with --time-format",
        ),
        ("user=user item=item part=share", {"timestamp": "part"}, "--time: the numbers of part .* have fractions"),
        ("user=user item=item place=long-number", {"timestamp": "place"}, "--time: .* place .*some are 1e11 or more"),
        (
            "user=user item=item day=iso",
            {"user_id": "item", "item_id": "item"},
            "user_id, item_id must be different columns, not item, item",
        ),
        ("user=user", {"item_id": "sku"}, "log.csv has no column 'sku' for item_id; its columns are user"),
    ],
)
def test_what_cannot_be_told_names_the_flag(tmp_path, columns, chosen, message):
    table(columns).write_csv(tmp_path / "log.csv")

    with pytest.raises(ValueError, match=message):
        guess(tmp_path / "log.csv", chosen)


FILES = {  # name -> the form of a record, and its columns of users, items and times
    "comma.csv.gz": ("u{user},i{item},{rating}.0,{t}", "column_1 column_2 column_4"),
    "u.data": ("{user}\t{item}\t{rating}\t{t}", "column_1 column_2 column_4"),
    "ratings.dat": ("{user}::{item}::{rating}::{t}", "column_1 column_2 column_4"),
    "dated.csv": ("{time:%Y-%m-%d %H:%M:%S UTC};u{user};i{item}", "column_2 column_3 column_1"),
    "german.csv": ("u{user};i{item};{time:%d.%m.%Y}", "column_1 column_2 column_3"),
    "checkins.tsv": ("u{user}\ti{item}\t{time:%a %b %d %H:%M:%S +0000 %Y}", "column_1 column_2 column_3"),
    "blanks.txt": ("u{user} i{item} {rating} {t}", "column_1 column_2 column_4"),
    "amazon.csv": ("B00{item:07},Au{user},{rating}.0,{t}", "column_2 column_1 column_4"),
    "reviews.json.gz": (
        '{{"asin": "i{item}", "reviewerID": "u{user}", "overall": {rating}, "votes": [1], "unixReviewTime": {t}}}',
        "reviewerID asin unixReviewTime",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_without_a_header_and_json_lines_lose_no_row(tmp_path, name):
    form, columns = FILES[name]
    times = [1_300_000_000 + n * 1000 for n in range(90)]
    content = "".join(
        form.format(user=n % 12, item=n % 17, rating=n % 5 + 1, t=t, time=datetime.fromtimestamp(t, UTC)) + "\n"
        for n, t in enumerate(times)
    ).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)

    found, time_format = guess(path, {})

    chosen = {one.name: one.column for one in found if one.name in REQUIRED}
    assert list(chosen.items()) == list(zip(REQUIRED, columns.split(), strict=True))
    config = IngestConfig(source="csv", interactions=str(path), columns=chosen, time_format=time_format)
    blocks = list(own_files({"interactions": path}, config).interactions)
    assert [len(block.bad) for block in blocks] == [0]
    precision = 86_400 if name == "german.csv" else 1
    assert blocks[0].good["timestamp"].to_list() == [t // precision * precision for t in times]
    assert blocks[0].good["item_id"].n_unique() == 17


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"user,item,time\n", "log.csv has no rows"),
        (b"user,item,time\n1,2\n3,4\n", "log.csv has no rows that can be read.*not 3 columns; the first line must"),
        (b"ORC\x08\x00\x03", "perhaps an archive or a binary table"),
        (b'{"Item": {"user": {"S": "u"}, "ts": {"N": "1"}}}\n', "only lists and objects in objects"),
        (b"PK\x03\x04\x14\x00", "log.csv is a zip archive or an Excel file"),
        (b"BZh91AY&SY", "log.csv is compressed with bzip2"),
        (b'[{"user": 1, "item": 2, "time": 3}]', "is one JSON array: write an object per line"),
    ],
)
def test_a_file_that_is_no_table_says_what_it_is(tmp_path, content, message):
    (tmp_path / "log.csv").write_bytes(content)

    with pytest.raises(ValueError, match=message):
        guess(tmp_path / "log.csv", {})


def test_a_chosen_column_of_lists_is_named_as_such(tmp_path):
    pl.DataFrame({"session": ["a"], "items": [["x", "y"]]}).write_parquet(tmp_path / "log.parquet")

    with pytest.raises(ValueError, match=r"no column 'items' for item_id.*each row must be one event; lists in it"):
        guess(tmp_path / "log.parquet", {"item_id": "items"})


def test_an_empty_parquet_file_has_no_rows(tmp_path):
    table("user=user item=item time=iso").clear().write_parquet(tmp_path / "log.parquet")

    with pytest.raises(ValueError, match="has no rows"):
        guess(tmp_path / "log.parquet", {})


@pytest.mark.parametrize(
    ("names", "title", "wanted"),
    [
        ("id item name", "", "item name"),  # the log's column
        ("sku product_name category", "", "sku product_name"),
        ("item section headline", "", "item headline"),
        ("item title", "title", "item title"),  # no other column has unique values
        ("code words", "", "code"),
        ("code words", "words", "code words"),
    ],
)
def test_columns_of_an_items_file(tmp_path, names, title, wanted):
    rows = [[f"{name[0]}{row}" for name in names.split()] for row in range(20)]
    pl.DataFrame(rows, schema=names.split(), orient="row").write_csv(tmp_path / "items.csv")

    found = guess_items(tmp_path / "items.csv", "item", title)

    assert [one.column for one in found] == wanted.split()
    assert [one.name for one in found] == ["items.item_id", "items.title"][: len(found)]
    assert found[0].why == (FITTING if found[0].column == "code" else NAMED)


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ("index id name", "id name"),  # numbers, of which the log has none
        ("row id name", "id name"),  # numbers that are also ids
        ("name sku id", "id name"),
        ("product id name", "id name"),
    ],
)
def test_the_column_with_the_ids_of_the_log_is_that_of_the_items(tmp_path, names, wanted):
    (tmp_path / "log.csv").write_text("user,product,time\n" + "".join(f"u,{n},{n}\n" for n in range(30)))
    texts = {"name": "The {}", "sku": "s{}", "index": "9{}0", "product": "Thing {}"}
    rows = [[texts.get(name, "{}").format(n) for name in names.split()] for n in range(1, 30)]
    pl.DataFrame(rows, schema=names.split(), orient="row").write_csv(tmp_path / "items.csv")

    found = guess_items(tmp_path / "items.csv", "product", log=tmp_path / "log.csv")

    assert [one.column for one in found] == wanted.split()


@pytest.mark.parametrize(
    ("log", "names", "title", "wanted"),
    [
        ("", "pages,title,item", "", "item title"),  # numbers that repeat
        ("", "genre,item", "item", "item item"),  # the log has titles in place of ids
        ("u,title,5\n", "item,title", "", "item title"),  # an item that is called like a column
        ("user,item,time\n,,5\n", ",item,title", "", "item title"),  # files that were joined
    ],
)
def test_a_column_named_for_ids_stays_where_it_has_some(tmp_path, log, names, title, wanted):
    (tmp_path / "log.csv").write_text("user,item,time\n" + log + "".join(f"u,{n},{n}\n" for n in range(30)))
    values = {"": "9{0}", "item": "{0}", "title": "T{0}", "genre": "g", "pages": "{1}"}
    line = ",".join(values[name] for name in names.split(",")) + "\n"
    (tmp_path / "items.csv").write_text(f"{names}\n" + "".join(line.format(n, n % 29) for n in range(29, 300)))

    found = guess_items(tmp_path / "items.csv", "item", title, tmp_path / "log.csv")

    assert [one.column for one in found] == wanted.split()


def test_a_first_item_is_no_header(tmp_path):
    (tmp_path / "log.csv").write_text("user,item,time\nu,p0,5\nu,p1,6\n")
    (tmp_path / "items.csv").write_text("p0,Prod 0\np1,Prod 1\n")

    with pytest.raises(ValueError, match=r"items\.csv has no header: its first line has the item 'p0'"):
        guess_items(tmp_path / "items.csv", "item", log=tmp_path / "log.csv")


@pytest.mark.parametrize(
    "line", ["{}::Film {} (1995)::Drama|Comedy|War", "{}|Film {} (1995)|01-Jan-1995||0|1", "{},Film {},9"]
)
def test_a_file_of_items_may_lack_a_header(tmp_path, line):
    path = tmp_path / "movies.dat"
    path.write_text("".join(line.format(n, f"two{n}") + "\n" for n in range(1, 30)))

    found = {one.name: one.column for one in guess_items(path, "column_2")}

    assert found == {"items.item_id": "column_1", "items.title": "column_2"}
    (frame,) = csv_files.catalogue(path, {"item_id": "column_1", "title": "column_2"})
    assert frame["item_id"].to_list() == [str(n) for n in range(1, 30)]
    assert frame["title"][0].startswith("Film two1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 5 7 9\n2 4 4\n", True),
        ("1 5 7 9\n2 4 4 8\n", True),
        ("1\t5\t7\t9\n2\t4\t4\n3\t1\n", True),
        ("1\t5 7 9\n2\t4 4\n", True),
        ("1\t5\n1\t7\n2\t4\n", True),
        ("user\titems\n1\t5 7 9\n2\t4 4\n3\t1 2\n", True),
        ("user_id,item_id,timestamp\n1,2,3\n", False),
        ("user item time\n1 2 2021-04-03\n3 4 2021-04-05\n", False),
        ("event\tuser_id\titem_id\ttime\tvia\tin\n1\t2\t3\t4\n2\t2\t3\t4\tmail\n3\t2\t3\t4\tmail\tx\n", False),
        ("# exported 2020\nuser,item\n1,2\n3,4\n", False),
        ("user\tmovie\ttime\n1\tThe Matrix Reloaded\t160\n2\tAlien\t170\n", False),
    ],
)
def test_lines_of_items_are_told_from_tables(tmp_path, text, expected):
    (tmp_path / "log").write_text(text)

    assert is_lines(tmp_path / "log") is expected


@pytest.mark.parametrize("written", [json.dumps, repr])
def test_keys_of_an_object_are_columns(tmp_path, written):
    objects = [
        {"user": {"id": n % 30}, "item": {"sku": f"i{n % 20}", "name": f"Thing {n % 20}"}, "ts": T0 + 3600 * n}
        for n in range(400)
    ]
    (tmp_path / "log.jsonl").write_text("".join(f"{written(value)}\n" for value in objects))

    found, _ = guess(tmp_path / "log.jsonl", {})
    chosen = {one.name: one.column for one in found}
    config = IngestConfig(source="csv", interactions="log.jsonl", columns={name: chosen[name] for name in REQUIRED})
    good = next(own_files({"interactions": tmp_path / "log.jsonl"}, config).interactions).good

    assert chosen == {"user_id": "user.id", "item_id": "item.sku", "timestamp": "ts", "title": "item.name"}
    assert good.select("user_id", "item_id").row(31) == ("1", "i11")


def test_what_the_first_lines_hold_decides_how_a_file_is_read(tmp_path):
    excel = "sep=;\nuser;item;time;item,name\n"
    plain = excel + "".join(f"u{n % 9};i{n % 8};{T0 + n};a, b\n" for n in range(100))
    (tmp_path / "excel.csv").write_text(plain)
    tabs = "".join(f"u{n % 30}\t{T0 + n}\ti{n % 20}\tHello, Goodbye{', Again' * (4 - n % 3)}\n" for n in range(100))
    (tmp_path / "tabs.tsv").write_text(tabs)
    (tmp_path / "twice.csv").write_text(
        "user,item,time,x,x\n" + "".join(f"u{n % 9},i{n % 8},{T0 + n},1,2\n" for n in range(100))
    )

    columns = [
        [one.column for one in guess(tmp_path / name, {})[0]][:3] for name in ("excel.csv", "tabs.tsv", "twice.csv")
    ]

    assert columns == [["user", "item", "time"], ["column_1", "column_3", "column_2"], ["user", "item", "time"]]
