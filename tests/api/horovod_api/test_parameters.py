"""broadcast_parameters, broadcast_object and allgather_object."""

import collections

import horovod.torch as hvd
import pytest
import torch

from tests.api.horovod_api.matrix import equal

pytestmark = pytest.mark.shared_job


def network():
    """A network with different parameters on every rank and buffers of several dtypes."""
    torch.manual_seed(100 + hvd.rank())
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)
    )
    model[1].num_batches_tracked += hvd.rank()
    model[1].running_mean += hvd.rank()
    return model


def check_same_as_root(model, before, root):
    expected = hvd.broadcast_object(before, root)
    for name, tensor in model.state_dict().items():
        equal(tensor, expected[name])


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_of_a_state_dict(root):
    model = network()
    before = snapshot(model)
    assert hvd.broadcast_parameters(model.state_dict(), root_rank=root) is None
    check_same_as_root(model, before, root)


@pytest.mark.parametrize("kind", ["iterator", "list", "ordered dict"])
def test_broadcast_of_named_parameters(kind):
    model = network()
    before = hvd.broadcast_object(dict(snapshot(model)), 1)
    named = model.named_parameters()
    named = {"list": list, "ordered dict": collections.OrderedDict}.get(kind, lambda n: n)(named)
    hvd.broadcast_parameters(named, root_rank=1)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad
        equal(parameter.detach(), before[name])


def test_broadcast_skips_none_values():
    state = {"a": torch.full((2,), hvd.rank()), "b": None}
    hvd.broadcast_parameters(state, root_rank=1)
    equal(state["a"], torch.full((2,), 1))
    assert state["b"] is None


@pytest.mark.parametrize("wrong", [None, 5, torch.ones(3), "text"])
def test_invalid_parameters_are_refused(wrong):
    with pytest.raises(ValueError, match=r"\S"):
        hvd.broadcast_parameters(wrong, root_rank=0)


def test_dicts_in_different_orders():
    """The order of insertion of the dicts may differ between ranks."""
    names = ["a", "b", "c"]
    values = {name: torch.full((n + 1,), float(hvd.rank())) for n, name in enumerate(names)}
    if hvd.rank() % 2:
        values = dict(reversed(values.items()))
    hvd.broadcast_parameters(values, root_rank=1)
    for n, name in enumerate(names):
        equal(values[name], torch.ones(n + 1))


@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("name", [None, "my_object"])
def test_broadcast_object(root, name):
    expected = {"hello": 123, 0: [1, 2], "tensor": torch.arange(3)}
    got = hvd.broadcast_object(expected if hvd.rank() == root else {}, root_rank=root, name=name)
    assert got.keys() == expected.keys()
    assert (got["hello"], got[0]) == (123, [1, 2])
    equal(got["tensor"], torch.arange(3))


@pytest.mark.parametrize("obj", [None, "", [], 0, {"a": (1, 2.5, None)}, "x" * 100_000])
def test_broadcast_of_simple_objects(obj):
    assert hvd.broadcast_object(obj if hvd.rank() == 0 else "other") == obj


def test_broadcast_of_a_function():
    """cloudpickle also pickles functions that cannot be imported."""
    function = hvd.broadcast_object((lambda x: x + 40) if hvd.rank() == 0 else None)
    assert function(2) == 42


def test_allgather_object():
    mine = {"metric_val_1": hvd.rank()}
    if hvd.rank() == 1:
        mine["metric_val_2"] = 42
    expected = [{"metric_val_1": rank} for rank in range(hvd.size())]
    expected[1]["metric_val_2"] = 42
    assert hvd.allgather_object(mine) == expected
    assert hvd.allgather_object(mine, name="metrics") == expected


def test_allgather_of_objects_of_many_sizes():
    gathered = hvd.allgather_object("x" * (1000 * hvd.rank()))
    assert [len(text) for text in gathered] == [1000 * rank for rank in range(hvd.size())]
    assert hvd.allgather_object(None) == [None] * hvd.size()
