# The reward service alone, without torch. From the project's root:
#
#   docker build -f deploy/docker/reward.Dockerfile -t penstock-reward .
#   docker run --rm --read-only --cap-drop ALL -p 127.0.0.1:7002:7002 -p 127.0.0.1:7003:7003 penstock-reward

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
RUN python3 -m venv /venv
COPY --from=project /pins/reward.txt /pins/
RUN /venv/bin/pip install --quiet --no-deps --requirement /pins/reward.txt
COPY --from=project /wheel /wheel
RUN /venv/bin/pip install --quiet --no-deps /wheel/*.whl && mkdir /penstock
ENV PATH=/venv/bin:$PATH HOME=/tmp USER=penstock PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /penstock
USER 10001:10001
EXPOSE 7002 7003 9400
HEALTHCHECK --interval=5s --timeout=10s --start-period=120s \
    CMD exec python3 -m penstock.runtime.health 127.0.0.1:7002 $PENSTOCK_HEALTH_ARGS
ENTRYPOINT ["penstock", "serve", "reward", "--network.host=0.0.0.0", "--reward.port=7002", "--reward.http_port=7003", "--metrics.port=9400"]
