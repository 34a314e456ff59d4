"""Spark gives the same files as polars, byte for byte. One session, one test: starting Spark takes longer than it."""

import importlib.util
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import synthetic_rows, write_interactions

from seqrec.artifacts import read_json, sha256, write_json
from seqrec.config import ConfigError, PrepareConfig, ValidateConfig
from seqrec.data import table_engines
from seqrec.stages.prepare import prepare
from seqrec.stages.validate import ValidationFailed, validate

JAVA = shutil.which("java") is not None or "JAVA_HOME" in os.environ
needs_spark = pytest.mark.skipif(
    importlib.util.find_spec("pyspark") is None or not JAVA, reason="needs seqrec[spark] and Java 17 or newer"
)


@pytest.fixture(scope="session")
def session(tmp_path_factory):
    """A local Spark; prepare takes the session that runs."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("tests")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    running = builder.getOrCreate()
    yield running
    running.stop()


def prepared(folder, name, **settings):
    config = PrepareConfig(**settings)
    prepare(dataset="log", data=folder, validation=folder / "validation.json", sequences=folder / name, config=config)
    return {file.name: file.read_bytes() for file in (folder / name).iterdir()}


@needs_spark
def test_spark_writes_the_bytes_that_polars_writes(tmp_path, session):
    """Titles, repeated pairs, a k-core of several rounds, a sample, two cuts, shards, and an earlier dump to extend."""
    folder = tmp_path / "any[1]"  # no pattern
    rows = synthetic_rows(users=50, items=60)
    rows += rows[::7] + [(f"rare{n}", f"odd{n}", 1_000_000 + n) for n in range(9)] + [(user, "i1", 5) for user in "ab"]
    write_interactions(folder, rows[:200])
    prepared(folder, "before", min_user_events=2, min_item_events=2)
    write_interactions(folder, rows)
    ratings = pa.array([1.0 if n % 9 == 0 else 3.6 for n in range(len(rows))], pa.float32())
    table = pq.read_table(folder / "interactions.parquet")
    pq.write_table(table.set_column(4, table.schema.field("rating"), ratings), folder / "interactions.parquet")
    write_json(folder / "validation.json", {"success": True, "input_sha256": sha256(folder / "interactions.parquet")})
    items = pq.read_table(folder / "items.parquet")
    pq.write_table(items.append_column("Title", items["title"]), folder / "items.parquet")
    settings = {
        "protocol": "temporal",
        "min_rating": 3.6,
        "require_title": True,
        "deduplicate": "first_pair",
        "sample_users": 40,
        "shard_events": 150,
        "extend": str(folder / "before"),
    }

    polars = prepared(folder, "polars", **settings)
    spark = prepared(folder, "spark", engine="spark", **settings)

    assert set(polars) == {"sequences.arrow", "vocabulary.parquet", "users.parquet", "negatives.arrow", "split.json"}
    assert spark == polars


@needs_spark
def test_validation_on_spark_gives_the_same_verdict(tmp_path, session):
    """A log with repeated events, a time out of range, rows that are not unique, and an item without an entry."""
    rows = synthetic_rows(users=20)
    rows += [*rows[:30], ("late", "i1", 4_000_000_000)]
    write_interactions(tmp_path, rows)
    table = pq.read_table(tmp_path / "interactions.parquet")
    repeated = pa.array([0, 0, *range(2, len(rows))])
    table = table.set_column(3, table.schema.field("row"), repeated)
    pq.write_table(table, tmp_path / "interactions.parquet")
    pq.write_table(pq.read_table(tmp_path / "items.parquet").slice(1), tmp_path / "items.parquet")

    verdicts = []
    for engine in ("polars", "spark"):
        report = tmp_path / f"{engine}.json"
        with pytest.raises(ValidationFailed):
            validate(
                dataset="log",
                data=tmp_path,
                report=report,
                reference=tmp_path / "none",
                config=ValidateConfig(engine=engine, min_date="1970-01-01"),
            )
        verdicts.append(read_json(report))

    failed = {(check["column"], check["rule"][:9]) for check in verdicts[0]["checks"] if not check["success"]}
    assert {("timestamp", "every tim"), ("row", "row numbe")} < failed
    assert len(failed) == 5
    for check in [check for verdict in verdicts for check in verdict["checks"]]:
        check["examples"].sort()
    assert verdicts[1] == verdicts[0]


def test_without_pyspark_the_setting_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyspark.sql", None)

    with (
        pytest.raises(ConfigError, match=r"prepare\.engine, validate\.engine: spark needs pyspark"),
        table_engines.opened("spark", tmp_path),
    ):
        pass


def test_what_a_killed_run_left_is_removed(tmp_path):
    (tmp_path / ".scratch" / "0.parquet").mkdir(parents=True)  # a folder of that name would be in the way

    with table_engines.opened("polars", tmp_path):
        assert list((tmp_path / ".scratch").iterdir()) == []
    assert list(tmp_path.iterdir()) == []
