# make serve      set up, fetch the demo model, start an OpenAI-compatible server with the compressed cache
# make test       set up and run all tests, servers included
# make test-fast  the tests that are not slow: no servers, no Triton interpreter
# make lint       ruff and mypy
#
# PYTHON=python3.12  the interpreter to start from (3.11 or newer)
# VENV=.venv         where the environment goes
# PORT=30000         serve: the port
# ARGS="..."         serve: more options of sglang.launch_server, like --kvc-policy leankv
#                    test, test-fast: more options of pytest, like -k append

PYTHON ?= python3
VENV ?= .venv
PORT ?= 30000
ARGS ?=
JOBS ?= 2
BIN = $(VENV)/bin
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

.PHONY: help serve test test-fast lint clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

serve: $(VENV)/.serve
	@$(BIN)/python -m sglang_kvc.demo.server --port $(PORT) $(ARGS)

# Two runs: Triton's interpreter is on or off for a whole process. Status 5 says that a run had no test.
test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/python -m sglang_kvc.demo.model
	@$(PYTEST) -m 'not interpreter' $(ARGS); plain=$$?; \
	$(if $(filter -m%,$(ARGS)),(exit 5),$(PYTEST) $(ARGS) -m interpreter); interpreted=$$?; \
	case $$plain/$$interpreted in 0/0|0/5|5/0) ;; 0/*) exit $$interpreted ;; *) exit $$plain ;; esac

test-fast: $(VENV)/.test
	@$(PYTEST) $(ARGS) -m 'not (slow or server or interpreter)'

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy

# The stamps are remade when the dependencies change; the package itself is installed in place.
$(VENV)/.serve: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e '.[demo]'
	@touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e '.[test]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11 or missing; choose another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "error: $(PYTHON) cannot make environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache *.egg-info
