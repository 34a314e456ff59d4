"""The text of the items as flat arrays of tokens, built once per catalogue; models gather from them on the device.

An item's text consists of the names and values of its attributes, in order; attributes without a value are left out.
"""

from __future__ import annotations

import collections
import html
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from seqrec.artifacts import read_table
from seqrec.config import ConfigError
from seqrec.data.sequences import ranges
from seqrec.models.text_encoder import KEY, VALUE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_ATTRIBUTES = 3  # attributes used if the options name none
CHARACTERS = 4_000  # read per value; more than an attribute's tokens can hold
PAD, UNKNOWN, CLS, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[MASK]")
ALPHABET = 500  # letters in a vocabulary trained here; rarer letters are unknown
Texts = dict[str, pa.DictionaryArray]  # attribute -> values of items 1, 2, ..., empty if missing


def read_texts(items: Path, item_ids: Sequence[str], attributes: Sequence[str] = ()) -> Texts:
    """Return the cleaned values of `attributes` for each item; by default, those of the first three columns with text.

    Args:
        items: file of the items table (artifacts.ITEMS_SCHEMA and attributes).
        item_ids: ids of items 1, 2, ...
        attributes: columns of the table, in reading order.

    Raises:
        ConfigError: a column does not exist, or there is no text at all.
    """
    table = read_table(items)
    names = [name for name in table.column_names if name != "item_id"]
    unknown = [name for name in attributes if name not in names]
    if unknown:
        raise ConfigError(
            f"options.attributes: {items} has no column {unknown[0]!r}; its columns are {', '.join(names)}"
        )
    row = pc.index_in(pa.array(item_ids, pa.string()), table["item_id"].combine_chunks())
    texts = {name: _cleaned(table[name].combine_chunks().take(row)) for name in attributes or names}
    texts = {name: values for name, values in texts.items() if pc.any(pc.not_equal(values.dictionary, "")).as_py()}
    if not texts:
        raise ConfigError(f"{items} holds no text for the {len(item_ids)} items, so a text model has nothing to read")
    return texts if attributes else dict(list(texts.items())[:MAX_ATTRIBUTES])


def described(items: Path, item_ids: Sequence[str]) -> bool:
    """Return whether any of the items has text in the items table, which need not exist."""
    try:
        return bool(items.is_file() and read_texts(items, item_ids))
    except ConfigError:  # there is none
        return False


def as_texts(items: Sequence[Mapping[str, str]], attributes: Sequence[str] = ()) -> Texts:
    """Return the cleaned attribute values of `items`, which need not be in any table; missing values are empty.

    Only `attributes` are read, in their order, as a model was trained on them; by default all, sorted by name.
    """
    present = {name for item in items for name in item}
    names = [name for name in attributes if name in present] if attributes else sorted(present)
    return {name: _cleaned(pa.array([item.get(name) for item in items], pa.string())) for name in names}


def _cleaned(values: pa.Array) -> pa.DictionaryArray:
    encoded = pc.fill_null(values, "").dictionary_encode()
    distinct = [" ".join(html.unescape(value[:CHARACTERS]).split()) for value in encoded.dictionary.to_pylist()]
    return pa.DictionaryArray.from_arrays(encoded.indices, pa.array(distinct, pa.string()))


def train_tokenizer(texts: Sequence[Texts], size: int) -> Tokenizer:
    """Return a WordPiece tokeniser with at most `size` units, trained on the names and distinct values of `texts`.

    The result is the same in every process, because the letters are numbered in advance: the trainer would number them
    in the order of a hash table, and it breaks ties by these numbers.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers  # not everybody needs them

    normalizer = normalizers.BertNormalizer(lowercase=True)
    sentences = [normalizer.normalize_str(text) for text in _sentences(texts)]
    counts = collections.Counter(letter for text in sentences for letter in text if not letter.isspace())
    letters = sorted(counts, key=lambda letter: (-counts[letter], letter))
    rare, letters = letters[ALPHABET:], sorted(letters[:ALPHABET])
    known = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    learner = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=size, min_frequency=2, special_tokens=known, show_progress=False)
    hidden = dict.fromkeys(map(ord, rare), " ")
    learner.train_from_iterator((text.translate(hidden) for text in sentences), trainer)
    tokenizer = Tokenizer(models.WordPiece(vocab=learner.get_vocab(), unk_token=UNKNOWN))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _sentences(texts: Iterable[Texts]) -> Iterator[str]:
    for catalogue in texts:
        for name, values in catalogue.items():
            yield from [name] * len(values)  # as often as it will be read
            yield from values.dictionary.to_pylist()


def special_tokens(tokenizer: Tokenizer) -> Tensor:
    """Return (4,): the ids of padding, [CLS] and [MASK] under BERT's or RoBERTa's names, and the vocabulary's size."""
    ids = []
    for names in ((PAD, "<pad>"), (CLS, "<s>"), (MASK, "<mask>")):
        known = [tokenizer.token_to_id(name) for name in names if tokenizer.token_to_id(name) is not None]
        if not known:
            raise ConfigError(f"options.start: the tokeniser has no token {' or '.join(names)}")
        ids.append(known[0])
    return torch.tensor([*ids, tokenizer.get_vocab_size()])


