"""What the section `kubernetes` of params.yaml makes of a step: the one place where a step meets the cluster."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from kfp import kubernetes
from kfp.dsl import PipelineTask

from seqrec.cluster.jobs import Place
from seqrec.cluster.launch import PLACE
from seqrec.components.image import IMAGE
from seqrec.config import KubernetesConfig, LaunchConfig, StepResources

STATE = "/tmp/seqrec/state"  # downloads and resume states: lost with the pod, unless kubernetes.state_claim is mounted
DATA = "/data"
PLACED = "seqrec.org/place"  # annotation of a pod, which its step reads as the variable PLACE
DAY_S = 86_400
LONGEST_S = 3650 * DAY_S  # of all attempts at a step that has no timeout


def place(step: str, cluster: KubernetesConfig) -> dict[str, Any]:
    """Return the `Place` of a step as a mapping: only jobs need to know more than how many processes there are."""
    launch = cluster.launch[step]
    if launch.launcher == "step":
        return {"launch": {"processes": launch.processes}}
    return dataclasses.asdict(Place(launch=launch, image=IMAGE, resources=cluster.step(step), cluster=cluster))


def apply(task: PipelineTask, step: str, cluster: KubernetesConfig) -> PipelineTask:
    """Set what step `step` asks for; one that only waits for a job gets the resources of `default`, for as long."""
    wanted = cluster.step(step)
    if cluster.launch.get(step, LaunchConfig()).launcher == "job":
        attempts = {name: getattr(wanted, name) for name in ("retries", "backoff_s", "timeout_s")}
        wanted = dataclasses.replace(cluster.step("default"), **attempts)
    task.set_cpu_request(wanted.cpu).set_memory_request(wanted.memory).set_memory_limit(wanted.memory)
    if wanted.gpus:
        task.set_accelerator_type(wanted.gpu_type).set_accelerator_limit(wanted.gpus)
    if wanted.retries:
        backoff, window = f"{wanted.backoff_s}s", f"{retry_window(wanted)}s"
        task.set_retry(wanted.retries, backoff_duration=backoff, backoff_factor=2.0, backoff_max_duration=window)
    if wanted.timeout_s:
        kubernetes.set_timeout(task, seconds=wanted.timeout_s)
    if wanted.shared_memory:
        kubernetes.empty_dir_mount(
            task, volume_name="shared-memory", mount_path="/dev/shm", medium="Memory", size_limit=wanted.shared_memory
        )
    for key, value in wanted.node_selector.items():
        kubernetes.add_node_selector(task, label_key=key, label_value=value)
    for toleration in wanted.tolerations:
        kubernetes.add_toleration(task, **toleration)
    if step in cluster.launch:  # no input of the step, so that another toleration does not miss KFP's cache
        kubernetes.add_pod_annotation(task, annotation_key=PLACED, annotation_value=json.dumps(place(step, cluster)))
        kubernetes.use_field_path_as_env(task, env_name=PLACE, field_path=f"metadata.annotations['{PLACED}']")
    _mount(task, step, cluster)
    return _surround(task, cluster)


def retry_window(wanted: StepResources) -> int:
    """Return the seconds from the first attempt's start after which Argo starts no attempt and kills a running one.

    Each attempt may wait a day for a node, and then use its timeout.
    """
    if not wanted.timeout_s:
        return LONGEST_S
    pauses = wanted.backoff_s * ((1 << wanted.retries) - 1)
    return min(LONGEST_S, (wanted.retries + 1) * (DAY_S + wanted.timeout_s) + pauses)


def _mount(task: PipelineTask, step: str, cluster: KubernetesConfig) -> None:
    kubernetes.empty_dir_mount(task, volume_name="scratch", mount_path="/tmp")  # the root may be read-only
    if cluster.state_claim and "state" in task.inputs:
        kubernetes.mount_pvc(task, pvc_name=cluster.state_claim, mount_path=STATE)
    if cluster.data_claim and step == "ingest":
        kubernetes.mount_pvc(task, pvc_name=cluster.data_claim, mount_path=DATA)


def _surround(task: PipelineTask, cluster: KubernetesConfig) -> PipelineTask:
    """Give `task` what all steps have alike: variables, secrets, labels, and a user who is not root."""
    for name, value in cluster.environment.items():
        task.set_env_variable(name, value)
    for secret, keys in cluster.secrets.items():
        kubernetes.use_secret_as_env(task, secret_name=secret, secret_key_to_env=keys)
    for name, value in cluster.labels.items():
        kubernetes.add_pod_label(task, label_key=name, label_value=value)
    if cluster.image_pull_secrets:
        kubernetes.set_image_pull_secrets(task, secret_names=cluster.image_pull_secrets)
    kubernetes.set_security_context(task, run_as_user=cluster.user, run_as_group=cluster.user, run_as_non_root=True)
    return task
