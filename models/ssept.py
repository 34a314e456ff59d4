"""SSE-PT: personalised transformer with stochastic shared embeddings (Wu et al., RecSys 2020, arXiv:1908.05435).

SASRec on item vectors that are concatenated with the user's vector. Differs from the paper in these places:
- a score <[h_i; h_u], [e_i; u]> is computed as the inner product of [h_i, <h_u, u>] with [e_i, 1], so that item vectors
  are the same for all users. The last summand changes neither rankings nor softmax losses;
- only items of the input are replaced at random; the code also replaces targets and negatives. As in the code, the
  options are probabilities of keeping an item or user;
- user 0, the unknown user, is drawn as a replacement as often as any other, which trains the vector of new users;
- the differences that sasrec.py lists apply as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seqrec.models.base import PAD, Batch, Catalogue, SequenceModel, require
from seqrec.models.layers import INIT_STD, AttentionOptions, Dropout, attention_bias, initialise, run_blocks
from seqrec.models.sasrec import Block


@dataclass(frozen=True, kw_only=True)
class SSEPTOptions(AttentionOptions):
    """Options of SSE-PT; blocks are d_model + d_user wide."""

    d_user: int = 16  # width of user vectors
    keep_item: float = 0.9  # training: probability of keeping an item instead of drawing a random one
    keep_user: float = 0.08  # training: the same for users

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "d_user")
        require(0 <= self.keep_item <= 1, "keep_item must be between 0 and 1")
        require(0 <= self.keep_user <= 1, "keep_user must be between 0 and 1")

    @property
    def block_width(self) -> int:
        return self.d_model + self.d_user


def shared(index: Tensor, number: int, keep: float, first: int = 1) -> Tensor:
    """Replace each entry except 0, with probability 1 - `keep`, by a random one from `first` to `number`."""
    drawn = torch.randint(first, number + 1, index.shape, device=index.device)
    replaced = (torch.rand(index.shape, device=index.device) >= keep) & (index != 0)
    return torch.where(replaced, drawn, index)


class SSEPT(SequenceModel):
    """Causal self-attention over a user's items, each concatenated with the user."""

    Options = SSEPTOptions
    options: SSEPTOptions
    objectives = frozenset({"causal", "last"})
    always_reads = frozenset({"user"})
    biased = True
    reads_events = True

    def __init__(self, options: SSEPTOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.items = nn.Embedding(catalogue.num_items + 1, options.d_model, padding_idx=PAD)
        self.users = nn.Embedding(catalogue.num_users + 1, options.d_user)
        self.positions = nn.Parameter(torch.empty(options.length, options.block_width).normal_(std=INIT_STD))
        self.dropout = Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.block_width)
        initialise(self)
        with torch.no_grad():
            self.users.weight[0] = 0

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        length = batch.items.shape[1]
        bias_BLL = attention_bias(batch.items, causal=True)
        items_BL, user_B = self._stochastic(batch)
        user_B1U = self.users(user_B).unsqueeze(1)
        joined_BLD = torch.cat([self.items(items_BL), user_B1U.expand(-1, length, -1)], -1)
        x_BLD = self.dropout(joined_BLD * joined_BLD.shape[-1] ** 0.5 + self.positions[-length:])
        x_BLD = run_blocks(self.blocks, x_BLD, bias_BLL, last=last)
        of_item, of_user = self.norm(x_BLD).split([self.options.d_model, self.options.d_user], -1)
        return torch.cat([of_item, (of_user * user_B1U).sum(-1, keepdim=True)], -1)

    def _stochastic(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return items (B, L) and user (B,), in training with stochastic shared embeddings (paper, section 3.2)."""
        if not self.training:
            return batch.items, batch.user
        items = shared(batch.items, self.catalogue.num_items, self.options.keep_item)
        return items, shared(batch.user, self.catalogue.num_users, self.options.keep_user, first=0)

    def item_vectors(self) -> Tensor:
        return torch.cat([self.items.weight, self.items.weight.new_ones(len(self.items.weight), 1)], 1)
