"""The baselines stage: models without gradient training, which any other model must beat."""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seqrec.artifacts import (
    EPOCH_RECORDS,
    ITEMS,
    LEFT_OUT,
    REFIT,
    REFITTED,
    SPLIT_CARD,
    VOCABULARY,
    replaced,
    write_text,
)
from seqrec.config import CountsConfig, EvaluateConfig
from seqrec.config.checks import suggestion
from seqrec.config.ranges import Count
from seqrec.config.sections import EASE_ITEMS
from seqrec.counts import search
from seqrec.counts.search import Tables
from seqrec.data.sequences import Sequences, cases, median_gap, trained_until
from seqrec.data.sequences import load as load_sequences
from seqrec.evaluation import ranking
from seqrec.evaluation.metrics import SELECTION, TEST
from seqrec.models.base import Catalogue, Options
from seqrec.models.baselines import Constant
from seqrec.pipeline import BASELINES
from seqrec.stages.evaluate import evaluate
from seqrec.training.checkpoint import (
    Checkpoint,
    catalogue_files,
    counts_config,
    load_checkpoint,
    recounted,
    save_counts,
    save_model,
)
from seqrec.training.held_out import split_of
from seqrec.training.resume import fingerprint

logger = logging.getLogger(__name__)
SLOW = 3_000_000_000  # scores, half a minute of two cores
MARKOV = CountsConfig(values="tempered", decay="inverse", events=5)
STARTS = {
    "markov": MARKOV,
    "repeats": CountsConfig(values="repeats", decay="inverse", events=CountsConfig().ease_events, popularity=1e-4),
    "ease": CountsConfig(values="ease", rho=1.0, events=CountsConfig().ease_events),
    "pctm": CountsConfig(),
    "seqrules": CountsConfig(values="sum", decay="inverse"),
}
COUNTED = ("pctm", "seqrules")  # which read the same counts
AXES = {"repeats": search.REPEATS, "ease": search.DECAYS, "pctm": search.ALONE, "seqrules": search.RULES}


def baselines(
    *,
    sequences: Path,
    data: Path,
    artifacts: Path,
    reports: Path,
    config: EvaluateConfig,
    filter_seen: bool = True,
    ease_items: Count = EASE_ITEMS,
    names: Sequence[str] = BASELINES,
) -> dict[str, float]:
    """Compute `popularity`, `repeats`, `markov`, `ease`, `pctm` and `seqrules`, and evaluate them like any model.

    Popularity ranks by the number of training events. Repeats, which is computed where users have the same item several
    times and seen items are candidates, ranks a user's own items by the sum of the weights of their events, such as
    1 / age, and the others by popularity. Markov counts how often an item follows another within ten
    training events, weighted by 1 / distance and divided by the square root of the first item's total; the user's last
    five items vote, weighted by 1 / age. EASE is the best linear map from a user's items to these items, where no item
    explains itself. Deviations: of each item's weights the 256 largest are kept, the last 200 events vote, and the
    weight of older ones is chosen on validation. EASE is left out for large catalogues. PCTM (Petrov et al., RecSys
    2026) is the count term with alpha 1. Deviations: the values are chosen on validation from one grid, the history has
    ten events, and events have weights rho^j; the paper uses a grid per dataset and two kinds of weights. Sequential
    Rules (Ludewig and Jannach, UMUAI 2018) sum distance weights without smoothing, and the newest events vote with
    decaying weights. As in Petrov et al., rules can be scaled by the rarity of their source. Their settings are chosen
    on validation.

    Args:
        sequences: folder of the prepared dataset.
        data: folder of the ingested tables, for the titles of the items.
        artifacts: output folder; `NAME/finetuned` holds each baseline as a model.
        reports: output folder, with a folder for each baseline.
        config: section `evaluate`.
        filter_seen: whether past items are removed from the candidates.
        ease_items: largest catalogue for which EASE is computed.
        names: baselines to compute, separated by commas.

    Raises:
        ValueError: a name is unknown; the split has no validation or no test cases.
    """
    for name in names:
        if name not in BASELINES:
            raise ValueError(f"--names: no baseline {name}{suggestion(name, BASELINES)}")
    prepared = load_sequences(sequences)
    numbers = {split: len(cases(prepared, split)) for split in ("valid", "test")}
    for split, number in numbers.items():
        if not number:
            raise ValueError(
                f"the {split} split has no cases: check prepare.protocol, prepare.{split}_share, "
                "prepare.sample_users and the k-core; under temporal, prepare.filter_on: all keeps new items"
            )
    if (most := max(numbers.values())) * prepared.num_items > SLOW:
        logger.warning(
            "ranking takes long: %s cases x %s items for each baseline, and for each model after every epoch; "
            "prepare.max_cases: 10000 ranks a sample",
            f"{most:,}",
            f"{prepared.num_items:,}",
        )
    values, tables = {}, Tables.of(prepared)
    for name in names:
        folder = artifacts / name / "finetuned"
        for place in (folder, reports / name):
            shutil.rmtree(place, ignore_errors=True)  # may be of other data
            place.mkdir(parents=True)
        if reason := _why_left_out(name, prepared, filter_seen, ease_items):
            for place in (folder, reports / name):
                write_text(place / LEFT_OUT, reason)  # DVC tracks the folder, and warns of empty ones
            continue
        began = time.monotonic()
        files = catalogue_files(sequences, data / ITEMS)
        write(name, tables, sequences, folder, files, filter_seen=filter_seen)
        if config.refit != "none":
            rewrite(sequences, load_checkpoint(folder), folder / REFITTED, until=config.refit)
        metrics = evaluate(
            model=name,
            sequences=sequences,
            checkpoint=folder,
            report=reports / name,
            config=config,
            filter_seen=filter_seen,
        )
        values[f"{name}/{TEST}"] = metrics[TEST]
        logger.info("%s: %s %.4f, %.0f s", name, SELECTION, metrics[SELECTION], time.monotonic() - began)
    return values


