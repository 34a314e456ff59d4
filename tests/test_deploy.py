"""The files that are for a cluster or a Docker daemon, checked without either."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from support import ROOT, save

from seqrec.__main__ import bind, command_parser
from seqrec.config import load
from seqrec.config.sections import STEPS
from seqrec.serving import guards
from seqrec.serving.batcher import Served
from seqrec.serving.metrics import Metrics
from seqrec.serving.recommender import Recommender, Request

DEPLOY = ROOT / "deploy"
OVERLAYS = ("kind", "cluster", "kserve")
KUBECTL = shutil.which("kubectl")
CUSTOM = {"PodMonitor", "PrometheusRule", "InferenceService"}  # of operators: Kubernetes has no schemas of them
OWN = {"dataset": "mine", "serve": {"candidate": "models:/seqrec-mine@candidate", "share": 0.2}}  # of params.yaml
OF_S3 = ("endpoint", "access-key", "secret-key")  # of items in a store, which a service need not have
SETTINGS = {"kustomization.yaml", "params.yaml"}  # what is no manifest
FILES = sorted(path for path in DEPLOY.rglob("*.yaml") if path.name not in SETTINGS)
MANIFESTS = [document for path in FILES for document in yaml.safe_load_all(path.read_text())]


def assert_valid(manifest):
    if manifest["kind"] not in CUSTOM:
        kubernetes_validate.validate(manifest, "1.31", strict=True)


def only(documents, kind, name="seqrec-serve"):
    (found,) = [one for one in documents if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def kinds(documents):
    return {(one["kind"], one["metadata"]["name"]) for one in documents}


def values(content, key):
    """Return every value of `key`, at any depth."""
    if isinstance(content, list):
        return [found for one in content for found in values(one, key)]
    if not isinstance(content, dict):
        return []
    own = [content[key]] if key in content else []
    return own + [found for one in content.values() for found in values(one, key)]


def render(folder):
    done = subprocess.run([str(KUBECTL), "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def deploy(tmp_path_factory):
    """The folder deploy/ with the files that a user adds."""
    if KUBECTL is None:
        pytest.skip("needs kubectl")
    folder = tmp_path_factory.mktemp("deploy") / "deploy"
    shutil.copytree(DEPLOY, folder)
    (folder / "base" / "keys.json").write_text("{}")
    for name in ("secrets.env", "serve.env"):
        shutil.copy(DEPLOY / "base" / f"{name}.example", folder / "base" / name)
    content = yaml.safe_load((ROOT / "params.yaml").read_text()) | OWN
    (folder / "overlays" / "cluster" / "params.yaml").write_text(yaml.safe_dump(content))
    return folder


@pytest.fixture(scope="module")
def rendered(deploy):
    """The documents of each overlay, as kubectl would send them."""
    return {name: render(deploy / "overlays" / name) for name in OVERLAYS}


def test_no_manifest_has_a_field_that_kubernetes_does_not_know():
    for manifest in MANIFESTS:
        assert_valid(manifest)


def test_every_manifest_is_part_of_its_kustomization():
    for folder in {path.parent for path in FILES}:
        resources = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
        own = {name for name in resources if not name.startswith("..")}
        assert own == {path.name for path in FILES if path.parent == folder}


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_is_complete(rendered, name):
    """What kubectl makes of it is valid, and each secret, volume, service and target that is named is there."""
    documents = rendered[name]
    for manifest in documents:
        assert_valid(manifest)
        place = manifest["metadata"]["name" if manifest["kind"] == "Namespace" else "namespace"]
        assert place == ("kubeflow" if name == "kind" else "seqrec")
    secrets = {one["metadata"]["name"]: set(one["data"]) for one in documents if one["kind"] == "Secret"}
    named = values(documents, "secretKeyRef")
    assert len(named) > 5
    missing = [one for one in named if one["key"] not in secrets[one["name"]]]
    assert [one for one in missing if not one.get("optional")] == []
    example = (DEPLOY / "base/serve.env.example").read_text()
    assert {one["key"] for one in missing if f"# {one['key']}=" in example} == {f"s3-{end}" for end in OF_S3}
    assert len(missing) == len(OF_S3)
    volumes = [one for own in values(documents, "volumes") for one in own]
    mounted = [one["secret"] for one in volumes if "secret" in one]
    assert [one for one in mounted if one["items"][0]["key"] not in secrets[one["secretName"]]] == []
    known = kinds(documents)
    maps = [one["configMap"]["name"] for one in volumes if "configMap" in one]
    assert {("ConfigMap", one) for one in maps} <= known
    assert {("PersistentVolumeClaim", one) for one in values(documents, "claimName")} <= known
    assert {(one["kind"], one["name"]) for one in values(documents, "scaleTargetRef")} <= known
    images = set(values(documents, "image")) - {"postgres:17-alpine", "chrislusf/seaweedfs:3.97"}
    assert images == {"localhost:5001/seqrec:latest" if name == "kind" else "seqrec:latest"}
    for container in (one for own in values(documents, "containers") for one in own):
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert "memory" in container["resources"]["limits"]


def test_kind_fits_on_one_small_node(rendered):
    documents = rendered["kind"]
    assert CUSTOM.isdisjoint(one["kind"] for one in documents)
    assert set(map(tuple, values(documents, "accessModes"))) == {("ReadWriteOnce",)}
    assert set(values(documents, "storage")) == {"5Gi"}
    ports = [port for own in values(documents, "ports") for port in own if "port" in port]
    offered = {port.get("targetPort", port["port"]) for port in ports}
    assert {5432, 8333} <= offered  # the database and the store, where the example's secrets look for them
    params = load(DEPLOY / "overlays" / "kind" / "params.yaml")
    config = params.section("kubernetes")
    steps = [config.step(step) for step in STEPS]
    assert {(step.cpu, step.memory, step.gpus) for step in steps} == {("1", "2Gi", 0)}
    assert only(documents, "PersistentVolumeClaim", config.state_claim)
    assert params.section("ingest", dataset="ml-100k").events
    for name, keys in config.secrets.items():
        assert set(keys) <= set(only(documents, "Secret", name)["data"])


def test_upgrades_and_privileges_are_those_that_the_page_names(rendered):
    documents = rendered["cluster"]
    mlflow = only(documents, "Deployment", "mlflow")["spec"]
    assert mlflow["strategy"] == {"type": "Recreate"}
    assert mlflow["template"]["spec"]["initContainers"][0]["command"][:3] == ["mlflow", "db", "upgrade"]
    for name in ("mlflow", "seqrec-serve"):
        policy = only(documents, "NetworkPolicy", name)["spec"]
        assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
        assert policy["egress"]
    pod = only(documents, "Deployment")["spec"]["template"]["spec"]
    assert pod["topologySpreadConstraints"]
    assert "tracking-username" not in {one["key"] for one in values(pod, "secretKeyRef")}  # the steps', who may write
    (namespace,) = [one for one in documents if one["kind"] == "Namespace"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "baseline"
    dumped = {one["key"] for one in values(only(documents, "CronJob", "mlflow-backup"), "secretKeyRef")}
    assert dumped == {"backend-store-uri", "store"}
    assert only(documents, "ConfigMap", "seqrec-dashboard")["metadata"]["labels"]["grafana_dashboard"] == "1"
    about = only(rendered["kserve"], "InferenceService")["metadata"]
    assert about["annotations"]["serving.kserve.io/deploymentMode"] == "Standard"
    assert about["labels"]["networking.kserve.io/visibility"] == "cluster-local"


def test_spark_alone_may_delete_pods_and_steps_may_read_the_key_of_kubeflows_store():
    rules = [(one["metadata"]["name"], rule) for one in MANIFESTS if one["kind"] == "Role" for rule in one["rules"]]
    assert {name for name, rule in rules if "pods" in rule["resources"]} == {"seqrec-spark"}
    (secrets,) = [rule for _, rule in rules if "secrets" in rule["resources"]]
    assert (secrets["verbs"], secrets["resourceNames"]) == (["get"], ["mlpipeline-minio-artifact"])


def test_kserve_runs_the_pod_of_the_deployment(rendered):
    documents = rendered["kserve"]
    pod = only(rendered["cluster"], "Deployment")["spec"]["template"]
    predictor = only(documents, "InferenceService")["spec"]["predictor"]
    for name in ("containers", "volumes", "securityContext", "topologySpreadConstraints"):
        assert predictor[name] == pod["spec"][name]
    assert predictor["labels"].items() <= pod["metadata"]["labels"].items()
    gone = kinds(rendered["cluster"]) - kinds(documents)
    assert gone == {(kind, "seqrec-serve") for kind in ("Deployment", "Service", "HorizontalPodAutoscaler")}
    assert values(only(documents, "Ingress"), "service")[0]["name"] == "seqrec-serve-predictor"


@pytest.mark.parametrize(("name", "dataset"), [("kind", "ml-100k"), ("cluster", "mine")])
def test_the_service_takes_its_dataset_and_options_from_the_params_yaml_of_the_overlay(
    rendered, tmp_path, name, dataset
):
    """The command line of the pod, parsed by the program, with what the ConfigMap holds."""
    pod = only(rendered[name], "Deployment")["spec"]["template"]["spec"]
    (volume,) = [one for one in pod["volumes"] if "configMap" in one]
    (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == volume["name"]]
    for file, text in only(rendered[name], "ConfigMap", volume["configMap"]["name"])["data"].items():
        (tmp_path / file).write_text(text)
    arguments = [one.replace(mount["mountPath"], str(tmp_path)) for one in pod["containers"][0]["args"]]
    bound = bind("serve", command_parser("serve").parse_args(arguments[1:]))

    assert bound["dataset"] == dataset
    assert bound["options"].candidate == (OWN["serve"]["candidate"] if name == "cluster" else "")
    assert bound["options"].host == "0.0.0.0"


def test_every_metric_of_a_rule_and_of_the_dashboard_is_exposed_with_its_labels(prepared, tmp_path):
    recommender = Recommender.load(save("sasrec", prepared, tmp_path / "model"))
    metrics = Metrics(served := Served(recommender, "1"))
    metrics.switch(served)
    metrics.count_response(200)
    metrics.count([Request(history=["i1"])], [recommender.recommend(["i1"])])
    samples = {one.name: set(one.labels) for family in metrics.registry.collect() for one in family.samples}
    (rules,) = [one for one in MANIFESTS if one["kind"] == "PrometheusRule"]
    alerts = [rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]]
    board = json.loads((DEPLOY / "overlays/cluster/dashboard.json").read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(alerts) > 5
    assert len(shown) > 10
    for expression in [*alerts, *shown]:
        names = re.findall(r"seqrec_\w+", expression)
        assert names
        assert set(names) <= samples.keys()
        grouped, chosen = re.findall(r"by \(([\w, ]+)\)", expression), re.findall(r"\{(\w+)=", expression)
        labels = {*chosen, *(label for some in grouped for label in some.split(", "))}
        assert labels <= set().union(*(samples[name] for name in names))


def test_the_service_is_started_with_flags_that_it_has_and_probed_where_it_answers():
    deployment = only(MANIFESTS, "Deployment")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    compose = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())["services"]["serve"]["command"]
    for command, *arguments in (container["args"], compose):
        assert command == "serve"
        command_parser("serve").parse_args(arguments)  # exits where a flag is unknown
    probes = {container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert probes <= set(guards.OPEN)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
        spec = only(MANIFESTS, kind)["spec"]
        chosen = spec.get("selector") or spec["podSelector"]
        assert chosen.get("matchLabels", chosen) == labels
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    options = bind("serve", command_parser("serve").parse_args(container["args"][2:]))["options"]
    assert ports == {"http": options.port, "metrics": options.metrics_port}
    assert only(MANIFESTS, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"] == "metrics"
    assert [port["targetPort"] for port in only(MANIFESTS, "Service")["spec"]["ports"]] == ["http"]


def test_hadolint_finds_nothing():
    done = subprocess.run(
        [str(Path(sys.executable).parent / "hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True
    )

    assert (done.returncode, done.stdout) == (0, "")


def write_wheel(folder, version):
    """Write a wheel of torch, without content or dependencies."""
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(
    ("argument", "offered", "installed"), [("", "", True), ("xpu", "+xpu", True), ("cpu", "+xpu", False)]
)
def test_the_image_takes_torch_from_where_it_is_told_or_says_which_argument_to_set(
    tmp_path, argument, offered, installed
):
    """The line of the Dockerfile, with a pip that knows one wheel of torch and no index."""
    version = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    write_wheel(tmp_path, f"{version}{offered}")
    (command,) = re.findall(r"^ +build=.*?exit 1; \}", (ROOT / "Dockerfile").read_text(), re.MULTILINE | re.DOTALL)
    pip = f"{sys.executable} -m pip install --quiet --no-index --no-warn-conflicts --target {tmp_path}/site"
    own = {"TORCH": argument, "TORCH_INDEX": "https://index.example.org", "PIP_FIND_LINKS": str(tmp_path)}
    done = subprocess.run(
        ["sh", "-euc", command.replace("/opt/venv/bin/pip install", pip)],
        **{"cwd": ROOT, "env": os.environ | own, "capture_output": True, "text": True},
    )

    found = {path.name for path in tmp_path.glob("site/*.dist-info")}
    if installed:
        assert (done.returncode, found) == (0, {f"torch-{version}{offered}.dist-info"}), done.stderr
        return
    assert (done.returncode, found) == (1, set())
    for text in (f"torch {version}+cpu was not found", "--build-arg TORCH_INDEX=URL", "TORCH=,"):
        assert text in done.stderr


def test_the_last_layers_of_the_image_are_the_code_alone_less_than_5_mb_and_no_data():
    """Packages are layers before the code, so that a change of it moves little."""
    text = (ROOT / "Dockerfile").read_text()
    allowed = set(re.findall(r"^!(.+)", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    last = text.rpartition("\nFROM ")[2]
    copied = [re.findall(r"^COPY (?!--from)(.+) \S+$", part, re.MULTILINE) for part in (text, last)]
    everything, code = (" ".join(paths).split() for paths in copied)
    assert set(everything) <= allowed
    assert allowed.isdisjoint({"data", "artifacts", "reports", "state", ".dvc", ".git", "mlartifacts"})
    files = subprocess.check_output(["git", "ls-files", *code], cwd=ROOT, text=True).splitlines()
    needed = {"seqrec/__main__.py", "models/sasrec.py", "components/image.py", "pipelines/client.py", "params.yaml"}
    assert needed <= {*files}
    assert sum((ROOT / name).lstat().st_size for name in files) < 5e6
    steps = re.findall(r"^(COPY|RUN|ADD)(?: (--from))?", last, re.MULTILINE)
    assert steps == [("COPY", "--from"), *[("COPY", "")] * (len(steps) - 1)]


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
    constraints = (ROOT / "constraints.txt").read_text().lower().replace("_", "-")
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", constraints, re.MULTILINE))
    entry = r"^(\S+)==(\S+).*((?:\n +--hash=sha256:[0-9a-f]{64}(?: \\)?)+)\n +# [a-z, ]+$"
    entries = re.findall(entry, text, re.MULTILINE)

    assert len(entries) == len(re.findall(r"^\w", text, re.MULTILINE)) > 200
    assert {name: version for name, version, _ in entries if pins.get(name, version) != version} == {}
    assert "torch" not in {name for name, _, _ in entries}
    assert not re.search(r"://|/\w+/|index", text.partition("\n")[2])


def locked(groups):
    command = [sys.executable, str(ROOT / "scripts" / "lock.py"), groups]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, set(re.findall(r"^(\S+)==", done.stdout, re.MULTILINE)), done.stderr


def test_the_extras_choose_what_is_installed_and_nothing_is_installed_without_a_digest():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"core": project["dependencies"], **project["optional-dependencies"]}
    named = {group: {re.match(r"[\w-]+", one)[0].lower() for one in extras[group]} - {"torch"} for group in extras}
    assert {*extras["pipeline"]} == {one for part in ("kfp", "mlflow", "dvc", "validation") for one in extras[part]}
    status, packages, _ = locked("core serve")
    assert status == 0
    assert named["core"] | named["serve"] | {"starlette", "pydantic-core"} <= packages
    assert packages.isdisjoint({"mlflow", "kfp", "pytest", "boto3", "cyclonedx-bom", "torch"})
    assert named["sbom"] <= locked("sbom")[1]
    status, packages, said = locked("core serv")
    assert (status, packages) == (1, set())
    assert "serv; there are core, pipeline" in said

    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    default = re.search(r'^ARG EXTRAS="(.*)"$', text, re.MULTILINE)[1]
    assert locked(f"core {default}")[1] >= set.union(*(named[name] for name in ("core", *default.split())))
    installs = re.findall(r"pip install ([^;\n]*)", text)
    assert len(installs) == 3
    for flags in installs:
        assert "--require-hashes --no-deps" in flags or '"torch==$build"' in flags
