"""Pipelines on a Kubeflow server: submitted, scheduled, uploaded, and errors that say what to change."""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kfp
import kfp_server_api
import urllib3
from kfp.client import KF_PIPELINES_SA_TOKEN_ENV, KF_PIPELINES_SA_TOKEN_PATH, ServiceAccountTokenVolumeCredentials

from seqrec.components.image import IMAGE
from seqrec.config import KubernetesConfig, load
from seqrec.pipelines.compile import Package
from seqrec.redaction import redacted

EXPERIMENT = "seqrec"
SCHEDULE = "seqrec {}"  # name of the schedule of a pipeline
IN_CLUSTER = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
ENDED = ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED")
FAILED_POLLS = 30  # in a row, after which `wait` gives up
ANSWER_S = 60.0  # within which the server has to answer each attempt at a request
EQUALS = 1  # an operation of KFP's filters

logger = logging.getLogger(__name__)


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
            SubmissionError: none is named, it does not answer, or a server for several users was given no namespace.
        """
        if not self.host and "KUBERNETES_SERVICE_HOST" not in os.environ:
            raise SubmissionError("--host: no server is named, and this is no pod of a cluster; KFP_HOST is read, too")
        token_file = Path(os.environ.get(KF_PIPELINES_SA_TOKEN_ENV) or KF_PIPELINES_SA_TOKEN_PATH)
        has_token = not self.host and token_file.is_file()  # a pod mounts none where the server has a single user
        with self.explained():
            client = kfp.Client(
                host=self.host or IN_CLUSTER,
                namespace=self.namespace or "none",  # without one it would wait half a minute for a server that refuses
                existing_token=self.token or None,
                cookies=self.cookies or None,
                credentials=ServiceAccountTokenVolumeCredentials() if has_token else None,
                ssl_ca_cert=self.ca_file or None,
                verify_ssl=not self.insecure,
            )
            client._context_setting["namespace"] = self.namespace
            _limit_requests(client)
            health, _, headers = client._healthz_api.healthz_service_get_healthz_with_http_info()
        if "json" not in headers.get("Content-Type", ""):  # a page to log in, to which the request was redirected
            raise SubmissionError(
                f"--host: {self.title} answers with a page, not as Kubeflow Pipelines does: the session has expired "
                "(--token, --cookies), or the address is another one"
            )
        if health.multi_user and not self.namespace:
            raise SubmissionError(f"--namespace: {self.title} serves several users; name your namespace")
        return client

    @contextmanager
    def connected(self) -> Iterator[kfp.Client]:
        """Yield a client as `connect` does; its errors become a `SubmissionError` of one line."""
        client = self.connect()
        with self.explained():
            yield client

    @property
    def title(self) -> str:
        """What messages call the server."""
        return redacted(self.host) or "the server of this cluster"

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn what the client raises into one line."""
        try:
            yield
        except kfp_server_api.ApiException as error:
            causes = {
                401: "the token or the cookies are refused, or there are none: --token, --cookies",
                403: f"this user may not do that in namespace {self.namespace or '(none given)'}; --namespace, --token",
                404: f"not found; check that the namespace {self.namespace or '(none given)'} exists (--namespace)",
            }
            body = redacted(str(error.body), self.token, self.cookies)[:500]
            text = causes.get(error.status, f"HTTP status {error.status}: {body}")
            raise SubmissionError(f"{self.title}: {text}") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise SubmissionError(
                f"--host: {self.title} does not answer ({redacted(str(error), self.token, self.cookies)[:300]})"
            ) from error


def _limit_requests(client: kfp.Client) -> None:
    """Let no attempt at a request wait longer than `ANSWER_S`; the client itself passes no limit."""
    rest = client._healthz_api.api_client.rest_client  # of all its interfaces
    request = rest.request

    def limited(*arguments: Any, _request_timeout: Any = None, **options: Any) -> Any:
        return request(*arguments, _request_timeout=_request_timeout or (ANSWER_S, ANSWER_S), **options)

    rest.request = limited


def _cluster(package: Package) -> KubernetesConfig:
    return load(package.params).section("kubernetes")


@contextmanager
def _compiled(package: Package) -> Iterator[str]:
    """Yield the path of the YAML.

    Raises:
        SubmissionError: the image is not named by its digest, or results would go into a file of a pod.
    """
    if not re.fullmatch(r".+@sha256:[0-9a-f]{64}", IMAGE):
        raise SubmissionError(
            f"SEQREC_IMAGE: {IMAGE} has no digest, by which KFP recognises changed code; set SEQREC_IMAGE to "
            "repository@sha256:..., as `docker push` prints it"
        )
    _check_tracking(package)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"seqrec-{package.pipeline}.yaml"
        package.compile(file)
        yield str(file)


def _check_tracking(package: Package) -> None:
    name, cluster = "MLFLOW_TRACKING_URI", _cluster(package)
    if any(name in keys.values() for keys in cluster.secrets.values()):
        return
    settings = load(package.params).with_overrides(package.form.get("overrides", {}))
    uri = cluster.environment.get(name) or settings.section("register").tracking_uri
    if uri.startswith("sqlite:"):
        raise SubmissionError(
            f"register.tracking_uri: {uri} is a file that would be lost with its pod; set it to the address of an "
            f"MLflow server, or set {name} in kubernetes.environment"
        )


