# `make repro` and `make test` do all their set-up themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export DVC_NO_ANALYTICS := 1
export GX_ANALYTICS_ENABLED := false
export MLFLOW_DISABLE_TELEMETRY := true
# a process that finds no bytecode compiles every module that it imports, for seconds; containers often forbid to keep it
unexport PYTHONDONTWRITEBYTECODE
# a thread that waits spins for some 50 us before it sleeps: without spinning, small models train at half the speed;
# with the default of 30 times as long, they stand still beside other work
export GOMP_SPINCOUNT ?= 10000
UV := $(shell command -v uv)
INSTALL := $(if $(UV),uv pip install --quiet --python $(BIN)/python,$(BIN)/python -m pip install --quiet --no-compile)
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
KILLS ?= 100
SEED ?= 0

.PHONY: help setup lock first repro auto experiments text-demo benchmark bench docs test suite test-containers test-services
.PHONY: test-spark chaos fuzz lint audit format ui image clean

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

lock:  ## write requirements.lock again after constraints.txt or pyproject.toml has changed; needs uv
	$(if $(UV),,$(error needs uv: https://docs.astral.sh/uv/))
	$(PYTHON) scripts/lock.py

first: setup  ## train and register FLASH4Rec on MovieLens-100K in a few minutes, without DVC; writes runs/first
	@python -m seqrec run --config-file configs/first.yaml --out runs/first --register

repro: setup  ## run the whole pipeline and print the leaderboard; SET="finetune.epochs=3" for this run; JOBS=1 model at a time
	@python -m seqrec repro $(if $(SET),--changes "$$SET") $(if $(JOBS),--jobs $(JOBS))
	@python -m seqrec leaderboard --reports reports

auto: setup  ## find the best model for DATA=my.csv within MINUTES=10; writes OUT=runs/auto; see docs/auto.md
	@test -n "$(DATA)" || { echo "name the file: make auto DATA=my.csv" >&2; exit 1; }
	@python -m seqrec auto --data "$(DATA)" --minutes $(or $(MINUTES),10) --out "$(or $(OUT),runs/auto)"

benchmark: setup  ## compare the models of configs/benchmark.yaml on DATASET with SEEDS=42,43,44; ONLY="a,b" for some; resumes
	python -m seqrec benchmark --config-file configs/benchmark.yaml --dataset $(or $(DATASET),ml-100k) \
		--out runs/benchmark/$(or $(DATASET),ml-100k) --seeds $(or $(SEEDS),42) --only "$(ONLY)"

experiments: setup  ## run the experiments of docs/results, or ONLY="strec-oracle,flash4rec-parts"; SEEDS=42,43,44; resumes
	python scripts/experiments.py --only "$(ONLY)" $(if $(SEEDS),--seeds $(SEEDS))

text-demo: setup  ## show what text models gain on Scientific, with few users and new items; needs a mirror of its files
	@python scripts/text_demo.py --config-file configs/recformer/text-demo.yaml --out runs/text-demo

bench: setup  ## compare speed and memory with RePlay and RecTools; SEQUENCES=folder of a prepared ML-1M
	python -m benchmarks.peers --sequences $(or $(SEQUENCES),data/sequences)

docs: setup  ## build the documentation into build/site; a broken link is an error
	$(BIN)/python -m pip install --quiet --constraint constraints.txt 'mkdocs-material>=9.6'
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

test: setup  ## run linters, type checks and tests
	@$(MAKE) --no-print-directory --jobs 2 lint suite

suite: setup
	OMP_NUM_THREADS=1 pytest --numprocesses auto --dist loadfile --no-loadscope-reorder --durations 30

test-containers: setup  ## build the image and run the pipeline in it; needs Docker, or root on Debian
	scripts/with_docker.sh pytest -m containers tests/test_containers.py

test-services: setup  ## test with MLflow on PostgreSQL and an S3-compatible store; needs `apt-get install postgresql`
	@ls /usr/lib/postgresql/*/bin/initdb > /dev/null 2>&1 || command -v initdb > /dev/null || \
		{ echo "PostgreSQL is not installed: apt-get install --no-install-recommends postgresql" >&2; exit 1; }
	@$(BIN)/python -c "import moto, psycopg" || \
		{ echo "run: $(BIN)/python -m pip install --constraint constraints.txt --editable '.[services]'" >&2; exit 1; }
	OMP_NUM_THREADS=1 pytest -m services tests/test_services.py tests/data/test_stores.py

chaos: setup  ## kill `make repro` at KILLS random moments; compare the results with an uninterrupted run
	PYTHONPATH=.:tests python tests/chaos.py --kills $(KILLS) --seed $(SEED)

test-spark: setup  ## install pyspark and compare Spark with polars; needs Java 17 or newer
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[spark]'
	OMP_NUM_THREADS=1 pytest tests/data/test_table_engines.py -rs

fuzz: setup  ## search for inputs that end in a traceback or hang; MINUTES=20, ONLY=read for the readers
	@case "$(MINUTES)" in *[!0-9.]*) echo "MINUTES must be a number such as 20, not $(MINUTES)" >&2; exit 1;; esac
	FUZZ_MINUTES=$(or $(MINUTES),20) OMP_NUM_THREADS=1 pytest --numprocesses auto tests/fuzz -k "no_input $(if $(ONLY),and $(ONLY))"

lint: setup  ## run ruff and mypy
	ruff check .
	ruff format --check .
	mypy

audit: setup  ## check the pinned packages for known vulnerabilities; asks pypi.org
	$(BIN)/python -m pip install --quiet --constraint constraints.txt 'pip-audit>=2.10'
	pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

format: setup  ## format the code with ruff
	ruff format .
	ruff check --fix .

ui: setup  ## start MLflow at port 5000; print and open the page that compares the last runs
	@python -m seqrec ui

image:  ## build the image; PYTHON_IMAGE=python@sha256:... pins its base, as a release should
	docker build --tag seqrec:latest $(if $(PYTHON_IMAGE),--build-arg PYTHON_IMAGE=$(PYTHON_IMAGE)) .

clean:  ## remove results; the DVC cache and downloads stay
	rm -rf artifacts reports build
