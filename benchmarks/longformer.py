"""Recformer's encoder against transformers' LongformerModel: the same weights, the same output, and the time of a step.

    python -m benchmarks.longformer

A step is the forward and backward pass of a batch of full length. Both drop the same: hidden states, but no attention
weights. They take turns; times are processor seconds, the least of the repeats, so that what else the machine does
counts little. `[CLS]` is what Recformer reads of a text: its last layer then computes that position alone;
LongformerModel has no such path.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LongformerConfig, LongformerForMaskedLM
from transformers.utils.logging import disable_progress_bar

from seqrec.models.base import Catalogue
from seqrec.models.recformer import Recformer, RecformerOptions, Text
from seqrec.training import loop, pretrained

WORDS = 30_522
PAD = 1


def source(args: argparse.Namespace, dropout: float) -> LongformerForMaskedLM:
    """Return a random Longformer."""
    config = LongformerConfig(
        vocab_size=WORDS,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=4 * args.width,
        attention_window=64,
        max_position_embeddings=args.tokens + 2,
        type_vocab_size=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
        pad_token_id=PAD,
    )
    return LongformerForMaskedLM(config)


def ours(
    args: argparse.Namespace,
    other: LongformerForMaskedLM,
    dropout: float,
    tokens: dict[str, Tensor] | None = None,
    **further: Any,
) -> Recformer:
    """Return a Recformer with the weights of `other`, and of a catalogue that matters where `tokens` are given."""
    tokens = tokens or {
        "ids": torch.tensor([5], dtype=torch.int32),
        "types": torch.ones(1, dtype=torch.int8),
        "starts": torch.ones(1, dtype=torch.bool),
        "offsets": torch.tensor([0, 0, 1]),
        "special": torch.tensor([PAD, 2, 3, WORDS]),
    }
    options = RecformerOptions(
        d_model=args.width,
        d_inner=4 * args.width,
        layers=args.layers,
        heads=args.heads,
        max_tokens=args.tokens,
        dropout=dropout,
        frozen_words=(),
        **further,
    )
    model = Recformer(options, Catalogue(len(tokens["offsets"]) - 2, 1, 50, tokens))
    with tempfile.TemporaryDirectory() as folder:
        other.save_pretrained(folder)
        pretrained.load_weights(model, folder)
    with torch.no_grad():
        assert model.encoder.places is not None
        model.encoder.places.weight.zero_()  # LongformerModel has no item positions
    model.enter("contrastive")
    return model


def theirs(model: LongformerForMaskedLM, text: Text) -> Tensor:
    """Return the output of LongformerModel (B, T, D)."""
    summary_BT = torch.zeros_like(text.ids_BT)
    summary_BT[:, 0] = 1
    out: Tensor = model.longformer(
        input_ids=text.ids_BT,
        attention_mask=text.real_BT.long(),
        global_attention_mask=summary_BT,
        token_type_ids=text.types_BT,
    ).last_hidden_state
    return out


def seconds(step: Callable[[], Tensor], module: torch.nn.Module, bf16: bool) -> float:
    """Return the processor seconds of a forward and backward pass."""
    module.zero_grad(set_to_none=True)
    began = time.process_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = step().float().sum()
    loss.backward()
    return time.process_time() - began


def main() -> None:
    """Compare, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 512), ("batch", 8), ("layers", 6), ("width", 256), ("heads", 4), ("repeats", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    loop.keep_freed_memory()
    shape = (args.batch, args.tokens)
    real_BT = torch.ones(shape, dtype=torch.bool)
    text = Text(torch.randint(5, WORDS, shape), torch.randint(1, 3, shape), torch.zeros(shape).long(), real_BT, real_BT)

    other = source(args, 0.0).eval()
    with torch.no_grad():
        distance = (ours(args, other, 0.0).eval().encoder(text, only_first=False) - theirs(other, text)).abs().max()
    other, model = source(args, 0.1).train(), ours(args, other, 0.1).train()
    steps: dict[str, tuple[Callable[[], Tensor], torch.nn.Module]] = {
        "LongformerModel": (lambda: theirs(other, text), other),
        "ours, every position": (lambda: model.encoder(text, only_first=False), model),
        "ours, [CLS]": (lambda: model.encoder(text, only_first=True), model),
    }
    times: dict[tuple[str, bool], list[float]] = {(name, bf16): [] for name in steps for bf16 in (False, True)}
    for _ in range(args.repeats + 1):  # the first one warms up
        for (name, bf16), measured in times.items():
            measured.append(seconds(*steps[name], bf16))
    least = {key: min(measured[1:]) for key, measured in times.items()}
    lines = [f"largest difference of the outputs: {distance:.1e}", f"{'':24} {'fp32':>14} {'bf16':>14}  seconds a step"]
    for name in steps:
        cells = [(least[name, bf16], least["LongformerModel", bf16] / least[name, bf16]) for bf16 in (False, True)]
        lines.append(f"{name:24} " + " ".join(f"{value:6.2f} ({factor:.1f} x)" for value, factor in cells))
    sys.stdout.write("\n".join(lines) + f"\n{Path(__file__).stem}: {vars(args)}\n")


if __name__ == "__main__":
    main()
