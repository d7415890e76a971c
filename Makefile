# Every target works on a fresh machine with Python 3.11 or newer and make; `test-all` and `lint` need Node.js too.
# What a target needs is installed first, and no more than that.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS_VENV := .venv-protos
GOLDEN_VENV := .venv-golden
GOLDEN_RNN_VENV := .venv-golden-rnn
GOLDEN_LAYERS_VENV := .venv-golden-layers
GOLDEN_FLOWER_VENV := .venv-golden-flower
GOLDEN_EXO_GYM_VENV := .venv-golden-exo-gym
EXO_GYM := git+https://github.com/exo-explore/gym@9fa323c26364f4437ffd23517da5d65946003963
CUDNN_VENV := .venv-cudnn
RELEASE_VENV := .venv-release
DOCS_VENV := .venv-docs
GPU_VENV := .venv-gpu
AUDIT_VENV := .venv-audit
SEEDS ?= 1000
MINUTES ?= 10
BEFORE ?= HEAD~1
CUDNN_TESTS := tests/devices/cuda/cudnn
BUF := npx --yes @bufbuild/buf@1.75.0
JAVASCRIPT := examples/javascript
DOCS_PACKAGES := latex2mathml mkdocs-material
CPP_PACKAGES := g++ libgrpc++-dev libprotobuf-dev pkg-config protobuf-compiler protobuf-compiler-grpc
# Python compiles what is imported, once, unless it is told to throw that away: then each process of the tests would
# compile all that it imports. Compiling everything that is installed takes longer than half of the rest.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := -m pip install --disable-pip-version-check --no-compile
UV_COMPILE = $(BIN)/uv pip compile --universal --python-version 3.11 --upgrade --quiet \
	--no-header --no-annotate --no-emit-index-url
COMPILE = $(UV_COMPILE) pyproject.toml
# The versions of constraints.txt, with the hashes of their files.
LOCK = $(subst --upgrade ,,$(UV_COMPILE)) --generate-hashes --constraint constraints.txt
LOCKED_EXTRAS := server demo dns tracing cuda12 cuda13

SERVER_INSTALLED := $(VENV)/installed-server
DEMO_INSTALLED := $(VENV)/installed-demo
INSTALLED := $(VENV)/installed
FRAMEWORKS_INSTALLED := $(VENV)/installed-frameworks
FUZZER_INSTALLED := $(VENV)/installed-fuzzer
RELEASE_INSTALLED := $(RELEASE_VENV)/installed
AUDIT_INSTALLED := $(AUDIT_VENV)/installed
PROTOC_INSTALLED := $(PROTOS_VENV)/installed
DOCS_INSTALLED := $(DOCS_VENV)/installed
GOLDEN_INSTALLED := $(GOLDEN_VENV)/installed
GPU_INSTALLED := $(GPU_VENV)/installed
GOLDEN_RNN_INSTALLED := $(GOLDEN_RNN_VENV)/installed
GOLDEN_LAYERS_INSTALLED := $(GOLDEN_LAYERS_VENV)/installed
GOLDEN_FLOWER_INSTALLED := $(GOLDEN_FLOWER_VENV)/installed
GOLDEN_EXO_GYM_INSTALLED := $(GOLDEN_EXO_GYM_VENV)/installed
CUDNN_INSTALLED := $(CUDNN_VENV)/installed
NODE_INSTALLED := $(JAVASCRIPT)/node_modules/.package-lock.json

.DEFAULT_GOAL := help
.PHONY: help install install-frameworks install-node install-cpp install-chromium install-prometheus install-strace cpp demo serve test test-all test-long coverage lint types protos check-protos dist check-pythons check-bits check-floors sbom audit face-types check-processors check-cudnn check-gpu golden bench bench-small flames costs walks tables simulate fuzz chaos storm soak image docs constraints locks clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(INSTALLED)  ## Install everything needed for development into .venv

