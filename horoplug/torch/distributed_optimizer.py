"""The base class that :func:`horoplug.torch.optimizer.DistributedOptimizer` adds to the class of the user's
optimizer."""

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch

from horoplug.base import config
from horoplug.torch import buckets
from horoplug.torch.dynamo import run_callback_eagerly, run_eagerly
from horoplug.torch.gradient_reduction import GradientReduction
from horoplug.torch.grouping import Group, GroupProgress, Options, make_groups, name_parameters
from horoplug.torch.reduction import Handles, Reducer


class _DistributedOptimizer(torch.optim.Optimizer):
    """An optimizer whose gradients are reduced over the ranks of a process set.

    The contract:

    - Backward submits the gradients as they become ready; nothing waits there.
    - ``step`` waits until all gradients are reduced, and then steps as the wrapped optimizer does. To use the reduced
      gradients before, call :meth:`synchronize`, and then ``step`` inside :meth:`skip_synchronize`.
    - Between backward and ``step`` (or ``synchronize``) the gradients belong to the reduction: ``zero_grad`` raises.
    - Every rank takes the same steps. A gradient that this rank does not have counts as zeros.
    - The wrapped optimizer's parameter groups and state are used as they are.

    :class:`GradientReduction` has the state of the reduction. The properties that begin with an underscore are
    Horovod's, and programs read them."""

    _wrapped_class: type[torch.optim.Optimizer]
    """The class of the user's optimizer, from which that of this object derives as well."""

    def _distribute(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        options: Options,
        as_views: bool,
    ) -> None:
        """Replaces ``__init__``, because the object already has the attributes of the wrapped optimizer."""
        self._options = options
        self.op = options.op
        self.process_set = process_set = options.process_set
        self._synchronized = False
        self._should_synchronize = True
        self._as_views = as_views
        self._parameter_names = name_parameters(self.param_groups, named_parameters)
        reducer = self._make_reducer()
        if isinstance(self, torch.optim.SparseAdam):
            reducer.expect_sparse(self._parameter_names)
        self._reduction = GradientReduction(
            reducer, self._parameter_names, options.backward_passes_per_step
        )
        elastic = bool(config.value("ELASTIC"))
        # In an elastic job, the number of ranks may grow.
        alone = process_set.size() == 1 and not elastic
        self._distributed = bool(process_set.included()) and not alone
        if not self._distributed:
            return
        parameters = list(self._parameters())
        # Nothing is collective here in an elastic job, where new ranks create optimizers while others do not.
        if options.groups is not None:
            names = {p: self._parameter_names[p] for p in parameters}
            made = make_groups(names, options.groups, process_set, agree=not elastic)
            self._reduction.groups = GroupProgress(made)
        elif as_views and not elastic:
            self._make_buckets()
        self._reduction.hook(parameters)

    def _take_attributes(self, optimizer: torch.optim.Optimizer) -> None:
        """Take all attributes of an optimizer, including its groups and state, except those that replace its methods.
        Learning-rate schedules set such attributes, which would hide the new methods."""
        own = vars(_DistributedOptimizer)
        vars(self).update({k: v for k, v in vars(optimizer).items() if k not in own})

    def __deepcopy__(self, memo: dict[int, Any]) -> "_DistributedOptimizer":
        """A distributed optimizer of copied parameters (those of a model that is copied with it), with the same names
        and options. Collective where making it was: with groups or gradient_as_bucket_view."""
        plain = object.__new__(self._wrapped_class)
        vars(plain).update(vars(self))
        made = object.__new__(type(self))
        made._take_attributes(copy.deepcopy(plain, memo))
        groups = self._options.groups
        if isinstance(groups, list):
            groups = [[memo[id(p)] for p in group if id(p) in memo] for group in groups]
        passes = self.backward_passes_per_step
        made._distribute(
            [(name, memo[id(p)]) for p, name in self._parameter_names.items() if id(p) in memo],
            dataclasses.replace(self._options, groups=groups, backward_passes_per_step=passes),
            self._as_views,
        )
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a DistributedOptimizer cannot be pickled, or copied by copy.copy, because its hooks belong to parameters "
            "of this process: save optimizer.state_dict(), or use copy.deepcopy"
        )

    def _make_reducer(self) -> Reducer:
        return Reducer(self._parameter_names, self._options)

    def _make_buckets(self) -> None:
        """Create the buckets, unless there is only one rank. Collective."""
        alone = self.process_set.size() == 1
        self._reduction.make_buckets(() if alone else self._parameters())

    def _parameters(self) -> Iterator[torch.Tensor]:
        """The parameters that have gradients."""
        return (p for group in self.param_groups for p in group["params"] if p.requires_grad)

    def _reduced_parameters(self) -> Iterable[torch.Tensor]:
        return self._parameters() if self._distributed else ()

    @property
    def backward_passes_per_step(self) -> int:
        return self._reduction.passes

    @property
    def _handles(self) -> Handles:
        return self._reduction.handles

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        return self._reduction.delay

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        """The parameters that are reduced although they have no gradient. Programs change or replace the set."""
        return self._reduction.required

    @_requires_update.setter
    def _requires_update(self, parameters: Iterable[torch.Tensor]) -> None:
        self._reduction.required = set(parameters)

    @property
    def _grad_accs(self) -> list[Any]:
        return self._reduction.hooks

    @property
    def _group_counts(self) -> dict[Group, int]:
        return self._reduction.groups.counts

    @property
    def _p_to_group(self) -> dict[torch.Tensor, Group]:
        return self._reduction.groups.of

    @property
    def _buckets(self) -> buckets.Buckets | None:
        return self._reduction.buckets

    @run_eagerly
    def synchronize(self) -> None:
        """Wait until every gradient is reduced. ``step`` calls this method. Call it earlier to use the reduced
        gradients, for example to clip them, and then call ``step`` inside :meth:`skip_synchronize`.

        Raises HorovodInternalError if a reduction failed; the gradients are then undefined."""
        self._finish()
        self._synchronized = True

    @run_callback_eagerly
    def _finish(self) -> None:
        self._reduction.finish(self._reduced_parameters)
        if self._as_views and self._distributed and self._reduction.buckets is None:
            self._make_buckets()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes only add to the gradients of this rank: nothing is reduced, and the passes
        do not count for ``backward_passes_per_step``. The first backward pass after it reduces the sum."""
        outer, self._reduction.paused = self._reduction.paused, True
        try:
            yield
        finally:
            self._reduction.paused = outer

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which ``step`` does not synchronize, for use after :meth:`synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes whose gradients are accumulated before a step."""
        self._reduction.set_passes(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, then step as the wrapped optimizer does. With a closure, synchronize after each call of it."""
        if self._should_synchronize:
            closure = self._before_step(closure)
        self._synchronized = False
        result = super().step(closure)
        self._synchronized = False
        return result

    # PyTorch would wrap this method to run the step hooks; the wrapped optimizer's own step runs them.
    step.hooked = True  # type: ignore[attr-defined]

    @run_callback_eagerly  # all of it: the compiler may trace only the wrapped optimizer's own step
    def _before_step(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Synchronize, unless the closure that is returned does."""
        active = self._reduction.active
        if self._synchronized and not active:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(): the gradients are reduced twice.",
                stacklevel=3,
            )
        if closure is None or active:
            self.synchronize()
        return None if closure is None else self._synchronizing(closure)

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return run

    @run_eagerly  # as PyTorch's own
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients like the wrapped optimizer. Raises AssertionError while gradients are being reduced."""
        if self._reduction.active:
            raise AssertionError(
                "zero_grad() was called between backward() and step() or synchronize(), while the "
                "gradients are being reduced"
            )
        super().zero_grad(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state like the wrapped optimizer. Reductions in flight are forgotten."""
        self._forget_reductions()
        super().load_state_dict(*args, **kwargs)

    def _forget_reductions(self) -> None:
        """Forget reductions in flight, such as those that a failure has interrupted."""
        self._reduction.reset()
        self._synchronized = False
        self._should_synchronize = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters like the wrapped optimizer. Their gradients are reduced as well, each as one operation."""
        super().add_param_group(param_group)
        number, added = len(self.param_groups) - 1, self.param_groups[-1]["params"]
        for position, parameter in enumerate(added):
            self._parameter_names.setdefault(parameter, f"allreduce.noname.{number}.{position}")
        if self._distributed:
            self._reduction.hook([p for p in added if p.requires_grad])
