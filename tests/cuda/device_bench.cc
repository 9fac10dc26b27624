// Times attention on a device through the public API, checks nothing, and prints one JSON object per line:
//     device_bench DEVICE RANKS DTYPE HEADS KV_HEADS HEAD_DIM TOKENS PATTERN SHARDING STRATEGY REPEATS [TRANSPORT [KERNEL
//     [graph]]]
// Ranks are threads; TRANSPORT is what moves their messages: host (through pinned memory, the default), peer (copies from
// device to device) or nccl (every rank a GPU of its own); or stream: ranks whose tensors lie on their hosts. KERNEL names the
// tile kernel of both passes: own (the default), mma, wgmma, or cudnn, with deterministic = false. graph: passes are replays of
// CUDA graphs, of all ranks together; one rank, or several on one GPU with peer. Seconds are the
// median over REPEATS passes after two that are not counted, of the host's clock around a pass and its end on all ranks.
// TFLOP/s count 4 n m h d per visible pair forward and 10 backward.
#include <fmt/format.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <list>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/float16.h"
#include "cuda/device_world.h"
#ifdef RINGSPAN_HAS_CUDA
#include "cuda/rank_graph.h"
#endif
#include "ringspan/error.h"
#include "ringspan/transports.h"

namespace ringspan::testing {
namespace {

#ifndef RINGSPAN_HAS_CUDA
struct RankGraph {
  explicit RankGraph(int /*ranks*/) { throw Unsupported("graph: this program was built without CUDA"); }
  void* stream(int /*rank*/) const { return nullptr; }
  void begin() {}
  void end() {}
  void launch_and_wait() {}
};
#endif

struct Times {
  explicit Times(int ranks) : passes(ranks) {}
  std::barrier<> passes;  // all ranks begin one together, and it ends when the last of them is done
  std::vector<double> forward, backward;
  std::string kernels[2];
};

// Some thousand normals, repeated: drawing 10^9 takes longer than what is measured.
std::vector<std::byte> random_values(DType dtype, std::int64_t elements, std::uint64_t seed) {
  constexpr std::int64_t kPeriod = 8191;
  const std::int64_t size = size_of(dtype);
  std::vector<std::byte> period(static_cast<std::size_t>(kPeriod * size));
  std::mt19937 random(static_cast<unsigned>(seed));
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < kPeriod; ++i) {
    const float value = normal(random);
    const std::uint16_t half = dtype == DType::bfloat16 ? float_to_bfloat16(value) : float_to_float16(value);
    std::memcpy(period.data() + i * size, dtype == DType::float32 ? static_cast<const void*>(&value) : &half,
                static_cast<std::size_t>(size));
  }
  std::vector<std::byte> bytes(static_cast<std::size_t>(elements * size));
  for (std::size_t at = 0; at < bytes.size(); at += period.size()) {
    std::memcpy(bytes.data() + at, period.data(), std::min(period.size(), bytes.size() - at));
  }
  return bytes;
}

class Buffers {
 public:
  Buffers(const std::string& device, const internal::PlanData& plan) : device_(device), plan_(plan) {}
  Tensor make(internal::TensorKind kind, bool filled) {
    const internal::TensorShape s = internal::shape_of(plan_, kind);
    const std::int64_t elements = s.batch * s.rows * s.heads * s.width;
    using Place = DeviceBuffer::Place;
    buffers_.emplace_back(device_, std::max<std::int64_t>(elements * size_of(s.dtype), 1),
                          plan_.options.host_tensors ? Place::pinned_host : Place::device);
    if (filled) {
      const std::vector<std::byte> values = random_values(s.dtype, elements, buffers_.size());
      buffers_.back().copy_from_host(values.data(), static_cast<std::int64_t>(values.size()));
    }
    void* data = buffers_.back().data();
    if (kind == internal::TensorKind::lse) return dense_bhsd(data, s.rows, s.heads, 1);
    return dense_bshd(data, s.rows, s.heads, s.width);
  }

