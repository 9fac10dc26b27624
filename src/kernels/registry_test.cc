// Which kernel a shape and a name get.
#include <gtest/gtest.h>

#include <string>

#include "kernels/attend.h"
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

}  // namespace
}  // namespace ringspan::kernels
