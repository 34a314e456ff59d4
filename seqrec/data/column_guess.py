"""Guesses which columns of a user's table hold users, items and times: by name, then by content."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import polars as pl

from seqrec.data.readers import blocks, csv_files, parquet_files
from seqrec.data.readers.row_checks import MISSING, identifier, record_text
from seqrec.data.readers.times import DAY_S, LARGEST_SECONDS, seconds

logger = logging.getLogger(__name__)
INSPECTED_ROWS, RUN_ROWS = 8_000, 250  # rows to inspect, in runs from all over the file
USERS = (
    *("user", "uid", "username", "customer", "cust", "client", "member", "visitor", "reviewer", "buyer", "shopper"),
    *("person", "account", "profile", "subscriber", "listener", "player", "student", "household", "session"),
    *("profilename", "cookie", "device", "author", "guest", "borrower", "rider", "passenger", "patient", "learner"),
    *("anonymous", "anon", "email", "kunde", "kunden", "kundennummer", "kundennr", "nutzer", "benutzer", "cliente"),
    *("usuario", "utilisateur", "utente", "klant", "klantnr", "gebruiker", "critic", "voter"),
)
ITEMS = (
    *("item", "iid", "sku", "product", "movie", "parentasin", "asin", "article", "book", "isbn", "track", "song"),
    *("video", "film", "game", "business", "merchant", "venue", "location", "course", "artist", "content", "page"),
    *("url", "app", "news", "anime", "recipe", "hotel", "restaurant", "podcast", "episode", "offer", "beer"),
    *("document", "job", "title", "station", "tour", "place", "prod", "prd", "goods", "ad", "post", "dish", "repo"),
    *("problem", "question", "exercise", "photo", "listing", "ean", "artikel", "artikelnummer", "artikelnr", "produkt"),
    *("buch", "articulo", "producto", "libro", "pelicula", "produit", "livre", "produto", "prodotto", "articolo"),
)
WORDS = {  # role -> words in names of its columns, most reliable first
    "user_id": (*USERS, *(f"{word}s" for word in USERS)),
    "item_id": (*ITEMS, *(f"{word}s" for word in ITEMS)),
    "timestamp": (
        *("timestamp", "time", "datetime", "date", "ts", "unix", "when", "bought", "purchased", "ordered", "created"),
        *("watched", "clicked", "viewed", "played", "at", "day", "dt"),
    ),
    "rating": ("rating", "ratings", "stars", "overall", "rate", "score"),
    "title": (
        *("title", "name", "description", "headline", "titel", "bezeichnung", "artikelbezeichnung", "artikelname"),
        *("titulo", "nombre", "descripcion", "titre", "nom", "libelle", "designation", "nome", "titolo", "descrizione"),
        *("descricao", "naam", "omschrijving", "produktname"),
    ),
}
SURE = 2.0  # least score of a name that needs no check of its values
RELIABLE = 12  # number of words that mean a user or an item even without a word of ID_WORDS
ID_WORDS = {  # last words of names of columns of ids
    *("id", "ids", "code", "no", "nr", "nbr", "number", "key", "sk", "idx", "index", "uri", "uuid", "guid", "hash"),
}
GROUP_WORDS = {  # words of columns that are rarely ids
    *("order", "invoice", "basket", "cart", "transaction", "receipt", "impression", "category", "type", "brand"),
    *("store", "shop", "city", "campaign", "owner", "seller", "employee"),
    *("price", "country", "bill", "count", "quantity", "qty", "amount", "length", "duration", "step", "text", "body"),
    *("bestellung", "bestellnummer", "bestellnr", "auftrag", "rechnung", "rechnungsnummer", "rechnungsnr", "beleg"),
    *("belegnummer", "belegnr", "bon", "bonnr", "filiale", "kategorie", "marke", "menge", "preis", "pedido", "factura"),
    *("tienda", "categoria", "marca", "cantidad", "precio", "commande", "facture", "magasin", "categorie", "marque"),
    *("quantite", "prix", "fatura", "quantidade", "preco", "ordine", "fattura", "negozio", "quantita", "prezzo"),
}
FOREIGN = {"item_id": "user_id", "title": "user_id", "timestamp": "rating", "rating": "timestamp"}  # not both in a name
REQUIRED = ("user_id", "item_id", "timestamp")
DATES = (
    *("%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d", "%Y.%m.%d", "%Y-%m-%d"),
    *("%d/%m/%y", "%m/%d/%y", "%y/%m/%d", "%d.%m.%y", "%d %B %Y", "%d-%B-%Y", "%d-%B-%y", "%B %d, %Y", "%B %d %Y"),
    "%m %d, %Y",
)
CLOCKS = (
    *("", " %H:%M:%S", " %H:%M:%S.%f", " %H:%M", " %I:%M:%S %p", " %I:%M %p"),
    *(", %H:%M:%S", ", %H:%M", ", %I:%M:%S %p", ", %I:%M %p"),
)
FORMATS = (  # tried for times that are neither numbers nor ISO 8601
    *(date + clock for date in DATES for clock in CLOCKS),
    *("%Y%m%d %H:%M:%S", "%Y%m%dT%H%M%S%z", "%Y%m%d%H%M%S", "%Y%m%d%H%M", "%Y%m%d", "%d/%b/%Y:%H:%M:%S %z"),
    "%a %b %d %H:%M:%S %Y",
    *("%a %b %d %H:%M:%S %z %Y", "%a, %d %b %Y %H:%M:%S %z", "%a, %d %b %Y %H:%M:%S GMT"),
)
MOMENT = datetime(2021, 3, 4, 15, 6, 7, 8, UTC)  # of which every format has an example
YEAR_S = 365 * DAY_S
EARLIEST, LATEST = 631_152_000, 2_051_222_400  # 1990 and 2035; excludes ratings
CLOCK = r"^\s*([01]?\d|2[0-3]):[0-5]\d\b"  # a time of day
SENTENCE = 5  # mean number of blanks in values that are texts
FEW = 200  # so many values are tried first
FEW_IDS = 10  # a column of ids has more values
MANY_ROWS = 1_000  # with so many rows, few values mean more than a name
CATEGORIES, MEMBERS = 100, 3  # maximum number of categories, and minimum mean number of items in one
REPEATED = 0.2  # minimum share of rows whose item is also in other rows, where items are compared with categories
FIT = 0.95  # minimum share of values that are valid times, or times of day
TITLES = 1.2  # maximum mean number of titles of an item
ID_SHARE = 0.1  # of the log's ids, which a column must have to replace one that is named for ids and has none of them
MALFORMED = 0.3  # maximum share of rows that are malformed, for example without a user
ONE_EVENT = "; each row must be one event; lists in it, and objects in objects, are not read"
NO_TIMES = (
    "; if the rows are in the order of the events, add a column with their numbers and name it with --time; a log "
    "without times can also be lines of `user item item ...`, oldest item first"
)
CALENDAR = 31  # no hour, weekday, day or month has more values
DATE_PARTS = {"year", "month", "day"}
GIVEN, NAMED, FITTING = "your flag", "its name", "its values"  # reasons for a guess
ORDER = "your flag; its numbers are not dates, so they only give the order"


class Guess(NamedTuple):
    """A column that ingest needs, the file's column that probably holds it, and the reason."""

    name: str
    column: str
    why: str


