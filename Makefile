# make demo        compile the bundled model and generate text from it
# make test        make lint, and the tests that are needed for a first answer
# make test-share  of the other tests, SHARE of them, drawn by SEED
# make test-slow   the other tests, which have the mark `slow`. make test-all runs both
# make lint        ruff, mypy and who may import whom
# make coverage    pytest, and which lines and branches it reached: in the terminal and in htmlcov/index.html
# make fuzz        attacks and property tests on new random examples, for MINUTES=10
# make bench       compile a 1.3-billion-parameter model with 10 % of its neurons firing, and measure it
# make gpu-pack    all that a GPU's machine is given for a first run, into build/gpu, and a rehearsal without one
# make docs        the documentation as a site, in build/site
# make constraints write constraints.txt anew, with the newest versions
# make format make clean
#
# Needed: Python 3.10 or newer with venv, and gcc. Everything else goes into .venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
PROMPT ?= class Reader:
MINUTES ?= 10
# The GPU of `make gpu-pack`: its compute capability times ten.
SM ?= 90
# A llama-bench for it that you have built, to be measured beside; without one the pack has no peer.
LLAMA ?=
# What `make coverage` runs; a folder of tests is quicker than all.
TESTS ?= tests

# What part of the slow tests `make test-share` draws, and by what.
SHARE ?= 0.25
SEED ?= $(shell git rev-parse HEAD 2>/dev/null || echo 0)

# The versions that are installed. With `CONSTRAINTS=` the newest that pyproject.toml allows.
CONSTRAINTS ?= -c constraints.txt

# More test processes than this only take memory: each holds torch.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 4 ] && echo 4 || echo $$n)
PYTEST = $(BIN)/pytest -n $(JOBS) --dist worksteal --durations=20

# Without it each command that a test starts compiles every module anew.
unexport PYTHONDONTWRITEBYTECODE

# Clients that drive the server in tests: apart, since they need other versions of some packages, and 370 MB. Where npm is,
# also programs of node, which take 500 MB.
CLIENTS := $(VENV)/clients

.PHONY: demo test test-share test-slow test-all lint coverage fuzz bench gpu-pack docs constraints format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/picompile compile models/tiny-reglu -o build/tiny-reglu --overwrite
	$(BIN)/picompile inspect build/tiny-reglu
	$(BIN)/picompile run build/tiny-reglu -p "$(PROMPT)" -n 160 --echo --temp 0.5 --top-p 0.9 --repetition-penalty 1.1 --seed 1
	@echo
	@echo "The bundled model is a toy of 3.5 million parameters. Next:"
	@echo "  source $(BIN)/activate"
	@echo "  picompile chat Qwen/Qwen3-0.6B"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/mypy

test: lint
	$(PYTEST) -m "not slow"

# The command that make prints draws the same tests again.
test-share: $(VENV)/.installed-dev
	$(PYTEST) -m slow --share $(SHARE) --share-seed $(SEED)

test-slow: export PICOMPILE_TEST_CLIENTS := $(CLIENTS)
test-slow: $(VENV)/.installed-dev $(CLIENTS)/.installed
	$(PYTEST) -m slow

test-all: test test-slow

# Not measured: commands that tests start in processes of their own.
coverage: $(VENV)/.installed-dev
	$(BIN)/coverage erase
	$(BIN)/pytest -n $(JOBS) --dist worksteal --cov --cov-report=term --cov-report=html $(TESTS)

fuzz: $(VENV)/.installed-dev
	$(BIN)/python tests/fuzz.py --minutes $(MINUTES) --jobs $(JOBS)

bench: $(VENV)/.installed
	test -d build/bench/reglu-1.3b || \
	    $(BIN)/picompile synth --shape reglu-1.3b --active 0.10 --seed 0 -o build/bench/reglu-1.3b
	for quant in q4 f16; do \
	    $(BIN)/picompile compile build/bench/reglu-1.3b -o build/bench/reglu-1.3b-$$quant --quant $$quant --overwrite && \
	    $(BIN)/picompile bench build/bench/reglu-1.3b-$$quant || exit 1; \
	done

# Kernels that were built before are used again.
gpu-pack: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.gpu.pack -o build/gpu --sm $(SM) $(if $(LLAMA),--llama $(LLAMA))
	$(BIN)/python tests/gpu_rehearsal.py build/gpu

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

constraints:
	rm -rf build/constraints
	$(PYTHON) -m venv build/constraints
	build/constraints/bin/python -m pip --quiet install ./runtime ./server '.[dev,docs]'
	build/constraints/bin/python .ci/freeze.py > build/constraints.txt
	mv build/constraints.txt constraints.txt
	rm -rf build/constraints

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

clean:
	rm -rf build dist htmlcov .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -print | xargs rm -rf

$(VENV)/.created:
	@command -v gcc >/dev/null || { echo "error: gcc not found; install it (Debian, Ubuntu: apt install gcc libc6-dev)" >&2; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; install Python 3.10 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "error: $$($(PYTHON) --version) is too old; give a newer one: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "error: Python has no venv module; install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# A second run finds the stamp and installs nothing, until the requirements change.
$(VENV)/.installed: $(VENV)/.created pyproject.toml runtime/pyproject.toml server/pyproject.toml constraints.txt
	@echo "installing picompile and what it needs; torch is large, this takes some minutes"
	@$(PIP) install $(CONSTRAINTS) --editable ./runtime --editable ./server --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the development tools"
	@$(PIP) install $(CONSTRAINTS) --editable ./runtime --editable ./server --editable '.[dev]'
	@touch $@

$(CLIENTS)/.installed: $(VENV)/.installed-dev
	@echo "installing clients of the server"
	@$(PIP) install --target $(CLIENTS) "anthropic>=0.70" "langchain-openai>=1.0" "litellm>=1.80" "openai-agents>=0.6"
	@! command -v npm >/dev/null || \
	    npm install --prefix $(CLIENTS)/npm --no-audit --no-fund --loglevel=error @openai/codex@0.171.0 @continuedev/cli@1.5.47
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "installing mkdocs"
	@$(PIP) install $(CONSTRAINTS) --editable ./runtime --editable ./server --editable '.[docs]'
	@touch $@
