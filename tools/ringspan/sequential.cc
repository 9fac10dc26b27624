#include "sequential.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <span>
#include <utility>

#include "base/check.h"
#include "base/float16.h"
#include "comm/rounds.h"
#include "file_error.h"
#include "io/whole_file.h"
#include "plan/plan_data.h"

namespace ringspan::cli {
namespace {

using internal::Box;
using internal::Bundle;
using internal::Part;
using internal::PlanData;
using internal::Program;
using internal::TensorKind;
using internal::Transfer;
using internal::TransferOp;

constexpr std::int64_t kLetGoBytes = 1 << 20;  // mapped memory that may pile up before it is let go of

// A zeroed float32 tensor in a file that has no name and is mapped: the system keeps it on disk, not in our memory.
class Accumulator {
 public:
  Accumulator(const std::string& directory, TensorShape shape) : shape_(shape) {
    shape_.dtype = DType::float32;
    if (shape_.bytes() == 0) return;
    const int file = open_unnamed(directory);
    const int refused = io::make_room(file, shape_.bytes());  // or a full disk would be found by a fault
    void* map = MAP_FAILED;
    if (refused == 0)
      map = ::mmap(nullptr, static_cast<std::size_t>(shape_.bytes()), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    const int error = refused != 0 ? refused : errno;
    ::close(file);
    if (map == MAP_FAILED) {
      throw FileError(
          fmt::format("{}: cannot hold {} bytes of gradients: {}", directory, shape_.bytes(), std::strerror(error)));
    }
    data_ = static_cast<float*>(map);
  }
  ~Accumulator() {
    if (data_ != nullptr) ::munmap(data_, static_cast<std::size_t>(shape_.bytes()));
  }
  Accumulator(const Accumulator&) = delete;
  Accumulator& operator=(const Accumulator&) = delete;

  const TensorShape& shape() const { return shape_; }
  float* row(std::int64_t batch, std::int64_t position, std::int64_t head) {
    return data_ + row_index(shape_, batch, position, head) * shape_.width;
  }
  const float* data() const { return data_; }
  void add(std::int64_t batch, std::int64_t position, std::int64_t head, const float* values) {
    float* to = row(batch, position, head);
    for (std::int64_t c = 0; c < shape_.width; ++c) to[c] += values[c];
  }
  void let_go() const {
    if (data_ != nullptr) ::madvise(data_, static_cast<std::size_t>(shape_.bytes()), MADV_DONTNEED);  // shared: the data stays
  }

 private:
  static int open_unnamed(const std::string& directory) {
    int file = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (file >= 0) return file;
    std::string name = directory + "/.ringspan-XXXXXX";
    file = ::mkostemp(name.data(), O_CLOEXEC);
    if (file < 0) throw FileError(fmt::format("{}: cannot hold a temporary file: {}", directory, std::strerror(errno)));
    ::unlink(name.c_str());
    return file;
  }

  TensorShape shape_;
  float* data_ = nullptr;
};

// What the communicator of every rank works on.
struct Shared {
  const Inputs& inputs;
  Accumulator dk, dv;
  std::vector<double> sink_gradients;  // ranks x heads, of the ranks that ran
  std::int64_t touched = 0;

  void touch(std::int64_t bytes) {
    touched += bytes;
    if (touched < kLetGoBytes) return;
    touched = 0;
    inputs.k.let_go();
    inputs.v.let_go();
    dk.let_go();
    dv.let_go();
  }
};

// Calls row(batch, position, head) in the order in which a bundle stores the rows of one part.
template <typename Row>
void for_each_row(const Bundle& bundle, Row row) {
  for (const Box& box : bundle.boxes) {
    for (std::int64_t b = box.batch_first; b < box.batch_first + box.batch_count; ++b) {
      for (std::int64_t i = 0; i < box.positions.count; ++i) {
        for (std::int64_t h = 0; h < box.heads.count; ++h) row(b, box.positions.at(i), box.heads.at(h));
      }
    }
  }
}

class LonelyCommunicator final : public Communicator {
 public:
  LonelyCommunicator(const PlanData& plan, Shared& shared)
      : plan_(plan), shared_(shared), traffic_(static_cast<std::size_t>(size())) {}

