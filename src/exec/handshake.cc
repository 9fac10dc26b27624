#include "exec/handshake.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <exception>
#include <limits>
#include <string_view>
#include <vector>

#include "base/fnv1a.h"
#include "comm/agree.h"
#include "plan/capability.h"
#include "plan/kernel_choice.h"
#include "ringspan/error.h"
#include "ringspan/version.h"

namespace ringspan::internal {
namespace {

std::int64_t hash_text(std::string_view text) { return fnv1a_field(text.data(), text.size()); }

template <typename T>
std::int64_t hash_list(const std::vector<T>& list) {
  return fnv1a_field(list.data(), list.size() * sizeof(T));
}

std::string flag_text(std::int64_t value) { return value != 0 ? "true" : "false"; }
std::string real_text(std::int64_t bits) { return fmt::format("{}", std::bit_cast<float>(static_cast<std::uint32_t>(bits))); }
std::string dtype_text(std::int64_t value) { return std::string(to_string(static_cast<DType>(value))); }
std::string strategy_text(std::int64_t value) { return std::string(to_string(static_cast<Strategy>(value))); }

// Texts and lists are compared by a hash, everything else as it is.
class Fields {
 public:
  void number(std::string_view name, std::int64_t value, AgreeText text = decimal_text) {
    list_.push_back({name, value, text, false});
  }
  void flag(std::string_view name, bool value) { number(name, value ? 1 : 0, flag_text); }
  void hash(std::string_view name, std::int64_t value) { number(name, value, hexadecimal_text); }
  void real(std::string_view name, float value) { number(name, std::bit_cast<std::uint32_t>(value), real_text); }
  void minimum(std::string_view name, std::int64_t value) { list_.push_back({name, value, decimal_text, true}); }
  void most(std::string_view name, std::int64_t value) { minimum(name, value); }  // both extremes become known
  std::span<const AgreeField> list() const { return list_; }

