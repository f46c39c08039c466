# On a fresh machine: `make demo` trains and reports, `make lab` rehearses a day with a robot, `make test` checks all.
# They create .venv from exact versions (constraints.txt) when it is absent or out of date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROBOT := packages/serl-chunk-robot/serl_chunk_robot
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

DEMO_RUN ?= runs/demo
DEMO_DATA ?= demos/fake_aloha
DEMO_PORT ?= 5588
LAB_OUT ?= runs/lab
LAB_DRIVER ?= auto

.PHONY: demo lab test quick test-slow lint clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev,serve,video,viz,lerobot,aloha-sim,ogbench,pi0]' dm-tree
	$(BIN)/pip install --quiet --no-deps openpi-client  # for tests; it wants NumPy 1 and works with 2
	touch $@

demo: $(VENV)/installed
	$(BIN)/serl-chunk record --exp_name fake_aloha --n_demos 10 --out $(DEMO_DATA) --policy scripted
	$(BIN)/serl-chunk --exp_name fake_aloha --learner --actor --debug --port $(DEMO_PORT) \
	    --demo_path $(DEMO_DATA) --checkpoint_path $(DEMO_RUN)
	$(BIN)/serl-chunk report $(DEMO_RUN) --episodes 40
	$(BIN)/serl-chunk --exp_name fake_aloha --actor --eval_checkpoint_step 0,latest --eval_n_trajs 100 --save_video 3 \
	    --checkpoint_path $(DEMO_RUN)

# A robot's server, an operator with two SpaceMice, and all that follows; no hardware, at most 15 minutes.
# LAB_DRIVER=lerobot: an SO-101 with a leader.
lab: $(VENV)/installed
	$(BIN)/python benchmarks/lab.py --out $(LAB_OUT) --driver $(LAB_DRIVER)

# Most of the time goes into compiling small functions: they are compiled quickly rather than well, by XLA's older code
# generator for CPUs. The pinned jaxlib knows these flags; one that does not would end with "Unknown flag in XLA_FLAGS".
# What one worker compiled the others need not: see tests/conftest.py.
# Workers fill the cores, so a program is not split for several threads.
QUICKLY := --xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0 \
    --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1
# Two more than cores, for system tests wait more than they compute; four fill a machine of 16 GB.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(min(4, os.cpu_count() + 2))")
# Tests of one file stay together: they share fixtures and what was traced for them. Long files come first: see
# tests/conftest.py. Bytecode is written also where the environment says not to: each of the processes that tests start
# would compile every module anew.
PYTEST = PYTHONDONTWRITEBYTECODE= XLA_FLAGS="$(QUICKLY) $$XLA_FLAGS" $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile \
    --no-loadscope-reorder $(PYTEST_FLAGS)

test: $(VENV)/installed
	$(PYTEST)

# What is worth running while working: no agent is compiled, no process is started.
quick: $(VENV)/installed
	$(PYTEST) -m "not slow and not compiles and not system"

# Minutes to an hour: every test marked slow, compiled as users' processes are, and every property with more examples.
test-slow: $(VENV)/installed
	SERL_CHUNK_TEST_EXAMPLES=thorough $(BIN)/python -m pytest -m "slow or property"

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/vermin --quiet --target=3.8- --no-tips --violations $(ROBOT)

clean:
	rm -rf $(VENV) runs demos build *.egg-info
