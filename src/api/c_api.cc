// The C API: translation of structs, handles and errors; nothing is computed here and nothing is thrown through it.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "api/c_support.h"
#include "comm/rounds.h"
#include "exec/handshake.h"
#include "pattern/validate.h"
#include "ringspan/ringspan.h"
#include "ringspan/ringspan_c.h"

using ringspan::InvalidArgument;
using ringspan::c_api::guard;
using ringspan::c_api::read;
using ringspan::c_api::read_optional;
using ringspan::c_api::require;
using ringspan::c_api::size_of_struct;

struct ringspan_plan {
  ringspan::Plan plan;
  std::string text, json;
};

struct ringspan_attention {
  std::shared_ptr<ringspan::Communicator> communicator;  // outlives the attention
  ringspan::Attention attention;
  std::string trace;
};

namespace {

constexpr std::uint64_t kMostItems = ringspan::internal::kMaxTokens;  // of a batch, or documents

template <typename T>
std::vector<T> list_of(const T* data, std::uint64_t count, const char* name) {
  if (data == nullptr && count > 0) throw InvalidArgument(fmt::format("{} is null, but {} entries are announced", name, count));
  if (count > kMostItems) throw InvalidArgument(fmt::format("{} has {} entries, but at most {}", name, count, kMostItems));
  return data == nullptr ? std::vector<T>{} : std::vector<T>(data, data + count);
}

ringspan::DType dtype_of(std::int32_t value) {
  if (value < RINGSPAN_FLOAT32 || value > RINGSPAN_FLOAT16) {
    throw InvalidArgument(fmt::format("dtype ({}) must be RINGSPAN_FLOAT32, RINGSPAN_BFLOAT16 or RINGSPAN_FLOAT16", value));
  }
  return static_cast<ringspan::DType>(value);
}

ringspan::Pass pass_of(std::int32_t value) {
  if (value != RINGSPAN_FORWARD && value != RINGSPAN_BACKWARD) {
    throw InvalidArgument(fmt::format("pass ({}) must be RINGSPAN_FORWARD or RINGSPAN_BACKWARD", value));
  }
  return static_cast<ringspan::Pass>(value);
}

template <typename T>
T or_default(T value, T otherwise) {
  return value == T{} ? otherwise : value;
}

bool flag(std::int32_t value, const char* name) {
  if (value != 0 && value != 1) throw InvalidArgument(fmt::format("{} ({}) must be 0 or 1", name, value));
  return value == 1;
}

ringspan::Problem problem_of(const ringspan_problem* pointer) {
  const ringspan_problem given = read(pointer, "problem");
  ringspan::Problem problem;
  problem.batch = or_default(given.batch, std::int64_t{1});
  problem.tokens_q = given.tokens_q;
  problem.tokens_k = given.tokens_k;
  problem.heads = given.heads;
  problem.kv_heads = or_default(given.kv_heads, given.heads);
  problem.head_dim = given.head_dim;
  problem.head_dim_v = or_default(given.head_dim_v, given.head_dim);
  problem.dtype = dtype_of(given.dtype);
  problem.ranks = or_default(given.ranks, 1);
  problem.replicated_q = flag(given.replicated_q, "replicated_q");
  problem.alibi = flag(given.alibi, "alibi");
  problem.sinks = flag(given.sinks, "sinks");
  problem.scale = given.scale;
  problem.softcap = given.softcap;
  problem.dropout = given.dropout;
  problem.seed = given.seed;
  if (given.pattern != nullptr) problem.pattern = ringspan::Pattern::parse(given.pattern);
  if (given.sharding_q != nullptr) problem.sharding_q = ringspan::Sharding::parse(given.sharding_q);
  if (given.sharding_k != nullptr) problem.sharding_k = ringspan::Sharding::parse(given.sharding_k);
  problem.cu_seqlens_q = list_of(given.cu_seqlens_q, given.cu_seqlens_q_count, "cu_seqlens_q");
  problem.cu_seqlens_k = list_of(given.cu_seqlens_k, given.cu_seqlens_k_count, "cu_seqlens_k");
  const auto batch = static_cast<std::uint64_t>(problem.batch);
  const std::uint64_t items = batch <= kMostItems ? batch : 0;  // another one will be refused
  if (given.lengths_q != nullptr) problem.lengths_q = list_of(given.lengths_q, items, "lengths_q");
  if (given.lengths_k != nullptr) problem.lengths_k = list_of(given.lengths_k, items, "lengths_k");
  if (given.starts_k != nullptr) problem.starts_k = list_of(given.starts_k, items, "starts_k");
  return problem;
}

ringspan::PlanOptions options_of(const ringspan_options* pointer) {
  const ringspan_options given = read_optional(pointer, "options");
  if (given.reserved != 0) throw InvalidArgument(fmt::format("options.reserved ({}) must be 0", given.reserved));
  ringspan::PlanOptions options;
  if (given.strategy != nullptr) options.strategy = ringspan::parse_strategy(given.strategy);
  options.bucket_rows = given.bucket_rows;
  options.memory_budget = given.memory_budget;
  options.computing_ranks = given.computing_ranks;
  options.threads = or_default(given.threads, 1);
  options.backward = !flag(given.forward_only, "forward_only");
  options.keep_o_float32 = !flag(given.round_o, "round_o");
  options.cost.flops_per_second = or_default(given.flops_per_second, options.cost.flops_per_second);
  options.cost.bytes_per_second = or_default(given.bytes_per_second, options.cost.bytes_per_second);
  options.cost.message_nanoseconds = or_default(given.message_nanoseconds, options.cost.message_nanoseconds);
  options.cost.host_bytes_per_second = or_default(given.host_bytes_per_second, options.cost.host_bytes_per_second);
  if (given.attend_kernel != nullptr) options.attend_kernel = given.attend_kernel;
  if (given.attend_backward_kernel != nullptr) options.attend_backward_kernel = given.attend_backward_kernel;
  options.attend_tile = {given.attend_tile_queries, given.attend_tile_keys};
  options.attend_backward_tile = {given.attend_backward_tile_queries, given.attend_backward_tile_keys};
  options.host_tensors = flag(given.host_tensors, "host_tensors");
  if (given.device != nullptr) options.device = ringspan::parse_device_kind(given.device);
  if (given.partials != nullptr) options.partials = ringspan::parse_partials(given.partials);
  return options;
}

ringspan::ExecuteOptions execute_of(const ringspan_execute_options* pointer) {
  const ringspan_execute_options given = read_optional(pointer, "execute");
  ringspan::ExecuteOptions execute;
  if (given.deadline_seconds != 0) execute.deadline = ringspan::Communicator::Seconds(given.deadline_seconds);
  execute.trace = flag(given.trace, "trace");
  if (given.device != nullptr) execute.device = given.device;
  execute.stream = given.stream;
  execute.deterministic = !flag(given.nondeterministic, "nondeterministic");
  execute.caller_threads = {given.run_on_threads, given.run_on_threads_context};
  return execute;
}

ringspan::Tensor tensor_of(const ringspan_tensor& tensor) {
  return {tensor.data, tensor.batch_stride, tensor.token_stride, tensor.head_stride};
}

// The caller's tensors, or the error on all ranks: they count this call too.
template <typename Struct>
Struct read_or_refuse(ringspan::Attention& attention, ringspan::Pass pass, const Struct* given) {
  try {
    return read(given, "tensors");
  } catch (const ringspan::Error&) {
    attention.refuse(pass, std::current_exception());
  }
}

void check_backward(const ringspan::Plan& plan, ringspan::Pass pass) {
  if (pass == ringspan::Pass::backward && !plan.options().backward) {
    throw InvalidArgument("the plan has no backward pass: it was made with forward_only = 1");
  }
}

}  // namespace

