# Lockstep on NVIDIA GPUs, and on CPUs where there are none.
#
#   docker build -t lockstep .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD/runs:/work/runs" lockstep train snake-ppo --procs 4
#
# The user inside is 1000: a directory that is mounted must be writable for it (or add --user "$(id -u):$(id -g)").
FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04

# EGL draws frames without a screen; tini passes signals on and buries the dead.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv libegl1 libgl1 libgles2 libgomp1 tini \
    && rm -rf /var/lib/apt/lists/*
ENV MUJOCO_GL=egl \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics \
    PATH=/opt/lockstep/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

# The base image has a user 1000 of its own.
RUN userdel --remove ubuntu && useradd --create-home --uid 1000 lockstep \
    && install --directory --owner lockstep --group lockstep /opt/lockstep /work
USER lockstep
WORKDIR /work

# torch first: it is large, and changes less often than what follows.
COPY --chown=lockstep .ci/constraints.txt /tmp/constraints.txt
RUN python3 -m venv /opt/lockstep && pip install -c /tmp/constraints.txt torch
COPY --chown=lockstep pyproject.toml README.md LICENSE /tmp/lockstep/
COPY --chown=lockstep src /tmp/lockstep/src
RUN pip install -c /tmp/constraints.txt '/tmp/lockstep[all]' && rm -rf /tmp/lockstep

ENTRYPOINT ["tini", "--", "lockstep"]
CMD ["--help"]
