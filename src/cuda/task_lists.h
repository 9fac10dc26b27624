// TaskLists: lists of tasks where kernels read them, and what a launch needs besides, kept under the launch and the tensors
// that they were made of, or of row operations the tasks: a pass over tensors that lie where those of an earlier pass did, as
// those of a model's layers do, makes no tasks of attention and no schedule, copies nothing and waits for nothing.
//
// Lists lie in two sides, each a block of the host's memory and one of the device's that are written alike. One is filled by as
// many passes as it has room for, then the other one, and what lay there is forgotten. The device's is written in the order of
// the stream, behind the kernels that read it; before the host's is, the host waits for the stream to be past the point where
// that side was left, which is a whole side back. What is captured for a CUDA graph keeps to itself: its lists lie in sides
// that stay until the device goes, filled while it is captured, and a replay reads them again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/arguments.h"
#include "cuda/runtime.h"
#include "cuda/schedule.h"
#include "exec/device.h"
#include "kernels/attend.h"
#include "kernels/rowwise.h"
#include "plan/device_memory.h"

namespace ringspan::cuda {

// Of one call of attend, or of one side of attend_backward.
struct AttendLists {
  struct Key {  // what beside the tensors they depend on
    const internal::Launch* launch = nullptr;
    TileKernel kernel = TileKernel::mma;
    Owner owner = Owner::state;
    bool operator==(const Key&) const = default;
  };
  using MadeOf = internal::Bindings;
  std::vector<Wave> waves;
  const kernels::AttendTask* tasks = nullptr;
  const Group* groups = nullptr;
  std::int32_t* taken = nullptr;  // a counter for each wave
  TileMaps maps;
  const TaskPlaces* places = nullptr;  // of each task in these maps, null where there are none
};

struct RowLists {
  struct Key {
    RowOp op = RowOp::fill;
    int width = 1;  // 0: tasks as they are, in no order of ours
    bool operator==(const Key&) const = default;
  };
  using MadeOf = std::vector<kernels::RowTask>;
  struct Wave {
    std::int64_t first = 0, count = 0;  // tasks
    std::int64_t blocks = 0;
  };
  std::vector<Wave> waves;
  std::vector<kernels::RowTask> ordered;  // wave after wave, none without rows
  std::vector<std::int64_t> first_blocks;
  const kernels::RowTask* tasks = nullptr;  // on the device, if any wave is too long for a launch to bring it along
  const std::int64_t* first_blocks_there = nullptr;
};

class TaskLists {
 public:
  // progress: called while a list waits for room; what it throws is thrown.
  explicit TaskLists(
      Runtime& runtime, std::function<void()> progress = [] {})
      : runtime_(runtime), progress_(std::move(progress)) {}
  ~TaskLists();
  TaskLists(const TaskLists&) = delete;
  TaskLists& operator=(const TaskLists&) = delete;

  // Sides of so many bytes: what one pass sends at most. Nothing that was enqueued may read the ones of before.
  void reserve(std::int64_t bytes);
  void begin_pass() { in_capture_.reset(); }

  // What is returned is there until the next call. Cost: of what was seen before a comparison, of others a schedule and a copy.
  // More than a side has room for is a bug (std::logic_error). Launches have other shapes only after reserve().
  const AttendLists& attend(TileKernel kernel, Owner owner, const kernels::AttendShape& shape,
                            const internal::AttendCall& call);
  const RowLists& rows(const RowLists::Key& key, std::span<const kernels::RowTask> tasks);
  // On the device in any case, in the order given.
  const kernels::RowTask* as_they_are(std::span<const kernels::RowTask> tasks);

 private:
  // The same bytes in memory of the host and of the device.
  struct Side {
    std::byte* host = nullptr;
    std::byte* device = nullptr;
    std::int64_t used = 0;
    Event left = 0;  // for the other one
  };
  template <typename Lists>
  struct Entry {
    typename Lists::Key key;
    typename Lists::MadeOf made_of;
    Lists lists;
    const Side* side = nullptr;
  };
  template <typename Lists>
  struct Kept {
    std::unordered_multimap<std::size_t, Entry<Lists>> entries;
    Lists latest;  // that are not kept: of a capture, of launches that do not come again, or that launches bring along
  };

  bool in_capture();
  Side make_side() const;
  void release(Side& side) noexcept;
  void release_sides() noexcept;
  Side& side_with_room(std::int64_t bytes);
  void take_room(std::int64_t bytes);
  template <typename... Lists>
  std::tuple<const typename Lists::element_type*...> send(const Lists&... lists);
  template <typename Lists, typename Given, typename Make>
  const Lists& find(Kept<Lists>& kept, const typename Lists::Key& key, const Given& given, Make&& make);

  Runtime& runtime_;
  std::function<void()> progress_;
  std::int64_t capacity_ = 0;
  std::array<Side, internal::kTaskListBlocks> sides_;
  std::size_t current_ = 0;
  std::vector<Side> captured_;
  std::optional<bool> in_capture_;  // this pass, once it is known
  Kept<AttendLists> attends_;
  Kept<RowLists> rows_;
};

}  // namespace ringspan::cuda
