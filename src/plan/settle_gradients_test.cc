// Which tasks write gradients. That each row is written once is what plan_property_test checks of random plans for devices,
// too.
#include "plan/settle_gradients.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "plan/rewrite_rows.h"
#include "plan_testing/check_plan.h"
#include "plan_testing/random_problem.h"

namespace ringspan {
namespace {

using internal::LaunchKind;

struct Expected {
  const char* pattern;
  DType dtype = DType::bfloat16;
  bool dq = true, dk_dv = true;
  int ranks = 1;
  std::int64_t empty_rows = 0;  // of dq, and of dk and of dv, which are filled
};

void expect(const Expected& expected, DeviceKind device = DeviceKind::cuda) {
  Problem p;
  p.batch = 2;
  p.tokens_q = p.tokens_k = 64;
  p.heads = 4, p.kv_heads = 2;
  p.head_dim = p.head_dim_v = 4;
  p.dtype = expected.dtype;
  p.pattern = Pattern::parse(expected.pattern);
  p.ranks = expected.ranks;
  PlanOptions options;
  options.device = device;
  SCOPED_TRACE(testing::describe(p, options, 0));
  const std::vector<Plan> plans = testing::plan_all(p, options);
  ASSERT_EQ(testing::check_plans(plans), "");
  const internal::Program& program = plans.front().data().backward;
  for (const internal::AttendItem& item : program.attend_items) {
    if (item.operands[internal::kDq].view >= 0) {
      EXPECT_EQ(item.writes_dq, expected.dq);
    }
    if (item.operands[internal::kDk].view >= 0) {
      EXPECT_EQ(item.writes_dk_dv, expected.dk_dv);
    }
  }
  std::int64_t sums = 0, filled = 0;
  for (const internal::Region& region : program.regions) sums += region.component == internal::Component::gradients ? 1 : 0;
  EXPECT_EQ(sums, p.dtype == DType::float32 || p.ranks > 1 ? sums : (expected.dq ? 0 : 1) + (expected.dk_dv ? 0 : 2));
  internal::for_launches(program, [&](const internal::Launch& launch) {
    for (std::int64_t i = launch.first; i < launch.first + launch.count && launch.kind == LaunchKind::fill; ++i) {
      const internal::RowItem& item = program.row_items[static_cast<std::size_t>(i)];
      filled += item.batch_count * item.heads.count * item.rows;
    }
  });
  if (expected.dq && expected.dk_dv) {
    EXPECT_EQ(filled, expected.empty_rows);
  }
}

TEST(SettleGradients, OneTaskPerRow) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    for (const char* pattern : {"full", "causal", "causal & window:7,0"}) expect({pattern, dtype});
    // A quarter of the queries of each head, which read half of the keys of each kv head.
    expect({"dilated:64x4", dtype, true, true, 1, 2 * 4 * 48 + 2 * (2 * 2 * 32)});
  }
}

TEST(SettleGradients, RowsOfSeveralTasks) {
  expect({"prefix:9", DType::bfloat16, false, true});            // keys of the prefix, and the others
  expect({"dilated:16x1,64x4", DType::bfloat16, false, false});  // blocks would have four rows each
}

TEST(SettleGradients, OtherRanksAdd) { expect({"full", DType::bfloat16, false, false, 3}); }

TEST(SettleGradients, KernelsOfACpuAdd) { expect({"full", DType::bfloat16, false, false}, DeviceKind::cpu); }

}  // namespace
}  // namespace ringspan
