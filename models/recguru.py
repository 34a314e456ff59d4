"""RecGURU: generalised user representations (GURs) across two domains (Li et al., WSDM 2022, arXiv:2111.10093).

An encoder turns a history into a GUR, from which a decoder reconstructs the history. A discriminator learns to tell
from a GUR which of two domains its user is from, and the encoder learns to prevent that. Fine-tuning adds a recommender
that reads a history of the target domain together with its GUR. The first domain is the dataset; the second one is the
datasets in `sources`, whose items follow those of the dataset. Without `sources` there is no discriminator, as in the
paper's model for a single domain. Pre-training runs for all of `pretrain.epochs`: no metric says when the two domains
are alike and the histories still well reconstructed.

Differs from the paper's code in these places:
- no user is known to be in both domains; the code also pulls the two GURs of such users together;
- the adversarial loss is a cross-entropy whose gradient is reversed on its way to the encoder (Ganin & Lempitsky 2015),
  so that one optimiser trains everything at once; the code alternates five steps of a Wasserstein critic with one of
  the encoder, after training the autoencoder alone;
- the encoder is causal, so that one pass gives the GURs of all prefixes of a history. The recommender reads at each
  position the GUR of the events up to it; in the training of the code, the GUR includes the events to predict;
- a layer of a decoder adds a linear map of the GUR; attention over copies of the GUR, as in the code, equals that;
- positions are learnt and count back from the most recent event, and no end-of-sequence item is needed;
- domains count by their events in the reconstruction, and all items of both domains are candidates; the code takes the
  mean of each domain, with 30 sampled negatives;
- the losses of reconstruction and of the next item are those of the training settings, by default full softmax.

Shape suffixes, besides those of layers.py: Q query positions
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqrec.models.base import PAD, Batch, Catalogue, Objective, TaskLoss
from seqrec.models.bert4rec import BERT4RecOptions, Block
from seqrec.models.layers import Dropout, MultiHeadAttention, attention_bias, initialise, run_blocks
from seqrec.models.optional import TwoDomains


@dataclass(frozen=True, kw_only=True)
class RecGURUOptions(BERT4RecOptions):
    """Options of RecGURU; encoder, decoder and recommender have `layers` layers each."""

    objective: Objective = "causal"
    fixed_encoder: bool = True  # fine-tuning: only the reconstruction, not the next item, trains the encoder

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(2, "length")  # the decoder predicts an event from those before it


class DecoderBlock(nn.Module):
    """Self-attention, a GUR and a feed-forward network, each followed by a residual connection and layer norm."""

    def __init__(self, options: RecGURUOptions) -> None:
        super().__init__()
        d_model, d_inner = options.d_model, options.d_inner or 4 * options.d_model
        self.attention = MultiHeadAttention(d_model, options.heads, options.attention_dropout)
        self.norm_attention = nn.LayerNorm(d_model)
        self.from_gur = nn.Linear(d_model, d_model)
        self.norm_gur = nn.LayerNorm(d_model)
        self.inner = nn.Linear(d_model, d_inner)
        self.outer = nn.Linear(d_inner, d_model)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(options.dropout)

    def forward(self, x_BLD: Tensor, queries: slice, gur_BLD: Tensor, bias_BLL: Tensor) -> Tensor:
        """Return the block's output (B, Q, D) at the positions `queries`."""
        mixed_BQD = self.attention(x_BLD[:, queries], x_BLD, bias_BLL[:, queries])
        x_BQD = self.norm_attention(x_BLD[:, queries] + self.dropout(mixed_BQD))
        x_BQD = self.norm_gur(x_BQD + self.dropout(self.from_gur(gur_BLD[:, queries])))
        return self.norm(x_BQD + self.dropout(self.outer(F.gelu(self.inner(x_BQD)))))


