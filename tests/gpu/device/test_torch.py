"""PyTorch's CUDA tensors give the same results as CPU tensors in the whole API."""

import copy

import pytest

from tests.gpu.device.device_jobs import gpu_pool as gpu_pool
from tests.gpu.device.device_jobs import ranks as ranks

torch = pytest.importorskip("torch")

import horoplug.torch as hvd  # noqa: E402

DTYPES = ["float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8", "bool"]
SHAPES = [(), (1,), (5, 3), (1000, 33), (0, 4)]


def need():
    """Why these tests cannot run here; None if they can."""
    return None if torch.cuda.is_available() else "PyTorch finds no CUDA device"


def own_gpu():
    """The GPU of this rank. The ranks share the machine's GPUs."""
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def values(dtype, shape, key=0):
    """This rank's tensor in the host's memory: small whole numbers, whose sums are exact in every dtype."""
    made = torch.Generator().manual_seed(100 * key + hvd.rank())
    high = 2 if dtype == "bool" else 5
    return torch.randint(0, high, shape, generator=made).to(getattr(torch, dtype))


def equal(on_card, expected):
    assert on_card.is_cuda
    assert on_card.dtype == expected.dtype
    assert on_card.shape == expected.shape
    assert torch.equal(on_card.cpu(), expected)


def check_reductions(dtype):
    device = own_gpu()
    ops = [hvd.Max, hvd.Min] if dtype == "bool" else [hvd.Sum, hvd.Max, hvd.Min, hvd.Average]
    for n, shape in enumerate(SHAPES):
        host = values(dtype, shape, n)
        for op in ops:
            expected = hvd.allreduce(host, op=op)
            mine = host.to(device)
            equal(hvd.allreduce(mine, op=op), expected)
            equal(mine, host)
            assert hvd.allreduce_(mine, op=op) is mine
            equal(mine, expected)
            equal(hvd.synchronize(hvd.allreduce_async(host.to(device), op=op)), expected)
    if dtype.startswith("float"):
        host = values(dtype, (7,))
        expected = hvd.allreduce(host, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        found = hvd.allreduce(
            host.to(device), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0
        )
        equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_reductions_match_cpu(ranks, dtype):
    ranks.run(check_reductions, dtype)


def check_moves(dtype):
    device, rank, size = own_gpu(), hvd.rank(), hvd.size()
    host = values(dtype, (2 * size, 3))
    for root in range(size):
        equal(hvd.broadcast(host.to(device), root), hvd.broadcast(host, root))
    part = host[: rank + 1]
    equal(hvd.allgather(part.to(device)), hvd.allgather(part))
    equal(hvd.allgather(host[:0].to(device)), hvd.allgather(host[:0]))
    equal(hvd.alltoall(host.to(device)), hvd.alltoall(host))
    splits = [rank + 1] + [1] * (size - 1)
    rows = values(dtype, (sum(splits), 2))
    found, counts = hvd.alltoall(rows.to(device), splits=splits)
    expected, expected_counts = hvd.alltoall(rows, splits=splits)
    equal(found, expected)
    assert torch.equal(counts, expected_counts)
    if dtype != "bool":
        equal(
            hvd.reducescatter(host.to(device), op=hvd.Sum),
            hvd.reducescatter(host, op=hvd.Sum),
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_data_movement_matches_cpu(ranks, dtype):
    ranks.run(check_moves, dtype)


def check_groups():
    device = own_gpu()
    hosts = [values(dtype, shape, 3) for dtype in ("float32", "float16") for shape in SHAPES]
    expected = hvd.grouped_allreduce(hosts, op=hvd.Sum)
    mixed = [tensor.to(device) if n % 3 else tensor for n, tensor in enumerate(hosts)]
    for tensors in ([tensor.to(device) for tensor in hosts], mixed):
        found = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="group")
        for result, tensor, wanted in zip(found, tensors, expected, strict=True):
            assert result.device == tensor.device
            assert torch.equal(result.cpu(), wanted)
    strided = values("float32", (6, 5)).to(device).t()
    wanted = hvd.allreduce(strided.cpu(), op=hvd.Sum)
    assert hvd.allreduce_(strided, op=hvd.Sum) is strided
    equal(strided, wanted)


def test_grouped_and_strided_cuda_tensors(ranks):
    ranks.run(check_groups)


def check_adasum():
    device = own_gpu()
    host = torch.rand(999, generator=torch.Generator().manual_seed(hvd.rank()))
    found = hvd.allreduce(host.to(device), op=hvd.Adasum)
    torch.testing.assert_close(found.cpu(), hvd.allreduce(host, op=hvd.Adasum))
    for compression in hvd.Compression.fp16, hvd.Compression.bf16:
        found = hvd.allreduce(host.to(device), compression=compression)
        wanted = hvd.allreduce(host, compression=compression)
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-2, atol=1e-2)


