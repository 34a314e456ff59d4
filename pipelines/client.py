"""Pipelines on a Kubeflow server: submitted, scheduled, uploaded, and errors that say what to change."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kfp
import kfp_server_api
import urllib3
from kfp.client import ServiceAccountTokenVolumeCredentials

from seqrec.components.image import IMAGE
from seqrec.config import KubernetesConfig, load
from seqrec.pipelines.compile import compile_pipeline
from seqrec.redaction import redacted

EXPERIMENT = "seqrec"
IN_CLUSTER = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
ENDED = ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED")


class SubmissionError(ValueError):
    """The server cannot be reached or refuses, or the run failed; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where Kubeflow Pipelines answers, and how one says who one is."""

    host: str = ""  # "": the cluster that this process runs in, its service account being who one is
    namespace: str = ""  # of the user; a server for several users needs it
    token: str = field(default="", repr=False)
    cookies: str = field(default="", repr=False)
    ca_file: str = ""
    insecure: bool = False

    def connect(self) -> kfp.Client:
        """Return a client of a server that has answered.

        Raises:
            SubmissionError: it does not answer, or a server for several users was given no namespace.
        """
        with self.explained():
            client = kfp.Client(
                host=self.host or IN_CLUSTER,
                namespace=self.namespace or "none",  # without one it would wait half a minute for a server that refuses
                existing_token=self.token or None,
                cookies=self.cookies or None,
                credentials=None if self.host else ServiceAccountTokenVolumeCredentials(),
                ssl_ca_cert=self.ca_file or None,
                verify_ssl=not self.insecure,
            )
            client._context_setting["namespace"] = self.namespace
            health = client._healthz_api.healthz_service_get_healthz()
        if health.multi_user and not self.namespace:
            raise SubmissionError(f"--namespace: {redacted(self.host)} serves several users; name your namespace")
        return client

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn what the client raises into one line."""
        server = redacted(self.host) or "the server of this cluster"
        try:
            yield
        except kfp_server_api.ApiException as error:
            causes = {
                401: "the token or the cookies are refused, or there are none: --token, --cookies",
                403: f"this user may not do that in namespace {self.namespace or '(none given)'}: --namespace, --token",
                404: f"there is no such thing, perhaps no namespace {self.namespace or '(none given)'}: --namespace",
            }
            body = redacted(str(error.body), self.token, self.cookies)[:500]
            text = causes.get(error.status, f"HTTP status {error.status}: {body}")
            raise SubmissionError(f"{server}: {text}") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise SubmissionError(
                f"--host: {server} does not answer ({redacted(str(error), self.token, self.cookies)[:200]})"
            ) from error


@dataclass(frozen=True, kw_only=True)
class Package:
    """What is sent: a pipeline compiled from the settings in `params`."""

    models: Sequence[str] = ()
    params: Path = Path("params.yaml")
    pipeline: str = "training"

    @property
    def cluster(self) -> KubernetesConfig:
        """Section `kubernetes`."""
        section: KubernetesConfig = load(self.params).section("kubernetes")
        return section

    @contextmanager
    def compiled(self) -> Iterator[str]:
        """Yield the path of the YAML.

        Raises:
            SubmissionError: the image is not named by its digest, or results would go into a file of a pod.
        """
        if not re.fullmatch(r".+@sha256:[0-9a-f]{64}", IMAGE):
            raise SubmissionError(
                f"SEQREC_IMAGE: {IMAGE} has no digest; KFP caches on this text, so a tag would run old code: set it to "
                "repository@sha256:..., as `docker push` prints it"
            )
        self._check_tracking()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"seqrec-{self.pipeline}.yaml"
            compile_pipeline(self.models, file, self.params, self.pipeline)
            yield str(file)

    def _check_tracking(self) -> None:
        name, cluster = "MLFLOW_TRACKING_URI", self.cluster
        if any(name in keys.values() for keys in cluster.secrets.values()):
            return
        uri = cluster.environment.get(name) or load(self.params).section("register").tracking_uri
        if uri.startswith("sqlite:"):
            raise SubmissionError(
                f"register.tracking_uri: {uri} is a file, lost with the pod that writes it; name a server there, or in "
                f"kubernetes.environment as {name}"
            )


def submit(server: Server, package: Package, *, root: str = "", cache: bool = True) -> str:
    """Start a run, print the address of its page, and return its id.

    Artifacts go to `root`, such as s3://bucket/path; if it is empty, the server chooses. With `cache`, the server skips
    steps that have run before.
    """
    with package.compiled() as file:
        client = server.connect()
        with server.explained():
            run = client.create_run_from_pipeline_package(
                file,
                run_name=f"seqrec {package.pipeline} {time.strftime('%Y-%m-%d %H:%M:%S')}",
                experiment_name=EXPERIMENT,
                namespace=server.namespace or None,
                pipeline_root=root or None,
                enable_caching=None if cache else False,
                service_account=package.cluster.service_account or None,
            )
    return str(run.run_id)


def wait(server: Server, run_id: str, *, timeout_s: float, poll_s: float) -> None:
    """Return when the run has succeeded.

    Raises:
        SubmissionError: it failed, was cancelled, or takes longer than `timeout_s`.
    """
    client, end = server.connect(), time.monotonic() + timeout_s
    while True:
        with server.explained():
            run = client.get_run(run_id)
        if run.state in ENDED:
            break
        if time.monotonic() > end:
            raise SubmissionError(f"--timeout: run {run_id} is still {run.state}; it continues on the server")
        time.sleep(poll_s)
    if run.state != "SUCCEEDED":
        reason = run.error.message if run.error else "see its steps in the user interface"
        raise SubmissionError(f"run {run_id} {run.state.lower()}: {redacted(reason)}")


def upload(server: Server, package: Package) -> tuple[str, str]:
    """Put the pipeline on the server, as a new version where it is known; return its id and the version's."""
    name = f"seqrec-{package.pipeline}"
    with package.compiled() as file:
        client = server.connect()
        with server.explained():
            known = client.get_pipeline_id(name)
            if known is None:
                made = client.upload_pipeline(file, pipeline_name=name, namespace=server.namespace or None)
                version = client.list_pipeline_versions(made.pipeline_id, page_size=1).pipeline_versions[0]
                return made.pipeline_id, version.pipeline_version_id
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            version = client.upload_pipeline_version(file, f"{name} {stamp}", pipeline_id=known)
            return known, version.pipeline_version_id


def schedule(server: Server, package: Package, *, cron: str, root: str = "") -> str:
    """Upload the pipeline and have the server run it again and again; return the id of the recurring run.

    Raises:
        SubmissionError: `cron` has not six fields.
    """
    if len(cron.split()) != 6 and not cron.startswith("@"):
        raise SubmissionError(f"--cron: {cron!r} must have six fields, starting with seconds: '0 0 3 * * 0'")
    pipeline, version = upload(server, package)
    client = server.connect()
    with server.explained():
        experiment = client.create_experiment(EXPERIMENT, namespace=server.namespace or None)
        recurring: Any = client.create_recurring_run(
            experiment.experiment_id,
            f"seqrec {package.pipeline}",
            cron_expression=cron,
            pipeline_id=pipeline,
            version_id=version,
            pipeline_root=root or None,
            no_catchup=True,
            max_concurrency="1",  # an int64 of the API, which is text in JSON
            service_account=package.cluster.service_account or None,
        )
    return str(recurring.recurring_run_id)
