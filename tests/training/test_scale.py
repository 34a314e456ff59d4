import numpy as np
import polars as pl
import pytest
from support import prepare_rows, synthetic_rows

from benchmarks import logs, mapped, peers, scale
from seqrec.data import sequences


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "BLOCK", 7_000)
    logs.write(tmp_path / "log.csv", 20_000)
    return tmp_path


def test_the_log_has_the_shape_of_real_ones(log):
    table = pl.read_csv(log / "log.csv")

    assert table.columns == ["user_id", "item_id", "rating", "timestamp"]
    assert len(table) == 20_000
    assert table["timestamp"].is_sorted()
    assert table["rating"].min() == 0.5
    assert table["rating"].max() == 5.0
    repeated = table.drop("rating").is_duplicated().sum()
    assert 200 < repeated < 600  # one in a hundred, and what it repeats
    for column, share in (("user_id", 0.2), ("item_id", 0.25)):
        counts = np.sort(table[column].value_counts()["count"].to_numpy())[::-1]
        assert counts[: len(counts) // 10].sum() > share * len(table)  # a tenth of them has much more than a tenth


def test_the_same_seed_writes_the_same_log(log, tmp_path):
    logs.write(tmp_path / "again.csv", 20_000)
    logs.write(tmp_path / "other.csv", 20_000, seed=1)

    assert (tmp_path / "again.csv").read_bytes() == (log / "log.csv").read_bytes()
    assert (tmp_path / "other.csv").read_bytes() != (log / "log.csv").read_bytes()


def test_a_stage_is_measured_in_a_process_of_its_own(log):
    figures = scale.measured("ingest", log, {})

    assert len(pl.read_parquet(log / "data" / "interactions.parquet")) == 20_000
    assert figures["cpu"] > 0
    assert 50 < figures["peak"] < 2_000
    with pytest.raises(RuntimeError, match=r"(?s)prepare: .*validation\.json"):
        scale.measured("prepare", log, {})


def test_mapped_and_memory_train_alike(tmp_path):
    data = sequences.load(prepare_rows(tmp_path, synthetic_rows(users=30), shard_events=200))
    rows = mapped.compare(data, {**peers.SETTINGS, "length": 8, "d_model": 8, "batch_size": 16}, 1)

    assert [row[0] for row in rows] == ["memory", "mapped file, shards: 3"]
    assert rows[0][3] == rows[1][3]  # the loss
