# An image with the course, ready to use: `docker build -t bucket-brigade .`, then `docker run -it bucket-brigade`.
# It contains the CPU build of torch. For the CUDA build, add `--build-arg TORCH_INDEX=`.
# docs/platforms.md explains how to give the image to a class.
FROM python:3.12-slim@sha256:dddfd7e07f9d15aeeca61529320492139d21cac7f0070c00609243e51e4e0016
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# The versions of these packages do not matter to the course.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --shell /bin/bash student \
    && install --directory --owner student /opt/venv /course

# setup.mk reads BRIGADE_VENV, so that `make` uses the same environment in a codespace.
ENV BRIGADE_VENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
USER student
WORKDIR /course
COPY --chown=student . .
RUN make setup TORCH_INDEX="$TORCH_INDEX"
CMD ["bash"]
