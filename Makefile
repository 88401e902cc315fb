# Every target sets up what it needs in .venv, pinned by constraints.txt; clients whose own pins clash
# have a .venv-CLIENT.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all test-kernels test-torchtune test-torchtitan parity clients check mutants \
  fuzz soak docs pages dist clean

demo: .venv/examples ## train a byte-level GPT with Muon and AdamW
	$(BIN)/python examples/train_gpt.py

test: .venv/test ## the test suite
	$(BIN)/python -m pytest -m "not slow and not parity"

test-all: .venv/test ## the longer checks too
	$(BIN)/python -m pytest -m "not parity"

test-torchtune test-torchtitan: test-%: .venv-%/installed ## FMuon in the hands of that client
	OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest tests/clients/test_$*.py

test-kernels: .venv-kernels/installed ## the kernels for GPUs, in the interpreter of Triton
	.venv-kernels/bin/python -m pytest tests/test_symmetric.py

parity: .venv/parity ## every preset beside the optimizer that it stands for
	$(BIN)/python -m pytest tests/parity

clients: .venv/clients ## trainers and checkpoints in the real packages, and the examples
	$(BIN)/python -m pytest tests/clients tests/test_examples.py

mutants: .venv/test ## break the core line by line; a named test must notice each
	$(BIN)/python tests/mutants.py

fuzz: .venv/test ## the fuzz tests with a large budget; prints what was tried
	$(BIN)/python tests/fuzz.py

soak: .venv/test ## 2,000 compiled steps; prints graphs, memory and drift
	$(BIN)/python tests/soak.py

check: .venv/dev ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: .venv/docs ## the site, into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pages: .venv/test ## write anew what pages take from code and records
	$(BIN)/python docs/generate.py

dist: .venv/dev ## wheel and sdist into dist/, each installed in a venv of its own and tried
	rm -rf dist .venv-dist
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build
	for file in dist/*.whl dist/*.tar.gz; do \
	  $(PYTHON) -m venv --clear .venv-dist && \
	  .venv-dist/bin/python -m pip install --quiet --disable-pip-version-check \
	    -c constraints.txt $$file && \
	  .venv-dist/bin/python -I tests/installed.py $$file || exit 1; \
	done

.venv/examples .venv/test .venv/parity .venv/clients .venv/docs .venv/dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e ".[$(@F)]"
	touch $@

.venv-kernels/installed .venv-torchtune/installed .venv-torchtitan/installed: .venv-%/installed: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e ".[$*]"
	touch $@

clean:
	rm -rf .venv .venv-kernels .venv-torchtune .venv-torchtitan out build dist
