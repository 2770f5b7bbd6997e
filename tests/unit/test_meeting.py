import threading

import torch.distributed as dist

from megatron_dynmo.elastic.meeting import Host, Parked


def parked_in_thread(store, rank, message, results):
    def wait():
        results[rank] = Parked(store, rank, message).wait(lambda s: threading.Event().wait(0.005))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_ranks_come_when_called():
    store, results = dist.HashStore(), {}
    host, silent = Host(store, writes=True), Host(store, writes=False)
    threads = [parked_in_thread(store, rank, 0, results) for rank in (1, 2)]
    # Rank 1 alone is wanted: rank 2 reads on and stays.
    for side in (host, silent):
        assert side.call([1], wait_s=5) == ()
        side.go({"iteration": 7})
    threads[0].join(5)
    assert results[1].state == {"iteration": 7} and 2 not in results
    assert results[1].message == host.message == silent.message == 2
    host.end()
    threads[1].join(5)
    assert results[2] is None


def test_a_missing_rank_is_noticed_and_the_others_stay():
    store, results = dist.HashStore(), {}
    host = Host(store, writes=True)
    thread = parked_in_thread(store, 1, 0, results)
    assert host.call([1, 2], wait_s=0.2) == (2,)
    host.off()
    assert host.call([1], wait_s=5) == ()
    host.go({"again": True})
    thread.join(5)
    assert results[1].state == {"again": True}


def test_ranks_that_exit_say_so():
    store = dist.HashStore()
    host = Host(store, writes=True)
    assert not host.have_left([1, 2], 1)
    Parked(store, 1, 0).leave(1)
    assert not host.have_left([1, 2], 1)
    Parked(store, 2, 0).leave(1)
    assert host.have_left([1, 2], 1) and not host.have_left([1, 2], 2)
