"""The ranks of one peer as processes, each command with a time limit: a hang, a crash or an error is an answer, not the end."""

import atexit
import multiprocessing
import multiprocessing.connection
import signal
import socket
import time

import worker

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "oracle"])  # loaded once, not by every rank


class Failure(Exception):
    """kind: "error", "not offered", "crash" or "hang"."""

    def __init__(self, kind, text):
        super().__init__(text)
        self.kind = kind


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Group:
    def __init__(self, peer, case, folder, oracle="", paths=None, timeout=None, start_limit=120.0):
        self.ranks, self.alive = case.ranks, True
        self.log = folder / "logs" / f"{peer} {case.name}.log".replace(" ", "-")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "GLOO_SOCKET_IFNAME": "lo", "RINGSPAN_TUNE_FILE": ""}
        port = free_port()
        self.processes, self.connections = [], []
        atexit.register(self.end)  # in whatever way the program ends, before multiprocessing waits there for its processes
        for rank in range(case.ranks):
            setting = {"peer": peer, "case": case.to_json(), "rank": rank, "ranks": case.ranks, "port": port, "timeout": timeout,
                       "oracle": str(oracle), "paths": paths or {}, "environment": environment}  # fmt: skip
            ours, theirs = _context.Pipe()
            process = _context.Process(target=worker.main, args=(setting, theirs, str(self.log)), daemon=False)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)
        self.read_all(start_limit)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        self.alive = False
        atexit.unregister(self.end)
        for process in self.processes:
            process.kill()  # also when stopped
        for process, connection in zip(self.processes, self.connections):
            process.join()
            connection.close()

    def send(self, command):
        for connection in self.connections:
            try:
                connection.send(command)
            except OSError:
                pass  # the reply tells

    def lines(self, limit, wanted):
        """Yields (rank, reply), or (rank, None) for one that ended, until `limit` seconds have passed; `wanted`: ranks to listen to."""
        end = time.monotonic() + limit
        waiting = {self.connections[rank]: rank for rank in wanted}
        while waiting and (left := end - time.monotonic()) > 0:
            for connection in multiprocessing.connection.wait(list(waiting), left):
                rank = waiting[connection]
                try:
                    reply = connection.recv()
                except (EOFError, ConnectionResetError):
                    reply = None
                    del waiting[connection]
                yield rank, reply

    def read_all(self, limit):
        """The replies of all ranks; after the first failure the others get 5 more seconds."""
        replies, kinds, texts = [None] * self.ranks, {}, {}
        missing = set(range(self.ranks))
        begin, patience = time.monotonic(), limit
        while missing:
            left = begin + patience - time.monotonic()
            got = next(self.lines(left, sorted(missing)), None) if left > 0 else None
            if got is None:
                break
            rank, reply = got
            missing.discard(rank)
            replies[rank] = reply
            if reply is None:
                self.processes[rank].join()
                code = self.processes[rank].exitcode
                name = signal.Signals(-code).name if code < 0 else f"exit {code}"
                kinds[rank], texts[rank] = "crash", f"process ended: {name}; {self.last_words()}"
            elif "failed" in reply:
                kinds[rank], texts[rank] = reply["failed"], reply["error"]
            if kinds and patience == limit:
                patience = time.monotonic() - begin + 5.0
        if not kinds and not missing:
            return replies
        consistent = not missing and all(kind in ("error", "not offered") for kind in kinds.values()) and len(kinds) == self.ranks
        if not consistent:
            self.end()
        if not kinds:
            raise Failure("hang", f"no answer from rank {', '.join(map(str, sorted(missing)))} in {limit:.0f} s")
        first = next((rank for rank, kind in kinds.items() if kind == "crash"), next(iter(kinds)))  # the others' errors follow from it
        others = f" (rank {', '.join(map(str, sorted(missing)))} went on waiting)" if missing else ""
        raise Failure(kinds[first], texts[first] + others)

    def last_words(self):
        lines = [line for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "no message"

    def ask(self, limit, **command):
        self.send(command)
        return self.read_all(limit)
