"""Tokens of real text a second: histories encoded by like length against padded ones, and against LongformerModel.

    python -m benchmarks.packing --data DIR

DIR holds items.parquet and sequences/ of a prepared dataset with text. A step is the forward and backward pass over a
batch of random test histories, every position of it. Padding is computed but not counted. All contestants have one size
and one dropout, and take turns; times are processor seconds, the least of the repeats. No encoder can be faster than
its linear layers alone over the real tokens, the last row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from benchmarks import longformer
from benchmarks.meter import machine, markdown
from seqrec.artifacts import ITEMS
from seqrec.data import item_tokens, sequences
from seqrec.models.recformer import Recformer
from seqrec.training import loop

LENGTH = 50  # events of a history
WORDS = 8_000  # learnt from the items' text


def histories(data: Path, number: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tokens of the catalogue, and random test histories (B, L), left-padded."""
    prepared = sequences.load(data / "sequences")
    texts = item_tokens.read_texts(data / ITEMS, sequences.read_vocabulary(data / "sequences")[0], ())
    tokens = item_tokens.tokenise(texts, item_tokens.train_tokenizer([texts], WORDS), 32)
    cases = sequences.cases(prepared, "test")
    drawn = torch.randperm(len(cases), generator=torch.Generator().manual_seed(0))[:number]
    return tokens, sequences.window(prepared, cases.user[drawn], cases.position[drawn], LENGTH).items


def parts(model: Recformer, items_BL: Tensor) -> list[tuple[Tensor, int]]:
    """Return the histories that `model` encodes together, each time with the tokens of the longest one."""
    pieces, widths, _ = model._pieces(items_BL)
    return [(items_BL[piece], width) for piece, width in zip(pieces, widths, strict=True)]


def linear_layers(args: argparse.Namespace) -> nn.ModuleList:
    """Return the linear layers that every token passes, of each block."""
    d = args.width
    pairs = [(d, 3 * d), (d, d), (d, 4 * d), (4 * d, d)]
    return nn.ModuleList(nn.ModuleList(nn.Linear(*pair) for pair in pairs) for _ in range(args.layers))


def linear_pass(blocks: nn.ModuleList, x_TD: Tensor) -> Tensor:
    """Return what is left of tokens after the linear layers alone."""
    for mix, join, inner, outer in blocks:  # type: ignore[misc]
        x_TD = outer(inner(join(mix(x_TD)[:, : x_TD.shape[1]])))
    return x_TD


def main() -> None:
    """Compare, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    defaults = {"tokens": 512, "batch": 16, "piece": 1024, "layers": 6, "width": 256, "heads": 4, "repeats": 2}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loop.keep_freed_memory()
    sys.stdout.write(compare(args) + "\n")


def compare(args: argparse.Namespace) -> str:
    """Return the table."""
    tokens, items_BL = histories(args.data, args.batch)
    other = longformer.source(args, 0.1).train()

    def ours(piece_tokens: int, pooling: str) -> Recformer:
        """Every position is computed for the mean of them."""
        options = {"length": LENGTH, "piece_tokens": piece_tokens, "pooling": pooling}
        return longformer.ours(args, other, 0.1, tokens, **options).train()

    padded, packed = ours(args.batch * args.tokens, "mean"), ours(args.piece, "mean")
    summary = ours(args.piece, "cls")
    whole, pieces = parts(padded, items_BL), parts(packed, items_BL)
    real = sum(int(packed.flatten(*part).real_BT.sum()) for part in pieces)

    def theirs(of_batch: Sequence[tuple[Tensor, int]]) -> Tensor:
        texts = [packed.flatten(*part) for part in of_batch]
        return torch.stack([longformer.theirs(other, text)[text.real_BT].sum() for text in texts]).sum()

    linear = linear_layers(args)
    steps: dict[str, tuple[Callable[[], Tensor], nn.Module]] = {
        "LongformerModel, padded": (lambda: theirs(whole), other),
        "LongformerModel, by length": (lambda: theirs(pieces), other),
        "ours, padded": (lambda: padded.encode(items_BL), padded),
        "ours, by length": (lambda: packed.encode(items_BL), packed),
        "ours, by length, [CLS] alone": (lambda: summary.encode(items_BL), summary),
        "linear layers alone": (lambda: linear_pass(linear, torch.randn(real, args.width)), linear),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.repeats + 1):  # the first one warms up
        for name, measured in times.items():
            measured.append(longformer.seconds(*steps[name], bf16=False))
    least = {name: min(measured[1:]) for name, measured in times.items()}
    rows = [
        (name, f"{real / value:,.0f}", *(f"{least[base] / value:.2f}" for base in list(steps)[:2]))
        for name, value in least.items()
    ]
    computed = [sum(len(items) * width for items, width in of_batch) for of_batch in (whole, pieces)]
    facts = (
        f"{machine(1)}; {args.layers} layers x {args.width}, {args.batch} histories of {real} tokens together, "
        f"{computed[0]} with padding, {computed[1]} in {len(pieces)} pieces of like length"
    )
    return facts + "\n\n" + markdown(("encoder", "tokens/s", "x Longformer, padded", "x Longformer, by length"), rows)


if __name__ == "__main__":
    main()
