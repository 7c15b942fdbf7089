# Start with `make test` and `make demo`; the other targets serve development.
# Each makes its own environment in .venv and installs pinned requirements there.
PYTHON ?= python3
MINUTES ?= 15
PART ?= 0/1
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

python := .venv/bin/python
# Python compiles what is imported by itself: a fifth of what these packages install.
pip_install := $(python) -m pip install -q --no-compile --disable-pip-version-check \
  -c .venv/constraints.txt
jobs := $(shell nproc 2>/dev/null || echo 2)
headers := codegen/include/tileweave/*.cuh runtime/src/*.cc tests/native/*.cc tests/native/*.c
has_nvcc := import os; from tilelang.contrib.nvcc import get_nvcc_compiler as f; os.stat(f())
count_gpus := import torch; print(torch.cuda.device_count())
find_cuda := from tilelang.contrib.nvcc import find_cuda_path; print(find_cuda_path())
with_cuda = CUDA_HOME=$$($(python) -c '$(find_cuda)')
torchrun := $(python) -m torch.distributed.run --standalone
engines := $(basename $(notdir $(wildcard tests/engines/*.txt)))
gpu_programs := $(wildcard tests/gpu/*.py tests/gpu/*/*.py)

# The checkout works without being installed: see tileweave/__init__.py.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help test test-long test-versions test-versions-quick test-nvcc test-engines lit pytest headers test-gpu demo lint format docs docs-site clean
help:
	@echo "make test      all that needs no GPU: linters, the site, device headers, lit, pytest"
	@echo "make test-long many programs, shapes and seeds, and validation of all device functions;"
	@echo "               PART=2/16 runs one of 16 parts"
	@echo "make test-versions  pairs of TileLang and torch; writes docs/guides/versions.md"
	@echo "make test-versions-quick  the part that CI runs: the oldest TileLang with the torch of .venv"
	@echo "make test-nvcc the demo and a cubin with the nvcc of requirements-nvcc.txt only"
	@echo "make test-engines  integrations with engines that .venv does not have"
	@echo "make demo      GEMM + reduce-scatter on all visible GPUs; without one, in the simulator, and broken"
	@echo "make test-gpu  tests/gpu on all visible GPUs, each program for MINUTES=15 at most;"
	@echo "               RANKS=8 for more ranks than GPUs, which share these in time slices"
	@echo "make docs      the generated pages and pictures of docs/; make docs-site: build/site"
	@echo "make lint | headers | lit | pytest | format | clean"

# pytest stands last: its summary is the last line of a green run. Each of its processes takes 1 GB
# and one core.
test: | lint docs-site headers lit
	@$(MAKE) --no-print-directory pytest

pytest: .venv/ready-test
	@$(with_cuda) OMP_NUM_THREADS=1 $(python) -m pytest -q -m 'not long' -n $(jobs) --maxprocesses=8 \
	  --dist=worksteal

test-long: .venv/ready-test
	@$(with_cuda) OMP_NUM_THREADS=1 $(python) -m pytest -q -m long -n $(jobs) --maxprocesses=8 \
	  --dist=worksteal --part=$(PART) tests

# Three environments and four folders, kept in ~/.cache/tileweave; torch for CUDA needs 5 GB each.
test-versions: .venv/ready-test
	@$(with_cuda) $(python) tools/test_versions.py --write

# Installs no other torch.
test-versions-quick: .venv/ready-test
	@$(with_cuda) $(python) tools/test_versions.py --quick

# As on a machine without its own nvcc.
test-nvcc: .venv/ready
	@$(python) tools/test_nvcc.py

# Each engine in a folder of its own, with the metadata of TileWeave, where engines find plug-ins.
test-engines: $(engines:%=build/engines/%/ready)
	@failed=; for name in $(engines); do \
	  PYTHONPATH=$$PYTHONPATH:build/engines/$$name $(python) -m pytest -q tests/engines/$$name.py \
	    || failed="$$failed $$name"; \
	done; [ -z "$$failed" ] || { echo "test-engines: failed:$$failed" >&2; exit 1; }

# What tests/engines/NAME.py imports is in NAME.txt, without what that depends on.
build/engines/%/ready: tests/engines/%.txt pyproject.toml .venv/ready-test
	@echo "installing $< into $(@D)"; rm -rf $(@D)
	@$(pip_install) --no-deps --target $(@D) -r $< .
	@touch $@

