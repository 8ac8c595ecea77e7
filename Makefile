# Every target makes the virtual environment by itself when it is missing or out of date.
#   make ablation [ARGS=--preset=smoke]   the scaling ablation: table, figures, report
#   make test | test-fast | lint          all tests | those not marked slow | ruff
#   make venv | clean                     the environment alone | remove it and all caches
# PYTHON=/path/to/python3.12 chooses the interpreter, GPU=cuda12|cuda13|none the GPU packages,
# WORKERS=n the number of test processes.

VENV = .venv
RUN = $(VENV)/bin/python
WORKERS = 2
PYTEST = $(RUN) -m pytest -n $(WORKERS) --dist loadfile --durations=10

# CUDA 13 needs driver 580 and a GPU of compute capability 7.5; CUDA 12 needs driver 525.
GPU := $(shell nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null \
    | awk -F, 'NR == 1 { print ($$1 + 0 >= 580 && $$2 + 0 >= 7.5) ? "cuda13" : \
                               ($$1 + 0 >= 525) ? "cuda12" : "" }')
EXTRAS = test$(if $(filter-out none,$(GPU)),$(comma)$(GPU))
comma = ,

# The stamp is written last, so an interrupted environment is made anew; another GPU, another stamp.
STAMP = $(VENV)/.done-$(or $(GPU),none)

.PHONY: help ablation test test-fast lint venv python clean
help:
	@sed -n '2,6s/^# *//p' Makefile

ablation: $(STAMP)
	$(RUN) launch.py --experiment=scaling_ablation $(ARGS)

test: $(STAMP)
	$(PYTEST) $(ARGS)

test-fast: $(STAMP)
	$(PYTEST) -m "not slow" $(ARGS)

lint: $(STAMP)
	$(RUN) -m ruff check .

venv: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(FIND_PYTHON); echo "Making $(VENV) with $$python and the extras $(EXTRAS)"; \
	    "$$python" -m venv --clear $(VENV)
	@# Compiling only what is imported halves the time of the installation.
	@$(RUN) -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt \
	    -e ".[$(EXTRAS)]"
	@touch $@

# Prints the interpreter that `make venv` would use.
python:
	@$(FIND_PYTHON); echo "$$python"

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Sets $python to the first candidate that runs, is new enough and can make environments. Running it
# is the only sure check: version managers leave commands on the PATH that only print an error.
define FIND_PYTHON
python=; pyenv="$${PYENV_ROOT:-$$HOME/.pyenv}/versions"; \
if [ -n "$(PYTHON)" ]; then set -- "$(PYTHON)"; \
else set -- python3.13 python3.12 python3 "$$pyenv"/3.1[2-9]*/bin/python; fi; \
for candidate; do \
    if "$$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12))' \
        >/dev/null 2>&1; then python="$$candidate"; break; fi; \
done; \
if [ -z "$$python" ]; then \
    echo "No Python >= 3.12 that can make virtual environments was found; tried: $$*." \
        "Install one (Debian: python3.12 and python3.12-venv)" \
        "or name it: make PYTHON=/path/to/python3.12 ..." >&2; \
    exit 1; \
fi
endef
