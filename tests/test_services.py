"""MLflow as docker-compose.yaml runs it, on a real PostgreSQL and an S3-compatible store: `make test-services`.

The container images are not pulled: PostgreSQL is that of the system and the store is moto's server. What the file says
(commands, variables, the database's address) is run as it stands, but for the host names.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import mlflow
import pytest
import requests
import sqlalchemy as sa
import yaml
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from support import ROOT, YEAR_2001, free_port, write_interactions, write_settings

from seqrec.serving.events import DAY, IMPRESSIONS, Event, Shown, Store, StoreError

COMPOSE = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())["services"]
BIN = Path(sys.executable).parent
SEQREC = (sys.executable, "-m", "seqrec")
SECRETS = {"POSTGRES_PASSWORD": "p0stgres", "S3_ACCESS_KEY": "acc3ss", "S3_SECRET_KEY": "s3cret"}
SECRETS |= {"MLFLOW_PASSWORD": "twelve letters", "MLFLOW_SECRET_KEY": "k3y"}
NAME = "seqrec-own"
PASSWORD = "MLFLOW_TRACKING_PASSWORD"


def find_postgres() -> Path | None:
    """Return the folder of PostgreSQL's programs: on PATH, or where Debian installs them."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((folder for folder in reversed(folders) if (folder / "pg_ctl").exists()), None)


POSTGRES = find_postgres()
pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(POSTGRES is None, reason="needs PostgreSQL: apt-get install postgresql"),
]


@contextmanager
def postgres() -> Iterator[int]:
    """Run a new cluster as compose's `postgres` sets it up, with a password for everybody; yield its port."""
    settings = COMPOSE["postgres"]["environment"]
    user = {"user": "nobody", "group": "nogroup"} if os.getuid() == 0 else {}  # PostgreSQL refuses to be root
    with tempfile.TemporaryDirectory(prefix="seqrec-postgres-") as name:
        folder, port = Path(name), free_port()
        (folder / "password").write_text(SECRETS["POSTGRES_PASSWORD"])
        for path in (folder, folder / "password"):
            if user:
                shutil.chown(path, **user)
        data = str(folder / "data")

        def call(program: str, *arguments: str) -> None:
            done = subprocess.run(
                [str(POSTGRES / program), *arguments], capture_output=True, text=True, cwd=folder, **user
            )
            assert done.returncode == 0, done.stdout + done.stderr

        access = ["--auth=scram-sha-256", f"--pwfile={folder / 'password'}"]
        call("initdb", f"--pgdata={data}", f"--username={settings['POSTGRES_USER']}", *access, "--no-sync")
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c fsync=off -k {folder}"
        start = ["start", "--wait", f"--pgdata={data}", f"--log={folder / 'log'}", f"--options={options}"]
        done = subprocess.run([str(POSTGRES / "pg_ctl"), *start], cwd=folder, **user)  # a pipe would stay open
        assert done.returncode == 0, (folder / "log").read_text()
        try:
            import psycopg

            address = f"host=127.0.0.1 port={port} user={settings['POSTGRES_USER']} dbname=postgres"
            with psycopg.connect(f"{address} password={SECRETS['POSTGRES_PASSWORD']}", autocommit=True) as connection:
                connection.execute(f"CREATE DATABASE {settings['POSTGRES_DB']}")
            yield port
        finally:
            call("pg_ctl", "stop", f"--pgdata={data}", "--mode=immediate")


@contextmanager
def store() -> Iterator[str]:
    """Run an S3-compatible server; yield its address."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for each file otherwise
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


def started(service: dict, hosts: dict[str, str], arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return command and variables of a service of the compose file, with its secrets and host names filled in."""

    def filled(text: str) -> str:
        text = re.sub(r"\$\{(\w+):-([^}]*)\}", r"\2", text)
        text = re.sub(r"\$\{(\w+)[^}]*\}", lambda found: SECRETS[found[1]], text)
        for name, place in hosts.items():
            text = text.replace(name, place)
        return text

    variables = {name: filled(value) for name, value in service["environment"].items()}
    return [filled(one) for one in [*service["entrypoint"], *service["command"], *arguments]], variables


