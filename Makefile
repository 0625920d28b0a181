# Two commands on a fresh clone: `make train` and `make test`. Everything they need goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
JOBS ?= auto

.PHONY: train test test-every lint check bench clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch .venv/ready

train: .venv/ready  ## prove that two ranks train like one, then train a small language model on them and lose one
	$(BIN)/phalanx prove gpt --layouts dp=2 fsdp=2 tp=2 pp=2
	$(BIN)/phalanx train gpt --on local:2 --device cpu --kill 1@60
	@echo
	@echo "Try next:"
	@echo "  $(BIN)/phalanx train gpt --layout fsdp=2,recompute=full       the same, with the state sharded"
	@echo "  $(BIN)/phalanx train gpt --on local:4 --set width=192         wider, on four ranks"
	@echo "  $(BIN)/phalanx train examples/spirals.py --on local:2         a task of one's own in 25 lines"
	@echo "  $(BIN)/phalanx prove --inject norms_not_summed_over_tp        plant a known bug and see it caught"
	@echo "  $(BIN)/phalanx train --help"

test: .venv/ready lint  ## lint, then all tests, a process a core
	$(BIN)/pytest -n $(JOBS) --maxprocesses 8 --dist worksteal $(PYTEST)

test-every: .venv/ready lint  ## the exhaustive tests too: an hour or two
	$(BIN)/pytest -n $(JOBS) --maxprocesses 8 --dist worksteal --every

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers auto || $(BIN)/mypy  # its workers may not find each other where much else runs

bench: .venv/ready  ## every benchmark, each with its table and its bars
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/exact.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/watch.py

clean:
	rm -rf .venv runs .mypy_cache .ruff_cache .pytest_cache
