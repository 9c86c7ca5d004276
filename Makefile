# Set-up, demo, tests. PYTHON needs 3.11 or newer. PIP_ARGS is passed to pip, e.g. an index with CPU builds of torch.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
NANO := artifacts/k2-nano
ENGINE := artifacts/k2-nano-cpu

.PHONY: demo test lint setup clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, found " + sys.version.split()[0] + "; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e '.[cpu,build,cuda,server,test]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps tinker-cookbook==0.6.1  # its renderers are oracles; the rest is not needed
	@$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e '.[tensorrt]' \
	  || echo "TensorRT for RTX cannot be had here: the tests that build its plans will be skipped"
	touch $@

# the JavaScript clients of the tests; without npm those tests are skipped
tests/server/node/node_modules: tests/server/node/package-lock.json
	@if command -v npm >/dev/null; then npm ci --prefix tests/server/node --no-audit --no-fund --loglevel=error; fi

demo: setup
	$(BIN)/python build.py $(NANO)/checkpoint --draft $(NANO)/draft --arch cpu -o $(ENGINE)
	$(BIN)/python -m engine_runtime generate $(ENGINE) --prompt-file $(NANO)/demo-prompt.txt --max-tokens 160 --stats

test: setup lint tests/server/node/node_modules
	$(BIN)/python -m pytest -m 'not gpu' -n 2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(ENGINE) .pytest_cache .mypy_cache .ruff_cache
