# Everything runs in .venv, which the first target that needs it creates.
#   make quickstart   install, run GRPO on a tiny model (TP2, then PP2), say where the results are
#   make examples     run what the READMEs show, compare the figures that those of the examples state (minutes)
#   make test         install what the tests need, run them all but those of engine servers
#   make engines      install the rollout engines that are servers, each into an environment of its own under .engines
#   make test-engines run the tests that start such servers, one with SmolLM2-135M (98 MB to download)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SMOLLM2 := models/smollm2-135m/model.safetensors
# The versions that were tested together, torch as a CPU build. On GPUs: make ... CONSTRAINTS=
CONSTRAINTS ?= docker/constraints-cpu.txt
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))

.PHONY: install quickstart smollm2 gsm8k examples engines engines-vllm engines-sglang test test-fast test-engines test-faults test-browser coverage docs lint clean

install: $(VENV)/.installed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: setup.py $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "installing into $(VENV) ..."
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@$(PIP_INSTALL) --editable ".[test]"
	@touch $@

# Transformer Engine's Python files alone, in a folder of their own: in site-packages, without the compiled parts,
# they break megatron.core. tests/rehearsal runs the GPU path on them.
REHEARSAL := $(VENV)/rehearsal/transformer_engine_python

$(REHEARSAL)/.installed: docker/rehearsal.txt | $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) --requirement $<
	@touch $@

quickstart: $(VENV)/.installed
	$(BIN)/megagrpo run examples/quickstart/quickstart.yaml --nproc 2
	$(BIN)/megagrpo run examples/quickstart/quickstart_pp2.yaml --nproc 2
	@echo "TP2: runs/quickstart   PP2: runs/quickstart_pp2   (summary.json, metrics.jsonl, completions/, tensorboard/, hf/)"

$(SMOLLM2): | $(VENV)/.installed
	$(BIN)/python examples/smollm2_arithmetic/prepare.py $(@D)

smollm2: $(VENV)/.installed $(SMOLLM2)
	$(BIN)/megagrpo run examples/smollm2_arithmetic/smollm2_arithmetic.yaml --nproc 2
	@echo "results: runs/smollm2_arithmetic   (summary.json, metrics.jsonl, completions/, tensorboard/, hf/)"

gsm8k: $(VENV)/.installed $(SMOLLM2)
	$(BIN)/megagrpo run examples/gsm8k/gsm8k.yaml --nproc 2

# Runs the commands that the READMEs show and compares the figures that those of the examples state: minutes, and
# more where there are engines (make engines)
examples: $(VENV)/.installed $(SMOLLM2)
	$(BIN)/python tools/check_examples.py

# Each rollout engine that is a server has a Python environment of its own, which engine.server.python finds under .engines.
# Where there is an NVIDIA device, or with GPU=-gpu, the GPU builds of both.
GPU ?= $(if $(wildcard /dev/nvidiactl),-gpu)

engines: engines-vllm engines-sglang

engines-vllm: .engines/vllm/.installed

.engines/vllm/.installed: docker/engine-vllm$(GPU).txt
	$(PYTHON) -m venv .engines/vllm
	@echo "installing vLLM into .engines/vllm (3.5 GB) ..."
	@.engines/vllm/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@$(if $(GPU),true ||) .engines/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

engines-sglang: .engines/sglang/.installed

.engines/sglang/.installed: docker/engine-sglang$(GPU).txt
	@echo "installing SGLang into .engines/sglang (3 GB) ..."
	@$(PYTHON) -m venv .engines/sglang
	@$(if $(GPU),true ||) .engines/sglang/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' $<)
	@.engines/sglang/bin/python -m pip install --quiet --disable-pip-version-check $(if $(GPU),,--no-deps) --requirement $<
	@touch $@

test-engines: $(VENV)/.installed-test $(SMOLLM2)
	$(BIN)/python -m pytest -m engines

test: $(VENV)/.installed-test $(REHEARSAL)/.installed
	$(BIN)/python -m pytest

test-fast: $(VENV)/.installed-test $(REHEARSAL)/.installed
	$(BIN)/python -m pytest -m "not distributed and not end_to_end and not engines"

# The report's page in a real browser (Debian: apt-get install chromium); pictures in build/pictures
test-browser: $(VENV)/.installed-test
	@$(PIP_INSTALL) --editable ".[test,browser]"
	MEGAGRPO_PICTURES=build/pictures $(BIN)/python -m pytest tests/unit/telemetry/test_report_page.py

# Breaks tiny runs at many points and shows what each fault came to: make test-faults [JSON=FILE]
test-faults: $(VENV)/.installed-test
	$(BIN)/python tests/faults/harness.py $(if $(JSON),--json $(JSON))

# Lines that tests without a second process reach; HTML in build/coverage
coverage: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "not distributed and not end_to_end and not engines" \
		--cov=megagrpo --cov-report=term --cov-report=html:build/coverage

# The documentation as a site in build/site; a link or an anchor that leads nowhere fails it
docs: $(VENV)/.installed-test
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .engines build *.egg-info runs
