// EmulatedBlock: what the threads of a Hopper block share, on a CPU: memory, of which each 16 bytes know what has been done to
// them, barriers, and copies under way. A broken rule of warpgroup.h throws std::logic_error where it is broken.
//
// A block has roles: programs that run side by side, each the lockstep of its threads (EmulatedHopperMachine). One runs at a
// time, until it waits for a barrier; copies arrive when nobody can run without them. So every run is the same, and as late as
// the rules allow. What a role knows of the others came through barriers: each role counts what it has said so far (its clock),
// a barrier brings the clocks of those who arrived to those who wait, and what is not known to have happened must not be relied
// on. Thread safety: the roles', through run_roles().
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace ringspan::cuda {

inline void require(bool holds, const char* rule) {
  if (!holds) throw std::logic_error(std::string("emulated Hopper block: ") + rule);
}

class EmulatedBlock {
 public:
  static constexpr int kRoles = 3;  // at most

  EmulatedBlock(unsigned char* shared, int bytes) : shared_(shared), chunks_(static_cast<std::size_t>(bytes) / 16) {}

  std::uint32_t address_of(const void* p) const {
    return static_cast<std::uint32_t>(static_cast<const unsigned char*>(p) - shared_) + kBase;
  }
  unsigned char* at(std::uint32_t address) const { return shared_ + (address - kBase); }

  // A program per role, to their ends; throws what any throws.
  void run_roles(const std::vector<std::function<void()>>& programs);

  // Memory. `role` is that of the thread; addresses are those of 16 aligned bytes.
  void begin_write(int role, std::uint32_t address);
  void check_load(int role, std::uint32_t address);  // by an ordinary instruction
  void begin_product(int role, std::span<const std::uint32_t> reads);
  void end_product(int role, std::span<const std::uint32_t> reads);
  void fence_async(int role);
  void sync(int role);  // all threads of the role

  // Copies arrive in the order in which a role began them.
  void begin_copy(int role, void* to, const void* from_or_null);
  // 16 bytes by the async proxy.
  void begin_box_copy(int role, std::uint32_t address, const void* data);

  // Barriers, 8 bytes of shared memory each.
  void init_barrier(std::uint32_t barrier, int arrivals);
  void arrive(int role, std::uint32_t barrier, int arrivals);
  void arrive_when_copied(int role, std::uint32_t barrier, int arrivals);
  // Bytes that a phase waits for beside its arrivals: announced, and there when copies that began before are.
  void expect_bytes(std::uint32_t barrier, int bytes) { barrier_at(barrier).bytes += bytes; }
  void count_bytes_when_copied(int role, std::uint32_t barrier, int bytes);
  // Until the phase of this parity is over.
  void wait(int role, std::uint32_t barrier, int parity);

 private:
  static constexpr std::uint32_t kBase = 16;  // where shared memory begins: nothing may rely on more than is asked for
  using Clock = std::array<std::uint64_t, kRoles>;

  struct Chunk16 {
    bool copying = false;        // a copy has not been waited for
    bool unsynced = false;       // no barrier of the role's threads since it was written, or fenced
    bool unfenced = false;       // the async proxy does not see what was written
    bool unsynced_read = false;  // no barrier of the role's threads since a product read it
    int readers = 0;             // products that have not been waited for
    int writer = 0, reader = 0;  // roles, and when by their clocks: 0 never
    std::uint64_t written_at = 0, read_at = 0;
    std::array<std::uint64_t, kRoles> loaded_at{};  // when threads of each role last read it by ordinary instructions
    std::array<bool, kRoles> unfenced_load{};       // no fence_async() of that role since
  };
  struct Event {
    enum Kind : std::uint8_t { copy, arrival, bytes } kind = copy;
    void* to = nullptr;
    std::array<unsigned char, 16> data{};
    std::uint32_t barrier = 0;
    int count = 0;  // arrivals, or bytes
    Clock clock{};
  };
  struct Barrier {
    int expected = 0, pending = 0, bytes = 0;
    std::uint64_t phases = 0;  // that are over
    Clock arriving{}, released{};
  };

  using Indices = std::vector<std::uint32_t>;  // of chunks; some may have changed since

  Chunk16& chunk(std::uint32_t address);
  std::uint32_t index_of(const Chunk16& c) const { return static_cast<std::uint32_t>(&c - chunks_.data()); }
  Chunk16& write(int role, std::uint32_t address);  // fenced or not
  void start_copy(int role, void* to, const void* from_or_null);
  void sync_writes(int role, std::uint64_t time);
  bool knows(int role, int other, std::uint64_t time) const { return role == other || known_[role][other] >= time; }
  void advance(Barrier& barrier, const Clock& clock, int arrivals, int bytes);
  Barrier& barrier_at(std::uint32_t address);
  void finish_event(int role);
  bool finish_copies();
  void pass_turn(int role);

  unsigned char* shared_;
  std::vector<Chunk16> chunks_;
  // Those that barriers and fences change; all of a block are some ten thousand.
  std::array<Indices, kRoles> unsynced_, unsynced_reads_, unfenced_loads_;  // by the role that wrote or read
  Indices unfenced_;
  std::map<std::uint32_t, Barrier> barriers_;
  std::array<std::deque<Event>, kRoles> under_way_;
  std::array<Clock, kRoles> known_{{{1, 0, 0}, {0, 1, 0}, {0, 0, 1}}};  // [role][of role]; its own begins at 1

  std::mutex mutex_;
  std::condition_variable turned_;
  int turn_ = 0;
  std::array<bool, kRoles> over_{true, true, true};
  std::array<std::uint64_t, kRoles> stuck_at_{};  // arrivals there were when the role could not go on
  std::uint64_t arrivals_ = 1;
  std::exception_ptr error_;
};

}  // namespace ringspan::cuda
