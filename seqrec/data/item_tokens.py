"""The items' text as flat arrays of tokens, made once per catalogue: everything after it is gathers on a device.

An item is the names and values of its attributes, in their order; a missing value leaves out its name as well.
"""

from __future__ import annotations

import collections
import html
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F

from models.recformer import KEY, VALUE
from seqrec.config import ConfigError

MOST_ATTRIBUTES = 3  # of those that nobody named
CHARACTERS = 4_000  # more than any attribute's tokens hold
PAD, UNKNOWN, CLS, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[MASK]")
ALPHABET = 500  # letters of a vocabulary that is trained here; a rarer one is unknown
Texts = dict[str, pa.DictionaryArray]  # attribute -> value of item 1, 2, ..., empty where there is none


def read_texts(items: Path, item_ids: Sequence[str], attributes: Sequence[str] = ()) -> Texts:
    """Return the cleaned values of `attributes`, or of the first three columns that hold any text, of each item.

    Args:
        items: the items table (artifacts.ITEMS_SCHEMA and attributes).
        item_ids: of item 1, 2, ...
        attributes: columns of the table, in the order in which they are read.

    Raises:
        ConfigError: no such column, or no text at all.
    """
    table = pq.read_table(items)
    names = [name for name in table.column_names if name != "item_id"]
    unknown = [name for name in attributes if name not in names]
    if unknown:
        raise ConfigError(f"options.attributes: {items} has no column {unknown[0]!r} but {', '.join(names)}")
    row = pc.index_in(pa.array(item_ids, pa.string()), table["item_id"].combine_chunks())
    texts = {name: _cleaned(table[name].combine_chunks().take(row)) for name in attributes or names}
    texts = {name: values for name, values in texts.items() if pc.any(pc.not_equal(values.dictionary, "")).as_py()}
    if not texts:
        raise ConfigError(f"{items} holds no text of the {len(item_ids)} items: a text model has nothing to read")
    return texts if attributes else dict(list(texts.items())[:MOST_ATTRIBUTES])


def as_texts(items: Sequence[Mapping[str, str]], attributes: Sequence[str] = ()) -> Texts:
    """Return the cleaned values of the attributes of `items`, of which no table tells; a missing one is empty.

    Those of `attributes` come first, in that order, which a model was trained on; others follow by name.
    """
    told = {name for one in items for name in one}
    names = [*(name for name in attributes if name in told), *sorted(told.difference(attributes))]
    return {name: _cleaned(pa.array([one.get(name) for one in items], pa.string())) for name in names}


def _cleaned(values: pa.Array) -> pa.DictionaryArray:
    encoded = pc.fill_null(values, "").dictionary_encode()
    distinct = [_clean(value) for value in encoded.dictionary.to_pylist()]
    return pa.DictionaryArray.from_arrays(encoded.indices, pa.array(distinct, pa.string()))


def _clean(text: str) -> str:
    return " ".join(html.unescape(text[:CHARACTERS]).split())


def train_tokenizer(texts: Sequence[Texts], size: int) -> Tokenizer:
    """Return a WordPiece tokeniser with at most `size` units, learnt from the names and distinct values of `texts`.

    The same texts give the same units in every process: the trainer numbers the letters in the order of a hash table
    and breaks ties by number, unless they have numbers already.
    """
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
    for one in texts:
        for name, values in one.items():
            yield from [name] * len(values)  # as often as it will be read
            yield from values.dictionary.to_pylist()


def special_tokens(tokenizer: Tokenizer) -> Tensor:
    """Return ids of padding, [CLS] and [MASK], and the size of the vocabulary (4,), by BERT's or RoBERTa's names."""
    ids = []
    for names in ((PAD, "<pad>"), (CLS, "<s>"), (MASK, "<mask>")):
        known = [tokenizer.token_to_id(name) for name in names if tokenizer.token_to_id(name) is not None]
        if not known:
            raise ConfigError(f"options.start: the tokeniser has no token {' or '.join(names)}")
        ids.append(known[0])
    return torch.tensor([*ids, tokenizer.get_vocab_size()])