def is_lines(path: Path) -> bool:
    """Return whether a text file has lines `user item item ...`, separated by blanks or tabs and without a header."""
    if parquet_files.is_parquet(path):
        return False
    names = csv_files.header(path)
    first = next(blocks.read_lines(path, size=blocks.HEADER_BYTES))["_text"][:100].to_list()
    if len(names) == 1:  # or a remark above a table
        marked = sum(any(mark in line for mark in ",;|") for line in first[1:])
        return len(names[0].split()) > 1 and 2 * marked <= len(first)
    numbers = {line.count("\t") for line in first}
    if 0 in numbers or any(mark in line for line in first for mark in ',;|"{'):
        return False
    items = sum(" " in line.partition("\t")[2] for line in first)  # in `user<tab>item item`
    if numbers == {1}:
        return 2 * items > len(first) or names[0] == "column_1"
    named = sum(any(_score(role, name) > 0 for name in names) for role in REQUIRED)
    return len(numbers) > 2 and named < 2


def guess(path: Path, chosen: Mapping[str, str], time_format: str = "") -> tuple[list[Guess], str]:
    """Return the columns of a file to read, and the format of its times, empty if not needed.

    Args:
        path: a CSV file, with or without a header, JSON lines, or Parquet.
        chosen: known columns: our column -> the file's.
        time_format: format for strptime; empty: guess.

    Raises:
        ValueError: a chosen column is missing, or a required column cannot be guessed.
    """
    rows = _sample(path)
    names = rows.columns
    for name, column in chosen.items():
        if column not in names:
            raise ValueError(
                f"{path.name} has no column {column!r} for {name}; its columns are {', '.join(names):.300}"
                + (ONE_EVENT if column in csv_files.header(path) else "")
            )
    if len(set(chosen.values())) < len(chosen):
        raise ValueError(f"{', '.join(chosen)} must be different columns, not {', '.join(chosen.values())}")
    roles, reasons = dict(chosen), dict.fromkeys(chosen, GIVEN)
    for by, why in ((_by_name, NAMED), (_by_content, FITTING), (_by_name_alone, NAMED)):
        for role in ("user_id", "item_id", "timestamp", "rating"):
            if role not in roles and (fitting := by(role, rows, roles, time_format)):
                roles[role], reasons[role] = fitting, why
    for role, flag in zip(REQUIRED, ("--user", "--item", "--time"), strict=True):
        if role not in roles:
            raise ValueError(
                f"{path.name}: none of the columns {', '.join(names):.300} looks like {role}; name it with {flag}"
                + (NO_TIMES if role == "timestamp" else ONE_EVENT)
            )
    times = rows[roles["timestamp"]]
    if "timestamp" in chosen and not time_format and _is_order(times):
        _check_order(times)
        reasons["timestamp"] = ORDER
    else:
        time_format = time_format or _time_format(times, names)
        _warn_of_clocks(rows, roles, time_format)
    if "title" not in roles and (title := _title(rows, roles)):
        roles["title"], reasons["title"] = title, NAMED
    return [Guess(name, roles[name], reasons[name]) for name in WORDS if name in roles], time_format


