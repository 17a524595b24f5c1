# Each target makes what it needs: system packages, .venv/, VM image, lab. Second runs reuse everything.
.PHONY: demo demo-run test unit bench lint smoke nightly soak rack-smoke rack-nightly rack-soak rack-rehearsal history setup setup-image setup-tests clean

RUN = .venv/bin/
# Compiled modules are kept: what tests start by the hundred would compile all of ours each time.
export PYTHONDONTWRITEBYTECODE =
# More than cores: unit tests wait for 155 s altogether, for a window or for the end of a process.
WORKERS = $(shell expr $$(nproc) + 3)
on_every_core = $(RUN)python -m pytest tests/unit -n $(WORKERS) --dist worksteal
# Experiments that `make nightly` runs and `make test` does not: the first by its command, the second by test_gpu_health.py,
# the third on soft-3rack.
# What the second one shows, a job that leaves a GPU with an uncontained error, is a unit test, with engines of this machine.
AT_NIGHT = demo gpu-memory-error te-collision
RUNS = runs
# Where `make history` keeps runs of earlier days, and how many; a folder for what CI keeps of a level, if there is one.
HISTORY = runs-kept
KEPT = 60
OUT =

setup:
	@./bootstrap

# The last word is a sentence and not make's "Error 2": the exit status of the run is read in the recipe of `demo`.
ENDED = .venv/demo-ended
verdict_1 = the demo FAILED: a bound was broken; the report shows where
verdict_2 = the demo is INCONCLUSIVE, which is no pass: the lines above say what was not decided and what to do
verdict_5 = the lab is DIRTY: `$(RUN)faultbed heal`, or `$(RUN)faultbed reset`, restores it

demo: demo-run ## a real fabric comes up, carries a collective, survives three faults, and is judged
	@$(foreach code,$(filter-out 0,$(shell cat $(ENDED))),$(error $(or $(verdict_$(code)),the demo ended with an error: the line above says what to do)))

demo-run: setup-image
	@rm -f $(ENDED)
	@$(RUN)faultbed up && $(RUN)faultbed run demo; echo $$? > $(ENDED)

setup-image:
	@./bootstrap --image

setup-tests:
	@./bootstrap --tests

test: setup-tests ## everything: what needs no lab while a soft lab comes up, then the rest on it, by one process that owns the lab
	@$(RUN)python -m pytest tests/common tests/soft tests/lab tests/experiments $(AT_NIGHT:%=--ignore tests/experiments/%.toml) --durations 15 \
		--meanwhile "$(on_every_core) --durations 15"

unit: setup-tests ## what needs no lab, on every core, but for commands, sessions of pytest and Ansible in whole processes: those in `make test`
	@$(on_every_core) -m "not slow and not process" --durations 15

bench: setup ## the numbers of docs/numbers.md, as ratios within one run
	@$(RUN)python -m bench

lint: setup ## style, types, every test can be collected, and the playbooks by ansible-lint's profile production
	@$(RUN)ruff check .
	@$(RUN)ruff format --check .
	@$(RUN)mypy
	@collected=$$($(RUN)python -m pytest tests --collect-only -qq) || { echo "$$collected" | tail -n 30; exit 1; }
	@for tests in common soft lab; do $(RUN)mypy --config-file tests/mypy.ini tests/$$tests || exit 1; done
	@cd playbooks && PATH="$(CURDIR)/$(RUN):$$PATH" ANSIBLE_ACTION_PLUGINS="$(CURDIR)/playbooks/action_plugins" ansible-lint -q

smoke: setup ## the shortest proof on a soft lab: it comes up, nothing is wrong with it, a lease holds
	@$(RUN)faultbed --lab soft-mini up
	@$(RUN)faultbed --lab soft-mini preflight $(if $(OUT),--out $(OUT)/preflight.json)
	@$(RUN)python -m pytest tests/soft/test_lease.py --lab soft-mini

# The default lab is too small for some tests of tests/soft. pytest ends the lab that it brought up before the next one.
on_lab = $(RUN)python -m pytest -m "" --lab $(1) $(2) $(if $(OUT),--junitxml=$(OUT)/junit-$(1).xml)

# No service of them is started: tests start what they need, with keys and folders of their own.
cluster_programs = which slurmctld slurmd sbatch munged sshd >/dev/null || \
	RUNLEVEL=1 apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge openssh-server

nightly: setup ## unit tests with all samples and slow ones, those of soft labs three times, other labs; the demo experiment, which the history follows
	@[ "$$(id -u)" != 0 ] || { $(cluster_programs); }
	@worst=0; keep() { test $$1 -le $$worst || worst=$$1; }; \
	FAULTBED_ALL_SAMPLES=1 $(RUN)python -m pytest tests/unit -m "" -n auto --dist worksteal; keep $$?; \
	$(call on_lab,soft-3rack,tests/soft/test_fabric_routing.py tests/soft/test_flow_placement.py tests/experiments/te-collision.toml \
		-k "odd_and_even or flow_placement or te-collision"); keep $$?; \
	$(call on_lab,soft-tapered,tests/soft/test_fabric_routing.py -k costs); keep $$?; \
	$(call on_lab,soft-zones,tests/soft/test_zones.py); keep $$?; \
	$(RUN)python -m pytest tests/common tests/soft -m "" --faultbed-repeat 3 --faultbed-repeat-slow 1 --faultbed-reset-each; keep $$?; \
	$(RUN)faultbed run demo --seed 1 --out $(RUNS) && exit $$worst

soak: setup ## leases and receipts, again and again
	@$(RUN)python -m pytest tests/soft/test_lease.py tests/soft/test_receipts.py -m "" --faultbed-repeat 20

# On a rack lab (FAULTBED_LAB names its inventory): not yet run on hardware.
RACK_TESTS = tests/common tests/lab tests/experiments

# The parts are not in our environment: they are what a rack has, not what faultbed needs.
rack-rehearsal: setup-tests ## real parts of a rack on this machine: FRR in network namespaces, redis, Ansible, ipmi_sim, sushy-tools (as root)
	@command -v ipmi_sim ipmitool redis-server >/dev/null && [ -x /usr/lib/frr/bgpd ] || \
		apt-get install -y --no-install-recommends frr ipmitool openipmi redis-server
	@[ -x .venv-rehearsal/bin/sushy-emulator ] || { python3 -m venv .venv-rehearsal && .venv-rehearsal/bin/pip install -q sushy-tools; }
	@REHEARSAL_CYCLES=20 $(RUN)python -m pytest tests/rehearsal -m "" -v

rack-smoke: setup ## the experiments, once
	@$(RUN)python -m pytest tests/experiments

rack-nightly: setup ## every test and experiment that fits a rack, slow ones too
	@$(RUN)python -m pytest $(RACK_TESTS) -m ""

rack-soak: setup ## the same, again and again
	@$(RUN)python -m pytest $(RACK_TESTS) -m "" --faultbed-repeat 20

history: setup ## keep the runs of RUNS beside those of earlier days, and mark what got worse
	@mkdir -p $(RUNS) $(HISTORY)
	@cp -R $(RUNS)/. $(HISTORY)
	@ls -d $(HISTORY)/*/ 2>/dev/null | sort | head -n -$(KEPT) | xargs -r rm -rf --
	@$(RUN)faultbed history --runs $(HISTORY)

clean: ## end the default lab and remove everything of it
	@$(RUN)faultbed down --purge
