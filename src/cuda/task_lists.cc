#include "cuda/task_lists.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <utility>

#include "base/check.h"
#include "cuda/joined_adds.h"
#include "cuda/make_tile_maps.h"
#include "cuda/row_layout.h"
#include "cuda/select.h"

namespace ringspan::cuda {
namespace {

static_assert(sizeof(Group) == internal::kTaskGroupBytes && sizeof(TaskPlaces) == internal::kTaskPlacesBytes);

std::int64_t aligned(std::int64_t bytes) {
  return (bytes + internal::kTaskListAlignment - 1) / internal::kTaskListAlignment * internal::kTaskListAlignment;
}

void mix(std::size_t& hash, const void* address) {
  hash = (hash ^ reinterpret_cast<std::uintptr_t>(address)) * std::size_t{0x9E3779B97F4A7C15};
}
// What differs from pass to pass is mostly addresses.
std::size_t hash_of(const internal::Bindings& bindings) {
  std::size_t hash = 0;
  for (const internal::Binding& tensor : bindings.tensors) mix(hash, tensor.data);
  mix(hash, bindings.saved);
  return hash;
}
// A pass has many launches over the same tensors.
void mix(std::size_t& hash, const AttendLists::Key& key) {
  mix(hash, key.launch);
  hash += static_cast<std::size_t>(key.owner);
}
void mix(std::size_t& hash, const RowLists::Key& key) { hash += static_cast<std::size_t>(key.op); }
std::size_t hash_of(std::span<const kernels::RowTask> tasks) {
  std::size_t hash = tasks.size();
  for (const kernels::RowTask& task : tasks) {
    for (const kernels::Operand& operand : task.operands) mix(hash, operand.data);
  }
  return hash;
}

internal::Bindings copy_of(const internal::Bindings& bindings) { return bindings; }
std::vector<kernels::RowTask> copy_of(std::span<const kernels::RowTask> tasks) { return {tasks.begin(), tasks.end()}; }
bool are_equal(const internal::Bindings& a, const internal::Bindings& b) { return a == b; }
bool are_equal(const std::vector<kernels::RowTask>& a, std::span<const kernels::RowTask> b) { return std::ranges::equal(a, b); }

RowLists row_lists(const RowLists::Key& key, std::span<const kernels::RowTask> given) {
  const RowOperands shape = operands_of(key.op, key.width);
  const bool joins = key.op == RowOp::add && given.size() > 1;
  const std::vector<kernels::RowTask> joined = joins ? joined_adds(given, key.width) : std::vector<kernels::RowTask>();
  const std::span<const kernels::RowTask> tasks = joins ? std::span<const kernels::RowTask>(joined) : given;
  std::vector<Access> accesses;
  for (std::size_t index = 0; index < tasks.size(); ++index) {
    add_accesses(tasks[index], static_cast<std::int64_t>(index), shape.written, shape.widths, accesses);
  }
  const std::vector<std::int64_t> waves = waves_of(std::move(accesses), static_cast<std::int64_t>(tasks.size()));
  const std::int64_t last = waves.empty() ? -1 : *std::max_element(waves.begin(), waves.end());
  RowLists lists;
  for (std::int64_t wave = 0; wave <= last; ++wave) {
    RowLists::Wave members{static_cast<std::int64_t>(lists.ordered.size()), 0, 0};
    for (std::size_t index = 0; index < tasks.size(); ++index) {
      const std::int64_t count = tasks[index].batch_count * tasks[index].row_count * tasks[index].head_count;
      if (waves[index] != wave || count == 0) continue;
      lists.ordered.push_back(tasks[index]);
      lists.first_blocks.push_back(members.blocks);
      members.blocks += (count + rows_per_block(key.width) - 1) / rows_per_block(key.width);
      ++members.count;
    }
    if (members.count > 0) lists.waves.push_back(members);
  }
  return lists;
}

}  // namespace

TaskLists::~TaskLists() {
  release_sides();
  for (Side& side : captured_) release(side);
}

TaskLists::Side TaskLists::make_side() const {
  Side side;
  side.host = runtime_.allocate_host(capacity_);
  try {
    side.device = runtime_.allocate(capacity_);
  } catch (...) {
    runtime_.release_host(side.host);
    throw;
  }
  return side;
}

void TaskLists::release(Side& side) noexcept {
  if (side.host != nullptr) runtime_.release_host(side.host);
  if (side.device != nullptr) runtime_.release(side.device);
  side = {};
}

void TaskLists::release_sides() noexcept {
  attends_.entries.clear();
  rows_.entries.clear();
  for (Side& side : sides_) release(side);
}

void TaskLists::reserve(std::int64_t bytes) {
  release_sides();
  capacity_ = bytes;
  if (!captured_.empty()) captured_.back().used = capacity_;  // it has another size
  for (Side& side : sides_) side = make_side();
}

bool TaskLists::in_capture() {
  if (!in_capture_) in_capture_ = runtime_.is_capturing();
  return *in_capture_;
}

TaskLists::Side& TaskLists::side_with_room(std::int64_t bytes) {
  RINGSPAN_CHECK(bytes <= capacity_);
  if (in_capture()) {
    if (captured_.empty() || captured_.back().used + bytes > capacity_) {
      captured_.reserve(captured_.size() + 1);
      captured_.push_back(make_side());
    }
    return captured_.back();
  }
  if (sides_[current_].used + bytes > capacity_) {
    sides_[current_].left = runtime_.record();
    current_ = (current_ + 1) % sides_.size();
    Side& next = sides_[current_];
    std::erase_if(attends_.entries, [&](const auto& entry) { return entry.second.side == &next; });
    std::erase_if(rows_.entries, [&](const auto& entry) { return entry.second.side == &next; });
    runtime_.wait(next.left, progress_);
    next.used = 0;
  }
  return sides_[current_];
}

// Of lists that are kept and not sent: what is kept goes when its side is filled anew, and so these do.
void TaskLists::take_room(std::int64_t bytes) { side_with_room(aligned(bytes)).used += aligned(bytes); }

// By one copy, which a capture does not hold: nothing else is written there.
template <typename... Lists>
std::tuple<const typename Lists::element_type*...> TaskLists::send(const Lists&... lists) {
  Side& side = side_with_room((aligned(static_cast<std::int64_t>(lists.size_bytes())) + ... + 0));
  const std::int64_t begin = side.used;
  const auto put = [&](const auto& list) -> decltype(list.data()) {
    if (list.empty()) return nullptr;
    std::memcpy(side.host + side.used, list.data(), list.size_bytes());
    const auto* sent = reinterpret_cast<decltype(list.data())>(side.device + side.used);
    side.used += aligned(static_cast<std::int64_t>(list.size_bytes()));
    return sent;
  };
  const std::tuple<const typename Lists::element_type*...> sent{put(lists)...};
  if (in_capture()) {
    runtime_.copy_at_once(side.device + begin, side.host + begin, side.used - begin);
  } else {
    runtime_.copy(side.device + begin, side.host + begin, side.used - begin);
  }
  return sent;
}

template <typename Lists, typename Given, typename Make>
const Lists& TaskLists::find(Kept<Lists>& kept, const typename Lists::Key& key, const Given& given, Make&& make) {
  if (in_capture()) return kept.latest = make();
  std::size_t hash = hash_of(given);
  mix(hash, key);
  const auto [first, last] = kept.entries.equal_range(hash);
  for (auto found = first; found != last; ++found) {
    const Entry<Lists>& entry = found->second;
    if (entry.key == key && are_equal(entry.made_of, given)) return entry.lists;
  }
  Lists lists = make();
  Entry<Lists> entry{key, copy_of(given), std::move(lists), &sides_[current_]};
  return kept.entries.emplace(hash, std::move(entry))->second.lists;
}

const AttendLists& TaskLists::attend(TileKernel kernel, Owner owner, const kernels::AttendShape& shape,
                                     const internal::AttendCall& call) {
  const auto make = [&] {
    const std::span<const kernels::AttendTask> tasks = call.tasks();
    Schedule schedule = schedule_attend(tasks, owner, shape.group, tile_sizes(kernel, shape).rows(owner));
    AttendLists lists;
    if (schedule.waves.empty()) return lists;
    std::vector<kernels::AttendTask> ordered;
    ordered.reserve(schedule.order.size());
    for (const std::int64_t index : schedule.order) ordered.push_back(tasks[static_cast<std::size_t>(index)]);
    std::vector<TaskPlaces> places;
    if (kernel == TileKernel::wgmma) {
      lists.maps = tile_maps_of(shape, tasks, owner);
      places = places_in(lists.maps, shape, ordered, owner);
    }
    const std::vector<std::int32_t> zeros(schedule.waves.size());
    const std::int32_t* taken = nullptr;
    std::tie(lists.tasks, lists.groups, taken, lists.places) =
        send(std::span<const kernels::AttendTask>(ordered), std::span<const Group>(schedule.groups),
             std::span<const std::int32_t>(zeros), std::span<const TaskPlaces>(places));
    lists.taken = const_cast<std::int32_t*>(taken);
    lists.waves = std::move(schedule.waves);
    return lists;
  };
  if (call.launch == nullptr) return attends_.latest = make();
  return find(attends_, {call.launch, kernel, owner}, *call.bindings, make);
}

const RowLists& TaskLists::rows(const RowLists::Key& key, std::span<const kernels::RowTask> tasks) {
  constexpr std::size_t kFew = 2;  // take as long to make as to find
  if (tasks.size() <= kFew) return rows_.latest = row_lists(key, tasks);
  return find(rows_, key, tasks, [&] {
    RowLists lists = row_lists(key, tasks);
    const auto is_long = [](const RowLists::Wave& wave) {
      return wave.count > static_cast<std::int64_t>(RowArguments::kShort);
    };
    if (std::any_of(lists.waves.begin(), lists.waves.end(), is_long)) {
      std::tie(lists.tasks, lists.first_blocks_there) =
          send(std::span<const kernels::RowTask>(lists.ordered), std::span<const std::int64_t>(lists.first_blocks));
    } else if (!in_capture()) {
      take_room(static_cast<std::int64_t>(tasks.size_bytes()));
    }
    return lists;
  });
}

const kernels::RowTask* TaskLists::as_they_are(std::span<const kernels::RowTask> tasks) {
  return find(rows_, {RowOp::fill, 0}, tasks,
              [&] {
                RowLists lists;
                std::tie(lists.tasks) = send(tasks);
                return lists;
              })
      .tasks;
}

}  // namespace ringspan::cuda
