from __future__ import annotations

import pyarrow.parquet as pq
import pytest
from support import save

from seqrec.artifacts import INTERACTIONS
from seqrec.commands.recommend import score
from seqrec.config import ConfigError, IngestConfig, parse
from seqrec.data import stores
from seqrec.stages.ingest import ingest

LOG = "user_id,item_id,timestamp\nu1,i1,1000000000\nu1,i2,1000000001\n"


def ingested(tmp_path, address):
    config = IngestConfig(source="csv", interactions=address, retries=0)
    ingest(dataset="own", output=tmp_path / "data", downloads=tmp_path / "downloads", config=config)
    assert list((tmp_path / "downloads").iterdir()) == []
    return pq.read_table(tmp_path / "data" / INTERACTIONS)["item_id"].to_pylist()


def test_a_log_is_read_from_an_address_and_a_missing_one_is_named(tmp_path):
    (tmp_path / "log.csv").write_text(LOG)

    assert ingested(tmp_path, f"file://{tmp_path}/log.csv") == ["i1", "i2"]
    with pytest.raises(ValueError, match=r"here: interactions: no file://.*none\.csv"):
        ingested(tmp_path, f"file://{tmp_path}/none.csv")


@pytest.mark.parametrize("key", ["interactions", "items", "mirror"])
def test_an_unknown_scheme_is_refused_when_the_settings_are_read(key):
    section = {"source": "csv", "interactions": "log.csv", key: "hdfs://cluster/log.csv"}
    with pytest.raises(ConfigError, match=rf"ingest: {key} must be a path or begin with .*s3://.* not hdfs"):
        parse(IngestConfig, section, "ingest")


def test_scores_are_written_to_an_address(prepared, tmp_path):
    saved = save("sasrec", prepared, tmp_path / "model")
    for output in (str(tmp_path / "here.parquet"), f"file://{tmp_path}/there.parquet"):
        score(sequences=prepared, saved=saved, output=output, k=3)

    assert pq.read_table(tmp_path / "here.parquet") == pq.read_table(tmp_path / "there.parquet")
    with pytest.raises(ValueError, match=r"output must be a path .*; not https://"):
        score(sequences=prepared, saved=saved, output="https://example.org/scores.parquet", k=3)


def test_azure_needs_the_name_of_an_account(tmp_path, monkeypatch):
    monkeypatch.delenv(stores.ACCOUNT, raising=False)
    with pytest.raises(ConfigError, match=stores.ACCOUNT):
        stores.fetch("az://container/log.csv", tmp_path / "log.csv")


@pytest.fixture
def bucket(monkeypatch):
    """An S3-compatible server with an empty bucket."""
    boto3, server = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    own = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1", "no_proxy": "127.0.0.1"}
    for name, value in (own | {"AWS_ACCESS_KEY_ID": "one", "AWS_SECRET_ACCESS_KEY": "two"}).items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="logs")
    yield "s3://logs"
    running.stop()


@pytest.mark.services
def test_a_log_goes_to_a_bucket_and_comes_back(bucket, tmp_path):
    with stores.written(f"{bucket}/own/log.csv") as file:
        file.write_text(LOG)

    assert ingested(tmp_path, f"{bucket}/own/log.csv") == ["i1", "i2"]
    with pytest.raises(ValueError, match=r"here: interactions: no s3://logs/own/none\.csv"):
        ingested(tmp_path, f"{bucket}/own/none.csv")
