"""The order of operations in compiled programs. This module alone uses JAX's effects, which have no public API.

In a compiled program an operation blocks an XLA thread until all ranks have reached it. XLA runs operations that do not
depend on each other in any order. The order may differ between ranks whose programs differ slightly (a smaller last
batch is enough), and two ranks that each wait for a later operation of the other wait forever. Therefore operations
have an *ordered effect*: JAX passes a token from each operation to the next one, through loops and branches, and from
each program to the next one that the same Python thread dispatches. Operations then run in the order of the Python
program on every rank. XLA neither drops an operation whose result is unused nor merges two that look the same.

Operations outside of compiled programs wait for those of the programs dispatched before them
(:func:`wait_for_programs`). Therefore the n-th operation without a name on one rank is matched with the n-th on every
other rank, whichever programs contain them and however often these were traced.
"""

import contextlib
from typing import Any

from jax._src import core, dispatch, effects

from horoplug.common.context import context
from horoplug.common.status import says_operation_failed


class CollectiveEffect(effects.Effect):  # type: ignore[misc]
    """The effect of every operation. All instances are equal."""

    def __repr__(self) -> str:  # also str(): JAX prints effects in jaxprs and in its errors
        return "Collective"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CollectiveEffect)

    def __hash__(self) -> int:
        return hash(CollectiveEffect)


EFFECT = CollectiveEffect()
TOKEN = core.abstract_token

for _allowed in (
    effects.ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _allowed.add_type(CollectiveEffect)


def wait_for_programs() -> None:
    """Wait until all operations in programs that this thread has dispatched have completed or failed."""
    token = dispatch.runtime_tokens.current_tokens.pop(EFFECT, None)
    if isinstance(token, core.Token):
        with contextlib.suppress(Exception):  # the program's own results raise its failure
            token.block_until_ready()


def _failure(token: Any) -> Exception | None:
    """The failure of the last program, if it has ended with one."""
    if not token._buf.is_ready():
        return None
    try:
        token.block_until_ready()
    except Exception as error:
        return error
    return None


def _must_be_raised(failure: Exception) -> bool:
    """Whether the failure has to be raised before the next program runs: the job is broken, or the inputs of the last
    program were results of a failed program. In the latter case the caller may never notice, since some callers, such
    as Keras, do not read the results."""
    text = str(failure)
    return says_operation_failed(failure) and (
        "Error dispatching" in text or text.startswith("UNKNOWN")
    )


def _isolate_failures() -> None:
    """Patch JAX so that programs run after a failed one. JAX would pass the failed program's token, and with it the
    failure, to every later program. A failure for which :func:`_must_be_raised` is true is raised when the next
    program of the same job is called.

    A token that is on the right device already is passed on unchanged, because JAX's own check for that takes longer
    than the rest of this function."""
    tokens = dispatch.RuntimeTokenSet
    original = tokens.get_token_input

    def get_token_input(self: Any, effect: Any, devices: Any, *args: Any) -> Any:
        if isinstance(effect, CollectiveEffect):
            previous_job = getattr(self, "_horoplug_job", None)
            self._horoplug_job = job = context.job
            token = self.current_tokens.get(effect)
            if isinstance(token, core.Token):
                failure = _failure(token)
                if failure is not None:
                    del self.current_tokens[effect]
                    if previous_job == job and _must_be_raised(failure):
                        raise failure
                elif token._buf.devices() == set(devices) and len(devices) == 1:
                    return token
        return original(self, effect, devices, *args)

    tokens.get_token_input = get_token_input


_isolate_failures()
