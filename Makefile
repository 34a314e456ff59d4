# `make repro` and `make test` do all their set-up themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export DVC_NO_ANALYTICS := 1
export GX_ANALYTICS_ENABLED := false
export MLFLOW_DISABLE_TELEMETRY := true

.PHONY: help setup repro experiments bench test test-containers test-spark lint audit format ui pipeline clean

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(VENV)/.installed  ## make .venv with the pinned packages

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[pipeline,text,serve,dev]'
	@touch $@

repro: setup  ## the whole pipeline, then the leaderboard; SET="finetune.epochs=3" tries other settings
	@python -m seqrec repro $(if $(SET),--changes "$(SET)")
	@python -m seqrec leaderboard --reports reports

experiments: setup  ## what is missing of configs/rec-denoiser, hours; ONLY="ml-100k ml-100k-grid" for some
	python scripts/rec_denoiser_experiments.py $(if $(ONLY),--only $(ONLY))

bench: setup  ## speed and memory against RePlay and RecTools; SEQUENCES=folder of a prepared ML-1M
	python -m benchmarks.losses
	python -m benchmarks.peers --sequences $(or $(SEQUENCES),data/sequences)

test: setup lint  ## linters, types, tests
	OMP_NUM_THREADS=1 pytest --numprocesses auto

test-containers: setup  ## build the image, run the pipeline in it; needs Docker, or root on Debian
	scripts/with_docker.sh pytest -m containers tests/test_containers.py

test-spark: setup  ## install pyspark and compare Spark with polars; needs Java 17 or newer
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[spark]'
	OMP_NUM_THREADS=1 pytest tests/data/test_table_engines.py -rs

lint: setup  ## ruff and mypy
	ruff check .
	ruff format --check .
	mypy

audit: setup  ## known vulnerabilities of the pinned packages; needs the advisories of pypi.org
	$(BIN)/python -m pip install --quiet --constraint constraints.txt 'pip-audit>=2.10'
	pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

format: setup  ## let ruff rewrite the code
	ruff format .
	ruff check --fix .

ui: setup  ## MLflow on the runs, at port 5000: prints and opens the page that compares them
	@python -m seqrec ui

pipeline: setup  ## compile the Kubeflow pipelines into build/
	python -m pipelines compile --output build/pipeline.yaml
	python -m pipelines compile --pipeline retraining --output build/retraining.yaml

clean:  ## remove results; the DVC cache and downloads stay
	rm -rf artifacts reports build
