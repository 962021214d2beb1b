"""``horoplug.torch``: training, operations, elastic training."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_type

import horoplug.torch as hvd
from horoplug.torch.compression import Compressor


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def train() -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16,
        backward_passes_per_step=2,
        op=hvd.Average,
        groups=2,
        process_set=hvd.global_process_set,
    )
    assert_type(optimizer, torch.optim.SGD)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    hvd.broadcast_parameters(list(model.parameters()), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    loss = model(torch.ones(3, 4)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    adam = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters()),
        model.named_parameters(),
        groups=[list(model.parameters())],
        gradient_as_bucket_view=True,
    )
    assert_type(adam, torch.optim.Adam)
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    hvd.SyncBatchNorm(4, process_set=hvd.global_process_set)


def operations(x: Tensor) -> None:
    assert_type(hvd.allreduce(x), Tensor)
    hvd.allreduce(x, name="x", op=hvd.Sum, compression=hvd.Compression.bf16)
    hvd.allreduce(x, average=True, prescale_factor=0.5, postscale_factor=2)
    assert_type(hvd.allreduce_(x, op=hvd.Max), Tensor)
    assert_type(hvd.grouped_allreduce([x, x], op=hvd.Sum), list[Tensor])
    assert_type(hvd.grouped_allreduce_((x, x)), list[Tensor])
    assert_type(hvd.allgather(x), Tensor)
    assert_type(hvd.grouped_allgather([x]), list[Tensor])
    assert_type(hvd.broadcast(x, 0), Tensor)
    assert_type(hvd.broadcast_(x, root_rank=0, name="x"), Tensor)
    assert_type(hvd.alltoall(x), Tensor)
    assert_type(hvd.alltoall(x, splits=torch.tensor([1, 2])), tuple[Tensor, Tensor])
    assert_type(hvd.reducescatter(x, op=hvd.Sum, compression=hvd.Compression.none), Tensor)
    assert_type(hvd.grouped_reducescatter([x]), list[Tensor])
    assert_type(hvd.reduce(x, 0), Tensor)
    assert_type(hvd.reduce_(x, root_rank=0), Tensor)
    assert_type(hvd.gather(x, 0), Tensor)
    assert_type(hvd.scatter(x, 0), Tensor)
    hvd.send(x, dest=1, tag=3)
    assert_type(hvd.recv(x, source=0, tag=3), Tensor)


def handles(x: Tensor) -> Tensor:
    handle = hvd.allreduce_async(x, name="x")
    assert_type(handle, int)
    assert_type(hvd.poll(handle), bool)
    started = [
        hvd.allreduce_async_(x),
        hvd.grouped_allreduce_async([x]),
        hvd.grouped_allreduce_async_([x]),
        hvd.allgather_async(x),
        hvd.broadcast_async_(x, 0),
        hvd.alltoall_async(x),
        hvd.reducescatter_async(x),
    ]
    assert_type(started, list[int])
    finish = hvd.sparse_allreduce_async(x.to_sparse(), "sparse", hvd.Sum)
    assert_type(finish, Callable[[], Tensor])
    result: Tensor = hvd.synchronize(handle)
    return result


def process_sets_and_objects(x: Tensor) -> None:
    even = hvd.add_process_set(hvd.ProcessSet([0, 2]))
    if even.included():
        hvd.allreduce(x, process_set=even)
    hvd.remove_process_set(even)
    assert_type(hvd.broadcast_object({"epoch": 1}, root_rank=0), Any)
    assert_type(hvd.allgather_object("a", process_set=even), list[Any])
    assert_type(hvd.join(), int)


class Squeezed(Compressor):
    """A compression of one's own, which derives from horoplug's class."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        return tensor.to(torch.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        return tensor.to(ctx)


class Halved:
    """A compression of one's own, which derives from nothing."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        return tensor / 2, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: None) -> Tensor:
        return tensor * 2


def compressions(x: Tensor) -> None:
    hvd.allreduce(x, compression=Halved)
    hvd.allreduce(x, compression=Squeezed)
    packed, context = hvd.Compression.fp16.compress(x)
    hvd.Compression.fp16.decompress(packed, context)


@hvd.elastic.run
def train_elastic(state: hvd.elastic.TorchState, epochs: int, *, rate: float = 0.1) -> float:
    while state.epoch < epochs:
        state.optimizer.step()
        state.epoch += 1
        state.commit()
    return rate


def elastic(model: Net, optimizer: torch.optim.Optimizer) -> None:
    dataset = torch.utils.data.TensorDataset(torch.ones(4, 2))
    sampler = hvd.elastic.ElasticSampler(dataset, shuffle=False)
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, sampler=sampler)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, rollback=False)
    state.register_reset_callbacks([lambda: print("reset")])
    for batch, _ in enumerate(loader):
        sampler.record_batch(batch, 2)
    assert_type(train_elastic(state, 3, rate=0.2), float)
