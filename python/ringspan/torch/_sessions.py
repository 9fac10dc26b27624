"""From calls to problems, plans and sessions, on one rank, as simulated ranks, or as one rank of a group.

Sessions hold a plan and its arena. They are kept for the latest problems and used again; what backward needs of forward besides
tensors leaves the session as a tensor (`saved`), so that the layers of a model share one.

Sessions do not share an arena. An arena is given to a session when it is made, and making one on a group is collective: a larger
problem would need a larger arena, for which the sessions made before would have to be made anew, on all ranks at once, although how
much larger it has to be is different on each rank. A training run has one session, and one more where it evaluates.
"""

import contextlib
import re
import threading
import warnings
from collections import OrderedDict

import torch

from .. import _core
from .._threads import are_torchs, num_threads
from ..errors import CommError, DeviceError, Error, InvalidArgument, OutOfBudget, Unsupported
from . import _device, _flash, _transport  # noqa: F401, _flash brings what kernel= may name
from ._call import hashed, text_hash

_KEPT_SESSIONS = 4  # each has an arena
_KEPT_PLANS = 16  # some take MiB, and small ones lie between the tensors of calls, whose memory the heap then keeps
_KEPT_CALLS = 64  # of a group: what ranks compare
_SHOWN = 200  # bytes of a text in a message
_CALL = "the call"  # where it is none of attention
_TEXT_ROUND = 2**31  # of the user rounds, which the self test counts from 0
_ODD = 0x9E3779B97F4A7C15  # spreads the numbers of calls over 64 bits
_CAPTURED_FIRST = (
    "a CUDA graph captures attention only where a call with the same arguments has set everything aside on a stream other than the "
    "default one; not simulated ranks, which are set up in every call, and not dropout, whose replays would drop the same"
)


class _Recent:
    """A dictionary of the latest few."""

    def __init__(self, size):
        self._size = size
        self._items = OrderedDict()
        self._lock = threading.Lock()

    def take(self, key):
        with self._lock:
            return self._items.pop(key, None)

    def put(self, key, value):
        with self._lock:
            self._items[key] = value
            self._items.move_to_end(key)
            while len(self._items) > self._size:
                self._items.popitem(last=False)

    def get(self, key):
        with self._lock:
            value = self._items.get(key)
            if value is not None:
                self._items.move_to_end(key)
            return value

    def clear(self):
        with self._lock:
            self._items.clear()


def _carried(error):
    """The class, of those that the library knows, and the text by which other ranks raise this one's error."""
    for known in (InvalidArgument, Unsupported, OutOfBudget, DeviceError):
        if isinstance(error, known):
            return known.__name__, str(error)
    if isinstance(error, Error):
        return "Error", str(error)
    name = "InvalidArgument" if isinstance(error, (TypeError, ValueError)) else "Error"
    return name, f"{type(error).__name__}: {error}"