def _why_left_out(name: str, data: Sequences, filter_seen: bool, ease_items: int) -> str:
    """Return the reason why a baseline is left out, or nothing."""
    reason = ""
    if name == "ease" and data.num_items > ease_items:
        reason = f"ease is left out: {data.num_items} items are more than ease_items = {ease_items}"
        logger.warning(reason)
    if name == "repeats" and (filter_seen or not search.has_repeats(data)):
        reason = "repeats is left out: filter_seen removes past items from the candidates, or no user repeats one"
    return reason


def rewrite(sequences: Path, finetuned: Checkpoint, refitted: Path, *, until: str = "test") -> dict[str, float]:
    """Compute the baseline `finetuned` again on all parts of the split up to `until`, with the settings of its card.

    `until` is valid or test. The folder `refitted` receives the new baseline. Returns the seconds that it took.
    """
    card, prepared = finetuned.card, load_sequences(sequences)
    finetuned.check_catalogue(sequences, users=False)
    fitted = trained_until(prepared, prepared.valid_stop if until == "valid" else prepared.stop)
    vocabulary = recounted(finetuned.vocabulary, fitted.count)
    return write(
        card["model"],
        Tables(fitted),
        sequences,
        refitted,
        {**finetuned.files, VOCABULARY: vocabulary},
        filter_seen=card["filter_seen"],
        chosen=card["counts"],
        facts={REFIT: {"fingerprint": card["fingerprint"], "epochs": {}, "until": until}},
    )


def write(
    name: str,
    tables: Tables,
    sequences: Path,
    output: Path,
    files: Mapping[str, bytes],
    *,
    filter_seen: bool,
    chosen: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Compute a baseline on the training events of a dataset, and write it in the form of any trained model.

    Args:
        name: one of BASELINES.
        tables: count tables of the prepared dataset.
        sequences: its folder.
        output: folder that receives the model.
        files: vocabulary and users.
        filter_seen: whether seen items are left out.
        chosen: entry `counts` of a card, whose settings are taken; None: they are chosen on validation.
        facts: further entries of the card.

    Returns:
        The seconds that it took.
    """
    began, data = time.monotonic(), tables.data
    start, net = start_of(name, data), network(name, data)
    settings, entry = start, asdict(start) if start else {}
    if chosen:
        settings, entry = counts_config(chosen), dict(chosen)
    elif start and name in AXES:
        scorer = ranking.model_scorer(net.eval())
        axes = AXES[name]
        if name in COUNTED:
            tables.count_ahead(CountsConfig(), [axis for other in COUNTED for axis in AXES[other]])
        choice = search.choose(scorer, tables, data, filter_seen=filter_seen, start=start, axes=axes, alone=True)
        settings, entry = choice.values, choice.card()
    counts = tables.built(settings) if settings else None
    content = (name, filter_seen, entry, facts)
    card = {
        "model": name,
        "fingerprint": fingerprint(__name__, Constant.__module__, content, sequences / SPLIT_CARD),
        "seconds": time.monotonic() - began,
        "filter_seen": filter_seen,
        "median_gap": median_gap(data),
        "split": split_of(data.card),
        "history_sha256": hashlib.sha256(b"").hexdigest(),
        **(facts or {}),
    }
    with replaced(output) as folder:
        if counts is not None:
            card["counts"] = save_counts(folder, counts, entry)
        save_model(folder, net, card, files)
        write_text(folder / EPOCH_RECORDS, "")
    return {"seconds": card["seconds"]}


def start_of(name: str, data: Sequences) -> CountsConfig | None:
    """Return the settings of a baseline's count term before any are chosen; None for a baseline without one."""
    if name == "markov" and data.num_items <= EASE_ITEMS:  # so that its table keeps every pair
        return CountsConfig(**{**asdict(MARKOV), "targets": data.num_items})
    return STARTS.get(name)


def network(name: str, data: Sequences) -> Constant:
    """Return the network of a baseline: a score for each item, which is 0 where the count term gives all scores."""
    length = (STARTS.get(name) or CountsConfig()).events
    constant = Constant(Options(length=length), Catalogue(data.num_items, data.num_users, length))
    if name == "popularity":
        constant.score_V.copy_(data.count)
    return constant
