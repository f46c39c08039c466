# Two commands on a fresh machine: `make demo` trains and reports, `make test` checks everything.
# Both create .venv from exact versions (constraints.txt) when it is absent or out of date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

DEMO_RUN ?= runs/demo
DEMO_DATA ?= demos/fake_aloha
DEMO_PORT ?= 5588

.PHONY: demo test test-slow lint clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev,video,lerobot,aloha-sim,ogbench]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/serl-chunk record --exp_name fake_aloha --n_demos 10 --out $(DEMO_DATA) --policy scripted
	$(BIN)/serl-chunk --exp_name fake_aloha --learner --actor --debug --port $(DEMO_PORT) \
	    --demo_path $(DEMO_DATA) --checkpoint_path $(DEMO_RUN)
	$(BIN)/serl-chunk --exp_name fake_aloha --actor --eval_checkpoint_step latest --eval_n_trajs 100 \
	    --checkpoint_path $(DEMO_RUN)

# Most of the time goes into compiling small functions; XLA's older code generator for CPUs does that about twice as
# fast. The pinned jaxlib knows the flag; one that does not would end with "Unknown flag in XLA_FLAGS".
# Tests of one file stay together: they share what was compiled for them.
test: $(VENV)/installed
	XLA_FLAGS="--xla_cpu_use_fusion_emitters=false $$XLA_FLAGS" \
	    $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

# Minutes to an hour: every test marked slow, compiled as users' processes are.
test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs demos build *.egg-info
