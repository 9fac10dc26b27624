// RankGraph: a CUDA graph of passes of several thread ranks on one GPU, captured together. For measurements.
#pragma once

#include <span>
#include <vector>

namespace ringspan::testing {

class RankGraph {
 public:
  // A stream per rank, all on the current device. Throws std::runtime_error where CUDA fails, as all of these do.
  explicit RankGraph(int ranks);
  ~RankGraph();
  RankGraph(const RankGraph&) = delete;
  RankGraph& operator=(const RankGraph&) = delete;

  void* stream(int rank) const { return streams_[static_cast<std::size_t>(rank)]; }
  // Between these what any thread enqueues on the streams is captured; what was captured before is given up.
  void begin();
  void end();
  void launch_and_wait();

 private:
  void give_up() noexcept;

  std::vector<void*> streams_;
  std::vector<void*> events_;
  void* graph_ = nullptr;
};

}  // namespace ringspan::testing
