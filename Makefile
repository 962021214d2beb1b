# Needs only a bare Debian machine with python3: make demo, make test. All files are created in the checkout:
# .venv (tools and the package, installed in place), .venv-oldest (of make test-matrix and test-wheels), .venv-mxnet, .venv-wheels,
# .venv-free-threaded, build (one CMake directory per configuration), dist, .cache.
SHELL := /bin/bash
PYTHON ?= python3
# ON: warnings of the C++ compiler are errors (CI). Unset: keep the build directory's setting.
WERROR ?=
BIN := .venv/bin
# Puts .venv/bin first on PATH, since scripts and tests call python and horovodrun by name.
ACTIVATE := PATH="$(CURDIR)/$(BIN):$$PATH"
CMAKE := $(CURDIR)/$(BIN)/cmake
CPP_FILES = $(shell find csrc -name '*.cc' -o -name '*.h' -o -name '*.cu')
PYTHON_FILES := horoplug tests benchmarks examples scripts setup.py conftest.py

# Python writes the bytecode of what it imports. pip would compile all files, of which a tenth are ever imported.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := install -q --no-compile
export PIP_CACHE_DIR := $(CURDIR)/.cache/pip
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# For the release build: a test builds the source archive, whose objects are the same but for the folder.
export CCACHE_DIR ?= $(CURDIR)/.cache/ccache
export CCACHE_BASEDIR ?= $(CURDIR)
export CCACHE_NOHASHDIR ?= 1

.PHONY: help demo build stubs kernels test test-all test-without-direct-calls test-c10d test-upstream-examples environments other-environments soak test-matrix test-torch compat-matrix test-image test-gpu gpu-python cpp lint lint-types tidy tidy-changed compile-commands format bench bench-compare bench-gpu bench-report mpi torchft wheel wheels check-wheels test-wheels test-free-threaded release-check docs clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    set everything up and train on two processes"
	@echo "make test    build, and run the main test and one failure of each feature, framework and launcher"
	@echo "make test-all   build, and run all tests: also sanitizers and fuzzing, all combinations"
	@echo "make soak    random jobs with random faults for an hour (SOAK_SECONDS), in all frameworks and under mpirun, and"
	@echo "             training beside busy threads"
	@echo "make test-c10d  PyTorch's own tests of its distributed backends, at 2, 3 and 4 ranks, with horoplug and with Gloo"
	@echo "make test-upstream-examples HOROVOD=/path/to/clone   Horovod's own examples, unedited"
	@echo "make test-without-direct-calls   runs the tests of operations with the way through Python for every call"
	@echo "make test-matrix   repeats some tests with further versions and backends of TensorFlow, Keras and MPI"
	@echo "make compat-matrix   tests the wheels with many versions of the frameworks, which takes hours and 20 GB; writes"
	@echo "             docs/versions.md. ONLY=\"torch-2.1 jax-0.5\": these of the environments"
	@echo "make test-torch TORCH=2.4.1   tests of torch.distributed and torch.compile with another version of PyTorch"
	@echo "make test-free-threaded PYTHON_T=/path/to/python3.13t   tests of the NumPy API without the global interpreter lock"
	@echo "make test-integrations   tests with Lightning, Accelerate, Transformers and torch.compile, and of torchrun's restarts"
	@echo "make test-image   the steps of the Dockerfile's images for jobs, in a bare Debian"
	@echo "make test-gpu   tests that need a GPU; results go to docs/gpu-results.md"
	@echo "make build   build into horoplug/, for working on the source tree"
	@echo "make kernels compile the GPU kernels with nvcc, for machines without NVRTC (docs/gpu.md)"
	@echo "make lint    check format, types and layers; make format: repair the format"
	@echo "make tidy    clang-tidy on all files (slow); make tidy-changed: on the files that a change affects"
	@echo "make bench-gpu  measure on a GPU; results go to docs/gpu-results.md"
	@echo "make bench   compare with gloo for a few minutes; make bench-report: run all benchmarks, write docs/benchmarks.md"
	@echo "make bench-compare BASE=commit   benchmarks with the package of another commit and of this checkout by turns; fails if"
	@echo "             a row has become slower. ROUNDS=7; ONLY=\"allreduce gradients\": these of the benchmarks"
	@echo "make wheels  wheels for other machines, x86-64 and aarch64, into dist/wheels; make check-wheels: and check them"
	@echo "make test-wheels   installs them, and runs tests with the libraries of an old Debian and for aarch64 under an emulator"
	@echo "make release-check   all that a release needs but the upload (docs/releasing.md)"
	@echo "make docs    build the documentation site into build/site"
	@echo "make wheel;  make clean"

