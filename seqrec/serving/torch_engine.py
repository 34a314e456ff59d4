"""The engine of a model's weights, run by torch: it answers every request, and any model has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from seqrec.analysis import attribution
from seqrec.counts.term import CountTerm
from seqrec.models.base import Batch, SequenceModel
from seqrec.models.optional import ReadsTokens
from seqrec.serving.recommender import Best, Histories, Reads, best_of
from seqrec.serving.rules import Floats, Items


class TorchEngine:
    """A trained model, and the count term of its scores if it has one; see `Engine`."""

    def __init__(self, model: SequenceModel, term: CountTerm | None = None) -> None:
        self.model, self.term = model.eval(), term
        self.item_vectors = model.item_vectors().detach().float()[: model.catalogue.num_items + 1]
        seen = model.options.history
        self.reads = Reads(
            events=max(seen, term.events) if term else seen,
            times="times" in model.needs,
            from_request=model.options.from_request,
            text=isinstance(model, ReadsTokens),
            attributes=getattr(model.options, "attributes", ()),
        )

    @property
    def weights(self) -> TorchEngine:
        """See `Engine.weights`."""
        return self

    @property
    def vectors(self) -> Floats:
        """The item vectors (V, D) without their bias, which says how popular an item is and not what it is like."""
        vector_VD: Floats = self.item_vectors.numpy()
        return vector_VD[:, :-1] if self.model.biased else vector_VD

    def best(self, past: Histories, hidden: Sequence[Items], wanted: Sequence[int]) -> list[Best]:
        """See `Engine.best`."""
        return [best_of(*row) for row in zip(self.scores(past), hidden, wanted, strict=True)]

    @torch.no_grad()
    def scores(self, past: Histories) -> Floats:
        """Return the scores (B, V) of all items, in an array of their own."""
        batch = as_batch(past)
        return self.of_queries(self.queries(batch), batch.items).numpy()

    def queries(self, batch: Batch) -> Tensor:
        """Return the queries (B, D) of histories."""
        return self.model(self.model.asked(self.model.seen(batch)), last=True)[:, 0].float()

    def of_queries(self, query_BD: Tensor, items_BL: Tensor) -> Tensor:
        """Return the scores (B, V) of all items, counts included."""
        score_BV: Tensor = query_BD @ self.item_vectors.T
        return score_BV if self.term is None else self.term.adder(items_BL)(score_BV, 0)

    def drops(self, past: Histories, item: int) -> list[float]:
        """Return what each event of one history adds to the score of an item, see `Recommender.explain`."""
        drop_BL = attribution.leave_one_out(self.model, as_batch(past), torch.tensor([item]), self.term)
        return drop_BL[0].tolist()

    def grown(self, items_text: Mapping[str, Mapping[str, str]], tokenizer: str) -> TorchEngine:
        """Return an engine with more items, which it knows from their text alone."""
        from tokenizers import Tokenizer

        from seqrec.data import item_tokens

        catalogue, options = self.model.catalogue, self.model.options
        assert isinstance(self.model, ReadsTokens)
        assert catalogue.tokens is not None
        texts = item_tokens.as_texts(list(items_text.values()), options.attributes)
        new = item_tokens.tokenise(texts, Tokenizer.from_str(tokenizer), options.attribute_tokens)
        size = catalogue.num_items + len(items_text)
        tokens = item_tokens.concatenate([catalogue.tokens, new])
        model = self.model.grown(catalogue._replace(num_items=size, tokens=tokens))
        return TorchEngine(model, self.term and self.term.grown(size + 1))


def as_batch(past: Histories) -> Batch:
    """Return histories as a model reads them."""
    return Batch(*map(torch.from_numpy, past))
