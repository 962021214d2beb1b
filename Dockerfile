# An image in which README's two commands work; they reuse what is built here. In step with the Makefile, which does all
# the work.
FROM debian:12

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
