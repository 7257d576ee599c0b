# kdlab's commands; `make` alone explains them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help lab test check docs pictures cost clean distclean ready

DEVICE ?= cpu
JOBS ?= 2

VENV := .venv
LOCK := requirements-cpu.lock
NOTEBOOKS := 00_start_here 10_budget_sweep 20_draft_trees 30_kernels 40_nsight 50_experts_and_cost 90_report
RUNS := $(NOTEBOOKS:%=runs/%.ipynb)
REPORT := reports/kdlab.html
PICTURES := 00_draft_tree 10_budget_sweep 10_by_rank 30_attention 30_experts 30_overview 40_shares
COST := 50_verdict 50_fit

ifdef PYTHON
# Somebody's own interpreter: used as it is, nothing is installed.
PY := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" "$(PYTHON)"
READY := given-python
else ifneq ($(DEVICE),cpu)
READY := no-python
else
# The environment is keyed by what it was made from and where; a broken or half-made one has no such file.
PY := $(VENV)/bin/python
WORKS := $(shell $(VENV)/bin/python -c "print('yes')" 2>/dev/null)
READY := $(VENV)/made-from-$(shell (cat $(LOCK) pyproject.toml; echo "$(CURDIR)$(WORKS)") | sha256sum | cut -c1-16)
endif

KDLAB = $(PY) -m kdlab.cli
OFF := 0 no No NO off Off OFF false False FALSE
PARAMETERS := $(if $(filter-out cpu,$(DEVICE)),-p device=$(DEVICE)) $(if $(filter-out $(OFF),$(FULL)),-p full=true)

help:
	@echo "make lab       set up, run the main notebooks on the bundled pair, print the sweep and the report's path"
	@echo "               FULL=1: all prompts and budgets; DEVICE=cuda PYTHON=/path/to/python: with that interpreter as it is"
	@echo "make test      set up, run the whole test suite (JOBS=$(JOBS) at a time)"
	@echo "make check     ruff, mypy and the notebooks' outputs"
	@echo "make docs      set up, build the pages of docs/ and the reference into build/site; a broken link fails it"
	@echo "make pictures  run the lab, put the figures that README and docs show into docs/pictures"
	@echo "make cost      run notebook 50 on what is recorded, write its numbers and figures into README and docs"
	@echo "make clean     remove runs, figures, reports and caches (distclean: the environment too)"

lab: $(READY)
	@mkdir -p runs
	@status=0; \
	for name in $(NOTEBOOKS); do \
	  $(KDLAB) run notebooks/$$name.ipynb -o runs/$$name.ipynb $(PARAMETERS) || status=$$?; \
	  test $$status -ne 130; \
	done; \
	$(KDLAB) report $(RUNS) -o $(REPORT) --title "kdlab: draft trees on the bundled pair" --figures figures || status=$$?; \
	exit $$status

test: $(READY)
	@$(PY) -m pytest -rs -n $(JOBS) --dist loadfile

check: $(READY)
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@$(PY) -m nbstripout --verify --keep-id notebooks/*.ipynb

docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build
	@echo "build/site/index.html (searching needs a server: python -m http.server --directory build/site)"

pictures: lab
	@mkdir -p docs/pictures
	@cp $(PICTURES:%=figures/%.png) docs/pictures/

cost: $(READY)
	@mkdir -p runs docs/pictures
	@rm -f $(COST:%=figures/%.png) $(COST:%=docs/pictures/%.png)
	@$(KDLAB) run notebooks/50_experts_and_cost.ipynb -o runs/50_experts_and_cost.ipynb --again
	@for name in $(COST); do test ! -e figures/$$name.png || cp figures/$$name.png docs/pictures/; done
	@$(PY) -m kdlab.report.cost_page

ready: $(READY)

$(VENV)/made-from-%:
	@python=$$(sh .ci/find-python); \
	echo "Installing kdlab's pinned packages into $(VENV) with $$("$$python" --version); the log is $(VENV)/install.log"; \
	rm -rf $(VENV); \
	"$$python" -m venv $(VENV) || { echo "no virtual environment could be made (on Debian and Ubuntu: install python3-venv)" >&2; exit 1; }
	@$(VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off -r $(LOCK) 2>&1 \
	| tee $(VENV)/install.log | bash .ci/show-install
	@$(VENV)/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . 2>&1 | tee -a $(VENV)/install.log | { grep ^ERROR || true; }
	@touch $(VENV)/made-from-$$((cat $(LOCK) pyproject.toml; echo "$(CURDIR)yes") | sha256sum | cut -c1-16)
	@echo "Installed."

.PHONY: given-python no-python
given-python:
	@"$(PYTHON)" .ci/missing-packages.py report

no-python:
	@echo "DEVICE=$(DEVICE) needs PYTHON=/path/to/python: an interpreter whose torch sees that device" >&2; exit 1

clean:
	@rm -rf runs reports figures build .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean
	@rm -rf $(VENV) kdlab.egg-info