# --- set-up; each step is redone only when what it depends on has changed -------------------------------------------

build/.system-demo: scripts/system-packages
	@scripts/system-packages $(PYTHON) g++ dataset-fashion-mnist
	@mkdir -p build && touch $@

build/.system-test: scripts/system-packages build/.system-demo
	@scripts/system-packages $(PYTHON) binutils ccache clang-16 doctest-dev git iproute2 iptables libclang-rt-16-dev \
	  libpmix-dev llvm-16 mold openjdk-17-jre-headless openssh-client openssh-server slurm-client slurmctld slurmd
	@touch $@

# Each process of Python runs the line in the .pth file. The tests' conftest.py sets its variable, and says why.
.venv/.created: | build/.system-demo
	$(PYTHON) -m venv .venv
	@cp tests/harness/test_garbage.pth .venv/lib/python3.*/site-packages/
	@touch $@

# One pip at a time in one environment, also under make -j. What everything else needs comes first.
PIP := flock .venv/.lock $(BIN)/pip
.venv/.dev .venv/.tensorflow .venv/.jax .venv/.cuda .venv/.notebook: | .venv/.test
.venv/.%: requirements/%.txt requirements/test.txt requirements/build.txt .venv/.created
	$(PIP) $(INSTALL) -r $<
	@touch $@

# The wheels of the oldest supported TensorFlow are pinned for Python 3.11.
.venv-oldest/.installed: requirements/tensorflow-oldest.txt | build/.system-demo
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip $(INSTALL) --no-deps -r $<
	@touch $@

# MXNet's wheels need a Python older than 3.12.
.venv-mxnet/.installed: requirements/mxnet.txt | build/.system-demo
	$(PYTHON) -m venv .venv-mxnet
	.venv-mxnet/bin/pip $(INSTALL) --no-deps -r $<
	@touch $@

# See requirements/optional.txt.
OPTIONAL := build/optional
$(OPTIONAL)/.installed: requirements/optional.txt .venv/.created
	$(BIN)/pip $(INSTALL) --no-deps --upgrade --target $(OPTIONAL) -r $<
	@touch $@

# See requirements/clusters.txt.
CLUSTERS := build/clusters
$(CLUSTERS)/.installed: requirements/clusters.txt .venv/.created build/.system-test
	$(BIN)/pip $(INSTALL) --no-deps --upgrade --target $(CLUSTERS) -r $<
	@touch $@

# See requirements/torchft.txt.
TORCHFT := build/torchft
torchft: $(TORCHFT)/.installed
$(TORCHFT)/.installed: requirements/torchft.txt .venv/.created
	$(BIN)/pip $(INSTALL) --no-deps --upgrade --target $(TORCHFT) -r $<
	@touch $@

# See requirements/integrations.txt.
INTEGRATIONS := build/integrations
$(INTEGRATIONS)/.installed: requirements/integrations.txt .venv/.created
	$(BIN)/pip $(INSTALL) --no-deps --upgrade --target $(INTEGRATIONS) -r $<
	@touch $@

# See requirements/upstream-examples.txt.
UPSTREAM := build/upstream-examples
$(UPSTREAM)/.installed: requirements/upstream-examples.txt .venv/.created
	$(BIN)/pip $(INSTALL) --no-deps --upgrade --target $(UPSTREAM) -r $<
	@touch $@

.venv/.tf-keras: requirements/tf-keras.txt .venv/.tensorflow
	$(PIP) $(INSTALL) --no-deps -r $<
	@touch $@

# An editable installation: Python imports the checkout, and the console scripts are in .venv/bin.
.venv/.installed: pyproject.toml setup.py .venv/.test
	$(PIP) install -q --no-build-isolation --no-deps -e .
	@touch $@

# --- the package ----------------------------------------------------------------------------------------------------

build: .venv/.installed
	@MAKEFLAGS= $(BIN)/python setup.py -q build_ext --inplace

# For what reads the types and the documentation without a build.
stubs:
	@$(PYTHON) -m horoplug.common.stubs

# With what draws the picture, and with the digits of scikit-learn where Fashion-MNIST, a Debian package, is missing.
demo: build $(OPTIONAL)/.installed
	@$(ACTIVATE) PYTHONPATH="$(CURDIR)/$(OPTIONAL)" python examples/demo.py

