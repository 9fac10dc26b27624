#include "cuda/emulated_capture.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <stdexcept>

namespace ringspan::cuda {

void EmulatedGraph::add(const void* stream, std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  steps_.push_back({.stream = stream, .work = std::move(work)});
}

std::uint64_t EmulatedGraph::record(const void* stream) {
  const std::lock_guard lock(mutex_);
  steps_.push_back({.stream = stream, .recorded = ++points_});
  return points_;
}

void EmulatedGraph::follow(const void* stream, std::uint64_t point) {
  const std::lock_guard lock(mutex_);
  steps_.push_back({.stream = stream, .followed = point});
}

std::size_t EmulatedGraph::works() const {
  const auto is_work = [](const Step& step) { return step.work != nullptr; };
  return static_cast<std::size_t>(std::count_if(steps_.begin(), steps_.end(), is_work));
}

void EmulatedGraph::end() {
  const std::lock_guard lock(mutex_);
  capturing_ = false;
  std::set<const void*> begun;
  std::map<const void*, std::set<std::uint64_t>> last_points;  // of streams that joined, since their last work
  std::map<const void*, bool> awaited;
  for (const Step& step : steps_) {
    const bool is_first = begun.insert(step.stream).second;
    if (is_first && step.followed > 0) awaited[step.stream] = false;
    const auto own = awaited.find(step.stream);
    if (own != awaited.end() && step.work) own->second = false, last_points[step.stream].clear();
    if (own != awaited.end() && step.recorded > 0) last_points[step.stream].insert(step.recorded);
    if (step.followed == 0) continue;
    for (const auto& [stream, points] : last_points) {
      if (stream != step.stream && points.contains(step.followed)) awaited[stream] = true;
    }
  }
  for (const auto& [stream, is_awaited] : awaited) {
    if (!is_awaited) throw std::logic_error("a stream joined the capture, and nobody waits for its last work");
  }
}

void EmulatedGraph::replay(std::uint64_t seed) const {
  std::map<const void*, std::vector<const Step*>> streams;
  std::vector<std::pair<const std::vector<const Step*>*, std::size_t>> next;
  for (const Step& step : steps_) streams[step.stream].push_back(&step);
  for (const auto& [stream, steps] : streams) next.emplace_back(&steps, 0);
  std::set<std::uint64_t> recorded;
  std::mt19937_64 random(seed);
  while (!next.empty()) {
    std::vector<std::size_t> runnable;
    for (std::size_t index = 0; index < next.size(); ++index) {
      const Step& step = *(*next[index].first)[next[index].second];
      if (step.followed == 0 || recorded.contains(step.followed)) runnable.push_back(index);
    }
    if (runnable.empty()) throw std::logic_error("streams of a capture wait for each other");
    const std::size_t chosen = runnable[random() % runnable.size()];
    auto& [steps, place] = next[chosen];
    const Step& step = *(*steps)[place];
    if (step.work) step.work();
    if (step.recorded > 0) recorded.insert(step.recorded);
    if (++place == steps->size()) next.erase(next.begin() + static_cast<std::ptrdiff_t>(chosen));
  }
}

}  // namespace ringspan::cuda