class Alone:
    """One rank, or several simulated in this process."""

    def __init__(self):
        self._sessions = _Recent(_KEPT_SESSIONS)
        self._plans = _Recent(_KEPT_PLANS)
        self._captured = []
        self.latest = None  # session

    def run(self, call, seed, execute, simulate, tensors=()):
        """What execute(the library's session) or simulate(plans) returns; tensors: what is read and written."""
        if call.empty:
            return None
        place = call.place
        on_cpu = place.kind == "cpu"
        ranks = call.spec.ranks or 1
        threads = max(1, num_threads() // ranks) if on_cpu else 1
        key = (call.key, threads, on_cpu and are_torchs(threads))
        session = self._sessions.take(key)
        capturing = place.is_capturing()
        if capturing:
            self._check_captured(call, key, session)
        if session is None:
            plans = self.plans_of(call, key, ranks)
            if ranks > 1:
                self.latest = None
                return simulate([plan.with_seed(seed % 2**64) for plan in plans] if call.spec.dropout != 0 else plans)
            session = _device.Session.alone(place, plans[0], call.spec.deterministic, call.spec.rounds_o, key[2])
        self.latest = session
        if call.spec.dropout != 0:
            session.core.set_seed(seed % 2**64)
        results = session.run(execute, tensors)
        if capturing:
            self._captured.append(session)  # its task lists are part of the graph
        self._sessions.put(key, session)
        return results

    def _check_captured(self, call, key, session):
        if call.spec.host_tensors:
            raise Unsupported("a CUDA graph cannot hold a call with host_tensors, which waits for its results")
        if session is None or call.spec.dropout != 0 or not session.may_be_captured():
            if session is not None:
                self._sessions.put(key, session)
            raise Unsupported(_CAPTURED_FIRST)

    def plans_of(self, call, key, ranks):
        plans = self._plans.get(key)
        if plans is None:
            problem = call.problem(call.shape[0][1], call.shape[1][1], ranks)
            on_cpu = call.place.kind == "cpu"
            # Alone the arena is torch's: its size must be known before there is a session. Names and partials are of the device's kernels.
            on_device = not on_cpu and (ranks == 1 or call.spec.kernel or call.spec.partials != "float32")
            options = call.options(key[1], ranks, "cuda" if on_device else "cpu")
            plans = [_core.make_plan(problem, options, rank, tuned=on_cpu) for rank in range(ranks)]
            self._plans.put(key, plans)
        return plans


class Group:
    """One rank of a process group."""

    def __init__(self, transport):
        self.transport = transport
        self.core = transport.core
        self._calls = 0
        self._devices = {}  # of each kind the one that was used
        self._joined = False  # NCCL was asked for
        self._sessions = _Recent(_KEPT_SESSIONS)
        self._requests = _Recent(_KEPT_CALLS)  # call.key and pass: (fields, digest)
        self._lengths = _Recent(_KEPT_CALLS)
        self.latest = None  # session
        self._kept = []  # what a failed execution may still be written to

    def _request(self, call, backward):
        request = self._requests.get((call.key, backward))
        if request is None:
            fields = call.fields(backward)
            request = (fields, text_hash(repr(fields)))
            self._requests.put((call.key, backward), request)
        return request

    def refuse(self, error, deadline=None):
        """Takes part in a call with an error, so that all ranks raise it: the others as one of ringspan's, this one as it is."""
        try:
            with self.transport.lock:
                self._greet(0, 0, 0, True, 0, deadline or self.transport.deadline, error, [])
        except CommError:  # the group is no longer usable
            raise
        except Error as told:
            if type(told) is not type(error):
                raise error from None
            raise

    def run(self, call, number, seed, execute, tensors):
        """The number of this call. `number`: 0, or in backward that of its forward."""
        with self.transport.lock:
            return self._run(call, number, seed, execute, tensors)

    def _run(self, call, number, seed, execute, tensors):
        backward = number > 0
        deadline = call.spec.deadline
        self.transport.deadline = deadline
        self._check_device(call.place, deadline)
        fields, digest = self._request(call, backward)
        given = hashed("dropout_seed", seed % 2**64 if call.spec.seeded else "none")
        # Layers with the same arguments differ in nothing else: gradients would be those of another one.
        fields = [fields[0], ("the call of forward that backward belongs to", number, None), *fields[1:], given]
        greeted = (digest + number * _ODD + given[1] + 2**63) % 2**64 - 2**63
        records = self._greet(greeted, call.shape[0][1], call.shape[1][1], False, seed, deadline, None, fields)
        tokens_q, tokens_k = self._check_lengths(call.spec, records)
        if call.empty:
            return self._calls
        self._join_nccl(call.place, deadline)
        key = (digest if not backward else self._request(call, False)[1], tokens_q, tokens_k)
        session = self._sessions.get(key)
        if session is None:
            problem = call.problem(tokens_q, tokens_k, self.core.size)
            threads = num_threads() if call.place.kind == "cpu" else 1
            openmp = call.place.kind == "cpu" and are_torchs(threads)
            options = call.options(threads, self.core.size)
            session = _device.Session.of_group(call.place, problem, options, self.core, deadline, call.spec.deterministic, openmp)
            self._sessions.put(key, session)
        self.latest = session
        session.core.set_deadline(deadline)  # a later call may give another
        try:
            session.core.set_seed(records[0][6] % 2**64)
            session.run(execute, tensors)
        except BaseException:
            # The process group may still write into what it was given.
            self._kept.append((session, tensors))
            raise
        return self._calls

    def meet(self, what, tokens, deadline):
        """The tokens of every rank, once all are at the same call besides attention."""
        with self.transport.lock:
            self.transport.deadline = deadline
            field = hashed(_CALL, what)
            return [record[3] for record in self._greet(field[1], tokens, 0, False, 0, deadline, None, [field])]

    def _join_nccl(self, place, deadline):
        """Collective, before the first session on a device: from then on messages go from device to device where NCCL can."""
        library = _device.nccl_library(place)
        if self._joined or library is None or self.core.size == 1:
            return
        self._joined = True
        try:
            core = _core.make_nccl_communicator(self.transport.core, place.name, library, deadline)
        except Error as error:  # of all ranks
            warnings.warn(f"messages of this group pass through host memory: {error}", RuntimeWarning, stacklevel=2)
            return
        self._sessions.clear()  # they use the transport that NCCL's has taken over
        self.core = core

    def _check_device(self, place, deadline):
        """A session stays on its device, and is made by all ranks together."""
        known = self._devices.setdefault(place.kind, place.name)
        error = None
        if known != place.name:
            error = InvalidArgument(f"q is on {place.name}, but this rank of the group computed on {known} before; a rank keeps its device")
        elif place.is_capturing():
            error = Unsupported("a CUDA graph cannot hold the messages of a group, which the host moves; capture attention of one rank")
        if error is not None:
            self._greet(0, 0, 0, True, 0, deadline, error, [])

    def _greet(self, digest, tokens_q, tokens_k, failed, seed, deadline, error, fields):
        """The records of all ranks, once they agree; raises on all ranks where they do not."""
        self._calls += 1
        records = self.core.greet(self._calls, digest, tokens_q, tokens_k, failed, seed, deadline)
        first = records[0]
        if any(record[0] != first[0] for record in records):
            raise CommError(f"rank {self.core.rank}/{self.core.size}: ranks run different versions of ringspan: "
                            + ", ".join(f"{record[0]} on rank {rank}" for rank, record in enumerate(records)))  # fmt: skip
        if not any(record[5] or record[1:3] != first[1:3] for record in records):
            return records
        fields = [("the number of calls on this group", self._calls, None), *fields]
        name, text = _carried(error) if error is not None else ("", "")
        numbers = [record[1] for record in records]
        self._calls = max(numbers)  # a disagreement leaves the group usable
        try:
            self.core.agree([] if failed else [(field, value, text is not None) for field, value, text in fields], name, text, deadline)
        except CommError as told:
            raise CommError(self._with_texts(str(told), fields, deadline)) from None
        raise CommError(f"{self._prefix()}: ranks disagree on the arguments of attention")

    def _prefix(self):
        return f"rank {self.core.rank}/{self.core.size}"

    def _with_texts(self, message, fields, deadline):
        """The message about a field that differs, which all ranks have, with the two ranks' texts in place of hashes."""
        if "fields to agree on" in message:
            own = next((text for name, _, text in fields if name == _CALL), "attention")
            return f"{self._prefix()}: ranks make different calls on this group; this one {own}"
        found = re.fullmatch(r"(.*: ranks disagree on (.*): )0x\w+ on rank (\d+), 0x\w+ on rank (\d+)", message)
        own = found and next((text for name, _, text in fields if name == found[2]), None)
        if own is None:
            return message
        ranks = int(found[3]), int(found[4])
        buffers = {rank: torch.zeros(_SHOWN, dtype=torch.uint8, device="cpu") for rank in {*ranks, self.core.rank}}
        shown = own if len(own) < _SHOWN else own[: _SHOWN - 4] + " ..."
        shown = torch.tensor(list(shown.encode("ascii", "replace")), dtype=torch.uint8, device="cpu")
        buffers[self.core.rank][: shown.numel()] = shown
        others = [rank for rank in range(self.core.size) if rank != self.core.rank]
        messages = [(False, rank, buffers[rank].data_ptr(), _SHOWN) for rank in ranks if rank != self.core.rank]
        if self.core.rank in ranks:
            messages += [(True, rank, buffers[self.core.rank].data_ptr(), _SHOWN) for rank in others]
        self.core.exchange(_TEXT_ROUND, messages, deadline)
        texts = [bytes(buffers[rank].tolist()).rstrip(b"\0").decode() for rank in ranks]
        later = f" (they differ after these {_SHOWN - 4} characters)" if texts[0] == texts[1] else ""
        return found[1] + ", ".join(f"{text or 'none'} on rank {rank}" for rank, text in zip(ranks, texts)) + later

    def _check_lengths(self, spec, records):
        key = (spec.text, tuple(record[3:5] for record in records))
        known = self._lengths.get(key)
        if known is None:
            queries, keys = ([record[side] for record in records] for side in (3, 4))
            try:
                tokens_q = self._check_equal(queries) if spec.replicated_q else self._check_side(spec.sharding, queries, "q")
                known = tokens_q, self._check_side(spec.sharding_k, keys, "k")
            except InvalidArgument as error:
                raise InvalidArgument(f"{self._prefix()}: {error}") from None
            self._lengths.put(key, known)
        return known

    @staticmethod
    def _check_equal(local):
        """The length of q on every rank; raises, on all ranks alike, where it is not the same."""
        for rank, tokens in enumerate(local):
            if tokens != local[0]:
                raise InvalidArgument(f"q has {tokens} tokens on rank {rank}, but {local[0]} on rank 0; with replicated_q=True every rank has all queries")
        return local[0]

    @staticmethod
    def _check_side(dealt, local, name):
        """The sum of the local lengths; raises, on all ranks alike, where it is not dealt as the sharding says."""
        tokens, ranks = sum(local), len(local)
        if dealt.mismatch(tokens, ranks):
            raise InvalidArgument(f"{dealt.mismatch(tokens, ranks)}, but the ranks of the group hold {tokens} tokens of {name} over {ranks}")
        try:
            expected = [_core.shard_rows(dealt.kind, tokens, ranks, rank) for rank in range(ranks)]
        except InvalidArgument as error:
            raise InvalidArgument(f"{name}: {error}; where keys are dealt in another way than queries, say how by sharding_k=") from None
        if expected != local:
            rank = next(r for r in range(ranks) if expected[r] != local[r])
            raise InvalidArgument(f"{name} has {local[rank]} tokens on rank {rank}, but sharding '{dealt.kind}' deals {expected[rank]} "
                                  f"of {tokens} tokens over {ranks} ranks to it; shard with ringspan.torch.Sharding")  # fmt: skip
        return tokens


alone = Alone()


def group_named(name):
    transport = _transport.transport_of(name)
    with transport.lock:
        if transport.executor is None:
            transport.executor = Group(transport)
        return transport.executor


def forget_plans():
    """Drops the plans and arenas that are kept for problems seen before. Where groups are used: on all ranks between the same calls."""
    alone._sessions.clear()
    alone._plans.clear()
    alone._captured.clear()
    alone.latest = None
    for transport in _transport.open_transports():
        if transport.executor is not None:
            transport.executor._sessions.clear()


@contextlib.contextmanager
def together(group):
    """Before a call of a group: this rank's error, no memory for instance, becomes that of all, which would wait for it or pair with its
    next call."""
    try:
        yield
    except Exception as error:
        if group:
            group_named(group).refuse(error)
        raise


def run_call(call, number, seed, group, execute, simulate, tensors):
    """seed: 64 bits in a tensor, as int64, which travels; the library's have no sign."""
    seed = 0 if seed is None else int(seed.item())
    if group:
        return group_named(group).run(call, number, seed, execute, tensors)
    alone.run(call, seed, execute, simulate, tensors)
    return 0


def kernels():
    """What the latest call of one rank (no group, no ranks=) computes with: {"forward": (kernel, why it is not a library's), ...}, with
    "backward" where gradients were asked for. Empty before the first call."""
    return {} if alone.latest is None else dict(zip(("forward", "backward"), alone.latest.core.kernels()))