# $(call install_extra,EXTRA,SIZE,WHAT): pip shows its progress. .venv grows with what is asked for: the server is part
# of the demo, both are part of what development needs. So nothing is installed twice.
define install_extra
	@echo "Installing $(3) into $(VENV): about $(2) there when done"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[$(1)]'
	@echo "Installed: $(VENV) holds $$(du -sh $(VENV) | cut -f1)"
endef

$(SERVER_INSTALLED): pyproject.toml constraints.txt
	$(call install_extra,server,390 MB,the server with NumPy and Numba)
	@touch $@

$(DEMO_INSTALLED): pyproject.toml constraints.txt
	$(call install_extra,demo,690 MB,the server and the demo with scikit-learn and Matplotlib)
	@touch $(SERVER_INSTALLED) $@

$(INSTALLED): pyproject.toml constraints.txt
	$(call install_extra,dev,1.6 GB,everything for development with compilers for C and CUDA)
	@touch $(SERVER_INSTALLED) $(DEMO_INSTALLED) $@

# The packages on an index may bring what a GPU needs: several GB more. What is installed already in these versions stays.
install-frameworks: $(FRAMEWORKS_INSTALLED)  ## Install PyTorch, JAX, Ray, Lightning, Keras and Transformers into .venv, whose tests are skipped without them

$(FRAMEWORKS_INSTALLED): $(INSTALLED) deploy/constraints-frameworks.txt
	@echo "Installing PyTorch, JAX, Ray and what builds on them into $(VENV): about 1.9 GB, with PyTorch for CUDA several GB"
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -c deploy/constraints-frameworks.txt torch jax optax 'ray[train]' \
		accelerate keras lightning tensorboardX transformers
	@touch $@

install-node: $(NODE_INSTALLED)  ## Install what the JavaScript example needs

$(NODE_INSTALLED): $(JAVASCRIPT)/package.json
	@echo "Installing gRPC for Node.js into $(JAVASCRIPT)/node_modules: 14 MB"
	npm install --loglevel=error --no-audit --no-fund --prefix $(JAVASCRIPT)
	@touch $@

install-cpp:  ## Install gRPC for C++, which its example needs, on Debian as root
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends $(CPP_PACKAGES)

install-chromium:  ## Install the browser that tests of the status page need, on Debian as root
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends chromium

install-prometheus:  ## Install Prometheus, which the tests of the alert rules need, on Debian as root
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends prometheus

install-strace:  ## Install strace, with which `make costs` counts system calls, on Debian as root
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends strace

cpp:  ## Build the C++ examples into build/cpp
	$(MAKE) --no-print-directory -f examples/cpp/Makefile BUILD=build/cpp

demo: $(DEMO_INSTALLED)  ## Train on real data with four workers, beside one process
	$(BIN)/gradserve demo $(DEMO_FLAGS)

serve: $(SERVER_INSTALLED)  ## Run a server on 127.0.0.1:50051
	$(BIN)/gradserve serve $(SERVE_FLAGS)

test: $(INSTALLED)  ## Run the short suite, in five minutes: all that a change can break in what is promised
	$(BIN)/python -m tests $(TEST_FLAGS)

test-all: $(INSTALLED) $(NODE_INSTALLED)  ## Run the whole suite: floods, kills, links, emulated GPUs, other languages and more
	$(BIN)/python -m tests --suite all $(TEST_FLAGS)

test-long: $(INSTALLED)  ## Run the tests that take many minutes each: thousands of kills, tens of thousands of updates
	$(BIN)/python -m tests --suite long

coverage: $(INSTALLED) $(NODE_INSTALLED)  ## Run the tests and measure which lines and branches they run
	PYTEST_PLUGINS=tests.coverage $(BIN)/python -m pytest --suite all --ignore=tests/floods  # they count calls: measuring makes more

lint: $(INSTALLED)  ## Check style, layers, protos, and what has changed since the newest release
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m deploy.english
	$(BIN)/python -m deploy.tables
	$(BIN)/lint-imports --no-logo
	$(BUF) lint
	deploy/check_breaking.sh $(BUF)
	deploy/check_api.sh $(BIN)/griffe

