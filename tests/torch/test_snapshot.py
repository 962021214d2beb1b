"""Copies of states whose memory is kept: the same as ``copy.deepcopy``, whatever a state contains."""

import collections
import copy
import random
from unittest import mock

import pytest
import torch

from horoplug.torch.elastic.snapshot import Snapshot
from tests.harness.support import seed


def same(a, b):
    """Whether two states have the same structure, types and values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.layout is not torch.strided or a.is_quantized:
            return a.layout is b.layout and torch.equal(a.to_dense(), b.to_dense())
        kinds = [(each.dtype, each.shape, each.requires_grad) for each in (a, b)]
        return kinds[0] == kinds[1] and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def made_up(draw, depth=0):
    """A state with tensors of all kinds, and objects that are not tensors."""
    kind = draw.randrange(10 if depth < 3 else 6)
    shape = [draw.randrange(5) for _ in range(draw.randrange(4))]
    tensor = torch.randint(0, 99, shape).to(draw.choice(DTYPES))
    if kind < 3:
        return tensor
    if kind == 3:
        return draw.choice([tensor.t() if tensor.dim() == 2 else tensor, tensor.expand(3, *shape)])
    if kind == 4:
        needs_gradient = torch.ones(2, requires_grad=True)
        return draw.choice(
            [torch.eye(3).to_sparse(), needs_gradient, torch.nn.Parameter(needs_gradient)]
        )
    if kind == 5:
        return draw.choice([None, 1.5, "text", {3}, lambda: 0])
    parts = [made_up(draw, depth + 1) for _ in range(draw.randrange(5))]
    if kind == 6:
        return tuple(parts)
    if kind == 7:
        return parts
    pairs = zip("abcdefg", parts, strict=False)
    return collections.OrderedDict(pairs) if kind == 8 else dict(pairs)


def test_snapshot_is_the_state_when_it_was_saved():
    draw = random.Random(seed())
    torch.manual_seed(draw.randrange(1 << 30))
    snapshot = Snapshot()
    state = made_up(draw)
    for _ in range(300):
        if draw.random() < 0.5:
            state = made_up(draw)
        snapshot.save(state)
        expected = copy.deepcopy(state)
        assert same(snapshot.value(), expected)
        for tensor in all_tensors(state):
            tensor.zero_()
        assert same(snapshot.value(), expected)
        for tensor in all_tensors(snapshot.value()):  # the caller's own
            tensor.zero_()
        assert same(snapshot.value(), expected)


def all_tensors(state):
    """Those that can be changed in place."""
    if isinstance(state, torch.Tensor):
        return [] if state._is_view() or state.requires_grad else [state]
    parts = state.values() if isinstance(state, dict) else state
    if not isinstance(state, dict | list | tuple):
        return []
    return [tensor for part in parts for tensor in all_tensors(part)]


def trained(optimizer_of):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    model.tied = model[0].weight
    optimizer = optimizer_of(model.parameters())
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def memory_of(snapshot):
    return [copied.data_ptr() for copied in snapshot._copies]


def test_memory_of_copies_is_kept_while_the_state_keeps_its_shape():
    model, optimizer = trained(lambda parameters: torch.optim.Adam(parameters, lr=0.1))
    for owner in (model, optimizer):
        snapshot = Snapshot()
        snapshot.save(owner.state_dict())
        before = memory_of(snapshot)
        assert before
        optimizer.step()
        snapshot.save(owner.state_dict())
        assert memory_of(snapshot) == before
        assert same(snapshot.value(), owner.state_dict())


def test_models_and_optimizers_load_a_snapshot():
    model, optimizer = trained(lambda parameters: torch.optim.Adam(parameters, lr=0.1))
    states = model.state_dict(), optimizer.state_dict()
    expected = copy.deepcopy(states)
    snapshots = Snapshot(), Snapshot()
    for snapshot, state in zip(snapshots, states, strict=True):
        snapshot.save(state)
    optimizer.step()
    assert snapshots[0].value()._metadata == model.state_dict()._metadata
    for _ in range(2):
        model.load_state_dict(snapshots[0].value())
        optimizer.load_state_dict(snapshots[1].value())
        assert same((model.state_dict(), optimizer.state_dict()), expected)
        optimizer.step()  # changes the tensors that the optimizer was given


def test_tensors_that_share_memory_do_so_in_the_copy():
    base = torch.arange(6.0)
    state = {"all": base, "same": base.detach(), "part": base[2:4], "other": torch.zeros(2)}
    tied = {"a": state["other"], "b": state["other"].detach()}
    snapshot = Snapshot()
    for _ in range(2):
        snapshot.save([state, tied])
        found, others = snapshot.value()
        found["all"][2] = 9
        assert found["part"][0] == found["same"][2] == 9
        others["a"][0] = 5
        assert others["b"][0] == found["other"][0] == 5
        assert len(snapshot._copies) == 1


class Refuses:
    def __deepcopy__(self, memo):
        raise RuntimeError("cannot be copied")


def test_failed_save_leaves_the_copy_of_before():
    snapshot = Snapshot()
    weights = torch.ones(3)
    snapshot.save({"weights": weights, "object": 1})
    weights.fill_(2)
    with pytest.raises(RuntimeError, match="cannot be copied"):
        snapshot.save({"weights": weights, "object": Refuses()})
    assert same(snapshot.value(), {"weights": torch.ones(3), "object": 1})


def test_save_that_a_signal_interrupts_is_completed():
    """Otherwise a part of the tensors would be from this commit, and a part from the one before."""
    snapshot = Snapshot()
    state = [torch.full((2,), float(n)) for n in range(4)]
    snapshot.save(state)
    for tensor in state:
        tensor.add_(10)
    calls = []

    def copy_(target, source):
        calls.append(target)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(target, source)

    original = torch.Tensor.copy_
    with mock.patch.object(torch.Tensor, "copy_", copy_), pytest.raises(KeyboardInterrupt):
        snapshot.save(state)
    assert same(snapshot.value(), state)
