# The distributor, and the simulated engine. Built from the locked dependencies; runs as a user of its own.
#
#   docker build -t evenhand .
#   docker run -p 8000:8000 -e EVENHAND_REDIS_URL=redis://HOST:6379/0 evenhand
#
# Without EVENHAND_REDIS_URL it starts its embedded Redis: add `-v evenhand:/var/lib/evenhand` to keep the registry.

FROM python:3.14-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN apt-get update && apt-get install -y --no-install-recommends binutils tini
RUN python -m venv /opt/evenhand
COPY requirements.lock ./
RUN /opt/evenhand/bin/pip install --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY lua ./lua
COPY app ./app
COPY workers ./workers
# Source maps of the docs page and Cython's sources: nothing reads them. Symbols are half of the wheels' libraries.
RUN /opt/evenhand/bin/pip install --no-deps . && /opt/evenhand/bin/pip uninstall -y pip \
    && find /opt/evenhand \( -name '*.map' -o -name '*.py[xi]' -o -name '*.pxd' \) -delete \
    && find /opt/evenhand -name '*.so' -exec strip --strip-unneeded {} +

FROM python:3.14-slim
# As process 1 the kernel would keep a SIGTERM from Python until it has a handler, so that a stop during the start were
# lost; and somebody has to reap what a `docker exec` leaves behind.
COPY --from=build /usr/bin/tini-static /usr/local/bin/tini
RUN groupadd --system --gid 10001 evenhand \
    && useradd --system --uid 10001 --gid evenhand --create-home --home-dir /var/lib/evenhand evenhand \
    && install -d -m 700 -o evenhand -g evenhand /var/lib/evenhand/tls
COPY --from=build /opt/evenhand /opt/evenhand
ENV PATH=/opt/evenhand/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    EVENHAND_STATE_DIR=/var/lib/evenhand/state
# Numbers: Kubernetes' runAsNonRoot takes no names.
USER 10001:10001
# No VOLUME: every container would leave a nameless one behind, also those that keep nothing.
WORKDIR /var/lib/evenhand
EXPOSE 8000
# Liveness only: a Redis that is away is outlived, and /ready says so. It goes by EVENHAND_SERVER_PORT, _NAME and _SSL:
# in a container set these by variables, not by flags.
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s --retries=3 \
    CMD ["python", "-P", "-m", "workers.alive"]
# `docker stop` sends SIGTERM: running requests have EVENHAND_GRACE_S, so give it more than Docker's 10 s.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "evenhand"]
CMD ["serve"]
