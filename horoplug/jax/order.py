"""The order of operations: the one place that knows JAX's effects, which JAX has no public names for.

In a compiled program an operation holds a thread of XLA until all ranks have come to it. XLA would run operations that
do not depend on each other in any order, which may be another one on a rank whose program differs a little (a smaller
last batch is enough), and two ranks that wait for each other's later operations wait for ever. So operations have an
*ordered effect*: JAX passes a token from each to the next one, through loops and branches, and from each program to the
next one that the same Python thread dispatches. They then run in the order of the Python program, whoever compiles it
how; none is left out because nobody uses its result, or merged with one that looks the same.

Operations outside of programs wait for those of the programs before them (:func:`wait_for_programs`). Therefore the
n-th operation without a name on one rank meets the n-th on every other one, in whatever program they are, and however
often it was traced.
"""

import contextlib
from typing import Any

from jax._src import core, dispatch, effects

from horoplug.common.context import context


class CollectiveEffect(effects.Effect):  # type: ignore[misc]
    """What ties operations together. All of its instances are equal."""

    def __str__(self) -> str:
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
    """Wait until all operations in the programs that this thread has dispatched are done, well or badly."""
    token = dispatch.runtime_tokens.current_tokens.pop(EFFECT, None)
    if isinstance(token, core.Token):
        with contextlib.suppress(Exception):  # the program's own results say what is wrong with it
            token.block_until_ready()


def _failure(token: Any) -> Exception | None:
    """What the last program has failed with, if it has ended."""
    if not token._buf.is_ready():
        return None
    try:
        token.block_until_ready()
    except Exception as error:
        return error
    return None


def _is_overlooked(failure: Exception) -> bool:
    """Whether to go on would be of no use: the job is broken, or the last program was given results of one that has
    failed, since nobody has looked at them (Keras does not)."""
    text = str(failure)
    is_ours = "a Horovod operation has failed" in text
    return is_ours and ("Error dispatching" in text or text.startswith("UNKNOWN"))


def _forget_failures() -> None:
    """Let programs run after one that has failed: JAX would hand its token, and with it the failure, to all of them.
    But for a failure that is overlooked: it comes up when the next program is called.

    A token that is where it is wanted is handed on as it is; JAX would take longer to find that out than all else."""
    tokens = dispatch.RuntimeTokenSet
    original = tokens.get_token_input

    def get_token_input(self: Any, effect: Any, devices: Any, *args: Any) -> Any:
        if isinstance(effect, CollectiveEffect):
            job = context.per_job.setdefault(CollectiveEffect, object())
            before, self._horoplug_job = getattr(self, "_horoplug_job", None), job
            token = self.current_tokens.get(effect)
            if isinstance(token, core.Token):
                failure = _failure(token)
                if failure is not None:
                    del self.current_tokens[effect]
                    if before is job and _is_overlooked(failure):
                        raise failure
                elif token._buf.devices() == set(devices) and len(devices) == 1:
                    return token
        return original(self, effect, devices, *args)

    tokens.get_token_input = get_token_input


_forget_failures()
