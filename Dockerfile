# The gradserve server in a small image: `docker build .` for the CPU,
# `docker build --build-arg EXTRAS=cuda13 .` for an NVIDIA GPU. docs/howto/image.md tells the rest.

# Any Debian or Ubuntu image with Python 3.11 or newer and its venv module. A tag may stand for another image tomorrow: a
# release names a digest, PYTHON_IMAGE=python:3.13-slim@sha256:... (docs/releasing.md).
ARG PYTHON_IMAGE=python:3.13-slim

FROM ${PYTHON_IMAGE} AS build

# pip stays behind in this stage; the venv beside it is all that the image gets.
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/gradserve

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY deploy/locked ./locked
COPY client ./client
COPY server ./server
COPY proto ./proto

# What to install: server (CPU), cuda12 or cuda13 (GPU), demo (the demo's workers), tracing, dns; several with commas. Each
# has a file in deploy/locked with the versions and the hashes of all that it takes: nothing else is installed.
ARG EXTRAS=server
# The tests of NumPy, Numba and others stay behind: 33 MB.
# Both secrets are optional and leave no trace in the image: how pip reaches its index from here.
RUN --mount=type=secret,id=pip-config --mount=type=secret,id=certificates \
    if [ -f /run/secrets/pip-config ]; then export PIP_CONFIG_FILE=/run/secrets/pip-config; fi \
    && if [ -f /run/secrets/certificates ]; then export PIP_CERT=/run/secrets/certificates; fi \
    && export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
    && /opt/pip/bin/pip install --require-hashes --only-binary :all: --requirement locked/build.txt \
    && /opt/pip/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && for extra in $(echo "${EXTRAS}" | tr , ' '); do set -- "$@" --requirement "locked/${extra}.txt"; done \
    && /opt/pip/bin/pip --python /opt/gradserve/bin/python install --require-hashes --only-binary :all: "$@" \
    && /opt/pip/bin/pip --python /opt/gradserve/bin/python install --no-index --no-deps /wheels/gradserve-*.whl \
    && /opt/pip/bin/pip --python /opt/gradserve/bin/python check \
    && find /opt/gradserve/lib -type d -name tests -prune -exec rm -r {} +

# Whose kernels the image has, for its servers to start with: sm_80 is an A100, sm_90 an H100, sm_100 a B200. Nothing: none.
ARG CUDA_ARCHITECTURES=sm_90
RUN case ",${EXTRAS}," in *,cuda1?,*) \
        [ -z "${CUDA_ARCHITECTURES}" ] || /opt/gradserve/bin/gradserve kernels compile --architectures "${CUDA_ARCHITECTURES}" ;; \
    esac

FROM ${PYTHON_IMAGE}

LABEL org.opencontainers.image.title="gradserve" \
      org.opencontainers.image.description="Averages the gradients of many workers over gRPC" \
      org.opencontainers.image.licenses="Apache-2.0"

# /output takes what the demo writes, /cache the compiled kernels of the ops, /state is for --state-dir; volumes mounted
# there inherit the owner.
RUN groupadd --gid 10001 gradserve \
    && useradd --uid 10001 --gid gradserve --create-home --shell /usr/sbin/nologin gradserve \
    && install --directory --owner gradserve --group gradserve /output /cache \
    && install --directory --mode 700 --owner gradserve --group gradserve /state

COPY --from=build /opt/gradserve /opt/gradserve

# Compute alone is what NVIDIA's container runtime is asked for; without it this says nothing.
ENV PATH="/opt/gradserve/bin:${PATH}" \
    PYTHONUNBUFFERED=1 \
    NUMBA_CACHE_DIR=/cache/numba \
    CUPY_CACHE_DIR=/cache/cupy \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

USER 10001:10001
WORKDIR /home/gradserve
EXPOSE 50051 50052
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=10s --start-period=30s --retries=3 CMD ["gradserve", "health"]
ENTRYPOINT ["gradserve"]
CMD ["serve", "--listen", "0.0.0.0:50051", "--bulk-listen", "0.0.0.0:50052"]
