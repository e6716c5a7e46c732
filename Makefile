# Everything runs in .venv, which is made on first use.
PYTHON ?= python3
FRAMEWORK ?= torch
VENV := .venv
BIN := $(VENV)/bin

.PHONY: test check unit demo bench proto clean

test: check
	$(BIN)/python -m pytest

check: $(VENV)/.installed
	@mkdir -p .mypy/elastic_adapter
	@for folder in core adapters proto launchers; do ln -sfn ../../$$folder .mypy/elastic_adapter/$$folder; done
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

unit: $(VENV)/.installed
	$(BIN)/python -m pytest tests/unit

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

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
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,torch]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
