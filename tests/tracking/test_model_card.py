from dataclasses import asdict

from support import FACTS, make_model

from seqrec.artifacts import read_json
from seqrec.config import CountsConfig
from seqrec.tracking.model_card import model_card
from seqrec.tracking.registry import LONGEST
from seqrec.training.checkpoint import save_model

SPLIT = {
    "dataset": "toy",
    "protocol": "LOO-full",
    "rule": "last event for test, the one before it for validation",
    "counts": {"users": 1234, "items": 30, "events": 56789, "train": 54321},
    "input_sha256": "a" * 64,
    "split_sha256": "b" * 64,
}
SOURCE = {"source": "shop", "licence": "CC BY 4.0", "homepage": "https://example.org/"}
METRICS = {
    "filter_seen": 1.0,
    "valid/ndcg@10": 0.25,
    "valid/ndcg@10/low": 0.2,
    "valid/ndcg@10/high": 0.3,
    "test/ndcg@10": 0.125,
    "test/ndcg@10/low": 0.1,
    "test/ndcg@10/high": 0.15,
    "test/coverage@10": 0.5,
}


def written(folder, architecture, config=(), **options):
    card = {**FACTS, "model": "mine", "fingerprint": "f" * 32, "config": dict(config)}
    save_model(folder, make_model(architecture, **options), card, {})
    return read_json(folder / "config.json")


def test_a_card_says_what_it_is_its_data_licence_split_metrics_settings_and_hashes(tmp_path):
    card = written(tmp_path, "tisasrec", {"seed": 7, "learning_rate": 0.003})

    text = model_card(card, METRICS, SPLIT, SOURCE)

    for fact in (
        "# mine on toy",
        "TiSASRec",
        "events of a history; also reads the times of events",
        f"{card['parameters']:,} parameters",
        "shop <https://example.org/>: 1,234 users, 30 items, 56,789 events, 54,321 for training",
        "licence: CC BY 4.0",
        "LOO-full: last event for test",
        "| NDCG@10 | 0.2500 [0.2000, 0.3000] | 0.1250 [0.1000, 0.1500] |",
        "| share of the catalogue that is recommended to at least one user |  | 0.5000 |",
        "`seed: 7`, `learning_rate: 0.003`",
        card["weights_sha256"],
        "f" * 32,
        "a" * 64,
        "b" * 64,
        "Do not use it for decisions about people",
        "Not split by time",
    ):
        assert fact in text
    assert "rare one" not in text  # nothing was measured there
    assert "Not split by time" not in model_card(card, METRICS, SPLIT | {"protocol": "temporal"}, SOURCE)
    assert "licence: not stated" in model_card(card, METRICS, SPLIT, {"source": "x"})


def test_a_card_says_what_its_model_reads_besides_items_with_these_options(tmp_path):
    cards = (written(tmp_path, "rec_denoiser", backbone=backbone) for backbone in ("tisasrec", "sasrec"))
    times, nothing = (model_card(card, METRICS, SPLIT, SOURCE) for card in cards)

    assert "events of a history; also reads the times of events\n" in times
    assert "events of a history\n" in nothing


def test_every_architectures_card_fits_into_the_registry(tmp_path, architecture):
    card = written(tmp_path, architecture[0], {f"setting_{number}": 0.123456789 for number in range(29)})

    text = model_card(card, METRICS, SPLIT, SOURCE)

    assert len(text) < LONGEST
    assert text.endswith("expect lower accuracy online.")
    assert f"architecture `{architecture[0]}`" in text


def test_a_card_shows_the_counts_and_a_baseline_has_nothing_else(tmp_path):
    chosen = {**asdict(CountsConfig(alpha=0.5, events=30, ease=2.0)), "folds": [], "pairs": 4321, "sha256": "c" * 64}
    trained = written(tmp_path, "sasrec")
    baseline = trained | {"architecture": "constant", "parameters": 0, "options": {"length": 10}}

    for card in (trained, baseline):
        text = model_card(card | {"counts": chosen}, METRICS, SPLIT, SOURCE)
        assert "parameters and 4,321 counted pairs" in text
        assert "its counts read the last 200 events\n" in text  # as many as EASE does
        assert "`counts.alpha: 0.5`" in text
        assert "folds" not in text
        assert ("`length:" in text) == ("sees the last" in text) == (card is trained)
    text = model_card(baseline, METRICS, SPLIT, SOURCE)  # popularity, which has no counts
    assert "`constant`, 0 parameters\n" in text
    assert "## Settings\n\nnone\n" in text