lit: .venv/ready-test
	@$(with_cuda) .venv/bin/lit -sv lit_tests

headers: .venv/ready-test
	@log=build/headers.log; \
	{ $(with_cuda) .venv/bin/cmake --fresh -S . -B build/cmake && \
	  .venv/bin/ctest --test-dir build/cmake -L header -j$(jobs) --output-on-failure \
	    --no-tests=error; } >$$log 2>&1 || { cat $$log; exit 1; }; \
	grep 'tests passed' $$log | sed 's/^/headers: /'

demo: .venv/ready
	@$(python) -m tileweave demo --out build

# A program that starts torchrun itself is run as it is, and one that declares RANKS gets as many.
# One that fails, or takes longer than MINUTES (status 124), does not keep the others from running.
test-gpu: .venv/ready
	@gpus=$$($(python) -c '$(count_gpus)'); ranks=$${RANKS:-$$gpus}; failed=; \
	if [ $$gpus = 0 ]; then echo "test-gpu: 0 GPUs are visible; expected at least 1" >&2; exit 1; fi; \
	for program in $(gpu_programs); do \
	  needs=$$(sed -n 's/^RANKS = //p' $$program); needs=$${needs:-$$ranks}; \
	  echo "test-gpu: $$program, $$needs ranks on $$gpus GPUs"; \
	  launch="$(torchrun) --nproc-per-node=$$needs"; \
	  if grep -q torch.distributed.run $$program; then launch=$(python); fi; \
	  timeout $(MINUTES)m $$launch $$program || failed="$$failed $$program ($$?)"; \
	done; \
	if [ -n "$$failed" ]; then echo "test-gpu: failed:$$failed" >&2; exit 1; fi

lint: .venv/ready-lint
	@if test -s .venv/ready-lint; then cat .venv/ready-lint; else \
	  .venv/bin/ruff check . ; .venv/bin/ruff format --check . ; \
	  .venv/bin/clang-format --dry-run --Werror $(headers); fi

format: .venv/ready-lint
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/clang-format -i $(headers)

docs: .venv/ready
	$(python) docs/generate.py
	$(python) docs/command_line.py
	$(python) docs/operators.py
	$(python) docs/sequence.py
	$(python) docs/speedup.py
	$(python) tools/mutants.py

# Warnings are errors: a broken link, or a page that no menu has.
docs-site: .venv/ready-docs
	@if test -s .venv/ready-docs; then cat .venv/ready-docs; else \
	  $(python) -m sphinx -q -W --keep-going -E -d build/doctrees docs build/site && \
	  echo "docs-site: build/site/index.html"; fi

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A torch for CUDA that the machine has is used, not installed a second time; and where it has the
# supported TileLang too, nothing is installed: GPU hosts are often offline.
.venv/ready: requirements.txt requirements-nvcc.txt constraints.txt tools/make_venv.py
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v < (3, 14) else \
	  f"tileweave: Python {v[0]}.{v[1]}; expected 3.10 to 3.13 (make PYTHON=python3.12)")'
	@$(PYTHON) tools/make_venv.py .venv
	@if ! $(python) -c 'import torch, tileweave' 2>/dev/null; then \
	  echo "installing requirements.txt into .venv"; $(pip_install) -r requirements.txt; fi
	@if ! $(python) -c '$(has_nvcc)' >/dev/null 2>&1; then \
	  echo "installing requirements-nvcc.txt into .venv"; $(pip_install) -r requirements-nvcc.txt; fi
	@touch $@

.venv/ready-test: .venv/ready requirements-test.txt
	@echo "installing requirements-test.txt into .venv"; $(pip_install) -r requirements-test.txt
	@mkdir -p build; touch $@

# Linters and the site are worth having, not worth failing a machine that cannot install them: the
# file then has the message to print instead.
.venv/ready-lint .venv/ready-docs: .venv/ready-%: .venv/ready requirements-%.txt
	@if $(pip_install) -r requirements-$*.txt; then : >$@; \
	else echo "$*: NOT RUN, requirements-$*.txt could not be installed" | tee $@ >&2; fi
