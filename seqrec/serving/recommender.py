"""Recommendations for external ids: an engine, the catalogue's names, and what to do with odd requests.

This module and the ONNX engine import no torch, so that the service starts quickly and stays small.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from seqrec.artifacts import TOKENIZER
from seqrec.config import RegisterConfig
from seqrec.serving import rules
from seqrec.serving.rules import Floats, Items
from seqrec.training.saved import Saved

if TYPE_CHECKING:
    from seqrec.serving.torch_engine import TorchEngine
    from seqrec.training.checkpoint import Checkpoint

Best = tuple[list[float], list[int]]  # scores and numbers of items, best first
Known = Mapping[int, int]  # place in a history -> number of the item
PAD = 0  # as in models/base.py
POPULARITY = "popularity"  # `source` of an answer that no model gave
UNCOUNTED = 0.0  # best score of a baseline that has counted nothing after a history
CENTURY = 36_525 * 86_400.0  # times further apart count as this: differences of infinite ones are no numbers
REGISTERED = ("models:/", "runs:/")  # how MLflow's names of a model begin
CANDIDATES = 100  # or 10 k, where that is more: the best items, among which a list of other rules is chosen
MOST_CANDIDATES = 2_000
LONGEST = 1_000  # list that is chosen item by item


@dataclass(frozen=True, kw_only=True)
class Request:
    """Somebody's past, and what is wanted; every id is the data source's own."""

    history: Sequence[str]  # oldest first
    k: int = 10
    exclude: Sequence[str] | Set[str] = ()  # items not to show
    allow: Sequence[str] | Set[str] | None = None  # the only items to show; None = all
    filter: rules.Filter = field(default_factory=dict)  # attribute -> what an item to show must have
    boost: rules.Boost = field(default_factory=dict)  # attribute -> value -> how many times as likely
    quota: rules.Quota = field(default_factory=dict)  # attribute -> value -> items of the list that may have it
    diversity: float = 0.0  # 0 = the best items, up to 1 = items that differ, see `rules`
    explore: float = 0.0  # probability that a position shows a random candidate
    user: str | None = None
    times: Sequence[float] | None = None  # seconds UTC, one an event of `history`
    at: float | None = None  # seconds UTC of the request, for a model that reads it; None = now
    items_text: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # attributes of items never seen

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k must be at least 1, not {self.k}")
        if not 0 <= self.diversity <= 1:
            raise ValueError(f"diversity must be from 0 to 1, not {self.diversity}")
        if not 0 <= self.explore <= 1:
            raise ValueError(f"explore must be from 0 to 1, not {self.explore}")
        if self.explore and self.quota:
            raise ValueError("explore: a random item could break the quota; leave out explore or quota")
        if self.chosen and self.k > LONGEST:
            raise ValueError(f"k must be at most {LONGEST} with diversity, quota or explore, not {self.k}")
        if any(not 0 < factor < math.inf for values in self.boost.values() for factor in values.values()):
            raise ValueError("boost: every factor must be above 0")
        if any(limit < 0 for values in self.quota.values() for limit in values.values()):
            raise ValueError("quota: every limit must be at least 0")
        if self.times is not None and len(self.times) != len(self.history):
            raise ValueError(f"times: {len(self.times)} times for a history of {len(self.history)} events")
        if any(math.isnan(time) for time in (*(self.times or ()), self.at or 0.0)):
            raise ValueError("times and at: NaN is no time")
        for item_id, attributes in self.items_text.items():
            if not any(value.strip() for value in attributes.values()):
                raise ValueError(f"items_text: {item_id!r} has no text")

    @property
    def chosen(self) -> bool:
        """Whether the list is more than the best items."""
        return bool(self.diversity or self.quota or self.explore)

    @property
    def candidates(self) -> int:
        """How many of the best items the list is chosen from."""
        return min(max(CANDIDATES, 10 * self.k), MOST_CANDIDATES) if self.chosen else self.k

    @property
    def cost(self) -> float:
        """How long this takes: 1 is about 5 ms of one core, for SASRec with 1,700 items; see docs/operating.md."""
        ids = len(self.history) + len(self.exclude) + len(self.allow or ())
        cost = 0.05 + min(len(self.history), 200) / 400 + ids / 5_000 + self.k / 2_000
        cost += (_size(self.filter) + _size(self.boost) + _size(self.quota)) / 200
        if self.boost or self.quota:  # the model works for this list alone
            cost += 0.3
        if self.chosen:
            cost += 0.1 + self.k * (1 / 200 + self.candidates / 300_000 + _size(self.quota) / 100_000)
        if self.items_text:  # the model reads the texts
            characters = sum(len(text) for attributes in self.items_text.values() for text in attributes.values())
            cost += 3 + len(self.items_text) + characters / 20_000
        return cost


def _size(rule: Mapping[str, Any]) -> int:
    """Return how many values a rule names; an attribute counts as five more."""
    return sum(5 if isinstance(values, rules.NumberRange) else 5 + len(values) for values in rule.values())


@contextmanager
def located(place: str | Path, config: RegisterConfig | None = None) -> Iterator[Path]:
    """Yield the folder of a trained model.

    Args:
        place: the folder, or an address in MLflow (`models:/NAME@ALIAS`, `models:/NAME/VERSION`, `runs:/RUN_ID/NAME`),
            which is downloaded to a temporary folder.
        config: section `register`, which says where MLflow is; MLFLOW_TRACKING_URI wins.

    Raises:
        TrackingError: MLflow does not answer, or has no such model.
        ValueError: MLflow is not installed.
    """
    if not str(place).startswith(REGISTERED):
        yield Path(place)
        return
    with tempfile.TemporaryDirectory() as folder:
        _registry(place).fetch(str(place), Path(folder), config or RegisterConfig())
        try:
            yield Path(folder)
        except ValueError as error:  # about the folder, which the user does not know
            error.args = tuple(str(part).replace(folder, str(place)) for part in error.args)
            raise


def numbered(place: str, config: RegisterConfig) -> str:
    """Return `models:/NAME/VERSION` if `place` is the alias `models:/NAME@ALIAS` of a version, or else `place`.

    Raises:
        TrackingError: MLflow does not answer.
        ValueError: MLflow is not installed.
    """
    name, at, alias = place.removeprefix("models:/").partition("@")
    if not at or not place.startswith("models:/"):
        return place
    version = _registry(place).alias_version(name=name, alias=alias, config=config)
    return f"models:/{name}/{version}" if version else place


def _registry(place: str | Path) -> Any:
    """Import and return `seqrec.tracking.registry`, which takes seconds."""
    try:
        from seqrec.tracking import registry
    except ModuleNotFoundError as error:
        raise ValueError(f"{place}: {error.name} is not installed; name a folder, or install .[mlflow]") from error
    return registry


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The best items, and what was done to give any."""

    items: list[str]  # best first; fewer than `k` where the catalogue has no more
    scores: list[float]
    source: str  # name of the model, or `popularity` where the history held no known item
    unknown: int = 0  # events of the history that the model does not know
    notes: list[str] = field(default_factory=list)  # what else to know, for people
    titles: list[str] = field(default_factory=list)  # of `items`, as the model knows them; empty where it has none