def call(command: list[str], **variables: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of MLflow, started with the command and variables of docker-compose.yaml."""
    with ExitStack() as stack:
        hosts = {"@postgres/": f"@127.0.0.1:{stack.enter_context(postgres())}/"}
        hosts["http://store:8333"] = stack.enter_context(store())
        command, variables = started(COMPOSE["bucket"], hosts, [])
        for _ in range(2):  # as a container that is started again: the bucket is there by then
            call([sys.executable, *command[1:]], **variables)
        port = free_port()
        command, variables = started(COMPOSE["mlflow"], hosts, ["--host=127.0.0.1", f"--port={port}"])
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        environment = {**os.environ, **variables, "MLFLOW_DISABLE_TELEMETRY": "true"}
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name in ("MLFLOW_TRACKING_USERNAME", PASSWORD):
            value = COMPOSE["serve"]["environment"][name]
            patch.setenv(name, value.replace("${MLFLOW_PASSWORD}", SECRETS["MLFLOW_PASSWORD"]))
        process = subprocess.Popen(
            [str(BIN / command[0]), *command[1:]], cwd=stack.enter_context(tempfile.TemporaryDirectory()),
            env=environment, stdout=log, stderr=log, text=True, start_new_session=True,
        )  # fmt: skip
        stack.callback(lambda: (os.killpg(process.pid, 15), process.wait(30)))
        address = f"http://127.0.0.1:{port}"
        for _ in range(240):
            with suppress(requests.RequestException):
                if requests.get(f"{address}/health", timeout=2).ok:
                    break
            time.sleep(0.5)
        else:
            log.seek(0)
            pytest.fail(log.read())
        yield address


@pytest.fixture(scope="module")
def registered(server, tmp_path_factory) -> tuple[str, Path]:
    """A run of the whole pipeline brought into that server; its address, and the settings."""
    folder = tmp_path_factory.mktemp("services")
    settings, out = write_settings(folder, start=YEAR_2001, models=["sasrec"]), str(folder / "out")
    call([*SEQREC, "run", "--config-file", str(settings), "--out", out], MLFLOW_TRACKING_URI=server)
    call([*SEQREC, "import", "--run", out], MLFLOW_TRACKING_URI=server)
    return server, folder / "out" / "params.yaml"


def test_a_run_of_the_pipeline_ends_with_a_champion_in_postgresql_and_its_files_in_the_store(registered):
    server, _ = registered
    client = MlflowClient(server)
    version = client.get_model_version_by_alias(NAME, "champion")
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])

    assert version.tags["seqrec.promoted"] == "true"
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert {"sasrec", "popularity", "markov", "ease"} <= {run.info.run_name.partition(" ")[0] for run in runs}


def test_nobody_without_the_password_reads_or_writes(registered, monkeypatch):
    server, settings = registered
    assert requests.get(f"{server}/api/2.0/mlflow/experiments/search?max_results=1", timeout=9).status_code == 401

    monkeypatch.setenv(PASSWORD, "something else")
    with pytest.raises(MlflowException, match="401"):
        MlflowClient(server).search_experiments()
    environment = {**os.environ, "MLFLOW_TRACKING_URI": server}
    command = [*SEQREC, "import", "--run", str(settings.parent)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "MLFLOW_TRACKING_USERNAME" in done.stderr


def test_recommend_and_mlflow_load_the_champion_from_there(registered, monkeypatch):
    server, settings = registered
    command = [*SEQREC, "recommend", "--params", str(settings), "--history", "i1,i2,i3"]
    assert "recommends" in call(command, MLFLOW_TRACKING_URI=server)

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    mlflow.set_tracking_uri(server)
    assert mlflow.pyfunc.load_model(f"models:/{NAME}@champion").metadata.signature is not None


def test_the_store_of_events_is_the_same_on_postgresql(tmp_path):
    """Every query of the store, after two replicas have made its tables at the same time."""
    events = [
        Event(event_id=str(n), user=u, item=f"i{n}", kind=kind, at=2e6 + n, recommendation_id=name)
        for n, (u, kind, name) in enumerate(
            [("u", "view", "r0"), ("u", "buy", None), ("ü\U0001f600" * 250, "view", None), ("v", "hide", "r1")]
        )
    ]
    now = 2e6 + 100 * DAY
    events += [
        Event(event_id=f"t{n}", user="t", item=f"t{n % 3}", kind="view", at=now - n * n * DAY / 20) for n in range(40)
    ]
    shown = [
        Shown(recommendation_id=f"r{n}", user=user, version=version, items=["i0", "i3"], at=10.0)
        for n, (user, version) in enumerate([("u", "1"), ("v", "2"), (None, "2")])
    ]
    write_interactions(tmp_path, [("u", "old", 1000), ("w", "old", 1000)])

    def outcome(store):
        found = [store.add(events), store.add([events[0], events[0]]), store.histories({"u", "v", "\0"})]
        store.show(shown)
        found += [store.seed(tmp_path / "interactions.parquet") for _ in range(2)]
        found += [store.trending(days, 2, now) for days in (1.0, 3.5, 40.0)]
        found += [sorted(store.clicks("1", "2"), key=str), list(store.interactions(["view", "buy"]))]
        found += [store.forget("u"), store.forget("\0"), store.expire(1), store.clicks("1", "2")]
        return found

    with postgres() as port:
        url = store_url(port)
        with ThreadPoolExecutor(4) as pool:
            stores = list(pool.map(Store, [url] * 4))
        there = outcome(stores[0])
        for store in stores:
            store.engine.dispose()
    here = outcome(Store(f"sqlite:///{tmp_path}/events.db"))

    assert there == here
    assert there[:2] == [44, 0]
    assert all(gains[0][1] > 1 for gains in there[5:8])


def store_url(port: int, database: str = COMPOSE["postgres"]["environment"]["POSTGRES_DB"]) -> str:
    user = COMPOSE["postgres"]["environment"]["POSTGRES_USER"]
    return f"postgresql+psycopg://{user}:{SECRETS['POSTGRES_PASSWORD']}@127.0.0.1:{port}/{database}"


def test_the_store_where_postgresql_is_slow_busy_or_set_up_otherwise():
    """A lock that is not given back, an answer shown while its user is deleted, another encoding and order of text."""
    event = Event(event_id="1", user="u", item="日", kind="view", at=YEAR_2001)
    with postgres() as port:
        store = Store(store_url(port), patience_s=1)
        store.add([event])
        with store.engine.begin() as other:
            other.execute(sa.text("LOCK TABLE events"))
            with pytest.raises(StoreError, match="timeout"):
                store.histories("u")
            assert other.execute(sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar() == 0
        assert store.histories("u")["u"].items == ["日"]

        def show(name: str) -> None:
            store.show([Shown(recommendation_id=name, user="u", version="1", items=["a"], at=YEAR_2001)])

        show("first")
        sa.event.listen(store.engine, "after_cursor_execute", lambda *_: show("second"), once=True)
        assert [store.forget("u"), store.forget("u")] == [{"events": 1, "answers": 1}, {"events": 0, "answers": 1}]
        with store.engine.begin() as connection:
            assert connection.execute(sa.select(IMPRESSIONS)).all() == []

        for number, kind in enumerate(["ENCODING 'SQL_ASCII' LOCALE 'C'", "LOCALE_PROVIDER icu ICU_LOCALE 'en-US'"]):
            with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(sa.text(f"CREATE DATABASE other{number} TEMPLATE template0 {kind}"))
            other = Store(store_url(port, f"other{number}"))
            other.add([replace(event, event_id=item, user=item, item=item) for item in "aBZ日😀"])
            assert [item for item, _ in other.trending(1, 4, YEAR_2001 + 1)] == ["B", "Z", "a", "日"]
            other.engine.dispose()
        with pytest.raises(StoreError, match='database "none" does not exist; check --store'):
            Store(store_url(port, "none"))
        store.engine.dispose()


def test_the_nightly_dump_has_the_tables_of_mlflow_and_of_the_events(tmp_path):
    """The script of deploy/overlays/cluster/backup.yaml, with the databases of this machine."""
    import psycopg

    documents = yaml.safe_load_all((ROOT / "deploy/overlays/cluster/backup.yaml").read_text())
    (job,) = [one for one in documents if one["kind"] == "CronJob"]
    (container,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    with postgres() as port:
        place = f"mlflow:{SECRETS['POSTGRES_PASSWORD']}@127.0.0.1:{port}"
        with psycopg.connect(f"postgresql://{place}/mlflow", autocommit=True) as connection:
            connection.execute("CREATE DATABASE events")
        names = {"mlflow": f"postgresql://{place}/mlflow", "events": f"postgresql+psycopg://{place}/events"}
        for name in names:
            with psycopg.connect(f"postgresql://{place}/{name}", autocommit=True) as connection:
                connection.execute(f"CREATE TABLE of_{name} (number int)")
        assert {one["name"] for one in container["env"]} == set(names)
        script = container["args"][0].replace("/backup", str(tmp_path))
        call([*container["command"], script], **names, PATH=f"{POSTGRES}:{os.environ['PATH']}")

    for name in names:
        (file,) = tmp_path.glob(f"{name}-*.dump")
        assert f"TABLE public of_{name}" in call([str(POSTGRES / "pg_restore"), "--list", str(file)])