def submit(server: Server, package: Package, *, root: str = "") -> str:
    """Start a run, print the address of its page, and return its id.

    Artifacts go to `root`, such as s3://bucket/path; if it is empty, the server chooses.
    """
    with _compiled(package) as file, server.connected() as client:
        run = client.create_run_from_pipeline_package(
            file,
            arguments=dict(package.form),
            run_name=f"seqrec {package.pipeline} {time.strftime('%Y-%m-%d %H:%M:%S')}",
            experiment_name=EXPERIMENT,
            namespace=server.namespace or None,
            pipeline_root=root or None,
            service_account=_cluster(package).service_account or None,
        )
    return str(run.run_id)


def wait(server: Server, run_id: str, *, timeout_s: float, poll_s: float) -> None:
    """Return when the run has succeeded; every poll connects anew, with the token that is valid then.

    Raises:
        SubmissionError: it failed, was cancelled, takes longer than `timeout_s`, or `FAILED_POLLS` polls in a row fail.
    """
    end, failed, state = time.monotonic() + timeout_s, 0, "PENDING"
    while True:
        try:
            with server.connected() as client:
                run = client.get_run(run_id)
            failed, state = 0, run.state
        except SubmissionError as error:
            failed += 1
            if failed == FAILED_POLLS:
                raise SubmissionError(f"{error}; run {run_id} continues on the server") from error
            logger.warning("%s; trying again", error)
        if state in ENDED:
            break
        if time.monotonic() > end:
            raise SubmissionError(f"--timeout: run {run_id} is still {state}; it continues on the server")
        time.sleep(poll_s)
    if run.state != "SUCCEEDED":
        reason = run.error.message if run.error else "see its steps in the user interface"
        raise SubmissionError(f"run {run_id} {run.state.lower()}: {redacted(reason)}")


def upload(server: Server, package: Package) -> tuple[str, str]:
    """Put the pipeline on the server, as a new version where it is known; return its id and the version's.

    The names are DNS names, since a server that stores pipelines in Kubernetes takes no others.
    """
    name, namespace = f"seqrec-{package.pipeline}", server.namespace or None
    with _compiled(package) as file, server.connected() as client:
        known = client.list_pipelines(filter=_named(name), namespace=namespace).pipelines
        if not known:
            made = client.upload_pipeline(file, pipeline_name=name, namespace=namespace)
            version = client.list_pipeline_versions(made.pipeline_id, page_size=1).pipeline_versions[0]
            return made.pipeline_id, version.pipeline_version_id
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
        version = client.upload_pipeline_version(file, f"{name}-{stamp}", pipeline_id=known[0].pipeline_id)
        return version.pipeline_id, version.pipeline_version_id


def _named(name: str) -> str:
    """Return the server's filter for what has this name."""
    return json.dumps({"predicates": [{"operation": EQUALS, "key": "display_name", "stringValue": name}]})


def schedule(server: Server, package: Package, *, cron: str, root: str = "") -> str:
    """Upload the pipeline and have the server run it again and again; return the id of the recurring run.

    It replaces the schedule that the pipeline has.

    Raises:
        SubmissionError: `cron` has not six fields.
    """
    if len(cron.split()) != 6 and not cron.startswith("@"):
        raise SubmissionError(f"--cron: {cron!r} must have six fields, starting with seconds: '0 0 3 * * 0'")
    pipeline, version = upload(server, package)
    old = schedules(server, package.pipeline)
    with server.connected() as client:
        experiment = client.create_experiment(EXPERIMENT, namespace=server.namespace or None)
        recurring: Any = client.create_recurring_run(
            experiment.experiment_id,
            SCHEDULE.format(package.pipeline),
            cron_expression=cron,
            pipeline_id=pipeline,
            version_id=version,
            pipeline_root=root or None,
            no_catchup=True,
            max_concurrency="1",  # an int64 of the API, which is text in JSON
            service_account=_cluster(package).service_account or None,
        )
    _delete(server, old)
    return str(recurring.recurring_run_id)


def schedules(server: Server, pipeline: str) -> list[Any]:
    """Return the recurring runs of a pipeline in the user's namespace: one, unless somebody else has made more."""
    name = _named(SCHEDULE.format(pipeline))
    with server.connected() as client:
        found = client.list_recurring_runs(filter=name, namespace=server.namespace or None, page_size=100)
    return list(found.recurring_runs or ())


def unschedule(server: Server, pipeline: str) -> int:
    """Delete the schedule of a pipeline, and return how many recurring runs that were."""
    old = schedules(server, pipeline)
    _delete(server, old)
    return len(old)


def _delete(server: Server, recurring: Sequence[Any]) -> None:
    with server.connected() as client:
        for one in recurring:
            client.delete_recurring_run(one.recurring_run_id)
