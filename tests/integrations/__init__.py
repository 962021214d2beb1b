"""Tests with libraries that are built on PyTorch: make test-integrations. pytest collects none of them by default."""
