#include "cuda/emulated_order.h"

#include <stdexcept>

namespace ringspan::cuda {

void StreamOrder::start() {
  const std::lock_guard lock(mutex_);
  started_ = true;
}

StreamOrder::Point StreamOrder::issue(Stream stream) {
  const std::lock_guard lock(mutex_);
  return {stream, ++issued_[stream], known_[stream]};
}

std::uint64_t StreamOrder::signal(Stream earlier, Stream later) {
  const std::lock_guard lock(mutex_);
  return known_[later] = issued_[earlier];
}

void StreamOrder::forget(Stream stream, std::uint64_t known) {
  const std::lock_guard lock(mutex_);
  std::erase_if(ran_[stream], [&](const Ran& ran) { return ran.point.index <= known; });
}

void StreamOrder::note(const Point& point, const std::vector<Access>& accesses) {
  const std::lock_guard lock(mutex_);
  if (!started_) return;
  for (const Ran& other : ran_[1 - point.stream]) {
    if (other.point.index <= point.known || point.index <= other.point.known) continue;
    for (const Access& a : accesses) {
      for (const Access& b : other.accesses) {
        if (!(a.writes || b.writes) || a.begin >= b.end || b.begin >= a.end) continue;
        throw std::logic_error("a copy and a launch touch the same memory, and no event says which comes first");
      }
    }
  }
  ran_[point.stream].push_back({point, accesses});
}

}  // namespace ringspan::cuda
