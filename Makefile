# `make demo` shows what batchwright does; `make test` checks everything. Both start from a clean clone.
PYTHON ?= python3.11
VENV   ?= .venv
DEMO   ?= .venv-demo
PEERS  ?= .venv-peers

# Tests start hundreds of interpreters: each would compile the package again if the environment says so.
export PYTHONDONTWRITEBYTECODE =
# Workers of pytest share the cores, and arrays are small: more threads would wait for each other.
unit doctests test-all mutate: export OMP_NUM_THREADS = 1
unit doctests test-all mutate: export OPENBLAS_NUM_THREADS = 1

.PHONY: demo test test-all test-loaded static lint types doctests unit mutate dist bench bench-peers clean

$(DEMO)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(DEMO)/ready
	$(DEMO)/bin/batchwright demo

# Two lanes: lint, types and doctests use the time in which the tests wait.
test:
	$(MAKE) -j 2 unit static

static: lint types doctests

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/ready
	$(VENV)/bin/mypy
	$(VENV)/bin/basedpyright --level error tests/typed_user.py
	$(VENV)/bin/python tests/verify_types.py 98

unit: $(VENV)/ready
	$(VENV)/bin/pytest -n 3 --dist worksteal -m 'not peers and not slow'

doctests: $(VENV)/ready
	$(VENV)/bin/pytest --doctest-modules src/batchwright -q -p no:cacheprovider

# `make test` three times in a row beside eight processes that keep the cores busy. They end with the shell that starts them.
test-loaded: $(VENV)/ready
	for n in 1 2 3 4 5 6 7 8; do (while kill -0 $$$$ 2>/dev/null; do :; done) & done; \
	for round in 1 2 3; do echo "round $$round of 3"; $(MAKE) test || exit 1; done

test-all: static $(PEERS)/ready
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	$(VENV)/bin/pytest -n 3 --dist worksteal

# Change the source in 400 places, one at a time, and count the changes that no test notices. Takes an hour or two.
mutate: $(VENV)/ready
	$(VENV)/bin/python tests/mutate.py --count 400

# Wheel and sdist, checked as an index checks them; then every demo from the wheel, in an environment that has nothing else.
dist: $(VENV)/ready
	rm -rf build dist
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dist]'
	$(VENV)/bin/python -m build --outdir dist
	$(VENV)/bin/twine check --strict dist/*
	$(PYTHON) -m venv build/installed
	build/installed/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	mkdir build/empty
	cd build/empty && for name in "" spike chat buffer queue; do ../installed/bin/batchwright demo $$name || exit 1; done

bench: $(VENV)/ready
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	$(VENV)/bin/python -m benchmarks.loading

# Other libraries beside us, in an environment of their own: their versions are pinned, and exclude each other on paper.
$(PEERS)/ready: benchmarks/peers/requirements.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/peers/requirements.txt \
	  || grep -v '^#' benchmarks/peers/requirements.txt | xargs -n 1 $(PEERS)/bin/python -m pip install --quiet --no-deps \
	  || true  # one by one then: the row of a peer that cannot be installed says so
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

bench-peers: $(PEERS)/ready
	$(PEERS)/bin/python -m benchmarks.peers --out build/bench-peers.md

clean:
	rm -rf $(VENV) $(DEMO) $(PEERS) .demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
