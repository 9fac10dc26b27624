// Which kernel a shape and a name get.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "kernels/attend.h"
#include "kernels/attend_harness.h"
#include "ringspan/error.h"

namespace ringspan::kernels {
namespace {

TEST(AttendKernels, ReferenceIsLastAndSupportsEverything) {
  for (const auto kernels : {attend_kernels(), attend_backward_kernels()}) {
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
      AttendShape shape{dtype, 256, 1, 7, true, true, true, 5};
      bool found = false;
      for (const AttendKernel& kernel : kernels)
        found = found || (kernel.name.ends_with("_reference") && kernel.supports(shape));
      EXPECT_TRUE(found) << to_string(dtype);
    }
    EXPECT_TRUE(kernels.back().name.ends_with("_reference"));
  }
}

TEST(AttendKernels, SelectionByName) {
  AttendShape shape{DType::bfloat16, 64, 64, 1, false, false, false, 1};
  EXPECT_EQ(select_attend(shape, "reference").name, "attend_bf16_reference");
  EXPECT_EQ(select_attend(shape, "attend_bf16_reference").name, "attend_bf16_reference");
  EXPECT_EQ(select_attend_backward(shape, "reference").name, "attend_backward_bf16_reference");
  EXPECT_TRUE(select_attend(shape).supports(shape));
  EXPECT_TRUE(select_attend(shape).is_default());
  for (const AttendKernel& kernel : attend_kernels()) {  // others run when named
    if (!kernel.supports(shape)) continue;
    EXPECT_EQ(select_attend(shape, kernel.name).name, kernel.name);
  }
  EXPECT_THROW(select_attend(shape, "attend_f32_reference"), Unsupported);
  shape.head_dim = 257;
  EXPECT_THROW(select_attend(shape), Unsupported);
  try {
    select_attend(shape, "fast");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("attend_f32_reference"), std::string::npos) << error.what();
  }
}

// float32 goes through tiles of AMX from some hundred queries and keys on.
TEST(MixedKernel, IsTilesForManyAndVectorsForFew) {
  using namespace testing;
  const auto find = [](std::span<const AttendKernel> kernels, const std::string& name) -> const AttendKernel* {
    for (const AttendKernel& kernel : kernels) {
      if (kernel.name == name) return &kernel;
    }
    return nullptr;
  };
  for (const auto& [n_q, n_k, as] : std::vector<std::tuple<int, int, std::string>>{
           {256, 512, "amx"}, {300, 700, "amx"}, {255, 700, "avx512"}, {300, 511, "avx512"}, {1, 600, "avx512"}}) {
    Spec s;
    s.n_q = n_q, s.n_k = n_k, s.head_dim = s.head_dim_v = 32;
    World mixed(s), named(s);
    const AttendKernel* const forward = find(attend_kernels(), "attend_f32_mixed");
    const AttendKernel* const backward = find(attend_backward_kernels(), "attend_backward_f32_mixed");
    const AttendShape shape = mixed.params(1).shape;
    if (forward == nullptr || !forward->supports(shape)) GTEST_SKIP() << "this machine has no AMX";
    EXPECT_EQ(&select_attend(shape), forward);
    EXPECT_EQ(&select_attend_backward(shape), backward);
    const std::vector<Part> parts{mixed.whole()};
    run_kernel(*forward, mixed, parts, 2);
    run_kernel(*find(attend_kernels(), "attend_f32_" + as), named, parts, 2);
    const DenseResult truth = exact_attention(mixed, parts, false);
    set_final_rows(mixed, truth), set_final_rows(named, truth);
    run_kernel(*backward, mixed, parts, 2);
    run_kernel(*find(attend_backward_kernels(), "attend_backward_f32_" + as), named, parts, 2);
    for (const auto tensor : {&World::m, &World::l, &World::acc, &World::dq, &World::dk, &World::dv})
      EXPECT_EQ((mixed.*tensor).bytes(), (named.*tensor).bytes()) << n_q << " x " << n_k;
  }
}

}  // namespace
}  // namespace ringspan::kernels
