"""Ranks that are processes of torch.distributed: messages by isend and irecv on the user's group.

The C++ side (TorchTransport) keeps requests and deadlines. Here bytes are handed to the process group, threads wait for its works
(gloo's cannot be polled), and one more thread watches the group's store: it shows there that this rank is making progress, looks for
signs of life of the ranks that are being waited for, and passes errors on, so that one rank's error ends the others' waiting.
"""

import atexit
import contextlib
import datetime
import queue
import threading
import time
import weakref

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401  imported later, its functions keep the group that is there by then as a default

from .. import _core
from ..errors import CommError, InvalidArgument, Unsupported

_END_TAG = (1 << 30) + 1  # of a message that nobody sends; those that are sent have 30 bits
_NO_MEMBER = "this process is not a member of the group; only members may call attention on it"
_QUIET = 0.3  # seconds without any message after which the store is asked about the others


def _store_of(group):
    """The group's store, or None: then only messages are signs of life."""
    try:
        if hasattr(group, "get_group_store"):
            return group.get_group_store()
        return dist.distributed_c10d._get_process_group_store(group)
    except Exception:  # a private interface of torch
        return None


def _backend_of(group):
    try:
        return group._get_backend(torch.device("cpu")).name()
    except (RuntimeError, ValueError):
        raise Unsupported(
            "the process group has no backend for CPU tensors, over which ringspan's ranks talk, also where NCCL moves their messages; "
            'make it with init_process_group("gloo"), or "cpu:gloo,cuda:nccl" where CUDA needs nccl'
        ) from None


class _Refused:
    """In place of the work of a message that the group did not take, as to a peer whose connection is lost."""

    def __init__(self, error):
        self.error = error

    def wait(self):
        raise self.error


def _hand(post, tensor, peer, tag):
    try:
        return post([tensor], peer, tag)
    except RuntimeError as error:
        return _Refused(error)


class _Waiter(threading.Thread):
    """Waits for the works to or from one peer, in order: within a pair and a direction they complete in order."""

    def __init__(self, owner, name):
        super().__init__(name=name, daemon=True)
        self.works = queue.SimpleQueue()
        self.owner = weakref.ref(owner)
        self.core = owner.core

    def run(self):
        while (item := self.works.get()) is not None:
            work, tensor, message = item
            try:
                work.wait()
            except Exception as error:
                owner = self.owner()
                told = owner.look_for_abort() if owner is not None else None
                if told is None:
                    self.core.message_failed(message, str(error).splitlines()[0] if str(error) else type(error).__name__)
                continue
            self.core.completed(message)
            del work, tensor, item


class Transport:
    """One rank's end of a group. `core` is the communicator that the library drives."""

    def __init__(self, group):
        # Not kept alive: destroy_process_group() must end the group and its threads, which torch's own exit relies on.
        self._group = weakref.ref(group, lambda _, ref=weakref.ref(self): ref() and ref().close())
        self.executor = None  # what computes over this transport; released with the group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise InvalidArgument(_NO_MEMBER)
        self.backend = _backend_of(group)
        self.deadline = 60.0
        self.lock = threading.Lock()
        self._waiters = {}
        self._global = [dist.get_global_rank(group, peer) for peer in range(self.size)]
        self._groups_store = _store_of(group)  # until the watcher has a connection of its own
        self._store = None
        self._abort = None  # what to tell the others
        self._failed = False
        self._end = None  # after a failure: (work, buffer) by which close() ends the waiting of all works
        self._wake = queue.SimpleQueue()  # its put() may be called by the garbage collector, unlike Event.set()
        self._closed = False
        self._watcher = None
        ref = weakref.WeakMethod(self._post), weakref.WeakMethod(self._tell)
        self.core = _core.TorchTransport(self.rank, self.size, lambda batch: ref[0]()(batch), lambda text: ref[1]()(text))

    @property
    def group(self):
        group = self._group()
        if group is None:
            raise CommError("the process group was destroyed")
        return group

    # ---- called by the core, with the GIL; neither may wait for a peer

    def _post(self, batch):
        if self._watcher is None and self._groups_store is not None:
            self._watcher = threading.Thread(target=_watch, args=(weakref.ref(self),), name="ringspan-watch", daemon=True)
            self._watcher.start()
        tensors = [torch.frombuffer(memory, dtype=torch.uint8) for _, _, memory, _, _ in batch]
        if self.backend == "gloo":
            group = self.group
            works = [
                _hand(group.send if send else group.recv, tensor, peer, tag)
                for (send, peer, _, tag, _), tensor in zip(batch, tensors)
            ]
        else:
            works = dist.batch_isend_irecv([
                dist.P2POp(dist.isend if send else dist.irecv, tensor, self._global[peer], self.group, tag)
                for (send, peer, _, tag, _), tensor in zip(batch, tensors)
            ])  # fmt: skip
            if len(works) < len(batch):  # coalesced: one work for all
                works = works * len(batch)
        for (send, peer, _, _, message), tensor, work in zip(batch, tensors, works):
            self._waiter(send, peer).works.put((work, tensor, message))

    def _tell(self, text):
        self._abort = text
        self._failed = True
        if self.backend == "gloo" and self.size > 1:
            buffer = torch.empty(1, dtype=torch.uint8, device="cpu")  # whatever torch's default is
            with contextlib.suppress(RuntimeError, CommError):  # a lost connection has ended the waiting, or the group is gone
                self._end = (self.group.recv([buffer], (self.rank + 1) % self.size, _END_TAG), buffer)
        self._wake.put(None)

    def _waiter(self, send, peer):
        waiter = self._waiters.get((send, peer))
        if waiter is None:
            waiter = self._waiters[send, peer] = _Waiter(self, f"ringspan-{'to' if send else 'from'}-{peer}")
            waiter.start()
        return waiter

    # ---- the store

    def look_for_abort(self):
        """Passes on what another rank said before it failed; returns it."""
        try:
            if self._closed or self._store is None or not self._store.check(["abort"]):
                return None
            text = self._store.get("abort").decode()
        except Exception:  # the rank that holds the store is gone
            return None
        self.core.told_by_peer(text)
        return text

    def close(self):
        """Ends the threads and lets go of plans and arenas."""
        if self._closed:  # at exit, and then the group ends while the interpreter takes modules apart
            return
        self._closed = True
        self.executor = None
        self._wake.put(None)
        threads = list(self._waiters.values())
        for waiter in threads:
            waiter.works.put(None)
        if self._end is not None:  # gloo ends every wait of a group in which one ran into its timeout
            with contextlib.suppress(RuntimeError):
                self._end[0].wait(datetime.timedelta(milliseconds=1))
            self._end = None
        if self._watcher is not None:
            threads.append(self._watcher)
        # Where all is well each thread comes to its end, however slow the machine: one that comes back from torch while the
        # interpreter goes down ends the process with an abort.
        end = time.monotonic() + (2.0 if self._failed else 20.0)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        self._store = self._groups_store = None  # connections, which last as long as anything refers to them