wheel: .venv/.test
	$(BIN)/pip wheel -q --no-deps --no-build-isolation -w dist .

# Wheels for all architectures and for the Pythons of this machine, into dist/wheels.
.venv-wheels/.installed: requirements/wheels.txt
	@rm -rf build/wheels  # of other versions
	$(PYTHON) -m venv --clear .venv-wheels
	.venv-wheels/bin/pip $(INSTALL) --require-hashes -r $<
	@touch $@

wheels: .venv-wheels/.installed
	.venv-wheels/bin/python scripts/wheels/build.py dist/wheels

WHEELS_PYTHON := PATH="$(CURDIR)/.venv-wheels/bin:$$PATH" python
check-wheels: wheels
	$(WHEELS_PYTHON) scripts/wheels/check.py dist/wheels

# Files that make test does not collect, because of their names.
test-wheels: wheels .venv/.test .venv/.tensorflow .venv/.jax .venv-oldest/.installed build/.system-test
	@scripts/system-packages $(PYTHON) debootstrap qemu-user-static
	@$(WHEELS_PYTHON) scripts/wheels/core_tests.py >/dev/null
	@$(ACTIVATE) python -m pytest -o python_files='*.py' tests/wheels $(PYTEST_ARGS)

release-check: lint docs check-wheels test-wheels
	@$(WHEELS_PYTHON) scripts/wheels/again.py dist/wheels
	@$(WHEELS_PYTHON) scripts/wheels/release.py dist/wheels

# Uses the machine's nvcc. KERNEL_ARCHS=80,90: code for these architectures, and PTX for later ones.
KERNEL_ARCHS ?=
kernels:
	@$(PYTHON) scripts/kernels.py --archs '$(KERNEL_ARCHS)'

bench: build cpp-release .venv/.test $(OPTIONAL)/.installed
	@$(ACTIVATE) PYTHONPATH="$(CURDIR)/$(OPTIONAL)" python benchmarks/suite.py short --report build/bench/report.md

# BASE: a commit, which is built in build/compare, or the folder of a checkout that is built.
BASE ?=
ROUNDS ?= 7
bench-compare: build
	@[ -n "$(BASE)" ] || { echo "BASE=commit: give the commit that this checkout is compared with"; exit 1; }
	@$(ACTIVATE) PYTHONPATH="$(CURDIR)" python benchmarks/compare.py "$(BASE)" --rounds $(ROUNDS) --only "$(ONLY)"

# If the PyTorch of the machine's python3 finds a GPU, test-gpu and bench-gpu use that Python with its CUDA, PyTorch and CuPy,
# and download nothing. GPU_PYTHON=/path selects another Python. Both write docs/gpu-results.md.
ifneq ($(filter test-gpu bench-gpu,$(MAKECMDGOALS)),)
GPU_PYTHON ?= $(shell python3 -c 'import torch; print("python3" if torch.cuda.is_available() else "")' 2>/dev/null)
endif
GPU_TOOLS := $(if $(GPU_PYTHON),gpu-python,cpp-release build)
gpu-python:
	@PYTHONPATH=. $(GPU_PYTHON) -c 'import horoplug._native' 2>/dev/null || \
	  { echo 'horoplug is not built for $(GPU_PYTHON): $(GPU_PYTHON) -m pip install --no-build-isolation -e . (with cmake, ninja, pybind11)'; exit 1; }
bench-gpu: $(GPU_TOOLS)
	@$(if $(GPU_PYTHON),PYTHONPATH=. $(GPU_PYTHON),$(ACTIVATE) python) benchmarks/gpu.py

bench-report: build cpp-release .venv/.test $(OPTIONAL)/.installed mpi torchft
	@$(ACTIVATE) PYTHONPATH="$(CURDIR)/$(OPTIONAL)" python benchmarks/suite.py full --resume --out build/bench-full --report docs/benchmarks.md

# Each MPI has its own prefix, since all of them install a program named mpirun.
MPIS := build/mpi/openmpi/.installed build/mpi/mpich/.installed build/mpi/impi/.installed
mpi: $(MPIS) build/mpi/abi/.installed build/mpi/oneccl/raw_ccl

build/mpi/%/.installed: requirements/mpi.txt .venv/.created
	$(BIN)/pip $(INSTALL) --no-deps --ignore-installed --prefix build/mpi/$* $$(grep '^$*' $<)
	@touch $@

