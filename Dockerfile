# Images. `docker build .` makes the one for development; --target selects another one:
#   development  README's two commands work in it; they reuse what is built here. In step with the Makefile, which does
#                all the work.
#   runtime      horoplug's wheel for NumPy programs, or as a base: no compiler, no source, the user horoplug (1000)
#   sshd         runtime, and an ssh server that this user can run: for the MPI operator
#   example      sshd, and PyTorch, Fashion-MNIST and /workspace/train.py: for the manifests in examples/kubernetes
# docs/launch-kubernetes.md describes their use. scripts/image-steps has the steps, which tests run, too.
FROM debian:12 AS development
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
      binutils ca-certificates clang-16 dataset-fashion-mnist doctest-dev g++ libclang-rt-16-dev make \
      python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*

# PyTorch without CUDA.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /horoplug
COPY . .
RUN make build && rm -rf .cache
CMD ["make", "demo"]

FROM development AS wheel
RUN make wheel

FROM debian:12-slim AS runtime
RUN --mount=type=bind,source=scripts/image-steps,target=/tmp/image-steps \
    --mount=type=bind,from=wheel,source=/horoplug/dist,target=/tmp/dist \
    /tmp/image-steps runtime /tmp/dist/*.whl
ENV PATH=/opt/horoplug/bin:/usr/local/bin:/usr/bin:/bin
WORKDIR /home/horoplug
# By number: Kubernetes' runAsNonRoot does not know names.
USER 1000:1000

FROM runtime AS sshd
USER root
RUN --mount=type=bind,source=scripts/image-steps,target=/tmp/image-steps \
    /tmp/image-steps sshd
USER 1000:1000

FROM sshd AS example
USER root
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,source=scripts/image-steps,target=/tmp/image-steps \
    --mount=type=bind,source=examples/pytorch/train.py,target=/tmp/train.py \
    /tmp/image-steps example torch
USER 1000:1000

FROM development
