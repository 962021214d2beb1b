"""Every argument of the functions for PyTorch has an effect, or the users' guide says that it has none."""

import torch

import horoplug
import horoplug.torch as hvd
from tests.harness import operation_arguments
from tests.harness.arguments import Outcomes, ShownBy
from tests.harness.operation_arguments import array, unseen_by_all

pytest_plugins = ["tests.harness.jobs"]


def train(**options):
    """The parameters, and how their gradients are kept, after a step with an embedding and a dense layer."""
    torch.manual_seed(3)
    table, dense = torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(2, 1)
    rate = options.pop("optimizer", 0.1)
    dense_only = options.pop("dense_only", False)
    named = [*(() if dense_only else table.named_parameters(prefix="t")), *dense.named_parameters()]
    if "named_parameters" not in options:
        options["named_parameters"] = named
    optimizer = torch.optim.SGD([p for _, p in named], lr=rate)
    optimizer = hvd.DistributedOptimizer(optimizer, **options)
    x = torch.full((1, 2), hvd.rank() + 1 / 3) if dense_only else table(torch.tensor([hvd.rank()]))
    dense(x * (1 + hvd.rank() / 7)).square().sum().backward()
    optimizer.step()
    layouts = [str(p.grad.layout) for _, p in named]
    # Gradients in a bucket share its memory.
    memories = {p.grad.untyped_storage().data_ptr() for _, p in named if not p.grad.is_sparse}
    return [*(p.detach() for _, p in named), *layouts, len(memories)]


def of_dense(**options):
    return lambda: (train(dense_only=True), train(dense_only=True, **options))


def batch_norm(num_features=2, **options):
    layer = hvd.SyncBatchNorm(num_features, **options)
    y = layer(torch.arange(8.0).reshape(4, 2) * (hvd.rank() + 1))
    return [y.detach(), *layer.state_dict().values()]


def of_state(optimizer=2.0, root_rank=0, **options):
    parameter = torch.nn.Parameter(torch.ones(1))
    made = torch.optim.SGD([parameter], lr=(hvd.rank() + 1) * optimizer, momentum=0.5)
    hvd.broadcast_optimizer_state(made, root_rank, **options)
    return made.param_groups[0]["lr"]


def gradients_of_sparse_embeddings():
    """``model`` tells which parameters have sparse gradients, which are not made dense ones of zeros."""
    found = []
    for given in (False, True):
        model = torch.nn.Embedding(3, 1, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hvd.broadcast_optimizer_state(optimizer, 0, model=model if given else None)
        found.append(model.weight.grad is None)
    return tuple(found)


def sparse(value=1.0, name="sparse", op=hvd.Average, **options):
    tensor = torch.sparse_coo_tensor([[hvd.rank()]], [value], (2,))
    return hvd.sparse_allreduce_async(tensor, name, op, **options)().to_dense()


def check():
    unregistered = hvd.ProcessSet([0])
    rows = {
        "DistributedOptimizer": {
            "optimizer": 0.2,
            "named_parameters": [],
            "compression": hvd.Compression.fp16,
            "backward_passes_per_step": ShownBy("tests/torch/test_optimizer.py"),
            "op": hvd.Sum,
            "gradient_predivide_factor": ShownBy("tests/torch/test_optimizer.py"),
            "num_groups": -1,
            "groups": -1,
            "sparse_as_dense": ShownBy("tests/torch/test_optimizer_cases.py"),
            "process_set": unregistered,
            "gradient_as_bucket_view": Outcomes(of_dense(gradient_as_bucket_view=True)),
        },
        "SyncBatchNorm": {
            "num_features": 3,
            "eps": 1.0,
            "momentum": 0.5,
            "affine": False,
            "track_running_stats": False,
            "process_set": unregistered,
        },
        "broadcast_parameters": {
            "params": [torch.full((1,), 5.0)],
            "root_rank": 1,
            "process_set": unregistered,
        },
        "broadcast_optimizer_state": {
            "optimizer": 3.0,
            "root_rank": 1,
            "model": Outcomes(gradients_of_sparse_embeddings),
            "process_set": unregistered,
        },
        "sparse_allreduce_async": {
            "tensor": 2.0,
            "name": ShownBy("tests/torch/test_ops.py"),
            "op": hvd.Sum,
            "process_set": unregistered,
        },
    }

    def tensor():
        return torch.from_numpy(array())

    def parameters(params=None, root_rank=0, **options):
        params = params or [torch.full((1,), float(hvd.rank()))]
        hvd.broadcast_parameters(params, root_rank, **options)
        return params

    runs = {
        "DistributedOptimizer": train,
        "SyncBatchNorm": batch_norm,
        "broadcast_parameters": parameters,
        "broadcast_optimizer_state": of_state,
        "sparse_allreduce_async": sparse,
    }
    return operation_arguments.check(hvd, tensor, horoplug, rows, runs=runs)


def test_every_argument_has_an_effect(pool):
    with pool.ranks(2) as job:
        assert unseen_by_all(job.run(check)) == []
