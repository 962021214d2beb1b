"""init and shutdown, ranks and sizes, and the queries about the build."""

import os

import horovod.torch as hvd
import pytest
import torch
from horovod.torch import mpi_ops

NAMES = """
    Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min Product Sum allgather
    allgather_async allgather_object allreduce allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async
    barrier broadcast broadcast_ broadcast_async broadcast_async_ broadcast_object broadcast_optimizer_state
    broadcast_parameters ccl_built cross_rank cross_size cuda_built ddl_built global_process_set gloo_built
    gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce grouped_allreduce_
    grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async init
    is_initialized local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built poll ProcessSet
    rank reducescatter reducescatter_async rocm_built shutdown size sparse_allreduce_async synchronize
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", NAMES)
def test_function_is_exported(name):
    assert hasattr(hvd, name)


def test_is_homogeneous_is_in_mpi_ops():
    assert mpi_ops.is_homogeneous() is True


def test_rank_and_size_equal_the_launchers_variables():
    assert hvd.rank() == int(os.environ["HOROVOD_RANK"])
    assert hvd.size() == int(os.environ["HOROVOD_SIZE"])
    assert hvd.local_rank() == int(os.environ["HOROVOD_LOCAL_RANK"])
    assert hvd.local_size() == int(os.environ["HOROVOD_LOCAL_SIZE"])
    assert hvd.cross_rank() == int(os.environ["HOROVOD_CROSS_RANK"])
    assert hvd.cross_size() == int(os.environ["HOROVOD_CROSS_SIZE"])


def test_ranks_are_distinct():
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def test_second_init_has_no_effect():
    before = hvd.rank(), hvd.size()
    hvd.init()
    assert (hvd.rank(), hvd.size()) == before


def test_init_after_shutdown():
    before = hvd.rank(), hvd.size()
    hvd.shutdown()
    hvd.init()
    assert (hvd.rank(), hvd.size()) == before
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


def test_is_initialized():
    assert hvd.is_initialized() is True
    hvd.shutdown()
    assert hvd.is_initialized() is False
    hvd.shutdown()
    hvd.init()
    assert hvd.is_initialized() is True


@pytest.mark.no_job
@pytest.mark.parametrize(
    "name", ["rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"]
)
def test_rank_functions_need_init(name):
    with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd\.init\(\)"):
        getattr(hvd, name)()


@pytest.mark.no_job
def test_operations_need_init():
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.allreduce(torch.ones(1))


def test_handle_from_before_shutdown_is_stale():
    """An operation that was in flight at shutdown has no result; waiting for it must not block."""
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="left behind")
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    if hvd.rank() == 0:
        with pytest.raises(hvd.HorovodInternalError):
            hvd.synchronize(handle)
    hvd.barrier()


def test_reduction_constants_equal_horovods():
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == list(range(6))


def test_build_queries():
    for name in ("mpi", "gloo", "ddl", "ccl", "cuda", "rocm"):
        assert isinstance(getattr(hvd, f"{name}_built")(), bool)
    assert isinstance(hvd.nccl_built(), int)
    assert isinstance(hvd.mpi_threads_supported(), bool)
    assert hvd.mpi_enabled() or hvd.gloo_enabled()


def test_horovod_internal_error_is_a_runtime_error():
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert not issubclass(hvd.HorovodInternalError, ValueError)


def test_global_process_set():
    assert hvd.global_process_set.process_set_id == 0
    assert hvd.global_process_set.size() == hvd.size()
    assert hvd.global_process_set.rank() == hvd.rank()
    assert hvd.global_process_set.included() is True
