# The distributor, and the simulated engine. Built from the locked dependencies; runs as a user of its own.
#
#   docker build -t evenhand .
#   docker run -p 8000:8000 -e EVENHAND_REDIS_URL=redis://HOST:6379/0 evenhand
#
# Without EVENHAND_REDIS_URL it starts its embedded Redis: mount a volume at /var/lib/evenhand to keep the registry.

FROM python:3.12-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/evenhand
COPY requirements.lock ./
RUN /opt/evenhand/bin/pip install --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY lua ./lua
COPY app ./app
COPY workers ./workers
RUN /opt/evenhand/bin/pip install --no-deps . && /opt/evenhand/bin/pip uninstall -y pip

FROM python:3.12-slim
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/evenhand evenhand
COPY --from=build /opt/evenhand /opt/evenhand
ENV PATH=/opt/evenhand/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    EVENHAND_STATE_DIR=/var/lib/evenhand/state
USER evenhand
WORKDIR /var/lib/evenhand
VOLUME /var/lib/evenhand
EXPOSE 8000
# Liveness only: a Redis that is away is outlived, and /ready says so.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:%s/health' % os.environ.get('EVENHAND_SERVER_PORT', '8000'), timeout=2)"]
# `docker stop` sends SIGTERM: running requests have EVENHAND_GRACE_S, so give it more than Docker's 10 s.
STOPSIGNAL SIGTERM
ENTRYPOINT ["evenhand"]
CMD ["serve"]
