# Everything runs in a virtual environment inside this checkout; no root, nothing outside is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PLOTS := $(VENV)/.plots

.PHONY: demo test bench soak lint clean

demo: $(STAMP)
	$(BIN)/elasticd demo --nodes 3 $(ARGS)

test: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(ARGS)

bench: $(PLOTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench $(ARGS)

# Root, systemd-nspawn: three hosts with a real systemd, something happens to one of them every 15 s.
soak: $(STAMP)
	$(BIN)/python -m tests.systemd.soak $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# constraints.txt pins what is tested (and torch to a version with small CPU wheels); pyproject.toml has the honest ranges.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV): torch and what else constraints.txt pins, about 1 GB; a minute or two"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,etcd]'
	touch $@

# matplotlib draws the curve of rounds over nodes; the other commands do without it.
$(PLOTS): $(STAMP)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