types: $(INSTALLED)  ## Check types
	$(BIN)/mypy

$(PROTOC_INSTALLED): Makefile
	@echo "Installing the compiler of the protos into $(PROTOS_VENV)"
	$(PYTHON) -m venv $(PROTOS_VENV)
	$(PROTOS_VENV)/bin/python $(PIP_INSTALL) grpcio-tools==1.74.0 setuptools==80.9.0
	@touch $@

protos: $(PROTOC_INSTALLED)  ## Make the stubs from the protos
	deploy/generate_stubs.sh $(PROTOS_VENV)/bin/python client

check-protos: $(PROTOC_INSTALLED)  ## Fail when the stubs are not those of the protos
	rm -rf build/stubs && mkdir -p build/stubs
	deploy/generate_stubs.sh $(PROTOS_VENV)/bin/python build/stubs
	diff -r --exclude=__pycache__ --exclude=__init__.py build/stubs/gradserve/v1 client/gradserve/v1
	diff -r --exclude=__pycache__ --exclude=__init__.py build/stubs/gradserve_protocol/v1 client/gradserve_protocol/v1

face-types: $(INSTALLED)  ## Make the types of methods that return arrays or handles
	$(BIN)/python deploy/generate_face_types.py client

check-processors: $(INSTALLED)  ## Compile the kernels for other processors too, and check what they compute
	ALL_PROCESSORS=1 $(BIN)/python -m pytest tests/processors tests/parameters/test_bits.py

