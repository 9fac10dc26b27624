# The commands of the house; `make help` lists them. Everything is built under build/, tools live in .venv.
JOBS ?= $(shell nproc)

.DEFAULT_GOAL := help
.PHONY: help setup configure build demo demo-cli test test-quick test-aarch64 docs bench sanitize format lint clean

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: ## install what is missing (packages and .venv)
	@scripts/setup

configure: setup
	@cmake --preset release -Wno-dev --log-level=WARNING

build: configure ## build the library, the program and the tests: build/release
	cmake --build --preset release --parallel $(JOBS)

demo: setup ## the main job on real input: trains a language model with a long context over ranks, in PyTorch
	@scripts/demo-longnet

demo-cli: configure ## the same of the command-line program: attention over 4 ranks, every result checked against the oracle
	cmake --build --preset release --parallel $(JOBS) --target ringspan_program
	@scripts/demo build/release/bin/ringspan

test: build ## every test
	ctest --preset release --parallel $(JOBS)

test-quick: build ## the tests but for the slow ones and packaging
	ctest --preset quick --parallel $(JOBS)

docs: configure ## the documentation site: build/docs
	cmake --build --preset release --parallel $(JOBS) --target ringspan_program
	@scripts/docs

bench: build ## the benchmarks: JSON under build/bench
	@scripts/bench

sanitize: setup ## the core tests under AddressSanitizer + UndefinedBehaviorSanitizer and under ThreadSanitizer
	@scripts/sanitize asan
	@scripts/sanitize tsan

test-aarch64: ## cross-compile for AArch64 and run the tests of the kernels under qemu-user
	@scripts/test-aarch64

format: setup ## format the sources in place
	@scripts/format

lint: setup ## formatting, layers, clang-tidy
	@scripts/format --check
	@python3 tests/layers/check_layers.py
	@scripts/lint

clean: ## remove build/
	rm -rf build
