"""``DistributedOptimizer``: an optimizer that averages the gradients of all ranks before each step.

A hook on every parameter notes that its gradient is complete. Whenever enough has come together, and at the end of
backward, what was noted is submitted in one go, so that the communication runs while backward goes on; ``step`` waits
for what is left and then steps as the wrapped optimizer does.
"""

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar, cast

import torch

from horoplug.base import config
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Adasum, Average, check_ranks, resolve
from horoplug.torch import buckets, streams
from horoplug.torch.compression import Compression
from horoplug.torch.grouping import Group, check_groups, make_groups, name_parameters
from horoplug.torch.reduction import Handles, Reducer

# Submitting costs Python less for many gradients at once; waiting for more than this would delay the communication.
_ENOUGH_BYTES: Final = 1 << 20

_NOT_SUBMITTED: Final = (None, None)

Stream = tuple[int, int] | None
"""Where a gradient was complete: the card, and its stream; None: in the host's memory."""

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    gradient_as_bucket_view: bool | None = None,
) -> Optimizer:
    """Wrap an optimizer so that ``step`` uses the gradients of all ranks. Use the result in place of the argument.

    named_parameters: ``model.named_parameters()``; the names pair the ranks' gradients and appear in messages. All
        parameters of the optimizer must be in it. Without it, they are numbered.
    compression: how gradients travel: ``Compression.none``, ``.fp16``, ``.bf16``, or a class of your own. The core
        casts float32 as it copies, which costs next to nothing; what derives from these is called for each gradient.
    backward_passes_per_step: gradients are accumulated locally over this many backward passes; the sum is not divided.
    op: how gradients are combined: Average, Sum, Min, Max, Product. With Adasum it is not gradients but steps: see
        :mod:`horoplug.torch.adasum_optimizer`, which has no use for groups and sparse_as_dense.
    gradient_predivide_factor: with Average, divide by this before summing and by size / this after it, so that the
        sum does not overflow.
    groups: gradients that travel together: the number of groups, or lists of parameters. (num_groups: its old name.)
    sparse_as_dense: make sparse gradients dense to reduce them, instead of gathering them.
    gradient_as_bucket_view: True puts the gradients into buckets of shared memory, which are reduced in place: nothing
        is packed or unpacked, and a few operations take the place of one per parameter. This pays most where gradients
        stay in place (accumulation, ``zero_grad(set_to_none=False)``) and where there are many small ones. A hook makes
        ``parameter.grad`` a view of its bucket, whatever it was before. What still refers to it after ``zero_grad``
        sees the next step's gradients, as with DistributedDataParallel's argument of this name. The results have the
        same bits as without, on one host. On a GPU the buckets are memory of the device like any other, and what it
        saves is operations. It takes the same on all ranks: dense floating-point parameters, and no groups, Adasum,
        process set, compression of your own or, with the others, float64. None and False leave the gradients where they
        are.

    Returns an object of a class that is derived from the optimizer's and has its name. It shares the optimizer's
    parameter groups and state. Raises ValueError for arguments that make no sense, and with
    gradient_as_bucket_view=True for parameters that are not such or differ between the ranks (in an elastic job: after
    the first step). Backward or ``step`` then raises it for a sparse gradient."""
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already.")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor works with op=Average only.")
    if gradient_as_bucket_view:
        obstacle = buckets.why_not(compression, op, groups or num_groups or None, process_set)
        if obstacle is not None:
            raise ValueError(f"gradient_as_bucket_view=True cannot be combined with {obstacle}.")
    base = _DistributedOptimizer
    if resolve(op) == Adasum and process_set.included() and process_set.size() != 1:
        from horoplug.torch.adasum_optimizer import _DistributedAdasumOptimizer

        check_ranks(op, process_set.size())
        base, groups, num_groups = _DistributedAdasumOptimizer, None, 0
    if num_groups != 0:
        warnings.warn("num_groups= is deprecated: use groups=", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups

    kind = type(optimizer)
    body = {"__module__": __name__, "__doc__": kind.__doc__}
    wrapped: Any = object.__new__(type(kind.__name__, (base, kind), body))
    # All that the optimizer is, its groups and state included. What others have put over its methods (learning-rate
    # schedulers do so) would hide the new methods, and stays behind.
    own = {k: v for k, v in vars(optimizer).items() if k not in vars(_DistributedOptimizer)}
    vars(wrapped).update(own)
    wrapped._distribute(
        named_parameters,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense,
        process_set,
        bool(gradient_as_bucket_view),
    )
    return cast(Optimizer, wrapped)


class _Noted:
    """Parameters whose gradients were complete at one place."""

    __slots__ = ("nbytes", "parameters")

    def __init__(self) -> None:
        self.parameters: list[torch.Tensor] = []
        self.nbytes = 0


class _DistributedOptimizer(torch.optim.Optimizer):
    """What is put before the class of the user's optimizer. Attributes with one underscore are Horovod's, and others
    look at them."""

    def _distribute(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        compression: Any,
        backward_passes_per_step: int,
        op: int,
        gradient_predivide_factor: float,
        groups: int | Sequence[Sequence[torch.Tensor]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        as_views: bool,
    ) -> None:
        self.op = op
        self.process_set = process_set
        self.backward_passes_per_step = backward_passes_per_step
        self._parameter_names = name_parameters(self.param_groups, named_parameters)
        self._reducer = self._make_reducer(
            self._parameter_names,
            compression,
            op,
            gradient_predivide_factor,
            sparse_as_dense,
            process_set,
        )
        # By parameter or group: (handle, what decompression needs) of its reduction; the handle is None while it is
        # not submitted: more backward passes or more of the group are to come, or more gradients to submit with it.
        self._handles: Handles = {}
        self._synchronized = False
        self._should_synchronize = True
        self._accumulating = False  # inside of no_sync
        self._groups = groups
        self._p_to_group: dict[torch.Tensor, Group] = {}
        self._group_counts: dict[Group, int] = {}  # members whose gradient is complete
        # The parameters that are reduced, and how many backward passes each has still to see.
        self._allreduce_delay: dict[torch.Tensor, int] = {}
        self._grad_accs: list[Any] = []  # the hooks on them
        # Parameters whose gradients are complete; they are submitted before backward ends.
        self._noted: dict[Stream, _Noted] = {}
        self._submitting = (
            threading.RLock()
        )  # the hooks of each device run in a thread of their own
        self._group_streams: dict[Group, set[Stream]] = {}  # where its gradients were complete
        self._late: list[
            Group
        ] = []  # complete groups for the end of backward, when streams have met
        # The gradients' buckets, if they have any; a bucket is a group as well.
        self._as_views = as_views
        self._buckets: buckets.Buckets | None = None
        if groups is not None:
            check_groups(groups)
        # An elastic job may have more ranks later.
        alone = process_set.size() == 1 and not config.value("ELASTIC")
        self._distributed = bool(process_set.included()) and not alone
        if not self._distributed:
            return
        parameters = list(self._parameters())
        if groups is not None:
            names = {p: self._parameter_names[p] for p in parameters}
            for group in make_groups(names, groups, process_set):
                self._group_counts[group] = 0
                self._p_to_group.update(dict.fromkeys(group, group))
        elif as_views and not config.value(
            "ELASTIC"
        ):  # new ranks make optimizers while others do not
            self._make_buckets()
        self._hook(parameters)
        weakref.finalize(self, _remove, self._grad_accs)

    def _make_reducer(self, *options: Any) -> Reducer:
        return Reducer(*options)

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        return set(self._allreduce_delay)

    def _hook(self, parameters: Iterable[torch.Tensor]) -> None:
        """Have :meth:`_gradient_ready` called whenever backward has added to a parameter's gradient."""
        # The parameters live as long as the model: a hook that held the optimizer would keep it alive, too.
        reference = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            optimizer = reference()
            if optimizer is not None:
                optimizer._gradient_ready(parameter)

        for parameter in parameters:
            self._allreduce_delay[parameter] = self.backward_passes_per_step
            self._grad_accs.append(parameter.register_post_accumulate_grad_hook(hook))

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        left = self._allreduce_delay[parameter] - 1
        if left < 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to "
                "step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        if self._accumulating:
            return
        self._allreduce_delay[parameter] = left
        if left > 0:
            self._handles[parameter] = _NOT_SUBMITTED
            return
        stream = None if parameter.is_cpu else streams.of(parameter)
        noted = self._noted.get(stream)
        if noted is None:
            if not self._noted:
                torch.autograd.Variable._execution_engine.queue_callback(self._submit_noted)
            noted = self._noted[stream] = _Noted()
        noted.parameters.append(parameter)
        nbytes = noted.nbytes = noted.nbytes + parameter.nbytes
        if nbytes >= _ENOUGH_BYTES:
            del self._noted[stream]
            with self._submitting:
                self._submit_complete(noted.parameters, stream)

    def _submit_noted(self) -> None:
        """Submit the gradients that the hooks have noted; of a group, once it is complete. For use where what the
        caller does on a card comes after all of backward: PyTorch sees to that before it calls back."""
        with self._submitting:
            noted, self._noted = self._noted, {}
            for stream, at_stream in noted.items():
                self._submit_complete(at_stream.parameters, stream)
            late, self._late = self._late, []
            self._submit_groups(late)

    def _submit_complete(self, noted: list[torch.Tensor], stream: Stream) -> None:
        self._forget_old_buckets()
        if not self._p_to_group:
            self._submit(noted)
            return
        self._handles.update(dict.fromkeys(noted, _NOT_SUBMITTED))
        alone = [p for p in noted if p not in self._p_to_group]
        if alone:
            self._submit(alone)
        members = [p for p in noted if p in self._p_to_group]
        if self._buckets is not None:
            self._take(members)
        complete: list[Group] = []
        for group in [self._p_to_group[p] for p in members]:
            self._group_counts[group] += 1
            places = self._group_streams.setdefault(group, set())
            places.add(stream)
            if self._group_counts[group] == len(group):
                (complete if len(places) == 1 else self._late).append(group)
        self._submit_groups(complete)

    def _submit(self, parameters: Iterable[torch.Tensor]) -> None:
        with torch.no_grad():  # backward(create_graph=True) goes on through hooks
            self._reducer.submit(parameters, self._handles)

    def _submit_groups(self, groups: Sequence[Group]) -> None:
        with torch.no_grad():
            if self._buckets is None:
                for group in groups:
                    self._reducer.submit_group(group, self._handles)
            elif groups:
                self._reducer.submit_buckets(cast(Sequence[buckets.Bucket], groups), self._handles)

    def _take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Bring gradients into their buckets."""
        assert self._buckets is not None
        with torch.no_grad():
            self._buckets.take(parameters)

    def _make_buckets(self) -> None:
        """Collective. At size 1 there are none."""
        parameters = self._parameters() if self.process_set.size() != 1 else ()
        compressed = self._reducer.wire_dtype != 0
        made = buckets.make_buckets(self._parameter_names, parameters, compressed)
        self._buckets = made
        self._group_counts = dict.fromkeys(made.buckets, 0)
        self._p_to_group = {p: bucket for bucket in made.buckets for p in bucket}

    def _forget_old_buckets(self) -> None:
        """After another ``init`` there may be ranks that have none yet: they are made anew after the first step."""
        if self._buckets is not None and self._buckets.job is not buckets.job():
            self._buckets = None
            self._group_counts, self._p_to_group = {}, {}
            self._group_streams, self._late = {}, []

    @torch._disable_dynamo
    def synchronize(self) -> None:
        """Wait until every gradient is reduced. ``step`` does this; call it before when the reduced gradients are
        needed (clipping …), and then ``step`` inside of :meth:`skip_synchronize`.

        Raises HorovodInternalError if a reduction failed; the gradients are then undefined."""
        self._finish()
        self._synchronized = True

    def _finish(self) -> None:
        """Submit what is not yet, wait for everything, and take the results over."""
        try:
            self._submit_noted()
            self._submit_missing()
            with torch.no_grad():
                self._reducer.finish()
            if self._buckets is not None:
                self._buckets.attach()
        finally:
            self._reset()
        if self._as_views and self._distributed and self._buckets is None:
            self._make_buckets()

    def _submit_missing(self) -> None:
        """Submit what no hook has: other ranks may have these gradients."""
        if self._distributed:  # parameters that were frozen so far
            self._hook([p for p in self._parameters() if p not in self._allreduce_delay])
        self._forget_old_buckets()
        incomplete = [group for group in self._group_counts if group not in self._handles]
        if self._buckets is not None:
            # The others came when their hooks fired, and what has been done to `grad` since is too late.
            delay = self._allreduce_delay
            self._take(p for group in incomplete for p in group if delay[p] > 0)
        self._submit_groups(incomplete)
        missing = [
            parameter
            for parameter in self._allreduce_delay
            if self._handles.get(parameter, _NOT_SUBMITTED)[0] is None
            and parameter not in self._p_to_group
        ]
        if missing:
            self._submit(missing)

    def _reset(self) -> None:
        self._reducer.forget()
        self._noted, self._late = {}, []
        self._group_streams.clear()
        self._handles.clear()
        self._allreduce_delay.update(
            dict.fromkeys(self._allreduce_delay, self.backward_passes_per_step)
        )
        for group in self._group_counts:
            self._group_counts[group] = 0

    def _parameters(self) -> Iterator[torch.Tensor]:
        """Those that have gradients."""
        return (p for group in self.param_groups for p in group["params"] if p.requires_grad)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside of it backward passes only add to this rank's gradients: nothing is reduced, and none counts for
        ``backward_passes_per_step``. The first backward pass after it reduces the sum."""
        outer, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = outer

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside of it ``step`` does not synchronize: for use after :meth:`synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are accumulated before a step."""
        self.backward_passes_per_step = passes
        for parameter in self._allreduce_delay:
            self._allreduce_delay[parameter] = passes

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, then step as the wrapped optimizer does; with a closure, synchronize each time it has run."""
        if self._should_synchronize:
            pending = bool(self._handles or self._noted)
            if self._synchronized and not pending:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the gradients are reduced twice.",
                    stacklevel=2,
                )
            if closure is None or pending:
                self.synchronize()
            if closure is not None:
                closure = self._synchronizing(closure)
        self._synchronized = False
        result = super().step(closure)
        self._synchronized = False
        return result

    # PyTorch would wrap this method to run the step hooks; the wrapped optimizer's own step runs them.
    step.hooked = True  # type: ignore[attr-defined]

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return run

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's. AssertionError while gradients are on their way, which this would spoil."""
        if self._handles or self._noted:
            raise AssertionError(
                "zero_grad() was called between backward() and step() or synchronize(), while the "
                "gradients are being reduced."
            )
        super().zero_grad(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's; gradients that were on their way are forgotten."""
        self._reset()
        self._synchronized = False
        self._should_synchronize = True
        super().load_state_dict(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's; the new parameters are reduced, too, each by itself."""
        super().add_param_group(param_group)
        number, added = len(self.param_groups) - 1, self.param_groups[-1]["params"]
        for place, parameter in enumerate(added):
            self._parameter_names.setdefault(parameter, f"allreduce.noname.{number}.{place}")
        if self._distributed:
            self._hook([p for p in added if p.requires_grad])


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
