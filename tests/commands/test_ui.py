"""`seqrec ui` shows this project's runs, whatever other programs listen."""

from __future__ import annotations

import subprocess
import sys
from http.server import BaseHTTPRequestHandler

import pytest
from mlflow.entities import Experiment
from support import ROOT, Quiet, free_port, listening

from seqrec.__main__ import main
from seqrec.commands import ui
from seqrec.config import RegisterConfig
from seqrec.tracking import runs


class Other(Quiet, BaseHTTPRequestHandler):
    """Another program, which answers everything."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"OK")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with params.yaml and a database, which is the working directory."""
    folder = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "params.yaml").write_text((ROOT / "params.yaml").read_text())
        yield folder


def test_the_page_is_of_this_project_and_is_announced_when_its_server_answers(project, capfd):
    config = RegisterConfig()
    client = runs.connect(config)
    ours = client.get_experiment(runs.experiment(client, config))
    theirs = Experiment("1", ours.name, "/another/project/mlartifacts", "active", creation_time=ours.creation_time)
    with listening(Other) as other:
        taken = other.server_port
        command = [sys.executable, "-m", "seqrec", "ui", "--no-browser", "--port", str(taken)]
        started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            page = started.stdout.readline()
            address = page.partition("/#/")[0]
            port = int(address.rpartition(":")[2])
            assert port > taken
            assert ui.serves(address, ours)
            assert not ui.serves(address, theirs)
            assert ui.find_port(port, theirs)[0] > port
            assert main(command[3:]) == 0  # the server that runs is found, and no other one is started
            assert capfd.readouterr().out == page
        finally:
            started.terminate()
            started.communicate(timeout=60)
    assert ui.find_port(port, ours) == (port, False)


def test_ports_of_other_programs_are_named(project, caplog, monkeypatch):
    monkeypatch.setattr(ui, "PORTS", 1)
    with listening(Other) as other:
        assert main(["ui", "--no-browser", "--port", str(other.server_port)]) == 1
    assert "other programs use the ports" in caplog.text


def test_a_server_that_does_not_start_is_said(project, caplog, capfd, monkeypatch):
    monkeypatch.setattr(ui, "SERVER", ("-c", "raise SystemExit(3)"))
    assert main(["ui", "--no-browser", "--port", str(free_port())]) == 1
    assert "MLflow did not start" in caplog.text
    assert "http" not in capfd.readouterr().out
