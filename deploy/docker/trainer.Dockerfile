# The trainer: torch and transformers, no SGLang. From the project's root:
#
#   docker build -f deploy/docker/trainer.Dockerfile -t penstock-trainer .

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
COPY --from=project /pins/trainer.txt /pins/
RUN /venv/bin/pip install --quiet --no-deps --requirement /pins/trainer.txt
COPY --from=project /wheel /wheel
RUN /venv/bin/pip install --quiet --no-deps /wheel/*.whl && install -d -m 1777 /penstock/runs /cache
ENV PATH=/venv/bin:$PATH HOME=/tmp USER=penstock PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /penstock
USER 10001:10001
EXPOSE 7000 9400
HEALTHCHECK --interval=10s --timeout=10s --start-period=120s \
    CMD exec python3 -m penstock.runtime.health 127.0.0.1:7000 $PENSTOCK_HEALTH_ARGS
ENTRYPOINT ["penstock", "serve", "trainer", "--network.host=0.0.0.0", "--trainer.port=7000", "--metrics.port=9400"]