def _check_order(times: pl.Series) -> None:
    """Raise ValueError if numbers that are no times would not be read as what they are."""
    if _fractions(times.cast(pl.String)).any():
        raise ValueError(
            f"--time: the numbers of {times.name} are not dates and have fractions, which would be cut off: write "
            "whole numbers into it, such as the ranks of these"
        )
    if (times.cast(pl.Float64, strict=False) >= LARGEST_SECONDS).any():
        raise ValueError(
            f"--time: the numbers of {times.name} are not dates, and some are 1e11 or more, which would be read as "
            "milliseconds: write smaller numbers into it, such as the ranks of these"
        )


def guess_items(path: Path, item: str, title: str = "", log: Path | None = None) -> list[Guess]:
    """Return the columns of ids and, if there is one, of titles in a file of items.

    Args:
        path: a table, as for `guess`.
        item: column of the items in the log, which the file may have too.
        title: known column of the titles; empty: guess.
        log: table of the events, with whose ids the columns are compared.

    Raises:
        ValueError: the column of the titles is missing, no column can hold the ids, or the file has no header.
    """
    rows = _sample(path)
    names = rows.columns
    if title and title not in names:
        raise ValueError(f"{path.name} has no column {title!r} for title; its columns are {', '.join(names):.300}")
    unnamed = names[:1] == ["column_1"]  # the file has no header
    distinct = [name for name in names if name != title and rows[name].n_unique() == len(rows)]
    named = [item] if item in names and not unnamed else _named("item_id", rows, {"title": title})
    ids = named or distinct
    if log is not None:
        known = set(identifier(_sample(log)[item]).drop_nulls()) - {"", item}  # a header may be repeated
        # Numbers that repeat, such as those of pages, may share more with a sample of the log than the ids do.
        possible = [name for name in names if name in distinct or name in named[:1]]
        shared = {name: len(known.intersection(identifier(rows[name]))) for name in possible}
        if not unnamed and (first := [name for name in possible if name in known and shared[name]]):
            raise ValueError(
                f"{path.name} has no header: its first line has the item {first[0]!r:.60}; write a line of column "
                f"names above it, such as {item} and title"
            )
        # The numbers of the rows may be ids too.
        ranked = sorted(shared, key=lambda name: (-shared[name], words_of(name)[-1:] != ["id"]))
        least = ID_SHARE * len(known) if named else 0
        if ranked and shared[ranked[0]] > least and not (named and shared[named[0]]):
            named, ids = [], ranked
    if not ids:
        raise ValueError(
            f"{path.name}: none of the columns {', '.join(names):.300} looks like item_id; "
            f"rename the column of item ids to {item}"
        )
    found = [Guess("items.item_id", ids[0], NAMED if named else FITTING)]
    if title or (title := _title(rows, {"item_id": ids[0]}) or ""):
        found.append(Guess("items.title", title, NAMED))
    elif unnamed:
        differ = [name for name in names if name != ids[0] and 2 * rows[name].n_unique() > len(rows)]
        found += [Guess("items.title", name, FITTING) for name in differ if _has_words(rows[name])][:1]
    return found


