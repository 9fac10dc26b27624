#include "cuda/emulated_block.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <thread>

namespace ringspan::cuda {
namespace {

struct Abandoned {};  // another role has failed

}  // namespace

EmulatedBlock::Chunk16& EmulatedBlock::chunk(std::uint32_t address) {
  const std::uint32_t offset = address - kBase;
  require(offset % 16 == 0 && offset / 16 < chunks_.size(), "an address outside of shared memory, or not of 16 bytes");
  return chunks_[offset / 16];
}

EmulatedBlock::Chunk16& EmulatedBlock::write(int role, std::uint32_t address) {
  Chunk16& c = chunk(address);
  require(c.readers == 0, "shared memory is written that an unfinished product reads");
  require(c.reader == role ? !c.unsynced_read : knows(role, c.reader, c.read_at),
          "shared memory is written without a barrier since a product read it");
  for (int other = 0; other < kRoles; ++other) {
    require(knows(role, other, c.loaded_at[other]), "shared memory is written without a barrier since another role read it");
  }
  require(!c.copying, "shared memory is written while a copy to it is under way");
  require(knows(role, c.writer, c.written_at), "shared memory is written without a barrier since another role wrote it");
  if (!c.unsynced || c.writer != role) unsynced_[role].push_back(index_of(c));
  c.unsynced = true;
  c.writer = role;
  c.written_at = known_[role][role];
  return c;
}

void EmulatedBlock::begin_write(int role, std::uint32_t address) {
  Chunk16& c = write(role, address);
  if (!c.unfenced) unfenced_.push_back(index_of(c));
  c.unfenced = true;
}

void EmulatedBlock::check_load(int role, std::uint32_t address) {
  Chunk16& c = chunk(address);
  c.loaded_at[role] = known_[role][role];
  if (!c.unfenced_load[role]) unfenced_loads_[role].push_back(index_of(c));
  c.unfenced_load[role] = true;
  require(!c.copying, "shared memory is read before its copy was waited for");
  require(c.writer == role ? !c.unsynced : knows(role, c.writer, c.written_at),
          "shared memory is read without a barrier since it was written");
}

void EmulatedBlock::begin_product(int role, std::span<const std::uint32_t> reads) {
  for (const std::uint32_t address : reads) {
    Chunk16& c = chunk(address);
    require(c.written_at != 0, "a product reads shared memory that was never written");
    require(!c.copying, "a product reads shared memory before its copy was waited for");
    require(!c.unfenced, "a product reads shared memory without fence_async() since it was written");
    require(c.writer == role ? !c.unsynced : knows(role, c.writer, c.written_at),
            "a product reads shared memory without a barrier after fence_async()");
  }
  for (const std::uint32_t address : reads) ++chunk(address).readers;
}

void EmulatedBlock::end_product(int role, std::span<const std::uint32_t> reads) {
  for (const std::uint32_t address : reads) {
    Chunk16& c = chunk(address);
    --c.readers;
    if (!c.unsynced_read || c.reader != role) unsynced_reads_[role].push_back(index_of(c));
    c.unsynced_read = true;
    c.reader = role;
    c.read_at = known_[role][role];
  }
}

// By the threads that wrote, before they meet those that multiply; or by all threads that multiply, of what they know to be
// written: then it is as if each had written it itself.
void EmulatedBlock::fence_async(int role) {
  for (const std::uint32_t index : unfenced_loads_[role]) {
    Chunk16& c = chunks_[index];
    c.unfenced_load[role] = false;
    c.loaded_at[role] = known_[role][role];  // nobody else's before they know of the fence
  }
  unfenced_loads_[role].clear();
  std::erase_if(unfenced_, [&](std::uint32_t index) {
    Chunk16& c = chunks_[index];
    if (c.copying) return false;
    if (c.writer == role) {
      if (!c.unsynced) unsynced_[role].push_back(index);
      c.unsynced = true;
    } else if (knows(role, c.writer, c.written_at)) {
      c.unsynced = false;
      c.writer = role;
    } else {
      return false;
    }
    c.unfenced = false;
    c.written_at = known_[role][role];
    return true;
  });
}

// Those that the role wrote no later than `time`.
void EmulatedBlock::sync_writes(int role, std::uint64_t time) {
  std::erase_if(unsynced_[role], [&](std::uint32_t index) {
    Chunk16& c = chunks_[index];
    if (c.writer != role) return true;
    if (c.copying || c.written_at > time) return false;
    c.unsynced = false;
    return true;
  });
}

void EmulatedBlock::sync(int role) {
  for (const std::uint32_t index : unsynced_reads_[role]) {
    if (chunks_[index].reader == role) chunks_[index].unsynced_read = false;
  }
  unsynced_reads_[role].clear();
  sync_writes(role, known_[role][role]);
}

void EmulatedBlock::begin_copy(int role, void* to, const void* from_or_null) {
  begin_write(role, address_of(to));
  start_copy(role, to, from_or_null);
}

void EmulatedBlock::start_copy(int role, void* to, const void* from_or_null) {
  chunk(address_of(to)).copying = true;
  std::memset(to, 0xff, 16);
  Event event{Event::copy, to, {}, 0, 0, {}};
  if (from_or_null != nullptr) std::memcpy(event.data.data(), from_or_null, 16);
  under_way_[role].push_back(event);
}

void EmulatedBlock::begin_box_copy(int role, std::uint32_t address, const void* data) {
  Chunk16& c = chunk(address);
  require(!c.unfenced, "a box is copied over shared memory without fence_async() since it was written");
  require(std::ranges::none_of(c.unfenced_load, std::identity()),
          "a box is copied over shared memory without fence_async() since it was read");
  write(role, address);
  start_copy(role, at(address), data);
}

void EmulatedBlock::finish_event(int role) {
  const Event event = under_way_[role].front();
  under_way_[role].pop_front();
  if (event.kind == Event::copy) {
    std::memcpy(event.to, event.data.data(), 16);
    chunk(address_of(event.to)).copying = false;
  } else if (event.kind == Event::arrival) {
    advance(barrier_at(event.barrier), event.clock, event.count, 0);
  } else if (event.kind == Event::bytes) {
    advance(barrier_at(event.barrier), event.clock, 0, event.count);
  }
}

void EmulatedBlock::init_barrier(std::uint32_t barrier, int arrivals) {
  require(barrier % 8 == 0, "a barrier lies at a multiple of 8 bytes");
  barriers_[barrier] = {.expected = arrivals, .pending = arrivals};
}

EmulatedBlock::Barrier& EmulatedBlock::barrier_at(std::uint32_t address) {
  const auto found = barriers_.find(address);
  require(found != barriers_.end(), "a barrier was not initialised");
  return found->second;
}

void EmulatedBlock::advance(Barrier& barrier, const Clock& clock, int arrivals, int bytes) {
  require(barrier.pending >= arrivals, "more arrivals at a barrier than its phase has");
  require(barrier.bytes >= bytes, "more bytes at a barrier than were announced");
  for (int role = 0; role < kRoles; ++role) barrier.arriving[role] = std::max(barrier.arriving[role], clock[role]);
  barrier.pending -= arrivals;
  barrier.bytes -= bytes;
  if (barrier.pending > 0 || barrier.bytes > 0) return;
  barrier.pending = barrier.expected;
  barrier.released = barrier.arriving;
  ++barrier.phases;
  ++arrivals_;
}

void EmulatedBlock::arrive(int role, std::uint32_t barrier, int arrivals) {
  advance(barrier_at(barrier), known_[role], arrivals, 0);
  ++known_[role][role];
}

void EmulatedBlock::arrive_when_copied(int role, std::uint32_t barrier, int arrivals) {
  under_way_[role].push_back({Event::arrival, nullptr, {}, barrier, arrivals, known_[role]});
  ++known_[role][role];
}

void EmulatedBlock::count_bytes_when_copied(int role, std::uint32_t barrier, int bytes) {
  under_way_[role].push_back({Event::bytes, nullptr, {}, barrier, bytes, known_[role]});
  ++known_[role][role];
}

void EmulatedBlock::wait(int role, std::uint32_t address, int parity) {
  Barrier& barrier = barrier_at(address);
  // Parity p waits for phases p, p + 2, ...: it is over while the present phase has the other parity.
  while (barrier.phases % 2 == static_cast<std::uint64_t>(parity)) pass_turn(role);
  for (int other = 0; other < kRoles; ++other) known_[role][other] = std::max(known_[role][other], barrier.released[other]);
  sync_writes(role, barrier.released[role]);  // threads that met at it have met as at sync()
}

// Copies of any role until a barrier's phase is over.
bool EmulatedBlock::finish_copies() {
  const std::uint64_t before = arrivals_;
  for (int role = 0; role < kRoles; ++role) {
    while (!under_way_[role].empty() && arrivals_ == before) finish_event(role);
  }
  return arrivals_ != before;
}

// The role cannot go on: the turn of the next one that can, or, where none can, that of the copies.
void EmulatedBlock::pass_turn(int role) {
  stuck_at_[role] = arrivals_;
  int next = role;
  do {
    next = (next + 1) % kRoles;
  } while (next != role && (over_[next] || stuck_at_[next] == arrivals_));
  if (next == role) {
    require(finish_copies(), "roles wait for each other, or for an arrival that never comes");
    return;
  }
  std::unique_lock lock(mutex_);
  turn_ = next;
  turned_.notify_all();
  turned_.wait(lock, [&] { return turn_ == role || error_; });
  if (error_) throw Abandoned{};
}

void EmulatedBlock::run_roles(const std::vector<std::function<void()>>& programs) {
  turn_ = 0;
  for (std::size_t role = 0; role < programs.size(); ++role) over_[role] = false;
  const auto run = [&](int role) {
    {
      std::unique_lock lock(mutex_);
      turned_.wait(lock, [&] { return turn_ == role || error_; });
      if (error_) return;
    }
    std::exception_ptr failed;
    try {
      programs[static_cast<std::size_t>(role)]();
    } catch (const Abandoned&) {
      return;
    } catch (...) {
      failed = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    if (failed) error_ = failed;
    over_[role] = true;
    for (int next = 0; next < kRoles; ++next) {  // whoever is not over looks again at what it waits for
      if (!over_[next]) turn_ = next;
    }
    turned_.notify_all();
  };
  {
    std::vector<std::jthread> beside;
    for (std::size_t role = 1; role < programs.size(); ++role) beside.emplace_back(run, static_cast<int>(role));
    run(0);
  }
  over_.fill(true);
  if (error_) std::rethrow_exception(error_);
}

}  // namespace ringspan::cuda
