"""Checks of the errors of operations and jobs."""

import pytest


def refused(error, text, call):
    with pytest.raises(error, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)


def internal(outcomes, *words):
    """Check that every outcome is a HorovodInternalError of one line that contains these words."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.kind == "HorovodInternalError", f"rank {rank}: {outcome}"
        assert "RuntimeError" in outcome.bases
        assert "\n" not in outcome.message
        for word in words:
            assert word in outcome.message, (
                f"rank {rank}: {outcome.message!r} does not say {word!r}"
            )


def errors_of_survivors(outcomes, victim, kind="HorovodInternalError"):
    """Check that the victim died and that all others have an error of this kind that names it. Returns the errors."""
    assert outcomes[victim].died
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    everything = "\n".join(str(outcome) for outcome in outcomes)
    for outcome in others:
        assert kind in outcome.bases, everything
        assert f"rank {victim}" in outcome.message, everything
    return others
