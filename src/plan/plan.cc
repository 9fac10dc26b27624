#include "ringspan/plan.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "plan/cost.h"
#include "plan/device_memory.h"
#include "plan/plan_data.h"
#include "ringspan/error.h"

namespace ringspan {
namespace internal {

std::string_view to_string(TensorKind kind) {
  static constexpr std::array<std::string_view, 18> kNames{
      "q",  "k",     "v", "o", "lse", "do",        "dlse",        "dq",        "dk",
      "dv", "delta", "m", "l", "acc", "partial_o", "partial_lse", "o_float32", "sink_gradient"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::string_view to_string(LaunchKind kind) {
  static constexpr std::array<std::string_view, kLaunchKinds> kNames{
      "fill",          "copy",      "add",   "merge",         "merge_states", "finalize", "delta", "attend", "attend_backward",
      "sink_gradient", "sum_sinks", "fused", "fused_backward"};
  return kNames[static_cast<std::size_t>(kind)];
}

namespace {

template <typename T>
std::int64_t bytes_of(const std::vector<T>& values) {
  return static_cast<std::int64_t>(values.capacity() * sizeof(T));
}

}  // namespace

std::int64_t bytes_of(const Program& program) {
  std::int64_t bytes = bytes_of(program.views) + bytes_of(program.row_items) + bytes_of(program.attend_items) +
                       bytes_of(program.bundles) + bytes_of(program.stages) + bytes_of(program.regions);
  for (const Bundle& bundle : program.bundles) bytes += bytes_of(bundle.boxes) + bytes_of(bundle.parts);
  for (const Stage& stage : program.stages) {
    bytes += bytes_of(stage.before) + bytes_of(stage.copies) + bytes_of(stage.compute) + bytes_of(stage.rounds);
    for (const Round& round : stage.rounds) bytes += bytes_of(round.transfers);
  }
  return bytes;
}

void add_host_bytes(const Program& program, const Launch& launch, Plan::HostBytes* bytes) {
  for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
    const RowItem& item = program.row_items[static_cast<std::size_t>(index)];
    const View& source = program.views[static_cast<std::size_t>(item.operands[0].view)];
    const std::int64_t moved = item.batch_count * item.rows * item.heads.count * launch.width * size_of(source.dtype);
    (source.in_arena ? bytes->to_host : bytes->to_device) += moved;
  }
}

std::string_view to_string(Component component) {
  static constexpr std::array<std::string_view, 6> kNames{"buckets", "staging", "state", "gradients", "saved", "scratch"};
  return kNames[static_cast<std::size_t>(component)];
}

}  // namespace internal

std::string_view to_string(DeviceKind kind) { return kind == DeviceKind::cpu ? "cpu" : "cuda"; }

DeviceKind parse_device_kind(std::string_view name) {
  if (name == "cpu") return DeviceKind::cpu;
  if (name == "cuda") return DeviceKind::cuda;
  throw InvalidArgument("unknown kind of device '" + std::string(name) + "': expected cpu or cuda");
}

std::string_view to_string(Partials partials) { return partials == Partials::storage ? "storage" : "float32"; }

Partials parse_partials(std::string_view name) {
  if (name == "float32") return Partials::float32;
  if (name == "storage") return Partials::storage;
  throw InvalidArgument("unknown kind of partials '" + std::string(name) + "': expected float32 or storage");
}

std::string_view to_string(SizeSource source) {
  static constexpr std::array<std::string_view, 4> kNames{"given", "tuned", "default", "memory budget"};
  return kNames[static_cast<std::size_t>(source)];
}

namespace {

void check_has(const internal::PlanData& data, Pass pass) {
  if (pass == Pass::forward || data.has_backward) return;
  throw InvalidArgument("the plan has no backward pass: it was made with backward = false");
}

const internal::Program& program_of(const internal::PlanData& data, Pass pass) {
  check_has(data, pass);
  return pass == Pass::forward ? data.forward : data.backward;
}

}  // namespace

const Problem& Plan::problem() const { return data_->problem; }
const PlanOptions& Plan::options() const { return data_->options; }
Strategy Plan::strategy() const { return data_->options.strategy; }
int Plan::rank() const { return data_->rank; }
std::int64_t Plan::bucket_rows() const { return data_->options.bucket_rows; }
SizeSource Plan::bucket_source() const { return data_->bucket_source; }
const KernelChoice& Plan::kernel(Pass pass) const {
  check_has(*data_, pass);
  return pass == Pass::forward ? data_->attend : data_->attend_backward;
}
std::int64_t Plan::modelled_nanoseconds() const { return internal::saturated(data_->nanoseconds); }
std::int64_t Plan::slowest_nanoseconds() const { return internal::saturated(data_->slowest_nanoseconds); }
int Plan::ranks_looked_at() const { return data_->ranks_looked_at; }
std::vector<Rejected> Plan::rejected() const { return data_->rejected; }
std::uint64_t Plan::fingerprint() const { return data_->fingerprint; }
std::string Plan::pairs() const { return ringspan::to_string(data_->forward.pairs); }
std::int64_t Plan::excess_rows() const { return data_->forward.excess_rows; }

std::int64_t Plan::arena_bytes() const { return std::max(data_->forward.arena_bytes, data_->backward.arena_bytes); }

std::int64_t Plan::arena_bytes(int rank) const {
  if (rank == data_->rank) return arena_bytes();
  if (data_->has_own_arena) {
    throw Unsupported(
        fmt::format("arena_bytes of rank {}: this plan's arena was laid out for the device of rank {}; ask a plan "
                    "that rank {} was given",
                    rank, data_->rank, rank));
  }
  PlanOptions options = data_->options;
  options.memory_budget = 0;  // everything is decided
  return make_plan(data_->problem, options, rank).arena_bytes();
}

std::vector<MemoryLine> Plan::memory(Pass pass) const {
  std::vector<MemoryLine> lines = internal::caller_memory(*data_, pass);
  std::array<std::int64_t, 6> bytes{};
  for (const internal::Region& region : program_of(*data_, pass).regions) {
    bytes[static_cast<std::size_t>(region.component)] += region.bytes;
  }
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    lines.push_back({std::string(internal::to_string(static_cast<internal::Component>(i))), bytes[i], true});
  }
  const internal::Program& program = program_of(*data_, pass);
  const std::int64_t used = std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
  lines.push_back({"alignment", program.arena_bytes - used, true});
  lines.push_back({"other pass", arena_bytes() - program.arena_bytes, true});
  const std::vector<MemoryLine> beside = internal::device_memory(*data_);
  lines.insert(lines.end(), beside.begin(), beside.end());
  return lines;
}

std::int64_t Plan::memory_bytes(Pass pass) const {
  std::int64_t bytes = 0;
  for (const MemoryLine& line : memory(pass)) bytes += line.pinned ? 0 : line.bytes;
  return bytes;
}

std::int64_t Plan::pinned_bytes(Pass pass) const {
  std::int64_t bytes = 0;
  for (const MemoryLine& line : memory(pass)) bytes += line.pinned ? line.bytes : 0;
  return bytes;
}

std::vector<PeerBytes> Plan::traffic(Pass pass) const {
  std::vector<PeerBytes> peers(static_cast<std::size_t>(data_->problem.ranks));
  for (const internal::Stage& stage : program_of(*data_, pass).stages) {
    for (const internal::Round& round : stage.rounds) {
      for (const internal::Transfer& transfer : round.transfers) {
        PeerBytes& peer = peers[static_cast<std::size_t>(transfer.peer)];
        (transfer.send ? peer.sent_bytes : peer.received_bytes) += transfer.bytes;
        (transfer.send ? peer.sent_messages : peer.received_messages) += 1;
      }
    }
  }
  return peers;
}

Plan::HostTime Plan::host_nanoseconds(Pass pass) const {
  return internal::host_nanoseconds(data_->problem, program_of(*data_, pass), pass, data_->options.cost);
}

Plan::HostBytes Plan::host_bytes(Pass pass) const {
  const internal::Program& program = program_of(*data_, pass);
  HostBytes bytes;
  for (const internal::Stage& stage : program.stages) {
    for (const internal::Launch& launch : stage.copies) internal::add_host_bytes(program, launch, &bytes);
  }
  return bytes;
}

double Plan::flops(Pass pass) const {
  return static_cast<double>(program_of(*data_, pass).pairs) *
         static_cast<double>(internal::flops_per_pair(data_->problem, pass));
}

}  // namespace ringspan
