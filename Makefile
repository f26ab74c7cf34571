# Every target works from a fresh clone: the first one to run creates .venv and installs into it.
PY := .venv/bin/python

.PHONY: demo test test-all lint docs clean

demo: .venv/.demo
	.venv/bin/patchproof demo

test: .venv/.dev
	$(PY) -m pytest -n 3

test-all: .venv/.dev
	$(PY) -m pytest -n 3 -m ""

lint: .venv/.dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

docs: .venv/.docs
	$(PY) -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo docs/_build/html/index.html

.venv/bin/uv:
	python3 -m venv .venv
	$(PY) -m pip install --quiet uv

.venv/.demo: .venv/bin/uv pyproject.toml
	.venv/bin/uv pip install --python $(PY) -e .
	touch $@

.venv/.dev: .venv/bin/uv pyproject.toml
	.venv/bin/uv pip install --python $(PY) -e '.[dev]'
	touch $@

.venv/.docs: .venv/bin/uv pyproject.toml
	.venv/bin/uv pip install --python $(PY) -e '.[docs]'
	touch $@

clean:
	rm -rf .venv build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
