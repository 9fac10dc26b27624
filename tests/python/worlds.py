"""Ranks as processes: a function is run by every one of them, in a gloo group over loopback, and its results come back.

Processes are forked from a server that has imported torch and nothing else, so they start within milliseconds and no thread of
pytest is in them. Whatever happens, none is left behind.
"""

import multiprocessing
import os
import pickle
import queue
import socket
import time
import traceback

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "ringspan.torch"])


class RankFailed(AssertionError):
    pass


def _main(rank, ranks, port, listener, results, body, args):
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        own = {"is_master": True, "master_listen_fd": listener.detach()} if listener is not None else {}
        dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, ranks, **own), rank=rank, world_size=ranks)
        value = body(rank, ranks, *args)
        results.put((rank, "value", pickle.dumps(value)))
        succeeded = True
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        results.put((rank, "error", pickle.dumps((type(error).__name__, str(error), text))))
        succeeded = False
    results.close()
    results.join_thread()
    try:
        if succeeded:
            dist.barrier()  # nobody leaves while others still need it; where one failed the others shall notice
    except RuntimeError:
        pass
    os._exit(0)  # threads of gloo may wait for ranks that failed


def try_ranks(ranks, body, *args, timeout=600.0, missing=()):
    """[(kind, value)] by rank: ("value", what the body returned), ("error", (class, message, traceback)) or ("gone", None).

    Returns when all ranks but those in `missing`, which the test kills or stops, have ended.
    """
    results = _context.Queue()
    listener = socket.create_server(("127.0.0.1", 0))  # rank 0 inherits it: nobody else can take the port in between
    port = listener.getsockname()[1]
    processes = [
        _context.Process(target=_main, args=(r, ranks, port, None if r else listener, results, body, args), daemon=True)
        for r in range(ranks)
    ]
    outcomes = [("gone", None)] * ranks
    awaited = set(range(ranks)) - set(missing)
    try:
        for process in processes:
            process.start()
        end = time.monotonic() + timeout
        while awaited and time.monotonic() < end:
            try:
                rank, kind, value = results.get(timeout=0.2)
            except queue.Empty:
                dead = {r for r in awaited if processes[r].exitcode is not None}
                if dead and results.empty():
                    awaited -= dead
                continue
            outcomes[rank] = (kind, pickle.loads(value))
            awaited.discard(rank)
        if awaited:
            told = "".join(f"\nrank {r}: {value[2]}" for r, (kind, value) in enumerate(outcomes) if kind == "error")
            raise RankFailed(f"ranks {sorted(awaited)} of {ranks} still run after {timeout} s{told}")
    finally:
        listener.close()
        for process in processes:
            if process.pid is not None:
                process.join(timeout=0.0 if awaited or missing else 5.0)
                if process.exitcode is None:
                    process.kill()  # also when stopped
                    process.join()
    return outcomes


def run_ranks(ranks, body, *args, timeout=600.0):
    """What the body returned, by rank; fails with the traceback of the first rank that raised."""
    outcomes = try_ranks(ranks, body, *args, timeout=timeout)
    for rank, (kind, value) in enumerate(outcomes):
        if kind != "value":
            raise RankFailed(f"rank {rank} of {ranks}: " + (value[2] if kind == "error" else "the process died"))
    return [value for _, value in outcomes]
