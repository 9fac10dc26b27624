/* The header is C: compiled as such, with the sizes that a ctypes declaration of the structs must have. */
#include <ringspan/ringspan_c.h>

_Static_assert(sizeof(ringspan_tensor) == 32, "4 members of 8 bytes");
_Static_assert(sizeof(ringspan_forward_tensors) == 8 + 5 * 32 + 3 * 8, "no padding");
_Static_assert(sizeof(ringspan_backward_tensors) == 8 + 10 * 32 + 4 * 8, "no padding");
_Static_assert(sizeof(ringspan_pass_stats) == 40, "no padding");
_Static_assert(sizeof(ringspan_execute_options) == 56, "no padding");
_Static_assert(sizeof(ringspan_nccl_options) == 40, "no padding");
_Static_assert(sizeof(ringspan_memory_line) == 48, "no padding");

const char* version_seen_by_c(void) { return ringspan_version(); }