# mpi4py for MPI's standard ABI, for which it has no wheel. Compiling without optimisation takes half a minute. With $(PIP),
# although nothing goes into .venv: the build imports setuptools' hook from there, which another pip might be replacing.
build/mpi/abi/.installed: requirements/test.txt build/mpi/mpich/.installed
	MPICC=$(CURDIR)/build/mpi/mpich/bin/mpicc_abi LD_LIBRARY_PATH=$(CURDIR)/build/mpi/mpich/lib CFLAGS="-O0 -g0" \
	  $(PIP) $(INSTALL) --no-cache-dir --no-deps --no-binary mpi4py --upgrade --target $(@D) $$(grep '^mpi4py' $<)
	@touch $@

# oneCCL's wheel contains an archive for machines without GPUs. It lacks Intel's runtime libraries and hwloc, which Open
# MPI's wheel contains.
ONECCL := build/mpi/oneccl
$(ONECCL)/raw_ccl: benchmarks/raw_ccl.cpp benchmarks/raw_timing.h requirements/oneccl.txt $(MPIS)
	$(BIN)/pip $(INSTALL) --no-deps --ignore-installed --prefix $(ONECCL) -r requirements/oneccl.txt
	@rm -f $(ONECCL)/lib/libccl*
	$(CXX) -std=c++17 -O2 -I$(ONECCL)/include -Ibuild/mpi/mpich/include -o $@ $< $(ONECCL)/lib/ccl/cpu/lib/libccl.a \
	  build/mpi/impi/lib/libmpi.so.12 build/mpi/openmpi/lib/openmpi/libhwloc.so.15 -L$(ONECCL)/lib \
	  -l:libintlc.so.5 -l:libirng.so -l:libsvml.so -l:libimf.so -ldl -lpthread -lrt \
	  '-Wl,-rpath,$$ORIGIN/lib:$$ORIGIN/../openmpi/lib/openmpi'

# --- C++ tests: one build directory per configuration; the release one is also the package's -------------------------

CONFIGURE = $(CMAKE) -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DHOROPLUG_TESTS=ON \
  $(if $(WERROR),-DHOROPLUG_WERROR=$(WERROR))
# Includes the Python module, so that `build` has nothing left to do and clang-tidy sees the module.
OPTIONS_release := -DHOROPLUG_PYTHON=ON -DHOROPLUG_PYTHON_EXECUTABLE=$(CURDIR)/$(BIN)/python
OPTIONS_tsan := -DHOROPLUG_SANITIZE=thread
OPTIONS_asan := -DHOROPLUG_SANITIZE=address
OPTIONS_fuzz := -DHOROPLUG_SANITIZE=fuzzer
# The sanitizer configurations are compiled by clang, in half of the time that gcc takes; only clang has libFuzzer. CMake reads
# CXX only when a directory is configured for the first time. Passing the compiler as an option would reset the other options.
cpp-asan cpp-tsan cpp-fuzz: export CXX := clang++-16
cpp-release: export CMAKE_CXX_COMPILER_LAUNCHER ?= $(shell command -v ccache)

# Without MAKEFLAGS, by which Ninja would look for a jobserver that this version of make does not offer.
cpp-%: build/.system-test .venv/.test
	@$(CONFIGURE) -B build/$* $(OPTIONS_$*) >/dev/null
	@MAKEFLAGS= $(CMAKE) --build build/$* --parallel $$(nproc)

cpp: cpp-release cpp-tsan cpp-asan cpp-fuzz

# --- documentation --------------------------------------------------------------------------------------------------

# In an environment of its own. A broken link, or a name in the API reference that does not exist, is an error.
DOCS := build/docs-venv
$(DOCS)/.installed: requirements/docs.txt | build/.system-demo
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip $(INSTALL) --no-deps -r $<
	@touch $@

docs: $(DOCS)/.installed stubs
	@set -o pipefail; NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict 2>&1 | sed "/^INFO/d"
	@echo "build/site/index.html"

# --- checks ---------------------------------------------------------------------------------------------------------

# Without Intel MPI, whose wheel is too large for a few tests, and without mpi4py for the standard ABI, which has to be
# compiled: make test-matrix, and for Intel's also make mpi.
TESTED_MPIS := build/mpi/openmpi/.installed build/mpi/mpich/.installed

# Number of pytest workers; 0: none. Four fill two cores, because many tests wait for time limits and for processes to start.
# Tests that measure time or need exclusive resources run alone in any case (tests/harness/scheduling.py).
TEST_WORKERS ?= 4

