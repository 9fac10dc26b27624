"""The ranks of one peer as processes, each command with a time limit: a hang, a crash or an error is an answer, not the end."""

import json
import os
import selectors
import signal
import socket
import subprocess
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


class Failure(Exception):
    """kind: "error", "not offered", "crash" or "hang"; replies: what each rank said, None where nothing."""

    def __init__(self, kind, text, replies=()):
        super().__init__(text)
        self.kind, self.replies = kind, list(replies)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Group:
    def __init__(self, python, peer, case, folder, oracle="", paths=None, timeout=None, start_limit=90.0):
        self.name, self.ranks = f"{peer} {case.name}", case.ranks
        environment = dict(os.environ, OMP_NUM_THREADS=str(case.threads), MKL_NUM_THREADS=str(case.threads), TOKENIZERS_PARALLELISM="false",
                           TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"), GLOO_SOCKET_IFNAME="lo")  # fmt: skip
        port = free_port()
        self.log = folder / "logs" / f"{self.name.replace(' ', '-')}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.processes, self.buffers, self.alive = [], [b""] * case.ranks, True
        with open(self.log, "w", encoding="utf-8") as log:
            for rank in range(case.ranks):
                setting = {"peer": peer, "case": case.to_json(), "rank": rank, "ranks": case.ranks, "port": port, "timeout": timeout,
                           "oracle": str(oracle), "paths": paths or {}}  # fmt: skip
                self.processes.append(subprocess.Popen([python, str(HERE / "worker.py"), json.dumps(setting)], stdin=subprocess.PIPE,
                                                       stdout=subprocess.PIPE, stderr=log, env=environment, cwd=folder))  # fmt: skip
        self.read_all(start_limit)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        self.alive = False
        for process in self.processes:
            process.kill()  # also when stopped
        for process in self.processes:
            process.wait()
            process.stdin.close()
            process.stdout.close()

    def send(self, command):
        for process in self.processes:
            try:
                process.stdin.write((json.dumps(command) + "\n").encode())
                process.stdin.flush()
            except OSError:
                pass  # the reply tells

    def lines(self, limit, wanted):
        """Yields (rank, reply), or (rank, None) for one that ended, until `limit` seconds have passed; `wanted`: ranks to listen to."""
        end = time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            for rank in wanted:
                selector.register(self.processes[rank].stdout, selectors.EVENT_READ, rank)
            while True:
                for rank in sorted({key.data for key in selector.get_map().values()}):
                    while b"\n" in self.buffers[rank]:
                        line, self.buffers[rank] = self.buffers[rank].split(b"\n", 1)
                        yield rank, json.loads(line)
                left = end - time.monotonic()
                if left <= 0 or not selector.get_map():
                    return
                for key, _ in selector.select(left):
                    data = os.read(key.fd, 65536)
                    if data:
                        self.buffers[key.data] += data
                    else:
                        selector.unregister(key.fileobj)
                        yield key.data, None

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
                code = self.processes[rank].wait()
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
            raise Failure("hang", f"no answer from rank {', '.join(map(str, sorted(missing)))} in {limit:.0f} s", replies)
        first = next((rank for rank, kind in kinds.items() if kind == "crash"), next(iter(kinds)))  # the others' errors follow from it
        others = f" (rank {', '.join(map(str, sorted(missing)))} went on waiting)" if missing else ""
        raise Failure(kinds[first], texts[first] + others, replies)

    def last_words(self):
        lines = [line for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "no message"

    def ask(self, limit, **command):
        self.send(command)
        return self.read_all(limit)