  // The transfers that post() is about to see, in the order of the program.
  void begin(const Program& program) {
    program_ = &program;
    rounds_.clear();
    for (const internal::Stage& stage : program.stages) {
      for (const internal::Round& round : stage.rounds) {
        if (!round.transfers.empty()) rounds_.push_back(&round);
      }
    }
    next_ = 0;
  }

  int rank() const override { return plan_.rank; }
  int size() const override { return plan_.problem.ranks; }
  bool test(Request) override { return true; }
  void wait(Request, Seconds) override {}
  void progress() override {}
  void abort(const std::string&) noexcept override {}
  std::unique_ptr<Communicator> duplicate() override { RINGSPAN_CHECK(false); }
  std::span<const PeerTraffic> traffic() const override { return traffic_; }

  Request post(std::uint64_t round, std::span<const Message> batch) override {
    if (round >= kPlanRoundsEnd) {
      echo(batch);
      return ++request_;
    }
    RINGSPAN_CHECK(next_ < rounds_.size());
    const std::vector<Transfer>& transfers = rounds_[next_++]->transfers;
    RINGSPAN_CHECK(transfers.size() == batch.size());
    for (std::size_t i = 0; i < batch.size(); ++i) {
      RINGSPAN_CHECK(batch[i].bytes == transfers[i].bytes && batch[i].peer == transfers[i].peer);
      if (transfers[i].bundle < 0) {
        exchange_sinks(transfers[i], static_cast<std::byte*>(batch[i].data));
      } else if (transfers[i].send) {
        if (transfers[i].op == TransferOp::add) add(bundle_of(transfers[i]), static_cast<const std::byte*>(batch[i].data));
      } else if (transfers[i].op == TransferOp::add) {
        std::memset(batch[i].data, 0, static_cast<std::size_t>(batch[i].bytes));
      } else {
        fetch(bundle_of(transfers[i]), static_cast<std::byte*>(batch[i].data));
      }
      PeerTraffic& traffic = traffic_[static_cast<std::size_t>(batch[i].peer)];
      (transfers[i].send ? traffic.sent_bytes : traffic.received_bytes) += batch[i].bytes;
      (transfers[i].send ? traffic.sent_messages : traffic.received_messages) += 1;
    }
    return ++request_;
  }

 private:
  const Bundle& bundle_of(const Transfer& transfer) const {
    return program_->bundles[static_cast<std::size_t>(transfer.bundle)];
  }

  // The ranks make sure that all are about to do the same: they are all this process.
  static void echo(std::span<const Message> batch) {
    RINGSPAN_CHECK(batch.size() == 2 && batch[0].bytes == batch[1].bytes && batch[0].direction != batch[1].direction);
    const bool send_first = batch[0].direction == Message::Direction::send;
    std::memcpy(batch[send_first ? 1 : 0].data, batch[send_first ? 0 : 1].data, static_cast<std::size_t>(batch[0].bytes));
  }

  void fetch(const Bundle& bundle, std::byte* to) {
    for (const Part& part : bundle.parts) {
      RINGSPAN_CHECK(part.kind == TensorKind::k || part.kind == TensorKind::v);
      const GlobalTensor& from = part.kind == TensorKind::k ? shared_.inputs.k : shared_.inputs.v;
      const std::int64_t bytes = part.width * size_of(part.dtype);
      for_each_row(bundle, [&](std::int64_t b, std::int64_t position, std::int64_t head) {
        std::memcpy(to, from.row(b, position, head), static_cast<std::size_t>(bytes));
        to += bytes;
      });
    }
    shared_.touch(bundle.bytes);
  }

  void add(const Bundle& bundle, const std::byte* from) {
    for (const Part& part : bundle.parts) {
      RINGSPAN_CHECK((part.kind == TensorKind::dk || part.kind == TensorKind::dv) && part.dtype == DType::float32);
      Accumulator& to = part.kind == TensorKind::dk ? shared_.dk : shared_.dv;
      const auto* values = reinterpret_cast<const float*>(from);
      for_each_row(bundle, [&](std::int64_t b, std::int64_t position, std::int64_t head) {
        to.add(b, position, head, values);
        values += part.width;
      });
      from = reinterpret_cast<const std::byte*>(values);
    }
    shared_.touch(bundle.bytes);
  }

