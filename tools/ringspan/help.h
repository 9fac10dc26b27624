// The pages of --help: options by group, wrapped to the terminal.
#pragma once

#include <memory>

namespace CLI {
class FormatterBase;
}

namespace ringspan::cli {

std::shared_ptr<CLI::FormatterBase> make_help_formatter();

}  // namespace ringspan::cli
