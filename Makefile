# make demo   install, then complete a few prompts with the packaged pair
# make test   install, then everything a change must pass (no GPU needed)
# Both may be run again at any time; both say what they do.

PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 1)

.PHONY: demo test lint check clean

demo: .venv/.installed
	@mkdir -p out
	@echo "== $(BIN)/dspark generate examples/demo/prompts.jsonl --model demo"
	@$(BIN)/dspark generate examples/demo/prompts.jsonl -o out/demo.jsonl --overwrite \
		--model demo --max-tokens 256 --show 3 --compare-plain

test: .venv/.tested lint check

lint: .venv/.tested
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

check: .venv/.tested
	@# Tests that share what a module loads stay in one of the two processes for as long as both are busy.
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist worksteal
	@# Processes of their own: an out-of-bounds store in the interpreter takes its process down.
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 tests/engine/kernels

.venv/.installed: pyproject.toml
	@echo "== making .venv with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -U pip
	@if ! command -v nvidia-smi >/dev/null 2>&1 || ! nvidia-smi -L >/dev/null 2>&1; then \
		echo "== no NVIDIA GPU here: installing torch==2.13.0 first"; \
		$(BIN)/python -m pip install -qq torch==2.13.0; \
	fi
	@echo "== installing dspark and what it needs"
	@$(BIN)/python -m pip install -qq -e .
	@touch $@

.venv/.tested: .venv/.installed
	@echo "== installing what the tests need"
	@$(BIN)/python -m pip install -qq -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv out build dist *.egg-info