def _has_words(column: pl.Series) -> bool:
    """Return whether most values hold a word."""
    worded = column.cast(pl.String).str.contains(r"\p{L}{3}").fill_null(False)
    return bool(worded.mean() > 0.5)  # type: ignore[operator]


def words_of(name: str) -> list[str]:
    """Return a column name's words in lower case without accents; `customerID` and `Customer ID` give the same."""
    plain = re.sub(r"[\u0300-\u036f]", "", unicodedata.normalize("NFKD", name))
    parts = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", plain)
    return re.sub(r"\be mail", "email", re.sub(r"[^a-z0-9]+", " ", parts.lower())).split()


def _sample(path: Path) -> pl.DataFrame:
    """Return well-formed rows from the beginning, the end and places between them, without columns of lists."""
    names = csv_files.header(path)
    if parquet_files.is_parquet(path):
        names = parquet_files.single(path)
        frames = list(parquet_files.excerpt(path, {name: name for name in names}))
    else:
        with TemporaryDirectory() as folder:
            part = Path(folder) / path.name
            part.write_bytes(blocks.excerpt(path))
            frames = list(csv_files.columns_of(part, {name: name for name in names}))
    good = [frame.filter(pl.col("_problem").is_null()).select(names) for frame in frames]
    rows = pl.concat(good or [pl.DataFrame(schema=names)])
    if rows.is_empty():
        wrong = next((frame for frame in frames if len(frame)), None)
        why = ""
        if wrong is not None:
            why = f"; the first one, {wrong.select(record_text(wrong)).item(0, 0)!r:.80}: {wrong['_problem'][0]}"
            if wrong["_problem"][0] == f"not {len(names)} columns":
                why += "; the first line must have the names, or the values, of all columns, with no remark above it"
        raise ValueError(f"{path.name} has no rows that can be read{why}")
    every = len(rows) // INSPECTED_ROWS + 1
    return rows.filter(pl.int_range(pl.len()) // RUN_ROWS % every == 0)


def _by_name(role: str, rows: pl.DataFrame, roles: Mapping[str, str], time_format: str) -> str | None:
    named = _named(role, rows, roles)
    if role == "timestamp":
        found = _time_of_events(named, rows, roles, time_format)
        free = [name for name in rows.columns if name not in (*named, *roles.values()) and _is_date(rows[name])]
        better = found and not _varying([found], rows, roles) and _varying(free, rows, roles)
        return None if better else found  # a day of release is not a time of an event
    if role == "rating":
        return min(named, key=lambda column: _is_sparse(rows[column]), default=None)
    if role == "item_id":  # numbers of the rows, as of the lines of orders, are in no two events
        named.sort(key=lambda column: not rows[column].is_duplicated().any())
    best = min(named, key=lambda column: _is_sparse(rows[column]) or not _is_id(rows[column]), default=None)
    if not best or _is_id(rows[best]):
        return best
    if role == "item_id" and len(rows) >= MANY_ROWS and rows[best].n_unique() <= FEW_IDS:
        free = [name for name in rows.columns if name not in (*named, *roles.values())]
        if any(_marks_ids(name) and _noun(name) not in GROUP_WORDS and _is_id(rows[name]) for name in free):
            return None
    return best if _score(role, best) >= SURE else None


def _by_name_alone(role: str, rows: pl.DataFrame, roles: Mapping[str, str], time_format: str) -> str | None:
    """Return the column whose name fits a required role best, whatever its values are; `clicked` may be yes or no."""
    named = _named(role, rows, roles)
    if role == "timestamp":
        return next((name for name in named if rows[name].n_unique() > 2), None)
    return next((name for name in named if _score(role, name) >= SURE), None)


def _named(role: str, rows: pl.DataFrame, roles: Mapping[str, str]) -> list[str]:
    """Return the free columns whose names fit the role, best first."""
    scored = [(_score(role, name), _marks_ids(name), -index, name) for index, name in enumerate(rows.columns)]
    return [name for score, _, _, name in sorted(scored, reverse=True) if score > 0 and name not in roles.values()]


def _time_of_events(
    columns: Sequence[str], rows: pl.DataFrame, roles: Mapping[str, str], time_format: str
) -> str | None:
    """Return the first column of times, if possible one that varies within users and items: a birthday does not."""
    formats = {column: _fitting(rows[column], time_format) for column in columns}
    times = [column for column, text in formats.items() if text is not None]
    times.sort(key=lambda column: bool((seconds(rows[column], formats[column] or "") % DAY_S == 0).all()))
    return next(iter(_varying(times, rows, roles)), next(iter(times), None))


def _varying(columns: Sequence[str], rows: pl.DataFrame, roles: Mapping[str, str]) -> list[str]:
    """Return the columns that vary within users and items: an age, or a brand, does not."""
    ids = [roles[role] for role in ("user_id", "item_id") if role in roles]
    return [column for column in columns if all(_pairs(rows, name, column) > rows[name].n_unique() for name in ids)]


def _pairs(rows: pl.DataFrame, *columns: str) -> int:
    return int(rows.select(pl.struct(columns).n_unique()).item())


def _title(rows: pl.DataFrame, roles: Mapping[str, str]) -> str | None:
    """Return the column of the items' titles: one title for an item, and not one for many items, as of a brand."""
    item = roles["item_id"]
    if _index("title", words_of(item)) is not None:  # the items are titles
        return None
    items, words = rows[item].n_unique(), set(words_of(item)) - ID_WORDS
    named = _named("title", rows, roles)
    if _marks_ids(item):  # `product` beside `product_id`
        free = [name for name in rows.columns if name not in roles.values()]
        named += [name for name in free if words_of(name) == [_noun(item)] and _has_words(rows[name])]
    for column in sorted(named, key=lambda name: not words & set(words_of(name))):
        same = bool(words & set(words_of(column)))
        known = rows.filter(pl.col(column).cast(pl.String, strict=False).str.strip_chars() != "")
        different = known[column].n_unique()
        if 0 < _pairs(known, item, column) <= TITLES * items and (different > 1 if same else 2 * different >= items):
            return column
    return None


def _score(role: str, name: str) -> float:
    """Return a score of how well a column name fits a role; 0 means not at all."""
    index = {other: _index(other, _stems(name)) for other in WORDS}
    found = index[role]
    if found is None:
        return 0.0
    if role in FOREIGN and index[FOREIGN[role]] is not None:
        return 0.0
    sure = len(set(words_of(name)) - ID_WORDS) <= 1 or _stems(name)[-1] in WORDS[role]
    if role in ("user_id", "item_id"):
        if _noun(name) in GROUP_WORDS:
            return 0.0  # an item's category is not an item, but an order's item is one
        if not _marks_ids(name) and index["title"] is not None:
            return 0.0 if role == "item_id" else 0.1  # a product's name is its title, a user's name may serve as an id
        if not _marks_ids(name) and not _names(role, name):
            return 0.0  # an item's size
        sure = sure or (role == "item_id" and set(words_of(name)) <= set(ITEMS[:RELIABLE]))  # a product's SKU
        sure = sure and (found < RELIABLE or _marks_ids(name))
    return (SURE if sure else 1.0) + 1 / (2 + found)


def _stems(name: str) -> list[str]:
    """Return the words of a column name, and all of it without `id` at the end: `itemid` gives `item`."""
    words = words_of(name)
    joined = "".join(words)
    stem = next((joined[: -len(end)] for end in ("id", "ids") if joined.endswith(end) and len(joined) > 4), joined)
    return [*words, stem]


def _noun(name: str) -> str:
    """Return the last word of a column name that marks no ids: `beer` of `beer_id` or `beerid`."""
    last = next((word for word in reversed(words_of(name)) if word not in ID_WORDS), "")
    return re.sub("(?<=...)ids?$", "", last)


def _marks_ids(name: str) -> bool:
    words = words_of(name)
    return bool(words) and (words[0] == "id" or words[-1] in ID_WORDS or words[-1].endswith("id"))


def _names(role: str, name: str) -> bool:
    return not {_noun(name), _stems(name)[-1]}.isdisjoint(WORDS[role])


def _index(role: str, words: Sequence[str]) -> int | None:
    return next((index for index, word in enumerate(WORDS[role]) if word in words), None)


def _by_content(role: str, rows: pl.DataFrame, roles: Mapping[str, str], time_format: str) -> str | None:
    """Return the free column whose values fit the role best: dates for times, repeated non-fractions for ids."""
    free = [column for column in rows.columns if column not in roles.values()]
    if role == "timestamp":
        if found := _time_of_events(free, rows, roles, time_format):
            return found
        gaps = [name for name in free if not _is_sparse(rows[name]) and _is_date(_known(rows[name]), time_format)]
        return next(iter(_varying(gaps, rows, roles)), None)
    if role == "rating":
        return None
    free = [column for column in free if "timestamp" in roles or _fitting(rows[column], time_format) is None]
    free = [name for name in _varying(free, rows, roles) if rows[name].drop_nulls().is_duplicated().any()]
    free = [name for name in free if _is_id(rows[name])]
    free.sort(key=lambda column: _likelihood(role, column))
    if role == "user_id":  # Amazon's own ratings have the items first
        free.sort(key=lambda column: _share_of_amazon_items(rows[column]) >= FIT)
    if role == "item_id" and "user_id" in roles:
        free = [name for name in free if _marks_ids(name) or not _is_time_again(name, rows, roles, time_format)]
        free = _shared(free, rows, roles["user_id"])
    best = next(iter(free), None)
    for other in free if role == "item_id" else ():
        if best and _likelihood(role, other) == _likelihood(role, best) and _within(other, best, rows):
            best = other
    return best


def _is_time_again(column: str, rows: pl.DataFrame, roles: Mapping[str, str], time_format: str) -> bool:
    """Return whether a column has the times of the events once more, in another form."""
    if "timestamp" not in roles or (other := _fitting(rows[column])) is None:
        return False
    chosen = rows[roles["timestamp"]]
    apart = seconds(rows[column], other) - seconds(chosen, _fitting(chosen, time_format) or "")
    return bool((apart.abs() <= DAY_S).mean() >= FIT)  # type: ignore[operator]


def _shared(columns: Sequence[str], rows: pl.DataFrame, user: str) -> list[str]:
    """Return the columns of which users share values, as they do not share visits; all columns if there are none."""
    return [name for name in columns if _pairs(rows, user, name) > rows[name].n_unique()] or [*columns]


def _within(item: str, category: str, rows: pl.DataFrame) -> bool:
    """Return whether each value of the column `item` is of one value of `category`, and these are few."""
    known = rows.filter(pl.col(item).cast(pl.String).str.strip_chars() != "")
    items, categories = known[item].n_unique(), known[category].n_unique()
    if categories > CATEGORIES or items < MEMBERS * categories or _is_sparse(rows[item]):
        return False
    repeated = known[item].is_duplicated().sum() / len(rows)
    return bool(repeated > REPEATED and _pairs(known, item, category) == items)


def _likelihood(role: str, column: str) -> tuple[int, ...]:
    """Return a key that sorts columns of ids by their names, best first."""
    words, place = _stems(column), {other: _index(other, _stems(column)) for other in REQUIRED}
    found = place.pop(role)
    foreign = any(index is not None for index in place.values())
    named = _names(role, column) or _names("title", column)  # not an item's size
    known = found if found is not None and named else len(WORDS[role])
    return foreign, not GROUP_WORDS.isdisjoint(words), not _marks_ids(column), known


def _is_sparse(values: pl.Series) -> bool:
    """Return whether many values are missing, such as the users of visitors that did not log in."""
    text = values.cast(pl.String, strict=False).fill_null("").str.strip_chars()
    return bool(text.is_in(["", *MISSING]).mean() > MALFORMED)  # type: ignore[operator]


def _known(values: pl.Series) -> pl.Series:
    """Return the values that are not missing."""
    return values.filter(values.cast(pl.String, strict=False).str.strip_chars() != "")


def _is_date(values: pl.Series, time_format: str = "") -> bool:
    """Return whether the values are times, and not numbers that may also be ids."""
    found = _fitting(values, time_format)
    numbers = values.cast(pl.String, strict=False).cast(pl.Float64, strict=False)
    return bool(found) or (found == "" and numbers.null_count() > values.null_count())


def _fitting(values: pl.Series, time_format: str = "") -> str | None:
    """Return the first format that fits the values; empty: numbers or ISO 8601; None: they are no times."""
    few = values.gather_every(max(1, len(values) // FEW))  # most formats fit none of them
    formats = [time_format] if time_format else ["", *_formats_like(few)]
    return next((text for text in formats if _share_of_times(few, text) and _share_of_times(values, text) >= FIT), None)


def _formats_like(values: pl.Series) -> list[str]:
    """Return the formats whose examples have the signs between numbers and words that some values have."""
    shapes = set(_shapes(values.cast(pl.String, strict=False)))
    examples = pl.Series([MOMENT.strftime(text) for text in FORMATS])
    return [text for text, shape in zip(FORMATS, _shapes(examples), strict=True) if shape in shapes]


def _shapes(text: pl.Series) -> pl.Series:
    """Return each text with 0 for a number, a for a word and -0 for an offset, without blanks."""
    offsets = text.str.replace(r"[zZ]\s*$|[+-]\d\d:\d\d\s*$", "-0").str.replace_all("+", "-", literal=True)
    return offsets.str.replace_all(r"\d+", "0").str.replace_all(r"\p{L}+", "a").str.replace_all(r"\s", "")


def _share_of_times(values: pl.Series, time_format: str) -> float:
    if values.dtype == pl.Boolean or not len(values):
        return 0.0
    if time_format and (values.dtype.is_temporal() or values.dtype.is_float()):
        return 0.0
    found = seconds(values, time_format)
    return int(found.is_between(EARLIEST, LATEST).fill_null(False).sum()) / len(values)


def _share_of_amazon_items(values: pl.Series) -> float:
    text = values.cast(pl.String, strict=False).drop_nulls()
    return float(text.str.contains(r"^(B[0-9A-Z]{9}|\d{9}[\dX])$").mean() or 0.0)  # type: ignore[arg-type]


def _is_id(values: pl.Series) -> bool:
    """Return whether a column may hold ids: more values than ratings have, and no fractions, sentences or dates."""
    text = values.cast(pl.String, strict=False).drop_nulls()
    distinct = text.n_unique()
    if values.dtype == pl.Boolean or distinct <= FEW_IDS:
        return False
    fractions = _fractions(text) & ~text.str.contains(r"^\d{8,}\.\d{8,}$")  # as in GA4
    blanks = text.str.count_matches(" ")
    plain = fractions.mean() <= 0.5 and (blanks.mean() < SENTENCE or 2 * distinct < len(text))  # type: ignore[operator]
    return bool(plain) and not _is_date(values)


def _fractions(text: pl.Series) -> pl.Series:
    """Return which values are numbers that are not whole."""
    return text.str.contains(r"^[-+]?\d*\.0*[1-9]\d*$")


def _is_order(values: pl.Series) -> bool:
    """Return whether the values are numbers that are no times, such as days since the first one."""
    numbers = values.cast(pl.Float64, strict=False).fill_null(-1) if values.dtype != pl.Boolean else pl.Series([-1.0])
    some = _share_of_times(values, "") >= 0.5  # times with gaps
    return not some and _fitting(values) is None and bool((numbers >= 0).mean() >= FIT)  # type: ignore[operator]


def _warn_of_clocks(rows: pl.DataFrame, roles: Mapping[str, str], time_format: str) -> None:
    """Warn about the free columns with times of day, if the chosen times are days."""
    if (seconds(rows[roles["timestamp"]], time_format) % DAY_S != 0).any():
        return
    for column in rows.columns:
        clocks = rows[column].cast(pl.String, strict=False).str.contains(CLOCK)
        if column not in roles.values() and clocks.sum() >= FIT * len(rows):
            logger.warning(
                "the time of day in %s is not used, and the events of a day keep the order of the file: write date and "
                "time of day into one column to use it",
                column,
            )


def _time_format(values: pl.Series, names: Sequence[str]) -> str:
    """Return the one of `FORMATS` that fits most of the values; empty if they need none. `names` are all columns.

    Raises:
        ValueError: no format fits, or two of them fit equally well and give different times.
    """
    if values.dtype.is_temporal():
        return ""
    known = _known(values)
    plain = _share_of_times(known, "")
    if plain >= FIT:
        return ""
    shares = {FORMATS[0]: 0.0} | {text: _share_of_times(known, text) for text in _formats_like(known)}
    fitting = max(shares, key=lambda text: shares[text])
    if 0 < plain >= shares[fitting]:
        return ""
    times = {text: seconds(known, text) for text, share in shares.items() if share == shares[fitting] >= FIT}
    if times:  # days read as years would be of many years
        years = {text: (found // YEAR_S).n_unique() for text, found in times.items()}
        fitting = min(times, key=lambda text: years[text])
        times = {text: found for text, found in times.items() if years[text] < 2 * years[fitting]}
    for other, found in times.items():
        if not found.equals(times[fitting]):
            raise ValueError(
                f"the times of {values.name} such as {str(known[0])!r:.40} may have the format {fitting} or {other}: "
                "choose one with --time-format"
            )
    if shares[fitting] < FIT:
        example = "" if known.is_empty() else f" such as {str(known[0])!r:.40}"
        parts = [name for name in names if not DATE_PARTS.isdisjoint(words_of(name))]
        hint = ""
        if len(parts) == len(DATE_PARTS):
            hint = f"; if {', '.join(parts)} are the parts of a date, write it into one column, such as 2009-12-31"
        elif _is_order(values) and values.n_unique() > CALENDAR:
            hint = f"; if they only number days or steps, pass the column with --time {values.name}"
        raise ValueError(
            f"the times of {values.name}{example} have no known format, or lie outside 1990 to 2035: "
            f"set --time-format, or name another column with --time{hint}"
        )
    return fitting
