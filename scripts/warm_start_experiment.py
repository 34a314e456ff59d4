"""Does a model that starts from what it learnt of an earlier dump beat one that starts afresh, at equal epochs?

MovieLens-1M is cut in time: the earlier dump has the first 80 % of the events. A model is trained on it; the full log
is prepared so that it extends the earlier dump; then the same model is trained on that twice, warm and cold, for the
same number of epochs and with the same seed. `python scripts/warm_start_experiment.py --out runs/warm-start`
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from pathlib import Path

import polars as pl

from seqrec.artifacts import INTERACTIONS, ITEMS, SPLIT_CARD, read_json, sha256, write_json
from seqrec.config import EvaluateConfig, FinetuneConfig, IngestConfig, ModelConfig, PrepareConfig, PretrainConfig
from seqrec.stages.evaluate import evaluate
from seqrec.stages.finetune import finetune
from seqrec.stages.ingest import ingest
from seqrec.stages.prepare import prepare
from seqrec.stages.pretrain import pretrain

MODEL = "sasrec"
METRICS = ("valid/ndcg@10", "test/ndcg@10", "test/recall@10")


def split_dumps(raw: Path, old: Path, share: float) -> int:
    """Write the first `share` of the events in time to `old`; return the time of the cut."""
    events = pl.read_parquet(raw / INTERACTIONS)
    cut = int(events["timestamp"].quantile(share, "nearest") or 0)
    old.mkdir(parents=True, exist_ok=True)
    events.filter(pl.col("timestamp") < cut).write_parquet(old / INTERACTIONS)
    shutil.copyfile(raw / ITEMS, old / ITEMS)
    return cut


def prepared(folder: Path, **settings: str) -> Path:
    """Prepare the tables in `folder`, which come from a verified source, and return where the sequences are."""
    verdict = folder / "validation.json"
    write_json(verdict, {"success": True, "input_sha256": sha256(folder / INTERACTIONS)})
    config = PrepareConfig(**settings)  # type: ignore[arg-type]
    prepare(dataset="ml-1m", data=folder, validation=verdict, sequences=folder / "sequences", config=config)
    return folder / "sequences"


def trained(out: Path, sequences: Path, config: FinetuneConfig, length: int, champion: Path | None) -> dict[str, float]:
    """Train from `champion`, or afresh; return the test figures and those of each epoch."""
    options = {"d_model": 64, "layers": 2, "heads": 2, "dropout": 0.2, "length": length}
    shared = {"model": MODEL, "sequences": sequences, "initial": out / "initial", "state": out / "state"}
    architecture = ModelConfig(architecture=MODEL, options=options)
    first = PretrainConfig(seed=config.seed)
    pretrain(**shared, architecture=architecture, filter_seen=True, config=first, champion=champion)
    finetune(**shared, checkpoint=out / "finetuned", filter_seen=True, config=config)
    values = evaluate(
        model=MODEL, sequences=sequences, checkpoint=out / "finetuned", report=out / "report", config=EvaluateConfig()
    )
    history = (out / "finetuned" / "history.jsonl").read_text(encoding="utf-8").splitlines()
    epochs = [json.loads(line) for line in history]
    curve = {f"epoch {epoch['epoch']}": epoch["valid/ndcg@10"] for epoch in epochs if "valid/ndcg@10" in epoch}
    return {name: values[name] for name in METRICS} | curve


def main() -> None:
    """Run it, and write what came out to `--out`/result.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.8, help="of the events, in the earlier dump")
    parser.add_argument("--old-epochs", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--seed", type=int, default=42)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    out, raw, old = arguments.out, arguments.out / "new", arguments.out / "old"
    ingest(dataset="ml-1m", output=raw, downloads=out / "downloads", config=IngestConfig(source="ml-1m"))
    cut = split_dumps(raw, old, arguments.share)
    first = prepared(old)
    second = prepared(raw, extend=str(first))

    settings = {"learning_rate": 2e-3, "seed": arguments.seed, "patience": arguments.old_epochs}
    before = FinetuneConfig(epochs=arguments.old_epochs, eval_every=5, **settings)
    trained(out / "before", first, before, arguments.length, None)
    champion = out / "champion"
    shutil.copytree(out / "before" / "finetuned", champion, dirs_exist_ok=True)
    config = FinetuneConfig(epochs=arguments.epochs, **settings)
    results = {
        start: trained(out / start, second, config, arguments.length, champion if start == "warm" else None)
        for start in ("warm", "cold")
    }
    growth = read_json(second / SPLIT_CARD)["extends"]
    write_json(out / "result.json", {"cut": cut, "growth": growth, **results})
    logging.info("%s", json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
