# Each target makes what it needs: system packages, .venv/, VM image, lab. Second runs reuse everything.
.PHONY: demo test unit bench lint nightly soak setup clean

RUN = .venv/bin/

setup:
	@./bootstrap

demo: setup ## a real fabric comes up, carries a collective, is hurt three ways, recovers and is judged
	@$(RUN)faultbed up
	@$(RUN)faultbed run tests/experiments/demo.toml

test: setup ## everything, on a soft lab of its own
	@$(RUN)python -m pytest

unit: setup ## what needs no lab (seconds)
	@$(RUN)python -m pytest tests/unit

bench: setup ## the numbers of the README, as ratios within one run
	@$(RUN)python -m harness.bench

lint: setup
	@$(RUN)ruff check .
	@$(RUN)ruff format --check .
	@$(RUN)mypy

nightly: setup ## the demo experiment and the soft tests, several times over
	@$(RUN)python -m pytest tests/soft -m "" --repeat 5 --reset-each
	@$(RUN)faultbed run tests/experiments/demo.toml --seed 1

soak: setup ## leases and receipts, again and again
	@$(RUN)python -m pytest tests/soft/test_lease.py tests/soft/test_receipts.py -m "" --repeat 20

clean: ## end the default lab and remove everything of it
	@$(RUN)faultbed down --purge