def _connect(reference):
    """Gives the transport a connection of its own to the group's store. Where the rank that holds the store is gone that waits
    for as long as torch's store does, which knows no deadline of ours."""
    transport = reference()
    if transport is None or transport._closed:
        return False
    store, transport._groups_store = transport._groups_store, None
    del transport
    try:
        store = dist.PrefixStore("ringspan", store.clone() if hasattr(store, "clone") else store)
    except Exception:  # it cannot be cloned, or nobody answers
        return False
    transport = reference()
    if transport is None or transport._closed:
        return False
    transport._store = store
    return True


def _watch(reference):
    if not _connect(reference):
        return
    calls = None
    beats = {}
    while True:
        transport = reference()
        if transport is None or transport._closed:
            return
        store, core, wake = transport._store, transport.core, transport._wake
        interval = min(1.0, transport.deadline / 8)
        try:
            if transport._abort is not None:
                text, transport._abort = transport._abort, None
                if not store.check(["abort"]):
                    store.set("abort", text)
            now = core.calls
            if now != calls:  # this rank is in ringspan and moves on
                calls = now
                store.add(f"alive{transport.rank}", 1)
            if core.quiet_seconds > _QUIET:
                for peer in core.outstanding_peers():
                    beat = store.add(f"alive{peer}", 0)
                    if beats.get(peer) not in (None, beat):
                        core.peer_alive(peer)
                    beats[peer] = beat
                if core.outstanding_peers():
                    transport.look_for_abort()
                    interval = min(interval, 0.25)
        except Exception:  # the store is gone: deadlines go on without it
            interval = 1.0
        if transport._closed:
            return
        del transport, store, core
        with contextlib.suppress(queue.Empty):
            wake.get(timeout=interval)


_transports = {}
_transports_lock = threading.RLock()  # a signal's handler, or a finalizer, may ask again while its thread holds it


@atexit.register
def _close_all():
    # A thread that comes back from torch while the interpreter goes down ends the process with an abort.
    with _transports_lock:
        for transport in _transports.values():
            transport.close()
        _transports.clear()


def transport_of(name):
    """The transport of the group of that name; made when it is first needed."""
    group = group_named(name)
    with _transports_lock:
        transport = _transports.get(name)
        if transport is None or transport._group() is not group:  # destroyed, and made anew under the old name
            if transport is not None:
                transport.close()
            for gone in [known for known, transport in _transports.items() if transport._closed]:
                del _transports[gone]
            transport = _transports[name] = Transport(group)
        return transport


def open_transports():
    with _transports_lock:
        return [transport for transport in _transports.values() if not transport._closed]


def group_of(group):
    """A process group, from one or from a one-dimensional DeviceMesh."""
    if isinstance(group, dist.ProcessGroup):
        return group
    outside = dist.GroupMember.NON_GROUP_MEMBER  # what new_group() returns to those
    if isinstance(group, type(outside)) and group == outside:
        raise InvalidArgument(_NO_MEMBER)
    if hasattr(group, "get_group"):
        if getattr(group, "ndim", 1) != 1:
            raise InvalidArgument(f"the DeviceMesh has {group.ndim} dimensions; give one of them: mesh['name']")
        return group.get_group()
    return group


def group_named(name):
    try:
        return dist.distributed_c10d._resolve_process_group(name)
    except RuntimeError:
        raise CommError("the process group was destroyed") from None


def name_of(group):
    """The name by which the ops find the group again."""
    if isinstance(group, dist.ProcessGroup):
        return group.group_name
    name = getattr(group, "group_name", None)
    if not isinstance(name, str):
        raise InvalidArgument(f"group ({type(group).__name__}) must be a torch.distributed process group or a DeviceMesh")
    return name
