"""Search for the settings of a count term on validation: a small grid, one axis after the other.

With many cases, the settings with the best NDCG@10 are chosen. With few cases, too few targets are near the top for
that. Beside a model, the mean logarithm of all ranks then decides. Afterwards, NDCG@10 chooses the weight of popularity
again, because it moves the targets near the top and the others in opposite directions. Baselines always use NDCG@10:
they score all items without counts alike, so the ranks of such targets say nothing.

Settings chosen on validation cases make validation metrics too optimistic. The search is therefore repeated on each
half of the users, and in reported validation metrics each half is scored with the settings that the other half chose.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqrec.config import CountsConfig, FinetuneConfig, parse
from seqrec.counts.case_ranks import CaseRanks, remembered
from seqrec.counts.table import CountTable, count_all
from seqrec.counts.term import CountTerm, build, by_halves, counted, kernel, with_counts
from seqrec.data import sequences, ties
from seqrec.data.sequences import Cases, Sequences
from seqrec.evaluation import metrics, ranking
from seqrec.evaluation.metrics import FloatArray
from seqrec.evaluation.ranking import Scorer
from seqrec.models.base import SequenceModel

logger = logging.getLogger(__name__)
CASES = 4_000  # most validation cases to rank
SCORES = 60_000_000  # most scores of these cases: of catalogues with more than 15,000 items, fewer cases are ranked
LEAST = 500  # cases that are ranked even if they have more scores than that
LEAST_ALONE = 1_000  # the same for a baseline, which has fewer settings to try
FEW = 2_000  # with up to so many cases, ranks decide beside a model
PAIRS = 1 << 25  # maximum number of table entries that the cases read in total
ROUNDS = 2  # rounds over all axes
Axis = Sequence[Mapping[str, Any]]  # alternatives, each a change of one or more settings
AnyAxis = Axis | Callable[[CountsConfig], Axis]  # or what gives them for the settings found so far

SMOOTHING = (0.03, 0.1, 0.3, 1.0)  # tau / |I|
POPULARITY = (-0.4, -0.2, -0.1, -0.05, 0.0)  # lambda; more weight on popularity rarely helps
KERNELS: Axis = (
    {"kernel": "inverse", "window": 10},
    {"kernel": "inverse", "window": 20},
    {"kernel": "root", "window": 10},
    {"kernel": "0.7", "window": 10},
    {"kernel": "square", "window": 10},
)
RHO: Axis = [{"rho": rho} for rho in (0.2, 0.35, 0.5, 0.65, 0.8)]  # small ones where the last event decides alone
ALONE: Sequence[Axis] = (  # smoothing and popularity vary together, since smoothing sets the scale of the term
    [{"smoothing": tau, "popularity": weight} for tau in SMOOTHING for weight in POPULARITY],
    RHO,
    KERNELS,
)
RULES: Sequence[Axis] = (  # of Sequential Rules
    [{"kernel": kernel, "window": window} for kernel in ("inverse", "root", "square") for window in (10, 20)],
    [{"decay": decay} for decay in ("inverse", "root", "square", "0.65")],
    [{"values": values} for values in ("sum", "rare")],
)
ALPHA = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 20.0, 50.0)  # with the last, counts decide alone


def alphas(found: CountsConfig) -> Axis:
    """Return the alternatives of alpha; the weight of popularity keeps its ratio to counts that outweigh the model."""
    weight = found.popularity / max(1.0, found.alpha)
    return [{"alpha": alpha, "popularity": weight * max(1.0, alpha)} for alpha in ALPHA]


def popularities(found: CountsConfig) -> Axis:
    """Return the alternatives of the weight of popularity, larger beside counts that outweigh the model."""
    return [{"popularity": weight * max(1.0, found.alpha)} for weight in POPULARITY]


DECAYS: Sequence[Axis] = ([{"rho": rho} for rho in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)],)  # of EASE alone
REPEATS: Sequence[Axis] = ([{"decay": decay} for decay in ("inverse", "root", "square", "0.9", "0.7")],)  # alone
UNCHANGED = ("ease", "repeats")  # tables that no setting changes
WEIGHTS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)  # of a further term
FURTHER_DECAYS = {"ease": (1.0, 0.9, 0.8), "repeats": ("inverse", "root", "0.9", "0.7")}  # the first is the default
LAST_EVENT = CountsConfig(alpha=3.0, rho=0.2, kernel="square")  # counts in which the last event decides
SCALES: Sequence[AnyAxis] = (alphas, [{"smoothing": tau} for tau in SMOOTHING], RHO)
ADDED = (*SCALES, KERNELS, popularities)
VISITS = 0.1  # with a larger share of events at the time of the event before, pairs across times may count less
ACROSS: Mapping[str, Any] = {"across": 0.1}
AT_ONCE = ([ACROSS], *ADDED)
CERTAIN = 2.0  # standard errors by which that must be better


@dataclass(frozen=True)
class Choice:
    """The result of a search."""

    values: CountsConfig  # chosen on all users
    folds: tuple[CountsConfig, CountsConfig]  # for users of even index, chosen on those of odd index, and vice versa
    in_sample: float  # validation NDCG@10 of `values`, on the cases that they were chosen on
    cross_fitted: float  # validation NDCG@10 of `folds`, on the same cases

    def card(self) -> dict[str, Any]:
        """Return the choice as JSON."""
        folds = [asdict(fold) for fold in self.folds]
        found = {"in_sample": self.in_sample, "cross_fitted": self.cross_fitted}
        return {**asdict(self.values), "folds": folds, metrics.SELECTION: found}


def by_ndcg(rank_C: FloatArray) -> FloatArray:
    """Return NDCG@10 of each case."""
    return metrics.ndcg(rank_C, 10)


def by_rank(rank_C: FloatArray) -> FloatArray:
    """Return minus the logarithm of each rank."""
    return -np.log(rank_C)


def search(
    ranks_of: Callable[[CountsConfig], FloatArray],
    user: Tensor,
    starts: Sequence[CountsConfig],
    axes: Sequence[AnyAxis],
    again: CountsConfig | None = None,
    value: Callable[[FloatArray], FloatArray] = by_ndcg,
    errors: float = 0.0,
) -> Choice:
    """Return the settings with the best mean value on all users, and on each half of the users.

    A search by axes may end before the best settings; for all users, those of the halves are therefore rivals too.

    Args:
        ranks_of: function from settings to the rank of each case's target.
        user: user of each case.
        starts: initial settings for all users, for those of even index and for the others; they are kept unless others
            are better.
        axes: alternatives, tried axis by axis.
        again: initial settings of another search where the first one finds nothing better than its start.
        value: function from ranks to the value of each case.
        errors: standard errors by which others must be better than `starts`.
    """
    odd = (user % 2 == 1).cpu().numpy()

    @functools.cache
    def value_of(config: CountsConfig) -> FloatArray:
        return value(ranks_of(config))

    def best(start: CountsConfig, chosen: NDArray[np.bool_]) -> CountsConfig:
        found = _descend(value_of, start, axes, chosen)
        gain_C = (value_of(found) - value_of(start))[chosen]
        if errors and len(gain_C) and gain_C.sum() < errors * gain_C.std() * len(gain_C) ** 0.5:
            found = start
        if found != start or again is None:
            return found
        return max(found, _descend(value_of, again, axes, chosen), key=lambda config: _mean(value_of(config), chosen))

    found = best(starts[0], np.ones(len(odd), dtype=bool))
    folds = (best(starts[1], odd), best(starts[2], ~odd))
    if not len(user):  # no validation case has a history
        return Choice(found, folds, 0.0, 0.0)
    found = max([found, *folds], key=lambda config: float(value_of(config).mean()))
    cross_fitted = by_ndcg(np.where(odd, ranks_of(folds[1]), ranks_of(folds[0]))).mean()
    logger.debug("counts: tried %d settings on %d validation cases", value_of.cache_info().currsize, len(user))
    return Choice(found, folds, float(by_ndcg(ranks_of(found)).mean()), float(cross_fitted))


def drawn_cases(data: Sequences, tables: Tables, least: int = LEAST) -> Cases:
    """Return a random sample of the validation cases with a history, at least one, in their order.

    A large catalogue lowers the maximum number of cases, but not below `least`. Unless it is a dense matrix, the cases
    read at most PAIRS entries of the default table in total.
    """
    cases = sequences.cases(data, "valid")
    with_history = (cases.position > data.start.to(cases.position.device)[cases.user]).nonzero().squeeze(1)
    order = torch.randperm(len(with_history), generator=torch.Generator().manual_seed(0))
    drawn = with_history.cpu()[order[: min(CASES, max(least, SCORES // data.num_items))]]
    config = CountsConfig()
    term = tables.built(config)
    if not term.is_small:
        index = drawn.to(cases.user.device)
        recent = sequences.window(data, cases.user[index], cases.position[index], config.events).items.cpu()
        read = term.offsets.diff()[recent].sum(1).cumsum(0)
        drawn = drawn[: max(1, int((read <= PAIRS).sum()))]
    index = drawn.sort().values.to(cases.user.device)
    return Cases(user=cases.user[index], position=cases.position[index])


def _descend(
    value_of: Callable[[CountsConfig], FloatArray],
    start: CountsConfig,
    axes: Sequence[AnyAxis],
    chosen: NDArray[np.bool_],
) -> CountsConfig:
    """Return the best settings on the `chosen` cases; of equally good ones, the first."""
    best = start
    for _ in range(ROUNDS):
        before = best
        for axis in axes:
            changes = axis(best) if callable(axis) else axis
            rivals = [replace(best, **change) for change in changes]
            best = max([best, *rivals], key=lambda config: _mean(value_of(config), chosen))
        if best == before:
            break
    return best


def _mean(value_C: FloatArray, chosen: NDArray[np.bool_]) -> float:
    return float(value_C[chosen].mean()) if chosen.any() else 0.0


class Tables:
    """Count tables of one dataset by kernel, window and size, built on first use."""

    def __init__(self, data: Sequences) -> None:
        self.data = data
        self.tables: dict[Any, CountTable] = {}

    @staticmethod
    @functools.lru_cache(maxsize=1)
    def of(data: Sequences) -> Tables:
        """Return the tables of `data` that the stages of a process share; those of the last dataset are kept."""
        return Tables(data)

    def add_ease(self, stored: CountTerm | None) -> None:
        """Take the weights of EASE that a `stored` term of this dataset holds: they take minutes to compute."""
        ease = stored if stored is None or stored.kind == "ease" else stored.further.get("ease")
        if ease:
            self.tables.setdefault("ease", CountTable(ease.offsets, ease.targets, ease.values))

    def table(self, config: CountsConfig) -> CountTable:
        """Return the count table of `config`."""
        if (key := _key(config)) not in self.tables:
            self.tables[key] = counted(self.data, config)
        return self.tables[key]

    def count_ahead(self, start: CountsConfig, axes: Sequence[AnyAxis]) -> None:
        """Count for all kernels of the axes at once, which takes less than half the time of one after the other."""
        changes = [change for axis in axes if not callable(axis) for change in axis if "kernel" in change]
        tried = {_key(config): config for config in (replace(start, **change) for change in changes)}
        missing = {key: config for key, config in tried.items() if key not in self.tables}
        if missing:
            kernels = [kernel(config.kernel, config.window).tolist() for config in missing.values()]
            found = count_all(self.data, kernels, start.targets, start.across)
            self.tables.update(zip(missing, found, strict=True))

    def built(self, config: CountsConfig) -> CountTerm:
        """Return the count term of `config`; with alpha 0, it adds nothing."""
        return build(self.data, config if config.alpha else replace(config, popularity=0.0), self.table)

    def term(self, config: CountsConfig) -> CountTerm | None:
        """Return the count term of `config`, or None if it adds nothing."""
        return self.built(config) if config.alpha or config.further else None

    def scorer(self, base: Scorer, config: CountsConfig, device: torch.device) -> Scorer:
        """Return `base`, a scorer on `device`, with the count term of `config` added."""
        term = self.term(config)
        return with_counts(base, term and term.to(device))


def _key(config: CountsConfig) -> Any:
    """Return what the table of `config` depends on."""
    pairs = (config.kernel, config.window, config.across, config.targets)
    return config.values if config.values in UNCHANGED else pairs


def choose(
    base: Scorer,
    tables: Tables,
    data: Sequences,
    *,
    filter_seen: bool,
    start: CountsConfig,
    axes: Sequence[AnyAxis] = ADDED,
    again: CountsConfig | None = None,
    further: Sequence[str] = (),
    alone: bool = False,
) -> Choice:
    """Return the settings of the count term that improves `base` most; see `search` for `start`, `axes` and `again`.

    The `further` terms, ease and repeats, are tried one after the other with the best settings so far, and kept if they
    improve them. `alone` says that `base` is the constant of a baseline, not a model. `tables` are on the host, and
    `data` is on the device of the model.
    """
    tables.count_ahead(start, axes)
    cases, base = drawn_cases(data, tables, LEAST_ALONE if alone else LEAST), remembered(base)
    value = by_ndcg if alone or len(cases) > FEW else by_rank
    ranks = CaseRanks(base, data, cases, filter_seen=filter_seen)
    built = functools.lru_cache(maxsize=1)(tables.built)

    @functools.cache
    def ranks_of(config: CountsConfig) -> FloatArray:
        term = built(replace(config, alpha=1.0, popularity=0.0))
        return ranks(term, config.alpha, config.popularity if config.alpha else 0.0)

    found = search(ranks_of, cases.user, [start] * 3, axes, again, value)
    if not alone and has_visits(data):
        starts = [found.values, *found.folds]
        tables.count_ahead(replace(start, **ACROSS), AT_ONCE)
        found = search(ranks_of, cases.user, starts, AT_ONCE, value=value, errors=CERTAIN)
    if value is by_rank:
        found = search(ranks_of, cases.user, [found.values, *found.folds], [popularities])

    @functools.cache
    def by_weight(counts: CountsConfig, name: str, decay: Any) -> FloatArray:
        """Return the ranks (len(WEIGHTS), C) with a further term added to the scores with `counts`."""
        settings: dict[str, Any] = {name: 1.0, f"{name}_decay": decay}
        votes = tables.built(replace(counts, **settings).further[name])
        beside = CaseRanks(tables.scorer(base, counts, data.device), data, cases, filter_seen=filter_seen)
        return beside.weighted(votes, WEIGHTS)

    for name in further:

        def added(config: CountsConfig, name: str = name) -> FloatArray:
            without: dict[str, Any] = {name: 0.0, f"{name}_decay": FURTHER_DECAYS[name][0]}
            rank_WC = by_weight(replace(config, **without), name, getattr(config, f"{name}_decay"))
            return rank_WC[WEIGHTS.index(getattr(config, name))]

        axis = [{name: weight, f"{name}_decay": decay} for decay in FURTHER_DECAYS[name] for weight in WEIGHTS]
        found = search(added, cases.user, [found.values, *found.folds], [axis], value=value)
    return found


def fold_scorer(base: Scorer, tables: Tables, folds: Sequence[CountsConfig], device: torch.device) -> Scorer:
    """Return the scorer for validation: each half of the users is scored with the settings the other half chose."""
    even, odd = (tables.scorer(base, fold, device) for fold in folds)
    return by_halves(even, odd)


def has_visits(data: Sequences) -> bool:
    """Return whether many events have the time of the event before, in an order on which users agree."""
    counts = data.card["counts"]
    return counts["tied_events"] > VISITS * counts["events"] and ties.are_ordered(data)


def has_repeats(data: Sequences) -> bool:
    """Return whether a user has several training events with the same item."""
    user, item = sequences.train_events(data)
    return len(torch.unique(user * len(data.count) + item)) < len(user)


def for_model(
    model: SequenceModel, data: Sequences, config: FinetuneConfig, *, filter_seen: bool
) -> tuple[CountTerm | None, dict[str, Any]]:
    """Return the count term of a trained model, and its settings for the card; `config.counts` is not `none`.

    `data` is on the host; only training events are counted.
    """
    if not isinstance(config.counts, str):
        values = parse(CountsConfig, config.counts, "finetune.counts")
        values = values if values.alpha else replace(values, popularity=0.0)  # of which it is a part
        return Tables(data).term(values), asdict(values)
    device = next(model.parameters()).device
    data_on_device = data.to(device, resident=config.resident)
    tables, scorer = Tables.of(data), ranking.model_scorer(model.eval())
    ease = data.num_items <= config.ease_items
    if not ease:
        logger.info(
            "counts: EASE is not tried, because %d items are more than ease_items = %d",
            data.num_items,
            config.ease_items,
        )
    repeats = not filter_seen and has_repeats(data)
    choice = choose(
        scorer,
        tables,
        data_on_device,
        filter_seen=filter_seen,
        start=CountsConfig(alpha=0.0),
        again=LAST_EVENT,
        further=[name for name, tried in (("ease", ease), ("repeats", repeats)) if tried],
    )
    chosen = f"alpha = {choice.values.alpha:g} and ease = {choice.values.ease:g}"
    chosen += f" and repeats = {choice.values.repeats:g}" if repeats else ""
    of = "cross-fitted valid/ndcg@10 of cases with a history"
    logger.info("counts: chose %s; %s = %.4f", chosen, of, choice.cross_fitted)
    return tables.term(choice.values), choice.card()
