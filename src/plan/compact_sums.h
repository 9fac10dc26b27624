// Compact sums: sums of gradients in float32 take room only for rows that anything touches, which where tasks write gradients
// themselves (settle_gradients.h) may be few: of LongNet on two ranks those of the branch that reaches across them.
//
// A view of sums becomes a view for each of its fills, dense, with the rows and heads of that. Views that something touches
// otherwise than inside of one fill, and those of regions that messages lie in, stay as they are.
//
// Between assemble() and finish(). Cost: O(references x fills of a view); allocates.
#pragma once

#include "plan/builder.h"

namespace ringspan::internal {

// group: query heads per kv head.
void compact_sums(ProgramBuilder& builder, int group);

}  // namespace ringspan::internal