 private:
  std::vector<AgreeField> list_;
};

// A budget of 0 means "unlimited": it must not win.
constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

void add_problem(const Problem& problem, Fields& fields) {
  fields.number("ranks", problem.ranks);
  fields.number("batch", problem.batch);
  fields.number("tokens_q", problem.tokens_q);
  fields.number("tokens_k", problem.tokens_k);
  fields.number("heads", problem.heads);
  fields.number("kv_heads", problem.kv_heads);
  fields.number("head_dim", problem.head_dim);
  fields.number("head_dim_v", problem.head_dim_v);
  fields.number("dtype", static_cast<std::int64_t>(problem.dtype), dtype_text);
  fields.hash("pattern (hash)", hash_text(problem.pattern.to_string()));
  fields.hash("cu_seqlens_q (hash)", hash_list(problem.cu_seqlens_q));
  fields.hash("cu_seqlens_k (hash)", hash_list(problem.cu_seqlens_k));
  fields.hash("lengths_q (hash)", hash_list(problem.lengths_q));
  fields.hash("lengths_k (hash)", hash_list(problem.lengths_k));
  fields.hash("starts_k (hash)", hash_list(problem.starts_k));
  fields.real("scale", problem.scale);
  fields.real("softcap", problem.softcap);
  fields.flag("alibi", problem.alibi);
  fields.flag("sinks", problem.sinks);
  fields.real("dropout", problem.dropout);
  fields.hash("seed", std::bit_cast<std::int64_t>(problem.seed));
  fields.hash("sharding_q (hash)", hash_text(problem.sharding_q.to_string()));
  fields.hash("sharding_k (hash)", hash_text(problem.sharding_k.to_string()));
  fields.flag("replicated_q", problem.replicated_q);
}

void add_options(const PlanOptions& options, Fields& fields) {
  fields.number("strategy", static_cast<std::int64_t>(options.strategy), strategy_text);
  fields.number("computing_ranks", options.computing_ranks);
  fields.flag("backward", options.backward);
  fields.flag("keep_o_float32", options.keep_o_float32);
  fields.flag("host_tensors", options.host_tensors);
}

void add_cost(const PlanOptions& options, Fields& fields) {
  fields.number("cost.flops_per_second", options.cost.flops_per_second);
  fields.number("cost.bytes_per_second", options.cost.bytes_per_second);
  fields.number("cost.message_nanoseconds", options.cost.message_nanoseconds);
  fields.number("cost.host_bytes_per_second", options.cost.host_bytes_per_second);
}

// A kernel that cannot be had is the planner's to refuse.
RankOverhead own_overhead(const Problem& problem, const PlanOptions& options) {
  try {
    RankOverhead own;
    own.forward_scratch = kernel_scratch_bytes(problem, options, Pass::forward);
    if (options.backward) own.backward_scratch = kernel_scratch_bytes(problem, options, Pass::backward);
    own.task_lists = options.device != DeviceKind::cpu;
    own.keys_without_state = keys_without_state(problem, options);
    own.gradient_sums = !writes_gradients(options);
    own.ungrouped_tasks = !groups_tasks(options);
    return own;
  } catch (const Error&) {
    return {};
  }
}

void check_own(const Communicator& communicator, const Problem& problem, const PlanOptions& options,
               Communicator::Seconds deadline) {
  problem.validate();
  if (communicator.size() != problem.ranks) {
    throw InvalidArgument(
        fmt::format("ranks ({}) must equal the size of the communicator ({})", problem.ranks, communicator.size()));
  }
  validate_options(problem, options, communicator.rank());
  check_deadline(deadline);
}

// Above those of every attention that this process has taken part in.
std::atomic<std::int64_t> next_number{0};

}  // namespace

std::uint64_t agree_on_plan(Communicator& communicator, const Plan* plan, const std::exception_ptr& own_error,
                            Communicator::Seconds deadline) {
  if (communicator.size() == 1) return 0;
  Fields fields;  // those of the fingerprint; which ones they are does not depend on the plan
  add_problem(plan == nullptr ? Problem{} : plan->problem(), fields);
  add_options(plan == nullptr ? PlanOptions{} : plan->options(), fields);
  fields.number(
      "bucket_rows of plans made apart, with a memory budget or tuned sizes (give bucket_rows, or let the attention plan)",
      plan == nullptr ? 0 : plan->bucket_rows());
  fields.hash("the plan (fingerprint)", plan == nullptr ? 0 : std::bit_cast<std::int64_t>(plan->fingerprint()));
  fields.most("number", next_number);
  Agreement agreement(communicator);
  const auto extents = agreement.agree(fields.list(), own_error, usable_deadline(deadline), kPlanAgreeRounds);
  const std::int64_t number = extents.back().maximum;
  for (std::int64_t next = next_number; next <= number && !next_number.compare_exchange_weak(next, number + 1);) {
  }
  return static_cast<std::uint64_t>(number);
}

void check_deadline(Communicator::Seconds deadline) {
  if (!(deadline.count() > 0)) throw InvalidArgument(fmt::format("deadline ({} s) must be positive", deadline.count()));
}

Communicator::Seconds usable_deadline(Communicator::Seconds deadline) {
  return deadline.count() > 0 ? deadline : Communicator::Seconds(30);
}

void refuse(Communicator& communicator, const std::exception_ptr& own_error, Communicator::Seconds deadline,
            std::uint64_t first_round) {
  if (communicator.size() > 1) Agreement(communicator).agree({}, own_error, usable_deadline(deadline), first_round);
  std::rethrow_exception(own_error);
}

PlanOptions agree_on_problem(Communicator& communicator, const Problem& problem, const PlanOptions& options,
                             Communicator::Seconds deadline) {
  Fields fields;
  try {
    check_own(communicator, problem, options, deadline);
    if (communicator.size() == 1) return options;
    fields.number("the version of ringspan", RINGSPAN_VERSION);
    add_problem(problem, fields);
    add_options(options, fields);
    fields.number("bucket_rows", options.bucket_rows);
    add_cost(options, fields);
    const RankOverhead own = own_overhead(problem, options);
    fields.most("forward_scratch", own.forward_scratch);
    fields.most("backward_scratch", own.backward_scratch);
    fields.most("task_lists", own.task_lists ? 1 : 0);
    fields.most("gradient_sums", own.gradient_sums ? 1 : 0);
    fields.most("ungrouped_tasks", own.ungrouped_tasks ? 1 : 0);
    fields.minimum("keys_without_state", own.keys_without_state);
    fields.minimum("tuned.bucket_rows", options.tuned.bucket_rows);
    fields.minimum("memory_budget", options.memory_budget == 0 ? kUnlimited : options.memory_budget);
  } catch (...) {  // such a problem, or such options, have nothing that could be compared; or there is no memory for it
    refuse(communicator, std::current_exception(), deadline, kAgreeRounds);
  }
  Agreement agreement(communicator);
  const auto extents = agreement.agree(fields.list(), nullptr, deadline);
  PlanOptions agreed = options;
  const std::span<const AgreeExtent> last = std::span(extents).last(8);  // of forward_scratch and what follows it
  agreed.tuned.bucket_rows = last[6].minimum;                            // 0 where a rank has measured nothing
  agreed.memory_budget = last[7].minimum == kUnlimited ? 0 : last[7].minimum;
  const RankOverhead most{last[0].maximum, last[1].maximum,      last[2].maximum != 0,
                          last[5].minimum, last[3].maximum != 0, last[4].maximum != 0};
  if (agreed.memory_budget != 0) agreed.most_overhead = most;
  // Which buckets are chosen depends on these, with a budget or without.
  if (writes_gradients(options)) agreed.most_overhead.gradient_sums = most.gradient_sums;
  if (groups_tasks(options)) agreed.most_overhead.ungrouped_tasks = most.ungrouped_tasks;
  return agreed;
}

}  // namespace ringspan::internal
