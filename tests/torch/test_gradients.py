"""Gradients of the operations, compared with explicit formulas for each rule of horoplug/torch/autograd.py."""

import functools

import pytest
import torch

import horoplug.torch as hvd
from tests.harness.cases import gradient_test
from tests.harness.gradient_reference import GROUPED, KINDS, case
from tests.harness.support import ranks_fixture, seed

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "aa", "ab", "aab", "aaaa")


def check_allreduce_gradient(key):
    size, rank = hvd.size(), hvd.rank()
    torch.manual_seed(key)
    weights = torch.randn(size, 5, 3)  # the output's gradient on each rank
    for op, grouped in [(o, g) for o in (hvd.Average, hvd.Sum) for g in (False, True)]:
        x = torch.randn(5, 3, requires_grad=True)
        if grouped:
            y, _ = hvd.grouped_allreduce([x, x.detach()], op=op, prescale_factor=2.0)
        else:
            y = hvd.allreduce(x, op=op, prescale_factor=2.0)
        assert y.grad_fn is not None
        (y * weights[rank]).sum().backward()
        expected = 2 * (weights.mean(0) if op == hvd.Average else weights.sum(0))
        torch.testing.assert_close(x.grad, expected)
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="op=Max has no gradient"):
        hvd.allreduce(x, op=hvd.Max).sum().backward()


def check_allgather_gradient(key):
    size, rank = hvd.size(), hvd.rank()
    torch.manual_seed(key)
    total = size * (size + 1) // 2
    weights = torch.randn(size, total, 3)
    start = rank * (rank + 1) // 2
    for grouped in (False, True):
        x = torch.randn(rank + 1, 3, requires_grad=True)
        y = hvd.grouped_allgather([x])[0] if grouped else hvd.allgather(x, name="g")
        (y * weights[rank]).sum().backward()
        torch.testing.assert_close(x.grad, weights.mean(0)[start : start + rank + 1])
    x = torch.tensor(1.0, requires_grad=True)
    (hvd.allgather(x) * torch.arange(size)).sum().backward()
    assert x.grad.shape == ()
    assert x.grad == rank


def check_broadcast_gradient(key):
    size, rank = hvd.size(), hvd.rank()
    torch.manual_seed(key)
    weights = torch.randn(size, 4)
    for root in range(size):
        x = torch.randn(4, requires_grad=True)
        (hvd.broadcast(x, root) * weights[rank]).sum().backward()
        torch.testing.assert_close(x.grad, weights.mean(0) if rank == root else torch.zeros(4))
        x = torch.zeros(2, requires_grad=True)
        hvd.broadcast(x, root).log().sum().backward()  # the gradient is infinite
        assert x.grad.tolist() == ([float("inf")] * 2 if rank == root else [0, 0])


def check_alltoall_gradient(key):
    """The gradient of a row comes from the rank to which the row was sent."""
    size, rank = hvd.size(), hvd.rank()
    splits = [(rank + r) % 3 for r in range(size)]
    x = torch.randn(sum(splits), 2, requires_grad=True)
    y, received = hvd.alltoall(x, splits=torch.tensor(splits))
    assert not received.requires_grad
    (y * (rank + 1)).sum().backward()
    where = torch.tensor([r + 1.0 for r, n in enumerate(splits) for _ in range(n)])
    torch.testing.assert_close(x.grad, where[:, None].expand(-1, 2))
    x = torch.randn(size + 2, requires_grad=True)
    (hvd.alltoall(x, [1] * size)[0] * (rank + 1)).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([*range(1, size + 1), 0, 0]).float())
    x = torch.randn(size, requires_grad=True)
    (hvd.alltoall(x) * (rank + 1)).sum().backward()
    torch.testing.assert_close(x.grad, torch.arange(size) + 1.0)


def check_reducescatter_gradient(key):
    size, rank = hvd.size(), hvd.rank()
    for op, grouped in [(o, g) for o in (hvd.Average, hvd.Sum) for g in (False, True)]:
        x = torch.randn(size + 1, 2, requires_grad=True)
        factors = {"op": op, "prescale_factor": 2.0, "postscale_factor": 3.0}
        scatter = hvd.grouped_reducescatter if grouped else hvd.reducescatter
        y = scatter([x], **factors)[0] if grouped else scatter(x, **factors)
        (y * (rank + 1)).sum().backward()
        owner = torch.tensor([1.0, *range(1, size + 1)])
        factor = 6.0 * (size if op == hvd.Sum else 1)
        torch.testing.assert_close(x.grad, (owner * factor)[:, None].expand(-1, 2))


def check_second_gradient():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = hvd.allreduce(x, op=hvd.Average) ** 3
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    first.sum().backward()
    torch.testing.assert_close(x.grad, 6 * x.detach())


def check_no_gradient():
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert hvd.allreduce(x).grad_fn is None
    for handle in (hvd.allreduce_async(x), hvd.allgather_async(x)):
        assert hvd.synchronize(handle).grad_fn is None


test_gradient = pytest.mark.short("aa*")(
    gradient_test(
        check_allreduce_gradient,
        check_allgather_gradient,
        check_broadcast_gradient,
        check_alltoall_gradient,
        check_reducescatter_gradient,
    )
)


def test_second_derivatives(ranks):
    ranks.run(check_second_gradient)


def test_operations_without_gradient(ranks):
    ranks.run(check_no_gradient)


def check_complex_gradients(key, dtype):
    """First and second derivatives, with PyTorch's conventions; some gradients have the conjugate or negative bit."""
    size, rank = hvd.size(), hvd.rank()
    for kind in KINDS:
        values = case(kind, size, key, dtype.is_complex)

        def one(x, kind=kind):
            return getattr(hvd, kind.operation)(x, **kind.options)

        def of_group(x, kind=kind):
            # Beside tensors without gradients, whose dtypes make them operations of their own.
            others = [] if "op" in kind.options else [torch.ones(2, dtype=torch.bool)]
            group = [*others, torch.arange(2 * size), x]
            return getattr(hvd, f"grouped_{kind.operation}")(group, **kind.options)[-1]

        x, direction = (
            torch.tensor(of_all[rank], dtype=dtype) for of_all in (values.inputs, values.directions)
        )
        factor, square = (torch.tensor(of_all[rank]) for of_all in (values.factors, values.squares))
        for operation in (one, of_group) if kind.operation in GROUPED else (one,):
            x = x.detach().requires_grad_()
            y = operation(x)
            loss = (factor * y + square * y * y.conj() / 2).real.sum()
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            (gradient * direction.conj()).real.sum().backward()
            close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
            close(gradient.resolve_conj(), torch.tensor(values.gradients[rank], dtype=dtype))
            close(x.grad.resolve_conj(), torch.tensor(values.second[rank], dtype=dtype))
            # A gradient with the conjugate bit, or with the negative bit.
            lazy = (factor * (1 if dtype.is_complex else 1j)).conj()
            lazy = lazy if dtype.is_complex else lazy.imag
            assert lazy.is_conj() or lazy.is_neg()
            plain = lazy.resolve_conj().resolve_neg()
            y = operation(x)
            found = [
                torch.autograd.grad(y, x, each, retain_graph=True)[0] for each in (lazy, plain)
            ]
            close(*found)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float64], ids=["complex", "real"])
def test_gradients_match_central_differences(pool, dtype):
    with pool.ranks(2) as job:
        job.run(check_complex_gradients, seed(), dtype)