# Everything that tests need and pip installs. The first part installs nothing into .venv.
OTHER_ENVIRONMENTS := $(OPTIONAL)/.installed $(CLUSTERS)/.installed $(TESTED_MPIS) .venv-mxnet/.installed
other-environments: $(OTHER_ENVIRONMENTS)
environments: $(OTHER_ENVIRONMENTS) .venv/.tf-keras .venv/.jax .venv/.cuda .venv/.notebook

# The tests with the mark short (tests/harness/short_set.py). Packages are downloaded while the compiler runs.
IN_PARALLEL = @$(MAKE) -j3 --no-print-directory --output-sync=target
test:
	$(IN_PARALLEL) cpp-release environments
	@$(MAKE) --no-print-directory build
	@$(ACTIVATE) python -m pytest -n $(TEST_WORKERS) -m '(short or every_run) and not matrix' $(PYTEST_ARGS)

# AFTER_TEST=1: without the tests that make test has just run.
AFTER_TEST ?=
test-all:
	$(IN_PARALLEL) cpp environments .venv/.dev
	@$(MAKE) --no-print-directory build
	@$(ACTIVATE) python -m pytest -n $(TEST_WORKERS) $(if $(AFTER_TEST),-m '(not short or every_run) and not matrix') $(PYTEST_ARGS)

# Every call of an operation goes through Python (docs/design/bindings.md). Not the tests of the C++ code and of the launcher.
test-without-direct-calls: build environments
	@$(ACTIVATE) HOROPLUG_DIRECT_CALLS=0 python -m pytest -n $(TEST_WORKERS) -m 'not matrix' \
	  $(addprefix tests/,api core elastic jax keras mpi tensorflow torch) $(PYTEST_ARGS)

# All files of tests/soak, which make test does not collect. A seed that is printed can be repeated with HOROPLUG_TEST_SEED.
SOAK_SECONDS ?= 3600
SOAK_MPIS := build/mpi/openmpi/.installed build/mpi/mpich/.installed
soak: build .venv/.tensorflow .venv/.jax $(SOAK_MPIS)
	@$(ACTIVATE) HOROPLUG_SOAK_SECONDS=$(SOAK_SECONDS) python -m pytest -s -o python_files='*.py' tests/soak $(PYTEST_ARGS)

# PyTorch's wheel contains the suite. RANKS=2: with this number of ranks only.
RANKS ?= 2 3 4
test-c10d: build
	@$(ACTIVATE) PYTHONPATH=. python tests/torch/c10d/compare_with_gloo.py $(RANKS)

# HOROVOD: a clone of Horovod's repository, whose examples run under the name horovod.
HOROVOD ?=
test-upstream-examples: build .venv/.tensorflow .venv/.tf-keras $(CLUSTERS)/.installed $(UPSTREAM)/.installed
	@[ -e "$(HOROVOD)" ] || { echo "HOROVOD=/path: give the path of a clone of Horovod's repository"; exit 1; }
	@$(ACTIVATE) HOROVOD_CLONE="$(HOROVOD)" python -m pytest -o python_files='*.py' tests/api/upstream_examples.py $(PYTEST_ARGS)

# What repeats tests of make test with further versions and backends of frameworks.
test-matrix: build environments .venv-oldest/.installed build/mpi/abi/.installed
	@$(ACTIVATE) python -m pytest -m matrix $(PYTEST_ARGS)

# An environment for each row of scripts/compat_matrix/rows.py, one after the other. They are removed again; what they
# found stays in build/versions/results.
ONLY ?=
build/versions/.tools/.installed: requirements/compat-matrix.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip $(INSTALL) -r $<
	@touch $@
compat-matrix: wheels build/.system-test build/versions/.tools/.installed
	@$(PYTHON) -m scripts.compat_matrix $(ONLY)

# The programs of torch.compile, and those tests of torch.distributed that use nothing newer than PyTorch 2.4, with another
# version of PyTorch. PyPI's are built for CUDA: a gigabyte to download, and two more on the disk.
TORCH ?= 2.4.1
OTHER_TORCH = build/torch/$(TORCH)
TORCH_TESTS := $(addprefix torch/c10d/test_,collectives.py compile.py mismatches.py time_limits.py) integrations/torch_compile.py
build/torch/%/.installed: scripts/other_pytorch.py .venv/.dev build/.system-test
	@rm -rf build/torch/$*
	@$(BIN)/python scripts/other_pytorch.py $* build/torch/$*
	@touch $@