  // Ranks that ran before have left their part; the last rank sees all of them.
  void exchange_sinks(const Transfer& transfer, std::byte* data) {
    double* row = shared_.sink_gradients.data() + static_cast<std::ptrdiff_t>(transfer.source) * plan_.problem.heads;
    if (transfer.send) {
      std::memcpy(row, data, static_cast<std::size_t>(transfer.bytes));
    } else {
      std::memcpy(data, row, static_cast<std::size_t>(transfer.bytes));
    }
  }

  const PlanData& plan_;
  Shared& shared_;
  const Program* program_ = nullptr;
  std::vector<const internal::Round*> rounds_;
  std::size_t next_ = 0;
  Request request_ = 0;
  std::vector<PeerTraffic> traffic_;
};

// The rank's own part of dk or dv in float32: the caller's tensor, or, for 16-bit tensors, the rows in the arena from which the
// program's last copies round to them.
const float* in_float32(const PlanData& plan, TensorKind kind, const std::byte* arena, const std::byte* own) {
  if (plan.problem.dtype == DType::float32) return reinterpret_cast<const float*>(own);
  const Program& program = plan.backward;
  for (const internal::RowItem& item : program.row_items) {
    const std::int32_t destination = item.operands[1].view;
    if (destination < 0) continue;
    const internal::View& to = program.views[static_cast<std::size_t>(destination)];
    if (to.in_arena || to.kind != kind) continue;
    const internal::View& from = program.views[static_cast<std::size_t>(item.operands[0].view)];
    const std::int64_t heads = plan.problem.kv_heads;
    RINGSPAN_CHECK(from.in_arena && from.dtype == DType::float32 && from.row_stride == heads * from.width &&
                   from.head_stride == from.width && from.batch_stride == plan.shard_k.rows * heads * from.width);
    return reinterpret_cast<const float*>(arena + from.offset);
  }
  return nullptr;  // the rank holds no keys
}

void add_own(const PlanData& plan, TensorKind kind, const std::byte* arena, const std::byte* own, Shared& shared) {
  Accumulator& to = kind == TensorKind::dk ? shared.dk : shared.dv;
  const float* from = in_float32(plan, kind, arena, own);
  if (from == nullptr) return;
  // In the arena rows lie as (batch, rows, heads, width), in the caller's tensor as in the file.
  TensorShape local = to.shape();
  local.tokens = plan.shard_k.rows;
  if (plan.problem.dtype != DType::float32) local.layout = Layout::bshd;
  for (std::int64_t b = 0; b < local.batch; ++b) {
    for (std::size_t i = 0; i < plan.shard_k.pieces.size(); ++i) {
      const Progression& piece = plan.shard_k.pieces[i];
      for (std::int64_t k = 0; k < piece.count; ++k) {
        for (std::int64_t h = 0; h < local.heads; ++h) {
          to.add(b, piece.at(k), h, from + row_index(local, b, plan.shard_k.offsets[i] + k, h) * local.width);
        }
        shared.touch(local.heads * local.width * 4);
      }
    }
  }
}

// Rounds the sums to the storage dtype, a piece at a time.
void store(const Accumulator& sums, DType dtype, std::string_view name, Shared& shared, Target& target) {
  constexpr std::int64_t kPiece = 1 << 18;  // elements
  const std::int64_t elements = sums.shape().bytes() / 4;
  std::vector<std::uint16_t> rounded(dtype == DType::float32 ? 0 : static_cast<std::size_t>(std::min(kPiece, elements)));
  for (std::int64_t first = 0; first < elements; first += kPiece) {
    const std::int64_t count = std::min(kPiece, elements - first);
    const float* from = sums.data() + first;
    if (dtype == DType::float32) {
      target.write(name, first * 4, from, count * 4);
    } else {
      for (std::int64_t i = 0; i < count; ++i) {
        rounded[static_cast<std::size_t>(i)] =
            dtype == DType::bfloat16 ? float_to_bfloat16(from[i]) : float_to_float16(from[i]);
      }
      target.write(name, first * 2, rounded.data(), count * 2);
    }
    shared.touch(count * 4);
  }
}

// Resident memory of this process now and at its peak since the mark was reset, from /proc.
std::int64_t status_bytes(std::string_view key) {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.starts_with(key)) return std::stoll(line.substr(key.size())) * 1024;
  }
  return 0;
}
void reset_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

void check_supported(const Problem& problem, const Plan& plan) {
  if (plan.strategy() != Strategy::exchange) {
    throw Unsupported(
        fmt::format("run --sequential needs --strategy exchange, in which rows go straight from their owner to their reader; "
                    "this plan is {}",
                    to_string(plan.strategy())));
  }
  if (problem.replicated_q) throw Unsupported("run --sequential needs sharded queries; leave out --replicated-q");
}

// One rank from its input to its part of the output; its memory is free again when this returns.
void run_rank(const Plan& plan, const Inputs& inputs, Layout layout, const WorldOptions& options, Shared& shared,
              Target& target, SequentialReport& report) {
  const PlanData& data = plan.data();
  const int ranks = data.problem.ranks;
  report.forecast_bytes = std::max(report.forecast_bytes, memory_bytes(plan, inputs.dlse.data != nullptr));
  const Pages arena(plan.arena_bytes());
  RankWork work(plan, inputs, layout);
  LonelyCommunicator communicator(data, shared);
  ProgressLine line(options.show_progress);
  WatchedCommunicator watched(communicator, plan, &line);
  watched.set_prefix(fmt::format("rank {}/{} ", data.rank, ranks));
  Attention attention(plan, watched, options.execute, {arena.data(), static_cast<std::size_t>(arena.bytes())});
  const auto announce = [&](Pass pass) { communicator.begin(pass == Pass::forward ? data.forward : data.backward); };
  report.world.ranks.push_back(work.run(attention, watched, announce));
  report.world.forward_seconds += report.world.ranks.back().forward_seconds;
  report.world.backward_seconds += report.world.ranks.back().backward_seconds;
  report.world.sent.insert(report.world.sent.end(), watched.sent_bytes().begin(), watched.sent_bytes().end());
  work.store_queries(target);
  if (data.has_backward) {
    add_own(data, TensorKind::dk, arena.data(), work.dk(), shared);
    add_own(data, TensorKind::dv, arena.data(), work.dv(), shared);
  }
  if (data.rank + 1 == ranks) work.store_sinks(target);
}

}  // namespace

