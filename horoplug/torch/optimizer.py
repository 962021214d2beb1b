"""``DistributedOptimizer``: an optimizer that averages the gradients of all ranks before each step.

A hook on every parameter submits its gradient as soon as backward has computed it, so that the communication runs while
backward goes on; ``step`` waits for what is left and then steps as the wrapped optimizer does.
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch

from horoplug.common import config
from horoplug.common.errors import HorovodInternalError
from horoplug.common.ops import submit
from horoplug.common.opspec import BY_NAME, Call
from horoplug.common.process_sets import ProcessSet, global_process_set, set_number
from horoplug.common.reduce_ops import Adasum, Average, check_ranks, resolve
from horoplug.torch.adapter import ADAPTER
from horoplug.torch.compression import CastCompressor, Compression
from horoplug.torch.grouping import Group, check_groups, make_groups, name_parameters
from horoplug.torch.mpi_ops import sparse_allreduce_async, synchronize

_ALLREDUCE = BY_NAME["allreduce"]

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
) -> Optimizer:
    """Wrap an optimizer so that ``step`` uses the gradients of all ranks. Use the result in place of the argument.

    named_parameters: ``model.named_parameters()``; the names pair the ranks' gradients and appear in messages. All
        parameters of the optimizer must be in it. Without it, they are numbered.
    compression: how gradients travel: ``Compression.none``, ``.fp16``, ``.bf16``, or a class of your own.
    backward_passes_per_step: gradients are accumulated locally over this many backward passes; the sum is not divided.
    op: how gradients are combined: Average, Sum, Min, Max, Product. With Adasum it is not gradients but steps: see
        :mod:`horoplug.torch.adasum_optimizer`, which has no use for groups and sparse_as_dense.
    gradient_predivide_factor: with Average, divide by this before summing and by size / this after it, so that the
        sum does not overflow.
    groups: gradients that travel together: the number of groups, or lists of parameters. (num_groups: its old name.)
    sparse_as_dense: make sparse gradients dense to reduce them, instead of gathering them.

    Returns an object of a class that is derived from the optimizer's and has its name. It shares the optimizer's
    parameter groups and state. Raises ValueError for arguments that make no sense."""
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already.")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor works with op=Average only.")
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
    )
    return cast(Optimizer, wrapped)


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
    ) -> None:
        self.op = op
        self.process_set = process_set
        self.backward_passes_per_step = backward_passes_per_step
        self._compression = compression
        self._casts = isinstance(compression, type) and issubclass(compression, CastCompressor)
        self._sparse_as_dense = sparse_as_dense
        self._predivide = gradient_predivide_factor
        self._parameter_names = name_parameters(self.param_groups, named_parameters)
        # By parameter or group: (handle, what decompression needs) of its reduction; the handle is None while more
        # backward passes are to come.
        self._handles: dict[Any, tuple[Any, Any]] = {}
        self._synchronized = False
        self._should_synchronize = True
        self._groups = groups
        self._p_to_group: dict[torch.Tensor, Group] = {}
        self._group_counts: dict[Group, int] = {}  # members whose gradient is complete
        # The parameters that are reduced, and how many backward passes each has still to see.
        self._allreduce_delay: dict[torch.Tensor, int] = {}
        self._grad_accs: list[Any] = []  # the hooks on them
        if groups is not None:
            check_groups(groups)
        if not process_set.included() or (process_set.size() == 1 and not config.value("ELASTIC")):
            return
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if groups is not None:
            names = {p: self._parameter_names[p] for p in parameters}
            for group in make_groups(names, groups, process_set):
                self._group_counts[group] = 0
                self._p_to_group.update(dict.fromkeys(group, group))
        self._hook(parameters)
        weakref.finalize(self, _remove, self._grad_accs)

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        return set(self._allreduce_delay)

    def _hook(self, parameters: Iterable[torch.Tensor]) -> None:
        """Have :meth:`_gradient_ready` called whenever backward has added to a parameter's gradient."""
        # The parameters live as long as the model: a hook that held the optimizer would keep it alive, too.
        ready = weakref.WeakMethod(self._gradient_ready)

        def hook(parameter: torch.Tensor) -> None:
            method = ready()
            if method is not None:
                method(parameter)

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
        self._allreduce_delay[parameter] = left
        if left > 0:
            self._handles[parameter] = None, None
        elif (group := self._p_to_group.get(parameter)) is None:
            self._handles[parameter] = self._submit(parameter)
        else:
            self._group_counts[group] += 1
            if self._group_counts[group] < len(group):
                self._handles[parameter] = None, None
            else:
                self._submit_group(group)

    def _packed(self, parameter: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The gradient as it is to be reduced, and what decompression needs. No gradient counts as zeros."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad.detach() if parameter.grad.requires_grad else parameter.grad
        if grad.is_sparse:
            if not self._sparse_as_dense:
                return grad, None
            grad = grad.to_dense()
        tensor, kept = self._compression.compress(grad)
        # A gradient in channels_last order takes a copy: the order of another rank's may differ.
        return tensor.contiguous(), kept

    def _submit(self, parameter: torch.Tensor) -> tuple[Any, Any]:
        name = self._parameter_names[parameter]
        tensor, kept = self._packed(parameter)
        if tensor.is_sparse:
            return sparse_allreduce_async(tensor, name, self.op, self.process_set), kept
        return self._allreduce([tensor], name), kept

    def _allreduce(self, tensors: list[torch.Tensor], name: str, grouped: bool = False) -> int:
        """allreduce_async_ and grouped_allreduce_async_, without what a hook can do without."""
        factor, number = self._predivide, set_number(self.process_set)
        call = Call(name, self.op, 0, 1.0 / factor, factor, None, number)
        return submit(ADAPTER, _ALLREDUCE, tensors, call, grouped, in_place=True).number

    def _submit_group(self, group: Group) -> None:
        """Reduce the gradients of a group as one, but for sparse ones."""
        packed = [(p, *self._packed(p)) for p in group]
        for parameter in group:
            self._handles.pop(parameter, None)
        dense = [(p, tensor, kept) for p, tensor, kept in packed if not tensor.is_sparse]
        handle: Any = list  # a reduction of nothing, which gives []
        if dense:
            name = self._parameter_names[group[0]]
            handle = self._allreduce([tensor for _, tensor, _ in dense], name, grouped=True)
        self._handles[group] = handle, [(p, kept) for p, _, kept in dense]
        for parameter, tensor, _ in packed:
            if tensor.is_sparse:
                self._handles[parameter] = self._submit(parameter)

    def synchronize(self) -> None:
        """Wait until every gradient is reduced. ``step`` does this; call it before when the reduced gradients are
        needed (clipping …), and then ``step`` inside of :meth:`skip_synchronize`.

        Raises HorovodInternalError if a reduction failed; the gradients are then undefined."""
        try:
            with torch.no_grad():
                self._submit_missing()
                self._finish_all()
        finally:
            self._reset()
        self._synchronized = True

    def _submit_missing(self) -> None:
        """Submit what no hook has: other ranks may have these gradients."""
        for group in self._group_counts:
            if group not in self._handles:
                self._submit_group(group)
        for parameter in self._allreduce_delay:
            if parameter not in self._p_to_group:
                handle, _ = self._handles.get(parameter, (None, None))
                if handle is None:
                    self._handles[parameter] = self._submit(parameter)

    def _finish_all(self) -> None:
        failure: HorovodInternalError | None = None
        for unit, (handle, kept) in self._handles.items():
            try:
                # A sparse reduction is a function (see sparse_allreduce_async).
                output = handle() if callable(handle) else synchronize(handle)
            except HorovodInternalError as error:
                failure = (
                    failure or error
                )  # the others are waited for: no buffer may be in use later
                continue
            if isinstance(unit, Group):
                for (parameter, of_one), tensor in zip(kept, output, strict=True):
                    self._take(parameter, tensor, of_one)
            else:
                self._take(unit, output, kept)
        if failure is not None:
            raise failure

    def _take(self, parameter: torch.Tensor, output: torch.Tensor, kept: Any) -> None:
        """Put a reduced gradient where the optimizer looks for it."""
        grad = parameter.grad
        if output is grad:
            return
        if output.is_sparse or grad is None:
            parameter.grad = output
            return
        # Copying casts on its own.
        result = output if self._casts else self._compression.decompress(output, kept)
        if grad.is_sparse:
            parameter.grad = result.to(grad.dtype).to_sparse(grad.sparse_dim())
        else:
            grad.copy_(result)

    def _reset(self) -> None:
        self._handles.clear()
        for parameter in self._allreduce_delay:
            self._allreduce_delay[parameter] = self.backward_passes_per_step
        for group in self._group_counts:
            self._group_counts[group] = 0

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
            if self._synchronized and not self._handles:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(): the gradients are reduced once more.",
                    stacklevel=2,
                )
            if closure is None or self._handles:
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
        if self._handles:
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
        if self._allreduce_delay:
            self._hook([p for p in added if p.requires_grad])


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