test-torch: build $(OTHER_TORCH)/.installed
	@$(ACTIVATE) PYTHONPATH="$(CURDIR)/$(OTHER_TORCH)/python" LD_LIBRARY_PATH="$(CURDIR)/$(OTHER_TORCH)/libraries" \
	  python -m pytest -o python_files='*.py' $(addprefix tests/,$(TORCH_TESTS)) $(PYTEST_ARGS)

# Files that make test does not collect, because of their names. The tests of mpirun also need make mpi.
test-integrations: build $(INTEGRATIONS)/.installed $(CLUSTERS)/.installed $(TORCHFT)/.installed
	@$(ACTIVATE) PYTHONPATH="$(CURDIR)/$(INTEGRATIONS)" python -m pytest -o python_files='*.py' tests/integrations $(PYTEST_ARGS)

# PYTHON_T: a Python without the global interpreter lock, for which the package is built into the checkout, too. torch is left
# out: none of these tests needs it.
PYTHON_T ?= python3.13t
.venv-free-threaded/.installed: requirements/test.txt requirements/build.txt | build/.system-demo
	$(PYTHON_T) -m venv --clear .venv-free-threaded
	.venv-free-threaded/bin/pip $(INSTALL) -r requirements/build.txt $$(grep -E '^(cloudpickle|ml_dtypes|numpy|psutil|pytest|PyYAML)' $<)
	@touch $@
FREE_THREADED_TESTS := $(addprefix tests/core/test_,threads.py batch.py dtypes.py native.py numpy_failures.py numpy_kill.py \
  numpy_lifecycle.py numpy_ops.py objects.py point_to_point.py rooted_operations.py)
test-free-threaded: .venv-free-threaded/.installed
	@PATH="$(CURDIR)/.venv-free-threaded/bin:$$PATH" HOROPLUG_BUILD_DIR=build/free-threaded python setup.py -q build_ext --inplace
	@PATH="$(CURDIR)/.venv-free-threaded/bin:$$PATH" python -c 'import sys, horoplug._native; sys.exit(sys._is_gil_enabled())'
	@PATH="$(CURDIR)/.venv-free-threaded/bin:$$PATH" python -m pytest $(FREE_THREADED_TESTS) $(PYTEST_ARGS)

# A file that make test does not collect, because of its name: debootstrap takes a minute.
test-image: wheel
	@scripts/system-packages $(PYTHON) debootstrap
	@$(ACTIVATE) HOROPLUG_TEST_WHEEL="$$(ls -t dist/*.whl | head -n 1)" \
	  python -m pytest -o python_files=debian_image.py tests/project/debian_image.py $(PYTEST_ARGS)

# See bench-gpu.
test-gpu: $(GPU_TOOLS)
	@$(if $(GPU_PYTHON),PYTHONPATH=. $(GPU_PYTHON),$(ACTIVATE) python) -m pytest -p tests.gpu.device.results tests/gpu/device $(PYTEST_ARGS)

lint: .venv/.dev lint-types
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/python scripts/check_layers.py
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python scripts/check_tests.py

lint-types: .venv/.dev stubs
	$(BIN)/mypy

# Fuzz targets are compiled by clang only and are not in the list of compile commands.
tidy: .venv/.dev compile-commands
	@find csrc -name '*.cc' -not -path '*/fuzz/*' -print0 | \
	  xargs -0 -n 1 -P $$(nproc) $(BIN)/clang-tidy --quiet -p build/tidy

# Checks the files that differ from TIDY_BASE; the default is in find_base of the script.
tidy-changed: .venv/.dev compile-commands
	@$(BIN)/python scripts/tidy_changed.py

# Writes one compile command for each source file, as clang-tidy needs them. Compiles nothing.
compile-commands: build/.system-test .venv/.test
	@$(CONFIGURE) -B build/tidy $(OPTIONS_release) -DHOROPLUG_UNITY=OFF >/dev/null

format: .venv/.dev
	$(BIN)/clang-format -i $(CPP_FILES)
	$(BIN)/ruff format $(PYTHON_FILES)
	$(BIN)/ruff check --fix $(PYTHON_FILES)

clean:
	rm -rf .venv .venv-oldest .venv-wheels .venv-free-threaded .venv-mxnet build dist .cache .mypy_cache .pytest_cache .ruff_cache horoplug.egg-info
	rm -f horoplug/*.so horoplug/*/operations.pyi horoplug/kernels.fatbin*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
