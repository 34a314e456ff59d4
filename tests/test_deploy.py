"""The files that are for a cluster or a Docker daemon, checked without either."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from seqrec.serving import guards, http

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
FOLDERS = (DEPLOY, DEPLOY / "serving")  # of kustomizations
MANIFESTS = [
    (folder, document)
    for folder in FOLDERS
    for file in yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    for document in yaml.safe_load_all((folder / file).read_text())
]


@pytest.mark.parametrize(
    "manifest", [one for _, one in MANIFESTS], ids=lambda one: f"{one['kind']}-{one['metadata']['name']}"
)
def test_a_manifest_has_no_field_that_kubernetes_does_not_know(manifest):
    kubernetes_validate.validate(manifest, "1.31", strict=True)


def test_a_misspelt_field_is_noticed():
    manifest = {**MANIFESTS[0][1], "spec": {"selectors": {}}}

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, "1.31", strict=True)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_manifest_is_part_of_the_kustomization(folder):
    files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}

    assert set(yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]) == files


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_secret_that_is_used_is_in_the_template(folder):
    lines = (folder / "secrets.env.example").read_text().splitlines()
    offered = {line.partition("=")[0] for line in lines if "=" in line and not line.startswith("#")}
    used = set()
    for place, manifest in MANIFESTS:
        if place == folder and manifest["kind"] == "Deployment":
            for variable in manifest["spec"]["template"]["spec"]["containers"][0]["env"]:
                if "valueFrom" in variable:
                    used.add(variable["valueFrom"]["secretKeyRef"]["key"])

    assert used
    assert used <= offered


def test_the_service_is_started_with_flags_that_it_has_and_probed_where_it_answers():
    documents = {manifest["kind"]: manifest for folder, manifest in MANIFESTS if folder.name == "serving"}
    container = documents["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    compose = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())["services"]["serve"]["command"]
    flags = inspect.signature(http.serve).parameters
    for command, *arguments in (container["args"], compose):
        assert command == "serve"
        assert {one.partition("=")[0].removeprefix("--").replace("-", "_") for one in arguments} <= set(flags)
    probes = {container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert probes <= set(guards.OPEN)
    labels = documents["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
        chosen = documents[kind]["spec"].get("selector") or documents[kind]["spec"]["podSelector"]
        assert chosen.get("matchLabels", chosen) == labels
    assert documents["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == "seqrec-serve"


def test_hadolint_finds_nothing():
    done = subprocess.run(
        [str(Path(sys.executable).parent / "hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True
    )

    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_holds_all_packages_and_no_data():
    allowed = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"}
    copied = {
        word
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY") and "--from" not in line
        for word in line.split()[1:-1]
    }

    assert copied <= allowed
    assert {"seqrec", "models", "components", "pipelines"} <= copied
    assert allowed.isdisjoint({"data", "artifacts", "reports", "state", ".dvc", ".git", "mlartifacts"})


def test_compose_keeps_passwords_out_and_ports_local():
    content = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())

    assert set(content["services"]) == {"postgres", "store", "bucket", "mlflow", "serve"}
    ports = [port for service in content["services"].values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    secret = content["services"]["postgres"]["environment"]["POSTGRES_PASSWORD"]
    assert secret.startswith("${POSTGRES_PASSWORD:?")


def test_the_lock_has_the_pins_of_the_constraints_with_digests_and_no_address():
    text = (ROOT / "requirements.lock").read_text()
    pins = dict(
        re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text().lower().replace("_", "-"), re.M)
    )
    entries = re.findall(r"^(\S+)==(\S+).*((?:\n +--hash=sha256:[0-9a-f]{64}(?: \\)?)+)$", text, re.MULTILINE)

    assert len(entries) == len(re.findall(r"^\w", text, re.MULTILINE)) > 200
    assert {name: version for name, version, _ in entries if pins.get(name, version) != version} == {}
    assert "torch" not in {name for name, _, _ in entries}
    assert not re.search(r"://|/\w+/|index", text.partition("\n")[2])
