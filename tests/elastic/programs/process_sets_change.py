import os
import random
import signal
import sys
import threading

import numpy as np

import horoplug as hvd
from horoplug.common.elastic import ObjectState, initialize_again, run_fn
from horoplug.common.objects import allgather_object, broadcast_object
from horoplug.common.process_sets import _get_process_set_ids_and_ranks
from tests.harness.elastic_process import ME, say

NUMBER, VICTIMS = int(sys.argv[1]), set(map(int, sys.argv[2:]))
if ME in VICTIMS:
    seconds = random.Random(NUMBER * 100 + ME).uniform(0, 0.5)
    timer = threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGKILL])
    timer.daemon = True


def known():
    return {number: tuple(ranks) for number, ranks in _get_process_set_ids_and_ranks().items()}


hvd.init()
state = ObjectState(broadcast_object, hvd.rank, step=0)


def train(state):
    if ME in VICTIMS and timer.ident is None:
        timer.start()
    own = {ranks: hvd.add_process_set(ranks) for number, ranks in known().items() if number}
    while state.step < 30 or hvd.size() < 4 or VICTIMS & set(allgather_object(ME)):
        draw = random.Random(NUMBER + state.step)
        ranks = tuple(sorted(draw.sample(range(hvd.size()), draw.randint(1, hvd.size() - 1))))
        if ranks in own:
            assert hvd.remove_process_set(own.pop(ranks))
        else:
            own[ranks] = hvd.add_process_set(ranks)
        for ranks, each in own.items():
            if each.included():
                total = hvd.allreduce(np.ones(1), op=hvd.Sum, name=f"set {ranks}", process_set=each)
                assert total == len(ranks) == each.size()
        sets = allgather_object((known(), sorted(own)))
        assert sets == sets[:1] * len(sets), sets
        state.step += 1
        state.commit()


run_fn(train, initialize_again)(state)
say("done", ME, sorted(known().values()))
