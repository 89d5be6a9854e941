# syncbn-lab: setup, the main job and the checks. `make` alone lists the targets.

# What a caller may set: make repro OPT_LEVEL=O3 VENV=/path PYTHON=/path/to/python3 TORCH_INDEX=URL
VENV ?= .venv
OPT_LEVEL ?= O1 O2 O3
PYTHON ?=
TORCH_INDEX ?=
TORCH12_PYTHON ?=
LAB_ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
RUNS := data/runs
BEGAN := $(shell date +%s)
# The stamp of a finished setup, and the mark of one that began; see $(READY) below.
READY := $(VENV)/syncbn-lab-is-set-up
BEGUN := $(VENV)/syncbn-lab-setup-began

# The environment's own `python3` kernel runs the notebooks, never one registered elsewhere:
# jupyter reads JUPYTER_PATH first, and the user's folder before that of an environment which
# somebody else owns.
unexport JUPYTER_PATH
export JUPYTER_PREFER_ENV_PATH := 1

.NOTPARALLEL:
.PHONY: help setup repro test lab doctor torch12 clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "May be set: OPT_LEVEL=\"O1 O3\", VENV=folder, PYTHON=interpreter, TORCH_INDEX=address of PyTorch's CPU wheels,"
	@echo "  TORCH12_PYTHON=a Python 3.7 or 3.6, for torch12"

repro: $(READY) ## reproduce the reported errors: O1, O2 and O3, or OPT_LEVEL=O3 for one
	@mkdir -p $(RUNS); done=; failed=; \
	for level in $(OPT_LEVEL); do \
	  run=$(RUNS)/repro-$$level; \
	  echo "== $$level: papermill notebooks/repro.ipynb $$run.ipynb -p opt_level $$level"; \
	  rm -f $$run.ipynb $$run.html; \
	  if $(PY) -m papermill --no-progress-bar notebooks/repro.ipynb $$run.ipynb -p opt_level $$level >$$run.log 2>&1 \
	    && $(PY) -m syncbn_lab writeup $$run.ipynb >>$$run.log 2>&1; \
	  then \
	    $(PY) -m syncbn_lab results --table $$run.ipynb || failed="$$failed $$level"; \
	    done="$$done $$run.ipynb"; \
	  else \
	    tail -n 25 $$run.log; echo "$$level failed; the whole log is $$run.log" >&2; \
	    failed="$$failed $$level"; \
	  fi; \
	done; \
	if [ -n "$$done" ]; then \
	  echo "== all:$$done, with the .html beside each"; \
	  $(PY) -m syncbn_lab results --table $$done || failed="$$failed table"; \
	fi; \
	echo "== $$(($$(date +%s) - $(BEGAN))) s in all, setup included"; \
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

test: $(READY) ## every check: ruff, mypy, pytest
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) -m pytest

lab: $(READY) ## start JupyterLab (as root: LAB_ARGS=--allow-root)
	$(PY) -m jupyterlab $(LAB_ARGS)

doctor: $(READY) ## what is installed here, each trap with its cure
	@$(PY) -m syncbn_lab doctor

torch12: $(READY) ## make an environment with the real torch 1.2.0 in .venv-torch-1.2
	@$(PY) -m syncbn_lab torch12 $(if $(TORCH12_PYTHON),--python "$(TORCH12_PYTHON)")

clean: ## remove data/runs and the caches
	rm -rf $(RUNS) .pytest_cache .ruff_cache .mypy_cache
	find syncbn_lab tests notebooks \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv and .venv-torch-1.2 (a VENV elsewhere stays)
	rm -rf .venv .venv-torch-1.2

setup: $(READY) ## make the environment only; the targets above do it by themselves

$(PY):
	@tried="$(or $(PYTHON),python3.14 python3.13 python3.12 python3.11 python3)"; why="none of $$tried is one"; \
	for python in $$tried; do \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  $$python -c 'import ensurepip, venv' 2>/dev/null \
	    || { why="$$python has no venv module (Debian and Ubuntu: apt install python3-venv)"; continue; }; \
	  $$python -m venv --without-pip $(VENV); exit; \
	done; \
	echo "Setup needs Python 3.11 or newer with its venv module, and $$why: name another with PYTHON=/path/to/python3." >&2; exit 1

# A setup that was cut off is repeated: what pip had finished stays, and a package that it had
# not (one without the file INSTALLER, which pip writes last) is forgotten and so installed anew.
$(READY): pyproject.toml constraints.txt requirements-apex.txt | $(PY)
	@if [ -e $(BEGUN) ]; then \
	  for package in $(VENV)/lib/python3*/site-packages/*.dist-info; do [ -e "$$package/INSTALLER" ] || rm -rf "$$package"; done; \
	fi; touch $(BEGUN)
	@$(PY) -c 'from importlib.metadata import version; version("pip")' 2>/dev/null || $(PY) -m ensurepip --default-pip >/dev/null
	@echo "Setting up $(VENV), once. To be downloaded, unless pip has it cached (then 1.5 GB on disk; measured on Linux x86-64):"; \
	echo "  JupyterLab, papermill, pandas, matplotlib and the checks: about 0.14 GB"; \
	echo "  apex (pytorch-extension 0.2, its hash checked): 0.3 MB, unless an apex is there already"; \
	torch=$$(sed -n 's/^torch==//p' constraints.txt); \
	index="$(addprefix --extra-index-url ,$(TORCH_INDEX))"; \
	there=$$($(PY) -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null); \
	if [ "$${there%+*}" = "$$torch" ]; then \
	  echo "  torch: nothing, $$there is there"; exit; \
	elif nvidia-smi -L >/dev/null 2>&1; then \
	  want="torch==$$torch,!=$$torch+cpu"; echo "  torch $$torch for CUDA, as an NVIDIA GPU is here: about 3 GB"; \
	elif $(PIP) index versions torch $$index 2>/dev/null | grep -Fq "$$torch+cpu"; then \
	  want="torch==$$torch+cpu"; echo "  torch $$torch for the CPU, as no NVIDIA GPU is here: about 0.2 GB"; \
	elif [ "$$(uname -s)" != Linux ]; then \
	  want="torch==$$torch"; echo "  torch $$torch: about 0.1 GB"; \
	else \
	  want="torch==$$torch"; \
	  echo "  torch $$torch: about 3 GB. pip finds only the build for CUDA, though no NVIDIA GPU is here. To get the"; \
	  echo "  CPU build (0.2 GB), stop now and give make TORCH_INDEX=the address PyTorch's Get Started page shows for CPU."; \
	fi; \
	$(PIP) install --constraint constraints.txt $$index "$$want"
	@$(PIP) install -qq --constraint constraints.txt --editable '.[apex,notebooks,test]'
	@$(PY) -P -c 'import importlib.util as u; raise SystemExit(not u.find_spec("apex"))' \
	  || $(PIP) install -qq --no-deps --require-hashes --requirement requirements-apex.txt
	@mv $(BEGUN) $(READY)