def test_adasum_and_compression_of_cuda_tensors(ranks):
    ranks.run(check_adasum)


def check_streams():
    """The streams are synchronised only by the test itself, at its end."""
    device = own_gpu()
    side, other = torch.cuda.Stream(device), torch.cuda.Stream(device)
    work = torch.randn(2000, 2000, device=device)
    results = []
    for turn in range(10):
        with torch.cuda.stream(side):
            for _ in range(5):
                work = work @ work
                work = work / work.norm()
            tensor = torch.full((100_000,), float(hvd.rank() + turn), device=device)
            handle = hvd.allreduce_async(tensor, op=hvd.Sum, name="x")
            tensor = None  # the operation keeps the tensor alive
            torch.empty(100_000, device=device).fill_(
                -1.0
            )  # may reuse its memory, but only after the operation
        with torch.cuda.stream(other):
            result = hvd.synchronize(handle)
            results.append((result * 2).sum())
            result.record_stream(other)
            del result
    torch.cuda.synchronize(device)
    total = sum(range(hvd.size()))
    expected = [2 * 100_000.0 * (total + turn * hvd.size()) for turn in range(10)]
    assert [float(result) for result in results] == expected


def test_operations_follow_cuda_streams(ranks):
    ranks.run(check_streams)


def check_host_does_not_wait():
    """The call completes long before the GPU has finished the preceding work."""
    device = own_gpu()
    hvd.allreduce(
        torch.ones(4, device=device), name="first"
    )  # a first operation connects the ranks
    torch.cuda.synchronize(device)
    before = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    before.record()
    result = hvd.allreduce(torch.ones(4, device=device), op=hvd.Sum, name="second")
    early = not before.query()
    torch.cuda.synchronize(device)
    assert result.tolist() == [hvd.size()] * 4
    return early


def test_operations_do_not_block_the_host(ranks):
    early = ranks.run(check_host_does_not_wait)
    if ranks.size == 1:
        assert all(early)


def check_capture():
    device = own_gpu()
    tensor = torch.ones(4, device=device)
    hvd.allreduce(tensor, op=hvd.Sum)
    stream = torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph()
    refused = None
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            hvd.allreduce_(tensor, op=hvd.Sum)
        except ValueError as error:
            refused = str(error)
        graph.capture_end()
    assert refused
    assert "CUDA graph is being captured" in refused
    assert hvd.allreduce(tensor, op=hvd.Sum).tolist() == [hvd.size()] * 4


def test_operations_in_cuda_graph_capture_are_refused(ranks):
    ranks.run(check_capture)


def network(device):
    torch.manual_seed(4)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 3)
    ).to(device)


def trained(device, steps=6, **options):
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    data = torch.Generator().manual_seed(hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(16, 8, generator=data).to(device)
        model(inputs).square().mean().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return [p.detach().cpu() for p in model.parameters()]


OPTIONS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "groups": {"groups": 2},
    "fp16": {"compression": hvd.Compression.fp16},
    "adasum": {"op": hvd.Adasum},
}