class RecGURU(TwoDomains):
    """A recommender beside an autoencoder of histories, whose representations are alike in two domains."""

    Options = RecGURUOptions
    options: RecGURUOptions
    reads_events = True
    pretraining = "autoencoder"
    discriminator: nn.Sequential | None

    def __init__(self, options: RecGURUOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        d_model = options.d_model
        self.own_items = catalogue.num_items  # items with higher numbers are of the second domain
        self.items = nn.Embedding(catalogue.num_items + 1, d_model, padding_idx=PAD)
        self.positions = nn.Parameter(torch.empty(options.length, d_model).normal_(std=0.02))
        self.norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(options.dropout)
        self.encoder = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.decoder = nn.ModuleList(DecoderBlock(options) for _ in range(options.layers))
        self.recommender = nn.ModuleList(DecoderBlock(options) for _ in range(options.layers))
        initialise(self)
        self.discriminator = None
        self.enter("train")

    def add_domain(self, num_items: int) -> None:
        others = nn.Embedding(num_items, self.options.d_model)
        initialise(others)
        table = torch.cat([self.items.weight, others.weight]).detach()
        self.items = nn.Embedding.from_pretrained(table, freeze=False, padding_idx=PAD)
        self.catalogue = self.catalogue._replace(num_items=self.own_items + num_items)
        self.discriminator = discriminator(self.options.d_model)

    def drop_domain(self) -> None:
        table = self.items.weight[: self.own_items + 1].detach().clone()
        self.items = nn.Embedding.from_pretrained(table, freeze=False, padding_idx=PAD)
        self.catalogue = self.catalogue._replace(num_items=self.own_items)
        self.discriminator = None

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.recommender.requires_grad_(phase == "train")

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        x_BLD, bias_BLL = self._embed(batch.items)
        return self._recommend(x_BLD, self._encode(x_BLD, bias_BLL), bias_BLL, last=last)

    def _embed(self, items_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return an embedded history (B, L, D) and its causal attention bias (B, L, L)."""
        x_BLD = self.items(items_BL) + self.positions[-items_BL.shape[1] :]
        return self.dropout(self.norm(x_BLD)), attention_bias(items_BL, causal=True)

    def _encode(self, x_BLD: Tensor, bias_BLL: Tensor) -> Tensor:
        """Return the GURs of all prefixes of an embedded history (B, L, D)."""
        return run_blocks(self.encoder, x_BLD, bias_BLL)

    def _recommend(self, x_BLD: Tensor, gur_BLD: Tensor, bias_BLL: Tensor, *, last: bool = False) -> Tensor:
        """Return queries for the event after each position, or only after the last one."""
        gur_BLD = gur_BLD.detach() if self.options.fixed_encoder else gur_BLD
        return run_blocks(self.recommender, x_BLD, gur_BLD, bias_BLL, last=last)

    def training_loss(self, batch: Batch, task: TaskLoss) -> dict[str, Tensor]:
        """See `SequenceModel.training_loss`; the reconstruction of a history is a term in both stages."""
        if self.phase == "autoencoder":
            return self._autoencoder_loss(batch.items, task)
        x_BLD, bias_BLL = self._embed(batch.items)
        gur_BLD = self._encode(x_BLD, bias_BLL)
        following_BL = task(self._recommend(x_BLD, gur_BLD, bias_BLL))
        decoded_BLD = run_blocks(self.decoder, x_BLD, gur_BLD[:, -1:], bias_BLL)
        known_BP = task(decoded_BLD[:, :-1], skip_last=True)  # the last target is not in the GUR
        return {"task": following_BL.sum(), "reconstruction": known_BP.sum()}

    def _autoencoder_loss(self, items_BL: Tensor, task: TaskLoss) -> dict[str, Tensor]:
        """Return the terms of pre-training; here, histories end with the last target."""
        gur_BD = self._encode(*self._embed(items_BL[:, -self.options.length :]))[:, -1]
        x_BLD, bias_BLL = self._embed(items_BL[:, :-1])
        terms = {"reconstruction": task(run_blocks(self.decoder, x_BLD, gur_BD.unsqueeze(1), bias_BLL)).sum()}
        if self.discriminator is not None:
            logit_B = self.discriminator(reverse_gradient(gur_BD)).squeeze(1)
            terms["domain"] = domain_loss(logit_B.float(), items_BL[:, -1] <= self.own_items)
        return terms


def discriminator(d_model: int) -> nn.Sequential:
    """Return a network that maps a GUR to the logit of the first domain; its sizes are those of the paper's code."""
    widths = (d_model, 5 * d_model, 10 * d_model, 5 * d_model)
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        layers += [nn.Linear(inner, outer), nn.ReLU(), Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


def reverse_gradient(x: Tensor) -> Tensor:
    """Return `x`, whose gradient will change its sign."""
    return 2 * x.detach() - x


def domain_loss(logit_B: Tensor, own_B: Tensor) -> Tensor:
    """Return the sum of the mean binary cross-entropies of the two domains; a domain without rows adds nothing.

    Args:
        logit_B: for each row, the logit of its belonging to the first domain.
        own_B: whether each row belongs to the first domain.
    """
    value_B = F.softplus(torch.where(own_B, -logit_B, logit_B))
    first, second = (value_B[rows].sum() / rows.sum().clamp(min=1) for rows in (own_B, ~own_B))
    return first + second
