# make demo   compile the bundled model and generate text from it
# make test   ruff, mypy and pytest
# make fuzz   attacks and property tests on new random examples, for MINUTES=10
# make bench  compile a 1.3-billion-parameter model with 10 % of its neurons firing, and measure it
# make format make clean
#
# Needed: Python 3.10 or newer with venv, and gcc. Everything else goes into .venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
PROMPT ?= class Reader:
MINUTES ?= 10

# More test processes than this only take memory: each holds torch.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 4 ] && echo 4 || echo $$n)

.PHONY: demo test fuzz bench format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/picompile compile models/tiny-reglu -o build/tiny-reglu --force
	$(BIN)/picompile inspect build/tiny-reglu
	$(BIN)/picompile run build/tiny-reglu -p "$(PROMPT)" -n 160 --echo --temp 0.5 --top-p 0.9 --repetition-penalty 1.1 --seed 1

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n $(JOBS) --dist worksteal

fuzz: $(VENV)/.installed-dev
	$(BIN)/python tests/fuzz.py --minutes $(MINUTES) --jobs $(JOBS)

bench: $(VENV)/.installed
	test -d build/bench/reglu-1.3b || \
	    $(BIN)/picompile synth --shape reglu-1.3b --active 0.10 --seed 0 -o build/bench/reglu-1.3b
	for quant in q4 f16; do \
	    $(BIN)/picompile compile build/bench/reglu-1.3b -o build/bench/reglu-1.3b-$$quant --quant $$quant --force && \
	    $(BIN)/picompile bench build/bench/reglu-1.3b-$$quant || exit 1; \
	done

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
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
$(VENV)/.installed: $(VENV)/.created pyproject.toml runtime/pyproject.toml
	@echo "installing picompile and what it needs; torch is large, this takes some minutes"
	@$(PIP) install --editable ./runtime --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the development tools"
	@$(PIP) install --editable ./runtime --editable '.[dev]'
	@touch $@
