"""TorchState(rollback=False): processes keep their parameters after a failure, and take over the state of the one that
has got furthest."""

import re

import pytest
import torch

import horoplug.torch as hvd
from horoplug.base.log import logger
from horoplug.common.errors import HorovodInternalError
from horoplug.torch.elastic import state as torch_state
from horoplug.torch.elastic.progress import checksum
from tests.harness.support import ranks_fixture

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("aa", "aab")


def make():
    """A state whose parameter and momentum depend on the number of steps alone, if the ranks do not differ."""
    model = torch.nn.Linear(3, 2)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    return hvd.elastic.TorchState(model, optimizer, rollback=False, step=0)


def step(state, *, commit=True):
    """A step of this rank alone."""
    state.optimizer.zero_grad()
    state.model(torch.ones(1, 3)).sum().backward()
    state.optimizer.step()
    if commit:
        state.step += 1
        state.save()


def expected(steps):
    """The parameters and momenta after so many steps."""
    state = make()
    for _ in range(steps):
        step(state)
    return contents(state)


def contents(state):
    momenta = [state.optimizer.state[p].get("momentum_buffer") for p in state.model.parameters()]
    return [*(p.detach().clone() for p in state.model.parameters()), *momenta]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_commit_copies_neither_model_nor_optimizer(ranks, monkeypatch):
    def check():
        state = make()
        state.sync()
        model, optimizer = state._handlers["model"], state._handlers["optimizer"]
        assert model._saved is None
        assert optimizer._saved is None
        step(state)
        state.commit()
        before = contents(state)
        step(state)
        state.restore()
        assert state.step == 2
        assert not same(contents(state), before)

    ranks.run(check)


@pytest.mark.parametrize("ahead", ["first", "last", "all", "all but the first"])
def test_ranks_that_are_behind_take_over_the_state_of_one_that_is_ahead(ranks, ahead):
    def check():
        rank, last = hvd.rank(), hvd.size() - 1
        state = make()
        state.sync()
        for _ in range(3):
            step(state)
        who = {"first": [0], "last": [last], "all": range(last + 1)}
        if rank in who.get(ahead, range(1, last + 1)):
            step(state)
        state.restore()
        state.sync()
        assert same(contents(state), expected(4))
        assert state.step == 4
        # The next comparison finds nothing to do.
        calls = []
        state._take_over = lambda *args: calls.append(args)
        state.sync()
        assert calls == []

    ranks.run(check)


def test_step_that_only_some_ranks_have_made_and_none_has_committed_is_dropped(ranks):
    def check():
        state = make()
        state.sync()
        for _ in range(2):
            step(state)
        if hvd.rank() == 0:
            step(state, commit=False)
        state.restore()
        state.sync()
        assert same(contents(state), expected(2))
        assert state.step == 2

    ranks.run(check)


def test_step_that_all_ranks_have_made_and_none_has_committed_is_kept_with_a_warning(ranks):
    def check():
        said = []
        logger.warning = lambda text, *args: said.append(text % args)
        try:
            state = make()
            state.sync()
            step(state)
            step(state, commit=False)
            state.restore()
            state.sync()
        finally:
            del logger.warning
        assert same(contents(state), expected(2))
        assert state.step == 1
        assert [line for line in said if re.search("a step .* is repeated; call commit", line)]

    ranks.run(check)


def test_ranks_whose_parameters_differ_all_take_over_those_of_rank_0_with_a_warning(ranks):
    def check():
        said = []
        logger.warning = lambda text, *args: said.append(text % args)
        try:
            state = make()
            state.sync()
            step(state)
            if hvd.rank() == hvd.size() - 1:
                with torch.no_grad():
                    state.model.weight[0, 1] += 2**-20
            state.sync()
        finally:
            del logger.warning
        assert same(contents(state), expected(1))
        assert said == [
            "elastic: the parameters of the ranks differ; all take over those of rank 0"
        ]

    ranks.run(check)


def test_failure_while_a_state_is_taken_over_leaves_the_own_state(ranks):
    def check():
        state = make()
        state.sync()
        step(state)
        if hvd.rank() == 0:
            step(state)
        handler = state._handlers["optimizer"]
        receive = handler.sync

        def fail(root_rank=0):
            receive(root_rank)
            raise HorovodInternalError("made up")

        handler.sync = fail
        with pytest.raises(HorovodInternalError, match="made up"):
            state.sync()
        assert same(contents(state), expected(2 if hvd.rank() == 0 else 1))
        handler.sync = receive
        state.sync()
        assert same(contents(state), expected(2))
        assert state.step == 2

    ranks.run(check)


def test_training_goes_on_after_a_failure_that_a_hook_of_backward_has_raised(ranks):
    def check():
        model = torch.nn.Linear(3, 2)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        state = hvd.elastic.TorchState(model, optimizer, rollback=False, step=0)
        calls = []

        @hvd.elastic.run
        def train(state):
            calls.append(state.step)
            while state.step < 4:
                if state.step == 2 and len(calls) == 1:
                    if hvd.rank() == 0:
                        hvd.shutdown()
                        raise HorovodInternalError("made up")
                    with pytest.raises(HorovodInternalError):
                        hvd.allreduce(torch.ones(1))  # from now on, submissions are refused
                optimizer.zero_grad()
                state.model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                state.step += 1
                state.commit()

        train(state)
        assert calls == [0, 2]

    ranks.run(check)


def test_optimizer_that_is_assigned_later_is_followed(ranks):
    def check():
        state = make()
        state.sync()
        state.optimizer = torch.optim.SGD(state.model.parameters(), lr=0.1)
        step(state)
        if hvd.rank() == 0:
            step(state, commit=False)
        before = contents(state)[:2]
        state.restore()
        state.sync()
        if hvd.rank() != 0:
            assert same(contents(state)[:2], before)
        assert state.step == 1

    ranks.run(check)


def test_handler_that_knows_only_rank_0_is_refused(ranks):
    def check():
        class Mine(torch_state.StateHandler):
            def save(self):
                pass

            restore = sync = save

        registry = torch_state.get_handler_registry()
        torch_state.set_handler_registry([(dict, Mine), *registry])
        try:
            with pytest.raises(
                ValueError, match="the handler of 'table', a Mine, cannot take over"
            ):
                hvd.elastic.TorchState(table={}, rollback=False)
        finally:
            torch_state.set_handler_registry(registry)

    ranks.run(check)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64])
def test_checksum_depends_on_every_bit_and_place(dtype):
    for length in (1, 3, 8, 17):
        tensor = torch.arange(length).to(dtype)
        first = checksum([tensor])
        assert checksum([tensor.clone()]) == first
        for place in range(length):
            other = tensor.clone()
            data = other.view(torch.uint8)
            data[place * tensor.element_size()] ^= 1
            assert checksum([other]) != first
        if length > 1:
            exchanged = tensor.clone()
            exchanged[0], exchanged[-1] = tensor[-1], tensor[0]
            assert checksum([exchanged]) != first
    assert checksum([torch.zeros(0, dtype=dtype)]) == [0]
