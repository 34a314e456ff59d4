"""No secret in anything that is written or printed: what settings refuse, and what becomes of the environment's."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from pathlib import Path

import pytest
import yaml
from dvc.repo import Repo
from support import ROOT, YEAR_2001, Quiet, listening, with_values, write_settings

from seqrec import redaction
from seqrec.__main__ import main
from seqrec.config import ConfigError, from_dict
from seqrec.pipelines.__main__ import main as pipelines
from seqrec.redaction import holds_secret, is_secret_name, redacted, secret_settings, split_credentials

PASSWORD = "hunter2-plant3d"
LOGIN = f"https://somebody:{PASSWORD}@example.org"
PARAMS = yaml.safe_load((ROOT / "params.yaml").read_text())


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"{LOGIN}/data: HTTP 500", "https://***@example.org/data: HTTP 500"),
        ("postgresql://mlflow:a/b@host/mlflow", "postgresql://***@host/mlflow"),
        ("'https://t0ken@host/x'", "'https://***@host/x'"),
        ("https://host/f?X-Amz-Signature=abc&part=2", "https://host/f?X-Amz-Signature=***&part=2"),
        ("url: /f?sig=a%2Fb&se=1 (Caused by", "url: /f?sig=***&se=1 (Caused by"),
        ("ssh://git@host/x and http://host:5000/a@b", "ssh://git@host/x and http://host:5000/a@b"),
        ("models:/seqrec-x@champion, key=1", "models:/seqrec-x@champion, key=1"),
    ],
)
def test_a_text_loses_its_secrets_and_nothing_else(text, wanted):
    assert redacted(text) == wanted


def test_values_of_secret_variables_are_hidden_wherever_they_occur(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalr/XUtn")
    monkeypatch.setenv("DB_PASSWORD", "true")  # too short to look for

    assert redacted("denied: wJalr/XUtn, wJalr%2FXUtn; true, my-t0ken", "my-t0ken") == "denied: ***, ***; true, ***"


def test_names_of_variables_that_hold_secrets():
    secret = ("DB_PASSWORD", "PGPASSWORD", "AWS_ACCESS_KEY_ID", "HF_TOKEN", "API_KEY", "MY_PWD")
    harmless = ("PWD", "MAX_TOKENS", "MONKEY", "COMPASS", "SSH_AUTH_SOCK", "KEYBOARD")
    assert [name for name in (*secret, *harmless) if is_secret_name(name)] == list(secret)


def test_credentials_leave_an_address():
    assert split_credentials("https://u%40x:p%2Fw@host:1/a?b=c") == ("https://host:1/a?b=c", "u@x", "p/w")
    assert split_credentials("sqlite:///mlflow.db") == ("sqlite:///mlflow.db", "", "")


@pytest.mark.parametrize(
    "place",
    [
        "register.tracking_uri",
        "kubernetes.environment.anything",
        "models.sasrec.options.start",
        "datasets.ml-1m.ingest.mirror",
    ],
)
def test_no_setting_may_hold_a_secret_and_the_message_does_not_repeat_it(place):
    content = with_values(PARAMS, {place: LOGIN})

    assert list(secret_settings(content, "")) == [place]
    with pytest.raises(ConfigError, match="put credentials into the environment") as caught:
        from_dict(content)
    assert place in str(caught.value)
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("value", [PASSWORD, 12345678])
def test_a_variable_of_the_cluster_with_a_secret_name_must_come_from_a_kubernetes_secret(value):
    content = {**PARAMS, "kubernetes": {"environment": {"DB_PASSWORD": value}}}

    with pytest.raises(ConfigError, match=r"kubernetes.environment.DB_PASSWORD: .*kubernetes.secrets") as caught:
        from_dict(content)
    assert str(value) not in str(caught.value)


def test_addresses_without_a_secret_are_settings_as_ever():
    assert holds_secret(f"https://example.org/f?token={PASSWORD}")
    for value in ("", "sqlite:///mlflow.db", "ssh://git@host/x", "http://host:5000/a@b", "my/key=1.csv"):
        assert not holds_secret(value)


class Refusing(Quiet, BaseHTTPRequestHandler):
    """A server that repeats what it was sent, and refuses."""

    def do_GET(self):
        self.send_response(403, f"no, {PASSWORD}")
        self.end_headers()
        self.wfile.write(f"{self.headers.get('Authorization')} {PASSWORD}".encode())

    do_HEAD = do_POST = do_GET


class Files(Quiet, SimpleHTTPRequestHandler):
    """A server of a folder."""


VARIABLES = ("AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "KFP_TOKEN", "KFP_COOKIES")


def ingest_under_dvc() -> None:
    """Run the stage `ingest` of dvc.yaml, so that there is a dvc.lock."""
    stage = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]["ingest"]
    Path("dvc.yaml").write_text(yaml.safe_dump({"stages": {"ingest": {**stage, "deps": [], "params": []}}}))
    with Repo.init(no_scm=True) as repo:
        assert repo.reproduce()


def test_a_password_in_every_variable_is_in_no_file_and_no_message(tmp_path, monkeypatch, capfd, caplog):
    """A run, its import, a compiled pipeline and dvc.lock; then what fails."""
    content = yaml.safe_load(write_settings(tmp_path, start=YEAR_2001, models=["sasrec"]).read_text())
    content["ingest"] |= {"interactions": "log.csv", "retries": 0}
    project, files = tmp_path / "project", tmp_path / "files"
    for folder in (project, files):
        folder.mkdir()
    shutil.move(tmp_path / "log.csv", files / "log.csv")
    (project / "settings.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.chdir(project)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in VARIABLES:
        monkeypatch.setenv(name, PASSWORD)
    ingest, load_run = ["ingest", "--output", "elsewhere", "--downloads", "state"], ["import", "--run", "out"]
    settings = ["--params", "settings.yaml"]
    with (
        caplog.at_level(logging.INFO),
        listening(partial(Files, directory=files)) as mirror,
        listening(Refusing) as server,
    ):
        monkeypatch.setenv("SEQREC_DATA_MIRROR", f"http://somebody:{PASSWORD}@127.0.0.1:{mirror.server_port}")
        assert main(["run", "--config-file", "settings.yaml", "--out", "out"]) == 0
        shutil.copy(project / "out" / "params.yaml", project / "params.yaml")
        assert main(load_run) == 0
        assert pipelines(["compile", *settings, "--output", "pipeline.yaml"]) == 0
        ingest_under_dvc()
        login = f"http://somebody:{PASSWORD}@127.0.0.1"
        refusing = f"{login}:{server.server_port}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")  # else pyarrow asks Amazon
        for wrong in (refusing, f"{login}:1", f"s3://somebody:{PASSWORD}@bucket"):
            monkeypatch.setenv("SEQREC_DATA_MIRROR", wrong)
            assert main(ingest) == 1
        monkeypatch.setenv("MLFLOW_TRACKING_URI", refusing)
        assert main(load_run) == 1
        monkeypatch.setattr("seqrec.pipelines.client.IMAGE", f"seqrec@sha256:{'0' * 64}")
        assert pipelines(["submit", *settings, "--host", refusing]) == 1

    leaks = [path for path in tmp_path.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()]
    said = caplog.text + "".join(capfd.readouterr())
    assert leaks == []
    assert "HTTP 403" in said
    assert [line for line in said.splitlines() if PASSWORD in line] == []
    assert Path("dvc.lock").is_file()
    assert Path("pipeline.yaml").is_file()


def test_what_is_not_caught_is_printed_without_secrets(capsys):
    try:
        raise RuntimeError(f"cannot open {LOGIN}")
    except RuntimeError as error:
        redaction.excepthook(type(error), error, error.__traceback__)
    record = logging.LogRecord("any", logging.ERROR, "file", 1, "lost %s", (LOGIN,), None)

    printed = capsys.readouterr().err + redaction.Formatter("%(message)s").format(record)
    assert "RuntimeError: cannot open https://***@example.org" in printed
    assert PASSWORD not in printed
    redaction.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == "interrupted\n"