def tokenise(texts: Texts, tokenizer: Tokenizer, limit: int) -> dict[str, Tensor]:
    """Return the tokens of a catalogue; item 0 is padding and has none.

    Args:
        texts: texts of items 1, 2, ...
        tokenizer: tokeniser that adds no special tokens.
        limit: maximum number of tokens of an attribute's name and value together; longer values are cut.

    Returns:
        `ids` int32, `types` int8 (1 = name, 2 = value) and `starts` bool (first token of a word) of all tokens;
        `offsets` int64 (V + 1): start of each item's tokens; `special`: see `special_tokens`.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forking later must not warn or hang
    number = len(next(iter(texts.values()))) + 1
    attributes = [_attribute(name, values, tokenizer, limit) for name, values in texts.items()]
    sizes = np.stack([size for _, size, _ in attributes])  # (attributes, V)
    ends = sizes.sum(0).cumsum()
    offsets = np.zeros(number + 1, np.int64)
    offsets[1:] = ends
    starts = offsets[:-1] + np.concatenate([np.zeros_like(sizes[:1]), sizes.cumsum(0)[:-1]])
    flat = {name: np.zeros(offsets[-1], kind) for name, kind in _KINDS.items()}
    for (first, size, source), start in zip(attributes, starts, strict=True):
        target, origin = _ranges(start, size), _ranges(first, size)
        for name, values in flat.items():
            values[target] = source[name][origin]
    tokens = {name: torch.from_numpy(values) for name, values in flat.items()}
    return tokens | {"offsets": torch.from_numpy(offsets), "special": special_tokens(tokenizer)}


_KINDS: dict[str, type] = {"ids": np.int32, "types": np.int8, "starts": np.bool_}
Flat = Mapping[str, NDArray[np.generic]]


def _attribute(
    name: str, values: pa.DictionaryArray, tokenizer: Tokenizer, limit: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], Flat]:
    """Return start and number (V,) of each item's tokens of this attribute, and the tokens."""
    key = tokenizer.encode(name, add_special_tokens=False)
    distinct = tokenizer.encode_batch(values.dictionary.to_pylist(), add_special_tokens=False)
    rows = [([], []) if not value.ids else _pair(key, value, limit) for value in distinct]
    keys = min(len(key.ids), limit - 1)
    size = np.array([len(ids) for ids, _ in rows], np.int64)
    first = size.cumsum() - size
    ids = np.array([token for row, _ in rows for token in row], np.int32)
    words = np.array([word for _, row in rows for word in row], np.int64)
    within = np.arange(len(ids)) - np.repeat(first, size)
    starts = (within == 0) | (within == keys) | (words != np.concatenate([[-1], words[:-1]]))
    flat = {"ids": ids, "types": np.where(within < keys, KEY, VALUE).astype(np.int8), "starts": starts}
    index = values.indices.to_numpy()
    return np.pad(first[index], (1, 0)), np.pad(size[index], (1, 0)), flat


def _pair(key: Any, value: Any, limit: int) -> tuple[list[int], list[int]]:
    """Return token ids and word ids of name and value, cut to `limit`; at least one token of the value is kept."""
    name_ids, name_words = key.ids[: limit - 1], key.word_ids[: limit - 1]
    return [*name_ids, *value.ids][:limit], [*name_words, *value.word_ids][:limit]


def _ranges(start: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.int64]:
    return ranges(torch.from_numpy(start), torch.from_numpy(size))[1].numpy()


def attribute_values(texts: Texts, most: int) -> Tensor:
    """Return the attribute values (V, most) of each item as numbers from 1, int32, filled up with 0.

    A value is a word that at least two items have in the same column. Each item keeps its `most` most frequent values.
    """
    number: dict[tuple[str, str], int] = {}  # of each word of a column, in the order of their appearance
    pairs = [_numbered(name, values, number) for name, values in texts.items()]
    item, word = np.concatenate(pairs, 1)
    item, word = np.divmod(np.unique(item * max(1, len(number)) + word), max(1, len(number)))
    counts = np.bincount(word, minlength=len(number))
    ordered = np.array([number[pair] for pair in sorted(number)], np.int64)
    place = np.empty_like(ordered)
    place[ordered] = np.arange(len(ordered))
    known = np.cumsum(counts[ordered] >= 2)  # numbers of the values, in the order of `ordered`
    item, word = item[counts[word] >= 2], word[counts[word] >= 2]
    order = np.lexsort([place[word], -counts[word], item])
    item, word = item[order], word[order]
    rank = np.arange(len(item)) - np.searchsorted(item, item)
    table = np.zeros((len(next(iter(texts.values()))) + 1, most), np.int32)
    table[item[rank < most], rank[rank < most]] = known[place[word[rank < most]]]
    return torch.from_numpy(table)


def _numbered(name: str, values: pa.DictionaryArray, number: dict[tuple[str, str], int]) -> NDArray[np.int64]:
    """Return (2, N): item and number of each word of an attribute; words that are not in `number` join it."""
    rows = [
        [number.setdefault((name, word), len(number)) for word in re.findall(r"\w+", text.lower())]
        for text in values.dictionary.to_pylist()
    ]
    size = np.array([len(row) for row in rows], np.int64)
    flat = np.array([word for row in rows for word in row], np.int64)
    index = values.indices.to_numpy()
    item = np.repeat(np.arange(1, len(index) + 1), size[index])
    return np.stack([item, flat[_ranges((size.cumsum() - size)[index], size[index])]])


def concatenate(catalogues: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tokens of several catalogues with one tokeniser as one catalogue; items are renumbered in order."""
    tokens = {name: torch.cat([catalogue[name] for catalogue in catalogues]) for name in _KINDS}
    sizes = torch.cat([catalogue["offsets"].diff()[1:] for catalogue in catalogues])  # without padding, item 0
    return tokens | {"offsets": F.pad(sizes.cumsum(0), (2, 0)), "special": catalogues[0]["special"]}
