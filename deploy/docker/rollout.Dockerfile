# A rollout engine: SGLang with the torch that it pins, for GPUs and for CPUs. From the project's root:
#
#   docker build -f deploy/docker/rollout.Dockerfile -t penstock-rollout .

ARG BASE_IMAGE=python:3.11-slim

# What is installed, and penstock's own wheel. These lines are the same for all images, so this stage is built once.
FROM ${BASE_IMAGE} AS project
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /venv && /venv/bin/pip install --quiet hatchling
WORKDIR /src
COPY pyproject.toml requirements.lock deploy/docker/requirements.py ./
RUN mkdir /pins \
    && python3 requirements.py --packages torch torchvision >/pins/torch.txt \
    && for extra in reward openai worker rollout trainer; do python3 requirements.py $extra >/pins/$extra.txt; done
COPY README.md LICENSE ./
COPY penstock penstock
COPY services services
COPY recipes recipes
COPY models/tiny-qwen3-vl models/tiny-qwen3-vl
COPY models/tiny-qwen3-vl-zoom models/tiny-qwen3-vl-zoom
RUN /venv/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheel .

FROM ${BASE_IMAGE}
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# gcc: Triton compiles what it launches, on GPUs. libibverbs1, libnuma1: the transfer libraries load them.
RUN apt-get update -q \
    && apt-get install -y -q --no-install-recommends gcc libc6-dev libibverbs1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*
# rollout and trainer share the layers up to here, which are most of their size.
RUN python3 -m venv /venv
COPY --from=project /pins/torch.txt /pins/
RUN /venv/bin/pip install --quiet --no-deps --requirement /pins/torch.txt
COPY --from=project /pins/rollout.txt /pins/
RUN /venv/bin/pip install --quiet --no-deps --requirement /pins/rollout.txt
# Carries KV caches between prefill and decode engines: this on CPU hosts, mooncake-transfer-engine-cuda13 on GPUs.
ARG TRANSFER="nixl==1.5.1 nixl-cu13==1.5.1"
RUN apt-get update -q \
    && apt-get install -y -q --no-install-recommends libcurl4 \
    && rm -rf /var/lib/apt/lists/* \
    && /venv/bin/pip install --quiet --no-deps ${TRANSFER}
COPY --from=project /wheel /wheel
RUN /venv/bin/pip install --quiet --no-deps /wheel/*.whl && install -d -m 1777 /penstock/runs /cache
ENV PATH=/venv/bin:$PATH HOME=/tmp USER=penstock PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /penstock
USER 10001:10001
EXPOSE 7010 9400
HEALTHCHECK --interval=10s --timeout=10s --start-period=600s \
    CMD exec python3 -m penstock.runtime.health 127.0.0.1:7010 $PENSTOCK_HEALTH_ARGS
ENTRYPOINT ["penstock", "serve", "rollout", "--network.host=0.0.0.0", "--rollout.port=7010", "--metrics.port=9400"]
