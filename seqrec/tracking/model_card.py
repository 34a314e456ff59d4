"""The model card of a registered version: description, data, metrics, intended use and limits."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from seqrec.config import CountsConfig, parse
from seqrec.models import UNTRAINED, architecture_of
from seqrec.models.base import SequenceModel

TABLE = {  # metric -> what it is
    "ndcg@10": "NDCG@10",
    "recall@10": "Recall@10",
    "mrr": "MRR",
    "ndcg@10/popularity=tail": "NDCG@10 if the next item is rare",
    "ndcg@10/popularity=cold": "NDCG@10 if the next item is not in the training data",
    "coverage@10": "share of the catalogue that is recommended to at least one user",
}
COUNTED = {  # counts of the split card -> words
    "users": "users",
    "items": "items",
    "events": "events",
    "train": "for training",
    "valid": "for validation",
    "test": "for test",
}
NEEDED = {  # needs of a model -> words
    "attributes": "the attributes of items",
    "text": "the text of items",
    "times": "the times of events",
    "user": "the user",
}
SUMMARIES = {  # of the baselines
    "popularity": "Popularity: every item's number of training events.",
    "markov": "How often an item followed one of the user's last five items.",
    "repeats": "The user's own past items, the newest first.",
    "ease": "EASE: the best linear map from a user's items to these items (Steck, WWW 2019, arXiv:1905.03375).",
    "pctm": "PCTM: smoothed counts of what followed the user's newest events (Petrov et al., RecSys 2026).",
    "seqrules": "Sequential Rules: counts of what followed the user's newest events (Ludewig and Jannach, UMUAI 2018).",
}
REFIT_NOTE = (
    " The test figures belong to weights that were refitted on the validation events. This version does not hold them."
)


def model_card(
    card: Mapping[str, Any], metrics: Mapping[str, float], split: Mapping[str, Any], source: Mapping[str, Any]
) -> str:
    """Return the card as Markdown, short enough for the registry.

    It is made from the settings file of the weights, the metrics that `evaluate` wrote, the split card, and the card
    that `ingest` wrote, which names the licence.
    """
    kind, counts = architecture_of(card["architecture"]), split["counts"]
    amounts = ", ".join(f"{counts[name]:,} {words}" for name, words in COUNTED.items() if name in counts)
    summary = (sys.modules[kind.__module__].__doc__ or kind.__name__).splitlines()[0]  # what it is, and the paper
    about = SUMMARIES.get(card["model"], summary)
    sizes, sha256 = card["catalogue"], split["input_sha256"]
    origin = " ".join(str(source[key]) for key in ("source", "category") if source.get(key))
    origin += f" <{source['homepage']}>" if source.get("homepage") else ""  # or a page takes the colon for its end
    untrained, counted = card["architecture"] in UNTRAINED, _chosen(card)
    settings = {} if untrained else {**card["options"], **card["config"]}
    settings |= {f"counts.{name}": value for name, value in counted.items()}
    read = f"{card['options']['length']} events of a history"
    kept = [f"sees the last {read}{_needs(kind, card['options'])}"] if not untrained else []
    if counted:
        kept.append(f"its counts read the last {_events(counted)} events")
    torch = card.get("versions", {}).get("torch", "unknown")
    parts = [
        f"# {card['model']} on {split['dataset']}",
        f"Ranks the items of one catalogue by how likely a user is to want them next. {about}",
        f"- architecture `{card['architecture']}`, {'; '.join([_size(card), *kept])}\n"
        f"- knows {sizes['num_items']:,} items and {sizes['num_users']:,} users",
        "## Data",
        f"- {origin}: {amounts} after the filters\n"
        f"- licence: {source.get('licence') or 'not stated'}\n"
        f"- SHA-256 of the table `{sha256}`",
        "## Split",
        f"- {split['protocol']}{': ' + split['rule'] if 'rule' in split else ''}\n"
        f"- SHA-256 of the split `{split['split_sha256']}`",
        "## Metrics",
        f"Ranked among the whole catalogue, past items {'left out' if metrics['filter_seen'] else 'included'}; 95 % "
        "intervals over users. This model was chosen by its validation figure, not by its test figures."
        + (REFIT_NOTE if metrics.get("refit") else ""),
        _table(metrics),
        "## Settings",
        ", ".join(f"`{key}: {value}`" for key, value in settings.items() if value not in ("", [], ())) or "none",
        "## Identity",
        f"- weights `{card['weights_sha256']}`\n- training `{card['fingerprint']}`, torch {torch}",
        "## Use and limits",
        _limits(split, sizes["num_items"]),
    ]
    return "\n\n".join(parts)


def _chosen(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the count term, as given or chosen on validation."""
    known = {field.name for field in fields(CountsConfig)}
    return {name: value for name, value in (card.get("counts") or {}).items() if name in known}


def _events(counts: Mapping[str, Any]) -> int:
    more = counts["ease_events"] if counts["ease"] or counts["repeats"] else 0
    return max(int(counts["events"]), int(more))


def _size(card: Mapping[str, Any]) -> str:
    pairs = (card.get("counts") or {}).get("pairs", 0)
    return f"{card['parameters']:,} parameters" + (f" and {pairs:,} counted pairs" if pairs else "")


def _needs(kind: type[SequenceModel], options: Mapping[str, Any]) -> str:
    needs = sorted(kind.needs_of(parse(kind.Options, options, "options")))
    return f"; also reads {', '.join(NEEDED.get(need, need) for need in needs)}" if needs else ""


def _table(metrics: Mapping[str, float]) -> str:
    rows = ["| | validation | test |", "|---|---|---|"]
    for name, text in TABLE.items():
        shown = [_value(metrics, f"{part}/{name}") for part in ("valid", "test")]
        if any(shown):
            rows.append(f"| {text} | {shown[0]} | {shown[1]} |")
    return "\n".join(rows)


def _value(metrics: Mapping[str, float], name: str) -> str:
    if name not in metrics:
        return ""
    low, high = metrics.get(f"{name}/low"), metrics.get(f"{name}/high")
    return f"{metrics[name]:.4f}" + (f" [{low:.4f}, {high:.4f}]" if low is not None and high is not None else "")


def _limits(split: Mapping[str, Any], items: int) -> str:
    lines = [
        "Use it to recommend items of this catalogue, and to compare models on this split. Do not use it for decisions "
        "about people, or beyond what the licence of the data allows.",
        f"It ranks these {items:,} items; a history without a known item gets the most popular ones. It repeats what "
        "the users of this log did, and favours popular items: see the rare items and the coverage in the table.",
    ]
    if split["protocol"] != "temporal":
        lines.append("Not split by time: training sees later events of other users; expect lower accuracy online.")
    return "\n".join(f"- {line}" for line in lines)
