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
	$(BIN)/refattn verify softmax --impl examples/onnxruntime_attention.py:attend --dtype float32 --limit 0

# The workers share the cores, so each is held to one thread; nothing outside this line sees the setting.
test: $(VENV)/.with-onnx $(VENV)/.with-test
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --timeout=600 $(ARGS)

lint: $(VENV)/.with-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy refattn tests asv_benchmarks docs

# asv's benchmarks of NumPy, stored under the commit; where files differ from it, and with --quick, they are printed
# alone. The last line says which.  make bench ARGS="--bench 'block.*softmax'"      make bench ARGS=--quick
bench: $(VENV)/.with-bench
	@cd asv_benchmarks && ../$(BIN)/asv machine --yes >/dev/null && commit=$$(git rev-parse HEAD) || exit; \
	if [ -n "$(filter --quick -q,$(ARGS))" ]; then hash=; told="not stored: one call each says little"; \
	elif git status --porcelain -- . ../refattn ../backends | grep -q .; then hash=; told="not stored: files differ from $$commit"; \
	else hash="--set-commit-hash $$commit"; told="stored under $$commit; make bench-publish shows it"; fi; \
	ASV_PYTHONPATH=.. ../$(BIN)/asv run --python=same $$hash $(ARGS); status=$$?; echo "$$told"; exit $$status

# Two commits in alternating rounds, offline; a dot means the files as they are.  make bench-compare BASE=v0.1.0 HEAD=main
bench-compare: $(VENV)/.with-bench
	$(BIN)/python -m asv_benchmarks compare $(or $(BASE),HEAD) $(or $(HEAD),.) $(ARGS)

# asv's web pages of all stored results, those that come with the repository included: curves, and the steps in them.
bench-publish: $(VENV)/.with-bench
	mkdir -p asv_benchmarks/results && cp -R asv_benchmarks/recorded/. asv_benchmarks/results
	cd asv_benchmarks && ../$(BIN)/asv machine --yes >/dev/null && \
		../$(BIN)/asv run --python=same --bench just-discover >/dev/null && ../$(BIN)/asv publish

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
