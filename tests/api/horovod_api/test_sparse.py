"""sparse_allreduce_async and sparse gradients."""

import horovod.torch as hvd
import pytest
import torch


def random_sparse(rows, key):
    torch.manual_seed(1000 * key + hvd.rank())
    dense = torch.rand(rows, 10)
    dense[dense < 0.8] = 0
    return dense.to_sparse()


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_sparse_allreduce_equals_a_dense_allreduce(op):
    number = getattr(hvd, op)
    tensors = [
        random_sparse(rows, key) for key, rows in enumerate([17, 32, 81, 12, 15, 23, 22] * 5)
    ]
    dense = [hvd.allreduce(tensor.to_dense(), op=number) for tensor in tensors]
    pending = [
        hvd.sparse_allreduce_async(tensor, op=number, name=str(n))
        for n, tensor in enumerate(tensors)
    ]
    for function, expected in zip(pending, dense, strict=True):
        assert callable(function)
        assert hvd.synchronize(function) is None  # as for every object that is not a handle
        output = function()
        assert output.is_sparse
        torch.testing.assert_close(output.to_dense(), expected, rtol=1e-6, atol=1e-6)


def test_sparse_allreduce_of_empty_tensors():
    empty = torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.long), torch.empty(0), (4, 5))
    output = hvd.sparse_allreduce_async(empty, name="empty", op=hvd.Sum)()
    assert output.to_dense().abs().sum() == 0
    assert output.shape == (4, 5)


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("kind", ["SparseAdam", "SGD"])
def test_optimizer_with_sparse_embedding_gradients(as_dense, kind):
    """The looked-up rows and their number differ between ranks."""
    torch.manual_seed(7)
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    reference = torch.nn.Embedding(10, 3, sparse=True)
    reference.load_state_dict(embedding.state_dict())
    inputs = [
        torch.tensor([[1, 2, 4, 5], [4, 3, 2, 9]])
        if rank == 0
        else torch.tensor([[1, 3, 4], [4, 7, 9]])
        for rank in range(hvd.size())
    ]
    kinds = {"SparseAdam": torch.optim.SparseAdam, "SGD": torch.optim.SGD}
    optimizer = kinds[kind](list(embedding.parameters()), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, sparse_as_dense=as_dense)
    plain = kinds[kind](list(reference.parameters()), lr=0.1)

    optimizer.zero_grad()
    embedding(inputs[hvd.rank()]).sum().backward()
    optimizer.step()

    sum(reference(rows).sum() for rows in inputs).div(hvd.size()).backward()
    plain.step()
    torch.testing.assert_close(embedding.weight, reference.weight)
