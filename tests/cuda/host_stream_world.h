// Cases whose tensors lie on the host and stream through a device, and what they give against the float64 oracle: on the
// emulated device, or on RINGSPAN_TEST_DEVICE.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cuda/device_world.h"
#include "oracle/random_problem.h"

namespace ringspan::testing {

inline void stream(Case& test, std::int64_t rows) {
  test.problem.ranks = 1;
  for (Sharding* sharding : {&test.problem.sharding_q, &test.problem.sharding_k}) {
    if (!sharding->lists.empty()) *sharding = {};  // those name every rank's rows
  }
  test.options.strategy = Strategy::automatic;
  test.options.computing_ranks = 0;
  test.options.host_tensors = true;
  test.options.keep_o_float32 = false;
  test.options.bucket_rows = rows;
  test.options.attend_kernel = test.options.attend_backward_kernel = "";
}

inline Case make_case(std::string_view pattern, std::int64_t rows, std::int64_t tokens = 61) {
  Case test;
  Problem& p = test.problem;
  p.batch = 2;
  p.tokens_q = p.tokens_k = tokens;
  p.heads = 4;
  p.kv_heads = 2;
  p.head_dim = 16;
  p.head_dim_v = 12;
  p.pattern = Pattern::parse(pattern);
  if (p.pattern.documents) p.cu_seqlens_q = {0, 7, 7, static_cast<std::int32_t>(tokens / 2), static_cast<std::int32_t>(tokens)};
  if (p.pattern.documents) p.batch = 1;
  stream(test, rows);
  return test;
}

inline Outputs stream_on_device(Case test, const Whole& whole) {
  test.execute.device = test_device();
  return run(test, whole, device_script(test.execute.device));
}

inline std::string judge_streamed(const Case& test) {
  const Whole whole(test);
  return judge(test, whole, stream_on_device(test, whole));
}

// A drawn problem of at most so much work, not yet to be streamed; none where host_tensors refuse it.
inline std::optional<Case> draw(std::uint64_t seed, std::uint64_t index, std::int64_t most_work) {
  const oracle::RandomCase drawn = oracle::draw_case(seed, index);
  const auto& dilated = drawn.problem.pattern.dilated;
  if (oracle::work_of(drawn.problem) > most_work || (dilated && dilated->dialect == Dialect::torchscale)) return std::nullopt;
  Case test;
  test.problem = drawn.problem;
  test.options = drawn.options;
  test.dlse = drawn.dlse;
  test.gain = drawn.gain;
  test.seed = drawn.data_seed;
  return test;
}

inline std::int64_t most_tokens(const Problem& p) { return std::max<std::int64_t>({p.tokens_q, p.tokens_k, 7}); }

}  // namespace ringspan::testing
