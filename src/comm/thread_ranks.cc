#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#include <fmt/format.h>

#include "comm/transport.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"

namespace ringspan {
namespace {

// Keeps the error that came first; one that a peer's failure induced gives way to any other.
class FirstError {
 public:
  void offer(std::exception_ptr error, bool induced) {
    const std::lock_guard lock(mutex_);
    if (error_ != nullptr && (induced || !induced_)) return;
    error_ = std::move(error);
    induced_ = induced;
  }
  void rethrow_if_any() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
  bool induced_ = false;
};

void run_rank(std::unique_ptr<Communicator> communicator, const RankBody& body, FirstError& first) {
  std::string reason;
  try {
    body(*communicator);
    return;  // the communicator is destroyed: this rank has left
  } catch (const PeerFailure& error) {
    reason = error.what();  // before it is offered: another rank's may take its place, and destroy it
    first.offer(std::current_exception(), true);
  } catch (const std::exception& error) {
    reason = error.what();
    first.offer(std::current_exception(), false);
  } catch (...) {
    first.offer(std::current_exception(), false);
    reason = "unknown exception";
  }
  communicator->abort(reason);
}

}  // namespace

void run_thread_ranks(int ranks, const RankBody& body) { run_thread_ranks(make_thread_world(ranks), body); }

void run_thread_ranks(std::vector<std::unique_ptr<Communicator>> world, const RankBody& body) {
  if (!body) throw InvalidArgument("body is empty");
  FirstError first;
  std::vector<std::thread> threads;
  threads.reserve(world.size());
  try {
    for (auto& communicator : world) {
      threads.emplace_back([&body, &first, &communicator] { run_rank(std::move(communicator), body, first); });
    }
  } catch (const std::system_error& error) {
    const std::string text = fmt::format("no thread for rank {}/{}: {}", threads.size(), world.size(), error.code().message());
    first.offer(std::make_exception_ptr(Error(text)), false);
  } catch (...) {
    first.offer(std::current_exception(), false);
  }
  // Communicators that nobody drives leave, which ends the waits of the others; not before the cause is known.
  for (std::size_t rank = threads.size(); rank < world.size(); ++rank) world[rank].reset();
  for (std::thread& thread : threads) thread.join();
  first.rethrow_if_any();
}

}  // namespace ringspan
