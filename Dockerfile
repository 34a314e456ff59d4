# One image for every step. Build: docker build --tag seqrec:latest .
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
WORKDIR /build
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY seqrec/__init__.py seqrec/__init__.py
# dependencies before source: a change of code does not install them again
RUN python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    print(*p['dependencies'], *p['optional-dependencies']['pipeline'], \
    *p['optional-dependencies']['text'], sep='\n')" > requirements.txt \
    && pip install --constraint constraints.txt --requirement requirements.txt

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="seqrec" org.opencontainers.image.licenses="MIT"
COPY --from=build /opt/venv /opt/venv
WORKDIR /app
COPY seqrec seqrec
COPY models models
COPY components components
COPY pipelines pipelines
COPY configs configs
COPY params.yaml ./
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp \
    DVC_NO_ANALYTICS=1 GX_ANALYTICS_ENABLED=false MLFLOW_DISABLE_TELEMETRY=true
USER 10001:10001
ENTRYPOINT ["python", "-m", "seqrec"]
CMD ["--help"]