SequentialReport run_sequentially(const Problem& problem, const PlanOptions& plan_options, const Inputs& inputs, Layout layout,
                                  const WorldOptions& options, const std::string& scratch_directory, Target& target) {
  const bool backward = plan_options.backward;
  const OutputShapes shapes(problem, layout);
  check_supported(problem, make_plan(problem, plan_options, 0));
  const auto accumulated = [&](TensorShape shape) {
    if (!backward) shape.tokens = 0;
    return shape;
  };
  Shared shared{inputs, {scratch_directory, accumulated(shapes.dk)}, {scratch_directory, accumulated(shapes.dv)}, {}, 0};
  shared.sink_gradients.assign(static_cast<std::size_t>(problem.ranks) * static_cast<std::size_t>(problem.heads), 0.0);
  SequentialReport report;
  reset_peak();
  const std::int64_t resident = status_bytes("VmRSS:");
  for (int rank = 0; rank < problem.ranks; ++rank) {
    throw_if_interrupted();
    run_rank(make_plan(problem, plan_options, rank), inputs, layout, options, shared, target, report);
  }
  if (backward) {
    store(shared.dk, problem.dtype, "dk", shared, target);
    store(shared.dv, problem.dtype, "dv", shared, target);
  }
  report.world.seconds = report.world.forward_seconds + report.world.backward_seconds;
  report.peak_bytes = status_bytes("VmHWM:") - resident;
  return report;
}

}  // namespace ringspan::cli
