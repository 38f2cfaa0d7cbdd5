# Everything works on a fresh machine with Python 3.11 or newer, pip and make.
PYTHON ?= python3
BIN := .venv/bin
# Hosts are many and tiny: giving freed memory back to the system after every operation costs page faults.
RUN := MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824
# A worker that has nothing left to do takes tests from another one.
WORKERS := --numprocesses auto --dist worksteal

.PHONY: fit report smoke test test-all coverage gpu lint clean

fit: $(BIN)/.installed  ## train Tamiyo on handwritten digits
	$(RUN) $(BIN)/esper-lightning fit --config digits

report: $(BIN)/.installed  ## one page about the last run: report.html
	$(BIN)/esper-lightning report $(ARGS)

smoke: $(BIN)/.installed  ## the same in miniature
	$(BIN)/esper-lightning fit --config smoke

test: $(BIN)/.installed  ## all that protects users from a change, in minutes
	$(RUN) $(BIN)/python -m pytest $(WORKERS)

test-all: $(BIN)/.installed  ## the same and the slow tier: every tick, every combination
	$(RUN) $(BIN)/python -m pytest $(WORKERS) -m "not cuda"

coverage: $(BIN)/.installed  ## lines and branches that `make test` goes through
	$(RUN) $(BIN)/python -m pytest $(WORKERS) --cov --cov-report=term-missing:skip-covered

gpu:  ## does everything work on a GPU, and how fast? One report; needs no network and no installation
	$(PYTHON) -m benchmarks.gpu $(ARGS)

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/pyright --pythonpath $(BIN)/python

.PHONY: installed
installed:  ## the package in a clean environment, run from an empty folder; PYTHON chooses the version
	rm -rf build/installed
	$(PYTHON) -m venv build/installed
	build/installed/bin/pip install --quiet .
	mkdir build/installed/empty
	cd build/installed/empty && ../bin/esper-lightning fit --config smoke

.PHONY: docs
docs: $(BIN)/.docs  ## the documentation as a site; a link that leads nowhere is an error
	$(BIN)/mkdocs build --strict

$(BIN)/.docs: $(BIN)/.installed
	$(BIN)/pip install --quiet --editable '.[docs]'
	touch $@

$(BIN)/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build site *.egg-info
