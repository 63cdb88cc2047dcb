# The reward service alone, without torch. From the project's root:
#
#   docker build -f deploy/docker/reward.Dockerfile -t penstock-reward .
#   docker run --rm --read-only --cap-drop ALL -p 127.0.0.1:7002:7002 -p 127.0.0.1:7003:7003 penstock-reward

ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
WORKDIR /src
RUN python3 -m venv /venv
# First what changes rarely: the libraries, at the versions of the lock file.
COPY pyproject.toml requirements.lock ./
RUN python3 -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
    print(*project["dependencies"], *project["optional-dependencies"]["reward"], sep="\n")' >requirements.txt \
    && /venv/bin/pip install --no-cache-dir --disable-pip-version-check --constraint requirements.lock --requirement requirements.txt
COPY README.md LICENSE ./
COPY penstock penstock
COPY services services
RUN /venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps .

FROM ${BASE_IMAGE}
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001
EXPOSE 7002 7003
HEALTHCHECK --interval=5s --timeout=3s --start-period=20s \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:7003/healthz', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["penstock", "serve", "reward", "--reward.host=0.0.0.0", "--reward.port=7002", "--reward.http_port=7003"]