def tokenise(texts: Texts, tokenizer: Tokenizer, limit: int) -> dict[str, Tensor]:
    """Return the tokens of a catalogue, item 0 being padding without any.

    Args:
        texts: of item 1, 2, ...
        tokenizer: adds no tokens of its own.
        limit: tokens of an attribute's name and value together; what is more of the value is cut off.

    Returns:
        `ids` int32, `types` int8 (1 = name, 2 = value) and `starts` bool (first token of a word) of all tokens,
        `offsets` int64 (V + 1): where each item's begin; `special`: see `special_tokens`.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forking later must not warn or hang
    number = len(next(iter(texts.values()))) + 1
    attributes = [_attribute(name, values, tokenizer, limit) for name, values in texts.items()]
    sizes = np.stack([size for _, size, _ in attributes])  # (attributes, V)
    ends = sizes.sum(0).cumsum()
    offsets = np.zeros(number + 1, np.int64)
    offsets[1:] = ends
    place = offsets[:-1] + np.concatenate([np.zeros_like(sizes[:1]), sizes.cumsum(0)[:-1]])
    flat = {name: np.zeros(offsets[-1], kind) for name, kind in _KINDS.items()}
    for (first, size, source), start in zip(attributes, place, strict=True):
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
    """Return where each item's tokens of this attribute begin and how many they are (V,), and those tokens."""
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


def _pair(key: object, value: object, limit: int) -> tuple[list[int], list[int]]:
    """Return ids and words of an attribute's name and value, cut together; a value keeps one token at least."""
    name_ids, name_words = key.ids[: limit - 1], key.word_ids[: limit - 1]  # type: ignore[attr-defined]
    return [*name_ids, *value.ids][:limit], [*name_words, *value.word_ids][:limit]  # type: ignore[attr-defined]


def _ranges(start: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return start, start + 1, ... of each range, one after the other.

    >>> _ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist()
    [5, 6, 9, 10, 11]
    """
    index: NDArray[np.int64] = np.arange(size.sum()) + np.repeat(start - size.cumsum() + size, size)
    return index


def attribute_values(texts: Texts, most: int) -> Tensor:
    """Return the attributes (V, most) of each item as numbers from 1, int32; 0 fills the rest and item 0.

    A value is a word of a column that at least two items have there; an item keeps its `most` most frequent ones.
    """
    words = [_words(name, values) for name, values in texts.items()]
    rows = [sorted({pair for column in item for pair in column}) for item in zip(*words, strict=True)]
    counts = collections.Counter(pair for row in rows for pair in row)
    known = sorted(pair for pair, count in counts.items() if count >= 2)
    number = {pair: place for place, pair in enumerate(known, start=1)}
    table = torch.zeros(len(rows) + 1, most, dtype=torch.int32)
    for item, row in enumerate(rows, start=1):
        kept = sorted((pair for pair in row if pair in number), key=lambda pair: (-counts[pair], pair))[:most]
        table[item, : len(kept)] = torch.tensor([number[pair] for pair in kept], dtype=torch.int32)
    return table


def _words(name: str, values: pa.DictionaryArray) -> list[list[tuple[str, str]]]:
    """Return the words of each item's value, each with the name of its attribute."""
    distinct = [[(name, word) for word in re.findall(r"\w+", text.lower())] for text in values.dictionary.to_pylist()]
    return [distinct[place] for place in values.indices.to_pylist()]


def concatenate(catalogues: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tokens of several catalogues of one tokeniser as those of one; items are renumbered in order."""
    tokens = {name: torch.cat([one[name] for one in catalogues]) for name in _KINDS}
    sizes = torch.cat([one["offsets"].diff()[1:] for one in catalogues])  # without each one's padding
    return tokens | {"offsets": F.pad(sizes.cumsum(0), (2, 0)), "special": catalogues[0]["special"]}
