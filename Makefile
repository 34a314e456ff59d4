# `make repro` and `make test` do all their set-up themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export DVC_NO_ANALYTICS := 1
export GX_ANALYTICS_ENABLED := false
export MLFLOW_DISABLE_TELEMETRY := true
# a thread that waits spins for some 50 us before it sleeps: without spinning, small models train at half the speed;
# with the default of 30 times as long, they stand still beside other work
export GOMP_SPINCOUNT ?= 10000
UV := $(shell command -v uv)
INSTALL := $(if $(UV),uv pip install --quiet --python $(BIN)/python,$(BIN)/python -m pip install --quiet --no-compile)
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
KILLS ?= 100
SEED ?= 0

.PHONY: help setup lock first repro auto text-demo benchmark bench docs test suite test-containers test-services
.PHONY: test-spark chaos fuzz lint audit format ui pipeline image clean

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(VENV)/.installed  ## make .venv with the pinned packages

# torch last, and without digests: those of its CPU and CUDA builds differ, and so do those of a wheel made at home
$(VENV)/.installed: pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(PYTHON) scripts/lock.py core pipeline text serve dev > $(VENV)/requirements.lock
	$(INSTALL) --require-hashes --no-deps --requirement $(VENV)/requirements.lock
	$(INSTALL) --constraint constraints.txt torch
	$(INSTALL) --no-deps --editable .
	@touch $@

lock:  ## write requirements.lock anew, after a change of constraints.txt or pyproject.toml; needs uv
	$(PYTHON) scripts/lock.py

first: setup  ## FLASH4Rec on MovieLens-100K in about two minutes, and its champion; without DVC; into runs/first
	@python -m seqrec run --config-file configs/first.yaml --out runs/first --register

repro: setup  ## the whole pipeline, then the leaderboard; SET="finetune.epochs=3" changes settings for this run
	@python -m seqrec repro $(if $(SET),--changes "$(SET)")
	@python -m seqrec leaderboard --reports reports

auto: setup  ## the best model of DATA=my.csv within MINUTES=10, into OUT=runs/auto; docs/auto.md
	@test -n "$(DATA)" || { echo "name the file: make auto DATA=my.csv" >&2; exit 1; }
	@python -m seqrec auto --data "$(DATA)" --minutes $(or $(MINUTES),10) --out "$(or $(OUT),runs/auto)"

benchmark: setup  ## the rows of configs/benchmark.yaml on DATASET under SEEDS=42,43,44; ONLY="a,b" for some; resumes
	python -m seqrec benchmark --config-file configs/benchmark.yaml --dataset $(or $(DATASET),ml-100k) \
		--out runs/benchmark/$(or $(DATASET),ml-100k) --seeds $(or $(SEEDS),42) --only "$(ONLY)"

text-demo: setup  ## what text is worth on Scientific: few users, new items, described ones; needs a mirror of its files
	@python scripts/text_demo.py --config-file configs/recformer/text-demo.yaml --out runs/text-demo

bench: setup  ## speed and memory against RePlay and RecTools; SEQUENCES=folder of a prepared ML-1M
	python -m benchmarks.peers --sequences $(or $(SEQUENCES),data/sequences)

docs: setup  ## the site of these pages, into build/site; a link that leads nowhere is an error
	$(BIN)/python -m pip install --quiet --constraint constraints.txt 'mkdocs-material>=9.6'
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

test: setup  ## linters and types beside the tests
	@$(MAKE) --no-print-directory --jobs 2 lint suite

suite: setup
	OMP_NUM_THREADS=1 pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

test-containers: setup  ## build the image, run the pipeline in it; needs Docker, or root on Debian
	scripts/with_docker.sh pytest -m containers tests/test_containers.py

test-services: setup  ## MLflow on a real PostgreSQL and an S3-compatible store; needs `apt-get install postgresql`
	@ls /usr/lib/postgresql/*/bin/initdb > /dev/null 2>&1 || command -v initdb > /dev/null || \
		{ echo "PostgreSQL is not installed: apt-get install --no-install-recommends postgresql" >&2; exit 1; }
	@$(BIN)/python -c "import moto, psycopg" || \
		{ echo "run: $(BIN)/python -m pip install --constraint constraints.txt --editable '.[services]'" >&2; exit 1; }
	OMP_NUM_THREADS=1 pytest -m services tests/test_services.py

chaos: setup  ## kill `make repro` at KILLS random moments; every result must be that of an uninterrupted run
	PYTHONPATH=.:tests python tests/chaos.py --kills $(KILLS) --seed $(SEED)

test-spark: setup  ## install pyspark and compare Spark with polars; needs Java 17 or newer
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[spark]'
	OMP_NUM_THREADS=1 pytest tests/data/test_table_engines.py -rs

fuzz: setup  ## search for inputs that end in a traceback or hang; MINUTES=20, ONLY=read for the readers
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 python -m fuzz --minutes $(or $(MINUTES),20) --only "$(ONLY)"

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
	python -m seqrec.pipelines compile --output build/pipeline.yaml
	python -m seqrec.pipelines compile --pipeline retraining --output build/retraining.yaml

image:  ## build the image; PYTHON_IMAGE=python@sha256:... takes that very base, as a release should
	docker build --tag seqrec:latest $(if $(PYTHON_IMAGE),--build-arg PYTHON_IMAGE=$(PYTHON_IMAGE)) .

clean:  ## remove results; the DVC cache and downloads stay
	rm -rf artifacts reports build