$(CUDNN_INSTALLED): Makefile pyproject.toml constraints.txt deploy/constraints-cuda13.txt
	@echo "Installing cuDNN into $(CUDNN_VENV)"
	$(PYTHON) -m venv $(CUDNN_VENV)
	$(CUDNN_VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e . pytest psutil pydantic
	$(CUDNN_VENV)/bin/python $(PIP_INSTALL) --no-deps \
		-c deploy/constraints-cuda13.txt nvidia-cudnn-cu13 cuda-pathfinder
	@touch $@

check-cudnn: $(CUDNN_INSTALLED)  ## Check what is declared of cuDNN beside cuDNN itself; 500 MB, but no GPU
	$(CUDNN_VENV)/bin/python -m pytest -c $(CUDNN_TESTS)/without_gpu.ini --confcutdir $(CUDNN_TESTS) -m cudnn \
		$(CUDNN_TESTS)/test_headers.py $(CUDNN_TESTS)/test_library.py

# The CUDA that the driver knows; none without a driver.
CUDA ?= $(shell nvidia-smi 2>/dev/null | sed -nE 's/.*CUDA Version: ([0-9]+).*/\1/p')

$(GPU_INSTALLED): pyproject.toml constraints.txt deploy/constraints-cuda12.txt deploy/constraints-cuda13.txt
	@test -n "$(CUDA)" || { echo "no driver of NVIDIA answers nvidia-smi; CUDA=13 chooses the packages without it" >&2; exit 2; }
	@echo "Installing the server for CUDA $(CUDA) and what its tests need into $(GPU_VENV): about 5 GB there when done"
	$(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -c deploy/constraints-cuda$(CUDA).txt -e '.[cuda$(CUDA),dev]'
	@touch $@

# A machine without a network may have it all installed: then GPU_PYTHON names its Python. With PyTorch there, kernels
# are measured beside cuDNN's.
ifndef GPU_PYTHON
check-gpu: $(GPU_INSTALLED)
endif
check-gpu: GPU_PYTHON ?= $(GPU_VENV)/bin/python
check-gpu:  ## On a machine with a GPU: run and judge, in nine minutes, all that only a GPU can settle
	$(GPU_PYTHON) -m benchmarks.gpu.check $(CHECK_FLAGS)

$(GOLDEN_INSTALLED): Makefile
	@echo "Installing TensorFlow into $(GOLDEN_VENV)"
	$(PYTHON) -m venv $(GOLDEN_VENV)
	$(GOLDEN_VENV)/bin/python $(PIP_INSTALL) tensorflow-cpu==2.15.1 numpy==1.26.4
	@touch $@

$(GOLDEN_RNN_INSTALLED): Makefile
	@echo "Installing PyTorch into $(GOLDEN_RNN_VENV)"
	$(PYTHON) -m venv $(GOLDEN_RNN_VENV)
	$(GOLDEN_RNN_VENV)/bin/python $(PIP_INSTALL) \
		torch==2.13.0 numpy==2.4.6 ml_dtypes==0.6.0
	@touch $@

$(GOLDEN_LAYERS_INSTALLED): Makefile
	@echo "Installing TensorFlow with tf_slim into $(GOLDEN_LAYERS_VENV)"
	$(PYTHON) -m venv $(GOLDEN_LAYERS_VENV)
	$(GOLDEN_LAYERS_VENV)/bin/python $(PIP_INSTALL) \
		tensorflow-cpu==2.13.1 tf_slim==1.1.0 numpy==1.24.3 ml_dtypes==0.5.4
	@touch $@

$(GOLDEN_FLOWER_INSTALLED): Makefile
	@echo "Installing Flower into $(GOLDEN_FLOWER_VENV)"
	$(PYTHON) -m venv $(GOLDEN_FLOWER_VENV)
	$(GOLDEN_FLOWER_VENV)/bin/python $(PIP_INSTALL) flwr==1.42.0 numpy==2.4.6
	@touch $@

$(GOLDEN_EXO_GYM_INSTALLED): Makefile
	@echo "Installing exo gym into $(GOLDEN_EXO_GYM_VENV)"
	$(PYTHON) -m venv $(GOLDEN_EXO_GYM_VENV)
	$(GOLDEN_EXO_GYM_VENV)/bin/python $(PIP_INSTALL) torch==2.13.0 numpy==2.4.6 tqdm einops psutil
	$(GOLDEN_EXO_GYM_VENV)/bin/python $(PIP_INSTALL) --no-deps $(EXO_GYM)
	@touch $@

golden: $(GOLDEN_INSTALLED) $(GOLDEN_RNN_INSTALLED) $(GOLDEN_LAYERS_INSTALLED) $(GOLDEN_FLOWER_INSTALLED) $(GOLDEN_EXO_GYM_INSTALLED)  ## Record anew what TensorFlow, PyTorch, Flower and exo gym compute (needs Python 3.11)
	$(GOLDEN_VENV)/bin/python -m tests.golden.make_fused_batch_norm
	$(GOLDEN_VENV)/bin/python -m tests.golden.make_fused_batch_norm_errors
	$(GOLDEN_VENV)/bin/python -m tests.golden.make_gru_block_cell
	$(GOLDEN_VENV)/bin/python -m tests.golden.make_gru_block_cell_errors
	$(GOLDEN_VENV)/bin/python -m tests.golden.make_activation
	$(GOLDEN_VENV)/bin/python -m tests.golden.make_raw_op_signatures
	$(GOLDEN_RNN_VENV)/bin/python -m tests.golden.make_cudnn_rnn
	$(GOLDEN_RNN_VENV)/bin/python -m tests.golden.make_layer_norm
	$(GOLDEN_LAYERS_VENV)/bin/python -m tests.golden.make_batch_norm_layer
	$(GOLDEN_LAYERS_VENV)/bin/python -m tests.golden.make_batch_norm_layer_errors
	$(GOLDEN_FLOWER_VENV)/bin/python -m tests.parameters.optimizers.make_flower
	$(GOLDEN_EXO_GYM_VENV)/bin/python -m tests.torch.make_exo_gym

bench: $(INSTALLED)  ## Measure beside the peers; installs them into environments of their own
	$(BIN)/python -m benchmarks $(BENCH_FLAGS)

bench-small: $(INSTALLED)  ## Measure the smallest round beside TensorFlow, a naive service and the commit BEFORE
	$(BIN)/python -m benchmarks --only small --beside $(BEFORE) --repeats 30 --seconds 90 $(BENCH_FLAGS)

flames: $(INSTALLED)  ## Show where the time of small calls goes, with flame graphs in build/flames
	$(BIN)/python -m benchmarks.stages --flames build/flames

costs: $(INSTALLED)  ## Count what small calls cost, and compare it with their budget
	$(BIN)/python -m deploy.costs

walks: $(INSTALLED)  ## Count the files that calls pass through, and write the table into docs/architecture_walks.md
	$(BIN)/python -m deploy.walks --write

tables: $(INSTALLED)  ## Write the tables of variables and exit codes into the documentation
	$(BIN)/python -m deploy.tables --write

simulate: $(INSTALLED)  ## Crash servers on simulated disks, SEEDS times
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)
	$(BIN)/python -m tests.simulation.sharding --seeds $(SEEDS)
	$(BIN)/python -m tests.simulation.sharding --parameters --seeds $(SEEDS)

$(FUZZER_INSTALLED): $(INSTALLED)
	@echo "Installing atheris into $(VENV): 35 MB. Where it has no build for this Python, inputs are mutated at random"
	$(BIN)/python $(PIP_INSTALL) --only-binary=:all: 'atheris>=3' || true
	@touch $@

fuzz: $(FUZZER_INSTALLED)  ## Give servers, codecs and state directories inputs that are not valid, for MINUTES
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

chaos: $(INSTALLED)  ## Kill, stop and cut off workers and a durable server for MINUTES, and judge what came of it
	$(BIN)/python -m tests.endurance.chaos --minutes $(MINUTES)

storm: $(INSTALLED)  ## Kill DiLoCo workers every half minute and their server three times in MINUTES, and judge what came of it
	$(BIN)/python -m tests.endurance.storm --minutes $(MINUTES)

soak: $(INSTALLED)  ## Load a server at full speed over every way for MINUTES: memory, descriptors and latencies must stay flat
	$(BIN)/python -m tests.endurance.soak --minutes $(MINUTES)

$(RELEASE_INSTALLED): Makefile
	@echo "Installing what makes and checks releases into $(RELEASE_VENV): 90 MB"
	$(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/python $(PIP_INSTALL) build==1.6.1 cyclonedx-bom==7.5.0 hatchling==1.33.0 twine==7.0.0 uv==0.13.9
	@touch $@

dist: $(RELEASE_INSTALLED)  ## Build the wheel and the source distribution into dist/, and check them
	rm -rf dist
	env -u SOURCE_DATE_EPOCH $(RELEASE_VENV)/bin/python -m build --no-isolation  # hatchling's own time: the same for everyone
	$(RELEASE_VENV)/bin/twine check --strict dist/*

PYTHONS ?= python3.11 python3.12 python3.13 python3.14

check-pythons: dist  ## Install the wheel for each Python of PYTHONS that there is, and try it
	$(RELEASE_VENV)/bin/python -m deploy.release.check_pythons $(PYTHONS)

# Tests whose results depend on how Python adds floats, which 3.12 has changed.
BITS_PYTHON ?= python3.13
BITS_VENV = .venv-bits-$(notdir $(BITS_PYTHON))
BITS_TESTS := tests/cluster/sharding/test_bits.py tests/accumulators/test_arithmetic.py tests/accumulators/test_sums.py \
	tests/accumulators/durable/test_recovery.py tests/trees/test_means.py tests/trees/sharding/test_calls.py

check-bits:  ## Run the tests of bits with a later Python: BITS_PYTHON, 3.13 by default
	@echo "Installing the server and pytest into $(BITS_VENV): 400 MB"
	$(BITS_PYTHON) -m venv $(BITS_VENV)
	$(BITS_VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[server]' \
		hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
	$(BITS_VENV)/bin/python -m pytest $(BITS_TESTS)

check-floors: dist  ## Install the lowest versions that are asked for, with the oldest Python, try them and attack them
	$(RELEASE_VENV)/bin/python -m deploy.release.check_floors $(firstword $(PYTHONS))

sbom: dist  ## List what a server installed from the wheel consists of, as CycloneDX, beside it in dist/
	rm -rf build/sbom
	$(PYTHON) -m venv build/sbom
	build/sbom/bin/python $(PIP_INSTALL) --require-hashes -r deploy/locked/server.txt
	build/sbom/bin/python $(PIP_INSTALL) --no-index --no-deps "$$(ls dist/*.whl)"
	$(RELEASE_VENV)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --validate \
		--output-file "$$(ls dist/*.whl | sed 's/-py3.*/.cdx.json/')" build/sbom/bin/python

$(AUDIT_INSTALLED): Makefile
	@echo "Installing pip-audit into $(AUDIT_VENV): 60 MB"
	$(PYTHON) -m venv $(AUDIT_VENV)
	$(AUDIT_VENV)/bin/python $(PIP_INSTALL) pip-audit==2.10.1
	@touch $@

audit: $(AUDIT_INSTALLED)  ## Ask PyPI which of the locked versions have known vulnerabilities
	deploy/audit.sh $(AUDIT_VENV)/bin/pip-audit deploy/locked/*.txt

image:  ## Build the container image and check that it runs
	deploy/image.sh

$(DOCS_INSTALLED): Makefile deploy/constraints-docs.txt
	@echo "Installing what makes the documentation into $(DOCS_VENV): 170 MB"
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python $(PIP_INSTALL) -c deploy/constraints-docs.txt $(DOCS_PACKAGES)
	@touch $@

docs: $(DOCS_INSTALLED) $(PROTOC_INSTALLED) $(INSTALLED)  ## Build the documentation into build/site (needs all of `make install`: 1.6 GB)
	mkdir -p build
	$(PROTOS_VENV)/bin/python -m grpc_tools.protoc -Iproto --include_source_info \
		--descriptor_set_out=build/protos.bin proto/gradserve/v1/*.proto
	$(BIN)/python -m deploy.site build/site-pages build/protos.bin
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict
	$(BIN)/python -m deploy.site.check build/site

constraints: $(INSTALLED)  ## Pin the newest versions of everything in constraints.txt, and their hashes in deploy/locked
	$(BIN)/python $(PIP_INSTALL) --quiet uv
	for cuda in cuda12 cuda13; do \
		$(COMPILE) --extra $$cuda | grep -E '^(cupy|cuda|nvidia)' | sed 's/ *;.*//' > deploy/constraints-$$cuda.txt; \
	done
	$(COMPILE) --extra dev --constraint deploy/constraints-cuda13.txt --output-file constraints.txt
	printf '%s\n' $(DOCS_PACKAGES) | $(UV_COMPILE) - --output-file deploy/constraints-docs.txt
	$(MAKE) --no-print-directory locks

locks: $(INSTALLED)  ## Write the hashes of the versions in constraints.txt into deploy/locked
	$(BIN)/python $(PIP_INSTALL) --quiet uv
	rm -rf deploy/locked && mkdir deploy/locked
	for extra in $(LOCKED_EXTRAS); do \
		cuda=; case $$extra in cuda*) cuda="--constraint deploy/constraints-$$extra.txt" ;; esac; \
		$(LOCK) pyproject.toml --extra $$extra $$cuda --output-file deploy/locked/$$extra.txt || exit 1; \
	done
	echo hatchling | $(LOCK) - --output-file deploy/locked/build.txt

clean:  ## Remove what make made
	rm -rf $(VENV) $(PROTOS_VENV) $(GOLDEN_VENV) $(GOLDEN_RNN_VENV) $(GOLDEN_LAYERS_VENV) $(GOLDEN_FLOWER_VENV) $(GOLDEN_EXO_GYM_VENV) $(CUDNN_VENV) $(GPU_VENV) $(RELEASE_VENV) $(DOCS_VENV) $(AUDIT_VENV) .venv-bench \
		build dist demo-output $(JAVASCRIPT)/node_modules
