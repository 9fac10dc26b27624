// A check that cannot fail is worth nothing: the bugs that distributed attention is known for are planted into plans, one at a
// time, and the verification must notice each. What it must not notice is the same plan unspoiled.
#include <gtest/gtest.h>

#include <algorithm>

#include "api_testing/world.h"

namespace ringspan::testing {
namespace {

using internal::AttendItem;
using internal::Launch;
using internal::LaunchKind;
using internal::PlanData;
using internal::Program;
using internal::Stage;

Case make(std::string_view pattern, Strategy strategy) {
  Case test;
  Problem& p = test.problem;
  p.tokens_q = p.tokens_k = 60;
  p.heads = p.kv_heads = 2;
  p.head_dim = p.head_dim_v = 8;
  p.pattern = Pattern::parse(pattern);
  p.ranks = 3;
  test.options.strategy = strategy;
  test.options.bucket_rows = PlanOptions::kBucketNone;
  return test;
}

void expect_noticed(Case test, const std::function<void(PlanData&)>& bug) {
  EXPECT_EQ(judge(test), "");
  test.spoil = bug;
  EXPECT_NE(judge(test), "") << "the planted bug was not noticed";
}

void drop(std::vector<Launch>& launches, LaunchKind kind) {
  std::erase_if(launches, [kind](const Launch& launch) { return launch.kind == kind; });
}

TEST(PlantedBugs, ShiftedBandForward) {
  expect_noticed(make("causal", Strategy::ring), [](PlanData& data) {
    for (AttendItem& item : data.forward.attend_items) item.slice.hi += 1;
  });
}

TEST(PlantedBugs, ShiftedBandBackwardOnly) {
  expect_noticed(make("causal", Strategy::ring), [](PlanData& data) {
    for (AttendItem& item : data.backward.attend_items) item.slice.hi -= 1;
  });
}

TEST(PlantedBugs, DroppedBranch) {
  expect_noticed(make("dilated:10x1,30x2,60x4", Strategy::exchange), [](PlanData& data) {
    for (Program* program : {&data.forward, &data.backward}) {
      for (AttendItem& item : program->attend_items) {
        if (item.slice.q.stride == 4) item.slice.lo = item.slice.hi + 1;  // no pair
      }
    }
  });
}

// A step reads the keys that the step before received: diffusers and TransformerEngine both had it.
TEST(PlantedBugs, StaleKeyStep) {
  expect_noticed(make("full", Strategy::ring), [](PlanData& data) {
    std::vector<std::int64_t> slots;
    for (const Stage& stage : data.forward.stages) {
      for (const internal::Round& round : stage.rounds) {
        for (const internal::Transfer& transfer : round.transfers) {
          if (!transfer.send) slots.push_back(transfer.offset);
        }
      }
    }
    ASSERT_EQ(slots.size(), 2U);
    for (internal::View& view : data.forward.views) {
      if (view.in_arena && view.offset >= slots[1] &&
          (view.kind == internal::TensorKind::k || view.kind == internal::TensorKind::v)) {
        view.offset += slots[0] - slots[1];
      }
    }
  });
}

TEST(PlantedBugs, MissingMergeForward) {
  expect_noticed(make("full", Strategy::pass_q), [](PlanData& data) {
    for (Stage& stage : data.forward.stages) drop(stage.before, LaunchKind::merge);
  });
}

TEST(PlantedBugs, MissingSumBackward) {
  expect_noticed(make("full", Strategy::ring), [](PlanData& data) {
    for (Stage& stage : data.backward.stages) drop(stage.before, LaunchKind::add);
  });
}

TEST(PlantedBugs, KeysAndValuesSwapped) {
  expect_noticed(make("full", Strategy::exchange), [](PlanData& data) {
    for (AttendItem& item : data.backward.attend_items) std::swap(item.operands[internal::kDk], item.operands[internal::kDv]);
  });
}

TEST(PlantedBugs, ForgottenDelta) {
  expect_noticed(make("causal", Strategy::all_gather), [](PlanData& data) {
    for (Stage& stage : data.backward.stages) drop(stage.before, LaunchKind::delta);
  });
}

}  // namespace
}  // namespace ringspan::testing