class Histories(NamedTuple):
    """What an engine reads: a model's input, see `Batch` of models/base.py."""

    items: Items  # (B, L), left-padded with 0
    times: NDArray[np.float64]  # (B, L)
    user: Items  # (B,)


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What a model reads of a request."""

    events: int  # number of newest events
    times: bool
    from_request: bool  # whether times are relative to the request, see `Options` of models/base.py
    text: bool  # of items that it never saw
    attributes: Sequence[str] = ()  # of that text; none: all


class Engine(Protocol):
    """What finds the best items."""

    @property
    def reads(self) -> Reads:
        """What it reads of a request."""

    @property
    def weights(self) -> TorchEngine:
        """The engine that can also do everything else."""

    def best(self, past: Histories, hidden: Sequence[Items], wanted: Sequence[int]) -> list[Best]:
        """Return the best items but `hidden` of each history, as many as its `wanted`."""


class Recommender:
    """An engine that speaks in the source's item ids."""

    def __init__(
        self,
        engine: Engine,
        item_ids: Sequence[str],
        counts: NDArray[Any],
        user_ids: Sequence[str],
        *,
        filter_seen: bool,
        name: str = "model",
        gap: float = 86_400.0,
        tokenizer: str = "",
        titles: Mapping[str, str] | None = None,
    ) -> None:
        self.engine, self.item_ids, self.filter_seen = engine, item_ids, filter_seen
        self.name, self.gap, self.tokenizer, self.titles = name, gap, tokenizer, titles or {}
        self.items = {item_id: item for item, item_id in enumerate(item_ids, start=1)}
        self.users = {user_id: user for user, user_id in enumerate(user_ids, start=1)}
        self.counts = counts.astype(np.float32)
        self.attributes = rules.Attributes()

    @classmethod
    def load(cls, place: str | Path, config: RegisterConfig | None = None) -> Recommender:
        """Load weights, card, vocabulary with titles, and users from a place, see `located`; run no code of it.

        Raises:
            ValueError: a file is not the one that the card was written for.
        """
        from seqrec.training.checkpoint import load_checkpoint  # imports torch

        with located(place, config) as folder:
            return cls.from_checkpoint(load_checkpoint(folder))

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Recommender:
        """Return the recommender of a checkpoint."""
        from seqrec.serving.torch_engine import TorchEngine

        return cls.of(checkpoint, TorchEngine(checkpoint.model, checkpoint.count_term))

    @classmethod
    def of(cls, saved: Saved, engine: Engine) -> Recommender:
        """Return the recommender that answers with `engine` for a saved model."""
        return cls(
            engine,
            saved.item_ids,
            saved.item_counts,
            saved.users["user_id"].to_pylist(),
            filter_seen=saved.card["filter_seen"],
            name=saved.card["model"],
            gap=saved.card["median_gap"],
            tokenizer=saved.files.get(TOKENIZER, b"").decode(),
            titles=saved.titles,
        )

    @property
    def events(self) -> int:
        """Number of newest events that a recommendation reads."""
        return self.engine.reads.events

    def recommend(self, history: Sequence[str], k: int = 10, **wanted: Any) -> Answer:
        """Return the answer to one request; `wanted` are further fields of `Request`. See `answer`."""
        return self.answer([Request(history=history, k=k, **wanted)])[0]

    def similar(self, item_id: str, k: int = 10) -> Answer:
        """Return the `k` items whose vectors have the largest cosine with an item's, and the cosines.

        A baseline that only counts has no vectors: its answer is what it recommends after the item alone.

        Raises:
            KeyError: the item is unknown.
        """
        item = self.items[item_id]
        vector_VD = rules.unit(self.engine.weights.vectors)
        if vector_VD.shape[1] == 0:
            return self.recommend([item_id], k, exclude=[item_id])
        best = best_of(vector_VD @ vector_VD[item], [item], min(k, len(self.item_ids) - 1))
        return self._named(*best, source=self.name)

    def popular(self, k: int = 10) -> Answer:
        """Return the `k` items with the most events in training, and how many."""
        best = best_of(self.counts.copy(), rules.NONE, min(k, len(self.item_ids)))
        return self._named(*best, source=POPULARITY)

    def search(self, text: str, k: int = 10) -> list[str]:
        """Return `k` items at most: the one of this id, then those whose title or id holds `text`, in any case."""
        wanted = text.casefold()
        holding = (i for i in self.item_ids if i != text and wanted in (self.titles.get(i) or i).casefold())
        return [*([text] if text in self.items else []), *itertools.islice(holding, k)][:k]

    def _named(self, scores: list[float], items: Sequence[int], source: str, **facts: Any) -> Answer:
        """Return the answer that shows these items under their ids and titles."""
        item_ids = [self.item_ids[item - 1] for item in items]
        titles = [self.titles.get(item_id, "") for item_id in item_ids]
        return Answer(items=item_ids, scores=scores, source=source, titles=titles, **facts)

    def check(self, request: Request) -> None:
        """Raise ValueError where this model cannot answer `request`."""
        for rule in ("filter", "boost", "quota"):
            self.attributes.check(rule, getattr(request, rule))
        if not request.items_text:
            return
        if not (self.engine.reads.text and self.tokenizer):
            raise ValueError(f"items_text: {self.name} cannot read new text; use Recformer with its {TOKENIZER}")
        if known := request.items_text.keys() & self.items.keys():
            raise ValueError(f"items_text: the model already knows the item {min(known)!r}")
        if names := self.engine.reads.attributes:
            for item_id, given in request.items_text.items():
                if not any(given.get(name, "").strip() for name in names):
                    raise ValueError(f"items_text: {item_id!r} has none of the model's attributes: {', '.join(names)}")

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """Answer requests together, in one pass of the model; nobody's answer depends on the others.

        Unknown items are skipped and counted, an unknown user is user 0, and a history without a known item gets the
        most popular items, scored by their train events. Items of the history are left out if the model was
        evaluated so. Times that are missing are taken to lie the training data's median gap apart. Items of which a
        request brings the text are candidates of that request, and may be in its history.

        Raises:
            ValueError: see `check`.
        """
        for request in requests:
            self.check(request)
        answers = iter(self._answer([request for request in requests if not request.items_text]))
        return [
            self._grown(request.items_text)._answer([request])[0] if request.items_text else next(answers)
            for request in requests
        ]

    def _grown(self, items_text: Mapping[str, Mapping[str, str]]) -> Recommender:
        """Return this recommender with more items, which it knows from their text alone."""
        other = copy.copy(self)
        other.engine = self.engine.weights.grown(items_text, self.tokenizer)
        other.item_ids = [*self.item_ids, *items_text]
        other.items = self.items | {item_id: len(self.item_ids) + n for n, item_id in enumerate(items_text, start=1)}
        other.titles = {**self.titles, **{item_id: text.get("title", "") for item_id, text in items_text.items()}}
        other.attributes = self.attributes.grown(list(items_text.values()))
        other.counts = np.pad(self.counts, (0, len(items_text)))
        return other

    def _answer(self, requests: Sequence[Request]) -> list[Answer]:
        known = [self.known(request) for request in requests]
        hidden = [self._hidden(*each) for each in zip(requests, known, strict=True)]
        wanted = [min(request.candidates, len(self.item_ids)) for request in requests]
        best: dict[int, Best] = {}
        plain = [n for n, own in enumerate(known) if own and not requests[n].boost]
        if plain:
            past = self.histories([requests[n] for n in plain], [known[n] for n in plain])
            found = self.engine.best(past, [hidden[n] for n in plain], [wanted[n] for n in plain])
            best |= zip(plain, found, strict=True)
        answers = []
        for n, request in enumerate(requests):
            scored, candidates = known[n], best.get(n)
            if candidates and candidates[0][0] == UNCOUNTED:
                scored, candidates = {}, None
            if candidates is None:
                scored, candidates = self._ranked(request, scored, hidden[n], wanted[n])
            answers.append(self._answered(request, known[n], scored, hidden[n], candidates))
        return answers

    def _ranked(self, request: Request, known: Known, hidden: Items, k: int) -> tuple[Known, Best]:
        """Return the best `k` items of one request, boosted, whatever engine answers the others.

        Beside them is what the scores follow from: `known`, or nothing if they are those of popularity.
        """
        log_V = self.attributes.log_factors(request.boost, 1 + len(self.item_ids))
        if known:  # scores are logarithms of what is proportional to a probability
            score_V = self.engine.weights.scores(self.histories([request], [known]))[0]
            score_V[PAD] = score_V[hidden] = -np.inf
            if score_V.max() != UNCOUNTED:
                return known, best_of(score_V + log_V, hidden, k)
        return {}, best_of(self.counts * np.exp(log_V), hidden, k)

    def _answered(self, request: Request, known: Known, scored: Known, hidden: Items, best: Best) -> Answer:
        """Return the answer: the best items, or the list that the request chooses among them.

        `scored` is what the scores follow from: `known`, or nothing if they are those of popularity.
        """
        if request.chosen:
            chosen = self._chosen(request, best)
            if request.quota and len(chosen[1]) < request.k and len(best[1]) < len(self.item_ids):
                _, everything = self._ranked(request, scored, hidden, len(self.item_ids))
                chosen = self._chosen(replace(request, diversity=0.0), everything)
            best = chosen
        shown = [(score, item) for score, item in zip(*best, strict=True) if score > float("-inf")][: request.k]
        notes = []
        if not known:
            what = "has no known item" if request.history else "is empty"
            notes.append(f"the history {what}: these are the most popular ones")
        elif not scored:
            notes.append(f"{self.name} has counted nothing after this history: these are the most popular items")
        elif self.engine.reads.times and request.times is None:
            notes.append(
                f"times not given: events are assumed to be {self.gap:g} s apart, the median of the training data"
                + (", and `at` is not read" if request.at is not None else "")
            )
        if request.diversity and not self.engine.weights.vectors.shape[1]:
            notes.append(f"diversity has no effect: {self.name} has no vectors of items")
        return self._named(
            [score for score, _ in shown],
            [item for _, item in shown],
            source=self.name if scored else POPULARITY,
            unknown=len(request.history) - len(known),
            notes=notes,
        )

    def _chosen(self, request: Request, best: Best) -> Best:
        """Return the items that a request's quota, diversity and exploration choose among candidates."""
        score_N, item_N = np.array(best[0], np.float32), np.array(best[1], np.int64)
        shown_N = score_N > -np.inf
        score_N, item_N = score_N[shown_N], item_N[shown_N]
        limits = self.attributes.limits(request.quota, item_N)
        vector_ND = self.engine.weights.vectors[item_N] if request.diversity else np.zeros((len(item_N), 0), np.float32)
        chosen = rules.most_relevant_and_diverse(score_N, vector_ND, request.k, request.diversity, limits)
        places = rules.explored(chosen, len(item_N), request.explore, random.Random())
        return score_N[places].tolist(), item_N[places].tolist()

    def explain(self, request: Request, item_id: str) -> list[float]:
        """Return, for each event of the history, what it adds to the score of an item.

        That is by how much the model's part drops when the event is left out, see `attribution.leave_one_out`, plus the
        event's own share of the counts. Unknown events, and those that the model does not see, have 0.

        Raises:
            ValueError: the item is unknown.
        """
        if request.items_text:
            return self._grown(request.items_text).explain(replace(request, items_text={}), item_id)
        if item_id not in self.items:
            raise ValueError(f"item: {item_id!r} is unknown")
        known = self.known(request)
        drops = [0.0] * len(request.history)
        if known:
            past = self.histories([request], [known], events=len(known))
            found = self.engine.weights.drops(past, self.items[item_id])
            for place, drop in zip(known, found, strict=True):
                drops[place] = drop
        return drops

    def known(self, request: Request) -> Known:
        """Return place and number of each item of the history that the model knows."""
        numbers = map(self.items.get, request.history)
        return {place: item for place, item in enumerate(numbers) if item is not None}

    def histories(self, requests: Sequence[Request], known: Sequence[Known], events: int = 0) -> Histories:
        """Return the newest `known` events of each history, at most `events`; 0: as many as the engine reads."""
        recent = [[*own.items()][-(events or self.events) :] for own in known]
        items_BL = np.zeros((len(requests), max(map(len, recent))), np.int64)
        times_BL = np.zeros(items_BL.shape)
        now = time.time()
        for row, (request, own) in enumerate(zip(requests, recent, strict=True)):
            first = items_BL.shape[1] - len(own)
            items_BL[row, first:] = [item for _, item in own]
            if self.engine.reads.times:
                times_BL[row, first:] = self._times(request, [place for place, _ in own], now)
        return Histories(items_BL, times_BL, np.array([self.users.get(r.user or "", 0) for r in requests]))

    def _times(self, request: Request, places: Sequence[int], now: float) -> list[float]:
        """Return seconds relative to the last event, or to the request where the model reads it."""
        asked = self.engine.reads.from_request
        if request.times is None:
            return [-self.gap * (before + asked) for before in range(len(places) - 1, -1, -1)]
        last = request.times[places[-1]]
        origin = max(last, now if request.at is None else request.at) if asked else last
        return [max(-CENTURY, min(CENTURY, float(request.times[i] - origin))) for i in places]

    def _hidden(self, request: Request, known: Known) -> Items:
        """Return the numbers of the items not to show."""
        named = {self.items.get(item_id, PAD) for item_id in request.exclude}
        hidden = np.array([*named.union(known.values() if self.filter_seen else ()) - {PAD}], np.int64)
        if request.allow is None and not request.filter:
            return hidden
        hidden_V = np.zeros(1 + len(self.item_ids), bool)
        if request.allow is not None:
            hidden_V[:] = True
            hidden_V[[self.items[item_id] for item_id in {*request.allow} & self.items.keys()]] = False
        for name, condition in request.filter.items():
            hidden_V |= ~self.attributes[name].meets(condition)
        hidden_V[hidden] = True
        return hidden_V.nonzero()[0]


def best_of(score_V: Floats, hidden: Items | list[int], k: int) -> Best:
    """Return the best items but `hidden`, of equal ones those with lower numbers first; `score_V` is written to."""
    score_V[PAD] = score_V[hidden] = -np.inf
    least = np.partition(score_V, -k)[-k]
    higher, equal = np.flatnonzero(score_V > least), np.flatnonzero(score_V == least)
    item_K = np.concatenate([higher, equal[: k - len(higher)]])
    item_K = item_K[np.argsort(-score_V[item_K], kind="stable")]
    return score_V[item_K].tolist(), item_K.tolist()
