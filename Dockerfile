# One image for every step, and for the MLflow server. Build: docker build --tag seqrec:latest .
# The build of torch: --build-arg TORCH=cu130, rocm7.2, xpu, ... (suffixes of PyTorch's indices; default: cpu).
# Without those indices: TORCH= takes the wheel of the package index, TORCH_INDEX=URL another index that has the build.
# Behind a proxy that re-signs: --secret id=ca,src=CERTIFICATES.pem
# A tag can change under the same name. For a release give the digest that `docker buildx imagetools inspect` prints:
# --build-arg PYTHON_IMAGE=python:3.11-slim@sha256:..., or `make image PYTHON_IMAGE=...`
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
ARG TORCH=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/${TORCH}
ARG PIP_INDEX_URL=
ARG PIP_FIND_LINKS=
ARG EXTRAS="pipeline text serve otel cluster"
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
SHELL ["/bin/sh", "-eu", "-c"]
WORKDIR /build
COPY constraints.txt requirements.lock ./
COPY scripts/lock.py scripts/
# dependencies before source: a change of code does not install them again; every file must have a digest of the lock
RUN --mount=type=secret,id=ca \
    if [ -f /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    for name in PIP_INDEX_URL PIP_FIND_LINKS; do if [ -z "$(printenv "$name")" ]; then unset "$name"; fi; done; \
    python3 -m venv /opt/venv; \
    python3 scripts/lock.py core "$EXTRAS" > packages.lock; \
    /opt/venv/bin/pip install --require-hashes --no-deps --requirement packages.lock; \
    python3 -m venv /opt/sbom; \
    python3 scripts/lock.py sbom > sbom.lock; \
    /opt/sbom/bin/pip install --require-hashes --no-deps --requirement sbom.lock
# torch by its full version: another index can never give the other build; its dependencies are installed already
RUN --mount=type=secret,id=ca \
    if [ -f /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    for name in PIP_INDEX_URL PIP_FIND_LINKS; do if [ -z "$(printenv "$name")" ]; then unset "$name"; fi; done; \
    build="$(sed -n 's/^torch==//p' constraints.txt)${TORCH:++$TORCH}"; \
    /opt/venv/bin/pip install --constraint constraints.txt \
        ${TORCH:+${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}} "torch==$build" || { \
        echo "torch $build was not found: name an index that has it (--build-arg TORCH_INDEX=URL), another build" \
            "(TORCH=cpu, cu130, ...), or the plain wheel of the package index (TORCH=, and PIP_INDEX_URL=URL)" >&2; \
        exit 1; }; \
    /opt/sbom/bin/cyclonedx-py environment --output-file /opt/venv/sbom.cdx.json /opt/venv/bin/python

FROM ${PYTHON_IMAGE}
ARG VERSION=0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="seqrec" \
    org.opencontainers.image.description="Sequential recommendation as a pipeline" \
    org.opencontainers.image.licenses="MIT" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/venv /opt/venv
WORKDIR /app
COPY seqrec seqrec
COPY models models
COPY components components
COPY pipelines pipelines
COPY configs configs
COPY params.yaml ./
# the root file system may be read-only: whatever is written goes below /tmp; the user may be one without a name
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp LOGNAME=seqrec \
    MPLCONFIGDIR=/tmp/matplotlib DVC_SITE_CACHE_DIR=/tmp/dvc GIT_PYTHON_REFRESH=quiet \
    DVC_NO_ANALYTICS=1 GX_ANALYTICS_ENABLED=false MLFLOW_DISABLE_TELEMETRY=true
USER 10001:10001
ENTRYPOINT ["python", "-m", "seqrec"]
CMD ["--help"]
