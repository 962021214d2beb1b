"""What ``elastic.run`` does after a failed operation, for any framework."""


def operations(hvd, ones):
    """Operations by name, and one whose shapes differ between ranks. ``ones``: makes an array of this length."""
    return {
        "allreduce": lambda x: hvd.allreduce(x),
        "grouped_allreduce": lambda x: hvd.grouped_allreduce([x, x])[0],
        "allgather": lambda x: hvd.allgather(x),
        "broadcast": lambda x: hvd.broadcast(x, 0),
        "alltoall": lambda x: hvd.alltoall(x),
        "reducescatter": lambda x: hvd.reducescatter(x),
        "mismatch": lambda x: hvd.allreduce(ones(2 + hvd.rank()), name="mismatch"),
    }


def check_run(hvd, ones, make_state, step, value, compiled):
    """Training returns to the last commit when an operation fails, whichever it is.

    ``make_state``: a state with ``step=0``; ``step``: adds the number of ranks to what the state has; ``value``: reads
    it, as a list; ``compiled``: compiles an operation that is to fail, and waits for its result."""
    size, rank = hvd.size(), hvd.rank()
    for kind, operation in operations(hvd, ones).items():
        fail = compiled(operation)
        state, calls, resets = make_state(), [], []
        state.register_reset_callbacks([lambda r=resets: r.append(hvd.size())])

        @hvd.elastic.run
        def train(state, word, *, fail=fail, calls=calls, kind=kind):
            calls.append(state.step)
            while state.step < 4:
                step(state)
                if state.step == 2 and len(calls) == 1:
                    if rank == 0 and kind != "mismatch":
                        hvd.shutdown()
                        raise hvd.HorovodInternalError("made up")
                    fail(ones(2))
                    raise AssertionError(f"{kind} did not fail")
                state.step += 1
                if state.step % 2 == 0:
                    state.commit()
            return word

        assert train(state, kind) == kind
        assert (calls, resets) == ([0, 2], [size])
        assert value(state) == [4.0 * size], kind
