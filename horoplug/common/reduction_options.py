"""The options of the reduction of gradients, the same in every framework: :class:`ReductionOptions`."""

from collections.abc import Iterable, Iterator
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar

from horoplug.common.arguments import shown
from horoplug.common.compression import AnyCompressor, NoneCompressor, check_compressor
from horoplug.common.grouping import Groups
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Average, resolve


@dataclass(frozen=True, kw_only=True)
class ReductionOptions:
    """The arguments of the same names of optimizers and tapes. Each framework uses those that its functions have.

    Raises ValueError or TypeError for an invalid one."""

    name: str = ""  # prefix of the operations' names, the same on every rank
    op: int = Average
    compression: AnyCompressor = NoneCompressor
    gradient_predivide_factor: float = 1.0
    groups: Groups = None  # lists are copied
    num_groups: InitVar[int] = 0  # the older name of `groups`, which takes precedence
    process_set: ProcessSet = global_process_set
    sparse_as_dense: bool = False
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    scale_local_gradients: bool = True
    device_dense: str = ""
    device_sparse: str = ""

    members: ClassVar[str] = "variables"
    """What the lists of ``groups`` have, for messages."""
    member_type: ClassVar[type] = object

    def __post_init__(self, num_groups: int) -> None:
        self._set("op", resolve(self.op))
        check_compressor(self.compression)
        factor = self.gradient_predivide_factor
        if factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor is for op=Average only")
        if not factor > 0:
            raise ValueError(
                f"gradient_predivide_factor takes a positive number, got {shown(factor)}"
            )
        if not isinstance(num_groups, int) or num_groups < 0:
            raise ValueError(f"num_groups takes a number of groups, got {shown(num_groups)}")
        self._set(
            "groups", self._checked(num_groups or None if self.groups is None else self.groups)
        )
        if not isinstance(self.process_set, ProcessSet):
            kind = type(self.process_set).__name__
            raise TypeError(f"process_set= takes a ProcessSet, got {kind}")
        if self.backward_passes_per_step < 1:
            passes = shown(self.backward_passes_per_step)
            raise ValueError(f"backward_passes_per_step takes a positive number, got {passes}")

    def _checked(self, groups: Any) -> Groups:
        if groups is None or (type(groups) is int and groups > 0):
            return groups
        expected = f"groups takes a positive number or a list of lists of {self.members}"
        if not isinstance(groups, (list, tuple)) or not all(map(_is_list, groups)):
            raise ValueError(f"{expected}, got {shown(groups)}")
        copied = [list(group) for group in groups]
        for member in (member for group in copied for member in group):
            if not isinstance(member, self.member_type):
                raise ValueError(f"{expected}; one has a {type(member).__name__}")
        return copied

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def prescale(self) -> float:
        """The factor of the gradients before the reduction."""
        return 1.0 / self.gradient_predivide_factor

    @property
    def postscale(self) -> float:
        """The factor of the result."""
        return self.gradient_predivide_factor

    def local(self, gradient: Any) -> Any:
        """The gradient of a variable that is not reduced: divided by the number of ranks if ``scale_local_gradients``
        is set, as if it were averaged with zeros on the other ranks."""
        size = self.process_set.size()
        if gradient is None or not self.scale_local_gradients or not size:
            return gradient
        return gradient / size


def _is_list(group: Any) -> bool:
    """Whether a value has members; a tensor and a name have not."""
    return (
        isinstance(group, Iterable) and not isinstance(group, str) and not hasattr(group, "shape")
    )


def weights_of(local_layers: Any) -> Iterator[Any]:
    """The trainable variables of ``local_layers``: a layer, a list of layers, or None."""
    layers = local_layers if isinstance(local_layers, (list, tuple)) else [local_layers]
    for layer in layers:
        if layer is not None:
            yield from layer.trainable_weights