extern "C" {

const char* ringspan_version(void) {
  static const std::string version = ringspan::c_api::version_text();
  return version.c_str();
}

const char* ringspan_last_error(void) { return ringspan::c_api::last_error().c_str(); }

int32_t ringspan_shard_positions(const ringspan_problem* problem, int32_t side, int32_t rank, int64_t* positions,
                                 uint64_t capacity, uint64_t* rows) {
  return guard([&] {
    const ringspan::Problem p = problem_of(problem);
    p.validate();
    if (side != RINGSPAN_QUERIES && side != RINGSPAN_KEYS) {
      throw InvalidArgument(fmt::format("side ({}) must be RINGSPAN_QUERIES or RINGSPAN_KEYS", side));
    }
    if (rank < 0 || rank >= p.ranks) throw InvalidArgument(fmt::format("rank ({}) must be in [0, {})", rank, p.ranks));
    const bool whole = side == RINGSPAN_QUERIES && p.replicated_q;
    const ringspan::Shard shard = whole                      ? ringspan::make_shard({}, p.tokens_q, 1, 0)
                                  : side == RINGSPAN_QUERIES ? ringspan::make_shard(p.sharding_q, p.tokens_q, p.ranks, rank)
                                                             : ringspan::make_shard(p.sharding_k, p.tokens_k, p.ranks, rank);
    require(rows, "rows");
    if (positions != nullptr && capacity >= static_cast<std::uint64_t>(shard.rows)) {
      const std::vector<std::int64_t> list = shard.positions();
      std::copy(list.begin(), list.end(), positions);
    }
    *rows = static_cast<std::uint64_t>(shard.rows);
  });
}

int32_t ringspan_plan_create(const ringspan_problem* problem, const ringspan_options* options, int32_t rank,
                             ringspan_plan** plan) {
  return guard([&] {
    require(plan, "plan") = nullptr;
    const ringspan::Problem p = problem_of(problem);
    *plan = new ringspan_plan{ringspan::make_plan(p, ringspan::with_tuned_sizes(p, options_of(options)), rank), {}, {}};
  });
}

void ringspan_plan_destroy(ringspan_plan* plan) { delete plan; }

int32_t ringspan_plan_arena_bytes(const ringspan_plan* plan, int32_t rank, int64_t* bytes) {
  return guard([&] { require(bytes, "bytes") = require(plan, "plan").plan.arena_bytes(rank); });
}

int32_t ringspan_plan_memory(const ringspan_plan* plan, int32_t pass, ringspan_memory_line* lines, uint64_t capacity,
                             uint64_t* count) {
  return guard([&] {
    check_backward(require(plan, "plan").plan, pass_of(pass));
    const std::vector<ringspan::MemoryLine> memory = plan->plan.memory(pass_of(pass));
    require(count, "count") = memory.size();
    if (lines == nullptr || capacity < memory.size()) return;
    for (std::size_t index = 0; index < memory.size(); ++index) {
      ringspan_memory_line& line = lines[index];
      std::memset(&line, 0, sizeof line);
      memory[index].component.copy(line.component, sizeof line.component - 1);
      line.bytes = memory[index].bytes;
      line.in_arena = memory[index].in_arena ? 1 : 0;
      line.pinned = memory[index].pinned ? 1 : 0;
    }
  });
}

int32_t ringspan_plan_traffic(const ringspan_plan* plan, int32_t pass, ringspan_peer_traffic* entries, uint64_t capacity) {
  return guard([&] {
    check_backward(require(plan, "plan").plan, pass_of(pass));
    const std::vector<ringspan::PeerBytes> traffic = plan->plan.traffic(pass_of(pass));
    if (capacity < traffic.size()) {
      throw InvalidArgument(fmt::format("capacity ({}) must be at least ranks ({})", capacity, traffic.size()));
    }
    require(entries, "entries");
    for (std::size_t peer = 0; peer < traffic.size(); ++peer) {
      const ringspan::PeerBytes& bytes = traffic[peer];
      entries[peer] = {bytes.sent_bytes, bytes.received_bytes, bytes.sent_messages, bytes.received_messages};
    }
  });
}

int32_t ringspan_plan_host_bytes(const ringspan_plan* plan, int32_t pass, int64_t* to_device, int64_t* to_host) {
  return guard([&] {
    check_backward(require(plan, "plan").plan, pass_of(pass));
    const ringspan::Plan::HostBytes bytes = plan->plan.host_bytes(pass_of(pass));
    require(to_device, "to_device"), require(to_host, "to_host");
    *to_device = bytes.to_device, *to_host = bytes.to_host;
  });
}

int32_t ringspan_plan_host_nanoseconds(const ringspan_plan* plan, int32_t pass, int64_t* copies, int64_t* exposed) {
  return guard([&] {
    check_backward(require(plan, "plan").plan, pass_of(pass));
    const ringspan::Plan::HostTime time = plan->plan.host_nanoseconds(pass_of(pass));
    require(copies, "copies"), require(exposed, "exposed");
    *copies = time.copies, *exposed = time.exposed;
  });
}

int32_t ringspan_plan_fingerprint(const ringspan_plan* plan, uint64_t* fingerprint) {
  return guard([&] { require(fingerprint, "fingerprint") = require(plan, "plan").plan.fingerprint(); });
}

int32_t ringspan_plan_text(ringspan_plan* plan, const char** text) {
  return guard([&] {
    require(text, "text") = nullptr;
    if (require(plan, "plan").text.empty()) plan->text = plan->plan.to_string();
    *text = plan->text.c_str();
  });
}

int32_t ringspan_plan_json(ringspan_plan* plan, const char** json) {
  return guard([&] {
    require(json, "json") = nullptr;
    if (require(plan, "plan").json.empty()) plan->json = plan->plan.to_json();
    *json = plan->json.c_str();
  });
}

int32_t ringspan_comm_create_threads(int32_t ranks, ringspan_comm** comms) {
  return guard([&] {
    require(comms, "comms");
    auto world = ringspan::make_thread_world(ranks);
    std::vector<std::unique_ptr<ringspan_comm>> made;
    for (auto& communicator : world) made.push_back(std::make_unique<ringspan_comm>(ringspan_comm{std::move(communicator)}));
    for (std::size_t rank = 0; rank < made.size(); ++rank) comms[rank] = made[rank].release();
  });
}

int32_t ringspan_comm_create(const ringspan_communicator* callbacks, ringspan_comm** comm) {
  return guard([&] {
    require(comm, "comm") = nullptr;
    auto handle = std::make_unique<ringspan_comm>();
    // Nothing may fail after it is made, which would destroy what is still the caller's.
    const auto owner = std::make_shared<std::unique_ptr<ringspan::Communicator>>();
    *owner = ringspan::make_communicator(require(callbacks, "callbacks"));
    handle->communicator = std::shared_ptr<ringspan::Communicator>(owner, owner->get());
    *comm = handle.release();
  });
}

void ringspan_comm_destroy(ringspan_comm* comm) { delete comm; }

int32_t ringspan_comm_rank(const ringspan_comm* comm, int32_t* rank) {
  return guard([&] { require(rank, "rank") = require(comm, "comm").communicator->rank(); });
}

int32_t ringspan_comm_size(const ringspan_comm* comm, int32_t* size) {
  return guard([&] { require(size, "size") = require(comm, "comm").communicator->size(); });
}

int32_t ringspan_comm_abort(ringspan_comm* comm, const char* reason) {
  return guard([&] { require(comm, "comm").communicator->abort(reason == nullptr ? "no reason given" : reason); });
}

int32_t ringspan_attention_create(const ringspan_problem* problem, const ringspan_options* options, ringspan_comm* comm,
                                  const ringspan_execute_options* execute, ringspan_attention** attention) {
  return guard([&] {
    if (attention != nullptr) *attention = nullptr;
    const auto& communicator = require(comm, "comm").communicator;
    ringspan::Problem p;
    ringspan::PlanOptions o;
    ringspan::ExecuteOptions e;
    try {
      require(attention, "attention");
      e = execute_of(execute);
      p = problem_of(problem);
      o = options_of(options);
    } catch (const std::exception&) {  // the other ranks are told instead of left to wait
      ringspan::internal::refuse(*communicator, std::current_exception(), e.deadline, ringspan::kAgreeRounds);
    }
    *attention = new ringspan_attention{communicator, ringspan::Attention(p, o, *communicator, e), {}};
  });
}

int32_t ringspan_attention_create_with_plan(const ringspan_plan* plan, ringspan_comm* comm,
                                            const ringspan_execute_options* execute, void* arena, uint64_t arena_bytes,
                                            ringspan_attention** attention) {
  return guard([&] {
    if (attention != nullptr) *attention = nullptr;
    const auto& communicator = require(comm, "comm").communicator;
    ringspan::ExecuteOptions e;
    try {
      require(attention, "attention");
      e = execute_of(execute);
      require(plan, "plan");
      if (arena == nullptr && arena_bytes > 0) {
        throw InvalidArgument(fmt::format("arena is null, but arena_bytes is {}", arena_bytes));
      }
      if (arena != nullptr && arena_bytes == 0 && plan->plan.arena_bytes() > 0) {
        throw InvalidArgument(
            fmt::format("arena_bytes is 0, but arena is given and the plan needs {}", plan->plan.arena_bytes()));
      }
    } catch (const std::exception&) {
      ringspan::internal::refuse(*communicator, std::current_exception(), e.deadline, ringspan::kPlanAgreeRounds);
    }
    const std::span<std::byte> bytes(static_cast<std::byte*>(arena), arena_bytes);
    *attention = new ringspan_attention{communicator, ringspan::Attention(plan->plan, *communicator, e, bytes), {}};
  });
}

void ringspan_attention_destroy(ringspan_attention* attention) { delete attention; }

int32_t ringspan_attention_forward(ringspan_attention* attention, const ringspan_forward_tensors* tensors) {
  return guard([&] {
    ringspan::Attention& own = require(attention, "attention").attention;
    const ringspan_forward_tensors t = read_or_refuse(own, ringspan::Pass::forward, tensors);
    own.forward({.q = tensor_of(t.q),
                 .k = tensor_of(t.k),
                 .v = tensor_of(t.v),
                 .o = tensor_of(t.o),
                 .lse = tensor_of(t.lse),
                 .alibi_slopes = t.alibi_slopes,
                 .alibi_batch_stride = t.alibi_batch_stride,
                 .sinks = t.sinks});
  });
}

int32_t ringspan_attention_backward(ringspan_attention* attention, const ringspan_backward_tensors* tensors) {
  return guard([&] {
    ringspan::Attention& own = require(attention, "attention").attention;
    const ringspan_backward_tensors t = read_or_refuse(own, ringspan::Pass::backward, tensors);
    own.backward({.q = tensor_of(t.q),
                  .k = tensor_of(t.k),
                  .v = tensor_of(t.v),
                  .o = tensor_of(t.o),
                  .lse = tensor_of(t.lse),
                  .d_out = tensor_of(t.d_out),
                  .dlse = tensor_of(t.dlse),
                  .dq = tensor_of(t.dq),
                  .dk = tensor_of(t.dk),
                  .dv = tensor_of(t.dv),
                  .alibi_slopes = t.alibi_slopes,
                  .alibi_batch_stride = t.alibi_batch_stride,
                  .sinks = t.sinks,
                  .dsinks = t.dsinks});
  });
}

int32_t ringspan_attention_wait(ringspan_attention* attention) {
  return guard([&] { require(attention, "attention").attention.wait(); });
}

int32_t ringspan_attention_set_seed(ringspan_attention* attention, uint64_t seed) {
  return guard([&] { require(attention, "attention").attention.set_seed(seed); });
}

int32_t ringspan_attention_set_deadline(ringspan_attention* attention, double seconds) {
  return guard([&] { require(attention, "attention").attention.set_deadline(ringspan::Communicator::Seconds(seconds)); });
}

int32_t ringspan_attention_stats(const ringspan_attention* attention, int32_t pass, ringspan_pass_stats* stats) {
  return guard([&] {
    const ringspan::PassStats& latest = require(attention, "attention").attention.stats(pass_of(pass));
    const std::uint64_t size = size_of_struct(stats, "stats");
    const ringspan_pass_stats filled = {size, latest.seconds, latest.waiting_seconds, latest.sent_bytes, latest.received_bytes};
    std::memset(stats, 0, size);
    std::memcpy(stats, &filled, std::min<std::uint64_t>(size, sizeof filled));
  });
}

int32_t ringspan_attention_plan(const ringspan_attention* attention, ringspan_plan** plan) {
  return guard([&] {
    require(plan, "plan") = nullptr;
    *plan = new ringspan_plan{require(attention, "attention").attention.plan(), {}, {}};
  });
}

int32_t ringspan_attention_trace(ringspan_attention* attention, const char** json) {
  return guard([&] {
    require(json, "json") = nullptr;
    ringspan_attention& own = require(attention, "attention");
    own.trace = own.attention.trace_json();
    *json = own.trace.c_str();
  });
}

}  // extern "C"
