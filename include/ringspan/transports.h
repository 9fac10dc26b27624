// Transports: the communicators that come with the library, and helpers that run a function as every rank.
//
// Threads    ranks are threads of this process; a message is copied once, from the sender's buffer into the receiver's, by
//            whichever side posts later (rendezvous: a send completes only when its receive was posted).
// Processes  ranks are processes joined by stream sockets, two per pair: one for payload, one for heartbeats and aborts.
// Callbacks  ranks are whatever an embedder's C struct of callbacks says (ringspan_c.h).
//
// None allocates in post, test, wait or progress once as many requests as are ever outstanding at a time have been posted.
// docs/communicators.md has the contract in full and shows how to add a transport.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ringspan/communicator.h"

struct ringspan_communicator;

namespace ringspan {

using RankBody = std::function<void(Communicator&)>;

// One communicator per rank, each to be driven by its own thread. Destroying one means that the rank has left: peers that
// still wait for it get an error at once.
std::vector<std::unique_ptr<Communicator>> make_thread_world(int ranks);

// Runs `body` as every rank, each on a thread of its own, and returns when all have ended. When a body throws, the others
// are aborted and the error that came first (not one that it induced in another rank) is thrown.
void run_thread_ranks(int ranks, const RankBody& body);

}  // namespace ringspan
