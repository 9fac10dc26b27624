// Compiled with python/without_fmt in front: its <fmt/format.h> is found there.
#include "without_fmt/cases.h"

std::vector<std::string> rendered_without_fmt() { return rendered(); }
