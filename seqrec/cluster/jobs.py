"""Jobs that a step launches on the cluster and awaits: TrainJobs of Kubeflow Trainer, SparkApplications."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seqrec.config import ConfigError, KubernetesConfig, LaunchConfig, StepResources
from seqrec.errors import RetryableError
from seqrec.redaction import redacted

logger = logging.getLogger(__name__)
MAIN = Path(__file__).with_name("launch.py")  # what the processes of a job run
SPARK = "4.0.0"  # the operator asks for a version; the image decides which one runs
PLURALS = {"TrainJob": "trainjobs", "SparkApplication": "sparkapplications"}
OPERATORS = {"TrainJob": "Kubeflow Trainer 2", "SparkApplication": "the Kubeflow Spark operator"}
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
FAILED_POLLS = 30  # in a row, after which `finish` gives up
ANSWER_S = 60.0  # within which the cluster has to answer each attempt at a request
NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a stage runs; all fields but the first are for jobs only."""

    launch: LaunchConfig = field(default_factory=LaunchConfig)
    image: str = ""
    resources: StepResources = field(default_factory=StepResources)
    cluster: KubernetesConfig = field(default_factory=KubernetesConfig)

    @property
    def account(self) -> str:
        """Service account of the pods of the job."""
        return self.launch.service_account or self.cluster.service_account


def train_job(name: str, place: Place, state: Path, order: Path) -> dict[str, Any]:
    """Return the TrainJob (trainer.kubeflow.org/v1alpha1) that runs `order` with torchrun on every node."""
    launch, labels = place.launch, place.cluster.labels
    pod = {"metadata": {"labels": labels}, "spec": _pod(place, state)}
    node = {"name": "node", "template": {"spec": {"template": pod}}}
    patch = {"template": {"spec": {"replicatedJobs": [node]}}}
    trainer = {
        "image": launch.image or place.image,
        # the variables PET_* tell torchrun where the nodes are and how many processes to start
        "command": ["python", "-m", "torch.distributed.run", "-m", "seqrec.cluster.launch"],
        "args": [str(order)],
        "numNodes": launch.nodes,
        "numProcPerNode": launch.processes,
        "resourcesPerNode": _quantities(place.resources),
        "env": _variables(place.cluster),
    }
    spec: dict[str, Any] = {
        "runtimeRef": {"name": launch.runtime},
        "trainer": trainer,
        "runtimePatches": [{"manager": "seqrec.org/launch", "trainingRuntimeSpec": patch}],
    }
    if place.resources.timeout_s:
        spec["activeDeadlineSeconds"] = place.resources.timeout_s
    return _manifest("trainer.kubeflow.org/v1alpha1", "TrainJob", name, labels, spec)


