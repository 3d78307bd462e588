# Everything happens in $(VENV), which the first target that needs it makes.  make check PYTHON=python3.13
PYTHON ?= python3
VENV   ?= .venv
# One more than two cores can run at once: some tests wait, for processes that end or clocks.
JOBS   ?= 3
BIN    := $(VENV)/bin

# What is imported is compiled once: see $(VENV)/.with-%.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: check test lint bench bench-compare bench-publish docs facts clean

# The reference certifies itself; then a production kernel is verified against it.  make check MECHANISMS=softmax
check: $(VENV)/.with-onnx
	$(BIN)/refattn check $(MECHANISMS)
	$(BIN)/refattn verify softmax --impl examples/onnxruntime_attention.py:attend --dtype float32

# The workers share the cores, so each is held to one thread; nothing outside this line sees the setting.
test: $(VENV)/.with-onnx $(VENV)/.with-test
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --timeout=600 $(ARGS)

lint: $(VENV)/.with-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy refattn tests asv_benchmarks docs

# Runs the benchmarks (float32 on NumPy), stores the results, and says what differs from those stored last on this
# machine.  make bench ARGS=--quick      make bench ARGS="--profile full"
bench: $(VENV)/.with-bench
	$(BIN)/python -m asv_benchmarks run $(ARGS)

# Two commits in alternating rounds, offline; a dot means the files as they are.  make bench-compare BASE=v0.1.0 HEAD=main
bench-compare: $(VENV)/.with-bench
	$(BIN)/python -m asv_benchmarks compare $(or $(BASE),HEAD) $(or $(HEAD),.) $(ARGS)

# Web pages of all stored results: newest.html on the newest commit, index.html with every curve.
bench-publish: $(VENV)/.with-bench
	$(BIN)/python -m asv_benchmarks publish

# The pages, into docs/_build/html; a warning is an error.
docs: $(VENV)/.with-docs
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html && echo docs/_build/html/index.html

# Measures the published figures of docs/facts.toml again.  make facts ARGS=--update
facts: $(VENV)/.with-onnx $(VENV)/.with-test $(VENV)/.with-docs
	$(BIN)/python -m tools.facts $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache docs/_build docs/learn
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(VENV)/.with-EXTRA says that refattn (editable) and that extra are installed. What is imported is compiled then: to
# compile all that comes with NumPy, SciPy and Matplotlib takes longer than to install it.
$(VENV)/.with-%: $(VENV)/.made pyproject.toml setup.py
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[$*]"
	@touch $@

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	@touch $@
