# `make demo` runs the main job, `make test` the tests; both first create their environment.

VENV := .venv
PYTHON :=  # Python 3.11 or newer for the environment; default: found automatically
BIN := $(VENV)/bin
WORKERS := 4  # test processes, one file at a time; more than cores, as many tests wait more than they compute
BENCHMARKS := $(filter-out $(addprefix bench/,call_order.py common.py contenders.py decode_share.py fuzz.py layouts_page.py llama_dtensor.py load_faults.py load_overload.py load_programs.py load_server.py namespaces.py peers.py plan_accuracy.py plan_against_cases.py plan_against_runs.py published_runs.py serving.py serving_client.py serving_load.py serving_models.py serving_peers.py serving_race.py serving_worker.py soak.py soak_cases.py soak_forks.py soak_runs.py synthetic.py traffic.py verify_time.py),$(wildcard bench/*.py))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test lint types format docs pages bench clean distclean

help:  ## List the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

demo: $(VENV)/.ready-run  ## Train a small model of Python code on two processes, evaluate it, generate text, write the report
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/demo.sh

test: $(VENV)/.ready-test  ## Run the tests
	$(BIN)/python -m pytest --numprocesses $(strip $(WORKERS)) --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.ready-lint  ## Check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet

types: $(VENV)/.ready-lint  ## Check types: strictly in the torch-free packages
	$(BIN)/mypy

format: $(VENV)/.ready-lint  ## Format the code and apply automatic fixes
	$(BIN)/ruff check --fix --quiet
	$(BIN)/ruff format --quiet

docs: $(VENV)/.ready-docs pages  ## Write the pictures and build the documentation as a site: build/docs/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo build/docs/index.html

pages: $(VENV)/.ready-run  ## Write the generated pages and pictures of docs/
	$(BIN)/python scripts/write_pages.py

bench: $(VENV)/.ready-bench  ## Run all benchmarks against their peers (an hour); results in bench/results
	@for script in $(BENCHMARKS); do echo "$$script"; $(BIN)/python $$script || exit 1; done

clean:  ## Remove outputs of builds, tests and the demo; keep the environment and prepared data
	rm -rf build dist runs/quickstart .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## Also remove the environment
	rm -rf $(VENV)

# One stamp file per set of extras; `run` has none.
$(VENV)/.ready-%: pyproject.toml scripts/environment.sh
	@PYTHON="$(strip $(PYTHON))" scripts/environment.sh $(VENV) $*
	@touch $@
