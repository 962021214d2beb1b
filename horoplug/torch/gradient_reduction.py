"""The work of a ``DistributedOptimizer`` between two steps: submitting gradients during backward, and waiting for them.

A gradient passes through these states, and returns to the first one in :meth:`GradientReduction.finish`:

1. *pending*: backward has not yet added to the gradient ``backward_passes_per_step`` times.
2. *ready*: the hook of the last of these passes has run. Ready gradients of one stream are collected until they have
   :data:`_SUBMIT_BYTES` bytes or backward ends.
3. *submitted*: alone, with its group, or with its bucket. :meth:`GradientReduction.finish` submits gradients that are
   still pending, because other ranks may have submitted them.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

import torch

from horoplug.common.context import context
from horoplug.torch import buckets, streams
from horoplug.torch.dynamo import run_callback_eagerly
from horoplug.torch.grouping import Group, GroupProgress, Stream
from horoplug.torch.reduction import Handles, Reducer

# Submitting many gradients at once costs less time in Python; collecting more would delay the communication.
_SUBMIT_BYTES: Final = 1 << 20

_NOT_SUBMITTED: Final = (None, None)


class _Ready:
    """Parameters whose gradients became ready in one stream."""

    __slots__ = ("nbytes", "parameters")

    def __init__(self) -> None:
        self.parameters: list[torch.Tensor] = []
        self.nbytes = 0


class GradientReduction:
    """Reduces the gradients of parameters. The owner calls :meth:`finish` once for each step."""

    def __init__(self, reducer: Reducer, names: dict[torch.Tensor, str], passes: int) -> None:
        """``names``: the names of the parameters, and possibly of others; ``passes``: number of backward passes per
        step."""
        self._reducer = reducer
        self._names = names
        self.passes = passes
        self.handles: Handles = {}
        """Maps parameters and groups to (handle, context of the compression). The handle is None until the reduction is
        submitted."""
        self.delay: dict[torch.Tensor, int] = {}
        """The number of backward passes until a gradient is ready, by parameter that is reduced."""
        self.required: set[torch.Tensor] = set()
        """The parameters that are reduced in each step. Others are reduced only if backward has reached them."""
        self.hooks: list[Any] = []
        self.paused = False
        """Whether backward passes leave the gradients pending, whatever their number (``no_sync``)."""
        self.groups = GroupProgress(())
        """The groups, or the buckets, if there are any."""
        self.buckets: buckets.Buckets | None = None
        self._ready: dict[Stream, _Ready] = {}
        self._submitting = threading.RLock()  # hooks of different devices run in different threads
        weakref.finalize(self, _remove, self.hooks)

    @property
    def active(self) -> bool:
        """Whether any gradient is ready or submitted and has not been waited for."""
        return bool(self.handles or self._ready)

    def hook(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch the gradients of more parameters."""
        # Parameters live as long as the model: a hook with a reference to this object would keep it alive as well.
        reference = weakref.ref(self)

        @run_callback_eagerly
        def hook(parameter: torch.Tensor) -> None:
            reduction = reference()
            if reduction is not None:
                reduction._accumulated(parameter)

        for parameter in parameters:
            self.delay[parameter] = self.passes
            self.required.add(parameter)
            register: Any = parameter.register_post_accumulate_grad_hook  # has no type
            self.hooks.append(register(hook))

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes per step, from the next pass on."""
        self.passes = passes
        self.delay.update(dict.fromkeys(self.delay, passes))

    def make_buckets(self, parameters: Iterable[torch.Tensor]) -> None:
        """Move the gradients into buckets. Collective over all ranks."""
        self.buckets = buckets.make_buckets(
            self._names, parameters, compressed=self._reducer.wire_dtype != 0
        )
        self.groups = GroupProgress(self.buckets.buckets)

    def finish(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Submit the gradients that are not yet submitted, wait for all, and store the results. ``parameters`` returns
        those that should be reduced now; new ones get hooks.

        Raises HorovodInternalError if a reduction failed; the gradients are then undefined."""
        try:
            self._submit_ready()
            self.hook([p for p in parameters() if p not in self.delay])
            self._submit_pending()
            with torch.no_grad():
                self._reducer.finish()
            if self.buckets is not None:
                self.buckets.attach()
        finally:
            self.reset()

    def reset(self) -> None:
        """Forget all submitted reductions, so that all gradients are pending."""
        self._reducer.forget()
        self._ready = {}
        self.groups.reset()
        self.handles.clear()
        self.delay.update(dict.fromkeys(self.delay, self.passes))

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """The hook: backward has added to the gradient of ``parameter``."""
        left = self.delay[parameter] - 1
        if left < 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to "
                "step(). Increase backward_passes_per_step to accumulate gradients locally"
            )
        if self.paused:
            return
        self.delay[parameter] = left
        if left > 0:
            self.handles[parameter] = _NOT_SUBMITTED
            return
        stream = None if parameter.is_cpu else streams.of(parameter)
        ready = self._ready.get(stream)
        if ready is None:
            if not self._ready:
                torch.autograd.Variable._execution_engine.queue_callback(self._submit_ready)
            ready = self._ready[stream] = _Ready()
        ready.parameters.append(parameter)
        nbytes = ready.nbytes = ready.nbytes + parameter.nbytes
        if nbytes >= _SUBMIT_BYTES:
            del self._ready[stream]
            with self._submitting:
                self._submit_from(ready.parameters, stream)

    @run_callback_eagerly
    def _submit_ready(self) -> None:
        """Submit all ready gradients. For use at the end of backward or later, when PyTorch has ordered the caller's
        stream after those of backward."""
        with self._submitting:
            ready, self._ready = self._ready, {}
            for stream, in_stream in ready.items():
                self._submit_from(in_stream.parameters, stream)
            self._submit_groups(self.groups.take_deferred())

    def _submit_from(self, ready: list[torch.Tensor], stream: Stream) -> None:
        """Submit gradients that became ready in one stream. Members of a group are submitted when it is complete."""
        self._forget_old_buckets()
        if not self.groups.of:
            self._submit(ready)
            return
        self.handles.update(dict.fromkeys(ready, _NOT_SUBMITTED))
        alone = [p for p in ready if p not in self.groups.of]
        if alone:
            self._submit(alone)
        members = [p for p in ready if p in self.groups.of]
        if self.buckets is not None:
            self._move_to_buckets(members)
        self._submit_groups(self.groups.add(members, stream))

    def _submit_pending(self) -> None:
        self._forget_old_buckets()
        incomplete = [
            group
            for group in self.groups.counts
            if group not in self.handles and any(self._is_wanted(p) for p in group)
        ]
        if self.buckets is not None:
            # Ready gradients were moved when their hooks ran. Later changes of `grad` by the program have no effect.
            self._move_to_buckets(p for group in incomplete for p in group if self.delay[p] > 0)
        self._submit_groups(incomplete)
        missing = [
            parameter
            for parameter in self.delay
            if self.handles.get(parameter, _NOT_SUBMITTED)[0] is None
            and parameter not in self.groups.of
            and self._is_wanted(parameter)
        ]
        if missing:
            self._submit(missing)

    def _is_wanted(self, parameter: torch.Tensor) -> bool:
        """Whether a gradient that has not been submitted is reduced in this step."""
        return parameter in self.required or self.delay[parameter] < self.passes

    # Under no_grad, since backward(create_graph=True) records what hooks do.

    def _submit(self, parameters: Iterable[torch.Tensor]) -> None:
        with torch.no_grad():
            self._reducer.submit(parameters, self.handles)

    def _submit_groups(self, groups: Sequence[Group]) -> None:
        with torch.no_grad():
            if self.buckets is None:
                for group in groups:
                    self._reducer.submit_group(group, self.handles)
            elif groups:
                self._reducer.submit_buckets(cast(Sequence[buckets.Bucket], groups), self.handles)

    def _move_to_buckets(self, parameters: Iterable[torch.Tensor]) -> None:
        assert self.buckets is not None
        with torch.no_grad():
            self.buckets.take(parameters)

    def _forget_old_buckets(self) -> None:
        """Forget buckets from before the last ``init``, because new ranks may not have buckets yet. All ranks create
        new ones after the first step."""
        if self.buckets is not None and self.buckets.job != context.job:
            self.buckets = None
            self.groups = GroupProgress(())


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