def check_training(name):
    for found, expected in zip(
        trained(own_gpu(), **OPTIONS[name]),
        trained(torch.device("cpu"), **OPTIONS[name]),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_training_on_gpu_matches_cpu(ranks, name):
    ranks.run(check_training, name)


def check_optimizer_state():
    """Ranks without state get it on their GPU; state on the CPU stays there."""
    device = own_gpu()
    model = network(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (hvd.rank() + 1))
    if hvd.rank() == 0:
        model(torch.ones(4, 8, device=device)).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.01
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert state["exp_avg"].device == device
        assert state["step"].is_cpu
        assert float(state["step"]) == 1


def test_optimizer_state_is_broadcast_to_the_gpu(ranks):
    ranks.run(check_optimizer_state)


def check_sync_batch_norm():
    device = own_gpu()
    inputs = torch.randn(3 + hvd.rank(), 5, 4, generator=torch.Generator().manual_seed(hvd.rank()))
    outcomes = []
    for where in torch.device("cpu"), device:
        torch.manual_seed(1)
        layer = hvd.SyncBatchNorm(5).to(where)
        x = inputs.detach().to(where).requires_grad_()
        y = layer(x)
        (y * torch.arange(4.0, device=where)).sum().backward()
        outcomes.append([t.detach().cpu() for t in (y, x.grad, layer.running_var)])
    for found, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_sync_batch_norm_on_gpu_matches_cpu(ranks):
    ranks.run(check_sync_batch_norm)


def check_gradients_of_operations():
    device, size = own_gpu(), hvd.size()

    def gradients(where):
        x = torch.arange(4.0 * size, device=where).reshape(2 * size, 2).requires_grad_()
        y = hvd.allreduce(x, op=hvd.Sum, name="a").sum() + hvd.allgather(x, name="b").square().sum()
        y = y + hvd.alltoall(x, name="c").sum() + hvd.reducescatter(x, op=hvd.Sum, name="d").sum()
        y.backward()
        return x.grad

    equal(gradients(device), gradients(torch.device("cpu")))


def test_gradients_on_gpu_match_cpu(ranks):
    ranks.run(check_gradients_of_operations)


def check_sparse():
    device = own_gpu()
    indices = torch.tensor([[hvd.rank(), 3]])
    host = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (5,))
    found = hvd.sparse_allreduce_async(host.to(device), "s", hvd.Sum)()
    equal(found.to_dense(), hvd.sparse_allreduce_async(host, "t", hvd.Sum)().to_dense())


def test_sparse_cuda_tensors(ranks):
    ranks.run(check_sparse)


def check_join():
    """Rank 0 still reduces tensors on the GPU after the others, which used none there, have joined."""
    if hvd.rank() == 0:
        device = own_gpu()
        for _ in range(3):
            assert hvd.allreduce(torch.ones(9, device=device), op=hvd.Sum).tolist() == [1.0] * 9
    hvd.join()


def test_join_with_cuda_tensors(ranks):
    ranks.run(check_join)


def check_mismatch():
    device = own_gpu() if hvd.rank() == 0 else "cpu"
    if hvd.size() == 1:
        return
    with pytest.raises(hvd.HorovodInternalError, match=r"(?s)device.*(CPU|GPU).*(CPU|GPU)"):
        hvd.allreduce(torch.ones(3, device=device), name="where")
    assert hvd.allreduce(torch.ones(3, device=own_gpu()), op=hvd.Sum)[0] == hvd.size()


def test_cpu_and_gpu_tensors_with_one_name_are_a_mismatch(ranks):
    ranks.run(check_mismatch)


def check_process_sets():
    device = own_gpu()
    for rank in range(hvd.size()):
        alone = hvd.add_process_set([rank])
        if alone.included():
            found = hvd.allreduce(
                torch.full((3,), 7.0, device=device), op=hvd.Sum, process_set=alone
            )
            assert found.tolist() == [7.0] * 3
        hvd.remove_process_set(alone)


def test_process_sets_with_cuda_tensors(gpu_pool):
    if need():
        pytest.skip(need())
    with gpu_pool.ranks(2, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}) as job:
        job.run(check_process_sets)


def check_elastic_state():
    device = own_gpu()
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
    saved = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(hvd.rank() + 1)
    state.restore()
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    state.sync()
    assert all(value.device == device for value in model.state_dict().values())


def test_elastic_state_of_cuda_tensors(ranks):
    ranks.run(check_elastic_state)
