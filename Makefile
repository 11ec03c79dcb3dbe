# What a fresh machine needs: GNU make and Python >= 3.11 with venv. Everything else is set up here.
#
#   make run                       two workers, a Redis of its own, three simulated engines; Ctrl-C ends all of it.
#                                  So does make alone
#   make run NODES="http://a:23333 http://b:23333"           with your engines instead
#   make run WORKERS=4             or EVENHAND_WORKERS; without either, 2
#   make run ARGS="--server-port 9000 --workers 4"           any flags of `evenhand serve`
#   make test [ARGS="-k name"] [JOBS=0]   the tests, six files at a time
#   make test-wide                 whole matrices, in a browser, of the built package: what CI runs behind `make test`
#   make test-long                 the soaks and failovers that take minutes
#   make chaos [ARGS="--seed 7"]   five minutes of load under random faults (docs/reliability.md)
#   make bench [ARGS=--quick]      what a router costs: Evenhand and its peers, side by side (docs/performance.md)
#   make lint                      ruff, mypy, import rules, known vulnerabilities of what is locked
#   make docs [ARGS=serve]         the documentation as a site, in build/docs; its generated pages first
#   make format                    what `make lint` says about the format, done
#   make licences                  docs/licences.md anew, after a change of requirements.lock
#   make dist                      sdist and wheel, in dist/ (docs/releasing.md)
#   make clean                     remove the environment
#   make help                      this list

VENV ?= .venv
# The first Python that is new enough. Before others one that can make a venv, and before these one that was built with
# optimizations, as those of systems are: what version managers build without takes up to twice the CPU.
with_venv := find_spec("ensurepip")
optimized := ("--enable-optimizations" in str(get_config_var("CONFIG_ARGS")) or sys.prefix == "/usr")
PYTHON ?= $(shell for wanted in '$(with_venv) and $(optimized)' '$(with_venv)' True; do \
	for p in python3 /usr/bin/python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c "import sys; from importlib.util import find_spec; from sysconfig import get_config_var; \
	sys.exit(sys.version_info < (3, 11) or not ($$wanted))" 2>/dev/null && echo $$p && exit; done; done)
WORKERS ?=
# Tests wait more than they compute.
JOBS ?= 6
NODES ?=
ARGS ?=

py := $(VENV)/bin/python
pytest := env -u PYTHONDONTWRITEBYTECODE $(py) -m pytest
in_jobs := $(pytest) -n $(JOBS) --dist loadfile --no-loadscope-reorder
named := $(strip $(NODES) $(findstring --nodes,$(ARGS)) $(findstring --simulate,$(ARGS)) $(EVENHAND_NODES))
pip := $(py) -m pip --disable-pip-version-check --quiet
# uv takes a tenth of pip's time. Where it can't be had, or can't reach the index (it does not read pip's settings), pip
# does all of it. Locked by hashes either way.
install = { $(VENV)/bin/uv pip install --quiet --python $(py) --require-hashes -r $(1) 2>/dev/null || \
	$(pip) install --require-hashes -r $(1); }

.PHONY: run test test-wide test-long chaos bench lint docs format licences dist clean help

# `make run -- --workers 4`: to make these words are targets.
ifneq ($(filter -%,$(MAKECMDGOALS)),)
verb := $(firstword $(filter-out -%,$(firstword $(MAKECMDGOALS))) run)
$(error flags go into ARGS: make $(verb) ARGS="$(filter-out $(verb),$(MAKECMDGOALS))")
endif

run: $(VENV)/.run
	$(if $(MAKECMDGOALS),,@echo "make run; make help says what else there is")
	@exec $(py) -m app.cli serve $(if $(WORKERS),--workers $(WORKERS)) \
		$(if $(NODES),--nodes $(NODES)) $(if $(named),,--simulate 3) $(ARGS)

# Compiled modules are kept whatever the environment says: else each of some hundred starts compiles all of them.
# In a fresh checkout that is done first: else each job would do it for all files, all at the same time.
test: $(VENV)/.dev
	@test -d tests/__pycache__ || ls tests/test_*.py tests/*/test_*.py | \
		xargs -P 2 -n 66 $(pytest) --collect-only -qq >/dev/null 2>&1 || true
	$(in_jobs) -m "not long and not wide" $(ARGS)

test-wide: $(VENV)/.dev
	$(in_jobs) -m "wide and not long" $(ARGS)

test-long: $(VENV)/.dev
	$(py) -m pytest -n 2 --dist loadfile -m long $(ARGS)

chaos: $(VENV)/.dev
	$(py) -m bench.chaos $(ARGS)

bench: $(VENV)/.dev
	$(py) -m bench.routers $(ARGS)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo
	$(py) .ci/audit.py

# mkdocs warns of its own successor at every build.
docs: $(VENV)/.dev
	$(py) -m docs.scripts.reference
	NO_MKDOCS_2_WARNING=1 $(py) -m mkdocs $(or $(ARGS),build --strict)

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

licences: $(VENV)/.dev
	$(py) .ci/licences.py

dist: $(VENV)/.dev
	rm -rf dist
	$(py) -m build --no-isolation

# The stamps are newer than the lock file they were made from, so that the next run starts at once.
$(VENV)/.run: requirements.lock | $(VENV)/bin/pip
	@echo "installing the locked dependencies into $(VENV) (once)"
	@$(call install,requirements.lock)
	@touch $@

$(VENV)/.dev: requirements-dev.lock | $(VENV)/bin/pip
	@echo "installing the locked dependencies, and those of the tests, into $(VENV) (once)"
	@$(call install,requirements-dev.lock)
	@touch $@ $(VENV)/.run

$(VENV)/bin/pip:
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found: install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11, or no Python: name another: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
		{ echo "$(PYTHON) can't make a venv: apt-get install $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2; exit 1; }
	@echo "making a virtual environment in $(VENV) (once)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(pip) install --require-hashes -r requirements-uv.lock 2>/dev/null || true

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

# The list at the head of this file.
help:
	@sed -n '/^#$$/d; s/^# \{0,3\}//p; /^$$/q' $(firstword $(MAKEFILE_LIST))
