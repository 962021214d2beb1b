"""horoplug.lightning without Lightning. make test-integrations runs the tests with it."""

import sys

import pytest


@pytest.mark.short(failure=True)
def test_a_missing_lightning_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "horoplug.lightning", raising=False)
    with pytest.raises(ImportError, match=r"^horoplug.lightning needs Lightning 2: pip install"):
        import horoplug.lightning  # noqa: F401