 private:
  std::string device_;
  const internal::PlanData& plan_;
  std::list<DeviceBuffer> buffers_;
};

// "cuda%4": rank r on cuda:(r mod 4).
std::string device_of(const std::string& device, int rank) {
  if (!device.starts_with("cuda%")) return device;
  return "cuda:" + std::to_string(rank % std::max(1, std::atoi(device.c_str() + 5)));
}

// A pass runs as it is first, so that a replay finds what it reads.
void time_replays(Attention& attention, const ForwardTensors& f, const BackwardTensors& b, int repeats, int rank, Times* times,
                  RankGraph& graph) {
  const auto on_rank_zero = [&](const auto& action) {
    times->passes.arrive_and_wait();
    if (rank == 0) action();
    times->passes.arrive_and_wait();
  };
  const auto time = [&](const auto& pass, std::vector<double>& seconds) {
    pass();
    attention.wait();
    on_rank_zero([&] { graph.begin(); });
    pass();
    on_rank_zero([&] {
      graph.end();
      for (int index = -2; index < repeats; ++index) {
        const auto begin = std::chrono::steady_clock::now();
        graph.launch_and_wait();
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
        if (index >= 0) seconds.push_back(taken.count());
      }
    });
  };
  time([&] { attention.forward(f); }, times->forward);
  time([&] { attention.backward(b); }, times->backward);
}

void run_rank(const std::string& device, const Problem& problem, const PlanOptions& options, int repeats,
              Communicator& communicator, Times* times, RankGraph* graph) {
  ExecuteOptions execute;
  execute.device = device;
  if (graph != nullptr) execute.stream = graph->stream(communicator.rank());
  execute.deterministic = options.attend_kernel != "cudnn";
  Attention attention(problem, options, communicator, execute);
  const internal::PlanData& plan = attention.plan().data();
  if (communicator.rank() == 0) times->kernels[0] = plan.attend.name, times->kernels[1] = plan.attend_backward.name;
  using Kind = internal::TensorKind;
  Buffers buffers(device, plan);
  ForwardTensors f;
  BackwardTensors b;
  const Tensor q = buffers.make(Kind::q, true), k = buffers.make(Kind::k, true), v = buffers.make(Kind::v, true);
  f.q = b.q = q, f.k = b.k = k, f.v = b.v = v;
  f.o = buffers.make(Kind::o, false), f.lse = buffers.make(Kind::lse, false);
  b.o = f.o, b.lse = f.lse;
  b.d_out = buffers.make(Kind::d_out, true);
  b.dq = buffers.make(Kind::dq, false), b.dk = buffers.make(Kind::dk, false), b.dv = buffers.make(Kind::dv, false);
  if (graph != nullptr) return time_replays(attention, f, b, repeats, communicator.rank(), times, *graph);
  for (int index = -2; index < repeats; ++index) {
    times->passes.arrive_and_wait();
    const auto begin = std::chrono::steady_clock::now();
    attention.forward(f);
    attention.wait();
    times->passes.arrive_and_wait();
    const auto middle = std::chrono::steady_clock::now();
    attention.backward(b);
    attention.wait();
    times->passes.arrive_and_wait();
    const auto end = std::chrono::steady_clock::now();
    if (index < 0 || communicator.rank() != 0) continue;
    times->forward.push_back(std::chrono::duration<double>(middle - begin).count());
    times->backward.push_back(std::chrono::duration<double>(end - middle).count());
  }
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int bench(int argc, char** argv) {
  const std::string transport = argc > 12 ? argv[12] : "host";
  const std::string kernel = argc > 13 ? argv[13] : "own";
  const bool replays = argc > 14 && std::string_view(argv[14]) == "graph";
  constexpr std::string_view kTransports[] = {"host", "peer", "nccl", "stream"};
  if (argc < 12 || argc > 15 || replays != (argc == 15) ||
      std::find(std::begin(kTransports), std::end(kTransports), transport) == std::end(kTransports)) {
    fmt::print(stderr,
               "usage: device_bench DEVICE RANKS DTYPE HEADS KV_HEADS HEAD_DIM TOKENS PATTERN SHARDING STRATEGY REPEATS "
               "[host|peer|nccl|stream [own|mma|wgmma|cudnn [graph]]]\n");
    return 2;
  }
  Problem p;
  p.ranks = std::atoi(argv[2]);
  p.dtype = parse_dtype(argv[3]);
  p.heads = std::atoi(argv[4]);
  p.kv_heads = std::atoi(argv[5]);
  p.head_dim = p.head_dim_v = std::atoi(argv[6]);
  p.tokens_q = p.tokens_k = std::atoll(argv[7]);
  p.pattern = Pattern::parse(argv[8]);
  p.sharding_q = p.sharding_k = Sharding::parse(argv[9]);
  PlanOptions options;
  options.strategy = parse_strategy(argv[10]);
  options.host_tensors = transport == "stream";
  options.keep_o_float32 = !options.host_tensors;
  options.attend_kernel = options.attend_backward_kernel = kernel;
  const int repeats = std::max(1, std::atoi(argv[11]));
  Times times(p.ranks);
  const std::unique_ptr<RankGraph> graph = replays ? std::make_unique<RankGraph>(p.ranks) : nullptr;
  std::vector<std::string> devices;
  for (int rank = 0; rank < p.ranks; ++rank) devices.push_back(device_of(argv[1], rank));
  run_thread_ranks(transport == "peer" ? make_thread_world(devices) : make_thread_world(p.ranks),
                   [&](Communicator& communicator) {
                     const std::string& device = devices[static_cast<std::size_t>(communicator.rank())];
                     std::unique_ptr<Communicator> nccl;
                     if (transport == "nccl") {
                       NcclOptions nccl_options;
                       nccl_options.device = device;
                       nccl = make_nccl_communicator(communicator, nccl_options);
                     }
                     try {
                       run_rank(device, p, options, repeats, nccl ? *nccl : communicator, &times, graph.get());
                     } catch (...) {
                       times.passes.arrive_and_drop();  // the others may wait there
                       throw;
                     }
                   });
  double pairs = 0;
  for (int rank = 0; rank < p.ranks; ++rank) {
    PlanOptions on_device = options;
    on_device.device = DeviceKind::cuda;
    pairs += static_cast<double>(make_plan(p, on_device, rank).data().forward.pairs);
  }
  const double flops = 4.0 * pairs * p.head_dim;
  const double forward = median(times.forward), backward = median(times.backward);
  fmt::print(
      "{{\"device\": \"{}\", \"ranks\": {}, \"dtype\": \"{}\", \"heads\": {}, \"kv_heads\": {}, \"head_dim\": {}, \"tokens\": "
      "{}, "
      "\"pattern\": \"{}\", \"sharding\": \"{}\", \"strategy\": \"{}\", \"transport\": \"{}\", \"kernel\": \"{}\", \"graph\": "
      "{}, "
      "\"kernels\": [\"{}\", \"{}\"], "
      "\"repeats\": {}, "
      "\"forward_seconds\": {:.6g}, "
      "\"backward_seconds\": {:.6g}, \"forward_tflops\": {:.4g}, \"backward_tflops\": {:.4g}}}\n",
      argv[1], p.ranks, ringspan::to_string(p.dtype), p.heads, p.kv_heads, p.head_dim, p.tokens_q, argv[8], argv[9], argv[10],
      transport, kernel, replays, times.kernels[0], times.kernels[1], repeats, forward, backward, flops / forward / 1e12,
      2.5 * flops / backward / 1e12);
  return 0;
}

}  // namespace
}  // namespace ringspan::testing

int main(int argc, char** argv) {
  try {
    return ringspan::testing::bench(argc, argv);
  } catch (const std::exception& error) {
    std::string what;
    for (const char c : std::string_view(error.what())) {
      if (c == '"' || c == '\\') what += '\\';
      what += c == '\n' ? ' ' : c;  // of the place in a pattern
    }
    fmt::print("{{\"error\": \"{}\", \"tokens\": \"{}\", \"pattern\": \"{}\"}}\n", what, argc > 7 ? argv[7] : "",
               argc > 8 ? argv[8] : "");
    return 1;
  }
}
