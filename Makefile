BIN := .venv/bin
OUT := .
PROTOS := proto/stages/v1/stage.proto proto/stages/v1/join.proto proto/serving/v1/router.proto proto/trainer/v1/rounds.proto

.PHONY: help install demo demo-model test test-slow lint house reference bench wan proto lock screenshots clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

.venv/.lean: pyproject.toml
	@sh .ci/venv.sh lean

.venv/.model .venv/.dev: .venv/.lean
	@sh .ci/venv.sh $(@:.venv/.%=%)

install: .venv/.lean ## into .venv, all that a host, a router or a client needs; without CUDA where there is no GPU

demo: .venv/.lean ## a small model on three local hosts, one sweep against the AR pipeline
	$(BIN)/onesweep demo

demo-model: .venv/.model ## real English: a small pretrained model, from a package of the index, on three local hosts
	$(BIN)/onesweep demo "$$(find .venv/ -name 'SmolLM2-*.gguf' | head -n 1)"

# A file's tests run in one process: what they share starts once. (pytest 9.2 passes over the groups of `loadgroup`.)
# Three processes on two cores: they wait for each other's servers, too.
test: lint ## before a commit: style, types, and every test that is the same on any machine
	$(BIN)/python -m pytest -q -rs -m "not slow" -n 3 --dist loadfile --no-loadscope-reorder --durations 20

test-slow: .venv/.dev ## before a release: faults, emulated links, pages of the docs, the wheel, browsers (root has all of them run)
	$(BIN)/python -m pytest -q -rs -m slow --durations 20 --junitxml .pytest_cache/slow.xml; \
		code=$$?; $(BIN)/python .ci/figures.py slow .pytest_cache/slow.xml; exit $$code

lint: .venv/.dev ## style, layers and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache >/dev/null || $(BIN)/lint-imports --no-cache
	$(BIN)/mypy

house: .venv/.dev ## counts of the source tree beside their limits, and the rules that it breaks
	$(BIN)/python .ci/house.py

reference: .venv/.dev ## write docs/reference.md anew, from parsers, settings and modes
	$(BIN)/python .ci/reference.py

bench: .venv/.dev ## what a sweep and a byte cost on top of the model, batching, idle servers
	$(BIN)/onesweep bench host

wan: .venv/.dev ## every mode over emulated links of 60 ms, against what they must take (Linux, root)
	$(BIN)/onesweep bench wan --profile links-60 --modes sweep,chunked,ar,ar-speculative --bytes 32,128 --requests 3

# A contract's path is its package's path, so the stubs land where they are imported from.
proto: .venv/.dev ## regenerate the stubs from the contracts
	PATH="$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iproto \
		--python_out=$(OUT) --grpc_python_out=$(OUT) --mypy_out=quiet:$(OUT) --mypy_grpc_out=quiet:$(OUT) $(PROTOS)

lock: .venv/.dev ## packages of the image with their hashes, and the bill of materials in the wheel
	@sh .ci/lock.sh

screenshots: .venv/.dev ## the pictures of the race page in docs/ (chromium)
	$(BIN)/python .ci/screenshots.py

clean: ## remove the virtual environment, caches and build output
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
