// The checks that plan_property_test rests on notice mistakes: each is planted into the plan of one rank of three.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>

#include "plan_testing/check_plan.h"

namespace ringspan {
namespace {

using internal::AttendItem;
using internal::LaunchKind;
using internal::PlanData;
using internal::Stage;
using internal::Transfer;

std::string check_with(const std::function<void(PlanData&)>& mistake) {
  Problem p;
  p.tokens_q = p.tokens_k = 30;
  p.heads = p.kv_heads = 2;
  p.head_dim = p.head_dim_v = 4;
  p.pattern = Pattern::parse("causal");
  p.ranks = 3;
  PlanOptions options;
  options.strategy = Strategy::ring;
  options.bucket_rows = PlanOptions::kBucketNone;
  std::vector<Plan> plans = testing::plan_all(p, options);
  PlanData data = plans[1].data();
  mistake(data);
  plans[1] = Plan(std::make_shared<const PlanData>(std::move(data)));
  return testing::check_plans(plans);
}

Transfer& first_transfer(PlanData& data, bool send) {
  for (Stage& stage : data.forward.stages) {
    for (internal::Round& round : stage.rounds) {
      for (Transfer& transfer : round.transfers) {
        if (transfer.send == send) return transfer;
      }
    }
  }
  throw std::logic_error("no such transfer");
}

void forget(PlanData& data, LaunchKind kind) {
  for (Stage& stage : data.forward.stages) {
    for (std::vector<internal::Launch>* launches : {&stage.before, &stage.compute}) {
      std::erase_if(*launches, [kind](const internal::Launch& launch) { return launch.kind == kind; });
    }
  }
}

struct Mistake {
  const char* name;
  std::function<void(PlanData&)> plant;
  const char* noticed;
};

class CheckPlans : public ::testing::TestWithParam<Mistake> {};

TEST_P(CheckPlans, Notice) {
  EXPECT_EQ(check_with([](PlanData&) {}), "");
  const std::string found = check_with(GetParam().plant);
  EXPECT_NE(found.find(GetParam().noticed), std::string::npos) << "found: '" << found << "'";
}

INSTANTIATE_TEST_SUITE_P(
    Mistakes, CheckPlans,
    ::testing::Values(
        Mistake{"WiderBand", [](PlanData& d) { d.forward.attend_items[0].slice.hi += 1; },
                "forward: the tasks are not the pattern"},
        Mistake{"TaskTwice", [](PlanData& d) { d.backward.attend_items.push_back(d.backward.attend_items[0]); },
                "backward: the tasks are not the pattern"},
        Mistake{"MorePairs", [](PlanData& d) { d.forward.pairs += 1; }, "the counts of pairs"},
        Mistake{"ShorterMessage", [](PlanData& d) { first_transfer(d, true).bytes -= 4; }, "not the size of its bundle"},
        Mistake{"OtherPeer", [](PlanData& d) { first_transfer(d, true).peer = 0; }, "in round"},
        Mistake{"AddsWhatIsCopied", [](PlanData& d) { first_transfer(d, false).op = internal::TransferOp::add; },
                "the ends differ"},
        Mistake{"BundleOfAnother", [](PlanData& d) { d.forward.bundles[0].boxes[0].positions.first += 1; }, "the ends differ"},
        Mistake{"MessageToItself", [](PlanData& d) { first_transfer(d, true).peer = 1; }, "a message to itself"},
        Mistake{"ForgottenPack", [](PlanData& d) { forget(d, LaunchKind::copy); }, "sends what was never written"},
        Mistake{"ForgottenStart", [](PlanData& d) { forget(d, LaunchKind::fill); }, "reads what was never written"},
        Mistake{"ForgottenResults",
                [](PlanData& d) {
                  for (AttendItem& item : d.forward.attend_items) item.operands[internal::kResult].view = -1;
                },
                "a row of lse is never written"},
        Mistake{"ResultsTooEarly",  // the last task has them; so has the first now
                [](PlanData& d) {
                  std::vector<AttendItem>& items = d.forward.attend_items;
                  for (int i = internal::kResult; i <= internal::kResult32; ++i)
                    items.front().operands[i] = items.back().operands[i];
                },
                "reads what was never written in m, l"},
        Mistake{"TooEarly",  // computes with what arrives meanwhile
                [](PlanData& d) {
                  std::vector<Stage>& stages = d.forward.stages;
                  for (std::size_t i = 1; i < stages.size(); ++i) {
                    if (stages[i].compute.empty()) continue;
                    std::swap(stages[i].compute, stages[i - 1].compute);
                    return;
                  }
                },
                "forward: stage"},
        Mistake{"RegionsOverlap",
                [](PlanData& d) {
                  for (internal::Region& region : d.forward.regions) region.offset = 0;
                },
                "overlaps the next one"},
        Mistake{"WritesItsInput",
                [](PlanData& d) {
                  for (AttendItem& item : d.forward.attend_items) item.operands[internal::kAcc] = item.operands[internal::kQ];
                },
                "writes the input q"},
        Mistake{"OtherFingerprint", [](PlanData& d) { d.fingerprint += 1; }, "the fingerprints differ"}),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace ringspan
