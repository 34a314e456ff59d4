from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from seqrec.config import ConfigError
from seqrec.data import item_tokens
from seqrec.models.text_encoder import KEY, VALUE

IDS = ["b", "a", "d", "c", "nowhere"]  # items 1, 2, ...
ITEMS = {
    "item_id": ["a", "b", "c", "d"],
    "title": ["Nuts &amp; Bolts", "  A\u00a0long \n title ", None, "Отвёртка 電動"],
    "brand": ["Acme", "Acme", "", None],
    "colour": [None, None, None, None],
    "category": ["Tools", "Tools Hand", "Garden", "Tools"],
    "price": ["3", "4", "5", "6"],
}


def write(folder: Path, columns: dict[str, list]) -> Path:
    pq.write_table(pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()}), folder / "i.pq")
    return folder / "i.pq"


@pytest.fixture
def texts(tmp_path):
    return item_tokens.read_texts(write(tmp_path, ITEMS), IDS)


@pytest.fixture
def tokenizer(texts):
    return item_tokens.train_tokenizer([texts], 200)


def pieces(tokens, tokenizer, item: int) -> list[str]:
    first, stop = tokens["offsets"][item : item + 2].tolist()
    return [tokenizer.id_to_token(i) for i in tokens["ids"][first:stop].tolist()]


def joined(tokens, tokenizer, item: int) -> str:
    return " ".join(pieces(tokens, tokenizer, item)).replace(" ##", "")


def test_values_follow_the_vocabulary_and_are_cleaned(texts, tmp_path):
    assert {name: values.to_pylist() for name, values in texts.items()} == {
        "title": ["A long title", "Nuts & Bolts", "Отвёртка 電動", "", ""],
        "brand": ["Acme", "Acme", "", "", ""],
        "category": ["Tools Hand", "Tools", "Tools", "Garden", ""],
    }  # not the empty column, and three of those that hold text
    assert list(item_tokens.read_texts(write(tmp_path, ITEMS), IDS, ["price", "title"])) == ["price", "title"]


@pytest.mark.parametrize(
    ("columns", "attributes", "message"),
    [
        (ITEMS, ["tags"], r"options.attributes: .*no column 'tags'; its columns are title, brand"),
        ({"item_id": ["a"], "title": [""]}, [], "holds no text for the 5 items"),
    ],
)
def test_a_catalogue_without_the_text_is_refused(tmp_path, columns, attributes, message):
    with pytest.raises(ConfigError, match=message):
        item_tokens.read_texts(write(tmp_path, columns), IDS, attributes)


def test_an_item_is_names_and_values_without_what_is_missing(texts, tokenizer):
    tokens = item_tokens.tokenise(texts, tokenizer, 32)

    assert [joined(tokens, tokenizer, item) for item in range(6)] == [
        "",
        "title a long title brand acme category tools hand",
        "title nuts & bolts brand acme category tools",
        "title отвертка 電 動 category tools",
        "category garden",
        "",  # no row in the items table
    ]
    assert tokens["offsets"][-1] == len(tokens["ids"]) == len(tokens["types"]) == len(tokens["starts"])


def test_unknown_letters_are_one_unknown_token(tmp_path, tokenizer):
    other = item_tokens.read_texts(write(tmp_path, {"item_id": ["a"], "title": ["ツツ tools"]}), ["a"])

    assert pieces(item_tokens.tokenise(other, tokenizer, 32), tokenizer, 1)[-2:] == ["[UNK]", "tools"]


def test_types_and_word_starts_belong_to_their_tokens(texts, tokenizer):
    tokens = item_tokens.tokenise(texts, tokenizer, 32)

    first, stop = tokens["offsets"][1:3].tolist()
    words = pieces(tokens, tokenizer, 1)
    assert tokens["starts"][first:stop].tolist() == [not word.startswith("##") for word in words]
    types, word = [], 0
    for piece in words:
        word += not piece.startswith("##")
        types.append(KEY if word in (1, 5, 7) else VALUE)  # title, brand, category
    assert tokens["types"][first:stop].tolist() == types


@pytest.mark.parametrize("limit", [2, 5, 32])
def test_name_and_value_are_cut_together(tmp_path, limit):
    columns = {"item_id": ["a", "b"], "title": ["tools " * 3000, "tools"], "brand": ["tools", "tools"]}
    texts = item_tokens.read_texts(write(tmp_path, columns), ["a", "b"])
    tokenizer = item_tokens.train_tokenizer([texts], 200)
    tokens = item_tokens.tokenise(texts, tokenizer, limit)

    name, brand = (len(tokenizer.encode(word).ids) for word in ("title", "brand"))
    sizes = [limit + min(limit, brand + 1), min(limit, name + 1) + min(limit, brand + 1)]
    assert tokens["offsets"].diff()[1:].tolist() == sizes
    types = tokens["types"][: sizes[0]].tolist()
    assert types[: min(name, limit - 1) + 1] == [KEY] * min(name, limit - 1) + [VALUE]  # a value is never cut off whole


def test_text_that_imitates_a_special_token_is_text(tmp_path):
    texts = item_tokens.read_texts(write(tmp_path, {"item_id": ["a"], "title": ["[MASK] ##x [CLS]"]}), ["a"])
    tokenizer = item_tokens.train_tokenizer([texts], 200)
    tokens = item_tokens.tokenise(texts, tokenizer, 32)

    assert not set(tokens["ids"].tolist()) & set(tokens["special"][:3].tolist())
    assert tokens["special"][3] == tokenizer.get_vocab_size()


def test_attributes_are_the_words_that_items_share(tmp_path):
    columns = {
        "item_id": ["a", "b", "c", "d"],
        "title": ["The Red Car (1995)", "Red sky", "the sea", ""],
        "genre": ["Action|Sea", "Action, Drama", "Drama", None],
    }
    texts = item_tokens.read_texts(write(tmp_path, columns), columns["item_id"])

    got = item_tokens.attribute_values(texts, 3)

    action, drama, red, the = range(1, 5)  # by column and word; the sea of a title is not that of a genre
    expected = [[0, 0, 0], [action, red, the], [action, drama, red], [drama, the, 0], [0, 0, 0]]
    assert got.tolist() == expected
    assert item_tokens.attribute_values(texts, 1).tolist() == [row[:1] for row in expected]


def test_several_catalogues_are_one(texts, tokenizer):
    one = item_tokens.tokenise(texts, tokenizer, 32)

    both = item_tokens.concatenate([one, one])

    assert len(both["offsets"]) == 2 * 5 + 2
    items = [0, *range(1, 6), *range(1, 6)]
    assert [pieces(both, tokenizer, item) for item in range(11)] == [pieces(one, tokenizer, item) for item in items]
    torch.testing.assert_close(both["special"], one["special"])


def test_the_size_of_a_vocabulary_is_a_limit(texts):
    letters = {letter for values in texts.values() for value in values.to_pylist() for letter in value.lower()}
    size = 4 + 2 * len(letters | set("titlebrandcategory"))

    assert item_tokens.train_tokenizer([texts], size + 3).get_vocab_size() <= size + 3


def test_every_training_learns_the_same_vocabulary(tmp_path):
    """The tables of the library are hashed anew each time, in one process as in several."""
    words = [f"w{i * 7919 % 1000:03d} {chr(97 + i % 26) * 3} x{i % 13}y" for i in range(300)]
    ids = [str(i) for i in range(300)]
    texts = item_tokens.read_texts(write(tmp_path, {"item_id": ids, "title": words}), ids)

    assert len({item_tokens.train_tokenizer([texts], 300).to_str() for _ in range(5)}) == 1