def _manifest(version: str, kind: str, name: str, labels: dict[str, str], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": labels}, "spec": spec}


def _pod(place: Place, state: Path) -> dict[str, Any]:
    """Return the pod of one node of a TrainJob."""
    cluster = place.cluster
    pod = {
        "containers": [{"name": "node", "securityContext": CONTAINER_SECURITY, "volumeMounts": _mounts(place, state)}],
        "volumes": list(_volumes(place, state).values()),
        "securityContext": _pod_security(cluster),
        "serviceAccountName": place.account,
        "imagePullSecrets": [{"name": name} for name in cluster.image_pull_secrets],
        **_placement(place.resources),
    }
    return {key: value for key, value in pod.items() if value}


def _cores(cpu: str) -> int:
    """Return the whole cores of a quantity of Kubernetes: 2 of `2`, `2.5` and `2500m`."""
    from kubernetes.utils.quantity import parse_quantity

    return int(parse_quantity(cpu))


def _java(memory: str) -> str:
    """Return a quantity of memory in the units of Java, which Spark reads: 4g is 4Gi, and 1024b is 1024."""
    return f"{memory}b" if memory.isdigit() else memory.replace("i", "").lower()


def spark_application(name: str, place: Place, state: Path, order: Path) -> dict[str, Any]:
    """Return the SparkApplication (sparkoperator.k8s.io/v1beta2) that runs `order` on a driver and executors."""
    launch, cluster, resources = place.launch, place.cluster, place.resources
    pod = {
        "cores": max(1, _cores(resources.cpu)),
        "coreRequest": resources.cpu,
        "memory": _java(resources.memory),
        "env": _variables(cluster),
        "labels": cluster.labels,
        "podSecurityContext": _pod_security(cluster),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": _mounts(place, state),
        **_placement(resources),
    }
    account = {"serviceAccount": place.account} if place.account else {}
    spec = {
        "type": "Python",
        "mode": "cluster",
        "sparkVersion": SPARK,
        "image": launch.image or place.image,
        "imagePullSecrets": cluster.image_pull_secrets,
        "mainApplicationFile": f"local://{MAIN}",
        "arguments": [str(order)],
        "restartPolicy": {"type": "Never"},  # KFP repeats the step, which finds the finished job
        "volumes": list(_volumes(place, state).values()),
        "driver": {**pod, **account},
        "executor": {**pod, "instances": launch.nodes},
    }
    return _manifest("sparkoperator.k8s.io/v1beta2", "SparkApplication", name, cluster.labels, spec)


def _volumes(place: Place, state: Path) -> dict[str, dict[str, Any]]:
    """Return the volumes of a job's pod by where they are mounted: its root file system is read-only."""
    volumes: dict[str, dict[str, Any]] = {
        str(state): {"name": "state", "persistentVolumeClaim": {"claimName": place.cluster.state_claim}},
        "/tmp": {"name": "scratch", "emptyDir": {}},
    }
    if place.resources.shared_memory:
        size = {"medium": "Memory", "sizeLimit": place.resources.shared_memory}
        volumes["/dev/shm"] = {"name": "shared-memory", "emptyDir": size}
    return volumes


def _mounts(place: Place, state: Path) -> list[dict[str, str]]:
    return [{"name": volume["name"], "mountPath": path} for path, volume in _volumes(place, state).items()]


def _pod_security(cluster: KubernetesConfig) -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": cluster.user,
        "fsGroup": cluster.user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _placement(resources: StepResources) -> dict[str, Any]:
    found = {"nodeSelector": resources.node_selector, "tolerations": resources.tolerations}
    return {key: value for key, value in found.items() if value}


def _quantities(resources: StepResources) -> dict[str, dict[str, str]]:
    devices = {resources.gpu_type: str(resources.gpus)} if resources.gpus else {}
    return {
        "requests": {"cpu": resources.cpu, "memory": resources.memory, **devices},
        "limits": {"memory": resources.memory, **devices},
    }


def _variables(cluster: KubernetesConfig) -> list[dict[str, Any]]:
    plain = [{"name": name, "value": value} for name, value in cluster.environment.items()]
    secret = [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
        for name, keys in cluster.secrets.items()
        for key, variable in keys.items()
    ]
    return plain + secret


def finish(manifest: Mapping[str, Any], poll_s: float, is_done: Callable[[], bool]) -> None:
    """Create the job, or find the one of an earlier attempt, and return when it has succeeded.

    A job that has failed, or whose output is gone, is created again. The job is deleted if this process gets SIGTERM
    while it waits, and also with the pod of this process, which owns the job.

    Args:
        manifest: manifest of the job.
        poll_s: seconds between two checks of the job.
        is_done: returns whether the output of the job exists.

    Raises:
        ConfigError: no cluster can be reached, or it refuses.
        NoAnswerError: `FAILED_POLLS` polls in a row fail; the job continues, and the next attempt finds it.
        ValueError: the job failed, was deleted, or left no output.
    """
    jobs = _Jobs(manifest)
    phase = jobs.phase()
    if phase in ("Failed", "Deleted") or (phase == "Complete" and not is_done()):
        jobs.delete()
        phase = ""
    with jobs.deleted_on_sigterm():
        jobs.adopt() if phase else jobs.create()
        while (phase := jobs.polled()) != "Complete":
            if phase == "Failed":
                raise ValueError(f"{jobs.title} failed: {redacted(jobs.reason())}")
            if phase != "Running":
                raise ValueError(f"{jobs.title} was deleted before it was complete")
            time.sleep(poll_s)
    if not is_done():
        raise ValueError(
            f"{jobs.title} is complete, but its output is missing: check that the claim "
            "kubernetes.state_claim shows the same files to all pods"
        )


def forget(manifest: Mapping[str, Any]) -> None:
    """Delete a job whose output has been fetched; one that is gone already is not an error."""
    _Jobs(manifest).delete()


def _owner() -> list[dict[str, Any]]:
    """Return the reference to the pod of this step, as Kubeflow Pipelines names it."""
    name, uid = os.environ.get("KFP_POD_NAME"), os.environ.get("KFP_POD_UID")
    return [{"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}] if name and uid else []


class NoAnswerError(RetryableError):
    """The cluster does not answer, or only that it cannot just now."""


class _Jobs:
    """The job `manifest` in the namespace of this pod, or of the current kubectl context."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self.failed = 0  # polls in a row
        import urllib3
        from kubernetes import client, config
        from kubernetes.config.config_exception import ConfigException

        try:
            config.load_incluster_config()
            namespace = NAMESPACE.read_text().strip()
        except ConfigException:
            try:
                config.load_kube_config()
                namespace = config.list_kube_config_contexts()[1]["context"].get("namespace", "default")
            except ConfigException as error:
                raise ConfigError(
                    "kubernetes.launch: the launcher job needs a cluster, but none can be reached"
                ) from error
        self.manifest, self.kind, self.name = manifest, manifest["kind"], manifest["metadata"]["name"]
        self.owner = {"metadata": {"ownerReferences": _owner()}}
        self.title = f"{self.kind} {namespace}/{self.name}"
        self.api = client.CustomObjectsApi()
        self.failure, self.silence = client.ApiException, urllib3.exceptions.HTTPError
        group, version = manifest["apiVersion"].split("/")
        self.place = {"group": group, "version": version, "namespace": namespace, "plural": PLURALS[self.kind]}

    def create(self) -> None:
        body = {**self.manifest, "metadata": {**self.manifest["metadata"], **self.owner["metadata"]}}
        self._call(self.api.create_namespaced_custom_object, body=body)
        logger.info("%s: created", self.title)

    def adopt(self) -> None:
        """Make the job of an earlier attempt that of this pod, with whose end it ends."""
        if self.owner["metadata"]["ownerReferences"]:
            self._call(self.api.patch_namespaced_custom_object, name=self.name, body=self.owner)

    def delete(self) -> None:
        """Delete the job, and wait until its name is free."""
        self.delete_soon()
        while self.phase():
            time.sleep(0.5)

    def delete_soon(self) -> None:
        if self.phase() not in ("", "Deleted"):
            self._call(self.api.delete_namespaced_custom_object, name=self.name)

    @contextmanager
    def deleted_on_sigterm(self) -> Iterator[None]:
        """Delete the job if this process is told to end."""
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            yield
        except SystemExit:
            self.delete_soon()
            logger.info("%s was deleted, because its step was stopped", self.title)
            raise
        finally:
            signal.signal(signal.SIGTERM, before)

    def phase(self) -> str:
        """Return Complete, Failed, Deleted, Running, or nothing where there is no such job."""
        found = self._found()
        if found is None:
            return ""
        if "deletionTimestamp" in found["metadata"]:
            return "Deleted"
        status = found.get("status", {})
        if self.kind == "SparkApplication":
            state = status.get("applicationState", {}).get("state", "")
            return {"COMPLETED": "Complete", "FAILED": "Failed", "SUBMISSION_FAILED": "Failed"}.get(state, "Running")
        true = {condition["type"] for condition in status.get("conditions", ()) if condition["status"] == "True"}
        return next((name for name in ("Complete", "Failed") if name in true), "Running")

    def polled(self) -> str:
        """Return the phase, "Running" where the cluster does not answer just now."""
        try:
            phase = self.phase()
        except NoAnswerError as error:
            self.failed += 1
            if self.failed == FAILED_POLLS:
                raise NoAnswerError(f"{error}; the job continues on the cluster") from error
            logger.warning("%s; trying again", error)
            return "Running"
        self.failed = 0
        return phase

    def reason(self) -> str:
        status = (self._found() or {}).get("status", {})
        spark = status.get("applicationState", {}).get("errorMessage", "")
        return spark or "; ".join(condition.get("message", "") for condition in status.get("conditions", ()))

    def _found(self) -> dict[str, Any] | None:
        return self._call(self.api.get_namespaced_custom_object, name=self.name)

    def _call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        try:
            return function(**self.place, **arguments, _request_timeout=(ANSWER_S, ANSWER_S))
        except self.failure as error:
            if error.status == 404 and "not found" in str(error.body) and self.name in str(error.body):
                return None  # there is no such job
            raise self._explained(error) from error
        except self.silence as error:
            raise NoAnswerError(f"kubernetes.launch: {self.title}: {redacted(str(error))}") from error

    def _explained(self, error: Any) -> ValueError:
        causes = {
            401: "the credentials are refused",
            403: "kubernetes.service_account may not do this: see the Role in deploy/",
            404: f"the cluster does not know this kind: install {OPERATORS[self.kind]}, or set launcher: step",
        }
        text = causes.get(error.status, error.body or error.reason)
        kind = NoAnswerError if error.status == 429 or error.status >= 500 else ConfigError
        return kind(f"kubernetes.launch: {self.title}: {redacted(str(text))}")
