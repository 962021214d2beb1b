"""The name of Horovod's aggregation class for eager mode. Here one class serves graphs and eager mode."""

from collections.abc import Callable, Sequence
from typing import Any

from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.tensorflow.gradient_aggregation import LocalGradientAggregationHelper


class LocalGradientAggregationHelperEager(LocalGradientAggregationHelper):
    """:class:`LocalGradientAggregationHelper` for a Keras optimizer."""

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[list[Any], list[Any]], Sequence[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        super().__init__(
            backward_passes_per_step,
            allreduce_func,
            sparse_as_dense,
            average_aggregated_gradients,
            optimizer_type=self._OPTIMIZER_TYPE_KERAS,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
